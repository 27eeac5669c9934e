"""Normalize a batch of matrices and run the Newton-Schulz iteration, functionally or in place.

The iteration requires singular values of at most about 1. A matrix is scaled in three steps, in this order. *Round
once* to the compute dtype (the dtype of the matrix products), so that a matrix that is given in this dtype has the same
result as a wider one; to bf16 if "auto" chose fp16 (`Plan.rounded_to`). *Scale by a power of two*: exact, so the result
is bitwise the same for `x` and `2^k x`, and no later square under- or overflows. *Normalize* by the Frobenius norm, in
fp32 at least. On a device with fp64, large matrices, and all matrices in a compiled step, take the last two steps at
once: a norm in fp64 needs no power.

The iteration is `X <- a X + (b R + c R^2) X` with the Gram matrix `R = X X^T`. A *stage* is a number of steps on one
`R`. A stage of k steps takes one product for `R`, one product to apply the result, and 4 k - 3 small products. The
standard iteration has k = 1. Each product is fused with its sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muonfx.internal.tracing import functorch_is_active, is_differentiated
from muonfx.polar.coefficients import Step
from muonfx.polar.policy import Plan
from muonfx.polar.polynomials import Polynomials
from muonfx.polar.products import Buffered, Functional, FunctionalByQuack, Shifted
from muonfx.polar.stages import GramStage
from muonfx.polar.workspace import Workspace
from muonfx.tree.elementwise import wide_dtype

_COPIED_AT_ONCE = 1 << 18
"""The elements of which a CPU makes a wide copy at a time: 1 MiB in fp32."""


def power_of_two_scaled(x: Tensor) -> Tensor:
    """Scale each nonempty fp32 or fp64 matrix by a power of two, so that its largest magnitude is in [1, 2)."""
    return x * unit_power(x)


def unit_power(x: Tensor, dim: tuple[int, ...] = (-2, -1)) -> Tensor:
    """Return powers of two by which to multiply `x`, so that its largest magnitude over `dim` is in [1, 2)."""
    # The power is a constant for autograd, which is correct because every caller divides it out again.
    return power_of_two(x.detach().abs().amax(dim, keepdim=True))


def power_of_two(largest: Tensor) -> Tensor:
    """Return, for each positive fp32 or fp64 number in `largest`, the power of two that scales it into [1, 2).

    It is ``2 ** -floor(log2(x))``, without rounding. A matrix is multiplied by the power of its largest magnitude, so
    that no square of an element overflows.

    For the smallest (subnormal) and the largest numbers, this power is no normal number. They get the nearest power
    that is, and the scaled number is in [2^-51, 4). The power is 1 for zero, and the smallest for infinity and NaN.

    >>> power_of_two(torch.tensor([5.0, 0.3, 0.0]))
    tensor([0.2500, 4.0000, 1.0000])
    """
    # `frexp` writes x as m 2^e with m in [1/2, 1), so 2 m / x is the power 2^(1 - e), by which x becomes 2 m. The
    # division is exact. `ldexp` and `pow` round, and on torch 2.11 `vmap` cannot read the exponent from the bits.
    mantissa, _ = torch.frexp(largest)
    power = 2 * mantissa / largest
    power = torch.where(largest == 0, torch.ones_like(largest), power)
    smallest_power = torch.finfo(largest.dtype).smallest_normal
    largest_power = 2 / smallest_power
    # For infinity and NaN the quotient is NaN. Scaled by the smallest power, they stay what they are.
    return power.nan_to_num(nan=smallest_power).clamp(smallest_power, largest_power)


def same_range(held: torch.dtype, compute: torch.dtype) -> bool:
    """Return True if no number under- or overflows when it is cast from the dtype `held` to the dtype `compute`.

    Args:
        held: the dtype of the input of `orthogonalize`.
        compute: the dtype of its matrix products.

    >>> same_range(torch.float32, torch.bfloat16), same_range(torch.float32, torch.float16)
    (True, False)
    """
    # Among fp16, bf16, fp32 and fp64, a dtype that has smaller normal numbers has larger ones too, or nearly the same.
    return torch.finfo(compute).smallest_normal <= torch.finfo(held).smallest_normal


def rounded_and_scaled(x: Tensor, compute: torch.dtype) -> Tensor:
    """Round each matrix of `x` to the dtype `compute`, and scale it such that its largest magnitude is in [1, 2).

    The factor is a power of two, so scaling does not round. The rounded values are returned in fp32 or wider.

    >>> rounded_and_scaled(torch.tensor([[[3e-20, 0.0]]]), torch.float16)
    tensor([[[1.1064, 0.0000]]])
    """
    wide = wide_dtype(compute)
    if same_range(x.dtype, compute):
        return power_of_two_scaled(x.to(compute).to(wide))
    # `compute` has a smaller exponent range than `x`, as fp16 has for fp32. Rounding first could turn a matrix into
    # zeros or infinities, so scale first.
    x = x.to(wide_dtype(x.dtype, compute))
    # Twice: for subnormal input the first power is only the nearest normal one, which is too small for fp16.
    scaled = power_of_two_scaled(power_of_two_scaled(x))
    return scaled.to(compute).to(wide)


def frobenius_normalized(x: Tensor, compute: torch.dtype, safety: float = 1.0) -> Tensor:
    """Divide nonempty matrices by `safety` times their Frobenius norm; return them in the dtype `compute`.

    A zero matrix stays zero, and has a finite gradient.

    >>> frobenius_normalized(torch.tensor([[[3.0, 4.0]]]), torch.float32)
    tensor([[[0.6000, 0.8000]]])
    """
    # The sum of squares must not overflow or lose small elements. Compiled code sums in fp64 without a copy. Else fp64
    # would need a wide copy of the matrix, so its elements are scaled to magnitudes below 2 first.
    if torch.compiler.is_compiling() and can_sum_in_fp64(x.device, compute):
        return normalized_in_fp64(x, compute, safety)
    x = rounded_and_scaled(x, compute)
    total = (x * x).sum((-2, -1), keepdim=True)
    return (x * inverse_root(total, safety)).to(compute)


def can_sum_in_fp64(device: torch.device, compute: torch.dtype) -> bool:
    """Return True if squares of elements are summed in fp64, where none of them overflows or is lost."""
    # MPS has no fp64, and a CPU would make a wide copy. For fp64 itself there is no wider dtype.
    return device.type not in ("cpu", "mps") and compute != torch.float64


def normalized_in_fp64(x: Tensor, compute: torch.dtype, safety: float) -> Tensor:
    """Divide matrices by `safety` times their norm, computed in fp64. Return them in the dtype `compute`.

    It is for compiled code, which keeps the wide values in registers. Uncompiled, they would be copies with 8 bytes for
    each element.
    """
    # 1. Round first, so that a matrix that is given in the dtype `compute` has the same result as a wider one.
    if same_range(x.dtype, compute):
        x = x.to(compute)
    elif x.dtype.itemsize > compute.itemsize:
        # fp32 to fp16, which needs a scale; bf16 is rounded at the end only
        x = rounded_and_scaled(x, compute)
    # 2. Normalize.
    wide = x.double()
    total = (wide * wide).sum((-2, -1), keepdim=True)
    return (wide * inverse_root(total, safety)).to(compute)


def inverse_root(total: Tensor, safety: float) -> Tensor:
    """Return `1 / (safety * sqrt(total))` for each sum of squares; at 0, `1 / safety` and a finite gradient."""
    # `where` instead of an eps, which would change the result for small matrices. It is inside the root, whose
    # derivative at zero is infinite and would enter the gradient as 0 * inf.
    scale = torch.where(total == 0, torch.ones_like(total), total).rsqrt()
    return scale if safety == 1.0 else scale / safety


def normalize_(batch: Tensor, safety: float, compute: torch.dtype) -> Tensor:
    """Divide each matrix of a nonempty batch `(b, n, m)` by `safety` times its Frobenius norm, in place.

    Return the batch in the dtype `compute`, in the same memory: its dtype, or one with as many bytes. A bf16 matrix is
    scaled in fp32 or fp64 before it is rounded to fp16, so its large elements do not overflow.
    """
    if can_sum_in_fp64(batch.device, compute):
        return normalize_in_fp64_(batch, safety, compute)
    return normalize_by_powers_(batch, safety, compute)


def normalize_in_fp64_(batch: Tensor, safety: float, compute: torch.dtype) -> Tensor:
    """Normalize a batch as `normalize_` does, in two passes: no square of fp32 overflows or is lost in fp64."""
    result = batch.view(compute)
    norms = torch.stack(torch._foreach_norm(list(batch.unbind()), 2, dtype=torch.float64))
    norms.clamp_(min=torch.finfo(torch.float64).smallest_normal)  # a zero matrix stays zero
    factors = torch.div(torch.tensor(1 / safety, dtype=torch.float64, device="cpu"), norms)
    # The product is rounded once, to the dtype of the result.
    return torch.mul(batch, factors[:, None, None], out=result)


def normalize_by_powers_(batch: Tensor, safety: float, compute: torch.dtype) -> Tensor:
    """Divide each matrix of a batch by `safety` times its Frobenius norm, in place, without wide copies of the batch.

    Return the batch in the dtype `compute`, which has as many bytes, such as bf16 or fp16.
    """
    wide = wide_dtype(compute)
    # 1. Multiply each matrix by a power of two, to magnitudes below 2, so that no square overflows or is lost.
    # In 1/30 of the time of infinity norms.
    extremes = [torch.aminmax(matrix) for matrix in batch.unbind()]
    minima = torch.stack([extreme.min for extreme in extremes])
    maxima = torch.stack([extreme.max for extreme in extremes])
    largest_magnitudes = torch.maximum(maxima, -minima).to(wide)
    _multiply_(batch, power_of_two(largest_magnitudes))
    result = rounded_in_place(batch, compute)
    # 2. Multiply it by 1 / (safety * norm). Norms are taken by rows, because sums are pairwise and norms are not.
    squared_norms = _row_norms(result, wide).square().sum(-1)
    _multiply_(result, inverse_root(squared_norms, safety))
    return result


def _row_norms(batch: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norm of each row of a batch `(b, n, m)`, of shape `(b, n)`, computed in `dtype`.

    For another dtype, a CPU copies the rows first. They are taken in parts whose copies stay in its cache, which takes
    a third of the time. Only CPUs and MPS call this with a narrow dtype.
    """
    rows = batch.flatten(0, 1)
    part_count = 1
    if batch.dtype != dtype:
        # A part has two rows at least: several threads would sum a single row in another order.
        part_count = max(1, min(batch.numel() // _COPIED_AT_ONCE, len(rows) // 2))
    parts = rows.tensor_split(part_count)
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=dtype) for part in parts]
    return torch.cat(norms).view(batch.shape[:2])


