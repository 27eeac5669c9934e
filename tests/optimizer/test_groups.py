"""Groups that schedulers, loggers and engines read: their order and torch's keys."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import muonfx as mfx
from tests.optimizer.test_adapter import assert_equal, make_model, net, params_of, set_grads

SHAPES = {"a.bias": (3,), "b.weight": (3, 4), "c.weight": (4, 3), "d.bias": (4,), "e.frozen": (2, 2), "f.scaled": (5,)}
LABELS = {"a": "adamw", "b": "muon", "c": "muon", "d": "adamw", "e": "frozen", "f": "sign"}


def mixed(frozen: mfx.Transform | None) -> mfx.Transform:
    """A partition whose labels are in another order than its groups are to be."""
    parts = {"adamw": mfx.adamw(1e-3), "muon": mfx.muon(0.02), "sign": mfx.scale(-0.1)}
    labels = {name: LABELS[name[0]] for name in SHAPES}
    if frozen is None:
        return mfx.partition(parts, labels | {"e.frozen": None})
    return mfx.partition(parts | {"frozen": frozen}, labels)


@pytest.mark.parametrize("frozen", [mfx.set_to_zero(), None], ids=["set_to_zero", "left out"])
@given(names=st.permutations(list(SHAPES)))
def test_the_order_of_groups_is_not_that_of_parameters(frozen: mfx.Transform | None, names: list[str]):
    params = {name: nn.Parameter(torch.zeros(SHAPES[name])) for name in names}
    groups = mfx.TransformOptimizer(params, mixed(frozen)).param_groups
    assert [group["label"] for group in groups] == ["muon", "adamw", "sign", None if frozen is None else "frozen"]
    assert groups[0]["lr"] == 0.02


def test_the_callers_groups_keep_their_order_and_are_split_in_the_fixed_one():
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    given = [{"params": [(n, params[n]) for n in names]} for names in (["f.scaled"], ["a.bias", "b.weight"])]
    optimizer = mfx.TransformOptimizer([*given, {"params": [("c.weight", params["c.weight"])]}], mixed(None))
    assert [group["label"] for group in optimizer.param_groups] == ["sign", "muon", "adamw", "muon"]


def test_groups_have_torchs_keys_once_each():
    muon, adamw = mfx.Muon(make_model(), lr=0.02, momentum=0.9, betas=(0.8, 0.99), weight_decay=0.3).param_groups
    common = {"params", "param_names", "label", "lr", "weight_decay", "momentum"}
    assert muon.keys() == common
    assert adamw.keys() == common | {"betas", "eps", "scale_by_adam.eps_root"}
    assert (muon["lr"], muon["momentum"], muon["weight_decay"]) == (0.02, 0.9, 0.3)
    assert (adamw["betas"], adamw["momentum"], adamw["eps"]) == ((0.8, 0.99), 0.8, 1e-8)


def test_a_name_that_two_transforms_claim_is_left_to_neither():
    (group,) = mfx.TransformOptimizer(
        make_model(), mfx.chain(mfx.momentum(0.5), ("again", mfx.momentum(0.9)), DOWN)
    ).param_groups
    assert (group["momentum.decay"], group["again.decay"]) == (0.5, 0.9)
    assert "momentum" not in group


@pytest.mark.parametrize(
    ("place", "changes", "arguments"),
    [
        (0, {"momentum": 0.5}, {"momentum": 0.5}),
        (1, {"betas": (0.5, 0.6)}, {"betas": (0.5, 0.6)}),
        (1, {"momentum": 0.5}, {"betas": (0.5, 0.95)}),
        (1, {"betas": (0.9, 0.6)}, {"betas": (0.9, 0.6)}),
        (1, {"betas": (0.5, 0.95), "momentum": 0.5}, {"betas": (0.5, 0.95)}),
    ],
)
def test_what_is_written_into_a_group_counts_at_the_next_step(place: int, changes: dict, arguments: dict):
    model, twin = make_model(), make_model()
    optimizer, wanted = mfx.Muon(model), mfx.Muon(twin, **arguments)
    optimizer.param_groups[place].update(changes)
    for step in range(2):
        for m, o in ((model, optimizer), (twin, wanted)):
            set_grads(m, step)
            o.step()
    assert_equal(params_of(model), params_of(twin))
    for ours, theirs in zip(optimizer.param_groups, wanted.param_groups, strict=True):
        assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}


@pytest.mark.parametrize("make", [mfx.Muon, lambda m: mfx.TransformOptimizer(m, mfx.lion(1e-3)), torch.optim.SGD])
def test_one_cycle_drives_the_momentum_of_every_group(make):
    model = make_model()
    optimizer = make(model) if make is not torch.optim.SGD else make(model.parameters(), momentum=0.9)
    max_lr = [0.1, 0.01][: len(optimizer.param_groups)]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr, total_steps=10, cycle_momentum=True)
    seen = []
    for step in range(5):
        set_grads(model, step)
        optimizer.step()
        for group in optimizer.param_groups:
            assert group.get("betas", (group["momentum"],))[0] == group["momentum"]
        seen.append(optimizer.param_groups[-1]["momentum"])
        scheduler.step()
    assert seen == pytest.approx([0.95, 0.9, 0.85, 0.8549516, 0.869098], abs=1e-3)


def test_the_numbers_of_one_cycle_arrive():
    model, twin = make_model(), make_model()
    driven, written = mfx.Muon(model), mfx.Muon(twin)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(driven, [0.1, 0.01], total_steps=10)
    for step in range(4):
        muon, adamw = written.param_groups
        muon["lr"], adamw["lr"] = (group["lr"] for group in driven.param_groups)
        muon["momentum"] = driven.param_groups[0]["momentum"]
        adamw["betas"] = (muon["momentum"], 0.95)
        for m, o in ((model, driven), (twin, written)):
            set_grads(m, step)
            o.step()
        scheduler.step()
    assert_equal(params_of(model), params_of(twin))


@given(rates=st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.2]), st.sampled_from([0.0, 0.1])), min_size=2, max_size=4))
def test_groups_may_agree_about_a_number_and_disagree_in_turn(rates: list[tuple[float, float]]):
    """As schedules do that end at the same rate. Compared with groups that always disagree: with one more of them."""
    optimizers = []
    for has_third in (False, True):
        params = {name: nn.Parameter(torch.ones(3)) for name in "abc"}
        groups = [{"params": {name: params[name]}, "lr": 0.1} for name in ("abc" if has_third else "ab")]
        optimizers.append((params, mfx.TransformOptimizer(groups, mfx.lion(0.1))))
    for step, pair in enumerate(rates):
        for params, optimizer in optimizers:
            for group, rate in zip(optimizer.param_groups, (*pair, 0.7), strict=False):
                group["lr"] = rate
            for param in params.values():
                param.grad = torch.arange(3.0) - step
            optimizer.step()
    for name in "ab":
        assert torch.equal(optimizers[0][0][name], optimizers[1][0][name])


def test_groups_saved_in_another_order_keep_their_numbers_with_a_warning_if_a_scheduler_was_used():
    model = make_model()
    groups = [{"params": {name: param}, "lr": 0.1 + at} for at, (name, param) in enumerate(model.named_parameters())]
    tx = mfx.adamw(0.1)
    optimizer, other = mfx.TransformOptimizer(groups, tx), mfx.TransformOptimizer(groups[::-1], tx)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.warns(UserWarning, match="the saved state of a scheduler has lists in that order"):
        other.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups][::-1]


# ------------------------------------------------------------------------------------------------- what is a route


def test_a_partition_within_a_transform_that_runs_as_a_whole_splits_groups_too():
    inner = mfx.partition(
        {"one": mfx.scale_by_adam(), "two": mfx.momentum()}, lambda p: {n: "two" if p[n].ndim > 1 else "one" for n in p}
    )
    optimizer = mfx.TransformOptimizer(make_model(), mfx.chain(mfx.cautious(inner), mfx.scale_by_learning_rate(0.1)))
    assert [(group["label"], group["cautious.min_share"]) for group in optimizer.param_groups] == [
        ("two", 1e-3),
        ("one", 1e-3),
    ]


def test_a_route_of_a_users_own_makes_groups_as_a_partition_does():
    @mfx.transform(locality=mfx.Locality.ELEMENT, combinator=mfx.core.Combinator(mfx.Locality.ELEMENT))
    def by_size(transforms: dict[str, mfx.Transform]):
        def chosen(values):
            return {
                k: {n: v for n, v in values.items() if v is None or (v.ndim > 1) == (k == "large")} for k in transforms
            }

        def init(params):
            return {k: transforms[k].init(own) for k, own in chosen(params).items()}

        def update(updates, state, params):
            done = {k: transforms[k].update(u, state[k]) for k, u in chosen(updates).items()}
            return {n: u for out, _ in done.values() for n, u in out.items()}, {k: s for k, (_, s) in done.items()}

        return init, update

    tx = by_size({"large": mfx.chain(mfx.momentum(), mfx.scale(-0.1)), "small": mfx.scale(-0.2)})
    groups = mfx.TransformOptimizer(make_model(), tx).param_groups
    assert [(g["label"], g.get("momentum"), g.get("scale.factor", g.get("factor"))) for g in groups] == [
        ("large", 0.95, -0.1),
        ("small", None, -0.2),
    ]


def test_transforms_that_all_get_every_leaf_are_no_routes():
    @mfx.transform(locality=mfx.Locality.ELEMENT, combinator=mfx.core.Combinator(mfx.Locality.ELEMENT))
    def summed(transforms: dict[str, mfx.Transform]):
        def init(params):
            return {k: tx.init(params) for k, tx in transforms.items()}

        def update(updates, state, params):
            done = {k: transforms[k].update(updates, state[k]) for k in transforms}
            return mfx.tree.map(lambda *u: sum(u), *[u for u, _ in done.values()]), {k: s for k, (_, s) in done.items()}

        return init, update

    (group,) = mfx.TransformOptimizer(make_model(), summed({"a": mfx.scale(-0.1), "b": mfx.scale(-0.2)})).param_groups
    assert (group["label"], group["a.factor"], group["b.factor"]) == (None, -0.1, -0.2)


# ----------------------------------------------------------------------------------------- tensors that a model names


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()


def test_tensors_without_names_are_routed_and_stepped_as_their_model_is() -> None:
    """As engines and callers of torch's own optimizers give them: a list, or lists with and without decay."""
    models = [net() for _ in range(3)]
    decayed = [param for param in models[2].parameters() if param.ndim > 1]
    others = [param for param in models[2].parameters() if param.ndim < 2]
    optimizers = [
        mfx.Muon(models[0], weight_decay=0.1),
        mfx.Muon(models[1].parameters(), weight_decay=0.1, model=models[1]),
        mfx.Muon([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.1}], model=models[2]),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        _trained(model, optimizer)
    assert [group["label"] for group in optimizers[1].param_groups] == ["muon", "adamw"]
    for model in models[1:]:
        assert all(map(torch.equal, models[0].parameters(), model.parameters()))


