"""Transforms with one deliberate bug each, in a module so that they pickle; see `test_broken_transforms.py`."""

import random

import torch

import muonfx as mfx
from muonfx import tree

NOTHING = mfx.Donation()


def no_state(params):
    return mfx.core.EmptyState()


def traces(params):
    return mfx.transforms.MomentumState(tree.map(torch.zeros_like, params))


def of_each_leaf(*, factor=None, **declared):
    """Make a transform of a function of one leaf, and of a number if one is given."""

    def decorate(function):
        def returned(*numbers):
            return no_state, lambda updates, state, params=None: (
                tree.map(lambda u: function(u, *numbers), updates),
                state,
            )

        def without_numbers():
            return returned()

        def with_a_number(factor: float = factor):
            return returned(factor)

        made = without_numbers if factor is None else with_a_number
        made.__name__ = made.__qualname__ = function.__name__
        return mfx.transform(made, **declared)

    return decorate


@of_each_leaf(locality=mfx.Locality.ELEMENT, factor=2.0)
def writes_to_its_gradients(u, factor):
    return u.mul_(factor)


@mfx.transform(locality=mfx.Locality.ELEMENT)
def writes_to_its_state(decay: float = 0.9):
    def update(updates, state, params=None):
        def step(u, trace):
            return trace.mul_(decay).add_(u).to(u.dtype, copy=True)

        return tree.map(step, updates, state.trace), state

    return traces, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def keeps_hidden_python_state(factor: float = 0.5):
    calls = [0]

    def update(updates, state, params=None):
        calls[0] += 1
        return tree.map(lambda u: u * (-factor) ** (calls[0] % 2), updates), state

    return no_state, update


@of_each_leaf(locality=mfx.Locality.ELEMENT)
def draws_hidden_randomness(u):
    return u + random.random()


@of_each_leaf(locality=mfx.Locality.ELEMENT)
def returns_another_dtype(u):
    return u.float() * 2


@of_each_leaf(locality=mfx.Locality.ELEMENT)
def narrows_float64(u):
    return u.float() * 2 if u.dtype is torch.float64 else u * 2


@mfx.transform(locality=mfx.Locality.TREE)
def takes_the_dtype_of_the_first_leaf():
    def update(updates, state, params=None):
        first = next(tree.tensors(updates), None)
        return tree.map(lambda u: u.to(first.dtype) * 2, updates), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def narrows_its_float64_state(decay: float = 0.5):
    def update(updates, state, params=None):
        trace = tree.map(lambda u, old: u if old is None else decay * old.float() + u.float(), updates, state.trace)
        kept = tree.map(
            lambda old, new: old if new is None else new.to(old.dtype if old.itemsize < 8 else torch.float32),
            state.trace,
            trace,
        )
        return tree.map(lambda new, u: new.to(u.dtype, copy=True), trace, updates), mfx.transforms.MomentumState(kept)

    return traces, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def lets_its_state_drift(decay: float = 0.5):
    def init(params):
        return mfx.transforms.MomentumState(tree.map(lambda p: torch.zeros_like(p, dtype=torch.float64), params))

    def update(updates, state, params=None):
        trace = tree.map(lambda u, old: u if old is None else (decay * old).to(u.dtype) + u, updates, state.trace)
        kept = tree.map(lambda old, new: old if new is None else new, state.trace, trace)
        return tree.map(torch.clone, trace), mfx.transforms.MomentumState(kept)

    return init, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def returns_its_state_as_updates(decay: float = 0.5):
    def update(updates, state, params=None):
        trace = tree.map(lambda u, old: (decay * old + u).to(old.dtype), updates, state.trace)
        kept = tree.map(lambda old, new: old if new is None else new, state.trace, trace)
        return tree.map(lambda new, u: new.to(u.dtype), trace, updates), mfx.transforms.MomentumState(kept)

    return traces, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def keeps_the_parameters_themselves():
    def init(params):
        return mfx.transforms.EmaParamsState(params)

    def update(updates, state, params=None):
        return tree.map(lambda u, p: u - p.to(u.dtype), updates, state.average), state

    return init, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def forgets_absent_gradients(factor: float = 2.0):
    def update(updates, state, params=None):
        leaves, treedef = tree.flatten(updates)
        return tree.unflatten(treedef, [leaf * factor for leaf in leaves]), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def decays_the_state_of_absent_gradients(decay: float = 0.5):
    def update(updates, state, params=None):
        def step(old, u):
            return old * decay + (0.0 if u is None else u.to(old.dtype))

        trace = tree.map(step, state.trace, updates)
        return tree.map(lambda u, new: new.to(u.dtype, copy=True), updates, trace), mfx.transforms.MomentumState(trace)

    return traces, update


