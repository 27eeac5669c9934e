"""Roles by the structure of a model, and a table of layers of real models that names alone routed wrongly.

Each row of the table recreates a part of a model of transformers, timm or diffusers: the same names and kinds of
modules in the same order, with small sizes.
"""

import cProfile
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import muonfx as mfx
from muonfx.routing import default_labels, describe
from muonfx.routing.structure import structure_of
from tests.routing.test_routing import Holder, build, lin

D = 16


class Block(nn.Module):
    """A block of a body: a norm and an MLP of width D."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = lin(4 * D, D)
        self.down = lin(D, 4 * D)


class GraphConvolution(nn.Module):
    """The layer of PyG's GCNConv, whose bias is added after the sum over neighbours."""

    def __init__(self, reads: int, returns: int) -> None:
        super().__init__()
        self.lin = nn.Linear(reads, returns, bias=False)
        self.bias = nn.Parameter(torch.zeros(returns))


class Attention(nn.Module):
    """The projections of Funnel's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q_head, self.k_head, self.v_head = lin(D, D), lin(D, D), lin(D, D)
        self.post_proj = lin(D, D)


def with_body(
    before: dict | None = None, inside: dict | None = None, after: dict | None = None
) -> nn.Module:
    """A model of two blocks, with modules or parameters before the blocks, in the first block, and after them."""
    model = build(before or {})
    model.blocks = nn.ModuleList([Block(), Block()])
    for name, child in (inside or {}).items():
        model.blocks[0].add_module(name, build(child) if isinstance(child, dict) else child)
    for name, child in (after or {}).items():
        model.add_module(name, build(child) if isinstance(child, dict) else child)
    return model


def resnet() -> nn.Module:
    """The layers of a ResNet in a list, without their names, as robot policies use it."""
    blocks = [build({"conv1": nn.Conv2d(8, 8, 3), "conv2": nn.Conv2d(8, 8, 3)}) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 8, 7), nn.Sequential(*blocks))


def table(**shapes: tuple[int, ...]) -> dict:
    """Parameters that a module of the first block holds directly."""
    return {"inside": {"owner": Holder(**shapes)}}


def first(name: str, layer: nn.Module) -> dict:
    """A layer before the blocks, by its dotted name."""
    return {"before": nested(name, layer)}


def last(name: str, layer: nn.Module) -> dict:
    """A layer after the blocks, by its dotted name."""
    return {"after": nested(name, layer)}


def nested(name: str, layer: nn.Module) -> dict:
    *above, leaf = name.split(".")
    tree: dict = {leaf: layer}
    for part in reversed(above):
        tree = {part: tree}
    return tree


# (kind, real model, the part of a model, the parameter, its label)
ROUTES = [
    (
        "table",
        "LeViT, EfficientFormer",
        table(attention_biases=(8, 49)),
        "blocks.0.owner.attention_biases",
        "adamw",
    ),
    (
        "table",
        "GLM-5 Next",
        table(index_kpool_compress_ape=(16, D)),
        "blocks.0.owner.index_kpool_compress_ape",
        "adamw",
    ),
    (
        "table",
        "GLM-5 Next",
        table(index_kpool_compress_gate=(8, D)),
        "blocks.0.owner.index_kpool_compress_gate",
        "adamw",
    ),
    ("table", "Kosmos-2", table(latent_query=(64, D)), "blocks.0.owner.latent_query", "adamw"),
    ("table", "Aria", table(query=(64, D)), "blocks.0.owner.query", "adamw"),
    (
        "table",
        "Allegro, PixArt",
        table(scale_shift_table=(6, D)),
        "blocks.0.owner.scale_shift_table",
        "adamw",
    ),
    (
        "table",
        "timm's PosEmbedRel",
        table(height_rel=(31, D)),
        "blocks.0.owner.height_rel",
        "adamw",
    ),
    ("table", "timm's PosEmbedRel", table(width_rel=(31, D)), "blocks.0.owner.width_rel", "adamw"),
    ("table", "Cosmos", table(pos_emb_t=(30, D)), "blocks.0.owner.pos_emb_t", "adamw"),
    ("table", "Cosmos", table(pos_emb_h=(30, D)), "blocks.0.owner.pos_emb_h", "adamw"),
    ("table", "Cosmos", table(pos_emb_w=(30, D)), "blocks.0.owner.pos_emb_w", "adamw"),
    ("table", "DeepSeek-V4, HY-V4", table(fn=(24, 4 * D)), "blocks.0.owner.fn", "adamw"),
    (
        "bias table",
        "LayoutLMv3",
        first("rel_pos_x_bias", lin(12, 64)),
        "rel_pos_x_bias.weight",
        "adamw",
    ),
    (
        "bias table",
        "LayoutLMv2",
        first("rel_pos_y_bias", lin(12, 64)),
        "rel_pos_y_bias.weight",
        "adamw",
    ),
    (
        "bias table",
        "PP-DocLayoutV2",
        last("encoder.rel_pos_x_bias", lin(12, 64)),
        "encoder.rel_pos_x_bias.weight",
        "adamw",
    ),
    ("head", "DeiT, SwiftFormer", last("head_dist", lin(10, D)), "head_dist.weight", "adamw"),
    (
        "head",
        "LeViT, iFormer",
        last("head_dist.linear", lin(10, D)),
        "head_dist.linear.weight",
        "adamw",
    ),
    ("head", "Dia", last("logits_dense", lin(99, D)), "logits_dense.weight", "adamw"),
    (
        "head",
        "Ovis2",
        last("vision_tower.head_linear", lin(99, D)),
        "vision_tower.head_linear.weight",
        "adamw",
    ),
    ("head", "DiT", last("proj_out_2", lin(99, D)), "proj_out_2.weight", "adamw"),
    ("head", "pi0", last("action_out_proj", lin(7, D)), "action_out_proj.weight", "adamw"),
    ("head", "SpeechT5", last("postnet.feat_out", lin(80, D)), "postnet.feat_out.weight", "adamw"),
    ("head", "SpeechT5", last("postnet.prob_out", lin(6, D)), "postnet.prob_out.weight", "adamw"),
    ("head", "ERNIE-Image", last("final_linear", lin(128, D)), "final_linear.weight", "adamw"),
    (
        "head",
        "ACE-Step",
        last("proj_out_conv", nn.ConvTranspose1d(D, 8, 2)),
        "proj_out_conv.weight",
        "adamw",
    ),
    (
        "head",
        "Ideogram",
        last("final_layer.linear", lin(99, D)),
        "final_layer.linear.weight",
        "adamw",
    ),
    (
        "head",
        "Kandinsky",
        last("out_layer.out_layer", lin(99, D)),
        "out_layer.out_layer.weight",
        "adamw",
    ),
    ("head", "Granite Speech", last("encoder.out", lin(42, D)), "encoder.out.weight", "adamw"),
    (
        "head",
        "LightGlue",
        last("decoder_b.conv_score_b", nn.Conv2d(D, 65, 1)),
        "decoder_b.conv_score_b.weight",
        "adamw",
    ),
    (
        "head",
        "ColModernVBERT",
        last("embedding_proj_layer", lin(99, D)),
        "embedding_proj_layer.weight",
        "adamw",
    ),
    ("head", "MiniMax Music", last("audio_heads.0", lin(99, D)), "audio_heads.0.weight", "adamw"),
    ("head", "MusicGen", last("lm_heads.0", lin(2 * D, D)), "lm_heads.0.weight", "adamw"),
    ("head", "numbered", last("classifier_2", lin(10, D)), "classifier_2.weight", "adamw"),
    (
        "head",
        "a critic with a distribution of values",
        last("value", lin(51, D)),
        "value.weight",
        "adamw",
    ),
    (
        "head",
        "a model that defines its head first",
        {"before": {"tokens": nn.Embedding(99, D), "readout": lin(99, D)}},
        "readout.weight",
        "adamw",
    ),
    (
        "head",
        "a graph convolution",
        {"after": {"conv": GraphConvolution(D, 7)}},
        "conv.lin.weight",
        "adamw",
    ),
    (
        "head",
        "a policy with a vector of deviations",
        {"after": {"action_net": lin(6, D), "dist": Holder(log_std=(6,))}},
        "action_net.weight",
        "adamw",
    ),
    (
        "head",
        "CLIP",
        {"after": {"visual": Holder(proj=(D, 8))}},
        "visual.proj",
        "adamw",
    ),
    (
        "head",
        "the decoder of CoCa",
        {"after": {"text_decoder": Holder(text_projection=(D, 99))}},
        "text_decoder.text_projection",
        "adamw",
    ),
    (
        "hidden",
        "a projection that a block holds without a layer",
        table(proj=(D, D)),
        "blocks.0.owner.proj",
        "muon",
    ),
    (
        "head",
        "nViT of vit-pytorch",
        {"after": {"to_pred": lin(10, D), "logit_scale": Holder(scale=(10,))}},
        "to_pred.weight",
        "adamw",
    ),
    (
        "input",
        "Allegro",
        first("pos_embed.proj", nn.Conv2d(4, D, 2)),
        "pos_embed.proj.weight",
        "adamw",
    ),
    (
        "input",
        "ERNIE-Image",
        first("x_embedder.proj", nn.Conv2d(128, D, 1)),
        "x_embedder.proj.weight",
        "adamw",
    ),
    (
        "input",
        "Flux 3",
        first("x_embedders.image", lin(D, 99)),
        "x_embedders.image.weight",
        "adamw",
    ),
    (
        "input",
        "Cosmos",
        first("patch_embed_base.proj", lin(D, 72)),
        "patch_embed_base.proj.weight",
        "adamw",
    ),
    ("input", "DAC", first("embedder.conv1", nn.Conv2d(8, D, 3)), "embedder.conv1.weight", "adamw"),
    (
        "input",
        "Kosmos-2.5",
        first("embeddings.patch_projection", lin(D, 75)),
        "embeddings.patch_projection.weight",
        "adamw",
    ),
    (
        "input",
        "Pix2Struct",
        first("embeddings.patch_projection", lin(D, D)),
        "embeddings.patch_projection.weight",
        "adamw",
    ),
    (
        "input",
        "ACT",
        {"after": {"state": lin(D, 7), "action_head": lin(6, D)}},
        "state.weight",
        "adamw",
    ),
    (
        "input",
        "SmolVLA",
        {"after": {"action_in": lin(D, 6), "action_out": lin(6, D)}},
        "action_in.weight",
        "adamw",
    ),
    ("input", "LTX-Video", first("proj_in", lin(D, 99)), "proj_in.weight", "adamw"),
    ("input", "JoyImage", first("img_in", nn.Conv3d(8, D, (1, 2, 2))), "img_in.weight", "adamw"),
    (
        "input",
        "Granite Speech",
        first("encoder.input_linear", lin(D, 80)),
        "encoder.input_linear.weight",
        "adamw",
    ),
    (
        "input",
        "LASR",
        first("subsampler.dense_0", lin(D, 80)),
        "subsampler.dense_0.weight",
        "adamw",
    ),
    ("input", "Mochi", first("encoder.proj_in", lin(D, 15)), "encoder.proj_in.weight", "adamw"),
    ("input", "LXMERT", first("visn_fc.visn_fc", lin(D, 99)), "visn_fc.visn_fc.weight", "adamw"),
    (
        "hidden",
        "Funnel",
        {"inside": {"attention": Attention()}},
        "blocks.0.attention.q_head.weight",
        "muon",
    ),
    (
        "hidden",
        "Funnel",
        {"inside": {"attention": Attention()}},
        "blocks.0.attention.k_head.weight",
        "muon",
    ),
    (
        "hidden",
        "Funnel",
        {"inside": {"attention": Attention()}},
        "blocks.0.attention.v_head.weight",
        "muon",
    ),
    ("hidden", "VQ-BeT", {"before": {"backbone": resnet()}}, "backbone.1.0.conv1.weight", "muon"),
    # what is right must stay right
    ("hidden", "BERT", last("pooler.dense", lin(D, D)), "pooler.dense.weight", "muon"),
    (
        "hidden",
        "a connector",
        last("aligner", build({"a": lin(2 * D, D), "b": lin(D, 4 * D)})),
        "aligner.a.weight",
        "muon",
    ),
    (
        "hidden",
        "DiT",
        {"after": {"proj_out_1": lin(2 * D, D), "proj_out_2": lin(99, D)}},
        "proj_out_1.weight",
        "muon",
    ),
    ("hidden", "nanoGPT's records", table(qkvo_w=(4 * D, D)), "blocks.0.owner.qkvo_w", "muon"),
    ("hidden", "nanoGPT's records", table(c_fc=(4 * D, D)), "blocks.0.owner.c_fc", "muon"),
    ("hidden", "Inkling", table(proj=(16, 4 * D)), "blocks.0.owner.proj", "muon"),
]


@pytest.mark.parametrize(
    ("kind", "source", "part", "name", "label"), ROUTES, ids=lambda value: str(value)[:40]
)
def test_layers_of_real_models_are_routed_by_structure(kind, source, part, name, label):
    labels = default_labels(with_body(**part))
    assert labels[name] == label, (kind, source, labels.reason(name))
    assert {
        labels[f"blocks.{index}.{layer}.weight"] for index in (0, 1) for layer in ("up", "down")
    } == {"muon"}


def test_the_table_of_real_models_has_forty_corrections_of_each_kind():
    corrected = [kind for kind, _, _, _, label in ROUTES if label == "adamw" or kind == "hidden"]
    assert len(corrected) >= 40
    assert set(corrected) == {"table", "bias table", "head", "input", "hidden"}


# No names of q, k, v and o.
plain_names = st.text("abcdefghijlmnprstuwxyz", min_size=1, max_size=12).filter(
    lambda name: name not in ("blocks", "module") and not hasattr(nn.Module(), name)
)


@given(plain_names, st.integers(5, 300).filter(lambda width: width % D))
def test_the_last_layer_of_a_model_with_blocks_is_for_adamw_under_any_name(name, outputs):
    labels = default_labels(with_body(after={name: lin(outputs, D)}))
    assert labels[f"{name}.weight"] == "adamw", labels.reason(f"{name}.weight")


@given(plain_names, st.integers(5, 300).filter(lambda width: width != D))
def test_the_first_layer_of_a_model_with_blocks_is_for_adamw_under_any_name(name, features):
    labels = default_labels(with_body(before={name: lin(D, features)}))
    assert labels[f"{name}.weight"] == "adamw", labels.reason(f"{name}.weight")


def test_a_head_that_returns_as_many_features_a_block_as_an_image_has_channels_is_a_head():
    labels = default_labels(
        with_body({"stem": nn.Conv2d(3, D, 4)}, after={"mean": lin(2 * 3, D)}), roles=True
    )
    assert labels["mean.weight"] == "head"


def test_a_dict_with_numbers_as_keys_is_a_list_of_blocks():
    model = with_body({"stem": lin(D, 75)}, after={"last": lin(99, D)})
    model.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(model.blocks)})
    labels = default_labels(model, roles=True)
    names = ("stem.weight", "blocks.1.up.weight", "last.weight")
    assert [labels[name] for name in names] == ["other", "hidden", "head"]


def test_each_of_several_raw_inputs_is_an_input():
    before = {
        "joints": lin(D, 17),
        "camera": nn.Sequential(lin(24, 51), nn.ReLU(), lin(D, 24)),
        "mix": lin(D, 2 * D),
    }
    labels = default_labels(with_body(before), roles=True)
    roles = [labels[f"{name}.weight"] for name in ("joints", "camera.0", "camera.2", "mix")]
    assert roles == ["other", "other", "hidden", "hidden"]


def test_a_layer_that_reads_the_halves_of_a_gated_one_is_hidden():
    gated = build({"up": lin(72, D), "down": lin(D, 36)})
    assert (
        default_labels(with_body({"tokens": nn.Embedding(9, D), "gated": gated}))[
            "gated.down.weight"
        ]
        == "muon"
    )


def test_the_projections_of_a_contrastive_model_are_heads_at_any_width():
    for name in ("text_projection", "visual_projection", "project_q"):
        for width in (D, 24):
            model = with_body(after={name: lin(width, D)})
            model.logit_scale = nn.Parameter(torch.zeros(()))
            assert default_labels(model, roles=True)[f"{name}.weight"] == "head"
    # Grounding DINO.
    hidden = with_body(before={"tokens": nn.Embedding(9, 24), "text_projection": lin(D, 24)})
    assert default_labels(hidden)["text_projection.weight"] == "muon"


def test_a_layer_that_reads_a_whole_and_a_half_of_earlier_features_is_hidden():
    before = {"tokens": nn.Embedding(9, D), "split": lin(24, D), "join": lin(D, 36)}
    assert default_labels(with_body(before))["join.weight"] == "muon"


def test_a_list_of_tables_has_the_name_of_the_list():
    for name, label in (("hints", "adamw"), ("prompts", "adamw"), ("w1", "muon")):
        owner = nn.Module()
        owner.add_module(name, nn.ParameterList([torch.zeros(9, D), torch.zeros(7, D)]))
        labels = default_labels(with_body(inside={"owner": owner}))
        assert {labels[f"blocks.0.owner.{name}.{index}"] for index in (0, 1)} == {label}


def test_a_layer_between_two_bodies_is_hidden():
    model = build({"embed": nn.Embedding(32, D)})
    model.vision = with_body(before={"stem": nn.Conv2d(3, D, 4)})
    model.connector = build({"linear_1": lin(24, D), "linear_2": lin(40, 24)})
    model.text = build({"adapt": lin(D, 40)})
    model.text.blocks = nn.ModuleList([Block(), Block()])
    model.lm_head = lin(32, D)
    labels = default_labels(model)
    adamw = {
        name
        for name, label in labels.items()
        if label == "adamw" and name.endswith("weight") and "norm" not in name
    }
    assert adamw == {"embed.weight", "vision.stem.weight", "lm_head.weight"}


def two_layers(outputs: int) -> nn.Module:
    return nn.Sequential(lin(D, D), nn.ReLU(), lin(outputs, D))


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        (lambda: nn.ModuleDict({"a": lin(5, D), "b": lin(7, D)}), "a"),
        (lambda: nn.ModuleDict({"a": two_layers(5), "b": two_layers(7)}), "b.2"),
        (lambda: nn.ModuleList([two_layers(5), two_layers(7)]), "1.2"),
    ],
    ids=["layers", "a dict of modules", "a list of modules"],
)
def test_each_of_several_heads_is_a_head(heads, name):
    labels = default_labels(with_body(after={"tasks": heads()}), roles=True)
    assert labels[f"tasks.{name}.weight"] == "head"
    assert labels["blocks.1.up.weight"] == "hidden"


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("order", [("policy", "value"), ("value", "policy")])
@pytest.mark.filterwarnings("error")
def test_a_head_of_a_multiple_of_its_inputs_is_a_head(count, order):
    layers = {"policy": lin(count * D, D), "value": lin(1, D)}
    labels = default_labels(with_body(after={name: layers[name] for name in order}), roles=True)
    assert labels["policy.weight"] == "head"
    # A language model whose vocabulary is such a multiple, as one of 256 bytes.
    tokens = nn.Embedding(count * D, D)
    labels = default_labels(
        with_body({"tokens": tokens}, after={"readout": lin(count * D, D)}), roles=True
    )
    assert labels["readout.weight"] == "head"
    tasks = nn.ModuleDict({"a": lin(3, D), "b": lin(count * D, D)})
    assert default_labels(with_body(after={"tasks": tasks}), roles=True)["tasks.b.weight"] == "head"


def test_a_sequential_of_sequentials_has_a_head():
    model = nn.Sequential(
        nn.Sequential(lin(D, 32), nn.ReLU()),
        nn.Sequential(lin(D, D), nn.ReLU()),
        nn.Sequential(lin(10, D)),
    )
    assert default_labels(model) == {
        "0.0.weight": "muon",
        "1.0.weight": "muon",
        "2.0.weight": "adamw",
    }


def test_the_blocks_inside_a_head_are_hidden_and_its_other_layers_are_heads():
    head = with_body(before={"noisy": lin(D, 24)}, after={"final": lin(24, D)})  # VibeVoice
    labels = default_labels(
        with_body({"tokens": nn.Embedding(9, D)}, after={"diffusion_head": head}), roles=True
    )
    names = ("blocks.0.up", "blocks.1.down", "noisy", "final")
    assert [labels[f"diffusion_head.{name}.weight"] for name in names] == [
        "hidden",
        "hidden",
        "head",
        "head",
    ]


@pytest.mark.filterwarnings("error")
def test_only_embeddings_are_asked_for_the_width_of_an_embedding():
    class Prior(nn.Module):
        """A model with a deprecated attribute, as PriorTransformer of diffusers."""

        @property
        def embedding_dim(self) -> int:
            warnings.warn("embedding_dim is deprecated", FutureWarning, stacklevel=2)
            return D

    prior = Prior()
    prior.blocks = nn.ModuleList([Block(), Block()])
    prior.head = lin(100, D)
    assert default_labels(prior)["head.weight"] == "adamw"


def calls_of_structure(blocks: int) -> int:
    """The number of function calls that read the structure of a model whose blocks are sequences."""
    body = nn.ModuleList(
        [nn.Sequential(lin(2 * D, D), nn.ReLU(), lin(D, 2 * D)) for _ in range(blocks)]
    )
    profile = cProfile.Profile()
    profile.runcall(structure_of, build({"blocks": body, "head": lin(100, D)}))
    return sum(entry.callcount for entry in profile.getstats())


def test_the_structure_is_read_in_time_linear_in_the_number_of_blocks():
    assert calls_of_structure(80) < 2.5 * calls_of_structure(40)


class Dense(nn.Module):
    """A layer with its activation."""

    def __init__(self, outputs: int, features: int) -> None:
        super().__init__()
        self.linear, self.act = lin(outputs, features), nn.ReLU()


def test_a_table_has_a_reason_that_names_the_module():
    labels = default_labels(with_body(**table(odd=(9, D))))
    assert (
        labels.reason("blocks.0.owner.odd")
        == "table (a 2-D parameter of Holder, not the weight of a layer)"
    )


def test_a_wrapper_around_a_model_changes_no_role():
    model = with_body({"stem": lin(D, 75)}, {"owner": Holder(odd=(9, D))}, {"last": lin(99, D)})
    wrapped = default_labels(build({"module": model}), roles=True)
    assert {name.removeprefix("module."): role for name, role in wrapped.items()} == default_labels(
        model, roles=True
    )


def test_a_compiled_model_has_the_roles_of_the_model():
    model = with_body({"stem": lin(D, 75)}, after={"norm_out": nn.LayerNorm(D), "last": lin(99, D)})
    compiled = default_labels(torch.compile(model), roles=True)
    assert compiled["_orig_mod.last.weight"] == "head"
    assert {
        name.removeprefix("_orig_mod."): role for name, role in compiled.items()
    } == default_labels(model, roles=True)


class QueryProjector(nn.Linear):
    """A layer that also holds a table."""

    def __init__(self) -> None:
        super().__init__(D, D, bias=False)
        self.query = nn.Parameter(torch.zeros(9, D))


def test_a_table_beside_the_weight_of_a_layer_is_a_table():
    labels = default_labels(with_body(inside={"layer": QueryProjector()}))
    assert (labels["blocks.0.layer.weight"], labels["blocks.0.layer.query"]) == ("muon", "adamw")


def test_matrices_that_a_known_module_holds_directly_are_no_tables():
    model = nn.ModuleList(
        [
            nn.MultiheadAttention(8, 2, kdim=4, vdim=6, bias=False),
            nn.GRU(8, 8, bias=False),
            nn.LSTMCell(8, 8, bias=False),
        ]
    )
    assert set(default_labels(model).values()) == {"muon"}


# -------------------------------------------------------------------------------------------- without a head


def argument_of(message: str, name: str) -> object:
    """The argument that a message prints as a line of code."""
    (line, *_) = [
        line.strip() for line in message.splitlines() if line.strip().startswith(f"{name}=")
    ]
    return eval(f"dict({line})", {"muonfx": mfx})[name]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))


class Net(nn.Module):
    """The usual first network of a tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(32, 10)


