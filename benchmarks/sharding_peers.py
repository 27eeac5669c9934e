"""Sharded Muon of other libraries, as their users run it: DTensor's ``full_tensor()``, Dion, DeepSpeed."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from benchmarks.peers import COMMON, installed
from muonfx import polar

RATE, DECAY = 1e-3, 0.1
BETAS, EPSILON, MOMENTUM = (0.9, 0.95), 1e-8, 0.95

Build = Callable[[nn.Module, list[str]], torch.optim.Optimizer]


# ------------------------------------------------------------------------------------------------------------- torch


def fully_sharded(model: nn.Module) -> nn.Module:
    """Return a model under FSDP2, with one FSDP unit per block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def newton_schulz(x: Tensor) -> Tensor:
    """Orthogonalize with the function of torch.optim.Muon."""
    (step,) = set(polar.coefficients(COMMON).steps)
    return import_module("torch.optim._muon")._zeropower_via_newtonschulz(x, step, 5, 1e-7)


class GatheringMuon(torch.optim.Optimizer):
    """torch.optim.Muon for DTensors: momentum on shards, then every rank gathers and orthogonalizes every matrix."""

    def __init__(self, params: list[nn.Parameter], *, twice: bool) -> None:
        super().__init__(params, {})
        self.twice = twice
        """True to gather the parameters too and to distribute them from rank 0."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter."""
        for param in self.param_groups[0]["params"]:
            trace = self.state[param].setdefault("trace", torch.zeros_like(param.grad))
            trace.lerp_(param.grad, 1 - MOMENTUM)
            update = newton_schulz(param.grad.lerp(trace, MOMENTUM).full_tensor())
            rate = RATE * max(1, param.shape[0] / param.shape[1]) ** 0.5
            if self.twice:
                whole = param.full_tensor() * (1 - RATE * DECAY) - rate * update
                param.to_local().copy_(
                    distribute_tensor(whole, param.device_mesh, param.placements).to_local()
                )
            else:  # every rank has the full update, so taking its shard needs no communication
                own = distribute_tensor(
                    update, param.device_mesh, param.placements, src_data_rank=None
                )
                param.to_local().mul_(1 - RATE * DECAY).sub_(own.to_local(), alpha=rate)


class CombinedOptimizer:
    """Several optimizers behind one ``step``."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        """Update every parameter."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Delete the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def full_tensor(model: nn.Module, muon: list[str], *, twice: bool = False) -> Any:
    """Return a Muon that orthogonalizes every matrix on every rank, with multi-tensor AdamW on the other DTensors."""
    params = dict(model.named_parameters())
    rest = [param for name, param in params.items() if name not in muon]
    adamw = torch.optim.AdamW(
        rest, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, foreach=True
    )
    return CombinedOptimizer(GatheringMuon([params[name] for name in muon], twice=twice), adamw)


def full_tensor_twice(model: nn.Module, muon: list[str]) -> Any:
    """Return the same optimizer, but gather parameters too and distribute them from rank 0, as LLaMA-Factory v1."""
    return full_tensor(model, muon, twice=True)


# -------------------------------------------------------------------------------------------------------------- Dion


def dion_runs() -> bool:
    """Return True if Dion can be imported; print a line if not."""
    if find_spec("dion") is None:
        print(
            "Dion is not installed and skipped; to measure it: put a clone of github.com/microsoft/dion on PYTHONPATH"
        )
        return False
    return True


def dion(model: nn.Module, muon: list[str]) -> torch.optim.Optimizer:
    """Return Dion's Muon for DTensors, which sends all matrices of one shape to owners and back by one all_to_all each.

    It compiles its steps. Its Newton-Schulz has five quintic steps with other coefficients, at the same cost.
    """
    params = dict(model.named_parameters())
    rest = [param for name, param in params.items() if name not in muon]
    matrices: list[Any] = [params[name] for name in muon]
    return import_module("dion").Muon(
        [{"params": matrices}, {"params": rest, "algorithm": "adamw", "epsilon": EPSILON}],
        distributed_mesh=matrices[0].device_mesh,
        lr=RATE,
        mu=MOMENTUM,
        betas=BETAS,
        weight_decay=DECAY,
        nesterov=True,
        use_polar_express=False,
    )


