"""Routing: predicates, rules and labels, and the default labels of the models that people train."""

import pickle
import random
from collections import OrderedDict
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import muonfx
from muonfx.routing import (
    Labels,
    ParamInfo,
    Predicate,
    Route,
    default_labels,
    default_labels_by_name,
    describe,
    labels,
    module_type,
    ndim,
    path,
    where,
)

# Named tensors alone serve many laws; the test of the warning enables it.
pytestmark = pytest.mark.filterwarnings("ignore:default_labels saw names:UserWarning")


def is_tall(info: ParamInfo) -> bool:
    return info.ndim == 2 and info.shape[0] > info.shape[1]


SCOPE = {"torch": torch, "is_tall": is_tall, "Labels": Labels} | {
    f.__name__: f for f in (module_type, ndim, path, where)
}

# ------------------------------------------------------------------------------------------------------- strategies

sides = st.integers(0, 5)
components = st.sampled_from(
    [
        "blocks",
        "0",
        "1",
        "attn",
        "gate",
        "gate_proj",
        "up",
        "norm",
        "wte",
        "lm_head",
        "weight",
        "bias",
    ]
)
names = st.lists(components, min_size=1, max_size=4).map(".".join)
module_types = st.sampled_from([nn.Embedding, nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Module])
shapes = st.lists(sides, max_size=4).map(tuple)


@st.composite
def param_infos(draw: st.DrawFn) -> ParamInfo:
    module = draw(st.none() | module_types)
    others = tuple(draw(st.lists(names, max_size=2)))
    return ParamInfo(
        draw(names),
        draw(shapes),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.booleans()),
        module,
        others,
        () if module is None else tuple(draw(module_types) for _ in others),
    )


bounds = st.tuples(sides, sides) | st.tuples(sides, st.none()) | st.tuples(st.none(), sides)


atoms = st.one_of(
    sides.map(ndim),
    bounds.map(lambda b: ndim(min=b[0], max=b[1])),
    st.lists(
        st.sampled_from(["*", "*.weight", "blocks.*", "*gate*", "wte", "?.gate"]),
        min_size=1,
        max_size=2,
    ).map(lambda patterns: path(*patterns)),
    st.lists(module_types | st.sampled_from(["*Norm*", "Linear"]), min_size=1, max_size=2).map(
        lambda t: module_type(*t)
    ),
    st.sampled_from([where(is_tall), where(is_tall, "tall")]),
)
predicates = st.recursive(
    atoms,
    lambda inner: st.one_of(
        inner.map(lambda p: ~p),
        st.tuples(inner, inner).map(lambda pq: pq[0] & pq[1]),
        st.tuples(inner, inner).map(lambda pq: pq[0] | pq[1]),
    ),
    max_leaves=5,
)
named_tensors = st.dictionaries(names, shapes, max_size=6).map(
    lambda d: {k: torch.zeros(s) for k, s in d.items()}
)
rule_lists = st.lists(st.tuples(predicates, st.sampled_from(["a", "b", None])), max_size=4)
quiet = pytest.mark.filterwarnings("ignore:.*matches none of the:UserWarning")

# ------------------------------------------------------------------------------------------------ laws of predicates


@given(predicates, predicates, predicates, param_infos())
def test_predicates_are_a_boolean_algebra(p, q, r, info):
    def same(left, right):
        return left(info) is right(info)

    assert same(~~p, p)
    assert same(~(p & q), ~p | ~q)
    assert same(~(p | q), ~p & ~q)
    assert same(p & q, q & p)
    assert same(p | q, q | p)
    assert same(p & (q & r), (p & q) & r)
    assert same(p | (q | r), (p | q) | r)
    assert same(p & (q | r), (p & q) | (p & r))
    assert same(p | (q & r), (p | q) & (p | r))
    assert same(p & (p | q), p)
    assert (p | ~p)(info) is True
    assert (p & ~p)(info) is False


@given(predicates, param_infos())
def test_a_predicate_survives_repr_and_pickle(p, info):
    for again in (eval(repr(p), dict(SCOPE)), pickle.loads(pickle.dumps(p))):
        assert again == p
        assert hash(again) == hash(p)
        assert again(info) == p(info)


def test_a_predicate_within_where_survives_repr():
    p = where(ndim(2))
    assert eval(repr(p), dict(SCOPE)) == p


# ---------------------------------------------------------------------------------------------------- laws of labels


@quiet
@given(named_tensors, rule_lists, st.sampled_from(["rest", None]))
def test_the_first_rule_that_matches_wins(params, rules, default):
    found = labels(params, rules, default)
    for name, tensor in params.items():
        info = ParamInfo(name, tuple(tensor.shape))
        wanted = next(
            ((n, label) for n, (p, label) in enumerate(rules, 1) if p(info)), (0, default)
        )
        assert found[name] == wanted[1]
        assert found.reason(name).startswith(f"rule {wanted[0]}: " if wanted[0] else "default")


@quiet
@given(named_tensors, rule_lists)
def test_rules_of_the_user_are_never_overwritten(params, rules):
    own = labels(params, rules, "untouched")
    found = default_labels(params, rules)
    plain = default_labels(params)
    for name in params:
        by_rule = own.reason(name) != "default"
        assert found[name] == (own[name] if by_rule else plain[name])
        assert found.reason(name) == (f"user {own.reason(name)}" if by_rule else plain.reason(name))