def actor_critic() -> nn.Module:
    return build({"fc1": lin(64, 8), "fc2": lin(64, 64), "policy": lin(4, 64), "value": lin(1, 64)})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (mlp, "3.weight"),
        (Net, "fc2.weight"),
        (lambda: nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8)), "1.weight"),
        (lambda: nn.Sequential(Dense(8, 32), Dense(10, 8)), "1.linear.weight"),
        (actor_critic, "policy.weight"),
        (
            lambda: build(
                {"torso": lin(64, 8), "flat": lin(8, 48), "policy": lin(6, 64), "value": lin(1, 64)}
            ),
            "policy.weight",
        ),
        (
            lambda: build({"torso": lin(64, 8), "policy": two_layers(6), "value": two_layers(1)}),
            "policy.2.weight",
        ),
        (
            lambda: with_body(before={"tokens": nn.Embedding(99, D), "readout": lin(8 * D, D)}),
            "readout.weight",
        ),
    ],
)
def test_a_model_without_a_recognized_head_is_warned_of_with_the_line_that_labels_it(make, name):
    model = make()
    with pytest.warns(UserWarning, match=f"no output head.*{name!r}.*'muon'") as caught:
        optimizer = mfx.Muon(model)
    assert caught[0].filename == __file__
    assert [group["label"] for group in optimizer.param_groups if name in group["param_names"]] == [
        "muon"
    ]
    labels = argument_of(str(caught[0].message), "labels")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = mfx.Muon(model, labels=labels)
    assert [group["label"] for group in optimizer.param_groups if name in group["param_names"]] == [
        "adamw"
    ]


