"""`TransformOptimizer` over sharded models, with real processes: the parameters and states of one process."""

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import muonfx as mfx
from muonfx import sharding
from muonfx.checkpoint import FlatShard
from muonfx.sharding import ShardingError
from muonfx.sharding.communication import waiting
from muonfx.sharding.shards.flat_shard import FlatShardTensor
from tests.processes import Here, World, errors_of, on_ranks
from tests.sharding.counting import counting

pytestmark = pytest.mark.dist

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
    """A model under a kind of parallelism, and further arguments of the optimizer."""
    net = made()
    if kind == "ddp":
        wrapped = DistributedDataParallel(
            net, process_group=here.group, find_unused_parameters=True
        )
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
        found[name] = (
            "stack"
            if param.ndim == 3
            else "muon"
            if param.ndim == 2 and "embed" not in name
            else "adamw"
        )
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
                "muon": mfx.chain(
                    mfx.momentum(0.9), mfx.orthogonalize(**EXACT), mfx.normalize_neurons()
                ),
                "stack": mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(**EXACT, view=stack)),
                "adamw": mfx.scale_by_adam(),
            },
            labels(net),
        ),
        mfx.add_decayed_weights(0.1, mask=mfx.routing.ndim(min=2)),
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
    torch.testing.assert_close(
        whole(found), wanted.detach(), rtol=2e-5, atol=2e-5, msg=lambda m: f"{what}: {m}"
    )


def train(
    net: nn.Module, optimizer: Any, steps: range, clip: float | None = None, scheduler: Any = None
) -> None:
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
    return net, mfx.TransformOptimizer(
        groups_of(named(net), groups), chains(made())[chain], **options, **more
    )


SIZES = {"fsdp": 2, "hsdp": 4, "tp": 2, "fsdp+tp": 4, "ddp": 2}
EVERY_KIND = pytest.mark.parametrize(("kind", "size"), SIZES.items())
TRAININGS = [
    *((kind, "by label", "two", None) for kind in SIZES),
    *(("fsdp", chain, "one", None) for chain in ("skipping", "accumulating", "watched")),
    *((kind, "by label", "one", 0.05) for kind in ("fsdp", "hsdp")),
]


@pytest.mark.parametrize(
    ("size", "kind", "chain", "groups", "clip"), [(SIZES[case[0]], *case) for case in TRAININGS]
)
@on_ranks()
@quiet()
def test_a_sharded_model_trains_as_a_whole_one(
    here: Here, kind: str, chain: str, groups: str, clip: float | None
):
    """With a scheduler, with chains that look at the whole tree, and with gradients that are clipped before a step."""
    pairs = [optimized(one, here, chain, groups) for one in (kind, None)]
    for net, optimizer in pairs:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        train(net, optimizer, range(4), clip, scheduler)
    assert_same(*pairs)


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
@on_ranks(2)
@quiet()
def test_a_step_in_a_compiled_function_runs_between_its_graphs(here: Here, kind: str):
    net, optimizer = optimized(kind, here, "by label")
    one, other = optimized(None, here, "by label")
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for number in range(2):
        set_gradients(named(net), named(one), number)
        step()
        other.step()
    assert_same((net, optimizer), (one, other))
    with pytest.raises(Exception, match="_step_outside_the_graph"):
        torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)()


