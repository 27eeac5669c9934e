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

from muonfx.select.params import ParamInfo, plain_name
from muonfx.select.views import PLAIN_LEAVES, class_name_fits, is_convolution

__all__ = ["ROLES", "Role", "roles_of"]

Role = Literal["hidden", "embedding", "head", "vector", "other"]
"""The role of a parameter; `default_labels` describes the roles."""

ROLES: tuple[Role, ...] = ("hidden", "embedding", "head", "vector", "other")
"""All roles."""


class Found(NamedTuple):
    """The role of a parameter (its function in the model, such as "head"), and the reason for this choice, as text."""

    role: Role
    reason: str


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
# Class names of layers in other packages: VocabParallelEmbedding, Embedding4bit; LlamaRMSNorm, LayerNorm2d,
# RMSNormGated. LayerNormLinear is excluded, since it holds a hidden matrix.
_EMBEDDING_CLASS = r"Embedding(s|Bag|\d+bit|NF4|FP4)?$"
_NORM_CLASS = r"Norm(\dd|Act|Gated|[Ff][Pp]\d+)*$"

_EMBEDDING_WORDS = frozenset(
    {"embed", "embeds", "embedding", "embeddings", "embedder", "emb", "embs", "embd", "wte", "wpe"}
)
# Words that may follow an embedding word: embed_tokens, embed_positions, embed_in, ...
_EMBEDDED = frozenset(
    {"token", "tokens", "tok", "position", "positions", "pos", "in", "state", "action", "return", "timestep"}
)
_HEAD_WORDS = frozenset({"head", "classifier", "unembed", "unembedding", "unembedder", "logits"})
_HEADS = frozenset(
    {
        *("score", "cls_score", "output_layer", "vocab_projector", "vocab_proj", "qa_outputs", "seq_relationship"),
        *("ctc_proj", "decoder_pred", "predict_state", "predict_action", "predict_return"),
    }
)
# Heads only as a direct child of the model, as in torchtitan, ResNet and Whisper: the names are too common elsewhere.
_TOP_HEADS = frozenset({"output", "fc", "out", "proj_out", "conv_out", "conv_post"})
_ROUTERS = frozenset({"gate", "gating", "gating_network", "gate_network", "shared_expert_gate"})
# Rates of state-space and RWKV layers, and the small matrices that compute them from the input.
_ELEMENTWISE = frozenset({"a_log", "d", "time_decay", "time_first", "time_faaaa"})
_STATE_SPACE = frozenset({"x_proj", "dt_proj", "x_proj_weight", "dt_proj_weight"})
# Tables whose rows act as tokens or positions: cls_token, registers, a Perceiver's latents, a quantizer's codebook, pe.
_TABLES = frozenset(
    {"token", "tokens", "latents", "queries", "prompt", "prompts", "codevectors", "codebook", "codebooks", "rpb"}
    | {"register", "registers", "pe", "pos", "position", "positions", "encoding", "encodings"}
)
_GAINS = frozenset({"scale", "scales", "gamma", "gain"})
_NORM_WORDS = frozenset({"norm", "norms", "layernorm", "rmsnorm", "batchnorm", "groupnorm", "ln", "bn", "gn"})
# Prefixes of the factors of peft's adapters, and of the seeds of factors.
_ADAPTER = re.compile(
    r"lora_|hada_|lokr_|oft_|boft_|hra_|vera_|pvera_|randlora_|ia3_|fourierft_|waveft_|c3a_|shira_|miss_block|delora_|"
    r"gralora_|hira_|road_(theta|alpha)|vblora_|lily_|deft_[pr]$|psoft_|osf_|adamss_|glora_|tinylora_|unilora_|frod_|"
    r"peanut_|supertuning_|poly_|adaption_prompt|bone_"
)
_FIRST_CONVOLUTIONS = frozenset({"conv1", "conv_in", "conv_pre", "mel_conv", "stem"})
_FRONTS = frozenset({"encoder", "tower", "backbone", "visual", "vocoder", "trunk", "extractor"})

_PLAIN_LEAVES = PLAIN_LEAVES | {"weight_v"}
_TOPS = frozenset({"module", "model", "base_model", "net", "network"})
_IMAGE_CHANNELS = 3
_FEW = 4  # features, such as the coordinates of a box
_MANY = 32  # ratio of the long side to the short side


def roles_of(infos: Sequence[ParamInfo]) -> dict[str, Found]:
    """Return a dict from parameter name to its role (the function in the model, such as "head") and the reason."""
    gated = _gated_mlps(infos)
    known = _known_by_others(infos)
    return {info.name: known.get(info.name) or _role(info, gated) for info in infos}


def _role(info: ParamInfo, gated: frozenset[tuple[str, int]]) -> Found:
    if found := _by_type(info):
        return found
    for part in (part for name in info.names for part in name.split(".")):
        if "lora" in _words(part) or _ADAPTER.match(part.lower()):
            return Found("vector" if info.ndim < 2 else "other", f"low-rank factor (name component {part!r})")
    if info.ndim < 2:
        return Found("vector", f"{info.ndim}-D")
    found = _by_name(info, gated) or _by_shape(info) or _first_convolution(info)
    return found or Found("hidden", f"hidden matrix ({info.ndim}-D)")


