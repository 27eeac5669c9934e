"""The ways to train on several processes: what each keeps of the parameters, and how its gradients come about.

The loop in train_gpt.py is the same for all. A way brings the ``layout`` that says which piece of each parameter a
process keeps, ``params``, this process's pieces, and ``grads``, which gives the gradient of the whole batch in the same
pieces. The optimizer is that of one process under ``muonfx.sharding.sharded``, and so is its update.

| way | parameters | gradients | of a batch |
| --- | --- | --- | --- |
| ``ddp`` | whole | whole | some of the sequences |
| ``zero1`` | pieces; whole during a step | whole, then pieces | some of the sequences |
| ``zero2`` | pieces; whole during a step | pieces; whole for one block at a time | some of the sequences |
| ``zero3`` | pieces; whole for one block at a time | as zero2 | some of the sequences |
| ``fsdp2``, ``hsdp`` | as zero3, by torch's ``fully_shard``: DTensors | as zero2 | some of the sequences |
| ``tp`` | slices of the blocks' matrices, used where they lie | slices | all of it |
| ``cp`` | whole | whole | a part of each sequence |

In ``zero1`` and ``zero2`` pieces are whole matrices, so that nothing crosses for Newton-Schulz; in ``zero3`` one buffer
is cut into equal parts, across matrices. Either goes with any of the three.
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
    """One process, which has all; and what the ways to share it out have in common."""

    layout: sharding.Layout | None = None

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        self.model = model
        self.params: Params = {name: p.detach().to(dtype, copy=True) for name, p in model.named_parameters()}

    def optimizer(self, tx: Any, offload: str | None = None) -> Any:
        """The same optimizer, for what this process keeps; with its state in host memory ("cpu") or in a folder."""
        tx = tx if offload is None else sharding.offload(tx, offload)
        return tx if self.layout is None else sharding.sharded(tx, self.layout)

    def whole(self, params: Params) -> Params:
        """All of the parameters."""
        return params if self.layout is None else self.layout.gather(params)

    def unsharded(self, params: Params) -> Params:
        """The parameters as the model takes them."""
        return params

    def part(self, tokens: Tensor) -> Tensor:
        """This process's part of a batch."""
        return tokens

    def mean(self, loss: Tensor) -> float:
        """The mean over all parts of a batch."""
        return loss.item()

    def logits(self, params: Params, tokens: Tensor) -> Tensor:
        """The model's output for a part of a batch."""
        return functional_call(self.model, params, (tokens,))

    def own_loss(self, params: Params, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of this process's part of a batch."""
        logits = self.logits(params, self.part(inputs))
        return F.cross_entropy(logits.flatten(0, 1).float(), self.part(targets).flatten())

    @torch.no_grad()
    def loss(self, params: Params, inputs: Tensor, targets: Tensor) -> float:
        """The mean loss of a whole batch."""
        return self.mean(self.own_loss(self.unsharded(params), inputs, targets))

    def grads(self, params: Params, inputs: Tensor, targets: Tensor) -> tuple[Params, float]:
        """The gradient and the loss of a whole batch."""
        grads, loss = grad_and_value(self.own_loss)(params, inputs, targets)
        return grads, self.mean(loss)


class Replicated(OneProcess):
    """Every process keeps all and computes with its part of the sequences, as under `DistributedDataParallel`."""

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        self.layout: sharding.Layout = self.layout_of(self.params)
        self.params = self.layout.shard(self.params)

    def layout_of(self, params: Params) -> sharding.Layout:
        """Which piece of each parameter each process keeps."""
        return sharding.replicated(params)

    def unsharded(self, params: Params) -> Params:
        """The parameters as the model takes them."""
        return self.layout.gather(params)

    def part(self, tokens: Tensor) -> Tensor:
        """This process's part of a batch."""
        return evenly(tokens, 0)

    def mean(self, loss: Tensor) -> float:
        """The mean over all parts of a batch."""
        return mean(loss)

    def grads(self, params: Params, inputs: Tensor, targets: Tensor) -> tuple[Params, float]:
        """The gradient of the own part, whole; then the pieces of the mean over all processes."""
        grads, loss = grad_and_value(self.own_loss)(self.unsharded(params), inputs, targets)
        return self.layout.reduce_scatter(grads), self.mean(loss)


class Zero1(Replicated):
    """Pieces of the parameters, and so of the optimizer's state. All else is as above."""

    def layout_of(self, params: Params) -> sharding.Layout:
        """Which piece of each parameter each process keeps."""
        return sharding.zero(params, stage=1)


class Zero2(Replicated):
    """Each block's gradients are reduced to pieces as soon as the backward pass has made them."""

    again = False
    """Whether a block's parameters are dropped behind it, and gathered again when the backward pass needs them."""

    def layout_of(self, params: Params) -> sharding.Layout:
        """Which piece of each parameter each process keeps."""
        return sharding.zero(params, stage=2)

    def unsharded(self, params: Params) -> Params:
        """The parameters as the model takes them."""
        return params  # `logits` gathers them, a part of the model at a time

    def logits(self, params: Params, tokens: Tensor) -> Tensor:
        """As `GPT.forward`."""
        rotation = self.model.rotation[:, : tokens.shape[1]].to(params["embed.weight"].dtype)
        x = self.call("embed", params, tokens)
        for number in range(len(self.model.blocks)):
            x = self.call(f"blocks.{number}", params, x, rotation)
        return self.call("head", params, self.call("norm", params, x))

    def call(self, part: str, params: Params, *inputs: Tensor) -> Tensor:
        """Run a part of the model; the gradient of a gathering is a reduction to pieces."""
        module = self.model.get_submodule(part)
        pieces = {f"{part}.{name}": params[f"{part}.{name}"] for name, _ in module.named_parameters()}

        def run(*inputs: Tensor) -> Tensor:
            gathered = self.layout.all_gather(pieces)
            return functional_call(module, {name.removeprefix(f"{part}."): p for name, p in gathered.items()}, inputs)

        return checkpoint(run, *inputs, use_reentrant=False) if self.again else run(*inputs)

    def grads(self, params: Params, inputs: Tensor, targets: Tensor) -> tuple[Params, float]:
        """The gradient and the loss of a whole batch."""
        leaves = {name: piece.detach().requires_grad_() for name, piece in params.items()}
        loss = self.own_loss(leaves, inputs, targets)
        return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)), self.mean(loss)


