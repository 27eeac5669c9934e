"""What the tests of QK-clip have ranks do: train a small attention model that is laid out in some way."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here
from tests.sharding.cases import Case, Params, laid_out

HEADS = mfx.AttentionHeads("*.attn", 4, key_heads=2, query="query", key="key")
TAU = 3.0


class Attention(nn.Module):
    """Four query heads of four features, and two key heads; queries may be some of the sequence's."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.out = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor, start: int, end: int) -> Tensor:
        q, k, v = (
            layer(part).unflatten(-1, (-1, 4)).transpose(1, 2)
            for layer, part in ((self.query, x[:, start:end]), (self.key, x), (self.value, x))
        )
        mask = torch.ones(end - start, x.shape[1], dtype=torch.bool).tril(start)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def made() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": Attention()}).double()
    return nn.ModuleDict({"h": model})


def chain() -> mfx.Transform:
    exact = mfx.orthogonalize(dtype=torch.float64)
    labels = mfx.select.default_labels_by_name
    return mfx.muonclip(HEADS, 0.3, 0.05, tau=TAU, orthogonalize=exact, labels=labels)


def trained(
    model: nn.Module, part: Callable[[Tensor], tuple[Tensor, int, int]], reduce: Callable[[Tensor], None], **more: Any
) -> tuple[list[Tensor], Params]:
    """The largest logits that are seen at each step, and the parameters in the end."""
    parallel = more.pop("tensor_parallel", (0, 1))
    optimizer = mfx.TransformOptimizer(model, chain(), **more)
    draw = torch.Generator().manual_seed(1)
    seen: list[Tensor] = []
    for _ in range(4):
        x = 2 * torch.randn(6, 12, 8, dtype=torch.float64, generator=draw)
        optimizer.zero_grad()
        with mfx.attention.collect_max_logits(model, HEADS.module, tensor_parallel=parallel) as logits:
            own, start, end = part(x)
            # A sum over all positions, of which each rank has some.
            (model["h"]["attn"](own, start, end).square().sum() / x.numel()).backward()
        for param in model.parameters():
            reduce(param.grad)
        seen.append(logits["h.attn"])
        optimizer.step(max_logits=logits)
    whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return seen, {name: leaf.detach().clone() for name, leaf in whole.items()}


def alone() -> tuple[list[Tensor], Params]:
    return trained(made(), lambda x: (x, 0, x.shape[1]), lambda grad: None)


def laid_out_as(here: Here, way: str) -> tuple[list[Tensor], Params]:
    """The training of `alone`, shared out over ranks."""
    model = made()
    rank, size = here.rank, here.size

    def all_of_it(x: Tensor) -> tuple[Tensor, int, int]:
        return x, 0, x.shape[1]

    def sequences(x: Tensor) -> tuple[Tensor, int, int]:
        return all_of_it(x.chunk(size)[rank])

    def queries(x: Tensor) -> tuple[Tensor, int, int]:
        length = x.shape[1] // size
        return x, rank * length, (rank + 1) * length

    def add_up(grad: Tensor) -> None:
        dist.all_reduce(grad, group=here.group)

    if way == "tp":
        split = {name: ColwiseParallel() for name in ("query", "key", "value")}
        parallelize_module(model["h"]["attn"], here.mesh, {**split, "out": RowwiseParallel()})
        return trained(model, all_of_it, lambda grad: None, tensor_parallel=(rank, size))
    if way == "fsdp2":
        fully_shard(model["h"]["attn"], mesh=here.mesh)
        return trained(model, sequences, lambda grad: grad.to_local().mul_(size))  # a mean over ranks, made a sum
    layout = sharding.replicated(dict(model.named_parameters()), here.group)
    return trained(model, {"dp": sequences, "cp": queries}[way], add_up, layout=layout)


def own_logits(here: Here, cases: list[Case], logits: list[dict[str, Tensor]]) -> None:
    """Updates where each rank has seen other logits are those of one process that has seen all."""
    for case in cases:
        params, grads = case.model.params(), case.model.grads(0)
        layout = laid_out(case.layout, params, here, case.tx)
        tx = sharding.sharded(case.tx, layout)
        local, mine = layout.shard(params), layout.shard(grads)
        updates, _ = tx.update(mine, tx.init(local), local, max_logits=logits[here.rank])
        most = {name: torch.stack([seen[name] for seen in logits[: here.size]]).amax(0) for name in logits[0]}
        wanted, _ = case.tx.update(grads, case.tx.init(params), params, max_logits=most)
        for name, found in layout.gather(updates).items():
            assert torch.equal(found, wanted[name]), (name, case.layout)


def bad_logits_on_one_rank(here: Here) -> list[str]:
    """The error of each rank for logits that are wrong on the last rank alone; then a good step."""
    params = {name: leaf.detach() for name, leaf in made().named_parameters()}
    layout = sharding.zero(params, here.group)
    tx = sharding.sharded(mfx.qk_clip(HEADS), layout)
    local = layout.shard(params)
    state, good = tx.init(local), {"h.attn": torch.zeros(4)}
    said: list[str] = []
    for bad in ({"h.atn": torch.zeros(4)}, {"h.attn": torch.zeros(2)}, {**good, "other": torch.zeros(1)}):
        try:
            tx.update(local, state, local, max_logits=bad if here.rank == here.size - 1 else good)
        except (ValueError, sharding.ShardingError) as error:
            said.append(str(error))
    tx.update(local, state, local, max_logits=good)
    return said
