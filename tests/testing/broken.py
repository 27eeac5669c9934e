"""Transforms with one deliberate bug each, in a module so that they pickle; see `test_broken_transforms.py`."""

import random

import torch

import muonfx as mfx
from muonfx import tree
from muonfx.transforms import EmaParamsState, MomentumState

NOTHING = mfx.Donation()
ELEMENT, MATRIX, LEAF, TREE = mfx.Locality


def no_state(params):
    return mfx.core.EmptyState()


def traces(params, dtype=None):
    return MomentumState(tree.map(lambda p: torch.zeros_like(p, dtype=dtype), params))


def named(make, name, **declared):
    make.__name__ = make.__qualname__ = name
    return mfx.transform(make, **declared)


def of_trees(locality=ELEMENT, init=no_state, **declared):
    """Make a transform of a function of updates, state and parameters."""

    def decorate(function, name=None):
        def make():
            return init, lambda updates, state, params=None: (function(updates, state, params), state)

        return named(make, name or function.__name__, locality=locality, **declared)

    return decorate


def of_a_leaf(name, function, locality=ELEMENT, factor=None, **declared):
    """Make a transform of a function of one leaf, and of a number if one is given."""

    def returned(*numbers):
        return no_state, lambda updates, state, params=None: (tree.map(lambda u: function(u, *numbers), updates), state)

    def without_numbers():
        return returned()

    def with_a_number(factor: float = factor):
        return returned(factor)

    make = without_numbers if factor is None else with_a_number
    return named(make, name, locality=locality, **declared)


def of_traces(dtype=None):
    """Make a transform of a function of a gradient and its trace that returns an update and the next trace."""

    def decorate(function):
        def update(updates, state, params=None):
            leaves, treedef = tree.flatten(updates)
            pairs = zip(leaves, tree.leaves(state.trace), strict=True)
            both = [(u, trace) if u is None else function(u, trace) for u, trace in pairs]
            out, kept = (tree.unflatten(treedef, [pair[place] for pair in both]) for place in (0, 1))
            return out, MomentumState(kept)

        def make():
            return lambda params: traces(params, dtype), update

        return named(make, function.__name__, locality=ELEMENT)

    return decorate


def of_donations(name, function):
    """Make a transform from a function of one leaf and of the donation."""

    def make():
        def update(updates, state, params=None, *, donate=NOTHING):
            return tree.map(lambda u: function(u, donate), updates), state

        return no_state, update

    return named(make, name, locality=ELEMENT)


def normalized_if_long(u):
    norm = u.norm()
    return u * (1.0 / norm).to(u.dtype) if norm > 1.0 else u


def rows_as_matrices(tx, shapes):
    return tx, {name: (1, shape[-1]) for name, shape in shapes.items() if len(shape) >= 2}


def rounds_in_word_only(tx, dtype, device):
    return torch.bfloat16


def resolved_by_values(tx, params):
    leaves = list(tree.tensors(params))
    return tx.replace(factor=float(sum(leaf.double().sum() for leaf in leaves))) if leaves else tx