@given(named_tensors)
def test_every_trainable_parameter_gets_exactly_one_label(params):
    found = default_labels(params)
    assert list(found) == list(params)
    assert set(found.values()) <= {"muon", "adamw"}
    assert all(params[name].ndim >= 2 for name, label in found.items() if label == "muon")


@given(named_tensors, st.randoms(use_true_random=False))
def test_the_order_of_parameters_is_irrelevant(params, rng: random.Random):
    shuffled = list(params.items())
    rng.shuffle(shuffled)
    one, two = default_labels(params), default_labels(shuffled)
    assert one == two
    assert hash(one) == hash(two)
    assert {name: one.reason(name) for name in one} == {name: two.reason(name) for name in two}


@given(st.dictionaries(names, st.sampled_from(["a", "b", None])))
def test_labels_survive_repr_and_pickle_and_equal_their_mapping(mapping):
    value = Labels({name: Route(label, "why") for name, label in mapping.items()})
    assert value == mapping
    assert eval(repr(value), dict(SCOPE)) == value
    again = pickle.loads(pickle.dumps(value))
    assert (again, hash(again)) == (value, hash(value))
    assert all(again.reason(name) == "why" for name in mapping)
    assert value != {**mapping, "another": "a"}
    mapping["another"] = "a"  # labels do not follow the mapping that they were made from
    assert "another" not in value


@given(named_tensors)
def test_all_ways_to_give_named_tensors_agree(params):
    wanted = default_labels(params)
    for given_as in (
        list(params.items()),
        iter(params.items()),
        OrderedDict(params),
        MappingProxyType(params),
    ):
        assert default_labels(given_as) == wanted
        assert str(describe(wanted, params)) == str(describe(wanted, list(params.items())))


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("params", "error", "complaint"),
    [
        ([("w", torch.zeros(1)), ("w", torch.zeros(1))], ValueError, "'w' is given more than once"),
        (
            {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)},
            ValueError,
            "'a.b' is given more than once",
        ),
        ([("w", 3.0)], TypeError, "'w' is a float"),
        ({"a": {"b": "text"}}, TypeError, "'a.b' is a str"),
        (object(), TypeError, "is a object"),
        (iter([torch.zeros(1)]), TypeError, "named_parameters"),
        (nn.LazyLinear(3), ValueError, "'weight' has no shape yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_bad_parameters_are_named(params, error, complaint):
    with pytest.raises(error, match=complaint):
        default_labels(params)


def test_a_rule_that_is_no_pair_is_named():
    for rule in (
        path("*"),
        (path("*"),),
        ("*.weight", "a"),
        (is_tall, "a"),
        (path("*"), 3),
        (path("*"), "a", "b"),
        None,
    ):
        with pytest.raises(TypeError, match="rule 2"):
            default_labels({"w": torch.zeros(1)}, [(path("*"), "a"), rule])


def test_parameters_without_a_rule_are_listed():
    params = {f"w{n}": torch.zeros(1) for n in range(30)}
    with pytest.raises(
        ValueError, match=r"29 of 30 parameters match no rule: 'w1', .* and 19 more; add"
    ):
        labels(params, [(path("w0"), "a")])
    with pytest.raises(TypeError, match="default: found the label 3"):
        labels(params, [], 3)  # pyright: ignore


def test_a_rule_that_matches_nothing_is_warned_of_where_it_is_written():
    for route, kind in ((default_labels, "user rule"), (lambda p, r: labels(p, r, "x"), "rule")):
        with pytest.warns(
            UserWarning, match=rf"^{kind} 1: path\('typo.*'\) -> 'a' matches none of the 1"
        ) as caught:
            route({"w": torch.zeros(1)}, [(path("typo.*"), "a")])
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("predicate", "names"),
    [
        (path("*.qvk.weight"), "close: 'h.qkv.weight'"),
        (ndim(2) & path("h.qvk.weight"), "close: 'h.qkv.weight'"),
        (ndim(3), "they are 'h.qkv.weight', 'embedding'"),
    ],
    ids=str,
)
def test_a_rule_that_matches_nothing_lists_names_that_are_close(predicate: Predicate, names: str):
    params = {"h.qkv.weight": torch.zeros(6, 2), "embedding": torch.zeros(2, 2)}
    with pytest.warns(
        UserWarning, match=f"matches none of the 2 parameters; {names}; correct or remove it"
    ):
        labels(params, [(predicate, "a")], "x")


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is (in, out)."""

    def __init__(self, out: int, inp: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(inp, out)), nn.Parameter(torch.zeros(out))


class LlamaRMSNorm(nn.Module):
    def __init__(self, *size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*size))


class LayerNormLinear(nn.Linear):
    """As in Transformer Engine: a norm and a hidden matrix in one layer."""


class Holder(nn.Module):
    """A module that holds parameters directly."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, size in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(size)))


class TokenEmbedding(Holder):
    pass


def build(tree: dict) -> nn.Module:
    """A model from nested names; a digit makes a list-like child."""
    model = nn.Module()
    for name, child in tree.items():
        model.add_module(name, build(child) if isinstance(child, dict) else child)
    return model


def lin(out: int, inp: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inp, out, bias=bias)


D, V = 8, 32


