"""Scaling of another transform's update of each matrix: by the noise of the gradients (NAMO), or by a dual norm."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.contrib.norms import norm
from muonfx.core import Donation, Locality, MatrixWork, Transform, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.polar.iteration import unit_power
from muonfx.transforms.formulas import bias_correction, divide_unless, running_average
from muonfx.transforms.leafwise import WideStateDtype, read_wide, write, zeros
from muonfx.transforms.matrices import Matrices, MatrixView
from muonfx.transforms.matrixwise import (
    MatrixSlot,
    init_matrix_slot,
    matrix_locality,
    name_patterns,
    read_matrix_slot,
    write_matrix_slot,
)
from muonfx.tree import PyTree, device_of
from muonfx.tree import elementwise as ew
from muonfx.tree.elementwise import Scalar


class NamoState(NamedTuple):
    """State of the transform `scale_by_namo`: a step count, running averages, and the state of the inner transform."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of updates so far, 0-d int64."""
    mu: PyTree
    """The running average of the gradients: a tree like the parameters."""
    nu: PyTree
    """The running average of the squared Frobenius norm of each matrix's gradient, of shape (..., 1, 1)."""
    inner: PyTree
    """The state of the inner transform."""


def _locality(inner: Transform, *_: object, view: MatrixView, **__: object) -> Locality:
    """Return the locality of a transform that computes on matrices and calls the transform ``inner``."""
    return max(matrix_locality(view=view), inner.locality)


def _reads_params(inner: Transform, *_: object, **__: object) -> bool:
    return inner.reads_params


