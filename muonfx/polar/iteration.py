"""The Newton-Schulz iteration: `X <- a X + (b R + c R^2) X` with `R = X X^T`, with any number of steps on one `R`.

A stage of k steps takes one product for the Gram matrix `R`, one product to apply the result, and 4 k - 3 small
products. The standard iteration has k = 1. Each product is fused with its sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from muonfx.polar.coefficients import Step
from muonfx.polar.products import Functional, Shifted
from muonfx.polar.stages import Stage


def standard_iteration(x: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    """Apply the polynomials of all steps to the singular values of `x`, one Gram matrix for each."""
    for a, b, c in steps:
        gram = torch.bmm(x, x.mT)
        if c == 0:
            x = torch.baddbmm(x, gram, x, beta=a, alpha=b)
        else:
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz(
    x: torch.Tensor, stages: Sequence[Stage], on: Functional, gram: torch.Tensor | None = None
) -> torch.Tensor:
    """Apply the polynomials of all stages to the singular values of `x`, which are at most about 1."""
    for stage in stages:
        start = on.gram(x, -stage.center) if gram is None else gram  # a given one has the center subtracted
        x = on.weighted(x, composed(on, Shifted(stage.center, 1.0, start), stage.steps))
        gram = None
        on.keep()
    return x


def composed(on: Functional, r: Shifted, steps: Sequence[Step]) -> Shifted:
    """Return the matrix `Q` such that `Q X` is `X` after `steps`, given `R = X X^T`."""
    q: Shifted | None = None
    for i, step in enumerate(steps):
        g = _polynomial(on, r, step)
        q = g if q is None else _times(on, g, q)
        if i + 1 < len(steps):
            r = _times(on, g, _times(on, g, r))
            on.keep(q.rest, r.rest)
    assert q is not None  # a stage has a step
    return q


def _polynomial(on: Functional, r: Shifted, step: Step) -> Shifted:
    """Return `a I + b R + c R^2`."""
    a, b, c = step
    shift, linear, square = a + r.shift * (b + c * r.shift), (b + 2 * c * r.shift) * r.scale, c * r.scale**2
    if c == 0:
        return Shifted(shift, linear, r.rest)
    return Shifted(shift, 1.0, on.symmetric(r.rest, r.rest, r.rest, beta=linear, alpha=square))


def _times(on: Functional, p: Shifted, q: Shifted) -> Shifted:
    """Return `P Q` for commuting `P` and `Q`, whose product is therefore symmetric."""
    # shift p * shift q * I + (of_q * rest q + of_p * rest p) + scales * rest p * rest q. The sum has one weight, so the
    # larger factor becomes the beta of the product, which is exact and leaves a weight of at most 1.
    of_p, of_q, alpha = p.scale * q.shift, q.scale * p.shift, p.scale * q.scale
    if of_p == 0 or of_q == 0:
        addend, beta = (q.rest, of_q) if of_p == 0 else (p.rest, of_p)
    elif abs(of_q) >= abs(of_p):
        addend, beta = on.sum(q.rest, p.rest, of_p / of_q), of_q
    else:
        addend, beta = on.sum(p.rest, q.rest, of_q / of_p), of_p
    return Shifted(p.shift * q.shift, 1.0, on.symmetric(addend, p.rest, q.rest, beta=beta, alpha=alpha))


def newton_schulz_with_tensor(x: torch.Tensor, table: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Run the standard iteration with coefficients in a tensor `(k, 2 or 3)` that has derivatives."""
    for i in indices:
        square = torch.bmm(x, x.mT)
        weight = table[i, 1] * square
        if table.shape[1] == 3:
            weight = weight + table[i, 2] * torch.bmm(square, square)
        # Under vmap a coefficient is not a scalar for type promotion, so cast back to the dtype of the products.
        x = (table[i, 0] * x + torch.bmm(weight.to(x.dtype), x)).to(x.dtype)
    return x