def _multiply_(batch: Tensor, factors: Tensor) -> None:
    """Multiply each matrix of a batch by its own factor, in place; compute in fp32 at least, round once."""
    for matrix, factor in zip(batch.unbind(), factors.unbind(), strict=True):
        matrix.mul_(factor)


def rounded_in_place(batch: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a batch in another dtype with as many bytes, in the same memory; the batch itself if it has this dtype.

    >>> x = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    >>> rounded_in_place(x, torch.float16)
    tensor([1., 2.], dtype=torch.float16)
    """
    if batch.dtype == dtype:
        return batch
    return batch.view(dtype).copy_(batch)


def row_normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the rows of `x` such that its spectral norm is at most 1; return the result and its own Gram matrix.

    Each row is divided by the square root of its row sum of `|x x^T|` (Gershgorin; arXiv 2208.03160). The spectral norm
    is closer to 1 than after a division by the Frobenius norm. The singular vectors change, so the iteration finds the
    polar factor of another matrix. A zero row stays zero.

    >>> result, gram = row_normalized(torch.tensor([[[2.0, 0.0], [0.0, 5.0]]]))
    >>> result
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    # First scale rows to norm 1, x_i = norm_i u_i: in fp16 the squares of small rows underflow next to large ones.
    wide = wide_dtype(x.dtype)
    norms = torch.linalg.vector_norm(x.detach(), dim=-1, keepdim=True, dtype=wide)
    norms = torch.where(norms == 0, torch.ones_like(norms), norms)
    u = (x / norms).to(x.dtype)
    gram_of_u = torch.bmm(u, u.mT)
    # The row sum of |x x^T|: sum_j |x_i x_j^T| = norm_i * sum_j |u_i u_j^T| norm_j
    row_sums = norms * (gram_of_u.abs() * norms.mT).sum(-1, keepdim=True)
    row_sums = torch.where(row_sums == 0, torch.ones_like(row_sums), row_sums)
    # Row i of the result: x_i / sqrt(row_sum_i) = scale_i u_i, and its Gram matrix: scale_i (u_i u_j^T) scale_j
    scale = norms * row_sums.rsqrt()
    result = (u * scale).to(x.dtype)
    gram = (gram_of_u * scale * scale.mT).to(x.dtype)
    return result, gram


def as_function(x: Tensor, plan: Plan, coefficients: Polynomials) -> Tensor:
    """Orthogonalize a nonempty batch `(b, n, m)`, n <= m, without in-place writes.

    Return it in `plan.dtype`, or in `plan.rounded_to` if that is not None.
    """
    if plan.rounded_to is None:
        return _orthogonalized(x, plan, coefficients)
    return _orthogonalized(x.to(plan.rounded_to), plan, coefficients).to(plan.rounded_to)


def _orthogonalized(x: Tensor, plan: Plan, coefficients: Polynomials) -> Tensor:
    """Divide matrices by their norm and run the Newton-Schulz iteration. Return them in `plan.dtype`.

    The iteration is one of two: with coefficients in a tensor, or with numbers, in the stages of the plan.
    """
    # This is also done before `row_normalized`, whose result it does not change: it keeps row sums in the range of
    # fp16.
    x = frobenius_normalized(x, plan.dtype, coefficients.safety)
    if coefficients.table is not None:  # coefficients in a tensor
        return newton_schulz_with_tensor(x, coefficients.table, coefficients.indices)
    gram = None  # computed by the first stage
    if coefficients.row_scaling:
        x, gram = row_normalized(x)
    return newton_schulz(x, plan.stages, _functional_products(x, plan), gram)


def _functional_products(x: Tensor, plan: Plan) -> Functional:
    """Return products that allocate every result, as derivatives require; by quack in a compiled graph without them."""
    is_plain = not (functorch_is_active() or is_differentiated(x))
    if plan.products == "quack" and is_plain and torch.compiler.is_compiling():
        return FunctionalByQuack()
    return Functional()


def in_place(
    batch: Tensor,
    plan: Plan,
    coefficients: Polynomials,
    *,
    tall: bool,
    workspace: Workspace,
    results: Workspace,
) -> Tensor:
    """Orthogonalize a batch of large matrices, and overwrite it. All other memory is reused, which saves time.

    Args:
        batch: matrices `(b, n, m)`, or `(b, m, n)` if `tall`.
        plan: the dtype, the stages and the products of the iteration.
        coefficients: their `safety` is used: the matrices are divided by it times their norm.
        tall: True if the matrices have more rows than columns.
        workspace: memory for small matrices, which the next call may overwrite.
        results: memory for a second batch. The iteration writes into `batch` and into this one in turn.

    Returns:
        The result, in the memory of `batch` or of the second batch, and in the dtype of `batch`.
    """
    x = normalize_(batch, coefficients.safety, plan.dtype)
    products = Buffered(
        x,
        tall=tall,
        how=plan.products,
        small=plan.small_products,
        workspace=workspace,
        results=results,
    )
    result = newton_schulz(x, plan.stages, products)
    return rounded_in_place(result, batch.dtype)


def newton_schulz(
    x: Tensor, stages: Sequence[GramStage], products: Functional, gram: Tensor | None = None
) -> Tensor:
    """Run the Newton-Schulz iteration on `x` in stages; the steps of a stage share one Gram matrix `x x^T`.

    A stage computes `R = x x^T`, combines the polynomials of its steps into one small matrix `Q`, and ends with
    `x <- Q x`.

    Args:
        x: the batch of matrices, with singular values of at most about 1.
        stages: the steps of each stage, and its center: about the mean eigenvalue of `R`.
        products: computes the matrix products.
        gram: `R - center * I` of the first stage, if it is known.
    """
    for stage in stages:
        if gram is None:
            gram = products.gram(x, -stage.center)
        # R = center * I + gram, which rounds less than R itself.
        r = Shifted(stage.center, 1.0, gram)
        q = composed(products, r, stage.steps)
        x = products.weighted(x, q)
        products.keep()  # no small matrix is used in the next stage
        gram = None
    return x


def composed(products: Functional, r: Shifted, steps: Sequence[Step]) -> Shifted:
    """Combine several steps of the iteration: return the matrix `Q` such that `Q X` is `X` after all of them.

    A step `(a, b, c)` is `X <- G X`, with `R = X X^T` and `G = a I + b R + c R^2`. For the next step, `R <- G R G` and
    `Q <- G Q`. So the large matrix X is not needed; `r` is its first `X X^T`. All matrices are `Shifted`: a multiple of
    the identity plus a multiple of the matrix `rest`.
    """
    g = _polynomial(products, r, steps[0])
    q = g  # the product of G and the first Q, which is the identity
    for step in steps[1:]:
        # G (G R), which is G R G: polynomials of R commute.
        r = _times(products, g, _times(products, g, r))
        # The old R, G and G R are not used again: release their buffers.
        products.keep(q.rest, r.rest)
        g = _polynomial(products, r, step)
        q = _times(products, g, q)
    return q


def _polynomial(products: Functional, r: Shifted, step: Step) -> Shifted:
    """Return the matrix `a I + b R + c R^2` for a step `(a, b, c)` and a symmetric matrix R, with one product.

    A matrix is stored as `Shifted(shift, scale, rest)`, which is `shift * I + scale * rest`.
    """
    # With R = s I + t E: a I + b R + c R^2 = (a + b s + c s^2) I + (b + 2 c s) t E + c t^2 E^2.
    a, b, c = step
    s, t, e = r
    shift = a + s * (b + c * s)
    linear = (b + 2 * c * s) * t
    square = c * t**2
    if c == 0:
        return Shifted(shift, linear, e)
    rest = products.symmetric(e, e, e, beta=linear, alpha=square)  # linear * E + square * E E
    return Shifted(shift, 1.0, rest)


def _times(products: Functional, p: Shifted, q: Shifted) -> Shifted:
    """Return the product of two symmetric matrices that commute, so that the product is symmetric too."""
    # With P = s I + t E and Q = u I + v F: P Q = s u I + (s v F + t u E) + t v E F.
    s, t, e = p
    u, v, f = q
    weight, bracket = _combined(products, s * v, f, t * u, e)
    product = products.symmetric(bracket, e, f, beta=weight, alpha=t * v)
    return Shifted(s * u, 1.0, product)


def _combined(
    products: Functional, s: float, x: Tensor, t: float, y: Tensor
) -> tuple[float, Tensor]:
    """Return a number and a matrix whose product is `s x + t y`: `s` and `x + (t / s) y`, with the ratio at most 1."""
    if abs(t) > abs(s):
        return _combined(products, t, y, s, x)
    if t == 0:
        return s, x
    return s, products.sum(x, y, t / s)


def newton_schulz_with_tensor(x: Tensor, table: Tensor, indices: Sequence[int]) -> Tensor:
    """Run Newton-Schulz with coefficients in a tensor, whose derivatives autograd can take.

    A step is `x <- a x + (b R + c R^2) x` with the Gram matrix `R = x x^T`. The row `indices[k]` of `table` has the
    coefficients `(a, b, c)` of step k, or `(a, b)`.
    """
    for i in indices:
        gram = torch.bmm(x, x.mT)
        weight = table[i, 1] * gram
        if table.shape[1] == 3:
            weight = weight + table[i, 2] * torch.bmm(gram, gram)
        # Under vmap a coefficient is not a scalar for type promotion, so cast back to the dtype of the products.
        x = (table[i, 0] * x + torch.bmm(weight.to(x.dtype), x)).to(x.dtype)
    return x
