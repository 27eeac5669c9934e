"""The role of each parameter in a model, such as "embedding", by module type, name and shape, with a reason.

Module types decide first, if a model is given: an embedding is recognized under any name. Names decide where types are
ambiguous, since a hidden layer, an output head and a router are all ``nn.Linear``. Shapes decide the rest. A name is
split into components and their words, and never matched by substrings: ``gate`` is a router and ``gate_proj`` is not,
``embed_tokens`` is an embedding and ``embedder_proj`` is not. An ambiguous parameter is not called a hidden matrix,
because AdamW is never wrong, but may train slower.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from math import prod
from typing import Literal, NamedTuple, TypeAlias, get_args

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from muonfx.routing.params import PLAIN_LEAVES, ParamInfo, class_name_fits, module_path, plain_name
from muonfx.routing.structure import LEAVES_OF_LAYERS, Structure, is_embedding
from muonfx.routing.views import is_convolution

Role = Literal["hidden", "embedding", "head", "vector", "other"]
"""The role of a parameter; `default_labels` describes the roles."""

ROLES: tuple[Role, ...] = get_args(Role)
"""All roles."""


GatedMlps: TypeAlias = frozenset[tuple[str, int]]
"""The path of each module with ``up`` or ``down`` matrices, and their ndim: a ``gate`` in it is not a router."""


class Decision(NamedTuple):
    """The role of a parameter (its function in the model, such as "head"), and the reason for this choice, as text."""

    role: Role
    reason: str


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
# Class names of norms in other packages: LlamaRMSNorm, LayerNorm2d, RMSNormGated. LayerNormLinear is excluded, since it
# holds a hidden matrix.
_NORM_CLASS = r"Norm(\dd|Act|Gated|[Ff][Pp]\d+)*$"

_EMBEDDING_WORDS = frozenset(
    {"embed", "embeds", "embedding", "embeddings", "embedder", "embedders", "emb", "embs", "embd", "wte", "wpe"}
)
_HEAD_WORDS = frozenset({"head", "classifier", "unembed", "unembedding", "unembedder", "logits"})
# Words that may follow a head word at the beginning of a name: head_dist, head_linear, logits_dense.
_AFTER_HEAD = frozenset(
    {"dist", "linear", "dense", "proj", "projection", "fc", "layer", "conv", "out", "output", "aux"}
)
# Words before "head" that make it a head of attention, multi_head, and those that do directly before it, q_head.
_ATTENTION_WORDS = frozenset({"attn", "attention", "multi"})
_PROJECTIONS = frozenset({"query", "key", "value", *"qkvo", "qk", "kv", "qkv"})
_HEADS = frozenset(
    {
        *("score", "cls_score", "output_layer", "vocab_projector", "vocab_proj", "qa_outputs", "seq_relationship"),
        *("ctc_proj", "decoder_pred", "predict_state", "predict_action", "predict_return"),
        *("action_out_proj", "feat_out", "prob_out", "final_linear", "lm_heads"),
    }
)
# Heads only as a direct child of the model, as in torchtitan, ResNet and Whisper: the names are too common elsewhere. A
# number above 1 marks the last of several layers, such as proj_out_2 in DiT. fc_2 is often the name of a hidden layer.
# The loss of wav2vec 2.0 compares the vectors of project_hid and project_q.
_TOP_HEAD = re.compile(r"fc|(output|out|proj_out|conv_out|conv_post|proj_out_conv)(_[2-9])?|project_(hid|q)")
# The same in a model with a scale of the similarities, such as CLIP. Elsewhere, text_projection is often hidden.
_SCALES_OF_SIMILARITIES = frozenset({"logit_scale", "temperature"})
_CONTRASTIVE = re.compile(r"(text|visual|image|audio)_projection")
_ROUTERS = frozenset({"gate", "gating", "gating_network", "gate_network"})
# A router also has a name such as token_router or routers, and a gate with a word of a mixture of experts: moe_gate,
# shared_expert_gate.
_ROUTER_WORDS = frozenset({"router", "routers", "routing"})
_MIXTURE_WORDS = frozenset({"moe", "expert", "experts"})
# Rates of state-space and RWKV layers, and the small matrices that compute them from the input.
_ELEMENTWISE = frozenset({"a_log", "d", "time_decay", "time_first", "time_faaaa"})
_STATE_SPACE = frozenset({"x_proj", "dt_proj", "x_proj_weight", "dt_proj_weight"})
# Names of embeddings, as words in lower case: pos_emb, embed_tokens, vision_embed_tokens, embed_tokens_extend.
_EMBEDDING = "|".join(sorted(_EMBEDDING_WORDS))
_EMBEDDED = "tokens?|tok|positions?|pos|in|state|action|return|timestep"
_EMBEDDING_NAME = re.compile(
    rf"(^|_)({_EMBEDDING})(_({_EMBEDDED}))?$|^({_EMBEDDING})_({_EMBEDDED})_|(^|_)(embedding_table|bias_table|pos_bias)$"
)
# Names of tables whose rows act as tokens or positions: cls_token, registers, a Perceiver's latents, a quantizer's
# codebook, pe.
_TABLE_NAME = re.compile(
    r"(^|_)(tokens?|registers?|latents|queries|(latent|learned)_query|prompts?|codevectors|codebooks?)$|^latents_|"
    r"(^|_)(rpb|pe|ape|pos|positions?|encodings?|table)$|^relative_attention_bias$|^rel_pos(_|$)"
)
_GAINS = frozenset({"scale", "scales", "gamma", "gain"})
_BIAS_WORDS = frozenset({"bias", "biases"})
_DIMS = re.compile(r"_[A-Z]{2,}$")  # the dims of a parameter, as torchtitan writes them: mlp1_bias_EG
_NORM_WORDS = frozenset({"norm", "norms", "layernorm", "rmsnorm", "batchnorm", "groupnorm", "ln", "bn", "gn"})
# Words in the name of a matrix that a module holds without a layer: c_fc, qkvo_w, mm_input_projection_weight. Names
# such as wq and w_gate are recognized by their beginning.
_MATRIX_WORDS = frozenset(
    {"weight", "weights", "kernel", "kernels", "matrix", "linear", "fc", "dense", "proj", "projection", "up", "down"}
    | {"qkv", "qkvo", "kv", *"wqkvo"}
)
_MATRIX_NAME = re.compile(r"w([qkvoiug12]|qkv|kv|in|out|up|down)?$")
# Prefixes of the factors of peft's adapters, and of the seeds of factors.
_ADAPTER = re.compile(
    r"lora_|hada_|lokr_|oft_|boft_|hra_|vera_|pvera_|randlora_|ia3_|fourierft_|waveft_|c3a_|shira_|miss_block|delora_|"
    r"gralora_|hira_|road_(theta|alpha)|vblora_|lily_|deft_[pr]$|psoft_|osf_|adamss_|glora_|tinylora_|unilora_|frod_|"
    r"peanut_|supertuning_|poly_|adaption_prompt|bone_|shadow_(down|up|update)"
)
_FIRST_CONVOLUTIONS = frozenset({"conv1", "conv_in", "conv_pre", "mel_conv", "stem"})
_FRONTS = frozenset({"encoder", "tower", "backbone", "visual", "vocoder", "trunk", "extractor", "embedder"})

_TOPS = frozenset({"module", "model", "base_model", "net", "network"})
_IMAGE_CHANNELS = 3
_FEW_FEATURES = 4  # such as the coordinates of a box
_MANY_TIMES_WIDER = 32  # the least ratio of the long side to the short side for a map from or to few features


class _Model(NamedTuple):
    """A model, as far as the role of one of its parameters depends on the others."""

    names: frozenset[str]
    """The names of all parameters."""
    has_classifier: bool
    """True if a direct child of the model is called "classifier"."""
    is_contrastive: bool
    """True if the model itself has a scale of similarities, as CLIP."""
    gated_mlps: GatedMlps
    """The paths of modules in which a ``gate`` is not a router, with the ndim of their matrices."""
    projections: frozenset[str]
    """The names of weights of queries, keys and values."""
    structure: Structure
    """The structure of the model; it is empty if only names and shapes are known."""


def roles_of(infos: Sequence[ParamInfo], structure: Structure) -> dict[str, Decision]:
    """Return a dict from parameter name to its role (the function in the model, such as "head") and the reason.

    ``structure`` is the structure of the model; it is empty if only names and shapes are known.
    """
    # The role of a parameter also depends on the others: a "gate" next to an "up" is no router. This is collected
    # first.
    names = [info.name for info in infos]
    children_of_model = [_Name(name).child_of_model for name in names]
    model = _Model(
        names=frozenset(names),
        has_classifier="classifier" in children_of_model,
        is_contrastive=not _SCALES_OF_SIMILARITIES.isdisjoint(children_of_model),
        gated_mlps=_gated_mlps(infos),
        projections=_projections_of_attention(infos),
        structure=structure,
    )
    return {info.name: _role(info, model) for info in infos}


def _role(info: ParamInfo, model: _Model) -> Decision:
    """Return the role of a parameter by the first rule that decides: by type, dims, name, shape or structure.

    ``wte.weight`` of an ``nn.Embedding`` is an embedding by its type, and ``blocks.0.fc.weight`` is a hidden matrix,
    since no rule recognizes it. The docstring of `default_labels` describes the rules for users.
    """
    # Each function returns None if it does not recognize the parameter; then ``or`` calls the next one.
    decision = _by_part(info, model) or _by_projector(info, model) or _by_type(info) or _by_adapter(info)
    if decision is not None:
        return decision
    if info.ndim < 2:
        return Decision("vector", f"{info.ndim}-D")
    return (
        _by_name(info, model)
        or _by_shape(info, model)
        or _table(info, model)
        or _first_or_last_layer(info, model)
        or _first_convolution(info, is_read=module_path(info.name) in model.structure.read_in_their_block)
        or Decision("hidden", f"hidden matrix ({info.ndim}-D)")
    )


def _by_type(info: ParamInfo) -> Decision | None:
    """Return the decision by the types of the modules that own the tensor: an embedding, a norm, or None.

    A tensor that several modules own is an embedding if one of them is an embedding.

    >>> _by_type(ParamInfo("wte.weight", (9, 4), module=nn.Embedding)).reason
    'embedding (module type Embedding)'
    """
    # 1. Embeddings, in a loop of their own: a tensor of an nn.Linear and an nn.Embedding is an embedding.
    for module in info.modules:
        if is_embedding(module):
            tied = f", tied with {info.tied[0]!r}" if info.tied else ""
            return Decision("embedding", f"embedding (module type {module.__name__}{tied})")
    # 2. Norms.
    for module in info.modules:
        # A layer such as LayerNormLinear holds a norm and a hidden matrix.
        is_norm = issubclass(module, _NORMS) or class_name_fits(module, _NORM_CLASS)
        if is_norm and not issubclass(module, nn.Linear | _ConvNd):
            return Decision("vector", f"norm (module type {module.__name__})")
    return None


def _by_adapter(info: ParamInfo) -> Decision | None:
    """Return the decision for a factor of an adapter, such as ``lora_A``; None for another parameter.

    An adapter trains a small addition to a frozen weight. The addition is the product of two factors, so that neither
    is a hidden matrix itself.

    >>> _by_adapter(ParamInfo("fc.lora_A.weight", (8, 64)))
    Decision(role='other', reason="low-rank factor (name component 'lora_A')")
    """
    role: Role = "other"
    if info.ndim < 2:
        role = "vector"
    for name in info.names:  # also the other names of a tied tensor
        for component in name.split("."):  # "fc", "lora_A" and "weight"
            if "lora" in _words(component) or _ADAPTER.match(component.lower()):
                return Decision(role, f"low-rank factor (name component {component!r})")
    return None


def _table(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision for a table of vectors, such as ``self.pos_embed = nn.Parameter(...)``; None for others.

    A table is a 2-D parameter that a module holds without a layer. Some modules hold their matrices so, too: a
    parameter with the name of a matrix, such as ``c_fc``, is no table.
    """
    names_in_modules = (info.name, *info.tied)
    is_without_layer = any(name in model.structure.held_by_no_layer for name in names_in_modules)
    is_matrix = _is_named_as_a_matrix(_Name(info.name).layer)
    if info.ndim == 2 and is_without_layer and not is_matrix:
        owner = info.modules[0].__name__
        return Decision("embedding", f"table (a 2-D parameter of {owner}, not the weight of a layer)")
    return None