def _by_type(info: ParamInfo) -> Found | None:
    for module in info.modules:
        if issubclass(module, nn.Embedding | nn.EmbeddingBag) or class_name_fits(module, _EMBEDDING_CLASS):
            tied = f", tied with {info.tied[0]!r}" if info.tied else ""
            return Found("embedding", f"embedding (module type {module.__name__}{tied})")
    for module in info.modules:
        is_norm = issubclass(module, _NORMS) or class_name_fits(module, _NORM_CLASS)
        if is_norm and not issubclass(module, nn.Linear | _ConvNd):
            return Found("vector", f"norm (module type {module.__name__})")
    return None


def _known_by_others(infos: Sequence[ParamInfo]) -> dict[str, Found]:
    """Find parameters whose role depends on other parameters; return a dict by name."""
    # The lengths and directions of weight norm, and similar parts, form one weight. A projector that is a direct child
    # of the model next to a classifier is a part of its head.
    names = {info.name for info in infos}
    layers = {info.name: _layer_of_model(_components(info.name)) for info in infos}
    has_head = "classifier" in layers.values()
    found: dict[str, Found] = {}
    for info in infos:
        above, _, leaf = info.name.rpartition(".")
        sibling = {"weight_g": "weight_v", "weight_v": "weight_g", "original1": "original0"}.get(leaf)
        if leaf == "original0" or (sibling and f"{above}.{sibling}".removeprefix(".") in names):
            found[info.name] = Found("other", f"part of a parametrized weight (name component {leaf!r})")
        elif has_head and layers[info.name] == "projector":
            found[info.name] = Found("vector" if info.ndim < 2 else "head", "name component 'projector'")
    return found


def _by_name(info: ParamInfo, gated: frozenset[tuple[str, int]]) -> Found | None:
    # Any name of a tied tensor decides. A head that is tied to an embedding is an embedding.
    found = [own for name in info.names if (own := _by_one_name(name, info, gated))]
    embeddings = [own for own in found if own.role == "embedding"]
    return (embeddings or found or [None])[0]


def _by_one_name(name: str, info: ParamInfo, gated: frozenset[tuple[str, int]]) -> Found | None:
    parts = _components(name)
    if _words(parts[-1])[-1:] == ["bias"]:
        return Found("vector", f"bias (name component {parts[-1]!r})")
    own = _own_component(parts)[1]
    is_norm = info.module is None and _ends_in(_words(own), _NORM_WORDS)  # a known module type has decided
    components: dict[Role, str | None] = {
        "embedding": _embedding_component(parts),
        "vector": _vector_component(parts) or (own if is_norm else None),
        "other": _other_component(parts) or _router_component(parts, info.ndim, gated),
        "head": _head_component(parts),
    }
    return next((Found(role, f"name component {named!r}") for role, named in components.items() if named), None)


def _embedding_component(parts: list[str]) -> str | None:
    held, own = _own_component(parts)
    words = _words(own)
    if held and "patch" in words:  # a layer, not a table
        return None
    if _ends_in(words, _EMBEDDING_WORDS) or words[-2:] in (["embedding", "table"], ["bias", "table"], ["pos", "bias"]):
        return own
    for pair in (words[:2], words[-2:]):  # embed_tokens, vision_embed_tokens
        if pair and pair[0] in _EMBEDDING_WORDS and _EMBEDDED.issuperset(pair[1:]):
            return own
    if own == "relative_attention_bias" or (held and parts[-2:-1] == ["shared"]):  # T5 and BART share an embedding
        return own
    is_table = _ends_in(words, _TABLES) or words[:2] == ["rel", "pos"] or words[:1] == ["latents"]
    is_table |= bool({"embedding", "embeddings"} & set(words)) and {"proj", "projection"}.isdisjoint(words)
    return own if is_table and not held else None


def _vector_component(parts: list[str]) -> str | None:
    """Return the name component of a gain, a bias of relative attention, or a table of state-space rates; or None."""
    held, own = _own_component(parts)
    words = _words(own)
    is_bias = words[-1:] in (["u"], ["v"]) and "bias" in words
    return own if not held and (is_bias or own.lower() in _ELEMENTWISE or _ends_in(words, _GAINS)) else None


def _other_component(parts: list[str]) -> str | None:
    """Return the name component of a layer from patches, or of a map to state-space rates; None if there is none."""
    own = _own_component(parts)[1]
    return own if own.lower() in _STATE_SPACE else _patch_component(parts)


def _patch_component(parts: list[str]) -> str | None:
    # The layer that embeds patches may be nested: patch_embed.proj, to_patch_embedding.2.
    return next((part for part in parts if "patch" in _words(part) and _ends_in(_words(part), _EMBEDDING_WORDS)), None)


