"""Transforms with one deliberate bug each, in a module so that they pickle; see `test_broken_transforms.py`."""

import random
import threading
import time
import warnings

import torch

import muonfx as mfx
from muonfx import tree
from muonfx.core import MatrixWork
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
            return init, lambda updates, state, params=None: (
                function(updates, state, params),
                state,
            )

        return named(make, name or function.__name__, locality=locality, **declared)

    return decorate


def of_a_leaf(name, function, locality=ELEMENT, factor=None, **declared):
    """Make a transform of a function of one leaf, and of a number if one is given."""

    def returned(*numbers):
        return no_state, lambda updates, state, params=None: (
            tree.map(lambda u: function(u, *numbers), updates),
            state,
        )

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
            out, kept = (
                tree.unflatten(treedef, [pair[place] for pair in both]) for place in (0, 1)
            )
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
    "is_not_elementwise_where_leaves_are_large": (
        lambda u: u - u.mean() if u.numel() > 4096 else u * 1.0,
        {},
    ),
    "is_not_matrixwise": (lambda u: u / (1 + u.abs().sum()), {"locality": MATRIX}),
    "cuts_the_graph": (lambda u: u.detach() * u * 2.0, {}),
    "cuts_the_graph_of_its_number": (
        lambda u, c: (u * getattr(c, "detach", lambda: c)()).to(u.dtype),
        {"factor": 2.0},
    ),
    "passes_its_number_to_lerp": (
        lambda u, weight: torch.lerp(torch.zeros_like(u), u, weight),
        {"factor": 0.5},
    ),
    # false declarations
    "looks_at_the_number_of_dims": (lambda u: u * (0.5 if u.ndim >= 2 else 1.0), {}),
    "says_that_it_rounds": (
        lambda u: u * 0.7,
        {"locality": MATRIX, "matrices": MatrixWork(rounds_to=rounds_in_word_only)},
    ),
    "rounds_its_input_only": (
        lambda u: u.to(torch.bfloat16).to(u.dtype) * 0.7,
        {"locality": MATRIX, "matrices": MatrixWork(rounds_to=rounds_in_word_only)},
    ),
    "calls_its_rows_matrices": (
        lambda u: u / (1 + u.abs().sum()),
        {"locality": LEAF, "matrices": MatrixWork(on_stacks=rows_as_matrices)},
    ),
    "resolves_to_something_else": (
        lambda u, factor: u * factor,
        {"factor": 2.0, "resolve": lambda tx, params: tx.replace(factor=1.0)},
    ),
    "resolves_by_values": (
        lambda u, factor: u * factor,
        {"factor": 2.0, "resolve": resolved_by_values},
    ),
}
"""Bugs of one leaf: the function, and the arguments that declare it."""

OF_DONATIONS = {
    # Another tensor, but not another storage.
    "breaks_its_donation_promise": lambda u, donate: u.view(u.shape),
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
        lambda params: MomentumState(
            tree.map(lambda p: torch.zeros(p.shape, dtype=p.dtype), params)
        ),
    ),
    "keeps_the_graph_of_parameters": (
        copied,
        lambda params: EmaParamsState(tree.map(lambda p: p * 1.0, params)),
    ),
    "shares_one_buffer_between_updates": (
        lambda updates, state, params: tree.map(lambda u: u.new_zeros(()).expand(u.shape), updates),
        no_state,
    ),
}
"""Bugs of whole trees: the function of updates, state and parameters, and the first state."""

