"""Routing of real models of transformers and real adapters of peft: tiny, without weights, one process."""

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import muonfx as mfx

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
SCRIPT = Path(__file__).parents[2] / "scripts" / "routed_models.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
        spec = importlib.util.spec_from_file_location("routed_models", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def test_the_page_of_routed_models_is_what_the_script_writes(script):
    version = f"transformers=={script.transformers.__version__}"
    if version not in (SCRIPT.parents[1] / "requirements" / "engines.txt").read_text().split():
        pytest.skip(f"the page is of another version than {version}")
    assert script.PAGE.read_text() == script.page()


def test_muon_can_be_made_for_each_model_as_it_is_routed(script):
    for title in script.MODELS:
        model = script.build(title)
        params = {name: param.detach() for name, param in model.named_parameters()}
        mfx.muon_with_adamw(labels=mfx.default_labels(model)).init(params)


def test_query_key_and_value_of_gpt2_are_three_matrices_stored_in_out(script):
    view = mfx.default_labels(script.build("GPT-2")).views["transformer.h.0.attn.c_attn.weight"]
    assert (view.dims, view.blocks) == (((1,), (0,)), 3)


def test_parts_that_are_interleaved_are_reported_and_not_split(script):
    for title, leaf in {"GPT-NeoX": "query_key_value", "Bloom": "query_key_value", "gpt-oss": "gate_up_proj"}.items():
        routes = mfx.default_labels(script.build(title)).routes
        found = [route for name, route in routes.items() if leaf in name and route.label == "muon"]
        assert found
        assert all(route.view.blocks is None and "interleaved by" in route.reason for route in found)


def test_falcon_is_split_only_where_its_configuration_puts_heads_side_by_side(script):
    config, model, settings = script.MODELS["Falcon"]
    for multi_query, new, blocks in ((True, False, (32, 8, 8)), (False, False, None), (True, True, None)):
        changed = {**settings, "multi_query": multi_query, "new_decoder_architecture": new, "num_kv_heads": 2}
        script.MODELS["changed"] = (config, model, changed)
        routes = mfx.default_labels(script.build("changed")).routes
        del script.MODELS["changed"]
        assert routes["transformer.h.0.self_attention.query_key_value.weight"].view.blocks == blocks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)
        self.conv = nn.Conv2d(8, 8, 3)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LoraConfig", {"r": 4, "use_dora": True}),
        ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10}),
        ("LoHaConfig", {"r": 4, "use_effective_conv2d": True}),
        ("LoKrConfig", {"r": 4, "use_effective_conv2d": True}),
        ("OFTConfig", {"oft_block_size": 8, "r": 0}),
        ("BOFTConfig", {"boft_block_size": 8}),
        ("HRAConfig", {"r": 4}),
        ("VeraConfig", {"r": 4}),
        ("RandLoraConfig", {"r": 4}),
        ("IA3Config", {"feedforward_modules": []}),
        ("FourierFTConfig", {"n_frequency": 16}),
        ("C3AConfig", {"block_size": 8}),
        ("MissConfig", {"r": 4}),
        ("DeloraConfig", {"r": 4}),
        ("RoadConfig", {"group_size": 8}),
        ("ShiraConfig", {"r": 4}),
    ],
)
def test_no_factor_of_an_adapter_goes_to_muon(kind, settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
        convolutions = ["conv"] if kind in ("LoHaConfig", "LoKrConfig", "LoraConfig") else []
        settings = {"target_modules": ["up", *convolutions], **settings}
        model = peft.get_peft_model(Net(), getattr(peft, kind)(**settings))
    labels = mfx.default_labels(model)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained
    assert {labels[name] for name in trained} == {"adamw"}, {n: labels.reason(n) for n in trained}
    by_name = mfx.select.default_labels_by_name({name: torch.zeros(8, 8) for name in trained})
    assert set(by_name.values()) == {"adamw"}
