"""The processes of a run: their rank and number, and the collectives outside the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; rank 0 prints and writes files."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextmanager
def processes(shard: str | None) -> Iterator[None]:
    """Join the process group of torchrun if the run is sharded, and leave it together with the other processes."""
    if shard is None:
        yield
        return
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    dist.destroy_process_group()


def evenly(tokens: Tensor, dim: int) -> Tensor:
    """Return this process's chunk along a dim, whose size the number of processes must divide."""
    return tokens.chunk(size(), dim)[rank()]


def mean(loss: Tensor) -> float:
    """Return the mean over all processes."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / size()


def any_rank(flag: bool) -> bool:
    """Return True if the flag is set on any process."""
    if size() == 1:
        return flag
    result = torch.tensor(flag, dtype=torch.int32)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return bool(result.item())


def from_rank_0(text: str) -> str:
    """Return the text of rank 0 on every process."""
    texts = [text]
    if size() > 1:
        dist.broadcast_object_list(texts, src=0)
    return texts[0]


class Gather(torch.autograd.Function):
    """The tensors of all processes, concatenated along a dim; gradients are reduced and scattered back."""

    @staticmethod
    def forward(own: Tensor, dim: int) -> Tensor:
        """Gather the tensors."""
        parts = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        """Save the dim."""
        ctx.dim = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of all processes and return this process's chunk."""
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(size(), ctx.dim)[rank()], None
