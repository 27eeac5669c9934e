"""Scaling of updates by a constant, by a schedule, by a learning rate, or by the shape of each matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from torch import Tensor

from muonfx.core import (
    Donation,
    EmptyState,
    InitAndUpdate,
    Locality,
    MatrixWork,
    Transform,
    checks,
    transform,
)
from muonfx.core.donation import NOTHING
from muonfx.core.schedules import ScalarOrSchedule, Schedule
from muonfx.core.simple import no_state
from muonfx.core.transform import Position
from muonfx.core.value import numbers_of
from muonfx.transforms.matrices import Matrices, MatrixView
from muonfx.transforms.matrixwise import matrix_locality, name_patterns, on_stacks
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar


def of_lists(function: Callable[[list[Tensor], bool], list[Tensor]]) -> InitAndUpdate:
    """Return a stateless ``init`` and ``update`` that apply a function to the list of all leaves with a gradient.

    It is called as ``function(leaves, may_overwrite)``, and returns the new leaves.
    """

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING
    ):
        present = Present(updates)  # the leaves that have a gradient
        leaves = present.pick(updates)
        new_leaves = function(leaves, donate.updates)
        return present.fill(new_leaves), state

    return no_state, update


def of_leaves(function: Callable[[Tensor], Tensor]) -> InitAndUpdate:
    """Return a stateless ``init`` and ``update`` that apply a function to each leaf, such as a division by its rms.

    The function receives a stack of flattened leaves of one size, (leaves, elements), and returns such a stack.

    >>> _, update = of_leaves(lambda stack: stack / stack.amax(-1, keepdim=True))
    >>> update({"w": torch.tensor([2.0, 4.0])}, EmptyState())[0]
    {'w': tensor([0.5000, 1.0000])}
    """

    def apply_to_leaves(leaves: list[Tensor], may_overwrite: bool) -> list[Tensor]:
        """Apply the function to stacks of flattened leaves, and give the results the shapes of the leaves."""
        flat_leaves = [leaf.reshape(-1) for leaf in leaves]
        # Equal sizes are enough, because the leaves are flattened: leaves of (2, 3) and (6,) form a stack of (2, 6).
        # One list, since the function has one result.
        (flat_results,) = ew.by_stacks(function, flat_leaves)
        results: list[Tensor] = []
        for flat_result, leaf in zip(flat_results, leaves, strict=True):
            results.append(flat_result.reshape(leaf.shape))
        return results

    return of_lists(apply_to_leaves)


def _multiply_by(factor: Scalar, sign: float = 1.0) -> InitAndUpdate:
    """Return a stateless ``init`` and ``update`` that multiply all updates by a number, such as a learning rate of 0.1.

    With ``sign=-1.0``, an update of 2.0 becomes -0.2: it is then added to the parameter to reduce the loss.
    """

    def multiply(leaves: list[Tensor], may_overwrite: bool) -> list[Tensor]:
        # Without `leafwise`: a single product is rounded once in any dtype, so conversions to fp32 would only cost two
        # passes. The sign is applied at every step, because a scheduler may write into a factor that is a tensor.
        products = ew.mul(leaves, sign * factor, reuse=may_overwrite)
        if isinstance(factor, Tensor):  # it may have widened the dtype
            products = ew.cast_like(products, leaves)
        return products

    return of_lists(multiply)


def _position_of_factor(factor: object) -> Position | None:
    """Return the position of `scale` in a chain, which depends on whether its factor reverses the sign of updates.

    A chain checks the order of its transforms by their positions. A factor that is a tensor or a function may have
    either sign. A schedule has the signs of its numbers: ``linear_schedule(1.0, -1.0, 10)`` has either sign.

    >>> _position_of_factor(-1.0), _position_of_factor(0.5), _position_of_factor(lambda step: 0.5)
    ('turns', None, 'either_sign')
    """
    numbers: list[object] = [factor]
    if isinstance(factor, Schedule):  # its arguments, such as 1.0, -1.0 and 10
        numbers = numbers_of(factor)
    floats = [number for number in numbers if isinstance(number, float)]
    has_negative = min(floats, default=0.0) < 0.0
    has_positive = max(floats, default=0.0) > 0.0
    has_unknown = len(floats) < len(numbers)  # a tensor or a function
    if has_negative and not has_positive:
        return "turns"
    if has_negative or has_unknown or not floats:  # both signs, or no number to judge by
        return "either_sign"
    return None


@transform(locality=Locality.ELEMENT, position=_position_of_factor)
def scale(factor: ScalarOrSchedule):
    """Multiply updates by a number.

    Args:
        factor: any finite number, or a schedule, which is called with 0 for the first update.

    Raises:
        ValueError: ``factor`` is not finite.

    >>> import muonfx as mfx
    >>> mfx.scale(-0.5).update({"w": torch.ones(2)}, mfx.core.EmptyState())[0]
    {'w': tensor([-0.5000, -0.5000])}
    """
    factor = checks.finite("factor", factor)
    return _multiply_by(factor)


@transform(locality=Locality.ELEMENT, position="sets_size")
def scale_by_sign():
    """Replace every element of the updates by its sign: -1, 0 or 1. A NaN or an infinite element becomes NaN.

    Follows signSGD (arXiv 1802.04434) and Optax's ``scale_by_sign``.

    >>> import muonfx as mfx
    >>> mfx.scale_by_sign().update({"w": torch.tensor([3.0, 0.0, -0.1])}, mfx.core.EmptyState())[0]
    {'w': tensor([ 1.,  0., -1.])}
    """

    def sign(leaves: list[Tensor], may_overwrite: bool) -> list[Tensor]:
        signs = ew.apply("sign", leaves)
        return ew.kept_visible(signs, leaves)  # NaN where an element was infinite or NaN

    return of_lists(sign)


@transform(locality=Locality.ELEMENT, position="learning_rate", short_names={"lr": "learning_rate"})
def scale_by_learning_rate(learning_rate: ScalarOrSchedule):
    """Multiply updates by minus the learning rate, so that adding them to the parameters reduces the loss.

    `scale` multiplies by a number without reversing the sign.

    Args:
        learning_rate: a number of 0 or more, or a schedule.

    Raises:
        ValueError: the rate is negative or not finite.

    >>> import muonfx as mfx
    >>> mfx.scale_by_learning_rate(0.1).update({"w": torch.ones(1)}, mfx.core.EmptyState())[0]
    {'w': tensor([-0.1000])}
    """
    learning_rate = checks.at_least("learning_rate", learning_rate, 0.0)
    return _multiply_by(learning_rate, sign=-1.0)


ShapeRule = Literal["original", "match_rms_adamw", "spectral", "fan_in"]
"""The name of a rule in `SHAPE_RULES`."""

SHAPE_RULES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
    "fan_in": lambda rows, columns: 1.0 / columns,
}
"""The rules of `scale_by_shape`: functions from rows and columns of a matrix to the factor of its update.

