"""Shared by the tests of polar: matrices with a chosen spectrum, and settings."""

import functools
import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from muonfx.polar import scalar_polynomial

SPECTRA = ("geometric", "clustered", "deficient", "gaussian")
FULL_RANK = ("geometric", "clustered", "gaussian")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Elementwise, for two runs that are equal in exact arithmetic, on Gaussian matrices with sides 8 to 128.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.2, torch.float16: 0.03}


@functools.cache
def steepest(name: str) -> float:
    """The largest slope of the scalar polynomial on [0, 1]: how far the iteration can amplify a rounding error."""
    s = torch.linspace(0, 1, 100_001, dtype=torch.float64, requires_grad=True)
    return torch.autograd.grad(scalar_polynomial(name, s).sum(), s)[0].abs().max().item()


def tolerance(name: str, dtype: torch.dtype) -> float:
    """The relative Frobenius error to allow for any spectrum, when eps times the slope is well below 1 (fp32, fp64)."""
    return 4 * torch.finfo(dtype).eps * steepest(name)


@dataclass(frozen=True)
class Problem:
    """`x = u diag(s) v^T` in float64, `s` descending with Frobenius norm 1 for each matrix."""

    recipe: str  # what a failing example prints: the call that builds it again
    x: torch.Tensor = field(repr=False)
    u: torch.Tensor = field(repr=False)
    s: torch.Tensor = field(repr=False)
    v: torch.Tensor = field(repr=False)


def orthogonal(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Orthonormal columns, `(..., m, r)` with m >= r, from a seeded QR."""
    return torch.linalg.qr(torch.randn(*shape, dtype=torch.float64, generator=generator))[0]


def spectrum(kind: str, r: int) -> torch.Tensor:
    """Singular values of `kind`, the largest 1."""
    if kind == "geometric":
        return torch.logspace(0, -3, r, dtype=torch.float64)
    if kind == "clustered":
        return torch.tensor([(1.0, 0.3, 0.02)[3 * i // r] for i in range(r)], dtype=torch.float64)
    if kind == "deficient":
        kept = (r + 1) // 2
        return torch.cat(
            [
                torch.logspace(0, -1, kept, dtype=torch.float64),
                torch.zeros(r - kept, dtype=torch.float64),
            ]
        )
    raise AssertionError(kind)


def problem(
    seed: int, m: int, n: int, kind: str = "geometric", batch: tuple[int, ...] = ()
) -> Problem:
    """A seeded problem with a chosen spectrum, no side zero."""
    generator = torch.Generator().manual_seed(seed)
    r = min(m, n)
    u, v = (orthogonal(*batch, side, r, generator=generator) for side in (m, n))
    if kind == "gaussian":
        u, s, vh = torch.linalg.svd(
            torch.randn(*batch, m, n, dtype=torch.float64, generator=generator), full_matrices=False
        )
        v = vh.mT
    else:
        s = spectrum(kind, r).expand(*batch, r)
    s = s / s.norm(dim=-1, keepdim=True)
    recipe = f"problem({seed}, {m}, {n}, {kind!r}, {batch})"
    return Problem(recipe, (u * s.unsqueeze(-2)) @ v.mT, u, s, v)


sides = st.integers(1, 33)
batches = st.lists(st.integers(1, 3), max_size=2).map(tuple)


@functools.lru_cache
def problems(kinds: tuple[str, ...] = SPECTRA) -> st.SearchStrategy[Problem]:
    """Problems with sides 1 to 33 and batch rank 0 to 2."""
    arguments = st.tuples(st.integers(0, 10**6), sides, sides, st.sampled_from(kinds), batches)
    return arguments.map(lambda given: problem(*given))


def coarse(x: torch.Tensor) -> torch.Tensor:
    """`x` with entries that survive bf16 and any scaling by 2^-100 to 2^100: 5 bits, and none far below the largest."""
    unit = 2.0 ** math.floor(math.log2(x.abs().max().item()))
    return (x / unit * 16).round() / 16 * unit


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest elementwise distance, in float64; NaN where either is."""
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest relative Frobenius distance of a matrix of `a` from its partner in `b`."""
    return (
        ((a.double() - b.double()).norm(dim=(-2, -1)) / b.double().norm(dim=(-2, -1))).max().item()
    )


SCALINGS = (
    "rows",
    "columns",
    "entries",
    "cauchy",
    "one huge row",
    "rank one",
    "hilbert",
    "near orthogonal",
    "clustered",
    "parallel rows",
    "two rows",
    "diagonal",
    "rotated pairs",
    "zero rows",
    "ones",
)


def scaled(
    kind: str, seed: int, n: int, m: int, batch: int = 1, spread: float = 3.0
) -> torch.Tensor:
    """Matrices `(batch, n, m)` in fp32 that are far from Gaussian, largest magnitude about 1 (`spread`: of exponents).

    In all of them, some directions of small singular values are within rows of large ones.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    x, r = normal(n, m), min(n, m)
    if kind in ("rows", "columns", "entries"):
        x = x * torch.exp(
            spread * normal(*{"rows": (n, 1), "columns": (1, m), "entries": (n, m)}[kind])
        )
    elif kind == "cauchy":
        x = x / normal(n, m)
    elif kind == "one huge row":
        x[:, seed % n] *= 10.0**spread
    elif kind == "rank one":
        x = normal(n, 1) * normal(1, m)
    elif kind == "hilbert":
        x = (1 / (torch.arange(n)[:, None] + torch.arange(m) + 1.0)).expand(batch, n, m)
    elif kind == "near orthogonal":
        x = torch.eye(n, m) + 1e-3 * spread * x
    elif kind == "clustered":
        u, v = (torch.linalg.qr(normal(side, r))[0] for side in (n, m))
        x = (u * torch.tensor([(1.0, 0.3, 0.02)[3 * i // r] for i in range(r)])) @ v.mT
    elif kind == "parallel rows":  # in pairs, as near as anything between 0 and 1
        x[:, 1::2] = (
            x[:, : 2 * (n // 2) : 2]
            + torch.rand(batch, n // 2, 1, generator=generator) * x[:, 1::2]
        )
    elif kind == "two rows":
        x[:, 1 % n] = x[:, 0] + 0.2 * torch.rand(batch, 1, generator=generator) * x[:, 1 % n]
        x[:, 2:] *= 1e-4
    elif kind in ("diagonal", "rotated pairs"):
        s = torch.exp(spread / 2 * normal(r))
        x = torch.zeros(batch, n, m)
        x.diagonal(dim1=-2, dim2=-1).copy_(s)
        if kind == "rotated pairs":
            half = n // 2
            first, second = x[:, :half].clone(), x[:, half : 2 * half].clone()
            x[:, :half], x[:, half : 2 * half] = (
                (first + second) / 2**0.5,
                (second - first) / 2**0.5,
            )
    elif kind == "zero rows":
        x[:, ::2] = 0
    elif kind == "ones":
        x = torch.ones(batch, n, m)
    else:
        raise AssertionError(kind)
    return x / x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
