"""Laws of compilation: one graph without breaks, the values of eager mode, and no second compilation."""

from __future__ import annotations

from typing import Any

import torch

from muonfx import tree
from muonfx.core import Transform
from muonfx.hyperparams import inject_hyperparams
from muonfx.testing.examples import Example
from muonfx.testing.law import law, without_torchs_own_warnings
from muonfx.testing.laws.batching import _has_no_numbers
from muonfx.testing.laws.values import is_in_no_module
from muonfx.testing.violation import Breach, require_close, tolerance_of
from muonfx.tree import PyTree

__all__ = ["changing_an_injected_number_does_not_recompile", "compiled_update_equals_eager"]


class Counter:
    """A backend of ``torch.compile`` that counts graphs, and hands them to another backend."""

    def __init__(self, backend: str = "eager") -> None:
        self.graphs = 0
        self.backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        with without_torchs_own_warnings():
            return self.backend(graph, inputs)


def _check(tx: Transform, params: PyTree, steps: list[PyTree], backend: str, *, vary: bool) -> None:
    if not tree.leaves(params):
        return
    torch._dynamo.reset()
    counter = Counter(backend)

    def step(grads: PyTree, state: PyTree, params: PyTree) -> Any:
        return tx.update(grads, state, params)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    graphs = 0
    state = eager_state = tx.init(params)
    for number, grads in enumerate(steps):
        updates, state = compiled(grads, state, params)
        expected, eager_state = tx.update(grads, eager_state, params)
        tolerance = tolerance_of(tx, expected, eager_state)
        found = (updates, state)
        require_close(
            f"step {number}, compiled (updates, state)", found, (expected, eager_state), "in eager mode", tolerance
        )
        if number and counter.graphs > graphs:
            raise Breach(None, f"step {number} compiled again; expected one graph for all steps")
        graphs = counter.graphs  # inductor may ask twice for the first
        if vary:
            changed = tree.map(lambda value: value * 0.9, state.hyperparams)
            state, eager_state = state._replace(hyperparams=changed), eager_state._replace(hyperparams=changed)


def _steady(example: Example) -> Example:
    steady = example.precise().prolonged(3)
    return Example(_without_empty_dicts(steady.params), [_without_empty_dicts(grads) for grads in steady.steps])


def _without_empty_dicts(value: Any) -> Any:
    """Put an empty tuple for an empty dict within a tree: torch 2.13 cannot trace optree (0.20) through one."""
    if isinstance(value, dict):
        return {
            key: () if isinstance(item, dict) and not item else _without_empty_dicts(item)
            for key, item in value.items()
        }
    if isinstance(value, tuple | list):
        items = [() if isinstance(item, dict) and not item else _without_empty_dicts(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


@law(on=_steady, unless=is_in_no_module, share=0.08)
def compiled_update_equals_eager(tx: Transform, params: PyTree, steps: list[PyTree], *, backend: str = "eager") -> None:
    """``torch.compile(tx.update, fullgraph=True)`` gives the eager values, and compiles once for all steps.

    Args:
        tx: the transform.
        params: the parameters.
        steps: the gradients of each step.
        backend: of ``torch.compile``; "eager" traces only, "inductor" generates code too.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> compiled_update_equals_eager(mfx.momentum(), *Example.of({"w": (2, 3)}))
    """
    _check(tx, params, steps, backend, vary=False)


@law(on=_steady, unless=lambda tx: _has_no_numbers(tx) or is_in_no_module(tx), share=0.04)
def changing_an_injected_number_does_not_recompile(
    tx: Transform, params: PyTree, steps: list[PyTree], *, backend: str = "eager"
) -> None:
    """With `inject_hyperparams`, new numbers in the state are used, and compile nothing again.

    Args:
        tx: the transform.
        params: the parameters.
        steps: the gradients of each step.
        backend: as in `compiled_update_equals_eager`.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> changing_an_injected_number_does_not_recompile(mfx.scale(2.0), *Example.of({"w": (2, 3)}))
    """
    _check(inject_hyperparams(tx), params, steps, backend, vary=True)
