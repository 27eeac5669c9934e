"""Whatever is done to the lists in ``param_groups``: names, state and hyperparameters follow the tensors."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import muonfx as mfx
from tests.optimizer.test_adapter import assert_equal, net, params_of

# Two parameters of each shape, so that nothing but identity tells them apart.
SHAPES = {"a.weight": (3, 3), "b.weight": (3, 3), "c.weight": (3, 3), "a.bias": (3,), "b.bias": (3,), "c.bias": (3,)}
MATRICES = [name for name in SHAPES if name.endswith("weight")]
VECTORS = [name for name in SHAPES if name.endswith("bias")]
LABELS = {name: "muon" if name in MATRICES else "adamw" for name in SHAPES}


class Pair:
    """An optimizer whose lists are edited, and its twin whose lists are not."""

    def __init__(self, groups: list[list[str]]) -> None:
        self.step_count = 0
        self.params, self.optimizer = self._made(groups)
        self.twin_params, self.twin = self._made(groups)

    @staticmethod
    def _made(groups: list[list[str]]) -> tuple[dict[str, nn.Parameter], mfx.Muon]:
        generator = torch.Generator().manual_seed(0)
        params = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
        given = [{"params": [(name, params[name]) for name in names]} for names in groups]
        return params, mfx.Muon(given, lr=0.1, labels=LABELS, orthogonalize=mfx.orthogonalize(dtype=torch.float32))

    def step(self) -> None:
        """Step on both, on the same gradients by name, and compare all that is kept by name."""
        self.step_count += 1
        for params, optimizer in ((self.params, self.optimizer), (self.twin_params, self.twin)):
            generator = torch.Generator().manual_seed(self.step_count)
            for name, shape in SHAPES.items():
                params[name].grad = torch.randn(shape, generator=generator)
            optimizer.step()
        self.check()

    def check(self) -> None:
        saved, wanted = self.optimizer.state_dict(), self.twin.state_dict()
        for name in SHAPES:
            assert torch.equal(self.params[name], self.twin_params[name]), name
            assert_equal(self.optimizer.state[self.params[name]], self.twin.state[self.twin_params[name]])
            assert_equal(_saved_state(saved, name), _saved_state(wanted, name))
        for group in self.optimizer.param_groups:
            named = zip(group["param_names"], group["params"], strict=True)
            assert all(self.params[name] is param for name, param in named)


def _saved_state(saved: dict[str, Any], name: str) -> Any:
    (index,) = (
        index
        for group in saved["param_groups"]
        for own, index in zip(group["param_names"], group["params"], strict=True)
        if own == name
    )
    return saved["state"][index]


def _by_path(optimizer: mfx.Muon) -> dict[str, torch.Tensor]:
    paths = map(str, mfx.tree.paths(optimizer.transform_state))
    return dict(zip(paths, mfx.tree.leaves(optimizer.transform_state), strict=True))


def _shuffled(draw: st.DataObject, optimizer: torch.optim.Optimizer) -> None:
    """Permute, within groups and among those of one label, and the groups themselves."""
    groups = optimizer.param_groups
    for label in ("muon", "adamw"):
        own = [group for group in groups if group["label"] == label]
        all_params = [param for group in own for param in group["params"]]
        params = [all_params[at] for at in draw.draw(st.permutations(range(len(all_params))), "params")]
        for group in own:
            cut = len(params) if group is own[-1] else draw.draw(st.integers(0, len(params)), "cut")
            group["params"], params = params[:cut], params[cut:]
    groups[:] = [groups[at] for at in draw.draw(st.permutations(range(len(groups))), "groups")]


@given(draw=st.data())
def test_names_and_state_follow_the_tensors_through_all_lists(draw: st.DataObject):
    pair = Pair([["a.weight", "b.weight", "a.bias"], ["c.weight", "b.bias", "c.bias"]])
    pair.step()
    for _ in range(2):
        match draw.draw(st.sampled_from(["shuffle", "copy dicts", "replace list", "remove", "add again"]), "edit"):
            case "shuffle":
                _shuffled(draw, pair.optimizer)
            case "copy dicts":
                pair.optimizer.param_groups[:] = [dict(group) for group in pair.optimizer.param_groups]
            case "replace list":
                pair.optimizer.param_groups = list(reversed(pair.optimizer.param_groups))
            case "remove":
                place = draw.draw(st.integers(0, len(pair.optimizer.param_groups) - 1), "place")
                removed = pair.optimizer.param_groups.pop(place)
                if removed["params"]:
                    with pytest.raises(ValueError, match="parameters were removed, such as"):
                        pair.optimizer.step()
                    pair.optimizer.add_param_group(removed)
                else:
                    pair.optimizer.param_groups.append(removed)
            case "add again":
                group = pair.optimizer.param_groups[0]
                if group["params"]:
                    taken = [group["params"].pop() for _ in group["params"][:]]
                    pair.optimizer.add_param_group({"params": taken, "lr": 0.1})
        if draw.draw(st.booleans(), "copied"):
            twin = copy.deepcopy((pair.params, pair.optimizer))
            pair.params, pair.optimizer = twin
        pair.step()
    names = [name for group in pair.optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(SHAPES)


def test_a_moved_parameter_has_the_numbers_of_its_new_group():
    pair = Pair([["a.weight", "b.weight", *VECTORS], ["c.weight"]])
    pair.step()
    muon, _, other = pair.optimizer.param_groups
    other["lr"] = 0.0
    other["params"].append(muon["params"].pop(0))
    before = {name: param.detach().clone() for name, param in pair.params.items()}
    pair.optimizer.step()
    still = {name for name, param in pair.params.items() if torch.equal(param, before[name])}
    assert still == {"a.weight", "c.weight"}
    assert [group["param_names"] for group in pair.optimizer.param_groups] == [
        ["b.weight"],
        VECTORS,
        ["c.weight", "a.weight"],
    ]


def test_new_tensors_take_the_places_of_the_former_ones_and_not_those_of_moved_ones():
    pair = Pair([list(SHAPES)])
    pair.step()
    muon = pair.optimizer.param_groups[0]
    new = nn.Parameter(pair.params["b.weight"].detach().clone())
    a, _, c = muon["params"]
    muon["params"][:] = [c, a, new]
    with pytest.raises(ValueError, match=r"new in the place of 'c\.weight', which is elsewhere: put replaced"):
        pair.optimizer.step()
    muon["params"][:] = [a, new, c]
    pair.params["b.weight"] = new
    pair.step()


Edit = Callable[[list[dict[str, Any]]], object]
REFUSED: dict[str, tuple[Edit, type[Exception], str]] = {
    "extended by itself": (lambda g: g.extend(g), ValueError, r"'a\.weight' is listed 2 times and would be stepped on"),
    "a parameter twice": (lambda g: g[0]["params"].append(g[0]["params"][0]), ValueError, "listed 2 times"),
    "popped": (lambda g: g.pop(), ValueError, r"3 of 6 parameters were removed, such as 'a\.bias': put them back"),
    "cleared": (lambda g: g.clear(), ValueError, "6 of 6 parameters were removed"),
    "a slice": (lambda g: g.__setitem__(slice(0, 2), g[1:]), ValueError, "3 of 6 parameters were removed"),
    "a parameter popped": (lambda g: g[0]["params"].pop(), ValueError, r"1 of 6 .*, such as 'c\.weight'"),
    "inserted": (
        lambda g: g.insert(0, {"params": [torch.ones(2)]}),
        ValueError,
        r"\[0\]: a tensor of shape \(2,\) is new: add",
    ),
    "appended": (
        lambda g: g[0]["params"].append(torch.ones(2)),
        ValueError,
        "4 params stand in a group of 3 param_names",
    ),
    "moved to other transforms": (
        lambda g: g[0]["params"].append(g[1]["params"].pop()),
        ValueError,
        r"'a\.weight' \(label 'muon'\) and 'c\.bias' \(label 'adamw'\) are in one group",
    ),
    "no dict": (lambda g: g.append([1]), TypeError, r"must hold dicts with a list under 'params', found \[1\]"),
    "without params": (lambda g: g[0].pop("params"), TypeError, "must hold dicts with a list under 'params'"),
    "without momentum": (
        lambda g: g[0].pop("momentum"),
        ValueError,
        r"the group labelled 'muon' of 'a\.weight' has no 'momentum', .*set it \(it was 0\.95\)",
    ),
    "without betas": (lambda g: g[1].pop("betas"), ValueError, r"has no 'betas', .*set it \(it was \(0\.9, 0\.95\)\)"),
    "another dict": (
        lambda g: g.__setitem__(0, {"params": g[0]["params"], "lr": 0.1}),
        ValueError,
        "has no 'momentum'",
    ),
    "lr is None": (lambda g: g[0].update(lr=None), TypeError, "'lr' in a group must be a number .*found None"),
    "lr is text": (lambda g: g[0].update(lr="0.1"), ValueError, "'lr' in a group must be a number, found '0.1'"),
    "lr is True": (lambda g: g[0].update(lr=True), TypeError, "'lr' in a group must be a number .*found True"),
    "lr is an array": (
        lambda g: g[0].update(lr=np.ones(1)),
        TypeError,
        r"'lr' in a group must .*found array\(\[1\.\]\)",
    ),
    "a key twice": (
        lambda g: g[1].update(betas=(0.5, 0.95), momentum=0.6),
        ValueError,
        r"'betas' and 'momentum' in a group both set .*b1, to 0\.5 and 0\.6",
    ),
    "one beta": (lambda g: g[1].update(betas=0.5), ValueError, r"'betas' in a group must be 2 numbers, found 0\.5"),
    "a large beta": (lambda g: g[1].update(betas=(0.5, 1.5)), ValueError, "b2 must be"),
    "lr is negative": (lambda g: g[0].update(lr=-1.0), ValueError, "learning_rate must be"),
    "lr is NaN": (lambda g: g[0].update(lr=float("nan")), ValueError, "learning_rate must be"),
    "lr is two numbers": (
        lambda g: g[0].update(lr=torch.ones(2)),
        ValueError,
        r"a tensor of one element, found shape \(2,\)",
    ),
}


@pytest.mark.parametrize("edit", REFUSED)
def test_edits_that_cannot_be_followed_are_refused_before_anything_changes(edit: str):
    """Named: what was found, and what to do. The groups that were there before go on."""
    change, error, message = REFUSED[edit]
    pair = Pair([list(SHAPES)])
    pair.step()
    kept = [{**group, "params": list(group["params"])} for group in pair.optimizer.param_groups]
    before = {name: param.detach().clone() for name, param in pair.params.items()}
    state = {name: leaf.clone() for name, leaf in _by_path(pair.optimizer).items()}
    change(pair.optimizer.param_groups)
    with pytest.raises(error, match=message):
        pair.optimizer.step()
    assert_equal(before, dict(pair.params))
    assert_equal(state, _by_path(pair.optimizer))
    pair.optimizer.param_groups[:] = kept
    pair.step()


def test_groups_that_are_listed_twice_are_saved_as_torch_saves_them():
    pair = Pair([list(SHAPES)])
    pair.step()
    pair.optimizer.param_groups.extend(pair.optimizer.param_groups)
    saved = pair.optimizer.state_dict()
    assert saved["param_groups"][2:] == saved["param_groups"][:2] == pair.twin.state_dict()["param_groups"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("where", ["argument", "groups"])
def test_a_tensor_of_one_element_is_a_number_that_schedulers_write_into(where: str, shape: tuple[int, ...]):
    rate = torch.full(shape, 0.1)
    models = [net() for _ in range(2)]
    options = {"momentum": 0.9, "weight_decay": 0.01, "betas": (0.8, 0.9)}
    if where == "argument":
        as_tensors = {key: torch.full(shape, options[key]) for key in ("momentum", "weight_decay")}
        betas = tuple(torch.full(shape, beta) for beta in options["betas"])
        optimizer = mfx.Muon(models[0], lr=rate, betas=betas, **as_tensors)
    else:
        optimizer = mfx.Muon(models[0], **options)
        for group in optimizer.param_groups:
            group["lr"] = rate
    twin = mfx.Muon(models[1], lr=0.1, **options)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, twin)]
    for _ in range(3):
        for model, one, scheduler in zip(models, (optimizer, twin), schedulers, strict=True):
            one.zero_grad()
            model(torch.arange(8)).square().sum().backward()
            one.step()
            scheduler.step()
        torch.testing.assert_close(params_of(models[0]), params_of(models[1]))
    assert rate.item() == pytest.approx(0.0125)
    assert [group["lr"].shape for group in optimizer.param_groups] == [shape if where == "groups" else ()] * 2
    again = mfx.Muon(copy.deepcopy(models[0]), **options)
    again.load_state_dict(optimizer.state_dict())
    assert [float(group["lr"]) for group in again.param_groups] == [float(rate)] * 2


def test_numbers_of_numpy_count_as_floats():
    models = [net() for _ in range(2)]
    optimizers = [mfx.Muon(model) for model in models]
    for optimizer, kind in zip(optimizers, (np.float32, float), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = kind(0.5)
        optimizer.param_groups[1]["betas"] = (kind(0.5), kind(0.75))
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
    assert_equal(params_of(models[0]), params_of(models[1]))