# --------------------------------------------------------------------------------------------------------- DeepSpeed


def deepspeed_runs() -> bool:
    """Return True if DeepSpeed can run; print the reason if not."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read at import, also in the child processes
    if installed("deepspeed") is None:
        return False
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        print(
            "DeepSpeed is skipped: its Muon is compiled at run time and no C++ compiler was found"
        )
        return False
    return True


DEEPSPEED_MUON = {
    "type": "Muon",
    "params": {
        "lr": RATE,
        "weight_decay": DECAY,
        "momentum": MOMENTUM,
        "ns_method": "standard",
        "betas": BETAS,
        "eps": EPSILON,
    },
}
"""The optimizer entry of DeepSpeed's configuration."""
DEEPSPEED_ADAMW = {
    "type": "AdamW",
    "params": {"lr": RATE, "weight_decay": DECAY, "betas": BETAS, "eps": EPSILON},
}


def deepspeed(
    model: nn.Module,
    batch: Tensor,
    stage: int,
    *,
    optimizer: Mapping[str, Any] | Callable[[nn.Module], torch.optim.Optimizer] = DEEPSPEED_MUON,
    bf16: bool = False,
) -> tuple[Callable[[], None], Callable[[], dict[str, Tensor]]]:
    """Return a function that runs an iteration of DeepSpeed's engine, and a function that returns the full parameters.

    All settings but the optimizer are DeepSpeed's defaults, with two exceptions. ``reduce_scatter`` is off, because
    DeepSpeed's Muon forbids it at stage 3. Clipping is off, because it would clip the orthogonalized update to a norm
    of 1.

    Args:
        model: the model to train.
        batch: the micro-batch of this rank.
        stage: the ZeRO stage.
        optimizer: an entry of DeepSpeed's configuration, or a function that creates a client optimizer for the model.
        bf16: True for parameters and gradients in bf16 with fp32 master weights.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": len(batch),
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, **({"reduce_scatter": False} if stage == 3 else {})},
    }
    client = None
    if callable(optimizer):
        client = optimizer(model)
        config["zero_allow_untested_optimizer"] = True
    else:
        config["optimizer"] = optimizer
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed as package

        package.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        engine = package.initialize(model=model, optimizer=client, config=config)[0]
    logging.disable(logging.NOTSET)

    def iterate() -> None:
        engine.backward(engine(batch))
        engine.step()

    def whole() -> dict[str, Tensor]:
        params = dict(engine.module.named_parameters())
        with package.zero.GatheredParameters(list(params.values()), enabled=stage == 3):
            return {name: param.detach().clone() for name, param in params.items()}

    return iterate, whole


# ---------------------------------------------------------------------------------------------------------- counting


ORTHOGONALIZE = (
    ("torch.optim._muon", "_zeropower_via_newtonschulz"),
    ("muonfx.polar.many", "Orthogonalizer.__call__"),
    ("deepspeed.runtime.zero.muon.original_muon", "muon_update"),
    ("dion.megabatch_base", "muon_update_newton_schulz"),
)
"""Module and name of the functions that orthogonalize. DeepSpeed's function also applies the momentum."""


class Matrices:
    """Counter of the matrices that are orthogonalized on this rank."""

    number = 0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that also counts the matrices in its first argument, a tensor or a list of tensors."""

        def counting(*args: Any, **kwargs: Any) -> Any:
            # Skips `self` of a method.
            x = next(arg for arg in args if isinstance(arg, Tensor | list))
            self.number += sum(
                prod(one.shape[:-2]) for one in ([x] if isinstance(x, Tensor) else x)
            )
            return function(*args, **kwargs)

        return counting


@contextlib.contextmanager
def counted() -> Iterator[Matrices]:
    """Count the matrices orthogonalized by all libraries within the ``with`` block, by wrapping their functions."""
    matrices = Matrices()
    with contextlib.ExitStack() as stack:
        for module, name in ORTHOGONALIZE:
            if module.partition(".")[0] not in sys.modules:
                continue
            *owners, function = name.split(".")
            found = functools.reduce(getattr, owners, import_module(module))
            stack.enter_context(
                mock.patch.object(found, function, matrices.of(getattr(found, function)))
            )
        yield matrices