OF_A_LEAF = {
    "writes_to_its_gradients": (lambda u: u.mul_(2.0), {}),
    "draws_hidden_randomness": (lambda u: u + random.random(), {}),
    "narrows_float64": (lambda u: u.float() * 2 if u.dtype is torch.float64 else u * 2, {}),
    "branches_on_values": (normalized_if_long, {"locality": LEAF}),
    "is_not_elementwise": (lambda u: u - u.mean() if u.numel() else u, {}),
    "is_not_elementwise_where_leaves_are_large": (lambda u: u - u.mean() if u.numel() > 4096 else u * 1.0, {}),
    "is_not_matrixwise": (lambda u: u / (1 + u.abs().sum()), {"locality": MATRIX}),
    "cuts_the_graph": (lambda u: u.detach() * u * 2.0, {}),
    "cuts_the_graph_of_its_number": (lambda u, c: (u * getattr(c, "detach", lambda: c)()).to(u.dtype), {"factor": 2.0}),
    # false declarations
    "looks_at_the_number_of_dims": (lambda u: u * (0.5 if u.ndim >= 2 else 1.0), {}),
    "says_that_it_rounds": (lambda u: u * 0.7, {"locality": MATRIX, "rounds_to": rounds_in_word_only}),
    "rounds_its_input_only": (
        lambda u: u.to(torch.bfloat16).to(u.dtype) * 0.7,
        {"locality": MATRIX, "rounds_to": rounds_in_word_only},
    ),
    "calls_its_rows_matrices": (lambda u: u / (1 + u.abs().sum()), {"locality": LEAF, "on_stacks": rows_as_matrices}),
    "resolves_to_something_else": (
        lambda u, factor: u * factor,
        {"factor": 2.0, "resolve": lambda tx, params: tx.replace(factor=1.0)},
    ),
    "resolves_by_values": (lambda u, factor: u * factor, {"factor": 2.0, "resolve": resolved_by_values}),
}
"""Bugs of one leaf: the function, and the arguments that declare it."""

OF_DONATIONS = {
    "breaks_its_donation_promise": lambda u, donate: u.view(u.shape),  # another tensor, but not another storage
    "donates_more_than_it_was_given": lambda u, donate: u.mul_(2.0) if donate.state else u * 2.0,
    "computes_differently_when_donated": lambda u, donate: u.mul_(3.0) if all(donate) else u * 2.0,
}
"""Bugs of one leaf and of the donation."""


def less_the_average(updates, state, params):
    return tree.map(lambda u, p: u - p.to(u.dtype), updates, state.average)


def copied(updates, state, params):
    return tree.map(torch.clone, updates)


OF_TREES = {
    "keeps_the_parameters_themselves": (less_the_average, EmaParamsState),
    "allocates_state_in_memory": (
        copied,
        lambda params: MomentumState(tree.map(lambda p: torch.zeros(p.shape, dtype=p.dtype), params)),
    ),
    "keeps_the_graph_of_parameters": (copied, lambda params: EmaParamsState(tree.map(lambda p: p * 1.0, params))),
    "shares_one_buffer_between_updates": (
        lambda updates, state, params: tree.map(lambda u: u.new_zeros(()).expand(u.shape), updates),
        no_state,
    ),
}
"""Bugs of whole trees: the function of updates, state and parameters, and the first state."""

globals().update({name: of_a_leaf(name, function, **declared) for name, (function, declared) in OF_A_LEAF.items()})
globals().update({name: of_donations(name, function) for name, function in OF_DONATIONS.items()})
globals().update({name: of_trees(init=init)(function, name) for name, (function, init) in OF_TREES.items()})
reads_parameters_at_init = of_trees(
    init=lambda params: EmaParamsState(tree.map(lambda p: p.detach() * 1.0, params)), reads_params=False
)(less_the_average, "reads_parameters_at_init")


@of_traces()
def writes_to_its_state(u, trace):
    return trace.mul_(0.9).add_(u).to(u.dtype, copy=True), trace


@mfx.transform(locality=ELEMENT)
def keeps_hidden_python_state():
    calls = [0]

    def update(updates, state, params=None):
        calls[0] += 1
        return tree.map(lambda u: u * (-0.5) ** (calls[0] % 2), updates), state

    return no_state, update


@of_trees(TREE)
def takes_the_dtype_of_the_first_leaf(updates, state, params):
    first = next(tree.tensors(updates), None)
    return tree.map(lambda u: u.to(first.dtype) * 2, updates)


@of_traces()
def narrows_its_float64_state(u, trace):
    new = 0.5 * trace.float() + u.float()
    return new.to(u.dtype, copy=True), new.to(trace.dtype if trace.itemsize < 8 else torch.float32)


@of_traces(torch.float64)
def lets_its_state_drift(u, trace):
    new = (0.5 * trace).to(u.dtype) + u
    return new.clone(), new