def gpt2(layers: int = 1, d: int = D, v: int = V) -> nn.Module:
    def block() -> dict:
        return {
            "ln_1": nn.LayerNorm(d),
            "attn": {"c_attn": Conv1D(3 * d, d), "c_proj": Conv1D(d, d)},
            "ln_2": nn.LayerNorm(d),
            "mlp": {"c_fc": Conv1D(4 * d, d), "c_proj": Conv1D(d, 4 * d)},
        }

    model = build(
        {
            "transformer": {
                "wte": nn.Embedding(v, d),
                "wpe": nn.Embedding(16, d),
                "h": {str(n): block() for n in range(layers)},
                "ln_f": nn.LayerNorm(d),
            },
            "lm_head": lin(v, d),
        }
    )
    model.lm_head.weight = model.transformer.wte.weight
    return model


def torchtitan() -> nn.Module:
    attention = {n: lin(D, D) for n in ("wq", "wk", "wv", "wo")}
    moe = {
        "router": {"gate": lin(4, D)},
        "experts": Holder(w1=(4, 16, D), w2=(4, D, 16), w3=(4, 16, D)),
    }
    layers = {
        "0": {
            "attention": attention,
            "feed_forward": {"w1": lin(16, D)},
            "attention_norm": nn.RMSNorm(D),
        },
        "1": {"moe": moe},
    }
    return build(
        {
            "tok_embeddings": nn.Embedding(V, D),
            "layers": layers,
            "norm": nn.RMSNorm(D),
            "output": lin(V, D),
        }
    )


def lora() -> nn.Module:
    q = {
        "base_layer": lin(D, D),
        "lora_A": {"default": lin(4, D)},
        "lora_B": {"default": lin(D, 4)},
    }
    embedding = build({"base_layer": nn.Embedding(V, D)})
    embedding.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.zeros(4, V))})
    head = {"original_module": lin(V, D), "modules_to_save": {"default": lin(V, D)}}
    inner = {"embed_tokens": embedding, "layers": {"0": {"self_attn": {"q_proj": q}}}}
    model = build({"base_model": {"model": {"model": inner, "lm_head": head}}})
    for name, p in model.named_parameters():
        p.requires_grad = "lora_" in name or "modules_to_save" in name
    return model


