"""A whole optimizer in one call: state, groups, schedules' positions and torch's scheduler, in one checkpoint."""

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

import muonfx as mfx
from muonfx import tree
from tests.checkpoint.common import bits
from tests.processes import Here, World

ck = mfx.checkpoint
# `muonfx.checkpoint.load` is the function
load_module = importlib.import_module("muonfx.checkpoint.load")

SCHEDULERS: dict[str, Any] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
}


def model_of(here: Here | None = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7))
    if here is not None:
        shard(model, here)
    return model


def shard(model: nn.Module, here: Here) -> None:
    fully_shard(model[1], mesh=here.mesh)
    fully_shard(model, mesh=here.mesh)


def muon(model: nn.Module, rate: Any = 0.02) -> mfx.Muon:
    return mfx.Muon(model, lr=rate, weight_decay=0.1)


def train(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        torch.manual_seed(1000 + step)
        loss = model(torch.randint(7, (8,))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()


def whole(model: nn.Module, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """All that a run consists of, as values that can be compared."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state = {name: bits(param) for name, param in model.named_parameters()}
    entries = {
        (name, key): bits(value)
        for name, param in model.named_parameters()
        for key, value in optimizer.state[param].items()
    }
    kept = (
        {}
        if scheduler is None
        else {k: v for k, v in scheduler.state_dict().items() if k != "_schedulers"}
    )
    return {"params": state, "state": entries, "groups": groups, "scheduler": repr(kept)}


def save_run(here: Here | None, path: Path, kind: str | None = None) -> dict[str, Any]:
    """Train three steps and save, and return what two more steps give."""
    model = model_of(here)
    optimizer = muon(model)
    scheduler = None if kind is None else SCHEDULERS[kind](optimizer)
    optimizer.param_groups[0]["weight_decay"] = 0.3
    train(model, optimizer, scheduler, range(3))
    ck.save(path, optimizer, params=dict(model.named_parameters()), scheduler=scheduler, step=3)
    train(model, optimizer, scheduler, range(3, 5))
    return whole(model, optimizer, scheduler)


def resume_run(
    here: Here | None, path: Path, kind: str | None = None, shard_late: bool = False
) -> dict[str, Any]:
    """Load a run into a new model, which is sharded before or, with ``shard_late``, after the optimizer is made."""
    model = model_of(None if shard_late else here, seed=1)
    optimizer = muon(model)
    scheduler = None if kind is None else SCHEDULERS[kind](optimizer)
    if shard_late:
        shard(model, here)
    params = dict(model.named_parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = ck.load(path, optimizer, params=params, scheduler=scheduler)
    messages = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert not messages  # the saved run has changed a number, and the code is the same
    assert mfx.tree.leaves(state)[0] is not None
    train(model, optimizer, scheduler, range(3, 5))
    return whole(model, optimizer, scheduler)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_run_with_any_scheduler_goes_on_bitwise(tmp_path: Path, kind: str):
    assert resume_run(None, save_run(None, tmp_path, kind) and tmp_path, kind) == save_run(
        None, tmp_path, kind
    )


@pytest.mark.dist
@pytest.mark.parametrize("savers", [1, 2, 3])
def test_a_sharded_optimizer_loads_on_any_number_of_ranks(
    world: World, tmp_path: Path, savers: int
):
    saved = world.check(savers, save_run, path=tmp_path, kind="cosine")
    for loaders in {1, 2, 3}:
        for loaded in world.check(loaders, resume_run, path=tmp_path, kind="cosine"):
            assert (loaded["groups"], loaded["scheduler"]) == (
                saved[0]["groups"],
                saved[0]["scheduler"],
            )
            if loaders == savers:
                assert loaded == saved[0]
    resume_run(None, tmp_path, "cosine")  # in one process


@pytest.mark.dist
def test_a_model_may_be_sharded_between_the_optimizer_and_the_load(world: World, tmp_path: Path):
    saved = world.check(2, save_run, path=tmp_path, kind="cosine")
    assert world.check(2, resume_run, path=tmp_path, kind="cosine", shard_late=True) == saved


class WithBuffers(nn.Module):
    """A batch norm, whose buffers are floats and a count, a mask, and a head that is tied to a layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.down = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.down.weight
        self.register_buffer("mask", torch.arange(6) % (seed + 2) > 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mask * self.down(self.norm(self.up(x))))


def save_and_load_buffers(here: Here | None, path: Path) -> None:
    models = WithBuffers(0), WithBuffers(1)
    if here is not None:
        for model in models:
            fully_shard(model, mesh=here.mesh)
    model, new_model = models
    optimizer = muon(model)
    torch.manual_seed(0 if here is None else here.rank)
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    if here is not None and here.size > 1:
        with pytest.raises(
            ck.CheckpointError, match=r"'params/norm\.running_mean' has other values on rank 1"
        ):
            ck.save(path, optimizer, params=model.state_dict())
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, group=here.group, group_src=0)
    ck.save(path, optimizer, params=model.state_dict())
    ck.load(path, muon(new_model), params=new_model.state_dict())
    saved = {name: bits(value) for name, value in model.state_dict().items()}
    assert {name: bits(value) for name, value in new_model.state_dict().items()} == saved
    assert new_model.norm.num_batches_tracked.item() == 1
    assert new_model.head.weight is new_model.down.weight


def test_a_state_dict_of_the_model_has_its_buffers_and_tied_weights(tmp_path: Path):
    save_and_load_buffers(None, tmp_path)


@pytest.mark.dist
def test_a_state_dict_of_a_sharded_model_has_its_buffers(world: World, tmp_path: Path):
    world.check(2, save_and_load_buffers, path=tmp_path)


def load_whole_tensors(here: Here) -> None:
    optimizer = muon(model_of(here))
    before = [bits(leaf) for leaf in mfx.tree.tensors(optimizer.transform_state)]
    whole_state = mfx.tree.map(
        lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf,
        optimizer.transform_state,
    )
    with pytest.raises(ValueError, match=r"is a plain tensor, expected a DTensor"):
        optimizer.load_transform_state(whole_state)
    assert [bits(leaf) for leaf in mfx.tree.tensors(optimizer.transform_state)] == before


@pytest.mark.dist
def test_whole_tensors_are_no_state_of_sharded_parameters(world: World):
    world.check(2, load_whole_tensors)


def replicated_states(here: Here, path: Path) -> list[bytes]:
    """Save state that only the owners of matrices have, and return what `state_dict` shows after a load."""
    kinds = mfx.chain(
        mfx.momentum(0.9), mfx.orthogonalize(), mfx.normalize_neurons(), mfx.scale(-0.1)
    )
    results: list[Any] = []
    for seed in (0, 1):
        model = nn.Linear(6, 5, bias=False)
        torch.manual_seed(seed)
        nn.init.normal_(model.weight)
        optimizer = mfx.TransformOptimizer(
            model, kinds, layout=lambda named: mfx.sharding.replicated(named, group=here.group)
        )
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        if seed == 0:
            ck.save(path, optimizer)
        else:
            ck.load(path, optimizer)
        results.append([bits(value) for value in optimizer.state_dict()["state"][0].values()])
    assert results[0] == results[1]
    return results[0]


@pytest.mark.dist
def test_the_state_of_owners_is_shown_after_a_load(world: World, tmp_path: Path):
    first, second = world.check(2, replicated_states, path=tmp_path)
    assert first == second


def load_under_zero(here: Here, path: Path, partition: Any) -> None:
    """Save and load state that only the owners of matrices have: it is None on the other ranks."""
    whole = {"a": torch.ones(4, 3), "b": torch.ones(3, 4)}
    layout = mfx.sharding.zero(whole, here.group, partition=partition)
    kinds = mfx.chain(
        mfx.momentum(0.9), mfx.orthogonalize(), mfx.normalize_neurons(), mfx.scale(-0.1)
    )
    states: list[list[Any]] = []
    for run in range(2):
        params = {name: nn.Parameter(shard.clone()) for name, shard in layout.shard(whole).items()}
        optimizer = mfx.TransformOptimizer(params, kinds, layout=layout)
        if run == 0:
            for param in params.values():
                param.grad = torch.ones_like(param)
            optimizer.step()
            ck.save(path, optimizer)
        else:
            ck.load(path, optimizer)
        leaves = mfx.tree.leaves(optimizer.transform_state)
        assert None in leaves
        states.append([bits(leaf) for leaf in leaves if leaf is not None])
    assert states[0] == states[1]


@pytest.mark.parametrize("partition", ["whole", "flat", "each"])
@pytest.mark.dist
def test_the_state_of_owners_is_loaded_under_zero(world: World, tmp_path: Path, partition: str):
    world.check(2, load_under_zero, path=tmp_path, partition=partition)


def start_of_a_resumed_run(here: Here, path: Path) -> list[float]:
    """Resume a run whose saved "start", the first weights, has the values with which the new optimizer begins."""
    runs = []
    for _ in range(2):
        model = nn.Linear(1, 4, bias=False)
        nn.init.ones_(model.weight)
        fully_shard(model, mesh=here.mesh)
        tx = mfx.chain(mfx.contrib.scale_by_prodigy(estim_lr0=0.1), mfx.scale_by_learning_rate(1.0))
        runs.append((model, mfx.TransformOptimizer(model, tx)))
    for number, (model, optimizer) in enumerate(runs):
        weights = dict(model.named_parameters())
        if number == 1:
            ck.load(path, optimizer, params=weights)
            assert model.weight.full_tensor()[0] != 1.0
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        if number == 0:
            ck.save(path, optimizer, params=weights)
    start = optimizer.state[model.weight]["scale_by_prodigy.start"]
    return start.full_tensor().flatten().tolist()


@pytest.mark.dist
def test_loaded_state_of_dtensors_is_kept_if_it_equals_the_initial_state(
    world: World, tmp_path: Path
):
    for start in world.check(2, start_of_a_resumed_run, path=tmp_path):
        assert start == [1.0] * 4


def test_weights_are_loaded_also_under_activation_checkpointing(tmp_path: Path):
    models = [model_of(seed=seed) for seed in (0, 1)]
    for model in models:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    optimizers = [muon(model) for model in models]
    train(models[0], optimizers[0], None, range(2))
    ck.save(tmp_path, optimizers[0], params=dict(models[0].named_parameters()))
    ck.load(tmp_path, optimizers[1], params=dict(models[1].named_parameters()))
    assert whole(models[1], optimizers[1], None) == whole(models[0], optimizers[0], None)


def test_weights_that_do_not_fit_leave_the_optimizer_as_it_was(tmp_path: Path):
    model = model_of()
    optimizer = muon(model)
    ck.save(tmp_path / "state", optimizer)
    train(model, optimizer, None, range(2))
    ck.save(tmp_path / "part", optimizer, params={"0.weight": model[0].weight})
    before = whole(model, optimizer, None)
    for name in ("state", "part"):
        with pytest.raises(ck.MismatchError, match=r"params/"):
            ck.load(tmp_path / name, optimizer, params=dict(model.named_parameters()))
        assert whole(model, optimizer, None) == before


def test_a_weight_of_the_checkpoint_is_left_out_on_request(tmp_path: Path):
    model = model_of()
    optimizer = muon(model)
    params = dict(model.named_parameters())
    ck.save(tmp_path, optimizer, params=params)
    saved = {name: param.detach().clone() for name, param in params.items()}
    others = {name: param for name, param in params.items() if name != "0.weight"}
    for allowed in (["params/0.weight"], "params", True):
        with torch.no_grad():
            for param in params.values():
                param.zero_()
        ck.load(tmp_path, optimizer, params=others, allow_extra=allowed)
        assert not params["0.weight"].any()
        assert all(torch.equal(param, saved[name]) for name, param in others.items())
    new = {**params, "new": torch.nn.Parameter(torch.zeros(2))}
    with pytest.raises(
        ck.MismatchError,
        match=r"'params/new'[\s\S]*without params=, [\s\S]*load_params\(path, params, ",
    ):
        ck.load(tmp_path, optimizer, params=new)


def test_state_and_weights_of_two_saves_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = model_of()
    optimizer = muon(model)
    params = dict(model.named_parameters())
    ck.save(tmp_path, optimizer, params=params)
    read_params = load_module._params_of_save

    def replace_and_read(*args: Any) -> Any:
        ck.save(tmp_path, optimizer, params=params)
        return read_params(*args)

    monkeypatch.setattr(load_module, "_params_of_save", replace_and_read)
    with pytest.raises(
        ck.CheckpointError, match="was replaced while it was read, and nothing was loaded"
    ):
        ck.load(tmp_path, optimizer, params=params)


def test_nothing_is_restored_by_half(tmp_path: Path):
    model = model_of()
    optimizer = muon(model)
    scheduler = SCHEDULERS["step"](optimizer)
    ck.save(tmp_path / "all", optimizer, scheduler=scheduler)
    ck.save(tmp_path / "groups", optimizer)
    ck.save(tmp_path / "state", optimizer.transform_state, tx=optimizer.transform)
    for name, arguments, words in (
        ("all", {}, "scheduler= is not given"),
        (
            "groups",
            {"scheduler": scheduler},
            r"'scheduler' is not in the checkpoint[\s\S]*with scheduler= if it has one",
        ),
        (
            "state",
            {},
            r"'param_groups' is not in the checkpoint[\s\S]*the optimizer itself, not its transform_state",
        ),
        ("all", {"scheduler": SCHEDULERS["cosine"](optimizer)}, "expected a StepLR"),
    ):
        before = whole(model, optimizer, scheduler)
        with pytest.raises(ck.MismatchError, match=words):
            ck.load(tmp_path / name, optimizer, **arguments)
        assert whole(model, optimizer, scheduler) == before
    ck.load(tmp_path / "all", optimizer, allow_extra=["scheduler"])
    ck.load(tmp_path / "groups", optimizer, scheduler=scheduler, allow_missing=["scheduler"])
    ck.load(tmp_path / "state", optimizer, allow_missing="param_groups")
    # The tensors only, as a tree.
    ck.load(tmp_path / "all", optimizer.transform_state, tx=optimizer.transform)


def test_other_groups_are_an_error_that_says_how_to_keep_the_new_ones(tmp_path: Path):
    model = model_of()
    old = mfx.TransformOptimizer(
        model, mfx.chain(mfx.momentum(0.9), mfx.scale_by_learning_rate(0.1))
    )
    pairs = list(model.named_parameters())
    new = mfx.TransformOptimizer(
        [{"params": pairs[:2], "lr": 0.3}, {"params": pairs[2:]}],
        mfx.chain(mfx.momentum(0.9), mfx.scale_by_learning_rate(0.1)),
        model=model,
    )
    ck.save(tmp_path, old)
    with pytest.raises(ck.MismatchError, match=r"allow_extra=\['param_groups'\]"):
        ck.load(tmp_path, new)
    ck.load(tmp_path, new, allow_extra=["param_groups"])
    assert [group["lr"] for group in new.param_groups] == [0.3, 0.1]


def test_a_schedule_goes_on_and_its_kind_comes_from_the_code(tmp_path: Path):
    rates = [mfx.cosine_decay_schedule(0.1, 10), mfx.cosine_decay_schedule(0.1, 20)]
    for rate in rates:
        model = model_of()
        optimizer = mfx.TransformOptimizer(
            model, mfx.chain(mfx.momentum(0.9), mfx.scale_by_learning_rate(rate))
        )
        if rate is rates[0]:
            train(model, optimizer, None, range(3))
            ck.save(tmp_path, optimizer)
        else:
            with pytest.warns(UserWarning, match="the code's is used"):
                ck.load(tmp_path, optimizer, allow_other_chain=True)
    counts = [
        leaf for leaf in mfx.tree.leaves(optimizer.transform_state) if leaf.dtype == torch.int64
    ]
    assert counts
    assert all(count == 3 for count in counts)


def test_a_save_in_the_background_has_the_groups_of_the_call(tmp_path: Path):
    optimizer = muon(model_of(), torch.tensor(0.02))
    saving = ck.save_async(tmp_path, optimizer)
    with torch.no_grad():
        optimizer.param_groups[0]["lr"].fill_(9.0)
    assert ck.inspect(saving.wait()).objects["param_groups"][0]["lr"] == torch.tensor(0.02)
    with pytest.warns(UserWarning, match="in the file"):
        ck.load(tmp_path, optimizer)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.02)


def test_arguments_that_do_not_go_together(tmp_path: Path):
    model = model_of()
    optimizer = muon(model)
    scheduler = SCHEDULERS["step"](optimizer)
    for call in (
        lambda: ck.save(tmp_path, optimizer, tx=optimizer.transform),
        lambda: ck.save(tmp_path, optimizer.transform_state, scheduler=scheduler),
        lambda: ck.save(tmp_path, torch.optim.AdamW(model.parameters())),
        lambda: ck.load(tmp_path, optimizer, tx=optimizer.transform),
        lambda: ck.load(tmp_path, optimizer, device="cpu"),
        lambda: ck.load(tmp_path, optimizer.transform_state, scheduler=scheduler),
        lambda: ck.load(tmp_path, optimizer.transform_state, params=dict(model.named_parameters())),
    ):
        with pytest.raises(TypeError):
            call()
    optimizer.param_groups[0]["own"] = object()
    with pytest.raises(TypeError, match="param_groups/0/own"):
        ck.save(tmp_path, optimizer)
    with pytest.raises(ValueError, match="shape"):
        optimizer.load_transform_state(
            mfx.tree.map(lambda leaf: leaf[None], optimizer.transform_state)
        )


class Layers(nn.Module):
    """Two layers, of which the first has a name of its own."""

    def __init__(self, first: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.add_module(first, nn.Linear(6, 5))
        self.add_module("out", nn.Linear(5, 7))
        self.out.bias.requires_grad_(requires_grad=False)


@pytest.mark.parametrize("of", ["optimizer", "state"])
def test_renaming_is_enough_for_a_chain_whose_labels_have_the_old_names(of: str, tmp_path: Path):
    before = muon(Layers("body"))
    for leaf in tree.leaves(before.transform_state):
        leaf.fill_(3)
    model = Layers("trunk")
    after = muon(model)
    rename = {"*/body.*": "*/trunk.*"}
    if of == "optimizer":
        path = ck.save(tmp_path, before)
        with pytest.raises(ck.MismatchError, match=r"\['trunk.weight'\]"):
            ck.load(path, after)
        with warnings.catch_warnings(action="error"):
            loaded = ck.load(path, after, rename=rename)
    else:
        path = ck.save(tmp_path, before.transform_state, tx=before.transform)
        loaded = ck.load(path, after.transform_state, tx=after.transform, rename=rename)
    assert all((leaf == 3).all() for leaf in tree.leaves(loaded))
    # All other differences are still an error.
    other = mfx.Muon(model, lr=0.02, weight_decay=0.1, lr_scaling="spectral")
    with pytest.raises(ck.MismatchError, match=r"chain: .*'spectral' here"):
        ck.load(path, other.transform_state, tx=other.transform, rename=rename)


PATTERN_OF = {"*.q": "(q=3 + k=3) in -> q in, k in", "*": "(q=2 + k=4) in -> q in, k in"}


def _split(*globs: str) -> mfx.Transform:
    """A chain that divides fused matrices by the pattern of the first glob that matches their name."""
    view = mfx.MatrixView({glob: PATTERN_OF[glob] for glob in globs})
    return mfx.partition({"a": mfx.orthogonalize(view=view)}, {"x": "a"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_split("*.q", "*"), _split("*", "*.q")),
        (mfx.masked(mfx.scale(1.0), {"x": True}), mfx.masked(mfx.scale(1.0), {"y": False})),
    ],
    ids=["another order of patterns", "another value"],
)
def test_renaming_excuses_no_other_difference_of_chains(
    before: mfx.Transform, after: mfx.Transform, tmp_path: Path
):
    state = {"m": {"x": torch.ones(6, 4)}}
    path = ck.save(tmp_path, state, tx=before)
    with pytest.raises(ck.MismatchError, match="chain"):
        ck.load(path, {"m": {"y": torch.ones(6, 4)}}, tx=after, rename={"*/x": "*/y"})
