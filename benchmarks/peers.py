"""What muonfx is measured against: the orthogonalizations and the optimizers of other packages, and a plain one.

A peer that is not installed is left out, with a printed line; ``pip install -c constraints.txt -e '.[bench]'`` brings
them all. Each comes as its package gives it, and once more with the coefficients that all have in common, `keller` for
five steps, where it can be told to: that is the equal work. PyTorch's default is that already.
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
"""The set that every candidate can compute."""


class Function(NamedTuple):
    """A way to orthogonalize a matrix `(m, n)`, or a batch of them."""

    name: str
    call: Callable[[torch.Tensor], torch.Tensor]
    coefficients: str
    """The set whose polynomial it claims to compute."""
    default: bool
    """True if its package does it like that if not told otherwise."""
    package: str


class Optimizer(NamedTuple):
    """A way to build an optimizer for a list of matrices; no weight decay unless it is given."""

    name: str
    build: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    coefficients: str
    default: bool
    package: str


def versioned(package: str) -> str:
    """A package with its version, for the rows of a result; one that is a checkout has none.

    >>> versioned("torch").startswith("torch 2")
    True
    """
    try:
        return f"{package} {muonfx.__version__ if package == 'muonfx' else version(package)}"
    except PackageNotFoundError:
        return package


@cache
def installed(package: str, module: str = "") -> ModuleType | None:
    """The package, or one of its modules; None with a printed line where it is not installed."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        print(f"{package} is not installed and left out; pip install -c constraints.txt -e '.[bench]' brings it")
        return None
    return importlib.import_module(module or package)


# ----------------------------------------------------------------------------------------------------- functions


def one_by_one(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of one matrix as one of a batch, in a loop: what an optimizer does that has only the former."""

    def loop(x: torch.Tensor) -> torch.Tensor:
        return call(x) if x.ndim == 2 else torch.stack([call(one) for one in x])

    return loop


def plain(x: torch.Tensor, dtype: torch.dtype = torch.bfloat16, coefficients: str = COMMON) -> torch.Tensor:
    """The standard iteration as one would write it down: `(..., m, n)` in and out, no buffers, no scaling.

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
    """Everything but muonfx; `compiled`: also what goes through `torch.compile`, which takes a minute to warm up.

    What was compiled before is dropped: a function gets eight shapes, then it runs uncompiled or not at all.
    """
    torch.compiler.reset()
    yield from _torch_functions(compiled)
    yield from _pytorch_optimizer_functions()
    if compiled:  # HeavyBall compiles by itself
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
        standard, gram = found.zero_power_via_newton_schulz_5, found.zero_power_via_gram_newton_schulz
        yield Function(package, standard, COMMON, True, package)
        yield Function(f"{package}, float32", partial(standard, dtype=torch.float32), COMMON, False, package)
        # Its own dtype for this one is fp16, and its own restart after two steps; on a CPU fp16 products take seconds.
        in_bf16 = partial(gram, dtype=torch.bfloat16, reset_steps=(1, 3))
        yield Function(f"{package}, Gram [1, 3], bfloat16", in_bf16, COMMON, False, package)


def _heavyball_functions() -> Iterator[Function]:
    if found := installed("heavyball", "heavyball.utils"):
        yield Function("HeavyBall", found.zeropower_via_newtonschulz5, "quintic", True, "heavyball")
        legacy = one_by_one(found.legacy_zeropower_via_newtonschulz5)
        yield Function("HeavyBall, legacy", legacy, COMMON, False, "heavyball")


# ----------------------------------------------------------------------------------------------------- optimizers


def optimizers(*, compiled: bool = True) -> Iterator[Optimizer]:
    """Everything but muonfx, with weight decay 0.1 and the package's own settings otherwise; see `functions`."""
    torch.compiler.reset()
    build = partial(torch.optim.Muon, lr=1e-3, weight_decay=0.1)
    yield Optimizer("torch.optim.Muon", build, COMMON, True, "torch")
    if compiled:
        yield Optimizer("torch.optim.Muon, compiled", _compiled_torch, COMMON, False, "torch")
    if found := installed("pytorch_optimizer"):
        for foreach, name in ((None, "pytorch_optimizer"), (False, "pytorch_optimizer, foreach=False")):
            make = partial(_pytorch_optimizer, found, foreach)
            yield Optimizer(name, make, COMMON, foreach is None, "pytorch_optimizer")
    if compiled and (found := installed("heavyball")):
        yield Optimizer("HeavyBall", partial(found.Muon, lr=1e-3, weight_decay=0.1), "quintic", True, "heavyball")


def _pytorch_optimizer(
    package: ModuleType, foreach: bool | None, params: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    return package.Muon([{"params": params, "use_muon": True}], lr=1e-3, weight_decay=0.1, foreach=foreach)


def _compiled_torch(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """PyTorch's optimizer with its step compiled, as its recipe for compiled optimizers has it."""
    optimizer = torch.optim.Muon(params, lr=1e-3, weight_decay=0.1)
    optimizer.step = torch.compile(optimizer.step, fullgraph=False)  # type: ignore[method-assign]
    return optimizer
