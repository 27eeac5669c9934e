"""Scaling of updates by a constant, by a schedule, by a learning rate, or by the shape of each matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from muonfx.core import Donation, EmptyState, InitAndUpdate, Locality, Transform, checks, transform
from muonfx.core.combine import no_state
from muonfx.core.contract import NOTHING, Position
from muonfx.core.recorded import parts_of
from muonfx.core.schedules import ScalarOrSchedule, Schedule
from muonfx.select.matrix_view import Matrices, MatrixView
from muonfx.transforms.matrixwise import matrix_locality, name_patterns, on_stacks
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar

__all__ = ["SHAPE_RULES", "ShapeRule", "scale", "scale_by_learning_rate", "scale_by_shape", "scale_by_sign"]


def of_lists(function: Callable[[list[Tensor], bool], list[Tensor]]) -> InitAndUpdate:
    """Build a transform without state from a function of the leaves, and of whether it may overwrite them."""

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        at = Present(updates)
        return at.fill(function(at.pick(updates), donate.updates)), state

    return no_state, update


def of_leaves(function: Callable[[Tensor], Tensor]) -> InitAndUpdate:
    """Build a transform without state from a function of flat leaves (..., elements), a stack of them or one."""

    def update(leaves: list[Tensor], _: bool) -> list[Tensor]:
        (made,) = ew.by_stacks(function)([leaf.reshape(-1) for leaf in leaves])
        return [x.reshape(leaf.shape) for x, leaf in zip(made, leaves, strict=True)]

    return of_lists(update)


def _multiply_by(factor: Scalar, sign: float = 1.0) -> InitAndUpdate:
    # Not `leafwise`: one product is rounded once in any dtype, and casts would take two more passes.
    # A scheduler may write into a tensor that is the factor, so the sign is applied at every step.
    return of_lists(lambda leaves, reuse: ew.cast_like(ew.mul(leaves, sign * factor, reuse=reuse), leaves))


def _position_of_factor(factor: object) -> Position | None:
    """Return the position of a transform that multiplies updates by a factor, as far as its sign is known."""
    numbers = [number for _, number in parts_of(factor)] if isinstance(factor, Schedule) else [factor]
    known = [number for number in numbers if isinstance(number, float)]
    if any(x < 0 for x in known):
        return "either_sign" if any(x > 0 for x in known) else "turns"
    return None if known and len(known) == len(numbers) else "either_sign"


@transform(locality=Locality.ELEMENT, position=_position_of_factor)
def scale(factor: ScalarOrSchedule):
    """Multiply updates by a number.

    Args:
        factor: any finite number, or a schedule; the first update uses step 0.

    Raises:
        ValueError: ``factor`` is not finite.

    >>> import muonfx as mfx
    >>> mfx.scale(-0.5).update({"w": torch.ones(2)}, mfx.core.EmptyState())[0]
    {'w': tensor([-0.5000, -0.5000])}
    """
    return _multiply_by(checks.finite("factor", factor))


@transform(locality=Locality.ELEMENT, position="sets_size")
def scale_by_sign():
    """Replace every element by its sign: -1, 0 or 1. NaN stays NaN.

    Follows signSGD (arXiv 1802.04434) and Optax's transform of this name.

    >>> import muonfx as mfx
    >>> mfx.scale_by_sign().update({"w": torch.tensor([3.0, 0.0, -0.1])}, mfx.core.EmptyState())[0]
    {'w': tensor([ 1.,  0., -1.])}
    """
    return of_lists(lambda leaves, reuse: ew.apply("sign", leaves, reuse=reuse))


@transform(locality=Locality.ELEMENT, position="learning_rate", short_names={"lr": "learning_rate"})
def scale_by_learning_rate(learning_rate: ScalarOrSchedule):
    """Multiply updates by minus a learning rate, so that they point downhill. `scale` keeps the sign.

    Args:
        learning_rate: a number of 0 or more, or a schedule.

    Raises:
        ValueError: the rate is negative or not finite.

    >>> import muonfx as mfx
    >>> mfx.scale_by_learning_rate(0.1).update({"w": torch.ones(1)}, mfx.core.EmptyState())[0]
    {'w': tensor([-0.1000])}
    """
    return _multiply_by(checks.at_least("learning_rate", learning_rate, 0.0), -1.0)


ShapeRule = Literal["original", "match_rms_adamw", "spectral", "fan_in"]
"""The names of `SHAPE_RULES`."""

SHAPE_RULES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
    "fan_in": lambda rows, columns: 1.0 / columns,
}
"""Functions from rows and columns to a factor. In order: Keller Jordan's Muon; Moonlight; Dion and Scion; Scion."""


@transform(locality=Locality.ELEMENT)
def scale_each(factors: Mapping[str, float]):
    """Multiply each leaf by a fixed factor, given by name; `scale_by_shape` becomes this once shapes are known."""

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        at = Present(updates)
        leaves = at.pick(updates)
        return at.fill(ew.mul_each(leaves, [factors[name] for name in at.names()], reuse=donate.updates)), state

    return no_state, update


def _resolve_by_shape(tx: Transform, params: PyTree) -> Transform:
    """Return `scale_each`, or the transform itself if a leaf has blocks of different shapes."""
    lr_scaling = tx.arguments["lr_scaling"]
    matrices = Matrices(tx.arguments["view"], params, named=True)
    if any(len(own) > 1 for own in matrices.of_leaves):
        return tx
    named = zip(matrices.names, matrices.of_leaves, strict=True)
    return scale_each({name: shape_factor(lr_scaling, own) for name, (own,) in named})


def shape_factor(lr_scaling: str, matrix: Tensor) -> float:
    """Return the factor of a scaling for a matrix; 1 if the matrix is empty."""
    rows, columns = matrix.shape[-2:]
    return SHAPE_RULES[lr_scaling](rows, columns) if rows and columns else 1.0


@transform(
    locality=matrix_locality,
    reads_params=False,
    resolve=_resolve_by_shape,
    on_stacks=on_stacks,
    name_patterns=name_patterns,
)
def scale_by_shape(lr_scaling: ShapeRule = "match_rms_adamw", *, view: MatrixView = MatrixView()):
    r"""Scale each matrix by a function of its shape, so that one learning rate suits all.

    Args:
        lr_scaling: "original" $\sqrt{\max(1, r/c)}$, "match_rms_adamw" $0.2 \sqrt{\max(r, c)}$, "spectral"
            $\sqrt{r/c}$ or "fan_in" $1/c$, for r rows (output features) and c columns (input features) of the matrix,
            or of each block.
        view: which matrices a leaf consists of; the same as for `orthogonalize`.

    Raises:
        ValueError: ``lr_scaling`` is unknown; at `update`, a leaf is not a matrix.

    Follows ``torch.optim.Muon``'s ``adjust_lr_fn`` ("original", "match_rms_adamw"), Moonlight (arXiv 2502.16982), Dion,
    Scion (arXiv 2502.07529: "spectral", and "fan_in" for signs).

    Example:
        >>> import muonfx as mfx
        >>> mfx.scale_by_shape("spectral").update({"w": torch.ones(4, 1)}, mfx.core.EmptyState())[0]["w"].T
        tensor([[2., 2., 2., 2.]])
    """

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        matrices = Matrices(view, updates)

        def scaled(xs: list[Tensor]) -> tuple[list[Tensor]]:
            return (ew.mul_each(xs, [shape_factor(lr_scaling, x) for x in xs], reuse=donate.updates),)

        (out,) = matrices.map(scaled, matrices.of_leaves)
        return matrices.fill(out), state

    return no_state, update