@transform(
    locality=_locality,
    reads_params=_reads_params,
    # The inner transform has a state for each leaf.
    matrices=MatrixWork(on_stacks=lambda tx, shapes: (tx, {})),
    name_patterns=name_patterns,
    short_names={"betas": ("b1", "b2"), "momentum": "b1", "eps": "eps"},
    position="sets_size",
)
def scale_by_namo(
    inner: Transform,
    b1: ScalarOrSchedule = 0.95,
    b2: ScalarOrSchedule = 0.99,
    eps: ScalarOrSchedule = 1e-8,
    *,
    dtype: WideStateDtype = "auto",
    view: MatrixView = MatrixView(),
):
    r"""Apply a transform to the averaged gradients, and scale each matrix's update down if its gradients are noisy.

    The averages of the gradients $G_t$ of a matrix are $M_t = \beta_1 M_{t-1} + (1 - \beta_1) G_t$ and
    $v_t = \beta_2 v_{t-1} + (1 - \beta_2) \|G_t\|_F^2$. The update is $\alpha_t D(M_t)$ for the inner transform $D$,
    with the factor $\alpha_t = \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t} \frac{\|M_t\|_F}{\sqrt{v_t} + \epsilon}$. It
    is near 1 if the gradients of the last steps agree, and small if they are noise.

    Args:
        inner: the transform $D$, usually `orthogonalize`. If it is a chain that contains `add_decayed_weights`,
            $\alpha_t$ also scales the weight decay, as in the paper.
        b1: decay rate of the average, in [0, 1).
        b2: decay rate of the squared norm, in [0, 1).
        eps: added to the root in the divisor, not negative.
        dtype: storage dtype of both averages. "auto" is float32, or float64 for float64 parameters; None is the dtype
            of each parameter.
        view: a `MatrixView`, which divides each parameter into matrices; give the same view as to the inner transform.

    Raises:
        ValueError: an argument is out of range, or a dtype is a string other than "auto"; at `init`, a leaf is not a
            matrix or does not fit the view.

    The squared norm is stored in fp32, so a gradient whose norm is above 1.8e19 counts as one of this norm, and the
    update is too large. `clip_by_global_norm` in front keeps norms below.

    Follows NAMO (Zhang, Liu and Schaeffer, arXiv 2602.17080).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.scale_by_namo(
        ...     mfx.orthogonalize(coefficients="polar_express"), b1=0.5, b2=0.5
        ... )
        >>> grads = {"w": torch.diag(torch.tensor([3.0, 1.0]))}
        >>> first, state = tx.update(grads, tx.init(grads))
        >>> turned, _ = tx.update({"w": -grads["w"]}, state)
        >>> first["w"].diagonal().round(decimals=2), turned["w"].diagonal().round(decimals=2)
        (tensor([1., 1.]), tensor([-0.3300, -0.3300]))
    """
    b1 = checks.in_unit_interval("b1", b1)
    b2 = checks.in_unit_interval("b2", b2)
    eps = checks.at_least("eps", eps, 0.0)
    slot = MatrixSlot(dtype=dtype)  # a squared norm for each matrix

    def init(params: PyTree) -> NamoState:
        return NamoState(
            count=ew.new_count(device_of(params)),
            mu=zeros(params, dtype),
            nu=init_matrix_slot(slot, Matrices(view, params)),
            inner=inner.functions.init(params),
        )

    def update(
        updates: PyTree,
        state: NamoState,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: object,
    ):
        """Average gradients and squared norms, and scale the inner transform's direction of each matrix by alpha.

        The names are as in the docstring of `scale_by_namo`: the average m of the gradients, and the average v of
        the squared norm of each matrix.
        """
        # These are the matrices of the leaves that have a gradient. The others keep their state.
        matrices = Matrices(view, updates)
        present = matrices.present
        old_v = read_matrix_slot(slot, matrices, state.nu)
        count = state.count + 1

        # m = b1 m + (1 - b1) g, for whole leaves, in the wider dtype of both
        g, m = read_wide(present, updates, state.mu)
        m = ew.lerp(m, g, 1.0 - b1)

        # For each matrix: v = b2 v + (1 - b2) |g|^2,  alpha = sqrt(1 - b2^t) / (1 - b1^t) * |m| / (sqrt(v) + eps)
        correction = bias_correction(b2, count).sqrt() / bias_correction(b1, count)
        v_and_alpha = functools.partial(_v_and_alpha, b2=b2, eps=eps, correction=correction)
        # `by_stacks` calls `_v_and_alpha` once for all small matrices of one shape.
        v, alpha = ew.by_stacks(v_and_alpha, matrices.stacks, matrices.split(m), old_v, results=2)

        # update = alpha D(m)
        averages = write(present, m, updates)
        # The averages may share storage with the new state.
        donation = Donation(updates=False, state=donate.state)
        directions, inner_state = inner.run(
            averages, state.inner, params, donate=donation, **extras
        )
        _require_no_further_updates(directions, updates)
        direction_stacks = matrices.split(present.pick(directions))
        (scaled,) = ew.by_stacks(_scale, direction_stacks, alpha)

        new_state = NamoState(
            count=count,
            mu=write(present, m, state.mu),
            nu=write_matrix_slot(slot, matrices, v, state.nu),
            inner=inner_state,
        )
        return matrices.fill(scaled), new_state

    return init, update


def _require_no_further_updates(directions: PyTree, updates: PyTree) -> None:
    """Raise an error if the inner transform has an update for a leaf without a gradient."""
    update_leaves = tree.leaves(updates)
    for (name, direction), update in zip(tree.named_leaves(directions), update_leaves, strict=True):
        if direction is not None and update is None:
            raise ValueError(
                f"scale_by_namo: the inner transform returned an update for {name!r}, expected None as its "
                "gradient is None: accumulate outside, accumulate(scale_by_namo(...), every)"
            )