In order, they are the rules of Keller Jordan's Muon; Moonlight; Dion and Scion (for matrices); Scion (for signs).
"""


@transform(locality=Locality.ELEMENT)
def scale_each(factors: Mapping[str, float]):
    """Multiply each leaf by a number of its own: ``{"w": 2.0}`` doubles the leaf "w".

    `scale_by_shape` is replaced by this transform when the shapes of the parameters are known. A rank that has a shard
    of a leaf does not need the shape of the whole leaf then.
    """

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING
    ):
        present = Present(updates)  # the leaves that have a gradient
        leaves = present.pick(updates)
        leaf_factors = [factors[name] for name in present.names()]
        scaled = ew.mul_each(leaves, leaf_factors, reuse=donate.updates)
        return present.fill(scaled), state

    return no_state, update


def _resolve_by_shape(tx: Transform, params: PyTree) -> Transform:
    """Replace `scale_by_shape` by `scale_each`, with a factor for each parameter.

    A rank that has a part of a parameter then needs no whole shape. The transform stays if a parameter is divided into
    several stacks of matrices, since these may have several factors.

    >>> _resolve_by_shape(scale_by_shape("fan_in"), {"w": torch.zeros(4, 8)})
    scale_each({'w': 0.125})
    """
    lr_scaling = tx.arguments["lr_scaling"]
    matrices = Matrices(tx.arguments["view"], params)
    factors: dict[str, float] = {}
    for name, stacks in zip(
        matrices.present.names(), matrices.grouped(matrices.stacks), strict=True
    ):
        if len(stacks) > 1:  # such as stacks for query, key and value, which may differ in shape
            return tx
        factors[name] = shape_factor(lr_scaling, stacks[0])
    return scale_each(factors)


def shape_factor(lr_scaling: str, matrix: Tensor) -> float:
    """Return the number by which `scale_by_shape` multiplies the update of a matrix; 1 if the matrix is empty.

    For the rule "spectral" and a matrix of 4 rows and 1 column, it is the root of 4 / 1, so 2.
    """
    rows, columns = matrix.shape[-2:]
    if rows == 0 or columns == 0:  # the rules divide by the number of columns
        return 1.0
    return SHAPE_RULES[lr_scaling](rows, columns)


@transform(
    locality=matrix_locality,
    reads_params=False,
    resolve=_resolve_by_shape,
    matrices=MatrixWork(on_stacks=on_stacks),
    name_patterns=name_patterns,
)
def scale_by_shape(lr_scaling: ShapeRule = "match_rms_adamw", *, view: MatrixView = MatrixView()):
    r"""Multiply the update of each matrix by a function of its shape, so that one learning rate suits all matrices.

    Args:
        lr_scaling: the factor of a matrix with r rows (output features) and c columns (input features): "original" is
            $\sqrt{\max(1, r/c)}$, "match_rms_adamw" is $0.2 \sqrt{\max(r, c)}$, "spectral" is $\sqrt{r/c}$ and
            "fan_in" is $1/c$.
        view: a `MatrixView`, which divides each parameter into matrices; give the same view as to `orthogonalize`.

    Raises:
        ValueError: ``lr_scaling`` is unknown; at `update`, a leaf is not a matrix.

    Follows ``adjust_lr_fn`` of ``torch.optim.Muon`` ("original", "match_rms_adamw"), Moonlight (arXiv 2502.16982:
    "match_rms_adamw"), Dion ("spectral") and Scion (arXiv 2502.07529: "spectral", and "fan_in" for signs).

    Example:
        >>> import muonfx as mfx
        >>> mfx.scale_by_shape("spectral").update({"w": torch.ones(4, 1)}, mfx.core.EmptyState())[
        ...     0
        ... ]["w"].T
        tensor([[2., 2., 2., 2.]])
    """

    def update(
        updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING
    ):
        """Multiply each matrix by the factor of its shape."""
        matrices = Matrices(view, updates)
        factors = [shape_factor(lr_scaling, stack) for stack in matrices.stacks]
        scaled = ew.mul_each(matrices.stacks, factors, reuse=donate.updates)
        return matrices.fill(scaled), state

    return no_state, update
