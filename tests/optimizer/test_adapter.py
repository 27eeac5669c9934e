"""Any transform as a torch optimizer: the numbers of the functional form, and all that torch expects of one."""

import copy
import io
import itertools
import re
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import muonfx as mfx
from tests import variants


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(8, 6), nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 4)
    ).to(dtype)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 8))


def set_grads(model: nn.Module, seed: int, skip: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        drawn = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if name in skip else drawn


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def params_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def chains(model: nn.Module) -> dict[str, mfx.Transform]:
    labels = mfx.default_labels(model)
    muon = mfx.muon_with_adamw(0.02, 1e-3, labels=labels, mask=mfx.routing.ndim(min=2))
    return {
        "muon": muon,
        "adamw": mfx.adamw(1e-2),
        "lion": mfx.lion(1e-3, weight_decay=0.1),
        "clipped": mfx.chain(
            mfx.clip_by_global_norm(0.5), mfx.monitor("grad"), muon, mfx.monitor("step")
        ),
        "skipping": mfx.skip_nonfinite(muon),
        "averaged": mfx.chain(muon, mfx.ema_params(0.9)),
        "accumulated": mfx.accumulate(mfx.adamw(1e-2), every=2),
        "schedule free": mfx.contrib.schedule_free(
            mfx.chain(mfx.scale_by_adam(0.0), mfx.scale_by_learning_rate(1e-2)), 1e-2
        ),
        "prodigy": variants.prodigy(estim_lr0=1e-2, weight_decay=0.1),
        "scheduled": mfx.chain(
            mfx.momentum(), mfx.scale_by_learning_rate(mfx.warmup_cosine_decay_schedule(0.1, 2, 10))
        ),
        "numbers as tensors": mfx.as_tensors(mfx.adamw(1e-2)),
        "in eight bits": mfx.chain(
            mfx.momentum(0.5, dtype=mfx.int8(64, code="dynamic", min_size=0)),
            mfx.scale_by_adam(
                mu_dtype=mfx.int8(min_size=0), nu_dtype=mfx.fp8(64, min_size=0, stochastic=True)
            ),
            mfx.scale(-0.1),
        ),
        "masked": mfx.chain(
            mfx.scale_by_adam(),
            mfx.masked(mfx.clip_by_value(0.5), mfx.routing.ndim(1)),
            mfx.scale(-0.1),
        ),
    }


@pytest.mark.parametrize("name", chains(make_model()))
@pytest.mark.parametrize(
    ("bucket_bytes", "donate_grads"), [(1, True), (300, False), (300, True), (1 << 28, False)]
)
def test_steps_are_those_of_the_functional_form(name, bucket_bytes, donate_grads):
    model = make_model()
    tx = chains(model)[name]
    optimizer = mfx.TransformOptimizer(
        model, tx, bucket_bytes=bucket_bytes, donate_grads=donate_grads
    )
    params = params_of(model)
    state = tx.init(params)
    for step in range(5):
        set_grads(model, step, skip=("1.weight", "1.bias") if step == 2 else ())
        grads = grads_of(model)
        updates, state = tx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
        optimizer.step()
        if not donate_grads:
            for key, grad in grads_of(model).items():
                assert grad is None or torch.equal(grad, grads[key]), key
        # Batches of other sizes may round differently in the Newton-Schulz products.
        torch.testing.assert_close(params_of(model), params, rtol=1e-5, atol=1e-6)
    ours = mfx.tree.leaves(optimizer.transform_state)
    for a, b in zip(ours, mfx.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype
        # Codes of eight bits among them.
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by", ["hand", "a scheduler"])
def test_a_rate_in_a_group_that_nothing_reads_is_warned_of_once_and_not_shown(by: str):
    model = nn.Linear(2, 2)
    optimizer = mfx.TransformOptimizer(
        model, mfx.adamw(mfx.warmup_cosine_decay_schedule(0.1, 2, 10))
    )
    assert optimizer.groups_without_rate == (0,)
    assert "\nlr " not in str(mfx.describe(optimizer))
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    if by == "hand":
        optimizer.param_groups[0]["lr"] = 5.0
    else:
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    with pytest.warns(
        UserWarning,
        match=r"param_groups\[0\]: 'lr' is [50]\.0, .* scheduler of torch, .* has no effect",
    ) as caught:
        optimizer.step()
    assert by != "hand" or caught[0].filename == __file__  # a scheduler wraps the step once more
    optimizer.step()
    read = mfx.TransformOptimizer(model, mfx.adamw(0.1))
    assert read.groups_without_rate == ()


def test_an_update_of_another_shape_is_an_error_and_not_broadcast():
    model = nn.Linear(2, 2)
    optimizer = mfx.TransformOptimizer(
        model, mfx.stateless(lambda u, params: mfx.tree.map(torch.sum, u))
    )
    model(torch.ones(2)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(
        ValueError, match=r"updates: 'bias' has shape \(\), its parameter has \(2,\)"
    ):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_groups_rate_scales_its_own_updates_only():
    models = make_model(), make_model()
    numbers = {"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.01, "weight_decay": 0.5}
    ours, theirs = (
        [
            {
                "params": [(n, p) for n, p in m.named_parameters() if (p.ndim > 1) == at],
                **numbers[at],
            }
            for at in (0, 1)
        ]
        for m in models
    )
    optimizer, reference = mfx.TransformOptimizer(ours, mfx.adamw(1.0)), torch.optim.AdamW(theirs)
    for step in range(4):
        for model, one in zip(models, (optimizer, reference), strict=True):
            set_grads(model, step)
            one.step()
        if step == 1:  # read live
            for group in [optimizer.param_groups[0], reference.param_groups[0]]:
                group["lr"] = 0.05
    torch.testing.assert_close(params_of(models[0]), params_of(models[1]), rtol=1e-5, atol=1e-6)


def test_a_group_that_mixes_labels_is_split_so_that_each_part_has_its_rate():
    model = make_model()
    head = [(n, p) for n, p in model.named_parameters() if n.startswith("3.")]
    rest = [(n, p) for n, p in model.named_parameters() if not n.startswith("3.")]
    groups = [{"params": head, "lr": 1e-3}, {"params": rest, "betas": (0.9, 0.9)}]
    optimizer = mfx.Muon(groups, lr=0.02, labels=mfx.routing.default_labels_by_name)
    assert [(g["label"], g["lr"]) for g in optimizer.param_groups] == [
        ("muon", 1e-3),
        ("adamw", 1e-3),
        ("muon", 0.02),
        ("adamw", 0.02),
    ]
    assert [g.get("betas") for g in optimizer.param_groups] == [None, (0.9, 0.95), None, (0.9, 0.9)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    set_grads(model, 0)
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [5e-4, 5e-4, 0.01, 0.01]


@pytest.mark.parametrize(
    ("tx", "key", "extras"),
    [
        (
            mfx.chain(mfx.clip_by_global_norm(1.0), mfx.scale(-0.1)),
            "clip_by_global_norm.max_norm",
            {},
        ),
        (
            mfx.chain(mfx.contrib.reduce_on_plateau(0.5), mfx.scale(-0.1)),
            "reduce_on_plateau.factor",
            {"value": 1.0},
        ),
        (mfx.contrib.schedule_free(mfx.scale(-0.1), 0.1), "b1", {}),
    ],
    ids=["sum", "number", "wrapper"],
)
def test_groups_that_disagree_about_a_tree_wide_argument_are_an_error_and_change_nothing(
    tx, key, extras
):
    model = make_model()
    optimizer = mfx.TransformOptimizer(
        [
            {"params": model[1].named_parameters()},
            {"params": [("w", model[3].weight), ("b", model[3].bias)]},
        ],
        tx,
    )
    optimizer.param_groups[0][key] = 0.25
    set_grads(model, 0)
    before = params_of(model)
    with pytest.raises(ValueError, match=rf"found different values of '{key}', expected one value"):
        optimizer.step(**extras)
    assert_equal(params_of(model), before)


def test_extras_reach_the_transform():
    @mfx.transform(locality=mfx.Locality.ELEMENT)
    def scaled_by_value():
        def update(updates, state, params=None, *, value):
            return mfx.tree.map(lambda u: -value * u, updates), state

        return mfx.identity().functions.init, update

    model = nn.Linear(2, 1, bias=False)
    optimizer = mfx.TransformOptimizer(model, scaled_by_value())
    set_grads(model, 0)
    before, grad = model.weight.detach().clone(), model.weight.grad
    optimizer.step(value=3.0)
    torch.testing.assert_close(model.weight.detach(), before - 3.0 * grad)
    after = model.weight.detach().clone()
    with pytest.raises(
        TypeError, match=r"argument vlaue= \(did you mean 'value'\?\), expected only value="
    ):
        optimizer.step(value=3.0, vlaue=2.0)
    with pytest.raises(
        TypeError,
        match=r"the extra argument value= is missing: .* optimizer\.step\(value=\.\.\.\)$",
    ):
        optimizer.step()
    assert torch.equal(model.weight, after)


# ------------------------------------------------------------------------------------------------------ persistence


@pytest.mark.filterwarnings("ignore:weight decay has no effect")
@pytest.mark.parametrize("name", chains(make_model()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_save_load_step_is_bitwise_step(name, dtype):
    model = make_model(dtype=dtype)
    optimizer = mfx.TransformOptimizer(model, chains(model)[name])
    for step in range(3):
        set_grads(model, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = make_model(1, dtype)
    resumed = mfx.TransformOptimizer(other, chains(other)[name])
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    for step in range(3, 6):
        for m, o in ((model, optimizer), (other, resumed)):
            set_grads(m, step)
            o.step()
        assert_equal(params_of(model), params_of(other))
    a, b = optimizer.state_dict()["state"], resumed.state_dict()["state"]
    for index in a:
        assert_equal(a[index], b[index])


@pytest.mark.filterwarnings("ignore:each step would increase the loss")
def test_a_state_that_does_not_fit_is_refused_whole():
    model = make_model()
    optimizer = mfx.TransformOptimizer(model, mfx.momentum(0.9))
    set_grads(model, 0)
    optimizer.step()
    kept = copy.deepcopy(optimizer.state_dict())
    other = mfx.TransformOptimizer(model, mfx.scale_by_adam()).state_dict()
    with pytest.raises(
        ValueError,
        match=r"nothing was loaded: .*'0\.weight' has an unexpected 'mu'.*has no 'trace'",
    ):
        optimizer.load_state_dict(other)
    damaged = copy.deepcopy(kept)
    damaged["state"][0]["trace"] = kept["state"][0]["trace"].double()
    with pytest.raises(
        ValueError, match=r"nothing was loaded: .* would narrow from torch.float64 to torch.float32"
    ):
        optimizer.load_state_dict(damaged)
    damaged["state"][0]["trace"] = torch.zeros(3)
    with pytest.raises(
        ValueError, match=r"a tensor of shape \(3,\), expected a tensor of shape \(8, 6\)"
    ):
        optimizer.load_state_dict(damaged)
    damaged = copy.deepcopy(kept)
    damaged["param_groups"][0]["param_names"][1] = "other"
    with pytest.raises(ValueError, match=r"nothing was loaded: the state dict lacks '1\.weight'"):
        optimizer.load_state_dict(damaged)
    del damaged["param_groups"][0]["param_names"], damaged["param_groups"][0]["params"][0]
    with pytest.raises(ValueError, match="the state dict has no 'param_names'"):
        optimizer.load_state_dict(damaged)
    with pytest.raises(
        ValueError,
        match=r"expected a state dict with 'state' and 'param_groups', found the keys \[\]",
    ):
        optimizer.load_state_dict({})
    for index, leaves in optimizer.state_dict()["state"].items():
        assert_equal(leaves, kept["state"][index])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("state", None, "'state' of the state dict is of type NoneType, expected a dict"),
        (
            "state",
            {0: None},
            "item 0 of 'state' of the state dict is of type NoneType, expected a dict",
        ),
        (
            "param_groups",
            {"lr": 0.1},
            "'param_groups' of the state dict is of type dict, expected a list of dicts",
        ),
        ("param_groups", [None], "group 0 of the state dict is of type NoneType, expected a dict"),
        (
            "param_groups",
            [{"lr": 0.1}],
            "'params' of group 0 of the state dict is of type NoneType, expected a list",
        ),
    ],
)
def test_a_state_dict_of_other_types_is_refused(key: str, value: object, message: str):
    optimizer = mfx.TransformOptimizer(net(), mfx.scale_by_learning_rate(0.1))
    with pytest.raises(TypeError, match=f"nothing was loaded: {re.escape(message)}"):
        optimizer.load_state_dict({**optimizer.state_dict(), key: value})


@pytest.mark.parametrize(
    "how", [None, {}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}], ids=str
)
def test_a_state_is_loaded_by_name_whatever_the_order_of_parameters(how: dict[str, bool] | None):
    """``torch.distributed.checkpoint.state_dict`` lists parameters by path, in the order of the loading optimizer."""
    (model, optimizer), (other, resumed) = trained(2), trained(1, is_reversed=True)
    if how is None:
        resumed.load_state_dict(optimizer.state_dict())
    else:
        given = StateDictOptions(**how)
        saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=given))
        set_optimizer_state_dict(other, resumed, saved, options=given)
    for param, like in zip(other.parameters(), model.parameters(), strict=True):
        assert_equal(resumed.state[param], optimizer.state[like])
    with pytest.raises(ValueError, match=r"'1\.weight' has no 'muon.momentum.trace'"):
        resumed.load_state_dict(
            {**(state := optimizer.state_dict()), "state": {**state["state"], 0: {}}}
        )


def trained(steps: int, *, is_reversed: bool = False) -> tuple[nn.Module, mfx.Muon]:
    model = net()
    named = list(model.named_parameters())
    optimizer = mfx.Muon(named[::-1] if is_reversed else named, labels=mfx.default_labels(model))
    for step in range(steps):
        set_grads(model, step)
        optimizer.step()
    return model, optimizer


def test_another_order_is_refused_if_names_and_paths_have_nothing_in_common():
    part = net()[1]
    pairs = [(f"x.{name}", param) for name, param in part.named_parameters()]
    optimizer, other = (mfx.TransformOptimizer(pairs[::order], mfx.adamw(0.1)) for order in (1, -1))
    saved = get_optimizer_state_dict(part, optimizer)
    with pytest.raises(
        ValueError,
        match=r"paths such as '(weight|bias)', and the optimizer has names such as 'x\..*another order",
    ):
        set_optimizer_state_dict(part, other, saved)
    set_optimizer_state_dict(part, optimizer, saved)


# -------------------------------------------------------------------------------------------------- torch's machinery


def test_a_step_that_the_grad_scaler_skips_advances_nothing():
    model = make_model()
    optimizer = mfx.Muon(model)
    set_grads(model, 0)
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    kept, before = copy.deepcopy(optimizer.state_dict()), params_of(model)
    scaler.scale(model(torch.arange(8)).square().mean() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_equal(params_of(model), before)
    for index, leaves in optimizer.state_dict()["state"].items():
        assert_equal(leaves, kept["state"][index])
    optimizer.zero_grad()
    scaler.scale(model(torch.arange(8)).square().mean()).backward()
    scaler.step(optimizer)
    assert not torch.equal(params_of(model)["1.weight"], before["1.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["the method", "a function that calls it, fullgraph"])
def test_a_compiled_step_is_the_eager_step(form):
    model, twin = make_model(), make_model()
    eager = mfx.Muon(model, orthogonalize=mfx.orthogonalize(dtype=torch.float32))
    traced = mfx.Muon(twin, orthogonalize=mfx.orthogonalize(dtype=torch.float32))

    def call() -> None:
        traced.step()

    # One of them by inductor, which takes most of the time: the graphs are the same.
    by_method = torch.compile(traced.step, backend="aot_eager")
    step = by_method if form == "the method" else torch.compile(call, fullgraph=True)
    for seed in range(4):
        set_grads(model, seed)
        set_grads(twin, seed)
        eager.step()
        step()
        torch.testing.assert_close(params_of(model), params_of(twin), rtol=1e-5, atol=1e-5)
    # Assignments to an optimizer's attributes are lost under compilation: the count once stayed at zero.
    for state in (
        traced.transform_state["adamw"]["scale_by_adam"].count,
        traced.state[twin[1].bias]["adamw.scale_by_adam.count"],
    ):
        assert int(state) == 4


def _matrices_to_muon(model: nn.Module) -> mfx.Muon:
    labels = {
        name: "muon" if param.ndim > 1 else "adamw" for name, param in model.named_parameters()
    }
    return mfx.Muon(model, labels=labels, orthogonalize=mfx.orthogonalize(dtype=torch.float32))


COMPILED: dict[str, Any] = {
    "one group": lambda model: mfx.TransformOptimizer(model, mfx.adamw(1e-2)),
    "two groups": _matrices_to_muon,
    "in an accumulate": lambda model: mfx.TransformOptimizer(
        model, mfx.accumulate(mfx.adamw(1e-2), 2)
    ),
    "beside a schedule": lambda model: mfx.TransformOptimizer(
        model,
        mfx.chain(mfx.momentum(mfx.linear_schedule(0.5, 0.9, 5)), mfx.scale_by_learning_rate(1e-2)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed_by"),
    [
        *[(name, "hand") for name in COMPILED],
        # A scheduler and `dynamic` meet each kind of state once: a case takes 20 to 40 s.
        ("one group", "a scheduler"),
        ("two groups", "hand, dynamic"),
        pytest.param("in an accumulate", "a scheduler", marks=pytest.mark.deep),
        pytest.param("beside a schedule", "hand, dynamic", marks=pytest.mark.deep),
    ],
)
def test_a_compiled_step_follows_a_rate_that_changes_at_every_step(name: str, changed_by: str):
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("eager")
    trained_params = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = COMPILED[name](model)
        scheduler = None
        step = optimizer.step
        if changed_by == "a scheduler":
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            step = torch.compile(optimizer.step, backend=graphs)
        elif is_compiled:
            options = {"dynamic": True} if "dynamic" in changed_by else {}
            step = torch.compile(
                lambda o=optimizer: o.step(), fullgraph=True, backend=graphs, **options
            )
        for number in range(9):
            set_grads(model, number)
            if is_compiled:
                step()
            else:
                optimizer.step()
            if scheduler is not None:
                scheduler.step()
                continue
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (number + 2)
        trained_params.append(params_of(model))
    torch.testing.assert_close(*trained_params, rtol=1e-5, atol=1e-6)
    assert 0 < graphs.frame_count <= 4  # a float is a constant at first, then an input of the graph


@pytest.mark.slow
def test_a_compiled_step_whose_graph_breaks_follows_groups_with_other_rates_and_a_scheduler():
    """A tree's structure that the graph made was the key of a dict outside of it, and had no hash."""
    trained_params = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [
            {"params": list(model[layer].named_parameters(prefix=str(layer))), "lr": rate}
            for layer, rate in ((0, 0.1), (1, 0.2))
        ]
        tx = mfx.chain(
            mfx.scale_by_adam(), mfx.add_decayed_weights(0.1), mfx.scale_by_learning_rate(0.1)
        )
        optimizer = mfx.TransformOptimizer(groups, tx)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        step = optimizer.step
        if is_compiled:
            step = torch.compile(lambda o=optimizer: o.step(), backend="eager")
        for number in range(4):
            set_grads(model, number)
            step()
            scheduler.step()
        trained_params.append(params_of(model))
    torch.testing.assert_close(*trained_params, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- bad input


@mfx.transform
def _keeps(leaf: Any):
    def init(params: Any) -> Any:
        return {"count": leaf}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state

    return init, update


@dataclass
class _Moments:
    first: Tensor


@pytest.mark.parametrize("leaf", [0, 0.5, "text", _Moments(torch.zeros(2))])
def test_a_state_that_could_not_be_loaded_is_refused_at_construction(leaf: Any):
    message = f"state: '_keeps.count' is of type {type(leaf).__name__}, expected a tensor"
    with pytest.raises(TypeError, match=message):
        mfx.TransformOptimizer(nn.Linear(2, 2), mfx.chain(_keeps(leaf), mfx.scale(-1.0)))


def test_bad_parameters_and_groups_are_named():
    model = make_model()
    with pytest.raises(TypeError, match="expected named parameters"):
        mfx.Muon(list(model.parameters()))
    with pytest.raises(TypeError, match=r"tx must be a muonfx\.Transform"):
        mfx.TransformOptimizer(model, mfx.adamw)
    with pytest.raises(ValueError, match=r"two parameters are named '1\.weight'"):
        mfx.Muon(
            itertools.chain(
                model.named_parameters(), [("1.weight", nn.Parameter(torch.zeros(2, 2)))]
            )
        )
    param = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="'x' and 'y' are one tensor"):
        mfx.Muon({"x": param, "y": param})
    with pytest.raises(
        TypeError, match=r"'z' must be dense and real floating point .* found torch\.complex64"
    ):
        mfx.TransformOptimizer({"z": torch.zeros(2, dtype=torch.complex64)}, mfx.adamw())
    with pytest.raises(
        TypeError, match=r"'s' must be dense .* found torch\.float32, torch\.sparse_coo"
    ):
        mfx.TransformOptimizer({"s": nn.Parameter(torch.eye(3).to_sparse())}, mfx.adamw())
    with pytest.raises(
        TypeError, match=r"'params' must be a tensor, found list: give a group in a list"
    ):
        mfx.Muon({"params": list(model.named_parameters()), "lr": 0.1})
    with pytest.raises(TypeError, match="'layer' must be a tensor, found dict"):
        mfx.Muon({"layer": {"weight": param}})


def test_adding_a_group_is_all_or_nothing():
    model = make_model()
    optimizer = mfx.Muon(
        [("1.weight", model[1].weight), ("1.bias", model[1].bias)],
        labels=mfx.routing.default_labels_by_name,
    )
    with pytest.raises(ValueError, match=r"'lr' in a group must be at least 0"):
        optimizer.add_param_group({"params": [("3.weight", model[3].weight)], "lr": -1.0})
    with pytest.raises(ValueError, match=r"two parameters are named '1\.weight'"):
        optimizer.add_param_group({"params": [("1.weight", model[3].weight)]})
    assert [group["param_names"] for group in optimizer.param_groups] == [["1.weight"], ["1.bias"]]
    optimizer.add_param_group(
        {"params": [("3.weight", model[3].weight), ("3.bias", model[3].bias)]}
    )
    assert [group["label"] for group in optimizer.param_groups] == ["muon", "adamw", "muon+adamw"]
    set_grads(model, 0)
    before = params_of(model)
    optimizer.step()
    for name in ("1.weight", "3.weight", "3.bias"):
        assert not torch.equal(model.get_parameter(name), before[name])
    matrices = mfx.TransformOptimizer([("1.weight", model[1].weight)], mfx.muon())
    with pytest.raises(ValueError, match=r"'3\.bias' has shape \(4,\), expected at least two dims"):
        matrices.add_param_group({"params": [("3.bias", model[3].bias)]})
    assert len(matrices.param_groups) == 1
    matrices.step()


def test_no_parameters_is_an_error_and_an_empty_group_is_none():
    with pytest.raises(ValueError, match="found no parameters"):
        mfx.Muon(nn.ReLU())
    model = make_model()
    optimizer = mfx.TransformOptimizer(
        [{"params": [], "lr": 0.5}, {"params": model}], mfx.adamw(1e-3)
    )
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 7]
    set_grads(model, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_schedulers_work_beside_groups_that_have_no_rate():
    model = make_model()
    parts = {"still": mfx.set_to_zero(), "muon": mfx.muon(0.1), "adamw": mfx.adamw(0.1)}
    labels = {**mfx.default_labels(model), "0.weight": "still"}
    optimizer = mfx.TransformOptimizer(model, mfx.partition(parts, labels))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    set_grads(model, 0, skip=("0.weight",))
    optimizer.step()
    scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.0, 0.05}


def test_gradients_that_cannot_be_used_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = mfx.TransformOptimizer(embedding, mfx.adamw())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="must be dense"):
        optimizer.step()


@pytest.mark.parametrize("given", [lambda model: model, lambda model: model.named_parameters()])
def test_frozen_models_and_missing_gradients_do_nothing(given: Any):
    model = make_model()
    optimizer = mfx.TransformOptimizer(given(model), mfx.adamw(0.1))
    before = params_of(model)
    with pytest.warns(
        UserWarning, match="found no gradient on any of 7 parameters and changes none of them"
    ):
        optimizer.step()
    optimizer.step()  # it is said once
    assert_equal(params_of(model), before)
    # One count for all parameters: decision 0015.
    assert optimizer.transform_state["scale_by_adam"].count == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frozen = mfx.Muon(model.requires_grad_(False))
    frozen.step()


@pytest.mark.parametrize("layout", ["replicated", lambda named: dict(named)])
def test_only_a_layout_or_a_function_that_makes_one_will_do(layout: Any):
    with pytest.raises(TypeError, match=r"layout must be a muonfx\.sharding layout, or a function"):
        mfx.TransformOptimizer(nn.Linear(2, 2), mfx.scale(-0.1), layout=layout)


def test_metrics_of_an_optimizer_are_those_of_its_state():
    param = torch.nn.Parameter(torch.ones(2))
    tx = mfx.skip_nonfinite(mfx.chain(mfx.monitor("grad", ("norm",)), mfx.scale(-0.1)))
    optimizer = mfx.TransformOptimizer({"w": param}, tx)
    param.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert (
        mfx.metrics(optimizer)
        == mfx.metrics(optimizer.transform_state)
        == {"grad/norm": torch.tensor(5.0)}
    )


def test_a_stack_of_transforms_is_refused_since_an_optimizer_trains_one_model():
    stacked = mfx.stack([mfx.adamw(1e-3), mfx.adamw(1e-2)])
    with pytest.raises(
        ValueError, match=r"tx: scale_by_adam: b1 must be .*shape \(2,\).*one model"
    ):
        mfx.TransformOptimizer(torch.nn.Linear(2, 2), stacked)


def test_a_schedule_may_have_a_tensor_with_a_value_for_each_step():
    @mfx.schedule
    def from_table(rates):
        return lambda count: rates[count.long().clamp(max=2)]

    for before_rate in ([], [mfx.add_decayed_weights(0.0)]):
        tx = mfx.chain(
            *before_rate, mfx.scale_by_learning_rate(from_table(torch.tensor([1.0, 2.0, 4.0])))
        )
        param = nn.Parameter(torch.zeros(1))
        optimizer = mfx.TransformOptimizer({"w": param}, tx)
        for expected in (-1.0, -3.0, -7.0):
            param.grad = torch.ones(1)
            optimizer.step()
            assert param.item() == expected


def test_a_transform_state_is_loaded_from_other_dicts_and_refused_by_name():
    model = nn.Linear(2, 2)
    tx = mfx.adamw(1e-3)
    optimizer = mfx.TransformOptimizer(model, tx)
    state = tx.init(model.state_dict())  # an OrderedDict
    state["scale_by_adam"].mu["bias"].fill_(7.0)
    optimizer.load_transform_state(state)
    assert optimizer.state[model.bias]["scale_by_adam.mu"].tolist() == [7.0, 7.0]
    wrong_states = {
        r"'scale_by_adam\.mu\.weight' has shape \(2, 3\)": tx.init(nn.Linear(3, 2).state_dict()),
        r"missing 'scale_by_adam\.count'.*unexpected 'trace\.": mfx.momentum().init(
            model.state_dict()
        ),
        r"'scale_by_adam\.count' must be a tensor, found float": mfx.tree.map(
            lambda leaf: 0.0, state
        ),
    }
    for message, wrong_state in wrong_states.items():
        with pytest.raises((ValueError, TypeError), match=message):
            optimizer.load_transform_state(wrong_state)
    assert optimizer.state[model.bias]["scale_by_adam.mu"].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("how", ["state dict", "transform state"])
def test_state_on_the_meta_device_is_refused_before_any_change(how: str):
    model = nn.Linear(2, 2)
    optimizer = mfx.TransformOptimizer(model, mfx.adamw(1e-3))
    saved = copy.deepcopy(optimizer.state_dict())
    state = mfx.tree.map(torch.clone, optimizer.transform_state)
    last_index = max(saved["state"])
    saved["state"][last_index]["scale_by_adam.nu"] = saved["state"][last_index][
        "scale_by_adam.nu"
    ].to("meta")
    state["scale_by_adam"].nu["bias"] = state["scale_by_adam"].nu["bias"].to("meta")
    optimizer.state[model.weight]["scale_by_adam.mu"].fill_(7.0)
    load = partial(optimizer.load_state_dict, saved)
    if how == "transform state":
        load = partial(optimizer.load_transform_state, state)
    with pytest.raises(ValueError, match=r"scale_by_adam\.nu.* is on the meta device"):
        load()
    assert optimizer.state[model.weight]["scale_by_adam.mu"].unique().tolist() == [7.0]
