"""Quality of an orthogonalization: its error against the float64 polynomial, and its singular values.

Every time is reported together with the quality of the result. The reference is a float64 run of the candidate's own
polynomial, so the error does not depend on the choice of coefficients. The singular values show their effect.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from benchmarks.peers import plain

SPECTRA = ("gaussian", "geometric")
"""Independent normal entries, or singular values from 1 to 1e-4 in equal ratios with random singular vectors."""


class Quality(NamedTuple):
    """Quality of one matrix."""

    error: float
    """Relative Frobenius distance from the float64 run of the polynomial."""
    smallest: float
    largest: float
    """Smallest and largest singular value of the result."""


def matrix(spectrum: str, shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Return a float32 matrix of this shape and spectrum.

    >>> matrix("geometric", (2, 3)).norm() > 0.999
    tensor(True)
    """
    generator = torch.Generator().manual_seed(seed)
    if spectrum == "gaussian":
        return torch.randn(shape, generator=generator)
    rank = min(shape)
    left, right = (
        torch.linalg.qr(torch.randn(side, rank, generator=generator).double())[0] for side in shape
    )
    values = torch.logspace(0, -4, rank, dtype=torch.float64)
    return ((left * values) @ right.mT).float()


def judge(found: torch.Tensor, x: torch.Tensor, coefficients: str) -> Quality:
    """Return the quality of `found` as the polynomial of `x` with these coefficients; both are `(m, n)`."""
    return judge_against(found, plain(x, torch.float64, coefficients))


def judge_against(found: torch.Tensor, exact: torch.Tensor) -> Quality:
    """Return the quality of `found`, compared with the exact value.

    >>> judge_against(torch.eye(2), 2 * torch.eye(2, dtype=torch.float64))
    Quality(error=0.5, smallest=1.0, largest=1.0)
    """
    found = found.detach().double()
    wide = found.mT if found.shape[-2] > found.shape[-1] else found
    # Eigenvalues of the Gram matrix are exact enough here, and several times faster than an SVD.
    squares = torch.linalg.eigvalsh(wide @ wide.mT)
    error = ((found - exact).norm() / exact.norm()).item()
    return Quality(error, *(math.sqrt(max(0.0, squares[end].item())) for end in (0, -1)))


def up_to_scale(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return `found`, scaled by the factor that minimizes its distance from `exact`; updates differ in their scale.

    >>> up_to_scale(torch.tensor([[-2.0]]), torch.tensor([[1.0]]))
    tensor([[1.]])
    """
    found = found.to(exact.dtype)
    return found * ((found * exact).sum() / found.square().sum())