# The parameters of each model for Muon; all others are for AdamW or, if frozen, for none.
MODELS = {
    gpt2: {
        "transformer.h.0.attn.c_attn",
        "transformer.h.0.attn.c_proj",
        "transformer.h.0.mlp.c_fc",
        "transformer.h.0.mlp.c_proj",
    },
    torchtitan: {f"layers.0.attention.w{n}" for n in "qkvo"}
    | {"layers.0.feed_forward.w1", *(f"layers.1.moe.experts.w{n}" for n in "123")},
    lora: set(),
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("by_name_alone", [False, True])
def test_models_are_routed_as_in_practice(make, by_name_alone):
    model = make()
    params = dict(model.named_parameters())
    found = default_labels(params if by_name_alone else model)
    assert list(found) == list(params)
    assert {
        name.removesuffix(".weight") for name, label in found.items() if label == "muon"
    } == MODELS[make]
    assert {name for name, label in found.items() if label is None} == {
        name for name, p in params.items() if not p.requires_grad
    }


def reasons(model) -> dict[str, str]:
    found = default_labels(model)
    return {name: found.reason(name) for name in found}


def test_the_reason_names_the_rule():
    found = reasons(gpt2()) | reasons(lora()) | reasons({"mlp.gate.weight": torch.zeros(6, 4)})
    wanted = {
        "transformer.wte.weight": "embedding (module type Embedding, tied with 'lm_head.weight')",
        "transformer.ln_f.weight": "norm (module type LayerNorm)",
        "transformer.h.0.mlp.c_fc.weight": "hidden matrix (2-D)",
        "transformer.h.0.mlp.c_fc.bias": "1-D",
        "base_model.model.lm_head.original_module.weight": "frozen",
        "base_model.model.lm_head.modules_to_save.default.weight": "name component 'lm_head'",
        "base_model.model.model.embed_tokens.lora_embedding_A.default": (
            "low-rank factor (name component 'lora_embedding_A')"
        ),
        "mlp.gate.weight": "name component 'gate'",
    }
    assert {name: found[name] for name in wanted} == wanted


def test_a_tied_head_goes_with_its_embedding_under_any_name():
    head_first = build({"proj": lin(V, D), "tokens": nn.Embedding(V, D)})
    head_first.tokens.weight = head_first.proj.weight
    assert default_labels(head_first) == {"proj.weight": "adamw"}
    weight = torch.zeros(V, D)
    assert default_labels({"proj.weight": weight, "wte.weight": weight}) == {
        "proj.weight": "adamw",
        "wte.weight": "adamw",
    }


def test_types_win_over_names():
    model = build(
        {
            "up_proj": nn.Embedding(V, D),
            "table": TokenEmbedding(weight=(V, D)),
            "scale": LlamaRMSNorm(D, D),
            "norm": LayerNormLinear(D, D, bias=False),
            "embedder_proj": lin(D, D),
        }
    )
    found = default_labels(model)
    assert [name.removesuffix(".weight") for name in found if found[name] == "muon"] == [
        "norm",
        "embedder_proj",
    ]
    assert default_labels({"norm.weight": torch.zeros(4, 4)}) == {"norm.weight": "adamw"}


MUON_NAMES = """
    model.layers.0.mlp.gate_proj.weight mlp.gate_up_proj.weight experts.gate_up_proj experts.w_gate mlp.w_gate
    embedder_proj.weight embedding_projection.weight time_emb_proj.weight
    encoding.weight position_mlp pos_proj.weight
    albert.embedding_hidden_mapping_in.weight blocks.0.sa.heads.0.key.weight attn.multi_head.weight
    attn.in_proj_weight attention.output.dense.weight experts.3.gate.weight shared_experts.gate.weight
    rnn.weight_ih_l0 conv2.weight attn.headwise.weight cls.predictions.transform.dense.weight token_mixer.weight
    aggregate.weight decoder.0.weight block.fc.weight transformer.h.0.mlp.fc_out.weight
    blocks.0.attn.to_out.0.weight layers.0.fc.parametrizations.weight.original
    attn.output_projection.weight conv_out_layer.weight attn.proj_out.weight blocks.0.proj_in.weight projector.weight
    attention.q_head.weight attention.k_head.weight attention.v_head.weight attn.query_head.weight proj_out_1.weight
    fc_2.weight rel_logits_proj.proj.weight mm_input_projection_weight neck.conv1.weight layers.0.fc.weight_orig
    self_attn.q_a_proj.weight mlp.expert_gate_proj.weight experts.0.moe_gate.weight moe.expert_w_gate_up.weight
    self_attn.kv_a_proj_with_mqa.weight mlp.experts.0.down_proj.weight mtp.eh_proj.weight
"""
ADAMW_NAMES = """
    transformer.wte.weight wpe.weight tok_embeddings.weight embed_tokens.weight gpt_neox.embed_in.weight
    embed_out.weight pos_embed pos_embedding positional_embedding class_embedding mask_token register_tokens
    vit.registers pos encoder.pos encoder.pe positional_encoding pos_encoding image_position
    value_embeds.0.weight shared.weight to_patch_embedding.2.weight
    vit.embeddings.patch_embeddings.projection.weight tokEmbedding.weight token_embedding_table.weight
    lm_head.weight head.weight heads.head.weight classifier.1.weight score.weight output_layer.weight
    unembed.weight lmHead.weight cls.predictions.decoder.weight lm_head.dense.weight mtp_head.0.weight
    output.weight model.output.weight fc.weight proj_out.weight mlp.gate.weight block_sparse_moe.gate.weight
    mlp.router.weight moe.router.gate.weight ffn.router.layer.weight gate.wg.weight router.classifier.weight
    mlp.shared_expert_gate.weight experts.gate_up_proj_bias relative_position_bias_table
    block.0.relative_attention_bias.weight q_proj.lora_A.default.weight wq.lora_a.weight lora.down.weight
    mixer.A_log embed_tokens.parametrizations.weight.original0 _orig_mod.wte.weight
    lm_head.modules_to_save.mine.weight query_embed.weight
    cls.seq_relationship.weight wav2vec.ctc_proj.weight decoder.output_projection.weight logits.weight
    mamba.x_proj.weight mixer.dt_proj.weight mamba.x_proj_weight mamba.D attn.rel_pos_h self_attn.pos_bias_u
    self_attn.bias_v quantizer.codevectors q_l2_clip.scale embed_state.weight model.vision_embed_tokens.weight
    mtp.shared_head.head.weight self_attn.q_a_layernorm.weight
    label_embeddings_concat perceiver.latents_1d moe.router_mlp.0.weight moe.routers.0.weight mlp.moe_gate.weight
    moe.expert_gate.weight moe.experts_gating.weight
    attn.attention_biases encoder.rel_pos_x_bias.weight indexer.index_kpool_compress_ape projection.latent_query
    block.scale_shift_table head_dist.weight head_dist.linear.weight logits_dense.weight tower.head_linear.weight
    proj_out_2.weight action_out_proj.weight postnet.feat_out.weight classifier_2.weight pos_embed.proj.weight
    x_embedder.proj.weight fc.hada_w1_a.default fc.lokr_w2.default fc.oft_R.default.weight fc.boft_R.default
        fc.shadow_down.default.weight fc.shadow_update_gate.default.0.weight
    fc.hra_u.default
    fc.randlora_lambda.default fc.vera_lambda_b.default fc.ia3_l.default fc.c3a_kernel.default fc.miss_block.default
"""


def test_names_are_read_by_component():
    for label, found in (("muon", MUON_NAMES.split()), ("adamw", ADAMW_NAMES.split())):
        assert {
            name for name in found if default_labels({name: torch.zeros(6, 4)})[name] != label
        } == set()


@pytest.mark.parametrize(
    "name", ["lora_A", "loraA", "downLora", "QLora", "lora1", "lora_b2", "LoRA_A"]
)
def test_a_factor_of_lora_is_recognized_in_camel_case_and_with_a_number(name: str):
    full_name = f"blocks.0.attn.{name}.weight"
    labels = default_labels({full_name: torch.zeros(6, 4)})
    assert labels.reason(full_name) == f"low-rank factor (name component {name!r})"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *(
            ("experts.bias1", "vector"),
            ("experts.bias_2_EG", "vector"),
            ("attn.relative_attention_bias2", "vector"),
        ),
        *(("attn.pos_bias_1.weight", "embedding"), ("attn.bias_table_2.weight", "embedding")),
        *(("head1_linear.weight", "head"), ("head_2_fc_1.weight", "head")),
    ],
)
def test_a_number_in_a_name_does_not_change_the_role(name: str, role: str):
    assert default_labels({name: torch.zeros(6, 4)}, roles=True)[name] == role


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("embed_patch", "other"),
        ("patch_embed", "other"),
        ("patches_embed", "embedding"),
        ("dispatch_embed", "embedding"),
    ],
)
def test_patch_is_read_as_a_whole_word(name: str, role: str):
    assert (
        default_labels({f"{name}.weight": torch.zeros(6, 4)}, roles=True)[f"{name}.weight"] == role
    )


