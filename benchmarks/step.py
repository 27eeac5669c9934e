"""Time and quality of a whole optimizer step on sets of matrices, compared with other packages' Muon.

All candidates have float32 parameters and gradients, Nesterov momentum, weight decay, and five quintic steps (four in
the row "four steps"). They differ from torch.optim.Muon as follows. pytorch_optimizer batches equal shapes and
overwrites the gradients. HeavyBall compiles, rounds to bf16 stochastically, and overwrites the gradients. Its
coefficients `quintic` also have five steps, so the work is equal; it offers others for square matrices only. muonfx
overwrites gradients only with `donate_grads=True`.

Quality is measured on the first update from zero parameters, which is the orthogonalized gradient times a scale. The
scale is divided out. The result is the worst over one matrix of each shape.
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
    "4 x 512^2, 2 x 2048x512, 2 x 512x2048": [(512, 512)] * 4
    + [(2048, 512)] * 2
    + [(512, 2048)] * 2,
    "8 x 1024^2, 2 x 4096x1024, 2 x 1024x4096": [(1024, 1024)] * 8
    + [(4096, 1024)] * 2
    + [(1024, 4096)] * 2,
}
BASELINE = "torch.optim.Muon"


def _chain(
    params: list[torch.nn.Parameter], *, donate: bool, **settings: Any
) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer as a chain."""
    tx = mfx.muon(
        1e-3, weight_decay=0.1, lr_scaling="original", orthogonalize=mfx.orthogonalize(**settings)
    )
    return mfx.TransformOptimizer(_named(params), tx, donate_grads=donate)


def _muon(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return mfx.Muon(_named(params), labels=mfx.routing.default_labels_by_name)


def _named(params: list[torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    return {f"h.{i}.weight": param for i, param in enumerate(params)}


def ours() -> Iterator[Optimizer]:
    """Yield ours: equal to PyTorch's, with donated gradients, in fp32, with HeavyBall's coefficients, and default."""
    for name, donate, settings in (
        ("muonfx", False, {"coefficients": COMMON}),
        ("muonfx, donate_grads", True, {"coefficients": COMMON}),
        ("muonfx, float32", False, {"coefficients": COMMON, "dtype": torch.float32}),
        ("muonfx, quintic", False, {"coefficients": "quintic"}),
        ("muonfx, four steps", False, {"coefficients": "polar_express_4"}),
    ):
        yield Optimizer(
            name,
            partial(_chain, donate=donate, **settings),
            settings["coefficients"],
            False,
            "muonfx",
        )
    yield Optimizer("mfx.Muon", _muon, "polar_express_5", True, "muonfx")


def candidates(compiled: bool) -> list[Optimizer]:
    """Return all candidates, the baseline first."""
    return [*optimizers(compiled=compiled), *ours()]


def about(one: Optimizer, case: str) -> dict[str, Any]:
    """Return the part of a row that describes its candidate."""
    row = {
        "case": case,
        "candidate": one.name,
        "coefficients": one.coefficients,
        "default": one.default,
    }
    return {**row, "package": versioned(one.package)}


def stepper(
    build: Build, gradients: Sequence[torch.Tensor], *, zero: bool = False
) -> tuple[list, Callable[[], None]]:
    """Return random or zero parameters, and a function that takes a step on them.

    The gradients are assigned before every step, because some optimizers delete and overwrite them.
    """
    generator = torch.Generator().manual_seed(0)
    own = [grad.clone() for grad in gradients]
    params = [
        torch.nn.Parameter(
            torch.zeros_like(g) if zero else torch.randn(g.shape, generator=generator).to(g.device)
        )
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
    rounds: int,
    sets: dict[str, list[Shape]] = SETS,
    *,
    compiled: bool = True,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Return the milliseconds of a step for each candidate and set, and the ratio to torch's, which is timed twice.

    `seconds` is the time limit for one case, see `interleaved`.
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
    """Return the error and singular values of the first update for each candidate, set and spectrum."""
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
                    found.append(
                        judge_against(up_to_scale(params[i].detach(), exact[key]), exact[key])
                    )
                worst = {
                    "error": max(q.error for q in found),
                    "smallest": min(q.smallest for q in found),
                    "largest": max(q.largest for q in found),
                }
                rows.append({**about(one, case), "spectrum": spectrum, **worst})
    return rows
