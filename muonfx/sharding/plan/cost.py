"""Estimate, from shapes alone, the cost of neighbouring transforms that need whole matrices (a run).

The rank that computes a matrix is chosen by this cost. All ranks must choose identically without communication, so the
cost depends on the arguments only, never on the machine: not on its clock, its CPU, or the installed packages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from muonfx.core import Transform
from muonfx.core.transform import within
from muonfx.core.visit import Visit, fixed, root_visit
from muonfx.placement.placed import matrix_stages
from muonfx.polar.cost import newton_schulz_cost
from muonfx.tree import Spec

Run = tuple[tuple[str, Transform], ...]
"""Consecutive transforms of a chain that need whole matrices, as pairs (name, transform)."""

_PER_ELEMENT = 10.0
"""The operations of one transform for each element, in addition to the cost that it declares."""


class RunCost:
    """Estimates the operations for one parameter in neighbouring transforms that need whole matrices (a run)."""

    def __init__(self, run: Run, device: str, compute: torch.dtype) -> None:
        called = [tx for _, entry in run for tx in within(entry)]
        self._each = _PER_ELEMENT * len(called)
        # Bound to the transforms once, because a plan computes the cost of tens of thousands of matrices.
        self._declared = [
            cost(tx, device, compute) for tx in called if (cost := tx.declaration.matrices.cost) is not None
        ]

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> float:
        """Return the estimated operations for an update of this shape: a whole parameter, or some of its matrices."""
        own = self._each * prod(shape)
        return sum((cost(name, tuple(shape), dtype) for cost in self._declared), start=own)


def runs_of(tx: Transform, params: Mapping[str, Tensor]) -> Iterator[tuple[Run, list[str]]]:
    """Yield each group of neighbouring transforms that need whole matrices (a run), with its parameters' names."""
    for stage in matrix_stages(root_visit(tx, dict(params))):
        yield run_of(stage), list(stage[0].names)


def run_of(stage: Sequence[Visit]) -> Run:
    """Return the transforms of a matrix stage as pairs (name in the chain, transform)."""
    if len(stage) == 1:
        return ((stage[0].tx.name, fixed(stage[0])),)
    return tuple([(visited.name.rpartition(".")[2], fixed(visited)) for visited in stage])


def costs_of(specs: Mapping[str, Spec], tx: Transform | None, device: str = "cpu") -> dict[str, float]:
    """Estimate the operations of `tx` (None: Newton-Schulz) on matrices. Return a dict by parameter name."""
    if tx is None:
        return {name: _of_matrix(spec, device) if len(spec.shape) >= 2 else 0.0 for name, spec in specs.items()}
    costs = dict.fromkeys(specs, 0.0)
    meta = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    for run, names in runs_of(tx, meta):
        cost = RunCost(run, device, torch.float32)
        for name in names:
            costs[name] += cost(name, specs[name].shape, specs[name].dtype)
    return costs


def _of_matrix(spec: Spec, device: str) -> float:
    rows, *others = spec.shape
    cost = newton_schulz_cost((rows, prod(others)), device)
    return _PER_ELEMENT * prod(spec.shape) + cost.load
