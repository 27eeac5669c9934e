"""Muon on several processes, compared with DTensor's ``full_tensor()`` on every rank, Dion and DeepSpeed's Muon.

The model is a small GPT in float32. All candidates use five steps of `keller` in bf16 for hidden matrices, AdamW for
other parameters, and no clipping. The candidates of a case run in the same processes from the same weights; each rank
has its own micro-batch.

Under FSDP2 the time is that of ``optimizer.step()``. Under ZeRO it is that of a whole iteration, because DeepSpeed
orthogonalizes in ``backward`` at stages 1 and 2, and gathers parameters in ``step`` at these stages and in ``forward``
at stage 3. The model has few tokens, so that the update and its communication take most of the time; the row "forward
and backward alone" shows the rest. Each row also has the bytes sent in the timed part, the number of matrices that all
ranks orthogonalize, and an error. The error is the distance of the parameters from those of one process after three
iterations, relative to their movement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import muonfx as mfx
from benchmarks import sharding_peers as peers
from benchmarks import world
from benchmarks.measure import summary
from benchmarks.peers import COMMON, versioned

ITERATIONS = 3
"""Number of iterations after which the parameters are compared."""

Params = dict[str, Tensor]


class Size(NamedTuple):
    """Sizes of the model and of a rank's micro-batch."""

    width: int = 512
    blocks: int = 2
    vocabulary: int = 512
    tokens: int = 16


class Candidate(NamedTuple):
    """A training loop in this process."""

    name: str
    package: str
    iterate: Callable[[], object]
    """Computes the next parameters from the tokens."""
    timed: Callable[[], object]
    whole: Callable[[], Params]
    """Returns the full parameters; a collective."""


class Block(nn.Module):
    """Attention with one head, and an MLP: six matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map activations `(batch, tokens, width)` to the same shape."""
        y = self.before_attention(x)
        x = x + self.o(
            F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True)
        )
        return x + self.down(F.relu(self.up(self.before_mlp(x))))


