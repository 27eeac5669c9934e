"""Sharding strategies: how parameters, gradients and batches are distributed over several processes.

The training loop in train_gpt.py is the same for all strategies. A strategy has three parts: ``layout`` defines the
shard of each parameter on each process, ``params`` holds this process's shards, and ``grads`` computes the gradient of
the whole batch in the same shards. The optimizer is wrapped by ``muonfx.sharding.sharded`` and computes the same update
as in one process.

| strategy | parameters | gradients | batch on each process |
| --- | --- | --- | --- |
| ``ddp`` | replicated | replicated | some of the sequences |
| ``zero1`` | sharded, gathered for each step | computed in full, then sharded | some of the sequences |
| ``zero2`` | sharded, gathered for each step | sharded block by block | some of the sequences |
| ``zero3`` | sharded, gathered for one block at a time | as zero2 | some of the sequences |
| ``fsdp2``, ``hsdp`` | as zero3, in DTensors of torch's ``fully_shard`` | as zero2 | some of the sequences |
| ``tp`` | slices of the blocks' matrices, never gathered | slices | all sequences |
| ``cp`` | replicated | replicated | a part of each sequence |

In ``zero1`` and ``zero2`` a shard consists of whole matrices, so Newton-Schulz needs no communication. In ``zero3`` a
flat buffer is split into equal parts across matrices. All three support both partitions.
"""

from __future__ import annotations

from typing import Any

import torch
from gpt import GPT
from processes import Gather, evenly, mean, rank, size
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call, grad_and_value
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from muonfx import sharding

Params = dict[str, Tensor]


class OneProcess:
    """Training in one process, and the base class of all sharding strategies."""

    layout: sharding.Layout | None = None

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        self.model = model
        self.params: Params = {name: p.detach().to(dtype, copy=True) for name, p in model.named_parameters()}

    def optimizer(self, tx: Any, offload: str | None = None) -> Any:
        """Return the optimizer for this process's shards, with its state optionally on the "cpu" or in a folder."""
        tx = tx if offload is None else sharding.offload(tx, offload)
        return tx if self.layout is None else sharding.sharded(tx, self.layout)

    def full(self, params: Params) -> Params:
        """Return the full parameters."""
        return params if self.layout is None else self.layout.gather(params)

    def for_model(self, params: Params) -> Params:
        """Return the parameters in the form that `logits` accepts."""
        return params

    def part(self, tokens: Tensor) -> Tensor:
        """Return this process's part of a batch."""
        return tokens

    def mean(self, loss: Tensor) -> float:
        """Return the mean over all parts of a batch."""
        return loss.item()

    def logits(self, params: Params, tokens: Tensor) -> Tensor:
        """Return the model's output for a part of a batch."""
        return functional_call(self.model, params, (tokens,))

    def own_loss(self, params: Params, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of this process's part of a batch."""
        logits = self.logits(params, self.part(inputs))
        return F.cross_entropy(logits.flatten(0, 1).float(), self.part(targets).flatten())

    @torch.no_grad()
    def loss(self, params: Params, inputs: Tensor, targets: Tensor) -> float:
        """Return the mean loss of a whole batch."""
        return self.mean(self.own_loss(self.for_model(params), inputs, targets))

    def grads(self, params: Params, inputs: Tensor, targets: Tensor) -> tuple[Params, float]:
        """Return the gradient and the loss of a whole batch."""
        grads, loss = grad_and_value(self.own_loss)(params, inputs, targets)
        return grads, self.mean(loss)


class Replicated(OneProcess):
    """Data parallelism with replicated parameters, as in `DistributedDataParallel`."""

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        self.layout: sharding.Layout = self.layout_of(self.params)
        self.params = self.layout.shard(self.params)

    def layout_of(self, params: Params) -> sharding.Layout:
        """Return the layout of the parameters."""
        return sharding.replicated(params)

    def for_model(self, params: Params) -> Params:
        """Return the parameters in the form that `logits` accepts."""
        return self.layout.gather(params)

    def part(self, tokens: Tensor) -> Tensor:
        """Return this process's part of a batch."""
        return evenly(tokens, 0)

    def mean(self, loss: Tensor) -> float:
        """Return the mean over all parts of a batch."""
        return mean(loss)

    def grads(self, params: Params, inputs: Tensor, targets: Tensor) -> tuple[Params, float]:
        """Compute the full gradient of this process's part of the batch, then reduce-scatter the mean."""
        grads, loss = grad_and_value(self.own_loss)(self.for_model(params), inputs, targets)
        return self.layout.reduce_scatter(grads), self.mean(loss)


class Zero1(Replicated):
    """Data parallelism with sharded parameters and optimizer state between steps."""

    def layout_of(self, params: Params) -> sharding.Layout:
        """Return the layout of the parameters."""
        return sharding.zero(params, stage=1)


class Zero2(Replicated):
    """ZeRO-1, with the gradients of each block reduce-scattered during the backward pass."""

    recompute = False
    """If True, the parameters of a block are freed after its forward pass and gathered again for its backward pass."""

    def layout_of(self, params: Params) -> sharding.Layout:
        """Return the layout of the parameters."""
        return sharding.zero(params, stage=2)

    def for_model(self, params: Params) -> Params:
        """Return the parameters in the form that `logits` accepts."""
        return params  # `logits` gathers them block by block

    def logits(self, params: Params, tokens: Tensor) -> Tensor:
        """Compute `GPT.forward` block by block."""
        rotation = self.model.rotation[:, : tokens.shape[1]].to(params["embed.weight"].dtype)
        x = self.call("embed", params, tokens)
        for number in range(len(self.model.blocks)):
            x = self.call(f"blocks.{number}", params, x, rotation)
        return self.call("head", params, self.call("norm", params, x))

    def call(self, part: str, params: Params, *inputs: Tensor) -> Tensor:
        """Gather the parameters of a submodule and run it. The backward pass of the gather is a reduce-scatter."""
        module = self.model.get_submodule(part)
        shards = {f"{part}.{name}": params[f"{part}.{name}"] for name, _ in module.named_parameters()}

        def run(*inputs: Tensor) -> Tensor:
            gathered = self.layout.all_gather(shards)
            return functional_call(module, {name.removeprefix(f"{part}."): p for name, p in gathered.items()}, inputs)

        return checkpoint(run, *inputs, use_reentrant=False) if self.recompute else run(*inputs)

    def grads(self, params: Params, inputs: Tensor, targets: Tensor) -> tuple[Params, float]:
        """Return the gradient and the loss of a whole batch."""
        leaves = {name: shard.detach().requires_grad_() for name, shard in params.items()}
        loss = self.own_loss(leaves, inputs, targets)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)), self.mean(loss)