def test_a_table_whose_name_ends_in_an_embedding_word_may_contain_the_word_of_a_projection():
    names = ("vit.proj_pos_embed", "text_projection_embedding", "vit.embed_proj")
    labels = default_labels({name: torch.zeros(6, 4) for name in names}, roles=True)
    assert [labels[name] for name in names] == ["embedding", "embedding", "hidden"]


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("visionTower.conv1", "visionTower.conv1"),
        ("net.wavEncoder.conv_layers.0", "wavEncoder.conv_layers.0"),
        ("net.wavEncoder.conv_layers.0.conv", "wavEncoder.conv_layers.0"),
        ("h.xEmbedder.proj", "xEmbedder.proj"),
        ("cls.decoder", "decoder"),
    ],
)
def test_the_reason_has_the_components_of_a_path_as_they_are_written(name: str, component: str):
    labels = default_labels({f"{name}.weight": torch.zeros(6, 4, 3, 3)}, roles=True)
    assert f"name component {component!r}" in labels.reason(f"{name}.weight")


@pytest.mark.parametrize(
    "name",
    [
        "embed2.proj",
        "embeds.proj",  # of timm's NaFlexVit
        "x_embedder_1.projection",
        "embed.patch_proj",
        "embedding.patch_in_proj",
    ],
)
def test_a_projection_in_an_embedder_reads_raw_input(name: str):
    assert (
        default_labels({f"vit.{name}.weight": torch.zeros(6, 4)}, roles=True)[f"vit.{name}.weight"]
        == "other"
    )


OTHER_ROLES = {
    "embedding": """
        transformer.wte.weight pos_embed patch_embed.pos_embed mask_token encoder.pe shared.weight
        relative_position_bias_table block.0.relative_attention_bias.weight attn.rel_pos_h perceiver.latents_1d
        quantizer.codevectors pos_frequencies
    """,
    "head": """
        lm_head.weight classifier.1.weight score.weight embed_out.weight fc.weight mtp.shared_head.head.weight
        last_linear.weight postprocess_conv.weight
    """,
    "vector": """
        head.bias experts.gate_up_proj_bias mixer.A_log mamba.D self_attn.pos_bias_u q_l2_clip.scale
        self_attn.q_a_layernorm.weight
    """,
    "other": """
        mlp.gate.weight moe.router.gate.weight router.classifier.weight mlp.shared_expert_gate.weight
        to_patch_embedding.2.weight vit.embeddings.patch_embeddings.projection.weight mamba.x_proj.weight
        mixer.dt_proj.weight q_proj.lora_A.default.weight fc.oft_R.default.weight
        embed_tokens.parametrizations.weight.original0 proj_in.weight preprocess_conv.weight
    """,
}


def test_roles_are_read_by_component():
    for role, names in ("hidden", MUON_NAMES), *OTHER_ROLES.items():
        found = {
            name: default_labels_by_name({name: torch.zeros(6, 4)}, roles=True)[name]
            for name in names.split()
        }
        assert found == dict.fromkeys(names.split(), role)


def test_roles_are_read_by_shape():
    vectors = {(), (4,), (1, 8), (8, 1, 3, 3)}
    others = {(8, 3, 7, 7), (2, 64)}
    for size in vectors | others:
        assert default_labels_by_name({"x": torch.zeros(size)}, roles=True) == {
            "x": "vector" if size in vectors else "other"
        }


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("by_name_alone", [False, True])
def test_roles_divide_what_adamw_trains_and_leave_hidden_matrices_and_views_as_they_are(
    make, by_name_alone
):
    model = make()
    whole = dict(model.named_parameters()) if by_name_alone else model
    usual, roles = default_labels_by_name(whole), default_labels_by_name(whole, roles=True)
    coarse = {
        None: None,
        "hidden": "muon",
        **dict.fromkeys(("embedding", "head", "vector", "other"), "adamw"),
    }
    assert {name: coarse[role] for name, role in roles.items()} == usual
    assert {name: roles.reason(name) for name in roles} == {
        name: usual.reason(name) for name in usual
    }
    assert roles.views == usual.views
    vectors = {
        name for name, param in model.named_parameters() if param.ndim < 2 and param.requires_grad
    }
    assert {name for name, role in roles.items() if role == "vector"} == vectors


def test_a_bias_with_its_dims_in_the_name_is_a_vector():
    for name in ("mlp1_bias_EG", "mlp2_bias_ED"):  # torchtitan's gpt-oss
        assert (
            default_labels_by_name({f"experts.{name}": torch.zeros(4, 32)}, roles=True)[
                f"experts.{name}"
            ]
            == "vector"
        )


def test_a_tied_head_has_the_role_of_the_embedding():
    assert "head" not in default_labels(gpt2(), roles=True).values()
    assert default_labels(torchtitan(), roles=True)["output.weight"] == "head"
    weight = torch.zeros(V, D)
    tied = {"lm_head.weight": weight, "wte.weight": weight}
    assert set(default_labels_by_name(tied, roles=True).values()) == {"embedding"}


