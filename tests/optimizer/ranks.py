"""The functions that ranks run in the tests of `TransformOptimizer` over processes."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import muonfx as mfx
from muonfx import sharding
from muonfx.checkpoint import FlatPiece
from tests.processes import Here
from tests.sharding.counting import counting

EXACT: dict[str, Any] = {"dtype": torch.float32}
FULL = StateDictOptions(full_state_dict=True)


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
    stack = mfx.MatrixView("... out in -> ... out in")

    def muon(**options: Any) -> mfx.Transform:
        return mfx.chain(
            mfx.momentum(0.9),
            mfx.orthogonalize(**EXACT, **options),
            mfx.normalize_neurons(**options),
            mfx.scale_by_shape(),
            mfx.scale_by_learning_rate(0.02),
        )

    by_label = mfx.partition(
        {"muon": muon(), "stack": muon(view=stack), "adamw": mfx.adamw(1e-2, weight_decay=0.1)},
        labels(net),
    )
    outer = mfx.chain(
        mfx.clip_by_global_norm(1.0),
        mfx.partition(
            {
                "muon": mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(**EXACT), mfx.normalize_neurons()),
                "stack": mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(**EXACT, view=stack)),
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


def alone(steps: int) -> tuple[Any, Any]:
    net, optimizer = optimized(None, None)
    train(net, optimizer, range(steps))
    return net, optimizer


def goes_on(net: Any, optimizer: Any) -> None:
    """Two more steps lead to where four in one process lead."""
    train(net, optimizer, range(2, 4))
    assert_same((net, optimizer), alone(4))
