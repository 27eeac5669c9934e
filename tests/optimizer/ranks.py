"""The functions that ranks run in the tests of `TransformOptimizer` over processes."""

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import muonfx as mfx
from muonfx import sharding
from muonfx.checkpoint import FlatPiece
from muonfx.sharding import rendezvous
from muonfx.sharding.shards import IntervalTensor
from tests.processes import Here
from tests.sharding.counting import counting

EXACT: dict[str, Any] = {"dtype": torch.float32}
FULL = StateDictOptions(full_state_dict=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Net(nn.Module):
    """An embedding tied to the head, matrices of odd sizes, a stack of experts, and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.mixed = nn.Linear(6, 5, bias=False)
        self.back = nn.Linear(5, 6)
        self.experts = Experts(3, 6, 6)
        self.frozen = nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(4, 3)
        self.frozen.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(x)))
        x = x + self.back(self.mixed(x))
        x = x + self.experts(x) + self.frozen(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Every expert of a stack, averaged."""

    def __init__(self, count: int, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, rows, columns) / columns)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("erc,bc->br", self.weight, x) / len(self.weight)


def made() -> Net:
    torch.manual_seed(7)
    return Net()


BLOCKS = ("up", "down", "mixed", "back", "experts", "frozen", "norm", "unused")


def sharded(kind: str, here: Here) -> tuple[nn.Module, dict[str, Any]]:
    """A model under a kind of parallelism, and what the optimizer is to be told besides."""
    net = made()
    if kind == "ddp":
        wrapped = DistributedDataParallel(net, process_group=here.group, find_unused_parameters=True)
        return wrapped, {"layout": lambda named: sharding.replicated(named, here.group)}
    if kind in ("tp", "fsdp+tp"):
        tp = here.mesh if kind == "tp" else here.grid["inner"]
        parallelize_module(net, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind in ("fsdp", "hsdp", "fsdp+tp"):
        mesh = here.mesh if kind == "fsdp" else here.grid if kind == "hsdp" else here.grid["outer"]
        for name in BLOCKS:
            fully_shard(getattr(net, name), mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net, {}


def labels(net: nn.Module) -> dict[str, str]:
    found = {}
    for name, param in net.named_parameters():
        name = name.removeprefix("module.")
        found[name] = "stack" if param.ndim == 3 else "muon" if param.ndim == 2 and "embed" not in name else "adamw"
    return found


def chains(net: nn.Module) -> dict[str, mfx.Transform]:
    stack: Any = ((-2,), (-1,))

    def muon(**options: Any) -> mfx.Transform:
        return mfx.chain(
            mfx.momentum(0.9),
            mfx.orthogonalize(**EXACT, **options),
            mfx.normalize_neurons(**options),
            mfx.scale_by_shape(),
            mfx.scale_by_learning_rate(0.02),
        )

    by_label = mfx.partition(
        {"muon": muon(), "stack": muon(view=mfx.MatrixView(stack)), "adamw": mfx.adamw(1e-2, weight_decay=0.1)},
        labels(net),
    )
    outer = mfx.chain(
        mfx.clip_by_global_norm(1.0),
        mfx.partition(
            {
                "muon": mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(**EXACT), mfx.normalize_neurons()),
                "stack": mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(**EXACT, view=mfx.MatrixView(dims=stack))),
                "adamw": mfx.scale_by_adam(),
            },
            labels(net),
        ),
        mfx.add_decayed_weights(0.1, mask=mfx.select.ndim(min=2)),
        mfx.scale_by_learning_rate(0.02),
    )
    return {
        "by label": by_label,
        "outer": outer,
        "skipping": mfx.skip_nonfinite(outer),
        "accumulating": mfx.accumulate(outer, 2),
        "watched": mfx.chain(mfx.monitor("grad"), outer),
    }


def named(net: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): param for name, param in net.named_parameters()}


def groups_of(params: dict[str, Tensor], how: str) -> Any:
    if how == "one":
        return params
    rest = [(n, p) for n, p in params.items() if not n.startswith(("up", "experts"))]
    first = [(n, p) for n, p in params.items() if n.startswith(("up", "experts"))]
    return [{"params": first, "lr": 0.005}, {"params": rest, "lr": 0.03}]


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(11, (9,), generator=draw), torch.randint(11, (9,), generator=draw)


def whole(leaf: Any) -> Tensor:
    return leaf.full_tensor() if isinstance(leaf, DTensor) else leaf.detach()


