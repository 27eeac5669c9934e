"""Tensors with more dims than the parameters for which labels were chosen."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import stack_module_state, vmap

import muonfx as mfx
from muonfx.select import Labels, Route, default_labels, default_labels_by_name, labels, path

STACK = ((-2,), (-1,))


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))


def params_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in module.named_parameters()}


def stacked() -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in stack_module_state([model(0), model(1), model(2)])[0].items()}


def recipe(**options) -> mfx.Transform:
    orthogonalize = mfx.orthogonalize(dtype=torch.float32, **options)
    return mfx.muon_with_adamw(0.1, orthogonalize=orthogonalize, labels=default_labels(model()))


RULES = [(path("*.weight"), "muon")]
MATRIXWISE = {
    "recipe": lambda chosen: mfx.muon_with_adamw(0.1, labels=chosen),
    "orthogonalize": lambda chosen: mfx.partition({"muon": mfx.orthogonalize(), "adamw": mfx.identity()}, chosen),
    "in a chain": lambda chosen: mfx.chain(mfx.clip_by_global_norm(1.0), mfx.muon_with_adamw(labels=chosen)),
    "dims of others": lambda chosen: mfx.muon_with_adamw(
        labels=chosen, orthogonalize=mfx.orthogonalize(view=mfx.MatrixView(dims={"another.*": STACK}))
    ),
    "by leaf": lambda chosen: mfx.partition({"muon": mfx.contrib.normalize_leaves(), "adamw": mfx.identity()}, chosen),
    "dion": lambda chosen: mfx.partition({"muon": mfx.contrib.dion(0.1), "adamw": mfx.adamw()}, chosen),
}


@pytest.mark.parametrize("made", MATRIXWISE.values(), ids=MATRIXWISE)
@pytest.mark.filterwarnings("ignore:dims. 'another")
def test_a_stack_of_models_is_refused_where_labels_of_one_model_would_flatten_it(made):
    params, tx = stacked(), made(default_labels(model()))
    said = r"'0.weight' has shape \(3, 6, 4\), and its label 'muon' was chosen for shape \(6, 4\).*vmap.*MatrixView"
    with pytest.raises(ValueError, match=said):
        tx.init(params)
    with pytest.raises(ValueError, match=said):
        tx.update(params, vmap(tx.init)(params), params)
    with pytest.raises(ValueError, match=said):
        mfx.program.lower(tx, params)
    with pytest.raises(ValueError, match=said):
        mfx.TransformOptimizer({name: nn.Parameter(param) for name, param in params.items()}, tx)


@pytest.mark.parametrize("wrapped", [False, True])
def test_each_model_of_a_stack_is_updated_as_alone_by_both_ways_that_the_error_shows(wrapped):
    params, name = stacked(), "module._orig_mod." if wrapped else ""
    params = {name + key: param for key, param in params.items()}
    tx = recipe()
    with pytest.raises(ValueError, match="vmap"):
        tx.init(params)
    got = vmap(tx.update)(params, vmap(tx.init)(params), params)[0]
    dims = mfx.MatrixView(dims={"*": STACK})
    together = recipe(view=dims)
    whole = together.update(params, together.init(params), params)[0]
    for at in range(3):
        one = {key: param[at] for key, param in params.items()}
        for key, update in tx.update(one, tx.init(one), one)[0].items():
            torch.testing.assert_close(got[key][at], update, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(whole[key][at], update, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(1, 3), max_size=2), st.sampled_from(["muon", "adamw"]))
def test_only_a_tensor_with_more_dims_that_would_be_flattened_is_refused(front, label):
    shape = (*front, 2, 3)
    chosen = Labels({"w": Route(label, shape=(2, 3))})
    tx = mfx.partition({label: mfx.muon() if label == "muon" else mfx.adamw()}, chosen)
    if front and label == "muon":
        with pytest.raises(ValueError, match="was chosen for shape"):
            tx.init({"w": torch.zeros(shape)})
    else:
        tx.init({"w": torch.zeros(shape)})
    # labels that remember no shape, those of these very parameters, and wider ones of the same dims
    for others in (
        Labels(chosen),
        Labels({"w": Route(label, shape=shape)}),
        Labels({"w": Route(label, shape=(9,) * len(shape))}),
    ):
        tx.replace(labels=others).init({"w": torch.zeros(shape)})


def test_labels_remember_the_shapes_that_they_were_chosen_for():
    module = model()
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    for chosen in (
        default_labels(module),
        default_labels_by_name(params_of(module)),
        labels(module, RULES, "adamw"),
        pickle.loads(pickle.dumps(default_labels(module))),
    ):
        assert {name: route.shape for name, route in chosen.routes.items()} == shapes
    some = default_labels(module).restrict(["0.bias"])
    assert (list(some), some.routes["0.bias"].shape) == (["0.bias"], (6,))
