"""Planted mistakes, none of which is ever run. Each line says which errors pyright and mypy report for it."""

import torch
from torch import Tensor, nn

import muonfx as mfx


@mfx.leafwise
def sign(momentum: float = 0.9) -> mfx.StateAndStep:
    raise NotImplementedError


@mfx.schedule
def halved(rate: float) -> mfx.ScheduleFunction:
    raise NotImplementedError


def planted(model: nn.Module, params: dict[str, Tensor], updates: dict[str, Tensor]) -> None:
    mfx.momentum("0.9")  # wrong: reportArgumentType, arg-type
    mfx.momentum(dacay=0.9)  # wrong: reportCallIssue, call-arg
    mfx.momentum(0.9, True)  # wrong: reportCallIssue, call-arg
    mfx.scale()  # wrong: reportCallIssue, call-arg
    mfx.clip_by_global_norm(None)  # wrong: reportArgumentType, arg-type
    mfx.momentum(dtype="float32")  # wrong: reportArgumentType, arg-type
    mfx.int8(code="lin")  # wrong: reportArgumentType, arg-type
    mfx.orthogonalize(coefficients="polar_expres_5")  # wrong: reportArgumentType, arg-type
    mfx.scale_by_shape("match_rms_adam")  # wrong: reportArgumentType, arg-type
    mfx.monitor("updates", ("nrm",))  # wrong: reportArgumentType, arg-type
    mfx.chain(mfx.momentum)  # wrong: reportArgumentType, arg-type
    mfx.chain([mfx.momentum(), mfx.scale(0.1)])  # wrong: reportArgumentType, arg-type
    mfx.partition({"muon": 0.1}, {"w": "muon"})  # wrong: reportArgumentType, dict-item
    mfx.momentum().updat(updates, None)  # wrong: reportAttributeAccessIssue, attr-defined
    mfx.momentum().update(updates)  # wrong: reportCallIssue, call-arg
    mfx.apply_updates(params, updates, donate="yes")  # wrong: reportArgumentType, arg-type
    xs: list[Tensor] = mfx.apply_updates(params, updates)  # wrong: reportAssignmentType, arg-type
    mfx.warmup_cosine_decay_schedule(1e-2, 5.5, 20)  # wrong: reportArgumentType, arg-type
    mfx.linear_schedule(0.1, 0.0, 10)("3")  # wrong: reportCallIssue, call-overload
    mfx.Muon(model, lr="1e-3")  # wrong: reportArgumentType, arg-type
    mfx.Muon(model, lr_scaling="spectrl")  # wrong: reportArgumentType, arg-type
    mfx.TransformOptimizer(model)  # wrong: reportCallIssue, call-arg
    mfx.sharding.zero(params, 2, partition="hole")  # wrong: reportArgumentType, arg-type
    mfx.sharding.sharded(mfx.momentum(), params)  # wrong: reportArgumentType, arg-type
    sign(momentun=0.9)  # wrong: reportCallIssue, call-arg
    halved("2")  # wrong: reportArgumentType, arg-type
    print(xs, torch.ones(1))


@mfx.transform  # wrong: reportArgumentType, arg-type
def returns_one_function(rate: float = 0.1) -> int:
    raise NotImplementedError


@mfx.transform(localty=mfx.Locality.ELEMENT)  # wrong: reportCallIssue, call-overload
def misspelt_declaration() -> mfx.InitAndUpdate:
    raise NotImplementedError
