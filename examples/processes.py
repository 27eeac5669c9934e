"""The processes of a run: who this one is, and the few things that all do together besides the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is; the first speaks for all."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def processes(shard: str | None) -> Iterator[None]:
    """Join the processes that torchrun has started, where the run is to be shared out; all leave together."""
    if shard is None:
        yield
        return
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def evenly(tokens: Tensor, dim: int) -> Tensor:
    """This process's part of a dim, which the number of processes divides."""
    return tokens.chunk(size(), dim)[rank()]


def mean(loss: Tensor) -> float:
    """The mean over all processes."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / size()


def anywhere(here: bool) -> bool:
    """Whether it is so on any process."""
    if size() == 1:
        return here
    said = torch.tensor(here, dtype=torch.int32)
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return bool(said.item())


def of_first(text: str) -> str:
    """Return the text of process 0 on every process."""
    held = [text]
    if size() > 1:
        dist.broadcast_object_list(held, src=0)
    return held[0]


class Gather(torch.autograd.Function):
    """The tensors of all processes, one behind the other along a dim; gradients go back to where they belong."""

    @staticmethod
    def forward(own: Tensor, dim: int) -> Tensor:
        """Gather."""
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        """Keep the dim."""
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add what all processes want of each tensor, and take the own part."""
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(size(), ctx.dim)[rank()], None