@pytest.mark.parametrize("route", [default_labels, default_labels_by_name])
def test_roles_and_labels_of_your_own_are_an_error(route):
    for own in ({"muon": "m"}, {"other": None}):
        with pytest.raises(
            ValueError, match=rf"^{route.__name__}: found roles=True with muon=.*, expected one"
        ):
            route(gpt2(), roles=True, **own)


def test_a_gate_beside_up_and_down_belongs_to_the_mlp():
    mlp = {f"layers.0.mlp.{n}.weight": torch.zeros(4, 4) for n in ("gate", "up", "down")}
    assert set(default_labels(mlp).values()) == {"muon"}
    moe = {
        "moe.gate.weight": torch.zeros(4, 8),
        "moe.up_proj": torch.zeros(4, 16, 8),
        "moe.down_proj": torch.zeros(4, 8, 16),
    }
    assert default_labels(moe) == {
        "moe.gate.weight": "adamw",
        "moe.up_proj": "muon",
        "moe.down_proj": "muon",
    }
    stacks = {f"moe.experts_{n}": torch.zeros(4, 8, 16) for n in ("gate", "up")}
    assert default_labels(stacks | {"moe.moe_gate": torch.zeros(4, 8)}) == dict.fromkeys(
        stacks, "muon"
    ) | {"moe.moe_gate": "adamw"}


def test_a_vector_in_disguise_is_no_matrix():
    hidden = {(4, 8), (8, 4, 1, 1), (8, 4, 3), (8, 4, 3, 3), (2, 3, 64, 64), (0, 4), (4, 64)}
    others = {
        (1, 8),
        (8, 1),
        (1, 7, 8),
        (8, 1, 4),
        (8, 1, 3, 3),
        (8, 3, 7, 7),
        (2, 64),
        (128, 4),
        (4,),
        (),
    }
    assert {
        size for size in hidden | others if default_labels({"x": torch.zeros(size)})["x"] == "muon"
    } == hidden


def test_packed_attention_is_a_matrix_and_a_depthwise_convolution_is_not():
    model = build(
        {
            "attn": nn.MultiheadAttention(8, 2),
            "dw": nn.Conv1d(8, 8, 4, groups=8),
            "pw": nn.Conv1d(8, 8, 1),
        }
    )
    found = default_labels(model)
    assert {n for n in found if found[n] == "muon"} == {
        "attn.in_proj_weight",
        "attn.out_proj.weight",
        "pw.weight",
    }
    assert found.reason("dw.weight") == "depthwise: one vector a channel"
    image = default_labels(
        build({"conv1": nn.Conv2d(3, 8, 7), "conv2": nn.Conv2d(8, 8, 3), "bn2": nn.BatchNorm2d(8)})
    )
    assert [name for name, label in image.items() if label == "muon"] == ["conv2.weight"]
    assert image.reason("conv1.weight") == "convolution from or to 3 channels"


@pytest.mark.parametrize("blocks", [0, 2])
def test_a_convolution_of_gray_images_is_not_depthwise(blocks: int):
    model = build(
        {
            "stem": nn.Conv2d(1, 16, 4, 4),
            "dw": nn.Conv2d(16, 16, 3, groups=16),
            "single": nn.Conv1d(1, 1, 3),
        }
    )
    for index in range(blocks):
        block = nn.Sequential(nn.Conv2d(16, 16, 3, groups=16), nn.Linear(16, 32), nn.Linear(32, 16))
        model.add_module(f"block{index}", nn.ModuleList([block, block]))
    found = default_labels(model)
    assert found.reason("stem.weight") == "convolution from or to one channel"
    assert found.reason("dw.weight") == "depthwise: one vector a channel"
    roles = default_labels(model, roles=True)
    assert roles["stem.weight"] == "other"
    assert roles["dw.weight"] == roles["single.weight"] == "vector"


def test_parametrized_layers_keep_their_type():
    model = build(
        {
            "table": parametrizations.orthogonal(nn.Embedding(8, 4)),
            "fc1": parametrizations.weight_norm(lin(8, 4)),
        }
    )
    found = default_labels(model)
    assert found["table.parametrizations.weight.original"] == "adamw"
    assert (
        found.reason("table.parametrizations.weight.original")
        == "embedding (module type Embedding)"
    )
    # A direction is not a matrix: its length is stored separately, and only their product is the weight.
    assert found["fc1.parametrizations.weight.original1"] == "adamw"
    assert found["fc1.parametrizations.weight.original0"] == "adamw"
    parts = {
        "up.weight_g": torch.zeros(4, 1),
        "up.weight_v": torch.zeros(4, 8),
        "down.weight_v": torch.zeros(4, 8),
    }
    assert default_labels(parts) == {
        "up.weight_g": "adamw",
        "up.weight_v": "adamw",
        "down.weight_v": "muon",
    }


def test_a_projector_is_part_of_the_head_only_beside_a_classifier():
    model = build({"model": {"up": lin(8, 8)}, "projector": lin(16, 8)})
    assert default_labels(model)["projector.weight"] == "muon"
    model.add_module("classifier", lin(3, 16))
    assert default_labels(model)["projector.weight"] == "adamw"


