"""The cost of a run of transforms for a parameter, from shapes alone.

Owners are chosen by this cost. All ranks must choose identically without communication, so the cost depends on the
arguments only, never on the machine: not on its clock, its CPU, or the installed packages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from muonfx.core import Transform
from muonfx.core.order import within
from muonfx.polar.cost import newton_schulz_cost
from muonfx.program.lower import lower_node
from muonfx.program.nodes import Program, Stage
from muonfx.program.placement import Run
from muonfx.transforms._matrices import MatrixView
from muonfx.transforms.orthogonalize import orthogonalize
from muonfx.tree import Spec

__all__ = ["Run", "RunCost", "costs_of", "runs_of"]


class RunCost:
    """The cost of a run for a leaf: the load of Newton-Schulz, and ten operations per element for each transform."""

    def __init__(self, run: Run, device: str, compute: torch.dtype) -> None:
        self._device, self._compute = device, compute
        called = [tx for _, entry in run for tx in within(entry)]
        self._each = 10.0 * len(called)
        # read once, because a plan computes the cost of tens of thousands of matrices
        given = [tx.arguments for tx in called if tx.factory is orthogonalize]
        self._products = [
            (
                MatrixView(own["dims"], own["blocks"], own["block_axis"]),
                own["dtype"],
                {key: own[key] for key in ("coefficients", "steps", "method", "products")},
            )
            for own in given
        ]

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the cost for a leaf of a shape, or for some of its matrices; `dtype` is the updates' dtype."""
        total = self._each * prod(shape)
        leaf = torch.empty(tuple(shape), device="meta")
        for views, asked, settings in self._products:
            (view,) = views.of([name])
            if asked == "auto":
                asked = torch.float64 if dtype == torch.float64 else self._compute
            for m in view.split(leaf, name):
                cost = newton_schulz_cost((m.shape[-2], m.shape[-1]), self._device, held=dtype, dtype=asked, **settings)
                total += cost.load * prod(m.shape[:-2])
        return total


def runs_of(tx: Transform, params: Mapping[str, Tensor]) -> Iterator[tuple[Run, list[str]]]:
    """Yield the runs within a transform, each with the names of its parameters."""
    for node in Program(lower_node(tx, dict(params))).nodes():
        if isinstance(node, Stage):
            yield tuple((member.name, member.node.tx) for member in node.members), list(node.names)


def costs_of(specs: Mapping[str, Spec], tx: Transform | None, device: str = "cpu") -> dict[str, float]:
    """Return the cost of each parameter in the runs of a transform, by default of orthogonalizing its matrices."""
    costs = dict.fromkeys(specs, 0.0)
    if tx is None:
        run: Run = (("orthogonalize", orthogonalize(dtype=torch.float32)),)
        runs = [(run, [name for name, spec in specs.items() if len(spec.shape) >= 2])]
    else:
        meta = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
        runs = list(runs_of(tx, meta))
    for run, names in runs:
        cost = RunCost(run, device, torch.float32)
        for name in names:
            costs[name] += cost(name, specs[name].shape, specs[name].dtype)
    return costs