class Zero3(Zero2):
    """ZeRO-2, with full parameters for only one block at a time, also in the backward pass."""

    recompute = True

    def layout_of(self, params: Params) -> sharding.Layout:
        """Return the layout of the parameters."""
        return sharding.zero(params, stage=3, partition="flat")


class FSDP2(OneProcess):
    """torch's ``fully_shard``: parameters, gradients, updates and state are DTensors."""

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        self.model = model.to(dtype)
        self.shard(model)
        self.layout: sharding.Layout = sharding.from_dtensors(dict(model.named_parameters()))
        self.params = {name: p.detach() for name, p in model.named_parameters()}  # views of the model's parameters

    def shard(self, model: GPT) -> None:
        """Replace the model's parameters with DTensors."""
        mesh = self.mesh()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)

    def mesh(self) -> Any:
        """Return the mesh over which each parameter is sharded."""
        return init_device_mesh("cpu", (size(),), mesh_dim_names=("shard",))

    def part(self, tokens: Tensor) -> Tensor:
        """Return this process's part of a batch."""
        return evenly(tokens, 0)

    def mean(self, loss: Tensor) -> float:
        """Return the mean over all parts of a batch."""
        return mean(loss)

    def logits(self, params: Params, tokens: Tensor) -> Tensor:
        """Return the model's output for a part of a batch."""
        return self.model(tokens)  # holds the parameters itself

    def grads(self, params: Params, inputs: Tensor, targets: Tensor) -> tuple[Params, float]:
        """Return the gradient and the loss of a whole batch."""
        self.model.zero_grad()
        loss = self.own_loss(params, inputs, targets)
        loss.backward()
        return {name: p.grad for name, p in self.model.named_parameters()}, self.mean(loss)


class HSDP(FSDP2):
    """FSDP2 within each of two groups of processes, with parameters replicated across the groups."""

    def mesh(self) -> Any:
        """Return the mesh over which each parameter is sharded."""
        return init_device_mesh("cpu", (2, size() // 2), mesh_dim_names=("replicate", "shard"))


class TensorParallel(FSDP2):
    """Tensor parallelism: each process computes some heads and some features of the MLP for the whole batch."""

    def shard(self, model: GPT) -> None:
        """Replace the model's parameters with DTensors."""
        first = dict.fromkeys(["attention.query", "attention.key", "attention.value", "mlp.up"], ColwiseParallel())
        second = dict.fromkeys(["attention.out", "mlp.down"], RowwiseParallel())
        for block in model.blocks:
            parallelize_module(block, init_device_mesh("cpu", (size(),)), first | second)

    def part(self, tokens: Tensor) -> Tensor:
        """Return this process's part of a batch."""
        return tokens


class ContextParallel(Replicated):
    """Context parallelism: each process has a part of each sequence, and attention gathers all keys and values."""

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        for block in model.blocks:
            block.attention.attend = attend_to_all_ranks

    def part(self, tokens: Tensor) -> Tensor:
        """Return this process's part of a batch."""
        return evenly(tokens, 1)

    def logits(self, params: Params, tokens: Tensor) -> Tensor:
        """Return the model's output for a part of a batch."""
        return functional_call(self.model, params, (tokens, rank() * tokens.shape[1]))


def attend_to_all_ranks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of this rank's queries to the keys of all ranks: (batch, heads, time, features)."""
    own, begin = query.shape[-2], rank() * query.shape[-2]
    key, value = Gather.apply(key, -2), Gather.apply(value, -2)
    mask = torch.ones(own, key.shape[-2], dtype=torch.bool).tril(diagonal=begin)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


STRATEGIES: dict[str, type[OneProcess]] = {
    "ddp": Replicated,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "fsdp2": FSDP2,
    "hsdp": HSDP,
    "tp": TensorParallel,
    "cp": ContextParallel,
}


def check_processes(shard: str, processes: int, *, heads: int, batch: int, context: int) -> None:
    """Check that a sharding strategy supports a number of processes.

    Raises:
        ValueError: the number does not divide the dim that the strategy shards, or ``hsdp`` cannot form two groups.
    """
    if shard == "hsdp" and (processes < 4 or processes % 2):
        raise ValueError(f"--shard hsdp: found {processes} processes, expected an even number of at least 4")
    if shard == "tp":
        if heads % processes:
            raise ValueError(f"--shard tp: found {processes} processes, expected a divisor of the {heads} heads")
        return
    option, found = ("--context", context) if shard == "cp" else ("--batch", batch)
    if found % processes:
        raise ValueError(f"{option}: found {found}, expected a multiple of {processes}, the number of processes")