def test_the_convolution_that_sees_raw_audio_goes_to_adamw():
    for inner in ({"encoder": {"conv1": nn.Conv1d(80, 8, 3)}}, {"conv_pre": nn.Conv1d(80, 8, 3)}):
        found = reasons(build({"model": inner, "up": lin(8, 8)}))
        assert next(iter(found.values())).startswith("convolution of the input")
    layers = {"0": {"conv": nn.Conv1d(80, 8, 3)}, "1": {"conv": nn.Conv1d(8, 8, 3)}}
    found = default_labels(build({"feature_extractor": {"conv_layers": layers}}))
    assert [label for name, label in found.items() if name.endswith("weight")] == ["adamw", "muon"]


def test_the_shape_that_zero_3_took_away_is_the_one_that_counts():
    model = build({"fc1": lin(8, 4)})
    model.fc1.weight.ds_shape = torch.Size([8, 4])
    model.fc1.weight.data = torch.empty(0)
    assert default_labels(model) == {"fc1.weight": "muon"}


def test_frozen_parameters_are_left_out_and_plain_tensors_are_not_frozen():
    model = build({"fc1": lin(8, 4)})
    plain = {name: p.detach() for name, p in model.named_parameters()}
    model.requires_grad_(False)
    assert default_labels(model) == {"fc1.weight": None}
    assert default_labels(plain) == {"fc1.weight": "muon"}
    assert default_labels(model, [(where(lambda info: not info.requires_grad), "sgd")]) == {
        "fc1.weight": "sgd"
    }


class Pair(NamedTuple):
    wte: Tensor
    hidden: Tensor


def test_any_pytree_is_named_by_its_paths():
    x = [torch.zeros(4, 4) for _ in range(4)]
    found = default_labels(
        {"blocks": [{"q": x[0]}, {"q": x[1]}], "pair": Pair(x[2], x[3]), "absent": None}
    )
    assert found == {
        "blocks.0.q": "muon",
        "blocks.1.q": "muon",
        "pair.wte": "adamw",
        "pair.hidden": "muon",
        "absent": None,
    }
    assert default_labels([torch.zeros(2, 2), torch.zeros(2)]) == {"0": "muon", "1": "adamw"}


def test_an_absent_leaf_is_labelled_none_and_not_reported():
    params = {"fc1.weight": torch.zeros(4, 4), "gone": None}
    for found in (default_labels(params), labels(params, [(ndim(2), "muon")])):
        assert found == {"fc1.weight": "muon", "gone": None}
        assert found.reason("gone") == "absent"
        assert "gone" not in str(describe(found, params))


@pytest.mark.parametrize("nothing", [{}, [], (), nn.Module()])
def test_no_parameters_give_no_labels_and_no_warning(nothing):
    assert default_labels(nothing, [(path("*"), "a")]) == {}


def test_predicates_see_all_names_and_owners_of_a_tied_tensor():
    rules = [(path("lm_head.*"), "head"), (where(lambda info: bool(info.tied)), "never")]
    assert labels(gpt2(), rules, "rest")["transformer.wte.weight"] == "head"
    found = labels(
        gpt2(), [(module_type(nn.Linear), "linear"), (module_type("Conv1D"), "conv")], None
    )
    assert found["transformer.wte.weight"] == "linear"
    assert found["transformer.h.0.mlp.c_fc.weight"] == "conv"


# ------------------------------------------------------------------------------------------------------------ report


def test_the_report_has_a_line_for_every_parameter_and_totals():
    model = gpt2(2)
    chosen = default_labels(model, [(path("*.bias"), None)])
    lines = str(describe(chosen, model)).splitlines()
    assert [line.split()[0] for line in lines[1 : len(chosen) + 1]] == list(chosen)
    count = sum(p.numel() for p in model.parameters())
    assert lines[-1].split() == ["total", str(len(chosen)), f"{count:,}", "100.0%"]
    assert lines[-2].startswith("- (left out)")
    assert str(describe(model)) == str(describe(default_labels(model), model))
    named = dict(model.named_parameters())
    assert str(describe(iter(named.items()))) == str(describe(default_labels(named), named))


@pytest.mark.parametrize(
    ("name", "channels", "label"),
    [("0", 3, "adamw"), ("0", 4, "adamw"), ("0", 12, "muon"), ("stem", 12, "adamw")],
)
def test_the_convolution_of_an_image_is_found_by_its_channels_or_its_name(
    name: str, channels: int, label: str
):
    layers = OrderedDict({name: nn.Conv2d(channels, 32, 8), "1": nn.Conv2d(32, 64, 4)})
    model = (
        nn.ModuleDict({"network": nn.Sequential(layers)}) if name == "0" else nn.Sequential(layers)
    )
    (weight, *_) = default_labels(model).items()
    assert weight[1] == label


def test_what_has_no_names_or_no_parameters_is_not_described():
    with pytest.raises(TypeError, match=r"tensors without names.*model\.named_parameters\(\)"):
        describe(gpt2(2).parameters())
    with pytest.raises(TypeError, match=r"found a transform.*tx\.tree\(\)"):
        describe(muonfx.adamw(0.1))


# ---------------------------------------------------------------------------------------------------- names alone