def test_networks_in_one_module_are_read_as_one_network():
    networks = nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)),
            "discriminator": nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)),
        }
    )
    # As the discriminator reads 2 features.
    assert default_labels(networks)["generator.2.weight"] == "muon"
    with pytest.warns(UserWarning, match=r"no output head.*'2.weight' \(2, 32\)"):
        default_labels(networks["generator"])
    rule = (mfx.routing.path("generator.2.*"), "adamw")
    assert default_labels(networks, [rule])["generator.2.weight"] == "adamw"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("options", "hidden", "head"),
    [
        ({}, "muon", "adamw"),
        ({"roles": True}, "hidden", "head"),
        ({"muon": "m", "other": "o"}, "m", "o"),
    ],
)
def test_the_line_that_labels_a_head_has_the_labels_of_the_caller(
    options: dict[str, Any], hidden: str, head: str
):
    with pytest.warns(UserWarning, match="no output head") as caught:
        before = default_labels(mlp(), **options)
    after = argument_of(str(caught[0].message), "labels")(mlp())
    assert (before["3.weight"], after["3.weight"]) == (hidden, head)


@pytest.mark.filterwarnings("error")
def test_the_line_that_labels_a_head_does_not_depend_on_wrappers():
    model = mlp()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    with pytest.warns(UserWarning, match="no output head") as caught:
        mfx.Muon(model)
    text = str(caught[0].message)
    assert "path('3.weight')" in text
    for wrapped_or_not in (model, mlp()):
        optimizer = mfx.Muon(wrapped_or_not, labels=argument_of(text, "labels"))
        (names,) = (
            group["param_names"] for group in optimizer.param_groups if group["label"] == "muon"
        )
        assert not any(name.startswith("3.") for name in names)


