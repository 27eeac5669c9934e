"""What the transforms of a run, and of a whole tree of transforms, cost for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from muonfx.core import Transform
from muonfx.polar.policy import Decided
from muonfx.program.lower import lower
from muonfx.program.nodes import Stage
from muonfx.program.placement import Run
from muonfx.sharding.plan.cost import newton_schulz_cost
from muonfx.transforms._matrices import view_as_matrices
from muonfx.transforms.orthogonalize import orthogonalize
from muonfx.tree import Spec

__all__ = ["Run", "cost_of", "costs_of", "runs_of"]


def within(tx: Transform) -> Iterator[Transform]:
    """A transform and all that it calls."""
    yield tx
    for child in tx.children:
        yield from within(child)


def cost_of(run: Run, name: str, shape: Sequence[int], dtype: torch.dtype, device: str, compute: torch.dtype) -> float:
    """Floating-point operations that a run takes for a leaf: those of Newton-Schulz, and ten an element for the rest.

    Args:
        run: the transforms.
        name: of the leaf.
        shape: of the leaf, or of some of the matrices in it.
        dtype: of the updates.
        device: the kind of device that computes.
        compute: what "auto" stands for.

    >>> import muonfx as mfx
    >>> cost_of((("o", mfx.orthogonalize()),), "w", (64, 64), torch.float32, "cpu", torch.float32) > 2 * 64**3 * 15
    True
    """
    total = 0.0
    leaf = torch.empty(tuple(shape), device="meta")
    for _, entry in run:
        for tx in within(entry):
            total += 10.0 * prod(shape)
            if tx.factory is orthogonalize:
                total += _of_orthogonalize(tx, name, leaf, dtype, device, compute)
    return total


def _of_orthogonalize(
    tx: Transform, name: str, leaf: Tensor, dtype: torch.dtype, device: str, compute: torch.dtype
) -> float:
    given = tx.arguments
    (view,) = view_as_matrices(given["dims"], given["blocks"], given["block_axis"]).of([name])
    asked = given["dtype"]
    if asked == "auto" or isinstance(asked, Decided):
        asked = torch.float64 if dtype == torch.float64 else compute
    settings = {key: given[key] for key in ("coefficients", "steps", "method", "products")}
    return sum(
        newton_schulz_cost((m.shape[-2], m.shape[-1]), device, held=dtype, dtype=asked, **settings).load
        * prod(m.shape[:-2])
        for m in view.split(leaf, name)
    )


def runs_of(tx: Transform, params: Mapping[str, Tensor]) -> Iterator[tuple[Run, list[str]]]:
    """The runs within a transform, and the names of the parameters that each works on.

    Args:
        tx: the transform.
        params: tensors of the global shapes, by name; meta will do.

    >>> import muonfx as mfx
    >>> tx = mfx.muon_with_adamw(0.1, labels={"w": "muon", "b": "adamw"})
    >>> [(run[0][0], names) for run, names in runs_of(tx, {"w": torch.zeros(2, 2), "b": torch.zeros(2)})]
    [('orthogonalize', ['w'])]
    """
    for node in lower(tx, dict(params)).nodes():
        if isinstance(node, Stage):
            yield tuple((member.name, member.node.tx) for member in node.members), list(node.names)


def costs_of(specs: Mapping[str, Spec], tx: Transform | None, device: str = "cpu") -> dict[str, float]:
    """What each parameter costs in the runs of a transform; without one, what orthogonalizing its matrices costs.

    >>> import muonfx as mfx
    >>> costs_of({"w": Spec((4, 4), torch.float32), "b": Spec((4,), torch.float32)}, None)["b"]
    0.0
    """
    costs = dict.fromkeys(specs, 0.0)
    if tx is None:
        run: Run = (("orthogonalize", orthogonalize(dtype=torch.float32)),)
        for name, spec in specs.items():
            if len(spec.shape) >= 2:
                costs[name] = cost_of(run, name, spec.shape, spec.dtype, device, torch.float32)
        return costs
    meta = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    for run, names in runs_of(tx, meta):
        for name in names:
            costs[name] += cost_of(run, name, specs[name].shape, specs[name].dtype, device, torch.float32)
    return costs
