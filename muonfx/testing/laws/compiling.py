"""Laws of compilation: one graph without syncs, the values of eager mode, and no second compilation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.hyperparams import as_tensors
from muonfx.testing.examples import Example, scaled, without_leaves
from muonfx.testing.law import law, without_torchs_own_warnings
from muonfx.testing.laws.batching import _has_no_numbers
from muonfx.testing.laws.values import is_in_no_module
from muonfx.testing.violation import Breach, require_close, tolerance_of
from muonfx.tree import PyTree


class Counter:
    """A backend of ``torch.compile`` that counts the graphs and compiles them with another backend."""

    def __init__(self, backend: str = "eager") -> None:
        self.graphs = 0
        self.backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Count one graph and compile it. Raise `Breach` (a failed law) if it reads a tensor's value back to Python."""
        self.graphs += 1
        _require_no_value_read(graph)
        with without_torchs_own_warnings():
            return self.backend(graph, inputs)


def _require_no_value_read(graph: GraphModule) -> None:
    """Raise `Breach` (a failed law) if a graph reads a tensor's value back to Python, which waits for the device."""
    for module in graph.modules():  # the graph itself, and the graphs of branches within it
        if not isinstance(module, GraphModule):
            continue
        # `_local_scalar_dense` is the operation that ``float(tensor)`` and ``if tensor`` become.
        for node in module.graph.nodes:
            if node.target in ("item", "tolist") or "_local_scalar_dense" in str(node.target):
                raise Breach(
                    None,
                    f"the graph reads a value back, at {node.format_node()}: {node.stack_trace}",
                )