def assert_same(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    """Compare the parameters and the states of two models with their optimizers."""
    (net, optimizer), (one, other) = found, wanted
    for name, param in named(net).items():
        close(param, named(one)[name], name)
    logical = sharding.to_global(optimizer.transform, optimizer.transform_state)
    names, found = mfx.tree.names(logical), mfx.tree.leaves(logical)
    for name, leaf, like in zip(names, found, mfx.tree.leaves(other.transform_state), strict=True):
        if isinstance(leaf, FlatShard):
            close(leaf.data, like.reshape(-1)[leaf.start : leaf.stop], name)
        else:
            close(leaf, like, name)


@EVERY_KIND
@pytest.mark.parametrize("chain", ["by label", "outer"])
@on_ranks()
@quiet()
def test_given_gradients_give_the_same_bits(here: Here, kind: str, chain: str):
    """With groups that differ, a frozen and a tied parameter, and a gradient that is absent on one rank."""
    net, optimizer = optimized(kind, here, chain, donate_grads=True)
    one, other = optimized(None, here, chain)
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


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
@quiet()
def test_a_model_of_mixed_precision_has_the_steps_of_one_process(
    here: Here, reduce_dtype: torch.dtype
):
    """The forward pass is in bfloat16. Parameters and gradients of the optimizer are shards in float32."""
    net = made()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    for name in BLOCKS:
        fully_shard(getattr(net, name), mesh=here.mesh, mp_policy=policy)
    fully_shard(net, mesh=here.mesh, mp_policy=policy)
    optimizer = mfx.TransformOptimizer(named(net), chains(made())["by label"])
    one, other = optimized(None, here, groups="one")
    params, wanted = named(net), named(one)
    for step in range(3):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens).float(), targets).backward()
        for name, like in wanted.items():
            grad = params[name].grad
            like.grad = None if grad is None else whole(grad)
        optimizer.step()
        other.step()
        for name, param in params.items():
            assert param.dtype is torch.float32, name
            assert torch.equal(whole(param), wanted[name].detach()), (step, name)


@on_ranks(4)
def test_plain_tensors_and_dtensors_on_several_meshes_go_together(here: Here):
    """Plain tensors, DTensors on the grid and on one of its dims, one without elements on most ranks."""
    torch.manual_seed(3)
    spread: dict[str, Any] = {
        "plain": None,
        "rows": (here.grid, [Shard(0), Replicate()]),
        "both": (here.grid, [Shard(0), Shard(1)]),
        "tiny": (here.mesh, [Shard(0)]),
        "inner": (here.grid["inner"], [Shard(1)]),
    }
    wanted = {
        name: nn.Parameter(torch.randn(1, 5) if name == "tiny" else torch.randn(6, 5))
        for name in spread
    }
    params = {
        name: nn.Parameter(
            distribute_tensor(leaf.detach(), *spread[name], src_data_rank=None)
            if spread[name]
            else leaf
        )
        for name, leaf in copy.deepcopy(wanted).items()
    }
    tx = mfx.chain(mfx.momentum(), mfx.orthogonalize(**EXACT), mfx.scale(-0.1))
    optimizer, other = mfx.TransformOptimizer(params, tx), mfx.TransformOptimizer(wanted, tx)
    for step in range(2):
        set_gradients(params, wanted, step)
        optimizer.step()
        other.step()
    # One process multiplies the five as one batch, which may round otherwise.
    for name, param in params.items():
        close(param, wanted[name], name)


@EVERY_KIND
@on_ranks()
def test_a_group_added_later_keeps_the_state_of_others_though_owners_change(here: Here, kind: str):
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