@mfx.transform(locality=mfx.Locality.LEAF)
def branches_on_values(limit: float = 1.0):
    def clip(u):
        norm = u.norm()
        return u * (limit / norm).to(u.dtype) if norm > limit else u

    def update(updates, state, params=None):
        return tree.map(clip, updates), state

    return no_state, update


@of_each_leaf(locality=mfx.Locality.ELEMENT)
def is_not_elementwise(u):
    return u - u.mean() if u.numel() else u


@of_each_leaf(locality=mfx.Locality.MATRIX)
def is_not_matrixwise(u):
    return u / (1 + u.abs().sum())


@mfx.transform(locality=mfx.Locality.LEAF)
def is_not_leafwise():
    def update(updates, state, params=None):
        total = mfx.global_norm(updates)
        return tree.map(lambda u: (u / (1 + total)).to(u.dtype), updates), state

    return no_state, update


@mfx.transform
def takes_sums_only_where_it_has_leaves():
    def update(updates, state, params=None, *, sum_over_leaves):
        if not list(tree.tensors(updates)):
            return updates, state
        total = sum_over_leaves(tree.map(lambda u: u.abs().sum(dtype=torch.float64), updates))
        return tree.map(lambda u: (u / (1 + total)).to(u.dtype), updates), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def breaks_its_donation_promise(decay: float = 0.5):
    def update(updates, state, params=None, *, donate=None):
        # A view is another tensor, but not another storage.
        return tree.map(lambda u: u.view(u.shape), updates), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def donates_more_than_it_was_given(factor: float = 2.0):
    def update(updates, state, params=None, *, donate=NOTHING):
        if donate.state:
            return tree.map(lambda u: u.mul_(factor), updates), state
        return tree.map(lambda u: u * factor, updates), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def computes_differently_when_donated(factor: float = 2.0):
    def update(updates, state, params=None, *, donate=NOTHING):
        if donate.updates and donate.state:
            return tree.map(lambda u: u.mul_(factor * 1.5), updates), state
        return tree.map(lambda u: u * factor, updates), state

    return no_state, update


@of_each_leaf(locality=mfx.Locality.ELEMENT, factor=2.0)
def cuts_the_graph(u, factor):
    return u.detach() * u * factor


@mfx.transform(locality=mfx.Locality.ELEMENT)
def cuts_the_graph_of_its_number(factor: float = 2.0):
    def update(updates, state, params=None):
        fixed = factor.detach() if isinstance(factor, torch.Tensor) else factor
        return tree.map(lambda u: (u * fixed).to(u.dtype), updates), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def allocates_state_in_memory():
    def init(params):
        return mfx.transforms.MomentumState(tree.map(lambda p: torch.zeros(p.shape, dtype=p.dtype), params))

    def update(updates, state, params=None):
        return tree.map(torch.clone, updates), state

    return init, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def keeps_the_graph_of_parameters():
    def init(params):
        return mfx.transforms.EmaParamsState(tree.map(lambda p: p * 1.0, params))

    def update(updates, state, params=None):
        return tree.map(torch.clone, updates), state

    return init, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def counts_in_python(rate: float = 0.5):
    def init(params):
        return {"step": 0}

    def update(updates, state, params=None):
        step = state["step"] + 1
        out = tree.map(lambda u: u * rate**step, updates)
        return out, {"step": step}

    return init, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def shares_one_buffer_between_updates():
    def update(updates, state, params=None):
        leaves, treedef = tree.flatten(updates)
        return tree.unflatten(treedef, [x if x is None else x.new_zeros(()).expand(x.shape) for x in leaves]), state

    return no_state, update


# ------------------------------------------------------------------------------------------------ false declarations


@mfx.transform(locality=mfx.Locality.ELEMENT, reads_params=False)
def reads_parameters_that_it_disowns(factor: float = 0.5):
    def update(updates, state, params=None):
        if params is None:
            return tree.map(lambda u: u * 1.0, updates), state
        return tree.map(lambda u, p: u + factor * p.to(u.dtype), updates, params), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT, reads_params=False)
def reads_parameters_at_init():
    def init(params):
        return mfx.transforms.EmaParamsState(tree.map(lambda p: p.detach() * 1.0, params))

    def update(updates, state, params=None):
        return tree.map(lambda u, p: u - p.to(u.dtype), updates, state.average), state

    return init, update