def test_tensors_without_names_are_refused_where_no_model_names_them() -> None:
    model = net()
    with pytest.raises(TypeError, match=r"expected named parameters, found Parameter; .*model="):
        mfx.Muon(model.parameters())
    with pytest.raises(ValueError, match=r"a tensor of shape \(2,\) is no parameter of the model"):
        mfx.Muon([nn.Parameter(torch.zeros(2))], model=model)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, found list"):
        mfx.TransformOptimizer(model.parameters(), mfx.adamw(), model=[model])  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["the model", "tensors of it"])
def test_what_was_unfrozen_moves_from_its_group_into_a_new_one(given: str) -> None:
    model, twin = net(), net()
    model[1].requires_grad_(requires_grad=False)
    if given == "the model":
        optimizer = mfx.Muon(model)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3, 2]
    else:
        optimizer = mfx.Muon([param for param in model.parameters() if param.requires_grad], model=model)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
    many = len(optimizer.param_groups)
    if given == "the model":
        with pytest.raises(ValueError, match=r"'1\.bias' is in a group already, and the labels leave it out"):
            optimizer.add_param_group({"params": model[1].parameters()})
    model[1].requires_grad_()
    if given == "the model":
        model(torch.arange(8)).square().sum().backward()
        with pytest.raises(ValueError, match=r"add_param_group\(\{'params': \[\.\.\.\]\}\) takes in"):
            optimizer.step()
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 2e-3})
    assert [group["label"] for group in optimizer.param_groups[many:]] == ["muon", "adamw"]
    _trained(model, optimizer)
    _trained(twin, mfx.Muon(twin))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    again = mfx.Muon(copy.deepcopy(model))
    with pytest.raises(ValueError, match="groups them in another way"):
        again.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own import