def _first_or_last_layer(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision for a first or last layer of a model, which its structure shows; None for other layers.

    The structure was found by the widths of layers. A first layer reads a width that no earlier layer returns, such as
    768 pixels of a patch. A last layer returns a width that no layer reads, such as 1000 classes.
    """
    if info.name in model.projections:  # queries and keys meet in a product, so that no layer reads them
        return None
    for name in (info.name, *info.tied):  # a tied tensor is in several layers
        path = module_path(name)  # the path of the layer
        if path in model.structure.inputs:
            width = model.structure.inputs[path].reads
            return Decision("other", f"raw input (no earlier layer returns the {width} features that it reads)")
        if path in model.structure.heads:
            width = model.structure.heads[path].returns
            return Decision("head", f"last layer (no other layer reads the {width} features that it returns)")
    return None


def _is_named_as_a_matrix(leaf: str) -> bool:
    """Return True for the name of a matrix that a module multiplies by, as against a table of vectors.

    >>> _is_named_as_a_matrix("c_fc"), _is_named_as_a_matrix("w_q"), _is_named_as_a_matrix("pos_embed")
    (True, True, False)
    """
    if leaf in PLAIN_LEAVES:  # the module is no linear layer, so the plain name shows nothing
        return False
    words = _words(leaf)
    return any(word in _MATRIX_WORDS or _MATRIX_NAME.match(word) for word in words)


def _by_part(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision for a part of a weight, such as its length with weight norm; None for another parameter.

    Weight norm stores a weight as its length ``fc.weight_g`` and its direction ``fc.weight_v``. A parametrization,
    which computes a weight from other tensors, stores them as ``fc.parametrizations.weight.original0`` and so on.
    """
    leaf = info.name.rpartition(".")[2]
    module = info.name.removesuffix(leaf)  # with a dot at the end
    # Both parts must be there: a "weight_g" alone is an ordinary name.
    has_weight_norm = {f"{module}weight_g", f"{module}weight_v"} <= model.names
    is_length_or_direction = leaf in ("weight_g", "weight_v") and has_weight_norm
    if is_length_or_direction or leaf in ("original0", "original1"):
        return Decision("other", f"part of a parametrized weight (name component {leaf!r})")
    return None


def _by_projector(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision for a direct child of a model that projects features for a classifier or a similarity.

    It is the ``projector.weight`` of a model that also has a ``classifier``, or the ``text_projection.weight`` of one
    with a ``logit_scale``. In other models, these names show nothing, and the result is None.
    """
    if not model.has_classifier and not model.is_contrastive:  # most models
        return None
    child = _Name(info.name).child_of_model
    if child is None:
        return None
    is_before_classifier = model.has_classifier and child == "projector"
    is_before_similarity = model.is_contrastive and _CONTRASTIVE.fullmatch(child)
    if not is_before_classifier and not is_before_similarity:
        return None
    role: Role = "vector" if info.ndim < 2 else "head"
    return Decision(role, f"name component {child!r}")


def _by_name(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision by the names of a tensor, of which a tied tensor has several; None if none is recognized.

    The first name that is recognized decides. Only the name of an embedding precedes all others: a tensor that is both
    ``lm_head.weight`` and ``wte.weight`` is an embedding.
    """
    first_decision: Decision | None = None
    for name in info.names:  # such as "lm_head.weight" and "wte.weight"
        decision = _by_one_name(name, info, model)
        if decision and decision.role == "embedding":
            return decision
        if first_decision is None:
            first_decision = decision
    return first_decision


def _by_one_name(full_name: str, info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision by one name of a tensor, such as "head" for ``lm_head.weight``; None for an ordinary name.

    The rules are in a fixed order, since a name may fit several: ``embed_out_bias`` is a bias first.
    """
    name = _Name(full_name)
    leaf = name.components[-1]
    if _ends_in(_words(_DIMS.sub("", leaf)), _BIAS_WORDS):
        return Decision("vector", f"bias (name component {leaf!r})")
    # Each function returns the component that it recognizes, such as "embed_tokens", or None.
    component_of_role: list[tuple[Role, str | None]] = [
        ("embedding", _embedding_component(name)),
        ("vector", _vector_component(name)),
        ("vector", _norm_component(name, info)),
        ("other", _state_space_component(name)),
        ("other", _patch_embedding_component(name)),
        ("other", _projection_in_embedder(name)),
        ("other", _router_component(name, info.ndim, model.gated_mlps)),
        ("head", _head_component(name, is_read=module_path(full_name) in model.structure.read_in_their_block)),
    ]
    for role, component in component_of_role:
        if component is not None:
            return Decision(role, f"name component {component!r}")
    return None


def _embedding_component(name: _Name) -> str | None:
    """Return the name component of an embedding or a table, such as "pos_embed"; None if there is none.

    An embedding is the weight of a layer, ``embed_tokens.weight``. A table is a parameter without a layer,
    ``pos_embed``, and more names are accepted for it.

    >>> _embedding_component(_Name("embed_tokens.weight")), _embedding_component(_Name("cls_token"))
    ('embed_tokens', 'cls_token')
    """
    if name.is_of_layer:
        is_shared = _ends_in(name.components[:-1], {"shared"})  # shared.weight: T5 and BART share an embedding
        is_recognized = is_shared or _is_embedding_layer(name.layer)
    else:
        is_recognized = _is_table(name.words)
    return name.layer if is_recognized else None


def _is_embedding_layer(layer_name: str) -> bool:
    """Return True for the name of a layer that reads indices or one-hots, such as "embed_tokens".

    >>> _is_embedding_layer("embed_tokens"), _is_embedding_layer("patch_embed"), _is_embedding_layer("fc")
    (True, False, False)
    """
    words = _words(layer_name)
    if "patch" in words:  # it reads pixels
        return False
    # A bias of attention may be a layer: an nn.Embedding reads distances of positions, and returns a bias for each.
    is_attention_bias = layer_name == "relative_attention_bias" or _ends_in(words, _BIAS_WORDS)
    return is_attention_bias or _EMBEDDING_NAME.search("_".join(words)) is not None


def _is_table(words: list[str]) -> bool:
    """Return True if the words are of the name of a table that a module holds without a layer, such as "rel_pos_h".

    >>> _is_table(["cls", "token"]), _is_table(["rel", "pos", "h"]), _is_table(["embed", "proj"])
    (True, True, False)
    """
    name = "_".join(words)
    if _EMBEDDING_NAME.search(name) or _TABLE_NAME.search(name):
        return True
    # An embedding word anywhere, except in the name of a projection, which is a matrix.
    has_embedding_word = not _EMBEDDING_WORDS.isdisjoint(words)
    is_projection = "proj" in words or "projection" in words
    return has_embedding_word and not is_projection


def _vector_component(name: _Name) -> str | None:
    """Return the last component of a parameter name if it shows an elementwise parameter, such as "gamma"; else None.

    Such a parameter multiplies or is added element by element, also if it has two dims, so that it is no matrix. It
    belongs to no layer, so that its name does not end in "weight".

    >>> _vector_component(_Name("mixer.A_log")), _vector_component(_Name("layer_scale"))
    ('A_log', 'layer_scale')
    """
    if name.is_of_layer:
        return None
    leaf = name.components[-1]
    words = _words(leaf)
    is_bias = _ends_in(words, {"u", "v"}) and "bias" in words  # pos_bias_u and pos_bias_v in Transformer-XL
    is_table_of_rates = leaf.lower() in _ELEMENTWISE  # A_log in Mamba
    is_gain = _ends_in(words, _GAINS)  # layer_scale, gamma
    if is_bias or is_table_of_rates or is_gain:
        return leaf
    return None


def _norm_component(name: _Name, info: ParamInfo) -> str | None:
    """Return the name of the layer if it is of a norm, such as "ln_1"; None if it is not, or the type shows it.

    >>> _norm_component(_Name("ln_1.weight"), ParamInfo("ln_1.weight", (8, 8)))
    'ln_1'
    """
    if info.module is None and _ends_in(name.words, _NORM_WORDS):
        return name.layer
    return None


def _state_space_component(name: _Name) -> str | None:
    """Return the name of a layer that computes rates of a state-space layer, such as "x_proj" in Mamba; or None."""
    return name.layer if name.layer.lower() in _STATE_SPACE else None


def _patch_embedding_component(name: _Name) -> str | None:
    """Return the name component of a layer or module that embeds patches of an image; None if there is none.

    >>> _patch_embedding_component(_Name("patch_embed.proj.weight")), _patch_embedding_component(_Name("patches.fc.w"))
    ('patch_embed', None)
    """
    for component in name.components:
        words = _words(component)
        ends_in_embedding = _ends_in(words, _EMBEDDING_WORDS)
        is_layer_of_embedding = _ends_in(words[:-1], {"embed"})  # patch_embed_proj
        if "patch" in words and (ends_in_embedding or is_layer_of_embedding):
            return component
    return None


def _projection_in_embedder(name: _Name) -> str | None:
    """Return the path of a projection directly in an embedder, which reads raw input; None for another layer.

    >>> _projection_in_embedder(_Name("x_embedder.proj.weight")), _projection_in_embedder(_Name("attn.proj.weight"))
    ('x_embedder.proj', None)
    >>> _projection_in_embedder(_Name("vit.embeddings.patch_projection.weight"))
    'embeddings.patch_projection'
    """
    if len(name.components) < 3 or not name.is_of_layer:  # the embedder, the layer and "weight" are needed
        return None
    embedder, layer, _ = name.components[-3:]
    is_projection = layer in ("proj", "projection")
    is_projection_of_patches = "patch" in name.words and _ends_in(name.words, {"proj", "projection"})
    is_in_embedder = _ends_in(_words(embedder), {"embed", "embedder"})
    is_in_embeddings = _ends_in(_words(embedder), _EMBEDDING_WORDS)
    if (is_projection and is_in_embedder) or (is_projection_of_patches and is_in_embeddings):
        return f"{embedder}.{layer}"
    return None


def _head_component(name: _Name, *, is_read: bool) -> str | None:
    """Return the component of a parameter name that shows an output head, such as "lm_head"; None if there is none.

    ``is_read`` is True if another layer reads the outputs of the layer. Then the layer itself is hidden in spite of its
    name, but a module around it may be a head.

    >>> _head_component(_Name("lm_head.weight"), is_read=False), _head_component(_Name("lm_head.weight"), is_read=True)
    ('lm_head', None)
    >>> _head_component(_Name("cls_head.blocks.0.fc.weight"), is_read=True)
    'cls_head'
    """
    component = _named_as_head(name)
    if is_read and component == name.layer:
        return None
    return component


def _named_as_head(name: _Name) -> str | None:
    """Return the component of a parameter name that is the name of an output head; None if there is none.

    All layers inside a head are parts of it. Common names, such as "fc", count only for a direct child of the model.

    >>> _named_as_head(_Name("cls_head.dense.weight")), _named_as_head(_Name("fc.weight"))
    ('cls_head', 'fc')
    >>> _named_as_head(_Name("blocks.0.fc.weight"))  # None
    """
    for component in name.components:
        if _is_head(_words(component)):
            return component
    is_child_of_model = name.child_of_model == name.layer
    if is_child_of_model and _TOP_HEAD.fullmatch(name.layer):  # such as "fc" and "output"
        return name.layer
    if _is_decoder_layer(name):
        return name.layer
    return None


def _is_decoder_layer(name: _Name) -> bool:
    """Return True for the weight of a decoder of one layer, from features to the vocabulary, as in BERT.

    The names are ``decoder.weight`` and ``decoder.output_projection.weight``. The decoder of other models is a module
    of many layers, such as ``decoder.layers.0.fc.weight``.
    """
    path = name.components[:-1]  # ["decoder"], or ["decoder", "output_projection"]
    if _ends_in(path, {"output_projection"}):
        path = path[:-1]
    return name.is_of_layer and _ends_in(path, {"decoder"})


def _is_head(words: list[str]) -> bool:
    """Return True for the words of a name component that are the name of an output head.

    A head of attention, as in "q_head", is no output head.

    >>> _is_head(["lm", "head"]), _is_head(["classifier"]), _is_head(["head", "linear"]), _is_head(["q", "head"])
    (True, True, True, False)
    """
    if not words:
        return False
    if "_".join(words) in _HEADS:  # a name that is a head only as a whole: cls_score, qa_outputs
        return True
    if _ends_in(words, {"out"}) and _ends_in(words[:-1], _EMBEDDING_WORDS):  # embed_out in GPT-NeoX
        return True
    if _ends_in(words, _HEAD_WORDS):  # a word such as "head" or "classifier" in the end
        return not _is_head_of_attention(words)
    # A head word at the beginning, and only the words of a layer after it: head_linear, but not head_norm.
    return words[0] in _HEAD_WORDS and all(word in _AFTER_HEAD for word in words[1:])


def _is_head_of_attention(words: list[str]) -> bool:
    """Return True for the words of a name such as "q_head", "multi_head" and "attn_output_head".

    A head of attention is a part of a hidden layer, and no output head.

    >>> _is_head_of_attention(["q", "head"]), _is_head_of_attention(["lm", "head"])
    (True, False)
    """
    *words_before, last_word = words
    # A projection directly before "head": q_head. A word of attention anywhere before it: attn_output_head.
    is_of_attention = _ends_in(words_before, _PROJECTIONS) or not _ATTENTION_WORDS.isdisjoint(words_before)
    return last_word == "head" and is_of_attention


def _router_component(name: _Name, ndim: int, gated_mlps: GatedMlps) -> str | None:
    """Return the component of a parameter name that shows a router of experts, such as "router"; None if there is none.

    A layer "gate" is a router, too, unless it is a part of a gated MLP: inside an expert, as ``experts.0.gate``, or in
    a module that also has ``up`` or ``down``. ``gated_mlps`` has the path of each such module, with the number of dims
    of its matrices. ``ndim`` is the number of dims of the parameter.

    >>> name = _Name("mlp.gate.weight")
    >>> _router_component(name, 2, frozenset()), _router_component(name, 2, frozenset({("mlp", 2)}))
    ('gate', None)
    """
    for index, component in enumerate(name.components):
        words = _words(component)
        if not _ROUTER_WORDS.isdisjoint(words):  # the word "router" is enough
            return component
        if not _is_gate(words):
            continue
        modules_around = name.components[:index]
        is_in_gated_mlp = (".".join(modules_around), ndim) in gated_mlps
        is_in_expert = _is_inside(modules_around, {"expert", "experts"})
        if not is_in_gated_mlp and not is_in_expert:
            return component
    return None


def _is_gate(words: list[str]) -> bool:
    """Return True for the words of a gate, which may belong to a router: ["gate"], ["moe", "gate"].

    >>> _is_gate(["moe", "gate"]), _is_gate(["gate", "proj"])
    (True, False)
    """
    is_gate_of_mixture = _ends_in(words, {"gate", "gating"}) and not _MIXTURE_WORDS.isdisjoint(words)
    return is_gate_of_mixture or "_".join(words) in _ROUTERS


def _gated_mlps(infos: Iterable[ParamInfo]) -> GatedMlps:
    """Return the modules that contain layers called ``up`` or ``down``: in them, a layer ``gate`` is no router.

    Each is a pair of its path and the number of dims of these matrices. A gated MLP multiplies the outputs of ``gate``
    and ``up``, so that both are hidden layers. A ``gate`` elsewhere is a router of experts.

    >>> _gated_mlps([ParamInfo("mlp.up.weight", (64, 8))])
    frozenset({('mlp', 2)})
    """
    mlps: set[tuple[str, int]] = set()
    for info in infos:
        for name in info.names:
            components = _components(name)
            for index, component in enumerate(components):
                if not {"up", "down"}.isdisjoint(_words(component)):
                    path_of_mlp = ".".join(components[:index])  # the module around "up"
                    mlps.add((path_of_mlp, info.ndim))
    return frozenset(mlps)


def _projections_of_attention(infos: Iterable[ParamInfo]) -> frozenset[str]:
    """Return the names of weights of queries, keys and values, of which a module has at least two.

    A single ``value.weight`` may also be a head, which predicts the value of a state.

    >>> shape = (8, 8)
    >>> infos = [ParamInfo("attn.q.weight", shape), ParamInfo("attn.k.weight", shape), ParamInfo("value.weight", shape)]
    >>> sorted(_projections_of_attention(infos))
    ['attn.k.weight', 'attn.q.weight']
    """
    module_of: dict[str, str] = {}  # the path of the module around each projection, "attn" for "attn.query.weight"
    for info in infos:
        if info.ndim < 2:  # a bias
            continue
        name = _Name(info.name)
        if not _PROJECTIONS.isdisjoint(name.words):
            module_of[info.name] = ".".join(name.path_to_layer[:-1])
    counts = Counter(module_of.values())  # how many projections a module has
    return frozenset({name for name, module in module_of.items() if counts[module] > 1})


def _by_shape(info: ParamInfo, model: _Model) -> Decision | None:
    """Return the decision for a shape without a matrix to orthogonalize, such as (64, 1); None if there is a matrix.

    Such shapes are (64, 1), a vector; (64, 1, 3, 3), the vectors of a depthwise convolution; (4, 256), a layer from or
    to few features; and (64, 3, 7, 7), a convolution of an image.
    """
    rows = info.shape[0]
    columns = prod(info.shape[1:])  # more dims are flattened
    if rows == 1 or columns == 1:
        return Decision("vector", "a side of 1: a vector")
    # A depthwise convolution reads one channel in each of its groups. One that reads gray images has this shape, too:
    # its module shows that it has no groups.
    reads_gray_images = module_path(info.name) in model.structure.read_one_channel
    if info.ndim > 2 and info.shape[1] == 1 and not reads_gray_images:
        return Decision("vector", "depthwise: one vector a channel")
    if info.ndim == 2:
        return _by_few_features(info.shape)
    return _by_few_channels(info)


def _by_few_features(shape: tuple[int, ...]) -> Decision | None:
    """Return the decision for a matrix from or to few features, such as the coordinates of a box: (4, 256).

    >>> _by_few_features((4, 256)).reason
    'from or to 4 features'
    """
    short, long = sorted(shape)
    if 0 < short <= _FEW_FEATURES and long >= _MANY_TIMES_WIDER * short:
        return Decision("other", f"from or to {short} features")
    return None


def _by_few_channels(info: ParamInfo) -> Decision | None:
    """Return the decision for a convolution from or to at most 3 channels, which reads or returns an image; else None.

    >>> _by_few_channels(ParamInfo("conv.weight", (64, 3, 7, 7))).reason
    'convolution from or to 3 channels'
    """
    # Without a module type, a tensor of three dims may as well be a stack of matrices.
    may_be_stack = info.module is None and info.ndim == 3
    short = min(info.shape[:2])
    if short > _IMAGE_CHANNELS or may_be_stack or not is_convolution(info):
        return None
    channels = "one channel" if short == 1 else f"{short} channels"
    return Decision("other", f"convolution from or to {channels}")


def _first_convolution(info: ParamInfo, *, is_read: bool) -> Decision | None:
    """Return the decision if the name belongs to the convolution of the raw input, such as ``conv1.weight``; or None.

    The layer must be a direct child of the model, or of its front part, as in ``vision_tower.conv1.weight``. A layer
    called "conv1" is also in each block of a ResNet, where it is hidden. ``is_read`` is True if another layer of its
    block reads its outputs, which shows such a layer under any path, also ``backbone.4.0.conv1``.

    >>> _first_convolution(ParamInfo("conv1.weight", (64, 12, 7, 7)), is_read=False).role
    'other'
    >>> _first_convolution(ParamInfo("layer1.0.conv1.weight", (64, 64, 3, 3)), is_read=False)  # None
    """
    if is_read or not is_convolution(info):
        return None
    for name in map(_Name, info.names):
        if _is_first_of_speech_encoder(name):
            return Decision("other", "convolution of the input (name component 'conv_layers', the first)")
        # The name alone is not enough: the layer must also be at the front of the model.
        is_at_front = name.child_of_model == name.layer or _is_child_of_front(name)
        if name.layer in _FIRST_CONVOLUTIONS and is_at_front:
            return Decision("other", f"convolution of the input (name component {name.layer!r})")
    return None


def _is_child_of_front(name: _Name) -> bool:
    """Return True if a layer is a direct child of the front part of a model, which reads the raw input.

    >>> _is_child_of_front(_Name("vision_tower.conv1.weight")), _is_child_of_front(_Name("tower.block.conv1.weight"))
    (True, False)
    """
    for component in reversed(name.components[:-2]):  # without the layer and its weight, the innermost module first
        if not component.isdigit():  # the first one with a name decides; the numbers of a list are skipped
            return _ends_in(_words(component), _FRONTS)
    return False


def _is_first_of_speech_encoder(name: _Name) -> bool:
    """Return True for the first convolution of an encoder of speech, such as wav2vec 2.0, which reads the waveform.

    >>> _is_first_of_speech_encoder(_Name("feature_extractor.conv_layers.0.conv.weight"))
    True
    """
    path, _, leaf = ".".join(name.components).partition(".conv_layers.0.")
    return leaf != "" and _is_inside(path.split("."), _FRONTS)


def _is_inside(modules_around: Iterable[str], words: Set[str]) -> bool:
    """Return True if the name of one of the modules around a parameter ends in one of the words."""
    return any(_ends_in(_words(module), words) for module in modules_around)


class _Name:
    """The name of a parameter, split into its components.

    >>> name = _Name("_orig_mod.blocks.lm_head.0.weight")
    >>> name.components, name.layer, name.words
    (['blocks', 'lm_head', '0', 'weight'], 'lm_head', ['lm', 'head'])
    """

    def __init__(self, name: str) -> None:
        self.components = _components(name)
        """The components of the name. Components that wrappers and peft's adapters add are left out."""
        self.is_of_layer = self.components[-1] in LEAVES_OF_LAYERS
        """True for the weight of a layer, as ``blocks.fc.weight``, and False for ``pos_embed``."""
        self.path_to_layer = _path_to_layer(self.components, self.is_of_layer)
        """The components up to the layer: ["blocks", "fc"] for ``blocks.fc.0.weight``."""
        self.layer = self.path_to_layer[-1]
        """The name of the layer, such as "fc"; of a parameter without a layer, its own."""
        self.words = _words(self.layer)
        """The words of the name of the layer."""

    @property
    def child_of_model(self) -> str | None:
        """The name of the layer, if it is a direct child of the model; None if it is nested deeper.

        A first component such as "model" is no level: it is the name of the whole model in a module around it.

        >>> _Name("fc.weight").child_of_model, _Name("model.fc.weight").child_of_model
        ('fc', 'fc')
        >>> _Name("blocks.fc.weight").child_of_model  # None
        """
        path = self.components
        if self.is_of_layer:  # without "weight"
            path = path[:-1]
        while len(path) > 1 and path[0] in _TOPS:
            path = path[1:]
        if len(path) != 1:
            return None
        return path[0]


def _components(name: str) -> list[str]:
    """Split a parameter name at its dots, without the components that wrappers and peft's adapters add.

    >>> _components("_orig_mod.fc.base_layer.weight"), _components("head.modules_to_save.default.weight")
    (['fc', 'weight'], ['head', 'weight'])
    """
    components = plain_name(name).split(".")
    if "modules_to_save" in components[:-1]:  # as in "head.modules_to_save.default.weight", with the adapter's name
        index = components.index("modules_to_save")  # this component and the next one are removed
        del components[index : index + 2]
    components = [component for component in components if component not in ("base_layer", "original_module")]
    return components or [name]


def _path_to_layer(components: list[str], is_of_layer: bool) -> list[str]:
    """Return the path of the layer of a parameter, without the numbers of a list at its end.

    >>> _path_to_layer(["blocks", "fc", "0", "weight"], True), _path_to_layer(["vit", "prompts", "0"], False)
    (['blocks', 'fc'], ['vit', 'prompts'])
    """
    path = list(components)
    if is_of_layer:  # without "weight"
        path.pop()
    while path and path[-1].isdigit():
        path.pop()
    return path or components  # a name of "weight" or numbers alone remains as it is


def _words(component: str) -> list[str]:
    """Split a component of a parameter name into words in lower case, without its digits and underscores.

    >>> _words("embedTokens2"), _words("lm_head"), _words("QKVProj")
    (['embed', 'tokens'], ['lm', 'head'], ['qkv', 'proj'])
    """
    # A word is either capitals that no small letter follows, as in "QKV", or small letters after at most one capital.
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", component)
    return list(map(str.lower, words))


def _ends_in(words: Sequence[str], last_words: Set[str]) -> bool:
    """Return True if the last word is one of ``last_words``; False if there is no word."""
    return bool(words) and words[-1] in last_words
