"""How good an orthogonalization is: its distance from the float64 polynomial, and where singular values end up.

Beside every time stands the quality of what was computed in it. The polynomial is the one that the candidate claims to
compute, so that a set of coefficients is not counted as an error; what the set does to singular values is the band.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from benchmarks.peers import plain

SPECTRA = ("gaussian", "geometric")
"""Independent normal entries; singular values 1 to 1e-4 in equal ratios between random singular vectors."""


class Quality(NamedTuple):
    """Of one matrix."""

    error: float
    """The Frobenius distance from the float64 run of the polynomial, over the latter's norm."""
    smallest: float
    largest: float
    """Of the singular values that came out."""


def matrix(spectrum: str, shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """A float32 matrix of this shape and spectrum.

    >>> matrix("geometric", (2, 3)).norm() > 0.999
    tensor(True)
    """
    generator = torch.Generator().manual_seed(seed)
    if spectrum == "gaussian":
        return torch.randn(shape, generator=generator)
    rank = min(shape)
    left, right = (torch.linalg.qr(torch.randn(side, rank, generator=generator).double())[0] for side in shape)
    values = torch.logspace(0, -4, rank, dtype=torch.float64)
    return ((left * values) @ right.mT).float()


def judge(found: torch.Tensor, x: torch.Tensor, coefficients: str) -> Quality:
    """The quality of `found` as the value of a set's polynomial at `x`, both `(m, n)`."""
    return judge_against(found, plain(x, torch.float64, coefficients))


def judge_against(found: torch.Tensor, exact: torch.Tensor) -> Quality:
    """The quality of `found` where the exact value is already known.

    >>> judge_against(torch.eye(2), 2 * torch.eye(2, dtype=torch.float64))
    Quality(error=0.5, smallest=1.0, largest=1.0)
    """
    found = found.detach().double()
    wide = found.mT if found.shape[-2] > found.shape[-1] else found
    # Squares of singular values: exact enough here, and several times as fast as an SVD.
    squares = torch.linalg.eigvalsh(wide @ wide.mT)
    error = ((found - exact).norm() / exact.norm()).item()
    return Quality(error, *(math.sqrt(max(0.0, squares[end].item())) for end in (0, -1)))


def up_to_scale(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """`found` times the number that brings it nearest to `exact`: for updates, whose size is a matter of the rule.

    >>> up_to_scale(torch.tensor([[-2.0]]), torch.tensor([[1.0]]))
    tensor([[1.]])
    """
    found = found.to(exact.dtype)
    return found * ((found * exact).sum() / found.square().sum())