@of_each_leaf(locality=mfx.Locality.ELEMENT, factor=0.5)
def looks_at_the_number_of_dims(u, factor):
    return u * (factor if u.ndim >= 2 else 1.0)


@of_each_leaf(locality=mfx.Locality.ELEMENT)
def is_not_elementwise_where_leaves_are_large(u):
    return u - u.mean() if u.numel() > 4096 else u * 1.0


@mfx.transform(locality=mfx.Locality.LEAF)
def is_not_leafwise_where_leaves_are_large():
    def update(updates, state, params=None):
        large = [u for u in tree.tensors(updates) if u.numel() > 4096]
        total = sum(u.double().abs().sum() for u in large)
        return tree.map(lambda u: (u / (1 + total)).to(u.dtype) if u.numel() > 4096 else u * 1.0, updates), state

    return no_state, update


@mfx.transform(locality=mfx.Locality.ELEMENT)
def depends_on_the_order_of_a_dict(factor: float = 2.0):
    def update(updates, state, params=None):
        if not isinstance(updates, dict) or not updates:
            return tree.map(lambda u: u * 1.0, updates), state
        first = next(iter(updates))
        double = tree.map(lambda u: u * factor, updates)
        single = tree.map(lambda u: u * 1.0, updates)
        return {key: double[key] if key == first else single[key] for key in updates}, state

    return no_state, update


@mfx.transform(locality=mfx.Locality.LEAF)
def knows_how_many_leaves_there_are():
    def update(updates, state, params=None):
        number = sum(1 for _ in tree.tensors(params))
        return tree.map(lambda u: u / (1 + number), updates), state

    return no_state, update


def rounds_in_word_only(tx, dtype, device):
    return torch.bfloat16


@of_each_leaf(locality=mfx.Locality.MATRIX, rounds_to=rounds_in_word_only, factor=0.7)
def says_that_it_rounds(u, factor):
    return u * factor


@of_each_leaf(locality=mfx.Locality.MATRIX, rounds_to=rounds_in_word_only, factor=0.7)
def rounds_its_input_only(u, factor):
    return u.to(torch.bfloat16).to(u.dtype) * factor


def rows_as_stacks(tx, shapes):
    return tx, {name: (1, shape[-1]) for name, shape in shapes.items() if len(shape) >= 2}


@of_each_leaf(locality=mfx.Locality.LEAF, on_stacks=rows_as_stacks)
def calls_its_rows_matrices(u):
    return u / (1 + u.abs().sum())


def resolved_to_another(tx, params):
    return tx.replace(factor=1.0)


@of_each_leaf(locality=mfx.Locality.ELEMENT, resolve=resolved_to_another, factor=2.0)
def resolves_to_something_else(u, factor):
    return u * factor


def resolved_by_values(tx, params):
    return tx.replace(
        factor=tx.arguments["factor"]
        if not list(tree.tensors(params))
        else float(sum(leaf.double().sum() for leaf in tree.tensors(params)))
    )


@of_each_leaf(locality=mfx.Locality.ELEMENT, resolve=resolved_by_values, factor=2.0)
def resolves_by_values(u, factor):
    return u * factor


@mfx.transform(locality=mfx.Locality.TREE, combinator=mfx.core.Combinator(mfx.Locality.ELEMENT))
def normalizes_around(inner: mfx.Transform):
    def init(params):
        return inner.init(params)

    def update(updates, state, params=None, **extras):
        total = 1 + sum(u.double().abs().sum() for u in tree.tensors(updates))
        return inner.run(tree.map(lambda u: (u / total).to(u.dtype), updates), state, params, **extras)

    return init, update


@mfx.transform(locality=mfx.Locality.TREE, combinator=mfx.core.Combinator(mfx.Locality.ELEMENT))
def hands_on_leaves_of_its_own(inner: mfx.Transform):
    def init(params):
        return inner.init({"all": params})

    def update(updates, state, params=None, **extras):
        out, state = inner.run({"all": updates}, state, {"all": params}, **extras)
        return out["all"], state

    return init, update


@mfx.transform
def sums_norms_instead_of_squares():
    def update(updates, state, params=None, *, sum_over_leaves):
        total = sum_over_leaves(tree.map(lambda u: u.double().square().sum().sqrt(), updates))
        return tree.map(lambda u: (u / (1 + total)).to(u.dtype), updates), state

    return no_state, update


def a_closure():
    def halves(updates, params):
        return tree.map(lambda u: u / 2, updates)

    return mfx.stateless(halves, mfx.Locality.ELEMENT)