def close(found: Any, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(whole(found), wanted.detach(), rtol=2e-5, atol=2e-5, msg=lambda m: f"{what}: {m}")


def train(net: nn.Module, optimizer: Any, steps: range, clip: float | None = None, scheduler: Any = None) -> None:
    for step in steps:
        tokens, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def optimized(
    kind: str | None, here: Here | None, chain: str = "by label", groups: str = "two", **more: Any
) -> tuple[Any, Any]:
    """A model and its optimizer, sharded or (kind is None) in one process."""
    net, options = (made(), {}) if kind is None else sharded(kind, cast("Here", here))
    return net, mfx.TransformOptimizer(groups_of(named(net), groups), chains(made())[chain], **options, **more)


# --------------------------------------------------------------------------------------------------- the functions


@quiet()
def trains_as_one(here: Here, kind: str, chain: str, groups: str, clip: float | None = None) -> None:
    """Train a sharded model and a whole one, with a scheduler; compare parameters and states."""
    pairs = [optimized(one, here, chain, groups) for one in (kind, None)]
    for net, optimizer in pairs:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        train(net, optimizer, range(4), clip, scheduler)
    assert_same(*pairs)


def assert_same(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    """Compare the parameters and the states of two models with their optimizers."""
    (net, optimizer), (one, other) = found, wanted
    for name, param in named(net).items():
        close(param, named(one)[name], name)
    logical = sharding.to_global(optimizer.transform, optimizer.transform_state)
    names, found = mfx.tree.names(logical), mfx.tree.leaves(logical)
    for name, leaf, like in zip(names, found, mfx.tree.leaves(other.transform_state), strict=True):
        if isinstance(leaf, FlatPiece):
            close(leaf.data, like.reshape(-1)[leaf.start : leaf.stop], name)
        else:
            close(leaf, like, name)


@quiet()
def by_given_gradients(here: Here, kind: str, chain: str, groups: str) -> None:
    """Steps on gradients that are set, so that nothing but the optimizer can differ: the same bits."""
    net, optimizer = optimized(kind, here, chain, groups, donate_grads=True)
    one, other = optimized(None, here, chain, groups)
    params, wanted = named(net), named(one)
    for step in range(3):
        set_gradients(params, wanted, step, absent_here=here.rank == 1)
        optimizer.step()
        other.step()
        for name, param in params.items():
            if chain == "outer":  # its norm of all gradients is added up in another order
                close(param, wanted[name], f"step {step}, {name}")
            else:
                assert torch.equal(whole(param), wanted[name].detach()), (step, name)


def set_gradients(params: Any, wanted: Any, step: int, *, absent_here: bool = False) -> None:
    """Drawn gradients; one is absent everywhere, and one, of zeros, on this rank."""
    draw = torch.Generator().manual_seed(100 + step)
    for name, like in wanted.items():
        grad = torch.randn(like.shape, generator=draw)
        if not like.requires_grad or (name == "mixed.weight" and step == 1):
            like.grad = params[name].grad = None
            continue
        if name == "back.bias":
            grad.zero_()
        like.grad = grad
        param = params[name]
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = None if name == "back.bias" and absent_here else grad.clone()


def bare_parameters(here: Here) -> dict[str, Tensor]:
    """Plain tensors, DTensors on the grid and on one of its dims, one without elements on most ranks."""
    torch.manual_seed(3)
    spread: dict[str, Any] = {
        "plain": None,
        "rows": (here.grid, [Shard(0), Replicate()]),
        "both": (here.grid, [Shard(0), Shard(1)]),
        "tiny": (here.mesh, [Shard(0)]),
        "inner": (here.grid["inner"], [Shard(1)]),
    }
    found = {}
    for name, where in spread.items():
        tensor = torch.randn(1, 5) if name == "tiny" else torch.randn(6, 5)
        if where is not None:
            tensor = distribute_tensor(tensor, *where, src_data_rank=None)
        found[name] = nn.Parameter(tensor)
    return found


def mixed_parameters(here: Here) -> None:
    params = bare_parameters(here)
    wanted = {name: nn.Parameter(whole(param).clone()) for name, param in params.items()}
    tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(**EXACT), mfx.scale(-0.1))
    optimizer, other = mfx.TransformOptimizer(params, tx), mfx.TransformOptimizer(wanted, tx)
    for step in range(2):
        set_gradients(params, wanted, step)
        optimizer.step()
        other.step()
    for name, param in params.items():  # one process multiplies the five as one batch, which may round otherwise
        close(param, wanted[name], name)


@quiet()
def save(here: Here, kind: str, path: Path, how: str) -> None:
    """Train a little and save."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    params = {name: param.detach() for name, param in named(net).items()}
    if how == "dcp":
        state = {"model": params, "optimizer": get_optimizer_state_dict(net, optimizer)}
        dcp.save(state, checkpoint_id=path, process_group=here.group)
    else:
        mfx.checkpoint.save(path, optimizer.transform_state, params=params, tx=optimizer.transform)


@quiet()
def load_and_go_on(here: Here, kind: str, path: Path, how: str) -> None:
    """Load into a fresh model, go on, and compare with a run in one process that nobody has interrupted."""
    net, optimizer = optimized(kind, here)
    params = {name: param.detach() for name, param in named(net).items()}
    for leaf in params.values():
        leaf.zero_()
    if how == "dcp":
        state = {"model": params, "optimizer": get_optimizer_state_dict(net, optimizer)}
        dcp.load(state, checkpoint_id=path, process_group=here.group)
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
    else:
        own = optimizer.transform_state
        saved = mfx.checkpoint.load(path, like=own, tx=optimizer.transform)
        mfx.tree.map(lambda leaf, value: leaf if leaf is None else leaf.copy_(value), own, saved)
        loaded = mfx.checkpoint.load_params(path, like=params, tx=optimizer.transform)
        mfx.tree.map(lambda leaf, value: leaf.copy_(value), params, loaded)
    goes_on(net, optimizer)


@quiet()
def local_leaves(optimizer: Any) -> list[Tensor]:
    leaves = [leaf for held in optimizer.state.values() for leaf in held.values()]
    return [
        leaf.piece.data if isinstance(leaf, IntervalTensor) else getattr(leaf, "_local_tensor", leaf) for leaf in leaves
    ]


def add_a_group(here: Here, kind: str) -> None:
    """Add the large matrices later: owners change, and what they had goes to the new ones."""
    found = []
    for net, more in (sharded(kind, here), (made(), {})):
        params = named(net)
        late = {name: param for name, param in params.items() if name.startswith(("down", "up"))}
        early = {name: param for name, param in params.items() if name not in late}
        optimizer = mfx.TransformOptimizer(early, chains(made())["by label"], **more)
        train(net, optimizer, range(2))
        optimizer.add_param_group({"params": list(late.items()), "lr": 0.007})
        train(net, optimizer, range(2, 4))
        found.append((net, optimizer))
    assert_same(*found)


def counted(here: Here, kind: str) -> dict[str, list[int]]:
    """How often each collective is called in a step, on this rank: with one group, and with groups that differ."""
    calls: dict[str, list[int]] = {}
    with quiet():
        net, more = sharded(kind, here)
        for how in ("one", "two"):
            optimizer = mfx.TransformOptimizer(groups_of(named(net), how), chains(made())["outer"], **more)
            train(net, optimizer, range(1))
            with counting(here) as found:
                optimizer.step()
            for name, count in found.calls.items():
                calls.setdefault(name, []).append(count)
    return calls


def nothing_is_sharded(here: Here) -> dict[str, int]:
    """Plain parameters where torch.distributed runs: nobody is asked."""
    with quiet(), counting(here) as found:
        net = made()
        optimizer = mfx.TransformOptimizer(net, chains(net)["outer"])
        train(net, optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
    return found.calls


@quiet()
def trouble(here: Here, what: str, on: int) -> None:
    """A step with something wrong on one rank; parameters must be as they were, and a good step must work."""
    net, optimizer = optimized("fsdp", here, groups="one")
    params = named(net)
    train(net, optimizer, range(1))
    set_gradients(params, named(made()), 0)
    before = {name: whole(param).clone() for name, param in params.items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    if here.rank == on:
        optimizer.param_groups[0]["lr"] = {"another rate": 0.5, "a bad rate": -1.0}[what]
    try:
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for name, param in params.items():
            assert torch.equal(whole(param), before[name]), name
        optimizer.step()
        assert not torch.equal(whole(params["up.weight"]), before["up.weight"])


@quiet()
def bad_state_on_one_rank(here: Here, on: int) -> None:
    _, optimizer = optimized("fsdp", here, groups="one")
    saved = optimizer.state_dict()
    if here.rank == on:
        del saved["state"][0]
    optimizer.load_state_dict(saved)


def told_too_much(here: Here) -> None:
    net, _ = sharded("fsdp", here)
    mfx.TransformOptimizer(net, mfx.scale(-0.1), layout=sharding.replicated(dict(net.named_parameters()), here.group))


def copies_that_differ(here: Here) -> None:
    """One name for two parameters: on each row of the grid another, on the row's own mesh."""
    own = distribute_tensor(
        torch.full((4, 3), float(here.rank // 2)), here.grid["inner"], [Shard(0)], src_data_rank=None
    )
    both = distribute_tensor(torch.ones(4, 3), here.grid, [Shard(0), Shard(1)], src_data_rank=None)
    mfx.TransformOptimizer({"own": nn.Parameter(own), "both": nn.Parameter(both)}, mfx.momentum())


# ------------------------------------------------------------------------------------------- torch's own formats


def alone(steps: int) -> tuple[Any, Any]:
    net, optimizer = optimized(None, None)
    train(net, optimizer, range(steps))
    return net, optimizer


def goes_on(net: Any, optimizer: Any) -> None:
    """Two more steps lead to where four in one process lead."""
    train(net, optimizer, range(2, 4))
    assert_same((net, optimizer), alone(4))


def with_weights_of(net: Any, steps: int) -> None:
    """Give a model the weights that one process has after some steps."""
    values = {name: param.detach() for name, param in named(alone(steps)[0]).items()}
    for name, param in named(net).items():
        like = param.detach()
        if isinstance(like, DTensor):
            like.copy_(distribute_tensor(values[name], like.device_mesh, like.placements, src_data_rank=None))
        else:
            like.copy_(values[name])


@quiet()
def save_full(here: Here, kind: str, path: Path) -> None:
    """The usual line for a full state dict; rank 0 has all, as one process has it, and writes it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_optimizer_state_dict(net, optimizer, options=options)
    if dist.get_rank() == 0:
        one, other = alone(2)
        wanted = get_optimizer_state_dict(one, other)
        assert found["state"].keys() == wanted["state"].keys()
        for name, leaves in wanted["state"].items():
            assert leaves.keys() == found["state"][name].keys(), name
            for key, leaf in leaves.items():
                assert type(found["state"][name][key]) is torch.Tensor
                close(found["state"][name][key], leaf, f"{name} {key}")
        torch.save(found, path)


@quiet()
def load_full(here: Here, kind: str, path: Path, broadcast: bool) -> None:
    """The usual line for loading it: rank 0 reads and sends, or every rank reads."""
    net, optimizer = optimized(kind, here)
    with_weights_of(net, 2)
    saved = torch.load(path, weights_only=True) if not broadcast or dist.get_rank() == 0 else {}
    set_optimizer_state_dict(net, optimizer, saved, options=BROADCAST if broadcast else FULL)
    goes_on(net, optimizer)


@quiet()
def rank_0_saves(here: Here, kind: str, path: Path) -> None:
    """Under data parallelism one rank alone asks for the state, and nobody waits for it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    if here.rank == here.size - 1:
        found = optimizer.state_dict()
        assert {type(leaf) for leaves in found["state"].values() for leaf in leaves.values()} == {torch.Tensor}
        torch.save(found, path)
    train(net, optimizer, range(2, 3))
    dist.barrier(here.group)


@quiet()
def all_load(here: Here, kind: str, path: Path) -> None:
    net, optimizer = optimized(kind, here)
    with_weights_of(net, 2)
    optimizer.load_state_dict(torch.load(path, weights_only=True))
    goes_on(net, optimizer)


@quiet()
def each_saves(here: Here, kind: str, path: Path) -> None:
    """Every rank writes what it has, and loads its own into the same storage."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    torch.save(optimizer.state_dict(), f"{path}.{here.rank}")
    leaves = local_leaves(optimizer)
    before = [leaf.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.zero_()
    optimizer.load_state_dict(torch.load(f"{path}.{here.rank}", weights_only=True))
    assert [leaf.data_ptr() for leaf in local_leaves(optimizer)] == [leaf.data_ptr() for leaf in leaves]
    assert all(map(torch.equal, leaves, before))
    goes_on(net, optimizer)


@quiet()
def load_of_rank(here: Here, kind: str, path: Path, ranks: list[int]) -> None:
    """Every rank loads what some rank has written; nothing may change where that is refused."""
    _, optimizer = optimized(kind, here)
    saved = torch.load(f"{path}.{ranks[here.rank]}", weights_only=True)
    before = [leaf.clone() for leaf in local_leaves(optimizer)]
    try:
        optimizer.load_state_dict(saved)
    except Exception:
        assert all(map(torch.equal, local_leaves(optimizer), before))
        raise


@quiet()
def alone_with_patience(here: Here, kind: str, what: str, seconds: float) -> list[str]:
    """One rank alone calls what all must; the others go on with collectives of their own. Afterwards all can do it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(1))
    saved = optimizer.state_dict()
    said: list[str] = []
    kept = rendezvous._timeout, rendezvous.PATIENCE
    rendezvous._timeout, rendezvous.PATIENCE = (lambda group: timedelta(seconds=seconds)), timedelta(seconds=0.2)
    try:
        if here.rank == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    if what == "save":
                        optimizer.state_dict()
                    else:
                        optimizer.load_state_dict(saved if what == "load" else {**saved, "state": {}})
                except sharding.ShardingError as error:
                    said = [str(error), *[str(one.message) for one in caught]]
    finally:
        rendezvous._timeout, rendezvous.PATIENCE = kept
    dist.all_reduce(torch.ones(3), group=here.group)
    train(net, optimizer, range(1, 2))
    optimizer.load_state_dict(optimizer.state_dict())
    gc.collect()
    return said


@quiet()
def loads_of_two_moments(here: Here, kind: str) -> None:
    """One rank loads an older state than the others."""
    net, optimizer = optimized(kind, here)
    found = []
    for step in range(2):
        train(net, optimizer, range(step, step + 1))
        state = optimizer.state_dict()
        held = {i: {k: v.clone() for k, v in leaves.items()} for i, leaves in state["state"].items()}
        found.append({"state": held, "param_groups": state["param_groups"]})
    optimizer.load_state_dict(found[0 if here.rank == 1 else 1])
    before = {name: whole(param).clone() for name, param in named(net).items()}
    try:
        optimizer.step()
    finally:
        for name, param in named(net).items():
            assert torch.equal(whole(param), before[name]), name


@quiet()
def one_rank_loads_alone(here: Here, kind: str) -> None:
    """A rank alone loads an earlier state: its state dict has that state, and the next step is an error on all."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, range(1, 2))
    if here.rank == 1:
        optimizer.load_state_dict(saved)
        for index, leaves in optimizer.state_dict()["state"].items():
            for key, leaf in leaves.items():
                assert torch.equal(leaf, saved["state"][index][key]), key
    optimizer.step()


@quiet()
def in_another_order(here: Here) -> None:
    """One rank gives its parameters, and its groups, in another order: the same training."""
    net, _ = sharded("fsdp", here)
    params, order = list(named(net).items()), -1 if here.rank == 1 else 1
    optimizer = mfx.TransformOptimizer(groups_of(dict(params[::order]), "two")[::order], chains(made())["by label"])
    train(net, optimizer, range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same((net, optimizer), alone(3))


# -------------------------------------------------------------------------------- models that change parameters


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))


def wrapped(model: nn.Module, how: str, here: Here) -> nn.Module:
    if how == "fully_shard":
        return fully_shard(model, mesh=here.mesh)
    more: dict[str, Any] = {"process_group": here.group, "device_id": torch.device("cpu")}
    if how == "no_shard":
        more["sharding_strategy"] = ShardingStrategy.NO_SHARD
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, use_orig_params="original" in how or how == "no_shard", **more)


def one_step(model: nn.Module, optimizer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(3, 4, dtype=next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()


def under_fsdp1(here: Here, when: str, how: str) -> None:
    model = small()
    if when == "made after":
        mfx.Muon(wrapped(model, how, here))
    optimizer = mfx.Muon(model)
    one_step(wrapped(model, how, here), optimizer)


def switched_late(here: Here, chain: str) -> None:
    """Sharded after the first step, and back again: the same values of the state, and the steps of before."""
    tx = {"muon": mfx.muon, "normuon": mfx.normuon}[chain](0.02, orthogonalize=mfx.orthogonalize(**EXACT))
    model, twin = small(), small()
    labels = mfx.default_labels(model)
    optimizer, other = (
        mfx.TransformOptimizer(m, mfx.partition({"muon": tx, "adamw": mfx.adamw(0.01)}, labels)) for m in (model, twin)
    )
    one_step(model, optimizer)
    one_step(twin, other)
    layouts: list[Any] = []
    for how in ("plain", "fully_shard", "plain again"):
        if how == "fully_shard":
            fully_shard(model, mesh=here.mesh)
        elif how == "plain again":
            wholes = {name: whole(param).clone() for name, param in model.named_parameters()}
            model = small()
            model.load_state_dict(wholes)
            for group in optimizer.param_groups:  # as engines do
                group["params"] = [model.get_parameter(name) for name in group["param_names"]]
        saved = get_optimizer_state_dict(model, optimizer, options=FULL)
        layouts.append(type(next(model.parameters())))
        wanted = get_optimizer_state_dict(twin, other, options=FULL)
        for name, leaves in wanted["state"].items():
            assert leaves.keys() == saved["state"][name].keys()
            assert all(torch.allclose(leaf, saved["state"][name][key], atol=1e-6) for key, leaf in leaves.items())
            if how == "fully_shard":  # nothing has been computed in another order yet
                assert all(torch.equal(leaf, saved["state"][name][key]) for key, leaf in leaves.items())
        for m, o in ((model, optimizer), (twin, other)):
            o.zero_grad()
            one_step(m, o)
        for param, right in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(whole(param), right, atol=1e-5)
    assert len({*layouts}) == 2


def saved_after_evaluation(here: Here, stepped: bool) -> None:
    """A pass without gradients leaves a root of FSDP2 gathered: plain tensors stand in the model for a while."""
    model, twin = (fully_shard(small(), mesh=here.mesh) for _ in range(2))
    optimizer, other = (mfx.Muon(m, orthogonalize=mfx.orthogonalize(**EXACT)) for m in (model, twin))
    if stepped:
        one_step(model, optimizer)
        one_step(twin, other)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.ones(3, 4))
    assert not isinstance(next(model.parameters()), DTensor)
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert all(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])
    other.zero_grad()
    other.load_state_dict(saved)
    for m, o in ((model, optimizer), (twin, other)):
        one_step(m, o)
    assert_same_bits(model, twin)


def assert_same_bits(model: nn.Module, twin: nn.Module) -> None:
    for param, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(param), whole(wanted))


def cleared_alone(here: Here) -> None:
    """Gradients are cleared on one rank only after the model was sharded: nothing is exchanged before the step."""
    model, twin = small(), small()
    optimizer = mfx.Muon(model, orthogonalize=mfx.orthogonalize(**EXACT))
    fully_shard(model, mesh=here.mesh)
    other = mfx.Muon(fully_shard(twin, mesh=here.mesh), orthogonalize=mfx.orthogonalize(**EXACT))
    if here.rank == 0:
        optimizer.zero_grad()
    for m, o in ((model, optimizer), (twin, other)):
        one_step(m, o)
    assert_same_bits(model, twin)


def cut_on_one_rank(here: Here) -> None:
    model = small()
    optimizer = mfx.Muon(model, layout=sharding.replicated(dict(model.named_parameters()), here.group))
    if here.rank == 0:
        optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(3, 4))
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()


def saved_alone(here: Here) -> None:
    model = small()
    optimizer = mfx.Muon(model, layout=sharding.replicated(dict(model.named_parameters()), here.group))
    one_step(model, optimizer)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    if here.rank == 0:
        optimizer.state_dict()
    optimizer.zero_grad()
    one_step(model, optimizer)
    for param in model.parameters():
        first = param.detach().clone()
        dist.broadcast(first, dist.get_global_rank(here.group, 0), group=here.group)
        assert torch.equal(first, param)


def trains(here: Here, how: str) -> None:
    """Two steps, between them a pass without gradients; all parameters have changed."""
    with torch.device("meta" if "meta" in how else "cpu"):
        model = small()
    if "first" in how:
        optimizer = mfx.Muon(model)
        fully_shard(model, mesh=here.mesh)
        if "meta" in how:
            model.to_empty(device="cpu")
            for param in model.parameters():
                nn.init.normal_(param)
    elif how == "compiled ddp":
        optimizer = mfx.Muon(model)
        model = torch.compile(DistributedDataParallel(model, process_group=here.group), backend="eager")
    elif how == "replicated, converted":
        optimizer = mfx.Muon(model, layout=sharding.replicated(dict(model.named_parameters()), here.group))
        model = DistributedDataParallel(model.bfloat16(), process_group=here.group)
    else:
        model = wrapped(model, how.removesuffix(", converted"), here)
        optimizer = mfx.Muon(model)
        if how.endswith("converted"):
            model.bfloat16()
    before = [whole(param).clone() for param in model.parameters()]
    for _ in range(2):
        one_step(model, optimizer)
        optimizer.zero_grad()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # FSDP2 may leave parameters unsharded after this.
            model(torch.ones(3, 4, dtype=next(model.parameters()).dtype))
            optimizer.step()
    for param, was in zip(model.parameters(), before, strict=True):
        assert not torch.equal(whole(param), was)