def tied() -> nn.Module:
    model = build({"tokens": nn.Embedding(32, D), "up": lin(D, D), "back": lin(32, D)})
    model.back.weight = model.tokens.weight
    return model


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "make",
    [
        lambda: with_body(first("stem", nn.Conv2d(3, D, 4))["before"]),
        lambda: with_body(after={"pooler": build({"dense": lin(D, D)})}),
        lambda: build({"fc1": lin(32, D), "head": lin(10, 32)}),
        lambda: build({"fc1": lin(32, D), "wte": nn.Embedding(10, D)}),
        lambda: nn.Linear(8, 8),
        tied,
        lambda: with_body({"tokens": nn.Embedding(99, D)}, after={"value": lin(1, D)}),
        lambda: with_body({"tokens": nn.Embedding(99, D)}),
    ],
    ids=[
        "an encoder",
        "a pooler",
        "a head by name",
        "an embedding last",
        "a layer",
        "a tied head",
        "a reward model",
        "a base model",
    ],
)
def test_a_model_whose_last_layer_is_no_question_is_not_warned_of(make):
    default_labels(make())


@pytest.mark.filterwarnings("error")
def test_a_rule_for_the_last_layer_or_another_head_silences_the_warning():
    for rule in ((mfx.routing.path("3.*"), "muon"), (mfx.routing.path("1.weight"), "adamw")):
        default_labels(mlp(), [rule])