globals().update(
    {
        name: of_a_leaf(name, function, **declared)
        for name, (function, declared) in OF_A_LEAF.items()
    }
)
globals().update({name: of_donations(name, function) for name, function in OF_DONATIONS.items()})
globals().update(
    {name: of_trees(init=init)(function, name) for name, (function, init) in OF_TREES.items()}
)
reads_parameters_at_init = of_trees(
    init=lambda params: EmaParamsState(tree.map(lambda p: p.detach() * 1.0, params)),
    reads_params=False,
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
        trace = tree.map(
            lambda old, u: old * 0.5 + (0.0 if u is None else u.to(old.dtype)), state.trace, updates
        )
        return tree.map(lambda u, new: new.to(u.dtype, copy=True), updates, trace), MomentumState(
            trace
        )

    return traces, update


@mfx.transform(locality=ELEMENT)
def decays_the_state_of_absent_gradients_beside_a_count():
    def init(params):
        return {**dict(tree.named_leaves(traces(params).trace)), "count": torch.zeros(())}

    def update(updates, state, params=None):
        new_state = {**state, "count": state["count"] + 1}
        for name, u in tree.named_leaves(updates):
            if state[name] is not None:
                new_state[name] = state[name] * 0.5 + (
                    0.0 if u is None else u.to(state[name].dtype)
                )
        return tree.map(lambda u: u * 2.0, updates), new_state

    return init, update


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
    return tree.map(
        lambda u: (u / (1 + total)).to(u.dtype) if u.numel() > 4096 else u * 1.0, updates
    )


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
        return inner.run(
            tree.map(lambda u: (u / total).to(u.dtype), updates), state, params, **extras
        )

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


# --------------------------------------------------------------------------------------------------- ambient modes


@mfx.transform(locality=ELEMENT)
def starts_in_the_default_dtype():
    def update(updates, state, params=None):
        trace = tree.map(
            lambda old, u: old if u is None else old * 0.5 + u.to(old.dtype), state.trace, updates
        )
        return tree.map(lambda u, new: new.to(u.dtype, copy=True), updates, trace), MomentumState(
            trace
        )

    def init(params):
        return MomentumState(tree.map(lambda p: torch.zeros(p.shape, device=p.device), params))

    return init, update


@mfx.transform(locality=ELEMENT)
def counts_on_the_default_device():
    def update(updates, state, params=None):
        count = state["count"] + 1
        return tree.map(lambda u: u * 2.0, updates), {"count": count}

    return lambda params: {"count": torch.zeros((), dtype=torch.int64)}, update


@of_trees()
def scales_only_where_grad_is_enabled(updates, state, params):
    factor = 2.0 if torch.is_grad_enabled() else 1.0
    return tree.map(lambda u: u * factor, updates)


@of_trees()
def looks_at_inference_mode(updates, state, params):
    factor = 1.0 if torch.is_inference_mode_enabled() else 2.0
    return tree.map(lambda u: u * factor, updates)


@of_trees()
def computes_constants_in_the_default_dtype(updates, state, params):
    third = (torch.ones(()) / 3).item()
    return tree.map(lambda u: u * third, updates)


@of_trees()
def reads_memory_that_it_never_wrote(updates, state, params):
    return tree.map(lambda u: torch.empty_like(u).clamp_(0.0, 0.0) + u, updates)


@of_trees()
def reads_the_clock(updates, state, params):
    # The law moves clocks by 1,000 or 1,001 of these units.
    factor = 1.0 + (time.time() // 1000) % 6
    return tree.map(lambda u: u * factor, updates)


@mfx.transform(locality=ELEMENT)
def starts_from_the_seed_of_the_process():
    def noise(p):
        generator = torch.Generator().manual_seed(torch.initial_seed())
        return (
            torch.rand(p.shape, generator=generator, dtype=torch.float64).to(p)
            if p.device.type != "meta"
            else p
        )

    def update(updates, state, params=None):
        return tree.map(lambda u, start: u + start.to(u.dtype), updates, state.trace), state

    return lambda params: MomentumState(tree.map(noise, params)), update


@of_trees(LEAF)
def seeds_the_generator_of_torch(updates, state, params):
    def noisy(u):
        torch.manual_seed(0)
        return u + torch.rand(u.shape, dtype=torch.float64).to(u)

    return tree.map(noisy, updates)


@of_trees()
def silences_warnings(updates, state, params):
    warnings.simplefilter("ignore")
    return tree.map(lambda u: u * 2.0, updates)


@of_trees()
def differs_between_threads(updates, state, params):
    factor = 2.0 if threading.current_thread() is threading.main_thread() else 1.0
    return tree.map(lambda u: u * factor, updates)


@of_trees()
def scales_by_the_hash_of_a_name(updates, state, params):
    leaves, treedef = tree.flatten(updates)
    named = zip(tree.names(updates), leaves, strict=True)
    factors = [1.0 + hash(name) % 7 for name, _ in named]
    pairs = zip(factors, leaves, strict=True)
    return tree.unflatten(treedef, [u if u is None else u * factor for factor, u in pairs])


# --------------------------------------------------------------------------------------------------- representation


def strides_of(shape):
    return torch.empty(shape, device="meta").stride()


def in_order_of_memory(u):
    return u.as_strided(u.shape, strides_of(u.shape)) * 1.0


@of_trees()
def reads_in_the_order_of_memory(updates, state, params):
    return tree.map(in_order_of_memory, updates)


@of_trees()
def branches_on_contiguity(updates, state, params):
    return tree.map(lambda u: u * (2.0 if u.is_contiguous() else 1.0), updates)


@of_trees()
def looks_at_the_storage_offset(updates, state, params):
    return tree.map(lambda u: u * (1.0 if u.storage_offset() else 2.0), updates)


@of_traces()
def pairs_gradient_and_state_by_memory(u, trace):
    new = trace.as_strided(u.shape, u.stride()).clone() if trace.stride() != u.stride() else trace
    new = 0.5 * new + u.to(trace.dtype)
    return new.to(u.dtype, copy=True), new.reshape(trace.shape)


@of_trees()
def looks_whether_parameters_require_grad(updates, state, params):
    return tree.map(lambda u, p: u * (2.0 if p.requires_grad else 1.0), updates, params)


@of_trees()
def reads_the_gradients_of_parameters(updates, state, params):
    return tree.map(lambda u, p: u * (1.0 if p.grad is None else 2.0), updates, params)


@of_trees()
def treats_parameters_of_a_module_in_another_way(updates, state, params):
    return tree.map(
        lambda u, p: u * (2.0 if isinstance(p, torch.nn.Parameter) else 1.0), updates, params
    )


@of_trees(LEAF)
def drops_a_tensor_that_it_has_seen(updates, state, params):
    seen = set()

    def once(u):
        factor = 0.0 if id(u) in seen else 1.0
        seen.add(id(u))
        return u * factor

    return tree.map(once, updates)


@of_trees()
def pairs_parameters_by_position(updates, state, params):
    if type(updates) is not dict or any(
        not isinstance(leaf, torch.Tensor) for leaf in updates.values()
    ):
        return tree.map(lambda u, p: u + 0.5 * p.to(u.dtype), updates, params)
    pairs = zip(updates.items(), params.values(), strict=True)
    return {name: u + 0.5 * p.to(u.dtype).sum() for (name, u), p in pairs}


@mfx.transform(locality=ELEMENT)
def pairs_its_state_by_position():
    def update(updates, state, params=None):
        traces = list(state["traces"].values())
        leaves, treedef = tree.flatten(updates)
        pairs = zip(leaves, traces, strict=True)
        new = [trace if u is None else 0.5 * trace + u.to(trace.dtype) for u, trace in pairs]
        out = [
            None if u is None else trace.to(u.dtype, copy=True)
            for u, trace in zip(leaves, new, strict=True)
        ]
        return tree.unflatten(treedef, out), {
            "traces": dict(zip(state["traces"], new, strict=True))
        }

    def init(params):
        named = tree.named_leaves(params)
        return {
            "traces": {
                name: torch.zeros(0) if p is None else torch.zeros_like(p) for name, p in named
            }
        }

    return init, update


@mfx.transform(locality=ELEMENT)
def has_two_moments_in_one_tensor():
    def init(params):
        zeros = tree.map(torch.zeros_like, params)
        return {"first": zeros, "second": zeros}

    def update(updates, state, params=None):
        return tree.map(lambda u, trace: u + trace.to(u.dtype), updates, state["first"]), state

    return init, update


@mfx.transform(locality=ELEMENT)
def shares_one_count_between_leaves():
    def init(params):
        count = torch.zeros((), dtype=torch.int64)
        return {"counts": tree.map(lambda p: count, params)}

    def update(updates, state, params=None):
        return tree.map(lambda u: u * 2.0, updates), state

    return init, update


# --------------------------------------------------------------------------------------------------- numbers


def large_is_zero(u):
    return torch.where(u.isinf(), 0.0, u)


def without_small(u):
    return torch.where(u.abs() < 1e-12, 0.0, u)


def by_fourth_powers(u):
    fourth = (u.square().square().sum() + torch.finfo(u.dtype).tiny).sqrt().sqrt()
    return u / fourth


def by_squares_in_its_own_dtype(u):
    return u / ((u * u).sqrt() + 1e-7)


def spread_over_its_leaf(u):
    return u + 0.0 * u.sum()


def hidden_if_its_square_is_nan(u):
    return torch.where(u.square() >= 0, u, 0.0)


def through_half(u):
    return u.half().to(u.dtype) if u.dtype is torch.float32 else u * 1.0


OF_NUMBERS = {
    "hides_nan": (torch.nan_to_num, ELEMENT),
    "hides_infinity": (large_is_zero, ELEMENT),
    "hides_nan_in_a_comparison": (hidden_if_its_square_is_nan, ELEMENT),
    "spreads_nan_over_the_leaf": (spread_over_its_leaf, ELEMENT),
    "spreads_nan_over_a_stack": (spread_over_its_leaf, MATRIX),
    "divides_zero_by_zero": (lambda u: u / u.abs(), ELEMENT),
    "loses_small_gradients": (without_small, ELEMENT),
    "overflows_in_fourth_powers": (by_fourth_powers, LEAF),
    "squares_in_half_precision": (by_squares_in_its_own_dtype, ELEMENT),
    "rounds_single_precision_to_half": (through_half, ELEMENT),
}
"""Bugs of numbers: the function of one leaf, and the declared locality."""

globals().update(
    {name: of_a_leaf(name, function, locality) for name, (function, locality) in OF_NUMBERS.items()}
)


@of_trees(LEAF)
def spreads_nan_over_the_tree(updates, state, params):
    total = sum(u.double().sum() for u in tree.tensors(updates))
    return tree.map(lambda u: u + (0.0 * total).to(u.dtype) if u.numel() else u * 1.0, updates)


@of_traces()
def gives_zeros_after_nan(u, trace):
    new = 0.5 * trace + u.to(trace.dtype)
    size = new.abs()
    return torch.where(size > 0, new / size, 0.0).to(u.dtype), new


def of_a_count(name, dtype):
    """Make a transform with a count of steps in the given dtype."""

    def make():
        def update(updates, state, params=None):
            count = state["count"] + 1
            return tree.map(lambda u: u * 2.0, updates), {"count": count.to(dtype)}

        def init(params):
            device = next((p.device for p in tree.tensors(params)), None)
            return {"count": torch.zeros((), dtype=dtype, device=device)}

        return init, update

    return named(make, name, locality=ELEMENT)


counts_in_half_precision = of_a_count("counts_in_half_precision", torch.float16)
counts_in_bfloat16 = of_a_count("counts_in_bfloat16", torch.bfloat16)
counts_in_eight_bits = of_a_count("counts_in_eight_bits", torch.int8)


# --------------------------------------------------------------------------------------------------- rare branches


@of_trees()
def writes_to_tall_matrices_only(updates, state, params):
    def doubled(u):
        is_tall = u.ndim == 2 and u.shape[0] > u.shape[1] > 1
        return u.mul_(2.0) if is_tall else u * 2.0

    return tree.map(doubled, updates)


@of_trees()
def writes_to_the_data_of_bfloat16_parameters(updates, state, params):
    def decayed(u, p):
        if p.dtype is torch.bfloat16:
            p.data.mul_(0.5)
        return u * 1.0

    return tree.map(decayed, updates, params)


@mfx.transform(locality=ELEMENT)
def writes_to_its_gradients_at_the_second_step():
    def update(updates, state, params=None):
        is_second = bool(state["count"] == 1)
        out = tree.map(lambda u: u.mul_(2.0) if is_second else u * 2.0, updates)
        return out, {"count": state["count"] + 1}

    return lambda params: {"count": torch.zeros((), dtype=torch.int64)}, update


@mfx.transform(locality=ELEMENT)
def is_elementwise_for_three_steps():
    def update(updates, state, params=None):
        late = state["count"] >= 3
        out = tree.map(
            lambda u: torch.where(late, u - u.mean(), u * 1.0) if u.numel() else u, updates
        )
        return out, {"count": state["count"] + 1}

    return lambda params: {"count": torch.zeros((), dtype=torch.int64)}, update


@of_trees()
def is_not_elementwise_in_bfloat16(updates, state, params):
    return tree.map(
        lambda u: u - u.mean() if u.numel() and u.dtype is torch.bfloat16 else u * 1.0, updates
    )


@of_trees(LEAF)
def is_not_leafwise_for_scalars(updates, state, params):
    total = sum(u.double().abs().sum() for u in tree.tensors(updates))
    return tree.map(lambda u: u * 1.0 if u.ndim else (u / (1 + total)).to(u.dtype), updates)


@of_trees(MATRIX)
def is_not_matrixwise_unless_square(updates, state, params):
    def scaled(u):
        is_square = u.ndim < 2 or u.shape[-2] == u.shape[-1]
        return u * 1.0 if is_square else u / (1 + u.abs().sum())

    return tree.map(scaled, updates)


@of_trees()
def treats_absent_gradients_as_zeros(updates, state, params):
    leaves, treedef = tree.flatten(updates)
    pairs = zip(leaves, tree.leaves(params), strict=True)
    full = [torch.zeros_like(p) if u is None and p is not None else u for u, p in pairs]
    return tree.map(lambda u: u * 2.0, tree.unflatten(treedef, full))


@of_trees()
def gives_updates_the_dtype_of_parameters(updates, state, params):
    return tree.map(lambda u, p: (u * 2.0).to(p.dtype), updates, params)


@of_trees()
def promotes_updates_of_bfloat16(updates, state, params):
    return tree.map(lambda u: u.float() * 2.0 if u.dtype is torch.bfloat16 else u * 2.0, updates)


@of_trees()
def flattens_empty_leaves(updates, state, params):
    return tree.map(lambda u: u * 2.0 if u.numel() else u.flatten(), updates)


@of_trees(LEAF)
def depends_on_the_number_of_equal_shapes(updates, state, params):
    shapes = [u.shape for u in tree.tensors(updates)]

    def scaled(u):
        return u * 3.0 / 7.0 if shapes.count(u.shape) > 1 else u * (3.0 / 7.0)

    return tree.map(scaled, updates)


@of_trees(LEAF)
def scales_by_the_place_of_a_leaf(updates, state, params):
    leaves, treedef = tree.flatten(updates)
    scaled = [u if u is None else u * 0.5**place for place, u in enumerate(leaves)]
    return tree.unflatten(treedef, scaled)


@mfx.transform(locality=ELEMENT)
def cuts_the_graph_of_parameters():
    def update(updates, state, params=None):
        return tree.map(lambda u, start: u - start.to(u.dtype), updates, state.average), state

    return lambda params: EmaParamsState(tree.map(lambda p: p.detach().clone(), params)), update


@mfx.transform(locality=ELEMENT)
def keeps_a_parameter_in_its_state():
    def update(updates, state, params=None):
        return tree.map(lambda u, trace: u + trace.to(u.dtype), updates, state.trace), state

    def init(params):
        return MomentumState(tree.map(lambda p: torch.nn.Parameter(torch.zeros_like(p)), params))

    return init, update


@mfx.transform(locality=ELEMENT)
def changes_after_many_calls():
    calls = [0]

    def update(updates, state, params=None):
        calls[0] += 1
        return tree.map(lambda u: u * (2.0 if calls[0] > 20 else 1.0), updates), state

    return no_state, update


factor_of_shape = {}


@of_trees(LEAF)
def keeps_the_first_norm_of_each_shape(updates, state, params):
    return tree.map(
        lambda u: u / (1 + factor_of_shape.setdefault(u.shape, u.double().norm())).to(u.dtype),
        updates,
    )


power_of_shape = {}


@mfx.transform(locality=LEAF)
def keeps_the_first_power_of_each_shape(decay: float = 0.9):
    def scaled(u):
        power = power_of_shape.setdefault(u.shape, decay**3)
        return (u * power).to(u.dtype)

    return no_state, lambda updates, state, params=None: (tree.map(scaled, updates), state)


@of_trees()
def takes_names_in_the_order_of_a_set(updates, state, params):
    present = {name for name, u in tree.named_leaves(updates) if u is not None}
    first = next(iter(present), None)
    leaves, treedef = tree.flatten(updates)
    factors = [2.0 if name == first else 1.0 for name in tree.names(updates)]
    pairs = zip(factors, leaves, strict=True)
    return tree.unflatten(treedef, [u if u is None else u * factor for factor, u in pairs])


# --------------------------------------------------------------------------------------------------- calculus


@mfx.transform(locality=ELEMENT)
def keeps_the_graph_of_its_first_gradients():
    first = {}

    def with_first(u):
        if u.requires_grad:
            return u + first.setdefault((u.shape, u.dtype), u)
        return u + u

    return no_state, lambda updates, state, params=None: (tree.map(with_first, updates), state)