@on_ranks(2)
@quiet()
def test_the_order_in_which_a_rank_gives_its_parameters_and_groups_does_not_matter(here: Here):
    net, _ = sharded("fsdp", here)
    params, order = list(named(net).items()), -1 if here.rank == 1 else 1
    optimizer = mfx.TransformOptimizer(
        groups_of(dict(params[::order]), "two")[::order], chains(made())["by label"]
    )
    train(net, optimizer, range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same((net, optimizer), alone(3))


@on_ranks(2)
@quiet()
def test_a_step_agrees_once_and_groups_add_no_exchange(here: Here):
    calls = []
    net, more = sharded("fsdp", here)
    for how in ("one", "two"):
        optimizer = mfx.TransformOptimizer(
            groups_of(named(net), how), chains(made())["outer"], **more
        )
        train(net, optimizer, range(1))
        with counting(here) as found:
            optimizer.step()
        calls.append(found.calls)
    assert calls[0] == calls[1]
    # one agreement, the norm of all gradients; the matrices of both labels there and back
    assert calls[0]["all_reduce"] == 2
    assert set(calls[0]) == {"all_reduce", "all_to_all_single"}


@on_ranks(2)
@quiet()
def test_where_nothing_is_sharded_no_rank_is_asked(here: Here):
    with counting(here) as found:
        net = made()
        optimizer = mfx.TransformOptimizer(net, chains(net)["outer"])
        train(net, optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
    assert found.calls == {}


# ------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("rate", "kind", "message"),
    [
        (-1.0, ValueError, "'lr' in a group must be at least 0"),
        (0.5, ShardingError, "learning_rate.*0.5 on rank 1"),
    ],
)
@on_ranks(2)
@quiet()
def test_a_wrong_or_another_rate_on_one_rank_is_raised_on_all_and_changes_nothing(
    here: Here, rate: float, kind: type[Exception], message: str
):
    """And a good step works afterwards."""
    net, optimizer = optimized("fsdp", here, groups="one")
    params, group = named(net), optimizer.param_groups[0]
    train(net, optimizer, range(1))
    set_gradients(params, named(made()), 0)
    before, good = {name: whole(param).clone() for name, param in params.items()}, group["lr"]
    if here.rank == 1:
        group["lr"] = rate
    with pytest.raises(kind if here.rank == 1 else ShardingError, match=message):
        optimizer.step()
    group["lr"] = good
    assert all(torch.equal(whole(param), before[name]) for name, param in params.items())
    optimizer.step()
    assert not torch.equal(whole(params["up.weight"]), before["up.weight"])


@pytest.mark.parametrize("kind", ["fsdp", "replicated"])
@on_ranks(2)
@quiet()
def test_a_closure_that_raises_on_one_rank_is_an_error_on_all_and_changes_nothing(
    here: Here, kind: str
):
    """The other ranks do not wait for the timeout of the group, and a good step works afterwards."""
    if kind == "fsdp":
        net, optimizer = optimized("fsdp", here, groups="one")
    else:
        net = made()
        layout = sharding.replicated(dict(net.named_parameters()), here.group)
        optimizer = mfx.TransformOptimizer(net, chains(net)["outer"], layout=layout)
    train(net, optimizer, range(1))
    params = named(net)
    set_gradients(params, named(made()), 0)
    before = {name: whole(param).clone() for name, param in params.items()}

    def closure() -> Tensor:
        if here.rank == 1:
            raise KeyError("a batch")
        return torch.zeros(())

    expected = (
        (KeyError, "a batch") if here.rank == 1 else (ShardingError, "rank 1: KeyError: 'a batch'")
    )
    with pytest.raises(expected[0], match=expected[1]):
        optimizer.step(closure)
    assert all(torch.equal(whole(param), before[name]) for name, param in params.items())
    optimizer.step()
    assert not torch.equal(whole(params["up.weight"]), before["up.weight"])


@on_ranks(3)
@quiet()
def test_a_parameter_of_another_dtype_on_one_rank_is_an_error_on_all_and_changes_nothing(
    here: Here,
):
    net = made()
    layout = sharding.replicated(dict(net.named_parameters()), here.group)
    optimizer = mfx.TransformOptimizer(net, chains(net)["outer"], layout=layout)
    train(net, optimizer, range(1))
    params = named(net)
    before = {name: param.detach().clone() for name, param in params.items()}
    if here.rank == 2:
        net.up.weight.data = net.up.weight.data.bfloat16()
    with pytest.raises(ShardingError) as caught:
        optimizer.step()
    assert "'up.weight' is torch.float32 on rank 0 and torch.bfloat16 on rank 2" in str(
        caught.value
    )
    if here.rank == 2:
        net.up.weight.data = before["up.weight"].clone()
    assert all(torch.equal(param, before[name]) for name, param in params.items())
    optimizer.step()


@on_ranks(2)
@quiet()
def test_a_state_dict_that_does_not_fit_on_one_rank_is_loaded_on_none(here: Here):
    _, optimizer = optimized("fsdp", here, groups="one")
    saved = optimizer.state_dict()
    if here.rank == 1:
        del saved["state"][0]
    with pytest.raises(ShardingError, match=r"'up\.weight' .*without saved state on rank 1"):
        optimizer.load_state_dict(saved)


@on_ranks(2)
@quiet()
def test_a_state_is_loaded_on_no_rank_if_one_cannot_read_its_model(here: Here):
    net, options = sharded("fsdp", here)
    optimizer = mfx.TransformOptimizer(net, mfx.scale_by_adam(), **options)
    saved = optimizer.state_dict()

    def unreadable(*_: object, **__: object) -> Iterator[Any]:
        raise RuntimeError("unreadable on rank 1")

    if here.rank == 1:
        net.named_parameters = unreadable
    with pytest.raises(RuntimeError, match="unreadable on rank 1"):
        optimizer.load_state_dict(saved)


@on_ranks(2)
@quiet()
def test_a_state_that_is_edited_wrongly_on_one_rank_is_an_error_of_the_step_on_all(here: Here):
    """The ranks call `zero_grad` without communication, so it raises on none of them."""
    net, optimizer = optimized("fsdp", here, groups="one")
    train(net, optimizer, range(1))
    params = named(net)
    before = {name: whole(param).clone() for name, param in params.items()}
    entries = optimizer.state[params["up.weight"]]
    key = next(iter(entries))
    if here.rank == 1:
        entries[key] = entries[key].double()
    optimizer.zero_grad()
    set_gradients(params, named(made()), 0)
    with pytest.raises(
        ValueError if here.rank == 1 else ShardingError,
        match=r"of 'up\.weight' is .*torch\.float64",
    ):
        optimizer.step()
    assert all(torch.equal(whole(param), before[name]) for name, param in params.items())


@on_ranks(2)
def test_groups_that_are_edited_wrongly_on_one_rank_are_an_error_of_the_first_step_on_all(
    here: Here,
):
    net, optimizer = optimized("fsdp", here, groups="one")
    params = named(net)
    set_gradients(params, named(made()), 0)
    if here.rank == 1:
        optimizer.param_groups[0]["params"].pop()
    with pytest.raises(
        ValueError if here.rank == 1 else ShardingError, match="parameters were removed, such as"
    ):
        optimizer.step()


@on_ranks(2)
def test_a_layout_for_dtensors_is_refused(here: Here):
    net, _ = sharded("fsdp", here)
    layout = sharding.replicated(dict(net.named_parameters()), here.group)
    with pytest.raises(TypeError, match="leave layout out"):
        mfx.TransformOptimizer(net, mfx.scale(-0.1), layout=layout)


@on_ranks(4)
def test_copies_on_different_meshes_that_differ_are_an_error(here: Here):
    """One name for two parameters: on each row of the grid another, on the row's own mesh."""
    own = distribute_tensor(
        torch.full((4, 3), float(here.rank // 2)),
        here.grid["inner"],
        [Shard(0)],
        src_data_rank=None,
    )
    both = distribute_tensor(torch.ones(4, 3), here.grid, [Shard(0), Shard(1)], src_data_rank=None)
    with pytest.raises(ShardingError, match="'own' has different meshes"):
        mfx.TransformOptimizer(
            {"own": nn.Parameter(own), "both": nn.Parameter(both)}, mfx.momentum()
        )


# ------------------------------------------------------------------------------------------------- saved and loaded


def local_leaves(optimizer: Any) -> list[Tensor]:
    leaves = [leaf for held in optimizer.state.values() for leaf in held.values()]
    return [
        leaf.shard.data
        if isinstance(leaf, FlatShardTensor)
        else getattr(leaf, "_local_tensor", leaf)
        for leaf in leaves
    ]


def alone(steps: int) -> tuple[Any, Any]:
    net, optimizer = optimized(None, None)
    train(net, optimizer, range(steps))
    return net, optimizer


def with_weights_of(net: Any, steps: int) -> None:
    """Give a model the weights that one process has after some steps."""
    values = {name: param.detach() for name, param in named(alone(steps)[0]).items()}
    for name, param in named(net).items():
        like, value = param.detach(), values[name]
        if isinstance(like, DTensor):
            value = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
        like.copy_(value)


def goes_on(net: Any, optimizer: Any) -> None:
    """Two more steps lead to where four in one process lead."""
    train(net, optimizer, range(2, 4))
    assert_same((net, optimizer), alone(4))


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
    """Load into a new model, continue, and compare with an uninterrupted run in one process."""
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


MOVES = [
    ("fsdp", "hsdp"),
    ("hsdp", "fsdp"),
    ("fsdp", "fsdp+tp"),
    ("fsdp+tp", "tp"),
    ("ddp", "hsdp"),
    ("tp", "ddp"),
]


@pytest.mark.parametrize(
    ("saver", "loader", "how"), [(*move, ("dcp", "ours")[i % 2]) for i, move in enumerate(MOVES)]
)
def test_what_one_mesh_saves_another_loads(
    world: World, tmp_path: Path, saver: str, loader: str, how: str
):
    world.check(SIZES[saver], save, kind=saver, path=tmp_path / "saved", how=how)
    world.check(SIZES[loader], load_and_go_on, kind=loader, path=tmp_path / "saved", how=how)


@quiet()
def save_full(here: Here, kind: str, path: Path) -> None:
    """The usual line for a full state dict; rank 0 has all, as one process has it, and writes it."""
    net, optimizer = optimized(kind, here)
    train(net, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_optimizer_state_dict(net, optimizer, options=options)
    if dist.get_rank() == 0:
        wanted = get_optimizer_state_dict(*alone(2))
        assert found["state"].keys() == wanted["state"].keys()
        for name, leaves in wanted["state"].items():
            assert leaves.keys() == found["state"][name].keys(), name
            for key, leaf in leaves.items():
                assert type(found["state"][name][key]) is torch.Tensor
                close(found["state"][name][key], leaf, f"{name} {key}")
        torch.save(found, path)


@quiet()
def load_full(here: Here, kind: str, path: Path, how: str) -> None:
    """Load it on all ranks: each reads it, with torch's function or with our method, or rank 0 reads and sends it."""
    net, optimizer = optimized(kind, here)
    with_weights_of(net, 2)
    saved = (
        torch.load(path, weights_only=True) if how != "broadcast" or dist.get_rank() == 0 else {}
    )
    if how == "by our method":
        optimizer.load_state_dict(saved)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=how == "broadcast")
        set_optimizer_state_dict(net, optimizer, saved, options=options)
    goes_on(net, optimizer)


@pytest.mark.parametrize(
    ("saver", "loader", "how"),
    [
        ("fsdp", "hsdp", "broadcast"),
        ("hsdp", "tp", "each reads"),
        ("fsdp+tp", "fsdp", "broadcast"),
        ("tp", "fsdp+tp", "each reads"),
        ("ddp", "hsdp", "broadcast"),
    ],
)
def test_a_full_state_dict_is_complete_and_loads_on_another_mesh(
    world: World, pair: World, tmp_path: Path, saver: str, loader: str, how: str
):
    """Muon, row moments at owners, a stack of experts and AdamW, on two and on four ranks."""
    for kind, what, more in ((saver, save_full, {}), (loader, load_full, {"how": how})):
        processes = pair if SIZES[kind] == 2 else world
        processes.check(SIZES[kind], what, kind=kind, path=tmp_path / "saved", **more)


@quiet()
def rank_0_saves(here: Here, path: Path) -> None:
    """Under data parallelism one rank alone reads the state, and no other rank waits for it."""
    net, optimizer = optimized("ddp", here)
    train(net, optimizer, range(2))
    if here.rank == here.size - 1:
        found = optimizer.state_dict()
        assert {type(leaf) for leaves in found["state"].values() for leaf in leaves.values()} == {
            torch.Tensor
        }
        torch.save(found, path)
    train(net, optimizer, range(2, 3))
    dist.barrier(here.group)


def test_under_ddp_any_rank_alone_has_a_complete_state(world: World, tmp_path: Path):
    world.check(2, rank_0_saves, path=tmp_path / "saved")
    # A whole tensor is good for any layout.
    for size, kind in ((2, "ddp"), (4, "ddp"), (2, "fsdp")):
        world.check(size, load_full, kind=kind, path=tmp_path / "saved", how="by our method")


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
    # Torch 2.10 does not trust its own class.
    with torch.serialization.safe_globals([_StridedShard]):
        optimizer.load_state_dict(torch.load(f"{path}.{here.rank}", weights_only=True))
    assert [leaf.data_ptr() for leaf in local_leaves(optimizer)] == [
        leaf.data_ptr() for leaf in leaves
    ]
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


@EVERY_KIND
def test_every_rank_can_load_the_file_that_it_wrote(
    world: World, tmp_path: Path, kind: str, size: int
):
    world.check(size, each_saves, kind=kind, path=tmp_path / "saved")


def test_what_another_rank_had_of_a_sharded_state_is_refused_by_name(world: World, tmp_path: Path):
    world.check(2, each_saves, kind="fsdp", path=tmp_path / "saved")
    first, second = errors_of(
        world.run(2, load_of_rank, kind="fsdp", path=tmp_path / "saved", ranks=[0, 0])
    )
    assert isinstance(second, ValueError)
    assert isinstance(first, ShardingError)
    for error in (first, second):
        assert (
            "'back.weight': 'muon.momentum.trace' is the shard of the rank at position (0,)"
            in str(error)
        )
        assert "expected position (1,)" in str(error)


def test_replicas_may_load_one_anothers_file(world: World, tmp_path: Path):
    """Under HSDP ranks 0 and 2, and 1 and 3, hold the same."""
    world.check(4, each_saves, kind="hsdp", path=tmp_path / "saved")
    world.check(4, load_of_rank, kind="hsdp", path=tmp_path / "saved", ranks=[2, 1, 0, 1])
    for error in errors_of(
        world.run(4, load_of_rank, kind="hsdp", path=tmp_path / "saved", ranks=[1, 0, 3, 2])
    ):
        assert "is the shard of the rank at position" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["load", "load what does not fit", "save"])
@on_ranks(2)
@quiet()
def test_a_rank_that_comes_alone_is_told_and_disturbs_nobody(here: Here, what: str):
    """One rank alone calls what all must; the others go on with collectives of their own. Afterwards all can do it."""
    net, optimizer = optimized("fsdp", here)
    train(net, optimizer, range(1))
    saved = optimizer.state_dict()
    kept = waiting._timeout, waiting.PATIENCE
    waiting._timeout, waiting.PATIENCE = (
        (lambda group: timedelta(seconds=1.5)),
        timedelta(seconds=0.2),
    )
    try:
        if here.rank == 0:
            called = "state_dict()" if what == "save" else "load_state_dict()"
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                given = saved if what == "load" else {**saved, "state": {}}
                with pytest.raises(ShardingError) as error:
                    _ = (
                        optimizer.state_dict()
                        if what == "save"
                        else optimizer.load_state_dict(given)
                    )
            assert f"all ranks must call {called} together, but rank 1 did not" in str(error.value)
            files = [
                one.filename for one in caught if f"{called} waits for rank 1" in str(one.message)
            ]
            assert files == [__file__], files
    finally:
        waiting._timeout, waiting.PATIENCE = kept
    dist.all_reduce(torch.ones(3), group=here.group)
    train(net, optimizer, range(1, 2))
    optimizer.load_state_dict(optimizer.state_dict())
    gc.collect()


@pytest.mark.parametrize(
    ("size", "kind", "is_alone"),
    [(2, "ddp", True), (2, "ddp", False), (4, "hsdp", False), (2, "fsdp", False)],
)
@on_ranks()
@quiet()
def test_ranks_with_states_of_different_moments_are_told_at_the_next_step(
    here: Here, kind: str, is_alone: bool
):
    """Rank 1 loads an older state than the others load; under DDP it may load alone."""
    net, optimizer = optimized(kind, here)
    found = []
    for step in range(2):
        train(net, optimizer, range(step, step + 1))
        found.append(copy.deepcopy(optimizer.state_dict()))
    if here.rank == 1 or not is_alone:
        optimizer.load_state_dict(found[0 if here.rank == 1 else 1])
    if here.rank == 1 and is_alone:
        for index, leaves in optimizer.state_dict()["state"].items():
            assert all(
                torch.equal(leaf, found[0]["state"][index][key]) for key, leaf in leaves.items()
            )
    before = {name: whole(param).clone() for name, param in named(net).items()}
    problem = (
        "rank 1: loaded since the last step"
        if is_alone
        else r"count' is 2 of torch\.int64 on rank 0 and 1 of"
    )
    with pytest.raises(ShardingError, match=problem):
        optimizer.step()
    assert all(torch.equal(whole(param), before[name]) for name, param in named(net).items())


@on_ranks(2)
def test_a_step_without_a_gradient_on_any_rank_warns_once(here: Here):
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=here.mesh)
    optimizer = mfx.Muon(model, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(lambda: model(torch.ones(2, 4)).sum().backward())
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        if here.rank == 1:  # another rank has gradients
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # rank 1 has none, rank 0 has zeros
    optimizer.zero_grad()
    before = model.weight.full_tensor()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    expected = r"found no gradient on any of 2 parameters on any rank and changes .*set_requires_gradient_sync\(False\)"
    with pytest.warns(UserWarning, match=expected):
        optimizer.step()
    optimizer.step()  # it is said once
    assert torch.equal(model.weight.full_tensor(), before)