def test_one_optimizer_for_each_parameter_steps_in_the_backward_pass() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model, twin = net(), net()
    _apply_optimizer_in_backward(mfx.Muon, model.parameters(), {"lr": 0.01, "model": model})
    for _ in range(2):
        model(torch.arange(8)).square().sum().backward()
    _trained(twin, mfx.Muon(twin, lr=0.01))
    for param, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(param, wanted, atol=1e-6)  # batches of matrices are of one there


ALONE = mfx.scale_by_adam()
DOWN = mfx.scale_by_learning_rate(0.1)


@mfx.transform(locality=mfx.Locality.ELEMENT)
def of_ones_own():
    """Says nothing of the direction."""
    return mfx.scale(-0.1).functions


@pytest.mark.parametrize(
    ("tx", "rising"),
    [
        (ALONE, "2 of 2 parameters, such as 'weight'"),
        (mfx.chain(ALONE, mfx.scale(0.1)), "2 of 2"),
        (mfx.skip_nonfinite(mfx.accumulate(mfx.chain(ALONE, mfx.master_params(ALONE)), 2)), "2 of 2"),
        (mfx.chain(mfx.adamw(0.1), mfx.scale(-1.0)), "2 of 2"),
        (mfx.masked(mfx.adamw(0.1), mfx.select.ndim(2)), "1 of 2 parameters, such as 'bias'"),
        (mfx.partition({"a": ALONE, "b": mfx.adamw(0.1)}, {"weight": "a", "bias": "b"}), "1 of 2 .* 'weight'"),
        (mfx.partition({"a": mfx.identity(), "b": mfx.adamw(0.1)}, {"weight": "a", "bias": "b"}), "1 of 2 .* 'weight'"),
        (mfx.add_updates(DOWN, mfx.scale(0.5)), "2 of 2"),
        (
            mfx.chain(mfx.partition({"a": ALONE, "b": DOWN}, {"weight": "a", "bias": "b"}), mfx.momentum()),
            "1 of 2 .* 'weight'",
        ),
    ],
    ids=repr,
)
def test_parameters_that_would_move_uphill_are_warned_of(tx: mfx.Transform, rising: str):
    with pytest.warns(UserWarning, match=rf"^{rising}.* would move uphill.* scale_by_learning_rate") as caught:
        mfx.TransformOptimizer(torch.nn.Linear(2, 2), tx)
    assert [found.filename for found in caught] == [__file__]


@pytest.mark.parametrize(
    "tx",
    [
        mfx.scale(-0.1),
        mfx.scale(torch.tensor(0.1)),  # its sign is not known
        mfx.contrib.prodigy(),
        mfx.chain(ALONE, of_ones_own()),
        mfx.stateless(lambda updates, params: mfx.tree.map(torch.neg, updates)),
        mfx.partition({"a": mfx.set_to_zero(), "b": mfx.adamw(0.1)}, {"weight": "a", "bias": "b"}),
        mfx.partition({"b": mfx.adamw(0.1)}, {"weight": None, "bias": "b"}),
        mfx.chain(mfx.masked(ALONE, mfx.select.ndim(2)), DOWN),
        mfx.contrib.conditionally_mask(mfx.adamw(0.1), lambda count: count % 2 == 0),
        mfx.skip_nonfinite(mfx.contrib.schedule_free(DOWN, 0.1)),
    ],
    ids=repr,
)
def test_nothing_is_said_where_updates_go_downhill_or_may(tx: mfx.Transform):
    mfx.TransformOptimizer(torch.nn.Linear(2, 2), tx)