def _v_and_alpha(
    g: Tensor, m: Tensor, old_v: Tensor, *, b2: Scalar, eps: Scalar, correction: Tensor
) -> tuple[Tensor, ...]:
    """Return for each matrix the new average v of its squared gradient norm, and the factor alpha of its update.

    They are ``v = b2 v + (1 - b2) |g|^2`` and ``alpha = correction * |m| / (sqrt(v) + eps)``. Here g is the gradient, m
    its running average, and ``correction`` Adam's correction of the bias of both averages.
    """
    wide = ew.wide_dtype(g.dtype, old_v.dtype)
    g_norm = norm(g).to(wide)
    m_norm = norm(m).to(wide)
    largest = torch.finfo(old_v.dtype).max
    square = g_norm.square().clamp(max=largest)  # so that a finite norm keeps v finite
    v = running_average(old_v.to(wide), square, b2)
    divisor = ew.safe_sqrt(v) + eps
    # If all gradients have been zero, 0 / (0 + eps) is 0 for any eps.
    ratio = divide_unless(divisor == 0, m_norm, divisor, otherwise=0.0)
    alpha = correction.to(wide) * ratio
    return v, alpha


def _scale(direction: Tensor, alpha: Tensor) -> Tensor:
    """Return each matrix times its factor, in the dtype of the matrix."""
    return (direction * alpha).to(direction.dtype)


@transform(
    locality=_locality,
    reads_params=_reads_params,
    name_patterns=name_patterns,
)
def scale_by_dual_norm(inner: Transform, *, view: MatrixView = MatrixView()):
    r"""Multiply a transform's update of each matrix by its inner product with the incoming gradient.

    The update is $\langle G, D(G) \rangle\, D(G)$ for the inner transform $D$. If $D$ returns the direction of steepest
    ascent of length 1 in some norm, the inner product is the dual norm of the gradient, and the update is the step of
    steepest descent in this norm. The dual norm is the nuclear norm (the sum of singular values) for `orthogonalize`,
    and the sum of magnitudes for `scale_by_sign`. The size of the updates then follows the size of the gradients.

    Args:
        inner: the transform whose updates are scaled.
        view: a `MatrixView`, which divides each parameter into matrices; give the same view as to the inner transform.

    Raises:
        ValueError: at `update`, a leaf is not a matrix or does not fit the view.

    Follows PolarGrad (arXiv 2505.21799), Bernstein and Newhouse (arXiv 2409.20325) and ``optax.contrib.muon`` with
    ``adaptive=True``.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.scale_by_dual_norm(mfx.orthogonalize(coefficients="polar_express"))
        >>> grads = {"w": torch.diag(torch.tensor([3.0, 1.0]))}
        >>> tx.update(grads, tx.init(grads))[0]["w"].diagonal().round(decimals=2)
        tensor([4., 4.])
    """

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: object,
    ):
        """Run the inner transform, and multiply its update d of each matrix by the inner product with the gradient g.

        For d = [[1, 0]] and g = [[3, 4]], the inner product is 3, and the update [[3, 0]].
        """
        # The gradient is needed after the inner transform, so it is not donated.
        donation = Donation(updates=False, state=donate.state)
        directions, state = inner.run(updates, state, params, donate=donation, **extras)
        matrices = Matrices(view, directions)
        gradients = matrices.present.pick(updates)  # of the leaves that have a direction
        for index, gradient in enumerate(gradients):
            # An accumulating inner transform may update a leaf without a gradient.
            if gradient is None:
                gradients[index] = torch.zeros_like(matrices.leaves[index])
        # `by_stacks` calls the function once for all small matrices of one shape.
        (scaled,) = ew.by_stacks(
            _scale_by_inner_product, matrices.stacks, matrices.split(gradients)
        )
        return matrices.fill(scaled), state

    return inner.functions.init, update


def _scale_by_inner_product(direction: Tensor, gradient: Tensor) -> Tensor:
    """Return ``<g, d> d`` for each matrix d (``direction``) and g (``gradient``): d times their inner product.

    >>> _scale_by_inner_product(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[3., 0.]])
    """
    if direction.numel() == 0:
        return direction.clone()
    wide = ew.wide_dtype(direction.dtype)
    d = direction.to(wide)
    g = gradient.to(wide)
    power = unit_power(g)  # so that no product overflows or underflows
    small_product = (g * power * d).sum((-2, -1), keepdim=True)
    scaled = d * small_product / power
    return scaled.to(direction.dtype)
