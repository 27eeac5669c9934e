"""What the transforms of a run, and of a whole tree of transforms, cost for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from muonfx.core import Transform
from muonfx.polar.policy import Decided
from muonfx.program.execute import Run
from muonfx.program.lower import lower
from muonfx.program.nodes import Stage
from muonfx.sharding.plan.cost import newton_schulz_cost
from muonfx.transforms._matrices import view_as_matrices
from muonfx.transforms.orthogonalize import orthogonalize
from muonfx.tree import Spec

__all__ = ["Run", "RunCost", "costs_of", "runs_of"]


def within(tx: Transform) -> Iterator[Transform]:
    """A transform and all that it calls."""
    yield tx
    for child in tx.children:
        yield from within(child)


class RunCost:
    """The cost of a run for a leaf: floating-point operations of Newton-Schulz, and ten an element for the rest.

    Args:
        run: the transforms.
        device: the kind of device that computes.
        compute: what "auto" stands for.

    >>> import muonfx as mfx
    >>> cost = RunCost((("o", mfx.orthogonalize()),), "cpu", torch.float32)
    >>> cost("w", (64, 64), torch.float32) > 2 * 64**3 * 15
    True
    """

    def __init__(self, run: Run, device: str, compute: torch.dtype) -> None:
        self._device, self._compute = device, compute
        called = [tx for _, entry in run for tx in within(entry)]
        self._each = 10.0 * len(called)
        # read once: a plan asks for the cost of tens of thousands of matrices
        given = [tx.arguments for tx in called if tx.factory is orthogonalize]
        self._products = [
            (
                view_as_matrices(own["dims"], own["blocks"], own["block_axis"]),
                own["dtype"],
                {key: own[key] for key in ("coefficients", "steps", "method", "products")},
            )
            for own in given
        ]

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> float:
        """The cost for a leaf of a shape, or for some of the matrices in it; dtype: of the updates."""
        total = self._each * prod(shape)
        leaf = torch.empty(tuple(shape), device="meta")
        for views, asked, settings in self._products:
            (view,) = views.of([name])
            if asked == "auto" or isinstance(asked, Decided):
                asked = torch.float64 if dtype == torch.float64 else self._compute
            for m in view.split(leaf, name):
                cost = newton_schulz_cost((m.shape[-2], m.shape[-1]), self._device, held=dtype, dtype=asked, **settings)
                total += cost.load * prod(m.shape[:-2])
        return total


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
        runs = [(run, [name for name, spec in specs.items() if len(spec.shape) >= 2])]
    else:
        meta = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
        runs = list(runs_of(tx, meta))
    for run, names in runs:
        cost = RunCost(run, device, torch.float32)
        for name in names:
            costs[name] += cost(name, specs[name].shape, specs[name].dtype)
    return costs
