"""Estimate, from shapes alone, the cost of neighbouring transforms that need whole matrices (a run).

The rank that computes a matrix is chosen by this cost. All ranks must choose identically without communication, so the
cost depends on the arguments only, never on the machine: not on its clock, its CPU, or the installed packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from muonfx.core import Transform
from muonfx.core.transform import within
from muonfx.core.visit import Visit, fixed, root_visit
from muonfx.placement.placed import matrix_stages
from muonfx.polar.cost import newton_schulz_cost
from muonfx.sharding.shards.table import meta_of
from muonfx.tree import Spec

Run = tuple[tuple[str, Transform], ...]
"""Consecutive transforms of a chain that need whole matrices, as pairs (name, transform)."""

_PER_ELEMENT = 10.0
"""The operations of one transform for each element, in addition to the cost that it declares."""


CostOf = Callable[[str, tuple[int, ...], torch.dtype], float]
"""The type of a function from the name, shape and dtype of a parameter, or of some of its matrices, to operations."""


def cost_of_run(run: Run, device: str, compute: torch.dtype) -> CostOf:
    """Return a function that estimates the operations for one parameter in neighbouring transforms (a run).

    For ``cost_of = cost_of_run(run, "cuda", torch.bfloat16)``, the cost of a matrix "w" is
    ``cost_of("w", (64, 64), torch.float32)``. The declared costs of the transforms are bound once to the type of device
    and the dtype of products, because a plan computes the cost of tens of thousands of matrices.
    """
    # 1. Once for the run: the transforms in it, also those that another one calls, and their declared costs.
    per_element = 0.0
    declared_costs: list[CostOf] = []
    for _, tx in run:
        for inner in within(tx):
            per_element += _PER_ELEMENT
            if inner.declaration.matrices.cost is not None:
                declared_costs.append(inner.declaration.matrices.cost(inner, device, compute))

    # 2. For each parameter: the sum over these transforms.
    def cost_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
        total = per_element * prod(shape)
        for declared_cost in declared_costs:
            total += declared_cost(name, shape, dtype)
        return total

    return cost_of


def runs_of(tx: Transform, params: Mapping[str, Tensor]) -> Iterator[tuple[Run, list[str]]]:
    """Yield each group of neighbouring transforms that need whole matrices (a run), with its parameters' names."""
    for stage in matrix_stages(root_visit(tx, dict(params))):
        yield run_of(stage), list(stage[0].param_names)


def run_of(stage: Sequence[Visit]) -> Run:
    """Return the transforms of a matrix stage as pairs (name in the chain, transform)."""
    if len(stage) == 1:
        return ((stage[0].tx.name, fixed(stage[0])),)
    return tuple([(visited.name.rpartition(".")[2], fixed(visited)) for visited in stage])


def costs_of(specs: Mapping[str, Spec], tx: Transform | None) -> dict[str, float]:
    """Return the estimated operations of `tx` (None: Newton-Schulz) on matrices on a CPU, by parameter name.

    A parameter that `tx` does not treat as a matrix costs 0.0.
    """
    if tx is None:
        return {name: _newton_schulz_cost(spec) for name, spec in specs.items()}
    costs = dict.fromkeys(specs, 0.0)
    # Neighbouring transforms, and the parameters that they receive.
    for run, names in runs_of(tx, meta_of(specs)):
        cost_of = cost_of_run(run, "cpu", torch.float32)
        for name in names:
            costs[name] += cost_of(name, specs[name].shape, specs[name].dtype)
    return costs


def _newton_schulz_cost(spec: Spec) -> float:
    if len(spec.shape) < 2:
        return 0.0
    rows, *other_sizes = spec.shape
    cost = newton_schulz_cost((rows, prod(other_sizes)), "cpu")
    return _PER_ELEMENT * prod(spec.shape) + cost.load