def _check(tx: Transform, tx_of_step: list[Transform], params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) unless all steps compile to one graph with the results of eager mode.

    ``tx`` initializes the state. Each step has its own transform, which may have other numeric arguments.
    """
    if not tree.leaves(params):  # nothing to compute
        return
    # Forget the graphs of earlier checks, which could be used again or be counted here.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counter = Counter()

    # With fullgraph, torch accepts reading a value back. A plain compile breaks the graph there.
    @torch.compile(backend=counter)
    def compiled_step(tx: Transform, grads: PyTree, state: PyTree, params: PyTree) -> Any:
        return tx.update(grads, state, params)

    first_state = state = eager_state = tx.init(params)
    for step, (step_tx, grads) in enumerate(zip(tx_of_step, steps, strict=True)):
        results = compiled_step(step_tx, grads, state, params)
        expected = step_tx.update(grads, eager_state, params)
        tolerance = tolerance_of(tx, expected)
        require_close(
            f"step {step}, compiled (updates, state)", results, expected, "in eager mode", tolerance
        )
        _, state = results
        _, eager_state = expected
        _require_one_graph(step, counter.graphs, first_state, state)


def _other_strides(first_state: PyTree, state: PyTree) -> str:
    """Return a text on a leaf of a new state that has other strides than in the state of `init`, or "" if none has.

    Other strides are a reason to compile again.
    """
    for name, first_leaf, leaf in zip(
        tree.names(state), tree.leaves(first_state), tree.leaves(state), strict=True
    ):
        if not isinstance(leaf, Tensor) or not isinstance(first_leaf, Tensor):  # such as None
            continue
        if leaf.stride() != first_leaf.stride():
            return (
                f"; the new state {name!r} has the strides {leaf.stride()}, "
                f"expected {first_leaf.stride()} as in init"
            )
    return ""


def _require_one_graph(step: int, graphs: int, first_state: PyTree, state: PyTree) -> None:
    """Raise `Breach` (a failed law) unless dynamo has compiled one graph by the end of a step, without a break.

    ``first_state`` is the state of `init`, and ``state`` the new state. Their strides may be the reason for more.
    """
    text = f"compiled {graphs} graphs until step {step}, expected one for all steps"
    breaks = list(torch._dynamo.utils.counters["graph_break"])  # the reasons, as texts
    if breaks:
        reason = " ".join(str(breaks[0]).split())
        raise Breach(None, f"{text}; the graph breaks: {reason}")
    if graphs > 1:  # there is none if the update computes nothing
        raise Breach(None, text + _other_strides(first_state, state))


def _steady(example: Example) -> Example:
    return _one_leaf_per_ndim(example).prolonged(3)


def _one_leaf_per_ndim(example: Example) -> Example:
    """Return the example in float64 with one leaf of each number of dims, the largest, and None for all others.

    Compiling more leaves takes longer.

    >>> params, _ = _one_leaf_per_ndim(Example.of({"a": (3,), "b": (6,), "c": (4, 4), "d": (3, 5)}))
    >>> [name for name, leaf in tree.named_leaves(params) if leaf is not None]
    ['b', 'c']
    """
    example = example.precise()
    leaves = tree.leaves(example.params)
    largest_of_ndim: dict[int, int] = {}  # the number of the largest leaf with each number of dims
    for number, leaf in enumerate(leaves):
        largest = largest_of_ndim.setdefault(leaf.ndim, number)
        if leaf.numel() > leaves[largest].numel():
            largest_of_ndim[leaf.ndim] = number
    omitted = set(range(len(leaves))) - set(largest_of_ndim.values())
    return example.map_trees(lambda values: without_leaves(omitted, values))


@law(on=_steady, unless=is_in_no_module, share=0.02)
def compiled_update_equals_eager(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``torch.compile(tx.update)`` has the results of eager mode, and compiles one graph for all steps.

    >>> import muonfx as mfx
    >>> compiled_update_equals_eager(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    _check(tx, [tx] * len(steps), params, steps)


@law(on=_steady, unless=lambda tx: _has_no_numbers(tx) or is_in_no_module(tx), share=0.01)
def changing_a_number_does_not_recompile(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that a compiled transform is not recompiled if the value of a numeric argument changes.

    A learning rate that changes at every step must not cause a compilation at every step. The numeric arguments are
    tensors, and the results must use their new values.

    >>> import muonfx as mfx
    >>> changing_a_number_does_not_recompile(mfx.scale(2.0), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    # Each step has a new transform with another value, as from `with_hyperparams`. If one transform were used again, a
    # value that it has cached meanwhile could cause a compilation.
    tx_of_tensors = as_tensors(tx)
    tx_of_step = [scaled(tx_of_tensors, 0.9**step) for step in range(len(steps))]
    _check(tx_of_tensors, tx_of_step, params, steps)


def _grown(values: PyTree, times: int, seed: int) -> PyTree:
    """Return a tree of random tensors with dims ``times`` as long, so that a `MatrixView` can still divide them.

    With ``times=2``, the shape (2, 3) becomes (4, 6).
    """
    generator = torch.Generator().manual_seed(seed)

    def grown(leaf: torch.Tensor) -> torch.Tensor:
        shape = [side * times for side in leaf.shape]
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(leaf)

    return tree.map(grown, values)


@law(on=_one_leaf_per_ndim, unless=is_in_no_module, share=0.01)
def compiled_update_takes_other_shapes(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that one compiled `update` has the results of eager mode for leaves with dims up to three times as long.

    The compiler receives the lengths of dims as symbols, so the compiled code must not be made for certain lengths.

    >>> import muonfx as mfx
    >>> compiled_update_takes_other_shapes(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=Counter())
    def compiled_step(grads: PyTree, state: PyTree, params: PyTree) -> Any:
        return tx.update(grads, state, params)

    for times in (2, 3):
        longer_params = _grown(params, times, seed=2 * times)
        grads = _grown(steps[0], times, seed=2 * times + 1)
        try:
            state = tx.init(longer_params)
            expected = tx.update(grads, state, longer_params)
        except ValueError:  # the transform does not accept these shapes
            continue
        _mark_dims_as_symbols((grads, state, longer_params))
        results = compiled_step(grads, state, longer_params)
        what = f"compiled (updates, state), with dims {times} times as long,"
        require_close(what, results, expected, "in eager mode", tolerance_of(tx, *expected))


def _mark_dims_as_symbols(values: PyTree) -> None:
    """Let the next call of a compiled function treat the lengths of all dims as symbols, not as constants."""
    for leaf in tree.tensors(values):
        torch._dynamo.maybe_mark_dynamic(leaf, list(range(leaf.ndim)))


@law(
    on=lambda example: _one_leaf_per_ndim(example).prolonged(2), unless=is_in_no_module, share=0.04
)
def traced_update_equals_eager(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that ``make_fx`` can record a step: the graph has the results of eager mode in this and the next step.

    So the graph computes the step from its inputs, without constants of the step in which it was recorded. It must not
    read the value of a tensor, which would wait for the device.

    >>> import muonfx as mfx
    >>> traced_update_equals_eager(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """

    def step(grads: PyTree, state: PyTree, params: PyTree) -> Any:
        return tx.update(grads, state, params)

    state = tx.init(params)
    # `make_fx` runs the first step once and writes down its operations, as a function of the same arguments.
    recorded = make_fx(step)(steps[0], state, params)
    _require_no_value_read(recorded)
    # A value that Python has computed while recording, such as a count of steps, would be wrong in the second step.
    for number, grads in enumerate(steps):
        expected = tx.update(grads, state, params)
        results = recorded(grads, state, params)
        tolerance = tolerance_of(tx, *expected)
        require_close(
            f"step {number}, recorded (updates, state)",
            results,
            expected,
            "in eager mode",
            tolerance,
        )
        state = expected[1]
