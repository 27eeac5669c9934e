"""The peers of our sharding, each as its users run it: DTensor's ``full_tensor()``, Dion, DeepSpeed."""

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
    """A model under FSDP2, a unit for each block."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def newton_schulz(x: Tensor) -> Tensor:
    """The function of torch.optim.Muon."""
    (step,) = set(polar.coefficients(COMMON).steps)
    return import_module("torch.optim._muon")._zeropower_via_newtonschulz(x, step, 5, 1e-7)


class Gathered(torch.optim.Optimizer):
    """torch.optim.Muon over DTensors: momentum on the shards, then every rank gathers and orthogonalizes everything."""

    def __init__(self, params: list[nn.Parameter], *, twice: bool) -> None:
        super().__init__(params, {})
        self.twice = twice
        """True if parameters are gathered as well, and distributed again by rank 0."""

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
                param.to_local().copy_(distribute_tensor(whole, param.device_mesh, param.placements).to_local())
            else:  # every rank has all of the update: its part is taken out without a word
                own = distribute_tensor(update, param.device_mesh, param.placements, src_data_rank=None)
                param.to_local().mul_(1 - RATE * DECAY).sub_(own.to_local(), alpha=rate)


class Together:
    """Two optimizers in one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        """Update every parameter."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def full_tensor(model: nn.Module, muon: list[str], *, twice: bool = False) -> Any:
    """Every rank gathers every update and orthogonalizes it; AdamW for the rest, on DTensors, its multi-tensor form."""
    params = dict(model.named_parameters())
    rest = [param for name, param in params.items() if name not in muon]
    adamw = torch.optim.AdamW(rest, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, foreach=True)
    return Together(Gathered([params[name] for name in muon], twice=twice), adamw)


def full_tensor_twice(model: nn.Module, muon: list[str]) -> Any:
    """The same, and parameters are gathered too and distributed from rank 0: how LLaMA-Factory v1 does it."""
    return full_tensor(model, muon, twice=True)


# -------------------------------------------------------------------------------------------------------------- Dion


def dion_runs() -> bool:
    """True if Dion's source can be imported, from ``PYTHONPATH`` say; if not, a printed line says so."""
    if find_spec("dion") is None:
        print("Dion is left out: put a checkout of github.com/microsoft/dion on PYTHONPATH to measure it")
        return False
    return True


def dion(model: nn.Module, muon: list[str]) -> torch.optim.Optimizer:
    """Dion's Muon over DTensors: matrices of one shape in one all_to_all to owners and one back, its steps compiled.

    Of Newton-Schulz it has five quintic steps with coefficients of its own, at the cost of those of all others.
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
    """True if DeepSpeed can be measured here; if not, a printed line says why."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported, here and in the processes
    if installed("deepspeed") is None:
        return False
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        print("DeepSpeed is left out: its Muon is compiled when it runs, and there is no C++ compiler")
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
"""The entry of DeepSpeed's configuration."""
DEEPSPEED_ADAMW = {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY, "betas": BETAS, "eps": EPSILON}}


def deepspeed(
    model: nn.Module,
    batch: Tensor,
    stage: int,
    *,
    optimizer: Mapping[str, Any] | Callable[[nn.Module], torch.optim.Optimizer] = DEEPSPEED_MUON,
    bf16: bool = False,
) -> tuple[Callable[[], None], Callable[[], dict[str, Tensor]]]:
    """An iteration of DeepSpeed's engine, and its whole parameters.

    Its settings are its defaults, apart from those of the optimizer, from ``reduce_scatter``, which its Muon forbids at
    stage 3, and from clipping: by default it clips the orthogonalized update to a norm of 1.

    Args:
        model: to train.
        batch: of this rank.
        stage: of ZeRO.
        optimizer: DeepSpeed's own, as an entry of its configuration, or what makes a client optimizer for the model.
        bf16: True for parameters and gradients in bf16, with fp32 copies that are stepped on.
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
"""The functions and methods that orthogonalize, by module and name; DeepSpeed's function also applies the momentum."""


class Matrices:
    """How many matrices were orthogonalized on this rank."""

    number = 0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts the matrices in its first argument: a tensor, or a list of them."""

        def counting(*args: Any, **kwargs: Any) -> Any:
            x = next(arg for arg in args if isinstance(arg, Tensor | list))  # after `self`, if it is a method
            self.number += sum(prod(one.shape[:-2]) for one in ([x] if isinstance(x, Tensor) else x))
            return function(*args, **kwargs)

        return counting


@contextlib.contextmanager
def counted() -> Iterator[Matrices]:
    """Count matrices that anybody here orthogonalizes, by wrapping the functions that do it for the time being."""
    matrices = Matrices()
    with contextlib.ExitStack() as stack:
        for module, name in ORTHOGONALIZE:
            if module.partition(".")[0] not in sys.modules:
                continue
            *owners, function = name.split(".")
            found = functools.reduce(getattr, owners, import_module(module))
            stack.enter_context(mock.patch.object(found, function, matrices.of(getattr(found, function))))
        yield matrices