@of_traces()
def returns_its_state_as_updates(u, trace):
    new = (0.5 * trace + u).to(trace.dtype)
    return new.to(u.dtype), new


@of_trees()
def forgets_absent_gradients(updates, state, params):
    leaves, treedef = tree.flatten(updates)
    return tree.unflatten(treedef, [leaf * 2.0 for leaf in leaves])


@mfx.transform(locality=ELEMENT)
def decays_the_state_of_absent_gradients():
    def update(updates, state, params=None):
        trace = tree.map(lambda old, u: old * 0.5 + (0.0 if u is None else u.to(old.dtype)), state.trace, updates)
        return tree.map(lambda u, new: new.to(u.dtype, copy=True), updates, trace), MomentumState(trace)

    return traces, update


@of_trees(LEAF)
def is_not_leafwise(updates, state, params):
    total = mfx.tree.norm(updates)
    return tree.map(lambda u: (u / (1 + total)).to(u.dtype), updates)


@mfx.transform
def takes_sums_only_where_it_has_leaves():
    def update(updates, state, params=None, *, sum_over_leaves):
        if not list(tree.tensors(updates)):
            return updates, state
        total = sum_over_leaves(tree.map(lambda u: u.abs().sum(dtype=torch.float64), updates))
        return tree.map(lambda u: (u / (1 + total)).to(u.dtype), updates), state

    return no_state, update


@mfx.transform(locality=ELEMENT)
def counts_in_python():
    def update(updates, state, params=None):
        step = state["step"] + 1
        return tree.map(lambda u: u * 0.5**step, updates), {"step": step}

    return lambda params: {"step": 0}, update


# ------------------------------------------------------------------------------------------------ false declarations


@of_trees(reads_params=False)
def reads_parameters_that_it_disowns(updates, state, params):
    if params is None:
        return tree.map(lambda u: u * 1.0, updates)
    return tree.map(lambda u, p: u + 0.5 * p.to(u.dtype), updates, params)


@of_trees(LEAF)
def is_not_leafwise_where_leaves_are_large(updates, state, params):
    total = sum(u.double().abs().sum() for u in tree.tensors(updates) if u.numel() > 4096)
    return tree.map(lambda u: (u / (1 + total)).to(u.dtype) if u.numel() > 4096 else u * 1.0, updates)


@of_trees()
def depends_on_the_order_of_a_dict(updates, state, params):
    single = tree.map(lambda u: u * 1.0, updates)
    if not isinstance(updates, dict) or not updates:
        return single
    first = next(iter(updates))
    return single | {first: tree.map(lambda u: u * 2.0, updates[first])}


@of_trees(LEAF)
def knows_how_many_leaves_there_are(updates, state, params):
    number = sum(1 for _ in tree.tensors(params))
    return tree.map(lambda u: u / (1 + number), updates)


@mfx.transform(locality=TREE, combinator=mfx.core.Combinator(ELEMENT))
def normalizes_around(inner: mfx.Transform):
    def update(updates, state, params=None, **extras):
        total = 1 + sum(u.double().abs().sum() for u in tree.tensors(updates))
        return inner.run(tree.map(lambda u: (u / total).to(u.dtype), updates), state, params, **extras)

    return inner.init, update


@mfx.transform(locality=TREE, combinator=mfx.core.Combinator(ELEMENT))
def hands_on_leaves_of_its_own(inner: mfx.Transform):
    def update(updates, state, params=None, **extras):
        out, state = inner.run({"all": updates}, state, {"all": params}, **extras)
        return out["all"], state

    return lambda params: inner.init({"all": params}), update


@mfx.transform
def sums_norms_instead_of_squares():
    def update(updates, state, params=None, *, sum_over_leaves):
        total = sum_over_leaves(tree.map(lambda u: u.double().square().sum().sqrt(), updates))
        return tree.map(lambda u: (u / (1 + total)).to(u.dtype), updates), state

    return no_state, update


def a_closure():
    def halves(updates, params):
        return tree.map(lambda u: u / 2, updates)

    return mfx.stateless(halves, ELEMENT)
