"""QK-clip over ranks: the same under every layout, with the largest logits of all ranks, for one more all-reduce."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, World, on_ranks
from tests.sharding.cases import Flat, LayoutCase, Params, Placed, Replicated, Zero, laid_out, model

pytestmark = pytest.mark.dist


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
    labels = mfx.routing.default_labels_by_name
    return mfx.muonclip(HEADS, 0.3, 0.05, tau=TAU, orthogonalize=exact, labels=labels)


def trained(
    model: nn.Module,
    part: Callable[[Tensor], tuple[Tensor, int, int]],
    reduce: Callable[[Tensor], None],
    **more: Any,
) -> tuple[list[Tensor], Params]:
    """The largest logits that are seen at each step, and the parameters in the end."""
    parallel = more.pop("tensor_parallel", (0, 1))
    optimizer = mfx.TransformOptimizer(model, chain(), **more)
    draw = torch.Generator().manual_seed(1)
    seen: list[Tensor] = []
    for _ in range(4):
        x = 2 * torch.randn(6, 12, 8, dtype=torch.float64, generator=draw)
        optimizer.zero_grad()
        with mfx.attention.collect_max_logits(
            model, HEADS.module, tensor_parallel=parallel
        ) as logits:
            own, start, end = part(x)
            # A sum over all positions, of which each rank has some.
            (model["h"]["attn"](own, start, end).square().sum() / x.numel()).backward()
        for param in model.parameters():
            reduce(param.grad)
        seen.append(logits["h.attn"])
        optimizer.step(max_logits=logits)
    whole = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in model.named_parameters()
    }
    return seen, {name: leaf.detach().clone() for name, leaf in whole.items()}


@functools.cache
def alone() -> tuple[list[Tensor], Params]:
    return trained(made(), lambda x: (x, 0, x.shape[1]), lambda grad: None)


def laid_out_as(here: Here, way: str) -> tuple[list[Tensor], Params]:
    """The training of `alone`, divided among ranks."""
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
        # A mean over ranks, made a sum.
        return trained(model, sequences, lambda grad: grad.to_local().mul_(size))
    layout = sharding.replicated(dict(model.named_parameters()), here.group)
    return trained(model, {"dp": sequences, "cp": queries}[way], add_up, layout=layout)


@pytest.mark.parametrize(("way", "size"), [("dp", 3), ("cp", 3), ("tp", 2), ("fsdp2", 2)])
def test_training_is_that_of_one_process(world: World, way: str, size: int):
    wanted_logits, wanted = alone()
    clipped = [int((seen > TAU).sum()) for seen in wanted_logits]
    assert clipped == [4, 0, 1, 2]  # some heads at some steps
    results: list[tuple[list[Tensor], Params]] = world.check(size, laid_out_as, way=way)
    for step, like in enumerate(wanted_logits):
        seen = torch.stack([logits[step] for logits, _ in results])
        torch.testing.assert_close(seen.amax(0), like, rtol=1e-9, atol=1e-9)
        # Each rank has seen something else.
        assert not all(torch.equal(own, seen[0]) for own in seen)
    for _, params in results:
        torch.testing.assert_close(params, wanted, rtol=1e-9, atol=1e-9)


MODEL = model(
    **{
        "a.q_proj.weight": (8, 3),
        "a.k_proj.weight": (4, 3),
        "a.k_proj.bias": (4,),
        "b.qkv": (12, 5),
        "c": (3, 2),
    }
)
BOTH_HEADS = mfx.AttentionHeads("a", 4, 2), mfx.AttentionHeads("b", 2, query="qkv", key="qkv")
PLACED = {
    "a.q_proj.weight": "0",
    "a.k_proj.weight": "1",
    "a.k_proj.bias": "0",
    "b.qkv": "0",
    "c": "r",
}
ORDER = tuple(MODEL.leaves)
GRID = {name: (letter, "0" if name == "b.qkv" else "r") for name, letter in PLACED.items()}
LAYOUTS: dict[int, list[LayoutCase]] = {
    1: [Replicated(), Zero(3, "flat")],
    2: [
        Replicated(),
        Zero(1),
        Zero(3, "flat"),
        Placed({name: (letter,) for name, letter in PLACED.items()}),
    ],
    3: [
        Replicated(),
        Zero(2),
        Flat(ORDER, (0, 5, 77, MODEL.numel)),
        Placed({n: (x,) for n, x in PLACED.items()}),
    ],
    4: [Placed(GRID, grid=True)],
}


@pytest.mark.parametrize("size", LAYOUTS)
@on_ranks()
def test_the_largest_logits_of_all_ranks_count_under_every_layout(here: Here):
    """Updates where each rank has seen other logits are those of one process that has seen all."""
    draw = torch.Generator().manual_seed(0)
    logits = [
        {
            "a": 300 * torch.rand(4, generator=draw),
            "b": torch.tensor([500.0 if rank == 0 else -torch.inf, 20.0]),
        }
        for rank in range(here.size)
    ]
    most = {name: torch.stack([seen[name] for seen in logits]).amax(0) for name in logits[0]}
    params, grads = MODEL.params(), MODEL.grads(0)
    for tx in (
        mfx.chain(mfx.momentum(0.9), mfx.scale_by_learning_rate(0.1), mfx.qk_clip(BOTH_HEADS)),
        mfx.master_params(
            mfx.chain(mfx.clip_by_global_norm(1e9), mfx.qk_clip(BOTH_HEADS, 150.0, alpha=0.3))
        ),
    ):
        wanted, _ = tx.update(grads, tx.init(params), params, max_logits=most)
        for case in LAYOUTS[here.size]:
            layout = laid_out(case, params, here, tx)
            over, local = sharding.sharded(tx, layout), layout.shard(params)
            updates, _ = over.update(
                layout.shard(grads), over.init(local), local, max_logits=logits[here.rank]
            )
            torch.testing.assert_close(layout.gather(updates), wanted, rtol=0, atol=0)


@on_ranks(2)
def test_bad_logits_on_one_rank_are_an_error_on_all(here: Here):
    """Logits that are wrong on the last rank alone; then a good step."""
    params = {name: leaf.detach() for name, leaf in made().named_parameters()}
    layout = sharding.zero(params, here.group)
    tx = sharding.sharded(mfx.qk_clip(HEADS), layout)
    local = layout.shard(params)
    state, good = tx.init(local), {"h.attn": torch.zeros(4)}
    for bad, said in (
        ({"h.atn": torch.zeros(4)}, r"found none \(did you mean 'h\.atn'\?\)"),
        ({"h.attn": torch.zeros(2)}, r"found one of \(2,\)"),
        ({**good, "other": torch.zeros(1)}, "the ranks have different extra arguments"),
    ):
        with pytest.raises((ValueError, sharding.ShardingError), match=said):
            tx.update(local, state, local, max_logits=bad if here.rank == here.size - 1 else good)
    tx.update(local, state, local, max_logits=good)