@pytest.mark.filterwarnings("error", "ignore:default_labels. found no output head")
def test_named_tensors_taken_for_hidden_matrices_are_said_and_by_name_says_that_they_are():
    model = nn.ModuleDict(
        {"lookup": nn.Embedding(8, 4), "up": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    )
    named = dict(model.named_parameters())
    with pytest.warns(
        UserWarning,
        match=r"without module types, .* hidden matrices: 'lookup.weight', 'up.weight'\. An emb",
    ):
        by_name = default_labels(named)
    assert by_name["lookup.weight"] == "muon"
    assert default_labels(model)["lookup.weight"] == "adamw"  # where the type is seen
    assert default_labels_by_name(named) == by_name
    # There is no warning if a rule has decided, or if no parameter is a hidden matrix.
    default_labels(named, [(path("lookup.*"), "adamw"), (path("up.*"), "muon")])
    default_labels({"norm.weight": torch.zeros(4)})


@pytest.mark.filterwarnings("error")
def test_a_partition_by_names_alone_warns_at_init_and_never_at_an_update():
    params = {"h.fc.weight": torch.ones(4, 4), "h.fc.bias": torch.ones(4)}
    tx = muonfx.muon_with_adamw(0.1, orthogonalize=muonfx.orthogonalize(dtype=torch.float32))
    with pytest.warns(UserWarning, match="labelled these as hidden matrices: 'h.fc.weight'"):
        state = tx.init(params)
    # One that has met no parameters, as in another process.
    tx.replace().update(params, state, params)
    silent = muonfx.muon_with_adamw(
        0.1, orthogonalize=muonfx.orthogonalize(dtype=torch.float32), labels=default_labels_by_name
    )
    silent.update(params, silent.init(params), params)


@pytest.mark.filterwarnings("error", "ignore:default_labels. found no output head")
def test_an_optimizer_of_named_groups_can_be_told_the_labels():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4, bias=False))
    groups = [
        {"params": list(model[0].named_parameters(prefix="0"))},
        {"params": [("1.weight", model[1].weight)]},
    ]
    with pytest.warns(
        UserWarning, match="labelled these as hidden matrices: '0.weight', '1.weight'"
    ):
        muonfx.Muon([dict(group) for group in groups])
    told = muonfx.Muon([dict(group) for group in groups], labels=default_labels(model))
    assert [group["label"] for group in told.param_groups] == ["adamw", "muon"]
    with pytest.raises(
        ValueError, match=r"labels: found none for '1.weight', expected a label for every parameter"
    ):
        muonfx.Muon([dict(group) for group in groups], labels={"0.weight": "adamw"})
    with pytest.raises(
        TypeError, match=r"labels must be a mapping .* labels=lambda model: muonfx.default_labels"
    ):
        muonfx.Muon(model, labels=[(path("*"), "muon")])
    rules = [(path("1.*"), None)]
    ruled = muonfx.Muon(groups[1:], labels=lambda model: default_labels(model, rules), model=model)
    assert not ruled.param_groups[0].get("label")


@pytest.mark.filterwarnings("ignore:labels. these parameters may hold")
def test_an_optimizer_is_described_by_its_groups():
    model = gpt2(2)
    optimizer = muonfx.Muon(model, lr=0.02, adamw_lr=1e-3)
    found = describe(optimizer)
    assert found.labels == default_labels(model)
    assert all(
        found.labels.reason(name) == default_labels(model).reason(name) for name in found.labels
    )
    routing, totals, numbers = (part.to_text().splitlines() for part in found.report().parts)
    assert len(routing) == 1 + len(found.labels)
    assert [int(line.split()[2]) for line in totals[1:3]] == [
        len(group["params"]) for group in optimizer.param_groups
    ]
    assert ["lr", "0.02", "0.001"] in [line.split() for line in numbers]
    optimizer.param_groups[0]["lr"] = 0.5
    assert ["lr", "0.5", "0.001"] in [
        line.split() for line in str(describe(optimizer)).splitlines()
    ]


@pytest.mark.filterwarnings("ignore:labels. these parameters may hold")
def test_an_optimizer_is_described_with_the_patterns_of_its_transform():
    model = nn.ModuleDict({"wqkv": nn.Linear(4, 12, bias=False), "up": nn.Linear(4, 8, bias=False)})
    assert "maybe fused, not split" in describe(muonfx.Muon(model)).labels.reason("wqkv.weight")
    view = muonfx.MatrixView({"*wqkv.weight": "(q=6 + k=3 + v=3) in -> q in, k in, v in"})
    found = describe(muonfx.Muon(model, orthogonalize=muonfx.orthogonalize(view=view)))
    assert found.labels.reason("wqkv.weight") == "hidden matrix (2-D); view of the transform"
    assert found.labels.views == {
        "wqkv.weight": muonfx.MatrixView("(q=6 + k=3 + v=3) in -> q in, k in, v in")
    }
    assert "6 x 4 + 3 x 4 + 3 x 4" in str(found)
    assert found.labels.reason("up.weight") == "hidden matrix (2-D)"


@pytest.mark.parametrize("of_optimizer", [False, True])
def test_describe_shows_into_which_matrix_more_than_two_dims_are_flattened(of_optimizer: bool):
    params = {
        "conv.weight": nn.Parameter(torch.zeros(16, 8, 3, 3)),
        "conv.bias": nn.Parameter(torch.zeros(16)),
    }
    what = muonfx.Muon(params, lr=1e-3) if of_optimizer else params
    header, conv, bias = str(describe(what)).split("\n\n", 1)[0].splitlines()
    assert header.split() == ["parameter", "shape", "label", "matrices", "stored", "rule"]
    assert "16 x 8 x 3 x 3  muon   16 x 72   out, in  hidden matrix (4-D)" in conv
    assert bias.split() == ["conv.bias", "16", "adamw", "1-D"]
