"""Routing of real models of transformers and real adapters of peft: tiny, without weights, one process."""

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.transforms.matrix_pattern import parse

pytestmark = [
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers")
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("routed_models")


@pytest.fixture(scope="module")
def survey() -> ModuleType:
    return load_script("survey_models")


ROLES = {
    "AriaModel": {"multi_modal_projector.query": "embedding"},
    "DiaForConditionalGeneration": {"logits_dense.weight": "head"},
    "FastSpeech2ConformerModel": {"speech_decoder_postnet.feat_out.weight": "head"},
    "FunnelBaseModel": {
        "encoder.blocks.#.#.attention.q_head.weight": "hidden",
        "encoder.blocks.#.#.attention.k_head.weight": "hidden",
        "encoder.blocks.#.#.attention.v_head.weight": "hidden",
    },
    "GraniteSpeech5ForCTC": {"encoder.input_linear.weight": "other"},
    "Kosmos2ForConditionalGeneration": {"image_to_text_projection.latent_query": "embedding"},
    "LayoutLMv3Model": {
        "encoder.rel_pos_x_bias.weight": "embedding",
        "encoder.rel_pos_y_bias.weight": "embedding",
    },
    "LevitModel": {"encoder.stages.#.layers.#.attention_biases": "vector"},
    "LxmertModel": {"encoder.visn_fc.visn_fc.weight": "other"},
    "Ovis2ForConditionalGeneration": {"model.vision_tower.head_linear.weight": "head"},
    "PI0ForConditionalGeneration": {"action_out_proj.weight": "head"},
}


@pytest.mark.parametrize("name", ROLES)
def test_layers_that_names_routed_wrongly_have_their_roles(survey, name):
    found = survey.roles_of(survey.build(name))
    assert {pattern: found.get(pattern) for pattern in ROLES[name]} == ROLES[name]


def test_the_survey_reports_each_difference_from_the_record(survey):
    ((name, roles),) = survey.survey(["BertModel"], 1)
    assert survey.differences(name, roles, roles) == []
    pattern = "pooler.dense.weight"
    assert survey.differences(name, {**roles, pattern: "head"}, roles) == [
        f"BertModel: {pattern}: head -> hidden"
    ]
    without = {key: role for key, role in roles.items() if key != pattern}
    assert survey.differences(name, without, roles) == [f"BertModel: {pattern}: absent -> hidden"]


def test_the_data_of_the_page_of_routed_models_is_what_the_script_writes(script):
    version = f"transformers=={script.transformers.__version__}"
    if version not in (SCRIPTS.parent / "requirements" / "engines.txt").read_text().split():
        pytest.skip(f"the data is of another version than {version}")
    for path, text in script.files().items():
        assert path.read_text() == text


def test_muon_can_be_made_for_each_model_as_it_is_routed(script):
    for title in script.MODELS:
        model = script.build(title)
        params = {name: param.detach() for name, param in model.named_parameters()}
        mfx.muon_with_adamw(labels=mfx.default_labels(model)).init(params)


def patterns(model: nn.Module, leaf: str) -> dict[str, str]:
    """The patterns of the parameters whose names contain `leaf`."""
    return {
        name: view.pattern for name, view in mfx.default_labels(model).views.items() if leaf in name
    }


def test_query_key_and_value_of_gpt2_are_three_matrices_stored_in_out(script):
    assert set(patterns(script.build("GPT-2"), "c_attn.weight").values()) == {
        "in (part=3 out) -> part out in"
    }


def test_gate_and_up_of_gpt_oss_alternate(script):
    found = set(patterns(script.build("gpt-oss"), "gate_up_proj").values())
    assert found == {"... in (dim part=2) -> ... part dim in"}


def test_keys_and_values_of_latent_attention_are_two_matrices(script):
    for title in ("DeepSeek-V3", "DeepSeek-V3.2", "GLM-5", "Kimi Linear"):
        found = set(patterns(script.build(title), "kv_b_proj").values())
        assert found == {"(heads=4 (key=8 + value=8)) in -> (heads key) in, (heads value) in"}, (
            title
        )


@pytest.mark.parametrize(
    ("name", "leaf", "pattern"),
    [
        ("MoonshineModel", "decoder.layers.0.mlp.fc1", "(part=2 out) in -> part out in"),
        (
            "Wav2Vec2ConformerModel",
            "0.conv_module.pointwise_conv1",
            "(part=2 out) ... -> part out (...)",
        ),
    ],
)
def test_values_and_gates_are_two_matrices(survey, name, leaf, pattern):
    assert set(patterns(survey.build(name), leaf).values()) == {pattern}


def test_values_and_gates_of_timm_are_two_matrices():
    layers = pytest.importorskip("timm.layers")
    model = nn.ModuleList([layers.GluMlp(16, 64) for _ in range(2)])
    assert set(patterns(model, "fc1").values()) == {"(part=2 out) in -> part out in"}


FALCON = [
    {"multi_query": multi_query, "new_decoder_architecture": new, "num_kv_heads": 2}
    for multi_query, new in ((True, False), (False, False), (True, True))
]


@pytest.mark.parametrize(
    ("title", "changed", "leaf", "split"),
    [
        *[("Falcon", changed, "query_key_value", "_split_heads") for changed in FALCON],
        ("Bloom", {}, "query_key_value", "_reshape"),
        ("Persimmon", {}, "query_key_value", "_split_heads"),
    ],
)
def test_query_key_and_value_are_those_that_the_model_computes(
    script, monkeypatch, title, changed, leaf, split
):
    """The model's own function splits the outputs of unit inputs, which are the columns of the weight."""
    config, model, settings = script.MODELS[title]
    monkeypatch.setitem(script.MODELS, title, (config, model, {**settings, **changed}))
    built = script.build(title)
    (name, text), *_ = patterns(built, leaf).items()
    weight = torch.randn(built.get_parameter(name).shape)
    heads_last = split == "_reshape"
    parts = getattr(built.get_submodule(name.rpartition(".")[0].rpartition(".")[0]), split)(
        weight.T[None]
    )
    own = parse(text).split(weight)
    own = list(own[0]) if len(own) == 1 else own
    for found, part in zip(own, parts, strict=True):
        # (heads * dim, inputs)
        rows = (part.transpose(1, 2) if heads_last else part)[0].flatten(1).T
        rows = rows.unflatten(0, (-1, part.shape[-1]))
        # Keys that several queries share are repeated.
        distinct = rows[:: len(rows) * part.shape[-1] // len(found)]
        torch.testing.assert_close(found, distinct.flatten(0, 1), rtol=0, atol=0)


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
    by_name = mfx.routing.default_labels_by_name({name: torch.zeros(8, 8) for name in trained})
    assert set(by_name.values()) == {"adamw"}


def test_an_optimizer_that_accelerate_has_wrapped_can_be_inspected():
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    watched = mfx.chain(mfx.monitor("grad", ("norm",)), mfx.adamw(0.1))
    try:
        accelerator = accelerate.Accelerator(cpu=True)
        for optimizer in (mfx.Muon(model, lr=1e-3), mfx.TransformOptimizer(model, watched)):
            wrapped = accelerator.prepare(optimizer)
            assert str(mfx.describe(wrapped)) == str(mfx.describe(optimizer))
            assert str(mfx.summary(wrapped)) == str(mfx.summary(optimizer))
            assert mfx.metrics(wrapped) == mfx.metrics(optimizer)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
