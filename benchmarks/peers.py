"""Orthogonalizations and optimizers of other packages, and a plain implementation, to compare muonfx with.

A package that is not installed is skipped, with a printed line. ``pip install -c constraints.txt -e '.[bench]'``
installs them all. Each is measured with its default settings and, if its coefficients can be chosen, also with five
steps of `keller`, so that all candidates do equal work. These are the defaults of PyTorch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NamedTuple

import torch

import muonfx
from muonfx import polar

COMMON = "keller"
"""The coefficients that most candidates can use."""


class Function(NamedTuple):
    """A function that orthogonalizes a matrix `(m, n)` or a batch of matrices."""

    name: str
    call: Callable[[torch.Tensor], torch.Tensor]
    coefficients: str
    """The coefficients of the polynomial that it computes."""
    default: bool
    """True for the default settings of its package."""
    package: str


class Optimizer(NamedTuple):
    """A constructor of an optimizer for a list of matrices."""

    name: str
    build: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    coefficients: str
    default: bool
    package: str


def versioned(package: str) -> str:
    """Return the name of a package with its version, for the rows of a result.

    >>> versioned("torch").startswith("torch 2")
    True
    """
    try:
        return f"{package} {muonfx.__version__ if package == 'muonfx' else version(package)}"
    except PackageNotFoundError:
        return f"{package} from source"


@cache
def installed(
    package: str, module: str = "", get: str = "pip install -c constraints.txt -e '.[bench]'"
) -> ModuleType | None:
    """Return a package or one of its modules; print a line and return None if it is not installed."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        print(f"{package} is not installed and skipped; to install it: {get}")
        return None
    return importlib.import_module(module or package)


# ----------------------------------------------------------------------------------------------------- functions


def one_by_one(
    call: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that applies a function of one matrix to a batch in a loop, as its optimizer does."""

    def loop(x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 2:
            return call(x)
        return torch.stack([call(matrix) for matrix in x])

    return loop


def plain(
    x: torch.Tensor, dtype: torch.dtype = torch.bfloat16, coefficients: str = COMMON
) -> torch.Tensor:
    """Compute the standard iteration of matrices `(..., m, n)` in the simplest way: no buffers, no scaling.

    >>> plain(torch.eye(2), torch.float64).dtype
    torch.float64
    """
    chosen = polar.coefficients(coefficients)
    x = x.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (chosen.norm_safety * torch.linalg.matrix_norm(x, keepdim=True))
    for a, b, c in chosen.steps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def functions(*, compiled: bool = True) -> Iterator[Function]:
    """Yield the functions of other packages; with `compiled` also those that use `torch.compile`, after a warm-up.

    Compiled code of earlier shapes is dropped, because torch compiles a function for at most eight shapes.
    """
    torch.compiler.reset()
    yield from _torch_functions(compiled)
    yield from _pytorch_optimizer_functions()
    if compiled:  # HeavyBall compiles its own functions
        yield from _heavyball_functions()


def _torch_functions(compiled: bool) -> Iterator[Function]:
    muon = importlib.import_module("torch.optim._muon")
    (step,) = set(polar.coefficients(COMMON).steps)
    theirs = partial(muon._zeropower_via_newtonschulz, ns_coefficients=step, ns_steps=5, eps=1e-7)
    yield Function("torch.optim.Muon", one_by_one(theirs), COMMON, True, "torch")
    if compiled:
        fused = torch.compile(plain, fullgraph=True, dynamic=False)
        for dtype in (torch.bfloat16, torch.float32):
            name = f"plain, compiled, {str(dtype).removeprefix('torch.')}"
            yield Function(name, partial(fused, dtype=dtype), COMMON, False, "torch")


def _pytorch_optimizer_functions() -> Iterator[Function]:
    package = "pytorch_optimizer"
    if found := installed(package, "pytorch_optimizer.optimizer.utils.matrix"):
        standard, gram = (
            found.zero_power_via_newton_schulz_5,
            found.zero_power_via_gram_newton_schulz,
        )
        yield Function(package, standard, COMMON, True, package)
        yield Function(
            f"{package}, float32", partial(standard, dtype=torch.float32), COMMON, False, package
        )
        # Its defaults are fp16 and one restart after two steps, but fp16 products take seconds on a CPU.
        in_bf16 = partial(gram, dtype=torch.bfloat16, reset_steps=(1, 3))
        yield Function(f"{package}, Gram [1, 3], bfloat16", in_bf16, COMMON, False, package)


def _heavyball_functions() -> Iterator[Function]:
    if found := installed("heavyball", "heavyball.utils"):
        yield Function("HeavyBall", found.zeropower_via_newtonschulz5, "quintic", True, "heavyball")
        legacy = one_by_one(found.legacy_zeropower_via_newtonschulz5)
        yield Function("HeavyBall, legacy", legacy, COMMON, False, "heavyball")


# ----------------------------------------------------------------------------------------------------- optimizers


def optimizers(*, compiled: bool = True) -> Iterator[Optimizer]:
    """Yield the optimizers of other packages, with weight decay 0.1 and otherwise their defaults; see `functions`."""
    torch.compiler.reset()
    build = partial(torch.optim.Muon, lr=1e-3, weight_decay=0.1)
    yield Optimizer("torch.optim.Muon", build, COMMON, True, "torch")
    if compiled:
        yield Optimizer("torch.optim.Muon, compiled", _compiled_torch, COMMON, False, "torch")
    if found := installed("pytorch_optimizer"):
        for foreach, name in (
            (None, "pytorch_optimizer"),
            (False, "pytorch_optimizer, foreach=False"),
        ):
            make = partial(_pytorch_optimizer, found, foreach)
            yield Optimizer(name, make, COMMON, foreach is None, "pytorch_optimizer")
    if compiled and (found := installed("heavyball")):
        yield Optimizer(
            "HeavyBall",
            partial(found.Muon, lr=1e-3, weight_decay=0.1),
            "quintic",
            True,
            "heavyball",
        )


def _pytorch_optimizer(
    package: ModuleType, foreach: bool | None, params: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    return package.Muon(
        [{"params": params, "use_muon": True}], lr=1e-3, weight_decay=0.1, foreach=foreach
    )


def _compiled_torch(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer with a compiled step, as PyTorch's documentation of compiled optimizers recommends."""
    optimizer = torch.optim.Muon(params, lr=1e-3, weight_decay=0.1)
    optimizer.step = torch.compile(optimizer.step, fullgraph=False)  # type: ignore[method-assign]
    return optimizer
