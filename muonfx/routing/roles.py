"""The role of each parameter in a model, such as "embedding", by module type, name and shape, with a reason.

Module types decide first, if a model is given: an embedding is recognized under any name. Names decide where types are
ambiguous, since a hidden layer, an output head and a router are all ``nn.Linear``. Shapes decide the rest. A name is
split into components and their words, and never matched by substrings: ``gate`` is a router and ``gate_proj`` is not,
``embed_tokens`` is an embedding and ``embedder_proj`` is not. An ambiguous parameter is not called a hidden matrix,
because AdamW is never wrong, but may train slower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from math import prod
from typing import Literal, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from muonfx.routing.params import ParamInfo, module_path, plain_name
from muonfx.routing.structure import UNKNOWN_STRUCTURE, Structure
from muonfx.routing.views import PLAIN_LEAVES, class_name_fits, is_convolution

Role = Literal["hidden", "embedding", "head", "vector", "other"]
"""The role of a parameter; `default_labels` describes the roles."""

ROLES: tuple[Role, ...] = ("hidden", "embedding", "head", "vector", "other")
"""All roles."""


class Decision(NamedTuple):
    """The role of a parameter (its function in the model, such as "head"), and the reason for this choice, as text."""

    role: Role
    reason: str


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
# Class names of layers in other packages: VocabParallelEmbedding, Embedding4bit; LlamaRMSNorm, LayerNorm2d,
# RMSNormGated. LayerNormLinear is excluded, since it holds a hidden matrix.
_EMBEDDING_CLASS = r"Embedding(s|Bag|\d+bit|NF4|FP4)?$"
_NORM_CLASS = r"Norm(\dd|Act|Gated|[Ff][Pp]\d+)*$"

_EMBEDDING_WORDS = frozenset(
    {"embed", "embeds", "embedding", "embeddings", "embedder", "embedders", "emb", "embs", "embd", "wte", "wpe"}
)
# Words that may follow an embedding word: embed_tokens, embed_positions, embed_in, ...
_EMBEDDED = frozenset(
    {"token", "tokens", "tok", "position", "positions", "pos", "in", "state", "action", "return", "timestep"}
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
# Heads only as a direct child of the model, as in torchtitan, ResNet and Whisper: the names are too common elsewhere.
_TOP_HEADS = frozenset({"output", "fc", "out", "proj_out", "conv_out", "conv_post", "proj_out_conv"})
_ROUTERS = frozenset({"gate", "gating", "gating_network", "gate_network", "shared_expert_gate"})
# Rates of state-space and RWKV layers, and the small matrices that compute them from the input.
_ELEMENTWISE = frozenset({"a_log", "d", "time_decay", "time_first", "time_faaaa"})
_STATE_SPACE = frozenset({"x_proj", "dt_proj", "x_proj_weight", "dt_proj_weight"})
# Tables whose rows act as tokens or positions: cls_token, registers, a Perceiver's latents, a quantizer's codebook, pe.
_TABLES = frozenset(
    {"token", "tokens", "latents", "queries", "prompt", "prompts", "codevectors", "codebook", "codebooks", "rpb"}
    | {"register", "registers", "pe", "ape", "pos", "position", "positions", "encoding", "encodings", "table"}
)
_GAINS = frozenset({"scale", "scales", "gamma", "gain"})
_BIAS_WORDS = frozenset({"bias", "biases"})
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
    r"peanut_|supertuning_|poly_|adaption_prompt|bone_"
)
_FIRST_CONVOLUTIONS = frozenset({"conv1", "conv_in", "conv_pre", "mel_conv", "stem"})
_FRONTS = frozenset({"encoder", "tower", "backbone", "visual", "vocoder", "trunk", "extractor", "embedder"})

_PLAIN_LEAVES = PLAIN_LEAVES | {"weight_v"}
_TOPS = frozenset({"module", "model", "base_model", "net", "network"})
_IMAGE_CHANNELS = 3
_FEW = 4  # features, such as the coordinates of a box
_MANY = 32  # ratio of the long side to the short side


def roles_of(infos: Sequence[ParamInfo], structure: Structure = UNKNOWN_STRUCTURE) -> dict[str, Decision]:
    """Return a dict from parameter name to its role (the function in the model, such as "head") and the reason.

    ``structure`` is the structure of the model, if it is known, and not names and shapes only.
    """
    gated_mlps = _gated_mlps(infos)
    projections = _projections_of_attention(infos)
    decisions = _known_by_neighbours(infos)
    for info in infos:
        if info.name not in decisions:
            decisions[info.name] = _role(info, gated_mlps, projections, structure)
    return decisions


def _role(
    info: ParamInfo, gated_mlps: frozenset[tuple[str, int]], projections: frozenset[str], structure: Structure
) -> Decision:
    """Return the role of a parameter by the first of these that decides: type, dims, name, shape, structure.

    A parameter that none of them recognizes is a hidden matrix.

    Args:
        info: the parameter.
        gated_mlps: (path, ndim) of modules in which a ``gate`` is not a router, as `_gated_mlps` returns them.
        projections: the names of projections of attention, as `_projections_of_attention` returns them.
        structure: the structure of the model.
    """
    decision = _by_type(info) or _by_adapter(info)
    if decision:
        return decision
    if info.ndim < 2:
        return Decision("vector", f"{info.ndim}-D")
    decision = _by_name(info, gated_mlps, structure) or _by_shape(info)
    decision = decision or _table(info, structure)
    # Queries and keys meet in a product, so that no layer reads them.
    if decision is None and info.name not in projections:
        decision = _first_or_last_layer(info, structure)
    decision = decision or _first_convolution(info)
    return decision or Decision("hidden", f"hidden matrix ({info.ndim}-D)")


def _by_type(info: ParamInfo) -> Decision | None:
    """Return the decision by the types of the modules that own the tensor: an embedding, a norm, or None.

    A tensor that several modules own is an embedding if one of them is an embedding.
    """
    for module in info.modules:
        if issubclass(module, nn.Embedding | nn.EmbeddingBag) or class_name_fits(module, _EMBEDDING_CLASS):
            tied = f", tied with {info.tied[0]!r}" if info.tied else ""
            return Decision("embedding", f"embedding (module type {module.__name__}{tied})")
    for module in info.modules:
        is_norm = issubclass(module, _NORMS) or class_name_fits(module, _NORM_CLASS)
        if is_norm and not issubclass(module, nn.Linear | _ConvNd):
            return Decision("vector", f"norm (module type {module.__name__})")
    return None


def _by_adapter(info: ParamInfo) -> Decision | None:
    """Return the decision for a factor of an adapter, such as ``lora_A``; None for another parameter."""
    role: Role = "vector" if info.ndim < 2 else "other"
    for name in info.names:
        for component in name.split("."):
            if "lora" in _words(component) or _ADAPTER.match(component.lower()):
                return Decision(role, f"low-rank factor (name component {component!r})")
    return None


def _table(info: ParamInfo, structure: Structure) -> Decision | None:
    """Return the decision for a 2-D parameter that is not the weight of a layer, a table; None for another parameter.

    A parameter with the name of a matrix, such as ``c_fc``, is no table.
    """
    is_of_no_layer = not structure.held_by_no_layer.isdisjoint({info.name, *info.tied})
    if info.ndim != 2 or not is_of_no_layer:
        return None
    if _is_named_as_a_matrix(_layer_or_leaf(_components(info.name))):
        return None
    owner = "" if info.module is None else f" of {info.module.__name__}"
    return Decision("embedding", f"table (a 2-D parameter{owner}, not the weight of a layer)")


def _first_or_last_layer(info: ParamInfo, structure: Structure) -> Decision | None:
    """Return the decision for a layer of raw input or a head by the structure of the model; None for another layer."""
    for name in (info.name, *info.tied):
        path = module_path(name)
        if layer := structure.inputs.get(path):
            return Decision("other", f"raw input (no earlier layer returns the {layer.reads} features that it reads)")
        if layer := structure.heads.get(path):
            return Decision("head", f"last layer (no other layer reads the {layer.returns} features that it returns)")
    return None


def _is_named_as_a_matrix(leaf: str) -> bool:
    """Return True for names such as ``c_fc``, ``w1``, ``W_q`` and ``rel_logits_proj``."""
    if leaf in PLAIN_LEAVES:  # the module is no linear layer, so the plain name shows nothing
        return False
    words = _words(leaf)
    return any(word in _MATRIX_WORDS or _MATRIX_NAME.match(word) for word in words)


def _known_by_neighbours(infos: Sequence[ParamInfo]) -> dict[str, Decision]:
    """Find parameters whose role depends on other parameters; return a dict by name.

    The lengths and directions of weight norm, and similar parts, form one weight. A projector that is a direct child of
    the model next to a classifier is a part of its head.
    """
    names = {info.name for info in infos}
    layers = {info.name: _layer_of_model(_components(info.name)) for info in infos}
    has_classifier = "classifier" in layers.values()
    decisions: dict[str, Decision] = {}
    for info in infos:
        prefix, dot, leaf = info.name.rpartition(".")
        partner = {"weight_g": "weight_v", "weight_v": "weight_g", "original1": "original0"}.get(leaf)
        has_partner = partner is not None and f"{prefix}{dot}{partner}" in names
        if leaf == "original0" or has_partner:
            decisions[info.name] = Decision("other", f"part of a parametrized weight (name component {leaf!r})")
        elif has_classifier and layers[info.name] == "projector":
            role: Role = "vector" if info.ndim < 2 else "head"
            decisions[info.name] = Decision(role, "name component 'projector'")
    return decisions


def _by_name(info: ParamInfo, gated_mlps: frozenset[tuple[str, int]], structure: Structure) -> Decision | None:
    """Return the decision by any name of a tied tensor. A head that is tied to an embedding is an embedding."""
    first_decision = None
    for name in info.names:
        decision = _by_one_name(name, info, gated_mlps, structure)
        if decision and decision.role == "embedding":
            return decision
        first_decision = first_decision or decision
    return first_decision


def _by_one_name(
    name: str, info: ParamInfo, gated_mlps: frozenset[tuple[str, int]], structure: Structure
) -> Decision | None:
    """Return the decision by one name of a tensor, such as "head" for ``lm_head.weight``; None for an ordinary name.

    The kinds are tried in a fixed order, since a name may fit several: ``embed_out_bias`` is a bias first.
    """
    components = _components(name)
    if _ends_in(_words(components[-1]), _BIAS_WORDS):
        return Decision("vector", f"bias (name component {components[-1]!r})")
    if component := _embedding_component(components):
        return Decision("embedding", f"name component {component!r}")
    component = _vector_component(components)
    if component is None and info.module is None:  # a known module type has decided
        component = _norm_component(components)
    if component:
        return Decision("vector", f"name component {component!r}")
    component = _input_component(components) or _router_component(components, info.ndim, gated_mlps)
    if component:
        return Decision("other", f"name component {component!r}")
    component = _head_component(components)
    # A layer of a block is not a head if another layer of the block reads its outputs. This is known only of the layer
    # itself, not of a module around it that has the name of a head.
    is_read_in_block = module_path(name) in structure.read_in_their_block
    is_name_of_layer = component == _layer_or_leaf(components)
    if component and not (is_read_in_block and is_name_of_layer):
        return Decision("head", f"name component {component!r}")
    return None


def _embedding_component(components: list[str]) -> str | None:
    """Return the name component of an embedding or a table, such as "pos_embed"; None if there is none.

    An embedding is the weight of a layer, ``embed_tokens.weight``. A table is a parameter without a layer,
    ``pos_embed``, and more names are accepted for it.
    """
    layer_name = _layer_or_leaf(components)
    words = _words(layer_name)
    if not _is_of_layer(components):
        return layer_name if _is_table(words) else None
    if "patch" in words:  # a layer, not a table
        return None
    if layer_name == "relative_attention_bias" or _ends_in(words, _BIAS_WORDS):  # a layer that reads one-hots
        return layer_name
    if _ends_in(components[:-1], {"shared"}):  # shared.weight: T5 and BART share an embedding
        return layer_name
    return layer_name if _is_embedding(words) else None


def _is_embedding(words: list[str]) -> bool:
    """Return True if the words are of the name of an embedding, such as ["embed", "tokens"] or ["pos", "emb"]."""
    if _ends_in(words, _EMBEDDING_WORDS) or words[-2:] in (["embedding", "table"], ["bias", "table"], ["pos", "bias"]):
        return True
    for pair in (words[:2], words[-2:]):  # embed_tokens, vision_embed_tokens
        if pair and pair[0] in _EMBEDDING_WORDS and _EMBEDDED.issuperset(pair[1:]):
            return True
    return False


def _is_table(words: list[str]) -> bool:
    """Return True if the words are of the name of a table that a module holds without a layer, such as "rel_pos_h"."""
    if _is_embedding(words) or _ends_in(words, _TABLES):
        return True
    if words == ["relative", "attention", "bias"] or words[:2] == ["rel", "pos"] or words[:1] == ["latents"]:
        return True
    if words[-2:] in (["latent", "query"], ["learned", "query"]):
        return True
    return not _EMBEDDING_WORDS.isdisjoint(words) and {"proj", "projection"}.isdisjoint(words)


def _vector_component(components: list[str]) -> str | None:
    """Return the name component of a gain, a bias of relative attention, or a table of state-space rates; or None."""
    if _is_of_layer(components):
        return None
    words = _words(components[-1])
    is_bias = _ends_in(words, {"u", "v"}) and "bias" in words  # pos_bias_u and pos_bias_v in Transformer-XL
    if is_bias or components[-1].lower() in _ELEMENTWISE or _ends_in(words, _GAINS):
        return components[-1]
    return None


def _norm_component(components: list[str]) -> str | None:
    """Return the name component of a norm, such as "ln" for ``blocks.0.ln.weight``; None if there is none."""
    layer_name = _layer_or_leaf(components)
    return layer_name if _ends_in(_words(layer_name), _NORM_WORDS) else None


def _input_component(components: list[str]) -> str | None:
    """Return the name component of a layer of raw input, or of a map to state-space rates; None if there is none.

    The components are of a parameter name: ``["mixer", "x_proj", "weight"]`` gives "x_proj".
    """
    layer_name = _layer_or_leaf(components)
    if layer_name.lower() in _STATE_SPACE:
        return layer_name
    # The layer that embeds patches may be nested: patch_embed.proj.weight, to_patch_embedding.2.weight.
    for component in components:
        if _is_patch_embedding(_words(component)):
            return component
    # A projection in an embedder: pos_embed.proj.weight.
    if layer_name not in ("proj", "projection") or not _is_of_layer(components):
        return None
    if len(components) < 3:
        return None
    holder = components[-3]  # followed by the layer and its weight
    if holder.split("_")[-1] in ("embed", "embedder"):
        return f"{holder}.{layer_name}"
    return None


def _is_patch_embedding(words: list[str]) -> bool:
    """Return True if the words are of the name of a patch embedding: ["patch", "embed"], ["patch", "embed", "proj"]."""
    return "patch" in words and (_ends_in(words, _EMBEDDING_WORDS) or _ends_in(words[:-1], {"embed"}))


def _head_component(components: list[str]) -> str | None:
    """Return the name component of an output head, such as "lm_head" for ``lm_head.weight``; None if there is none."""
    for component in components:
        if _is_head(_words(component)):
            return component
    # A decoder of one layer, as BERT's from features to the vocabulary: decoder.weight. The decoder of other models is
    # a module of many layers.
    path = components[:-1]
    is_decoder = path[-1:] == ["decoder"] or path[-2:] == ["decoder", "output_projection"]
    if is_decoder and _is_of_layer(components):
        return _layer_or_leaf(components)
    # A common name such as "output" or "fc", but only as a direct child of the model.
    layer = _layer_of_model(components)
    return layer if layer is not None and _is_top_head(layer) else None


def _is_top_head(layer: str) -> bool:
    """Return True for a direct child of a model that is a head by its name, such as "output" or "proj_out_2".

    A number above 1 marks the last of several layers, such as proj_out_2 in DiT. The first, proj_out_1, may be followed
    by another, so that 1 is left out. The name fc_2 is left out too, since it is often the name of a hidden layer.
    """
    return layer in _TOP_HEADS or re.sub(r"_[2-9]$", "", layer) in _TOP_HEADS - {"fc"}


def _is_head(words: list[str]) -> bool:
    """Return True if the words of a name component are of an output head: ["lm", "head"], but not ["q", "head"]."""
    # A name that is a head only as a whole: cls_score, qa_outputs.
    if "_".join(words) in _HEADS:
        return True
    if words[-1:] == ["out"] and _ends_in(words[:-1], _EMBEDDING_WORDS):  # embed_out in GPT-NeoX
        return True
    # A head word at the end of the name. At its beginning, certain words may follow: head_linear, but not head_norm.
    for index, word in enumerate(words):
        words_before = words[:index]
        is_after_attention = _ends_in(words_before, _PROJECTIONS) or not _ATTENTION_WORDS.isdisjoint(words_before)
        is_of_attention = word == "head" and is_after_attention
        words_after = words[index + 1 :]
        is_followed = bool(words_after) and (index > 0 or not _AFTER_HEAD.issuperset(words_after))
        if word in _HEAD_WORDS and not is_of_attention and not is_followed:
            return True
    return False


def _layer_of_model(components: list[str]) -> str | None:
    """Return the layer "fc" for the name ``["model", "fc", "weight"]``; None if the layer is nested deeper."""
    path = components[:-1] if _is_of_layer(components) else components
    while len(path) > 1 and path[0] in _TOPS:
        path = path[1:]
    return path[0] if len(path) == 1 else None


def _router_component(components: list[str], ndim: int, gated_mlps: frozenset[tuple[str, int]]) -> str | None:
    """Return the name component of a router of experts, such as "gate"; None if there is none."""
    is_inside_expert = False
    for index, component in enumerate(components):
        words = _words(component)
        is_of_mlp = is_inside_expert or (".".join(components[:index]), ndim) in gated_mlps
        is_router = not {"router", "routing"}.isdisjoint(words)
        if is_router or ("_".join(words) in _ROUTERS and not is_of_mlp):
            return component
        is_inside_expert = is_inside_expert or _ends_in(words, {"expert", "experts"})
    return None


def _gated_mlps(infos: Iterable[ParamInfo]) -> frozenset[tuple[str, int]]:
    """Return (path, ndim) of modules with ``up`` or ``down`` matrices, in which a ``gate`` is not a router."""
    mlps: set[tuple[str, int]] = set()
    for info in infos:
        for name in info.names:
            components = _components(name)
            for index, component in enumerate(components):
                if not {"up", "down"}.isdisjoint(_words(component)):
                    mlps.add((".".join(components[:index]), info.ndim))
    return frozenset(mlps)


def _projections_of_attention(infos: Iterable[ParamInfo]) -> frozenset[str]:
    """Return the names of weights of queries, keys and values, of which a module has at least two.

    The names ``attn.query.weight`` and ``attn.key.weight`` are such names. A single ``value.weight`` may be a head.
    """
    names_by_attention: dict[tuple[str, ...], set[str]] = {}
    for info in infos:
        components = _components(info.name)
        layer_name = _layer_or_leaf(components)
        if info.ndim < 2 or _PROJECTIONS.isdisjoint(_words(layer_name)):
            continue
        attention = components
        while attention[-1] != layer_name:
            attention = attention[:-1]
        names_by_attention.setdefault(tuple(attention[:-1]), set()).add(info.name)
    projections: set[str] = set()
    for names in names_by_attention.values():
        if len(names) > 1:
            projections |= names
    return frozenset(projections)


def _by_shape(info: ParamInfo) -> Decision | None:
    """Return the decision for a shape without a matrix to orthogonalize; None if there is a matrix."""
    rows, columns = info.shape[0], prod(info.shape[1:])  # a tensor of more dims is flattened to (first dim, rest)
    if rows == 1 or columns == 1:
        return Decision("vector", "a side of 1: a vector")
    if info.ndim > 2 and info.shape[1] == 1:
        return Decision("vector", "depthwise: one vector a channel")
    channels = min(info.shape[:2])
    # Without a module type, a tensor of three dims may as well be a stack of matrices.
    is_kernel = (info.module is not None or info.ndim > 3) and is_convolution(info)
    if is_kernel and channels <= _IMAGE_CHANNELS:
        return Decision("other", f"convolution from or to {channels} channels")
    short, long = sorted(info.shape[:2])
    if info.ndim == 2 and 0 < short <= _FEW and long >= _MANY * short:
        return Decision("other", f"from or to {short} features")
    return None


def _first_convolution(info: ParamInfo) -> Decision | None:
    """Return the decision if the name belongs to the convolution of the raw input, such as ``conv1.weight``; or None.

    The layer must be a direct child of the model, or of its front part, as in ``vision_tower.conv1.weight``. A layer
    called "conv1" is also in each block of a ResNet, where it is hidden.
    """
    if not is_convolution(info):
        return None
    for name in info.names:
        components = _components(name)
        if _is_first_of_speech_encoder(components):
            return Decision("other", "convolution of the input (name component 'conv_layers', the first)")
        layer_name = _layer_or_leaf(components)
        is_in_front = _layer_of_model(components) == layer_name or _is_child_of_front(components)
        if layer_name in _FIRST_CONVOLUTIONS and is_in_front:
            return Decision("other", f"convolution of the input (name component {layer_name!r})")
    return None


def _is_child_of_front(components: list[str]) -> bool:
    """Return True if a layer is in the front part of a model, as for ``["vision_tower", "conv1", "weight"]``."""
    for component in reversed(components[:-2]):  # without the layer and its weight
        if not component.isdigit():
            return _ends_in(_words(component), _FRONTS)
    return False


def _is_first_of_speech_encoder(components: list[str]) -> bool:
    """Return True for names such as ``feature_extractor.conv_layers.0.conv.weight``."""
    if "conv_layers" not in components:
        return False
    index = components.index("conv_layers")
    is_in_front = any(_ends_in(_words(component), _FRONTS) for component in components[:index])
    return is_in_front and components[index + 1 : index + 2] == ["0"]


def _components(name: str) -> list[str]:
    """Split a parameter name at its dots, without the components that wrappers and peft's adapters add."""
    components = plain_name(name).split(".")
    if "modules_to_save" in components[:-1]:  # followed by the name of the adapter
        index = components.index("modules_to_save")
        components = components[:index] + components[index + 2 :]
    components = [component for component in components if component not in ("base_layer", "original_module")]
    return components or [name]


def _is_of_layer(components: list[str]) -> bool:
    """Return True for the weight of a layer, as ``blocks.fc.weight``, and False for ``pos_embed``."""
    return components[-1] in _PLAIN_LEAVES


def _layer_or_leaf(components: list[str]) -> str:
    """Return "fc" for ``blocks.fc.weight`` and ``blocks.fc.0.weight``, and "prompts" for ``vit.prompts.0``."""
    candidates = components[:-1] if _is_of_layer(components) else components
    for component in reversed(candidates):
        if not component.isdigit():
            return component
    return components[-1]


def _words(component: str) -> list[str]:
    """Split a component of a parameter name into words in lower case: "embedTokens2" into "embed" and "tokens"."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", component)]


def _ends_in(words: Sequence[str], last_words: Set[str]) -> bool:
    """Return True if the last word is one of ``last_words``; False if there is no word."""
    return bool(words) and words[-1] in last_words