# ------------------------------------------------------------------------------------------ fused without a word


def wrapped(**children: nn.Module) -> nn.Module:
    model = nn.ModuleList([build({"norm": nn.LayerNorm(D), **children}) for _ in range(2)])
    for block in model:
        block.proj = lin(D, D)
    return model


FUSED = {
    "LeViT, a wrapper of LoRA": (
        lambda: wrapped(qkv=build({"linear": lin(3 * D, D)})),
        "0.qkv.linear.weight",
        3,
    ),
    "a base layer": (
        lambda: wrapped(qkv=build({"base_layer": lin(3 * D, D)})),
        "0.qkv.base_layer.weight",
        3,
    ),
    "a Sequential": (lambda: wrapped(qkv=nn.Sequential(lin(3 * D, D))), "0.qkv.0.weight", 3),
    "a convolution": (lambda: wrapped(qkv=nn.Conv2d(D, 3 * D, 1)), "0.qkv.weight", 3),
    "DiT": (
        lambda: wrapped(adaLN_modulation=nn.Sequential(nn.SiLU(), lin(6 * D, D))),
        "0.adaLN_modulation.1.weight",
        6,
    ),
    "PixArt": (
        lambda: wrapped(adaln_single=build({"linear": lin(6 * D, D)})),
        "0.adaln_single.linear.weight",
        6,
    ),
    "Qwen-Image": (
        lambda: wrapped(img_mod=nn.Sequential(nn.SiLU(), lin(6 * D, D))),
        "0.img_mod.1.weight",
        6,
    ),
    "Flux": (
        lambda: wrapped(modulation=build({"lin": lin(3 * D, D)})),
        "0.modulation.lin.weight",
        3,
    ),
    "a narrow condition": (
        lambda: wrapped(adaln=build({"linear": lin(6 * D, 5)})),
        "0.adaln.linear.weight",
        6,
    ),
    "GEGLU": (lambda: wrapped(wi=lin(8 * D, D), wo=lin(D, 4 * D)), "0.wi.weight", 2),
    "SwiGLU, nested": (
        lambda: wrapped(
            net=nn.Sequential(build({"proj": lin(8 * D, D)}), nn.Dropout(), lin(D, 4 * D))
        ),
        "0.net.0.proj.weight",
        2,
    ),
    "Conformer": (
        lambda: wrapped(
            pw1=nn.Conv1d(D, 2 * D, 1), dw=nn.Conv1d(D, D, 7, groups=D), pw2=nn.Conv1d(D, D, 1)
        ),
        "0.pw1.weight",
        2,
    ),
    "Conformer, beside an MLP": (
        lambda: wrapped(
            mlp=build({"up": lin(4 * D, D), "down": lin(D, 4 * D)}),
            conv=build(
                {
                    "pw1": nn.Conv1d(D, 2 * D, 1),
                    "dw": nn.Conv1d(D, D, 7, groups=D),
                    "pw2": nn.Conv1d(D, D, 1),
                }
            ),
        ),
        "0.conv.pw1.weight",
        2,
    ),
    "Sana": (
        lambda: wrapped(
            up=nn.Conv2d(D, 8 * D, 1),
            dw=nn.Conv2d(8 * D, 8 * D, 3, groups=8 * D),
            down=nn.Conv2d(4 * D, D, 1),
        ),
        "0.up.weight",
        2,
    ),
    "MambaOut, of two stages": (
        lambda: nn.ModuleList(
            [
                build({"fc1": lin(8 * width, width), "fc2": lin(width, 4 * width)})
                for width in (D, 2 * D)
            ]
        ),
        "0.fc1.weight",
        2,
    ),
    "Mamba": (
        lambda: wrapped(
            mixer=build(
                {"in_proj": lin(4 * D, D), "conv": nn.Conv1d(2 * D, 2 * D, 4, groups=2 * D)}
            ),
            out=lin(D, 2 * D),
        ),
        "0.mixer.in_proj.weight",
        2,
    ),
    "queries with a gate": (
        lambda: wrapped(
            attn=build({"q_proj": lin(96, D), "k_proj": lin(8, D), "o_proj": lin(D, 48)})
        ),
        "0.attn.q_proj.weight",
        2,
    ),
    "gate and up": (
        lambda: wrapped(gate_up_proj=build({"linear": lin(4 * D, D)})),
        "0.gate_up_proj.linear.weight",
        2,
    ),
}


