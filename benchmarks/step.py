"""The whole optimizer step on sets of matrices: muonfx against other packages' Muon, time and quality.

Everywhere: float32 parameters and gradients, momentum with Nesterov's look-ahead, weight decay, and five quintic steps
(four in the row that says so).
What differs from torch.optim.Muon: pytorch_optimizer batches equal shapes and overwrites the gradients. HeavyBall
compiles, rounds to bf16 stochastically, overwrites the gradients, and has its own coefficients: `quintic`, five steps
too, so equal work (others can be had for square matrices only). muonfx overwrites gradients with `donate_grads=True`
only.

Quality is that of the first update: from zero, with no momentum before it, an update is the orthogonalized gradient
times a number, which is the rule's business and divided out. It is the worst over one matrix of each shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

import muonfx as mfx
from benchmarks.measure import interleaved, summary
from benchmarks.peers import COMMON, Optimizer, optimizers, plain, versioned
from benchmarks.quality import SPECTRA, judge_against, matrix, up_to_scale

Shape = tuple[int, int]
Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

SETS: dict[str, list[Shape]] = {
    "4 x 512^2, 2 x 2048x512, 2 x 512x2048": [(512, 512)] * 4 + [(2048, 512)] * 2 + [(512, 2048)] * 2,
    "8 x 1024^2, 2 x 4096x1024, 2 x 1024x4096": [(1024, 1024)] * 8 + [(4096, 1024)] * 2 + [(1024, 4096)] * 2,
}
BASELINE = "torch.optim.Muon"


def _chain(params: list[torch.nn.Parameter], *, donate: bool, **settings: Any) -> torch.optim.Optimizer:
    """The optimizer of PyTorch as a chain."""
    tx = mfx.muon(1e-3, weight_decay=0.1, lr_scaling="original", orthogonalize=mfx.orthogonalize(**settings))
    return mfx.TransformOptimizer(_named(params), tx, donate_grads=donate)


def _muon(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return mfx.Muon(_named(params), labels=mfx.select.default_labels_by_name)


def _named(params: list[torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    return {f"h.{i}.weight": param for i, param in enumerate(params)}


def ours() -> Iterator[Optimizer]:
    """Our own: the equal of PyTorch's, also with donated gradients, in fp32, with HeavyBall's set; and as it comes."""
    for name, donate, settings in (
        ("muonfx", False, {"coefficients": COMMON}),
        ("muonfx, donate_grads", True, {"coefficients": COMMON}),
        ("muonfx, float32", False, {"coefficients": COMMON, "dtype": torch.float32}),
        ("muonfx, quintic", False, {"coefficients": "quintic"}),
        ("muonfx, four steps", False, {"coefficients": "polar_express_4"}),
    ):
        yield Optimizer(name, partial(_chain, donate=donate, **settings), settings["coefficients"], False, "muonfx")
    yield Optimizer("mfx.Muon", _muon, "polar_express_5", True, "muonfx")


def candidates(compiled: bool) -> list[Optimizer]:
    """All that are measured, the baseline first."""
    return [*optimizers(compiled=compiled), *ours()]


def about(one: Optimizer, case: str) -> dict[str, Any]:
    """What a row says of its candidate."""
    row = {"case": case, "candidate": one.name, "coefficients": one.coefficients, "default": one.default}
    return {**row, "package": versioned(one.package)}


def stepper(build: Build, gradients: Sequence[torch.Tensor], *, zero: bool = False) -> tuple[list, Callable[[], None]]:
    """Parameters, random or zero, and a function that takes a step on them.

    The gradients are handed over at every step, because some optimizers take them away; these also overwrite them.
    """
    generator = torch.Generator().manual_seed(0)
    own = [grad.clone() for grad in gradients]
    params = [
        torch.nn.Parameter(torch.zeros_like(g) if zero else torch.randn(g.shape, generator=generator).to(g.device))
        for g in own
    ]
    for param, grad in zip(params, own, strict=True):
        param.grad = grad
    optimizer = build(params)

    def step() -> None:
        for param, grad in zip(params, own, strict=True):
            param.grad = grad
        optimizer.step()

    return params, step


def speed(
    rounds: int, sets: dict[str, list[Shape]] = SETS, *, compiled: bool = True, seconds: float = math.inf
) -> list[dict[str, Any]]:
    """Milliseconds of a step for each candidate and set, and the ratio to torch's; torch's again shows the noise.

    `seconds`: for one case, see `interleaved`.
    """
    rows: list[dict[str, Any]] = []
    for case, shapes in sets.items():
        gradients = [matrix("gaussian", shape, seed) for seed, shape in enumerate(shapes)]
        them = candidates(compiled)
        them.append(them[0]._replace(name=f"{BASELINE} again"))
        runs = {one.name: stepper(one.build, gradients)[1] for one in them}
        times = summary(interleaved(runs, rounds=rounds, seconds=seconds), BASELINE)
        rows += [{**about(one, case), **times[one.name]} for one in them]
    return rows


def quality(sets: dict[str, list[Shape]] = SETS, *, compiled: bool = True) -> list[dict[str, Any]]:
    """Error and singular values of the first update, for each candidate, set and spectrum of the gradients."""
    rows: list[dict[str, Any]] = []
    for case, shapes in sets.items():
        first = [shapes.index(shape) for shape in dict.fromkeys(shapes)]
        for spectrum in SPECTRA:
            gradients = [matrix(spectrum, shape, seed) for seed, shape in enumerate(shapes)]
            exact: dict[tuple[int, str], torch.Tensor] = {}
            for one in candidates(compiled):
                params, step = stepper(one.build, gradients, zero=True)
                step()
                found = []
                for i in first:
                    key = (i, one.coefficients)
                    if key not in exact:
                        exact[key] = plain(gradients[i], torch.float64, one.coefficients)
                    found.append(judge_against(up_to_scale(params[i].detach(), exact[key]), exact[key]))
                worst = {
                    "error": max(q.error for q in found),
                    "smallest": min(q.smallest for q in found),
                    "largest": max(q.largest for q in found),
                }
                rows.append({**about(one, case), "spectrum": spectrum, **worst})
    return rows