class GPT(nn.Module):
    """A GPT that returns its loss. DeepSpeed recognizes `embed` and `lm_head` by name and uses AdamW for them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.Sequential(*(Block(size.width) for _ in range(size.blocks)))
        self.norm = nn.LayerNorm(size.width)
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of tokens `(batch, tokens)`."""
        logits = self.lm_head(self.norm(self.blocks(self.embed(tokens))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make(size: Size) -> GPT:
    """Return a model with the same initial weights on every rank."""
    torch.manual_seed(0)
    return GPT(size)


def tokens(size: Size, rank: int) -> Tensor:
    """Return the micro-batch of a rank, the same in every iteration."""
    return torch.randint(
        size.vocabulary, (1, size.tokens), generator=torch.Generator().manual_seed(rank)
    )


def labels(model: nn.Module) -> mfx.Labels:
    """Return the label of each parameter, "muon" or "adamw"."""
    return mfx.default_labels(model)


def chain(model: nn.Module) -> mfx.Transform:
    """Return the optimizer, which is the same for all candidates."""
    return mfx.muon_with_adamw(
        peers.RATE,
        adamw_weight_decay=peers.DECAY,
        weight_decay=peers.DECAY,
        lr_scaling="original",
        orthogonalize=mfx.orthogonalize(coefficients=COMMON, dtype=torch.bfloat16),
        labels=labels(model),
    )


def trained(size: Size, processes: int) -> tuple[Params, Params]:
    """Return the initial parameters, and the parameters of one process after `ITERATIONS`."""
    model = make(size)
    tx = chain(model)
    start = params = {name: param.detach().clone() for name, param in model.named_parameters()}
    state = tx.init(params)
    batches = torch.cat(
        [tokens(size, rank) for rank in range(processes)]
    )  # equal sizes, so the mean over ranks is the mean over the batch

    def loss(params: Params) -> Tensor:
        return torch.func.functional_call(model, params, (batches,))

    for _ in range(ITERATIONS):
        updates, state = tx.update(torch.func.grad(loss)(params), state, params)
        params = mfx.apply_updates(params, updates)
    return start, params


# ------------------------------------------------------------------------------------------------------ candidates


def candidates(size: Size, case: str) -> Iterator[Candidate]:
    """Yield the candidates of a case; a collective."""
    return fsdp2(size) if case == "FSDP2" else zero(size, int(case[-1]))


def fsdp2(size: Size) -> Iterator[Candidate]:
    """Yield optimizers over DTensor parameters: full_tensor() on every rank, Dion, and ours."""
    builds: list[tuple[str, str, Callable[[nn.Module, list[str]], Any]]] = [
        ("full_tensor() on every rank", "torch", peers.full_tensor),
        (
            "full_tensor() of update and parameter, distribute_tensor",
            "torch",
            peers.full_tensor_twice,
        ),
        ("muonfx", "muonfx", Sharded),
        ("full_tensor() on every rank, again", "torch", peers.full_tensor),
    ]
    if peers.dion_runs():
        builds.insert(2, ("Dion", "dion", peers.dion))
    for name, package, build in builds:
        model = peers.fully_sharded(make(size))
        muon = [name for name, label in labels(make(size)).items() if label == "muon"]
        optimizer = build(model, muon)
        yield Candidate(
            name,
            package,
            iterate=_step_of(model, optimizer, tokens(size, dist.get_rank())),
            timed=optimizer.step,
            whole=lambda model=model: {
                name: p.full_tensor().detach() for name, p in model.named_parameters()
            },
        )


class Sharded:
    """Our functional optimizer on DTensor parameters, with in-place updates."""

    def __init__(self, model: nn.Module, muon: list[str]) -> None:
        self.params = dict(model.named_parameters())
        held = {name: param.detach() for name, param in self.params.items()}
        self.tx = mfx.sharding.sharded(chain(model), mfx.sharding.from_dtensors(held))
        self.state = self.tx.init(held)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        grads = {name: param.grad for name, param in self.params.items()}
        held = {name: param.detach() for name, param in self.params.items()}
        updates, self.state = self.tx.update(grads, self.state, held)
        local = [[t.to_local() for t in trees.values()] for trees in (held, updates)]
        torch._foreach_add_(*local)

    def zero_grad(self) -> None:
        """Delete the gradients."""
        for param in self.params.values():
            param.grad = None


def _step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor
) -> Callable[[], None]:
    def iterate() -> None:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()

    return iterate


def zero(size: Size, stage: int) -> Iterator[Candidate]:
    """Yield DeepSpeed and our training loops at a ZeRO stage."""
    yield deepspeed("DeepSpeed", size, stage)
    yield ours("muonfx, whole", size, stage, "whole")
    yield ours("muonfx, flat", size, stage, "flat")
    yield deepspeed("DeepSpeed again", size, stage)
    model, batch = make(size), tokens(size, dist.get_rank())

    def alone() -> None:
        model.zero_grad()
        model(batch).backward()

    yield Candidate("forward and backward alone", "torch", alone, alone, dict)


def deepspeed(name: str, size: Size, stage: int) -> Candidate:
    """Return the candidate of DeepSpeed's engine."""
    iterate, whole = peers.deepspeed(make(size), tokens(size, dist.get_rank()), stage)
    return Candidate(name, "deepspeed", iterate, iterate, whole)


def ours(name: str, size: Size, stage: int, partition: str) -> Candidate:
    """Return our training loop of a stage, as in the documentation."""
    model, batch = make(size), tokens(size, dist.get_rank())
    whole: Params = {name: param.detach() for name, param in model.named_parameters()}
    plain = chain(model)
    layout = mfx.sharding.zero(whole, stage=stage, partition=partition, tx=plain)
    tx = mfx.sharding.sharded(plain, layout)
    held = layout.shard(whole)
    state = tx.init(held)

    def loss(params: Params) -> Tensor:
        return torch.func.functional_call(model, params, (batch,))

    def gradients_of(params: Params) -> Params:
        leaves = {name: param.detach().requires_grad_() for name, param in params.items()}
        given = layout.all_gather(leaves) if stage == 3 else leaves
        grads = torch.autograd.grad(loss(given), list(leaves.values()))
        return dict(zip(leaves, grads, strict=True))

    def iterate() -> None:
        nonlocal held, state, whole
        grads = gradients_of(held) if stage == 3 else layout.reduce_scatter(gradients_of(whole))
        updates, state = tx.update(grads, state, held)
        held = mfx.apply_updates(held, updates)
        if stage < 3:
            whole = layout.gather(held)

    return Candidate(name, "muonfx", iterate, iterate, lambda: layout.gather(held))


# ------------------------------------------------------------------------------------------------------------- rows


def measure(size: Size, case: str, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of a case; a collective."""
    alive = list(candidates(size, case))
    processes = dist.get_world_size()
    start, wanted = trained(size, processes)
    matrices = sum(label == "muon" for label in labels(make(size)).values())
    rows: list[dict[str, Any]] = []
    for one in alive:
        for _ in range(ITERATIONS):
            one.iterate()
        found = one.whole()
        apart = distance(found, wanted) / distance(start, wanted) if found else None
        about = {
            "case": case,
            "processes": processes,
            "candidate": one.name,
            "package": versioned(one.package),
        }
        rows.append({**about, "apart": apart, **counted(one), "of": matrices})
    calls = {one.name: one.timed for one in alive}
    times = summary(world.interleaved(calls, rounds=rounds, seconds=seconds), alive[0].name)
    return [{**row, **times[row["candidate"]]} for row in rows]


def distance(a: Params, b: Params) -> float:
    """Return the Euclidean distance between two sets of parameters."""
    return math.sqrt(sum((a[name] - b[name]).double().square().sum().item() for name in b))


def counted(one: Candidate) -> dict[str, Any]:
    """Count bytes sent and collectives (means over ranks), and matrices orthogonalized (sum over ranks)."""
    with (
        peers.counted() as matrices,
        world.Sent() as sent,
        torch.compiler.set_stance("force_eager"),
    ):
        one.timed()
    total = torch.tensor([sent.bytes, sent.calls, matrices.number], dtype=torch.float64)
    dist.all_reduce(total)
    ranks = dist.get_world_size()
    return {
        "sent": total[0].item() / ranks,
        "collectives": total[1].item() / ranks,
        "matrices": int(total[2].item()),
    }


CASES = ("FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def speed(
    rounds: int,
    *,
    processes: tuple[int, ...] = (2, 4),
    size: Size = Size(),  # noqa: B008  immutable
    cases: tuple[str, ...] = CASES,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Return milliseconds, bytes sent and matrices computed for each case, number of processes and candidate."""
    if not peers.deepspeed_runs():
        cases = tuple(case for case in cases if not case.startswith("ZeRO"))
    return [
        row
        for number in processes
        for case in cases
        for row in world.run(number, measure, size, case, rounds, seconds)
    ]