def _head_component(parts: list[str]) -> str | None:
    held, own = _own_component(parts)
    for part in parts:
        words = _words(part)
        of_attention = words[-1:] == ["head"] and not {"attn", "attention", "multi"}.isdisjoint(words)
        is_unembedding = words[-1:] == ["out"] and _ends_in(words[:-1], _EMBEDDING_WORDS)  # embed_out in GPT-NeoX
        if is_unembedding or "_".join(words) in _HEADS or (_ends_in(words, _HEAD_WORDS) and not of_attention):
            return part
    if held and parts[-2:-1] == ["decoder"]:  # a decoder of one layer, as BERT's from features to the vocabulary
        return own
    if held and parts[-3:-1] == ["decoder", "output_projection"]:
        return own
    return own if _layer_of_model(parts) in _TOP_HEADS else None


def _layer_of_model(parts: list[str]) -> str | None:
    """Return the layer "fc" for the name ``["model", "fc", "weight"]``; None if the layer is nested deeper."""
    path = parts[:-1] if _own_component(parts)[0] else parts
    while len(path) > 1 and path[0] in _TOPS:
        path = path[1:]
    return path[0] if len(path) == 1 else None


def _router_component(parts: list[str], ndim: int, gated: frozenset[tuple[str, int]]) -> str | None:
    for at, part in enumerate(parts):
        words = _words(part)
        inside_expert = any(_ends_in(_words(above), {"expert", "experts"}) for above in parts[:at])
        of_mlp = inside_expert or (".".join(parts[:at]), ndim) in gated
        if "router" in words or ("_".join(words) in _ROUTERS and not of_mlp):
            return part
    return None


def _gated_mlps(infos: Iterable[ParamInfo]) -> frozenset[tuple[str, int]]:
    """Return (path, ndim) of modules with ``up`` or ``down`` matrices, in which a ``gate`` is not a router."""
    found: set[tuple[str, int]] = set()
    for info in infos:
        for name in info.names:
            parts = _components(name)
            for at, part in enumerate(parts):
                if {"up", "down"} & set(_words(part)):
                    found.add((".".join(parts[:at]), info.ndim))
    return frozenset(found)


def _by_shape(info: ParamInfo) -> Found | None:
    rows, columns = info.shape[0], prod(info.shape[1:])
    if rows == 1 or columns == 1:
        return Found("vector", "a side of 1: a vector")
    if info.ndim > 2 and info.shape[1] == 1:
        return Found("vector", "depthwise: one vector a channel")
    if (info.module is not None or info.ndim > 3) and is_convolution(info) and min(info.shape[:2]) <= _IMAGE_CHANNELS:
        return Found("other", f"convolution from or to {min(info.shape[:2])} channels")
    if info.ndim == 2 and 0 < min(info.shape) <= _FEW and max(info.shape) >= _MANY * min(info.shape):
        return Found("other", f"from or to {min(info.shape)} features")
    return None


def _first_convolution(info: ParamInfo) -> Found | None:
    """Return the role and the reason if the name belongs to the convolution of the raw input; else None."""
    for parts in map(_components, info.names) if is_convolution(info) else ():
        own = _own_component(parts)[1]
        above = [part for part in parts[:-2] if not part.isdigit()]
        at = parts.index("conv_layers") if "conv_layers" in parts else -1  # in speech encoders
        if own in _FIRST_CONVOLUTIONS and (_layer_of_model(parts) == own or (above and _is_front(above[-1]))):
            return Found("other", f"convolution of the input (name component {own!r})")
        if at > 0 and parts[at + 1 : at + 2] == ["0"] and any(map(_is_front, parts[:at])):
            return Found("other", "convolution of the input (name component 'conv_layers', the first)")
    return None


def _is_front(component: str) -> bool:
    return _ends_in(_words(component), _FRONTS)


def _components(name: str) -> list[str]:
    """Split a parameter name at its dots, without the components that wrappers and peft's adapters add."""
    parts = plain_name(name).split(".")
    if "modules_to_save" in parts[:-1]:
        at = parts.index("modules_to_save")
        parts = [*parts[:at], *parts[at + 2 :]]
    return [part for part in parts if part not in ("base_layer", "original_module")] or [name]


def _own_component(parts: list[str]) -> tuple[bool, str]:
    """Return (True, "fc") for ``blocks.fc.weight``, the weight of a layer, and (False, "pos_embed") for ``pos_embed``.

    ``parts`` are the components of the name of the parameter.
    """
    if parts[-1] not in _PLAIN_LEAVES:
        return False, parts[-1]
    return True, next((part for part in reversed(parts[:-1]) if not part.isdigit()), parts[-1])


def _words(component: str) -> list[str]:
    """Split a component of a parameter name into words in lower case: "embedTokens2" into "embed" and "tokens"."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", component)]


def _ends_in(words: Sequence[str], wanted: Set[str]) -> bool:
    return bool(words) and words[-1] in wanted