@pytest.mark.parametrize(("make", "name", "parts"), FUSED.values(), ids=FUSED)
def test_a_fused_layer_of_unknown_code_is_warned_of_with_a_line_that_splits_it_as_the_report_shows(
    make, name, parts
):
    model = make()
    with pytest.warns(UserWarning, match="several matrices each") as caught:
        optimizer = mfx.Muon(model)
    (warning,) = [str(warning.message) for warning in caught]
    assert repr(name) in warning
    reason = describe(optimizer).labels.reason(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split = mfx.Muon(model, orthogonalize=argument_of(warning, "orthogonalize"))
    view = describe(split).labels.views[name]
    assert reason.endswith(f"maybe fused, not split: {view.text(name)}")
    (matrices,) = mfx.MatrixView(view.text(name)).of([name])[0].split(model.get_parameter(name))
    rows, *_ = model.get_parameter(name).shape
    assert matrices.shape[:2] == (parts, rows // parts)


def test_the_pattern_for_one_matrix_keeps_it_whole_without_a_warning():
    for make, name, _ in FUSED.values():
        with pytest.warns(UserWarning, match="several matrices each") as caught:
            mfx.Muon(make())
        view = mfx.MatrixView(eval(str(caught[0].message).splitlines()[-1]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = mfx.Muon(make(), orthogonalize=mfx.orthogonalize(view=view))
        assert "maybe fused" not in describe(optimizer).labels.reason(name)


def of_package(module: str, name: str, **attributes: object) -> nn.Module:
    layer = type(name, (nn.Module,), {"__module__": module})()
    for key, value in attributes.items():
        setattr(layer, key, value)
    return layer


TWO = "(part=2 out) in -> part out in"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("layer", "name", "pattern"),
    [
        (
            of_package("timm.layers.attention", "Attention", qkv=lin(3 * D, D)),
            "qkv",
            "(part=3 out) in -> part out in",
        ),
        (
            of_package("timm.models.visformer", "Attention", qkv=nn.Conv2d(D, 3 * D, 1)),
            "qkv",
            "(part=3 out) ... -> part out (...)",
        ),
        (
            of_package(
                "timm.models.maxxvit",
                "AttentionCl",
                qkv=lin(3 * D, D),
                head_first=True,
                num_heads=2,
            ),
            "qkv",
            "(heads=2 part=3 dim) in -> part (heads dim) in",
        ),
        (
            of_package(
                "timm.models.levit",
                "Attention",
                qkv=build({"linear": lin(4 * D, D)}),
                num_heads=4,
                key_dim=4,
                val_dim=8,
            ),
            "qkv.linear",
            "(heads=4 (query=4 + key=4 + value=8)) in -> (heads query) in, (heads key) in, (heads value) in",
        ),
        (
            of_package("diffusers.models.normalization", "AdaLayerNormZero", linear=lin(6 * D, D)),
            "linear",
            "(part=6 out) in -> part out in",
        ),
        (of_package("timm.layers.mlp", "GluMlp", fc1=lin(4 * D, D)), "fc1", TWO),
        (of_package("diffusers.models.activations", "GEGLU", proj=lin(8 * D, D)), "proj", TWO),
        (of_package("diffusers.models.activations", "SwiGLU", proj=lin(8 * D, D)), "proj", TWO),
        (
            of_package(
                "diffusers.models.transformers.dit",
                "DiTTransformer2DModel",
                proj_out_1=lin(2 * D, D),
            ),
            "proj_out_1",
            TWO,
        ),
        (
            of_package("transformers.models.moonshine", "MoonshineDecoderMLP", fc1=lin(4 * D, D)),
            "fc1",
            TWO,
        ),
        (
            of_package(
                "transformers.models.kyutai", "KyutaiSpeechToTextGatingMLP", fc1=lin(4 * D, D)
            ),
            "fc1",
            TWO,
        ),
        (
            of_package("transformers.models.lfm3", "Lfm3ShortConv", in_proj=lin(3 * D, D)),
            "in_proj",
            "(part=3 out) in -> part out in",
        ),
        (
            of_package(
                "transformers.models.qwen3_next",
                "Qwen3NextAttention",
                q_proj=lin(64, D),
                config=SimpleNamespace(num_attention_heads=4),
                head_dim=8,
            ),
            "q_proj",
            "(heads=4 (query=8 + gate=8)) in -> (heads query) in, (heads gate) in",
        ),
        (
            of_package(
                "transformers.models.axk2",
                "AXK2Attention",
                q_gate_proj=lin(40, D),
                num_heads=2,
                qk_head_dim=12,
                v_head_dim=8,
            ),
            "q_gate_proj",
            "(heads=2 (query=12 + gate=8)) in -> (heads query) in, (heads gate) in",
        ),
        (
            of_package(
                "transformers.models.levit",
                "LevitAttention",
                queries_keys_values=build({"linear": lin(4 * D, D)}),
                num_attention_heads=4,
                key_dim=4,
            ),
            "queries_keys_values.linear",
            "(heads=4 (query=4 + key=4 + value)) in -> (heads query) in, (heads key) in, (heads value) in",
        ),
        (
            of_package(
                "transformers.models.x", "GraniteSpeechConformerConvModule", up_conv=lin(4 * D, D)
            ),
            "up_conv",
            TWO,
        ),
        (
            of_package(
                "transformers.models.seamless",
                "SeamlessM4TConformerAdapterLayer",
                residual_conv=lin(2 * D, D),
            ),
            "residual_conv",
            TWO,
        ),
        (
            of_package(
                "transformers.models.speech_to_text",
                "Conv1dSubsampler",
                conv_layers=nn.ModuleList([lin(2 * D, D)]),
            ),
            "conv_layers.0",
            TWO,
        ),
        (
            of_package("timm.models.focalnet", "FocalModulation", f=lin(2 * D + 3, D), dim=D),
            "f",
            "(query=16 + context=16 + gates) in -> query in, context in, gates in",
        ),
        (of_package("timm.models.convit", "GPSA", qk=lin(2 * D, D)), "qk", TWO),
        (
            of_package(
                "timm.models.vit",
                "ParallelScalingBlock",
                in_proj=lin(7 * D, D),
                num_heads=2,
                head_dim=8,
            ),
            "in_proj",
            "(mlp + query=16 + key=16 + value=16) in -> mlp in, query in, key in, value in",
        ),
        # Its heads are half as wide, and twice as many.
        (
            of_package(
                "timm.models.vit",
                "DiffParallelScalingBlock",
                in_proj=lin(7 * D, D),
                num_heads=2,
                head_dim=4,
            ),
            "in_proj",
            "(mlp + query=16 + key=16 + value=16) in -> mlp in, query in, key in, value in",
        ),
        (
            of_package(
                "torchtitan.models.deepseek_v3",
                "Attention",
                wkv_b=lin(40, D),
                n_heads=2,
                qk_nope_head_dim=12,
                v_head_dim=8,
            ),
            "wkv_b",
            "(heads=2 (key=12 + value=8)) in -> (heads key) in, (heads value) in",
        ),
        (
            of_package(
                "torchtitan.models.flux",
                "SingleStreamBlock",
                linear1=lin(7 * D, D),
                hidden_size=D,
                mlp_hidden_dim=4 * D,
            ),
            "linear1",
            "(query=16 + key=16 + value=16 + mlp=64) in -> query in, key in, value in, mlp in",
        ),
        (
            of_package("transformers.models.x", "DeepseekV4Indexer", kv_proj=lin(2 * D, D)),
            "kv_proj",
            TWO,
        ),
        (of_package("timm.models.pvt_v2", "Attention", kv=lin(2 * D, D)), "kv", TWO),
        (
            of_package(
                "timm.layers",
                "HaloAttn",
                kv=lin(2 * D, D),
                num_heads=2,
                dim_head_qk=4,
                dim_head_v=12,
            ),
            "kv",
            "(heads=2 (key=4 + value=12)) in -> (heads key) in, (heads value) in",
        ),
        (
            of_package(
                "transformers.models.levit",
                "LevitAttentionSubsample",
                keys_values=lin(3 * D, D),
                num_attention_heads=4,
                key_dim=4,
            ),
            "keys_values",
            "(heads=4 (key=4 + value)) in -> (heads key) in, (heads value) in",
        ),
        (
            of_package(
                "transformers.models.xlstm",
                "xLSTMLayer",
                qkv_opreact=lin(6 * D, D),
                qk_dim=D,
                v_dim=2 * D,
            ),
            "qkv_opreact",
            "(query=16 + key=16 + value=32 + gate=32) in -> query in, key in, value in, gate in",
        ),
        (
            of_package(
                "timm.layers", "BottleneckAttn", qkv=lin(4 * D, D), dim_out_qk=D, dim_out_v=2 * D
            ),
            "qkv",
            "(query=16 + key=16 + value=32) in -> query in, key in, value in",
        ),
        (
            of_package(
                "timm.layers", "LambdaLayer", qkv=lin(32, D), num_heads=2, dim_qk=8, dim_v=8
            ),
            "qkv",
            "(query=16 + key=8 + value=8) in -> query in, key in, value in",
        ),
        (
            of_package("timm.models.efficientvit_mit", "LiteMLA", qkv=lin(48, D), dim=8),
            "qkv",
            "(heads part=3 dim=8) in -> part (heads dim) in",
        ),
        (
            of_package(
                "timm.models.mobilevit",
                "LinearSelfAttention",
                qkv_proj=lin(1 + 2 * D, D),
                embed_dim=D,
            ),
            "qkv_proj",
            "(query=1 + key=16 + value=16) in -> query in, key in, value in",
        ),
        (
            of_package("timm.models.lowformer", "ConvAttention", pwise=lin(3 * D, D), num_heads=2),
            "pwise",
            "(heads=2 part=3 dim) in -> part (heads dim) in",
        ),
        (
            of_package(
                "timm.models.levit",
                "AttentionDownsample",
                kv=lin(3 * D, D),
                num_heads=4,
                key_dim=4,
                val_dim=8,
            ),
            "kv",
            "(heads=4 (key=4 + value=8)) in -> (heads key) in, (heads value) in",
        ),
        (
            of_package("timm.layers", "SelectiveKernelAttn", fc_select=lin(2 * D, D), num_paths=2),
            "fc_select",
            TWO,
        ),
        (
            of_package(
                "torchtitan.models.deepseek_v3",
                "Attention",
                wkv_a=lin(20, D),
                kv_lora_rank=16,
                qk_rope_head_dim=4,
            ),
            "wkv_a",
            "(latent=16 + rotary=4) in -> latent in, rotary in",
        ),
    ],
    ids=[
        "timm",
        "timm, convolution",
        "timm, by head",
        "LeViT",
        "diffusers",
        "GluMlp",
        "GEGLU",
        "SwiGLU",
        "DiT",
        "Moonshine",
        "Kyutai",
        "Lfm3",
        "Qwen3-Next",
        "A.X K2",
        "LeViT, query, key and value",
        "Granite Speech",
        "Seamless",
        "Speech2Text",
        "FocalNet",
        "ConViT",
        "ViT-22B",
        "ViT-22B with differential attention",
        "DeepSeek in torchtitan",
        "Flux in torchtitan",
        "DeepSeek V4, two windows",
        "PVT",
        "HaloNet",
        "LeViT, key and value",
        "xLSTM",
        "BoTNet",
        "LambdaNet",
        "EfficientViT",
        "MobileViT 2",
        "LowFormer",
        "LeViT in timm, key and value",
        "SKNet",
        "DeepSeek in torchtitan, latent",
    ],
)
def test_fused_layers_of_known_packages_are_split_as_their_code_does(layer, name, pattern):
    model = nn.ModuleList([build({"attn": layer, "proj": lin(D, D)})])
    assert default_labels(model).views[f"0.attn.{name}.weight"].pattern == pattern
    mfx.Muon(model)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("package", "holder", "name", "parts"),
    [
        ("transformers.models.x", "PPDocLayoutV2GlobalPointer", "dense", 2),
        ("transformers.models.x", "xLSTMLayer", "ifgate_preact", 2),
        ("transformers.models.x", "xLSTMFeedForward", "proj_up_gate_z", 2),
        ("transformers.models.x", "Qwen2_5_OmniAdaLayerNormZero", "linear", 6),
        ("transformers.models.x", "Qwen2_5_OmniAdaLayerNormZero_Final", "linear", 2),
        ("transformers.models.x", "EsmFold2AtomLayer", "adaln_linear", 6),
        ("transformers.models.x", "VitsPosteriorEncoder", "conv_proj", 2),
        ("transformers.models.x", "VitsTextEncoder", "project", 2),
        ("transformers.models.x", "ParakeetEncoderConvolutionModule", "pointwise_lin1", 2),
        ("timm.models.x", "GatedConvBlock", "fc1", 2),
        ("timm.models.x", "HSMSSD", "hz_proj", 2),
        ("timm.models.x", "HSMSSD", "BCdt_proj", 3),
        ("timm.models.x", "SHMA", "v_gate", 2),
        ("torchtitan.models.x", "SelfAttention", "qkv", 3),
    ],
)
def test_fused_layers_of_equal_parts_are_split_as_their_code_does(package, holder, name, parts):
    layer = of_package(package, holder, **{name: lin(parts * D, D)})
    model = nn.ModuleList([build({"layer": layer, "proj": lin(D, D)})])
    assert (
        default_labels(model).views[f"0.layer.{name}.weight"].pattern
        == f"(part={parts} out) in -> part out in"
    )


def test_the_modulation_of_focalnet_in_transformers_is_split_as_its_code_does():
    layer = of_package(
        "transformers.models.x", "FocalNetModulation", projection_in=lin(2 * D + 3, D), dim=D
    )
    pattern = default_labels(nn.ModuleList([layer])).views["0.projection_in.weight"].pattern
    assert pattern == "(query=16 + context=16 + gates) in -> query in, context in, gates in"


def test_the_interleaved_experts_of_gpt_oss_in_torchtitan_are_split_as_their_code_does():
    stack = nn.Parameter(torch.zeros(4, 2 * D, D))
    layer = of_package("torchtitan.models.x", "GptOssGroupedExperts", mlp1_weight_EGD=stack)
    pattern = default_labels(nn.ModuleList([layer])).views["0.mlp1_weight_EGD"].pattern
    assert pattern == "... (dim part=2) in -> ... part dim in"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("holder", ["DeepseekV4Attention", "DeepseekV4HCACompressor"])
def test_the_shared_key_and_value_of_deepseek_v4_are_one_matrix(holder):
    layer = of_package("transformers.models.deepseek_v4", holder, kv_proj=lin(2 * D, D))
    model = nn.ModuleList([build({"attn": layer, "proj": lin(D, D)})])
    labels = default_labels(model)
    assert labels.reason("0.attn.kv_proj.weight") == "hidden matrix (2-D); shared by key and value"
    mfx.Muon(model)