class Zero3(Zero2):
    """Parameters are whole for one block at a time, in the backward pass too."""

    again = True

    def layout_of(self, params: Params) -> sharding.Layout:
        """Which piece of each parameter each process keeps."""
        return sharding.zero(params, stage=3, partition="flat")


class FSDP2(OneProcess):
    """torch shards the model in place; parameters, gradients, updates and state are DTensors."""

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        self.model = model.to(dtype)
        self.shard(model)
        self.layout: sharding.Layout = sharding.from_dtensors(dict(model.named_parameters()))
        self.params = {name: p.detach() for name, p in model.named_parameters()}  # they share the model's storage

    def shard(self, model: GPT) -> None:
        """Make DTensors of the model's parameters."""
        mesh = self.mesh()
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)

    def mesh(self) -> Any:
        """The processes that share a parameter."""
        return init_device_mesh("cpu", (size(),), mesh_dim_names=("shard",))

    def part(self, tokens: Tensor) -> Tensor:
        """This process's part of a batch."""
        return evenly(tokens, 0)

    def mean(self, loss: Tensor) -> float:
        """The mean over all parts of a batch."""
        return mean(loss)

    def logits(self, params: Params, tokens: Tensor) -> Tensor:
        """The model's output for a part of a batch."""
        return self.model(tokens)  # which has the parameters

    def grads(self, params: Params, inputs: Tensor, targets: Tensor) -> tuple[Params, float]:
        """The gradient and the loss of a whole batch."""
        self.model.zero_grad()
        loss = self.own_loss(params, inputs, targets)
        loss.backward()
        return {name: p.grad for name, p in self.model.named_parameters()}, self.mean(loss)


class HSDP(FSDP2):
    """Two groups of processes; within each a parameter is shared out, and both have all of them."""

    def mesh(self) -> Any:
        """The processes that share a parameter."""
        return init_device_mesh("cpu", (2, size() // 2), mesh_dim_names=("replicate", "shard"))


class TensorParallel(FSDP2):
    """Every process computes its heads and its features of the MLP, for the whole batch."""

    def shard(self, model: GPT) -> None:
        """Make DTensors of the model's parameters."""
        first = dict.fromkeys(["attention.query", "attention.key", "attention.value", "mlp.up"], ColwiseParallel())
        second = dict.fromkeys(["attention.out", "mlp.down"], RowwiseParallel())
        for block in model.blocks:
            parallelize_module(block, init_device_mesh("cpu", (size(),)), first | second)

    def part(self, tokens: Tensor) -> Tensor:
        """This process's part of a batch."""
        return tokens


class ContextParallel(Replicated):
    """Every process has a part of each sequence; attention gathers the keys and values of all of it."""

    def __init__(self, model: GPT, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        for block in model.blocks:
            block.attention.attend = attend_to_all

    def part(self, tokens: Tensor) -> Tensor:
        """This process's part of a batch."""
        return evenly(tokens, 1)

    def logits(self, params: Params, tokens: Tensor) -> Tensor:
        """The model's output for a part of a batch."""
        return functional_call(self.model, params, (tokens, rank() * tokens.shape[1]))


def attend_to_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of this process's queries to the keys and values of all: (batch, heads, time, features)."""
    own, begin = query.shape[-2], rank() * query.shape[-2]
    key, value = Gather.apply(key, -2), Gather.apply(value, -2)
    mask = torch.ones(own, key.shape[-2], dtype=torch.bool).tril(diagonal=begin)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


WAYS: dict[str, type[OneProcess]] = {
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
    """Refuse a number of processes that a way cannot share a run out among.

    Raises:
        ValueError: it does not divide what the way shares out, or ``hsdp`` cannot make two groups of it.
    """
    if shard == "hsdp" and (processes < 4 or processes % 2):
        raise ValueError(f"--shard hsdp: found {processes} processes, expected an even number, 4 or more: two groups")
    if shard == "tp":
        if heads % processes:
            raise ValueError(f"--shard tp: found {processes} processes for {heads} heads, expected a divisor of that")
        return
    option, found = ("--context", context) if shard == "cp" else ("--batch", batch)
    if found % processes:
        raise ValueError(f"{option}: found {found}, expected a multiple of the {processes} processes")
