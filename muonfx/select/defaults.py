"""The default labels: "muon" for hidden matrices, "adamw" for all other parameters, with a reason for each.

Module types decide first, if a model is given: an embedding is recognized under any name. Names decide where types are
ambiguous, since a hidden layer, an output head and a router are all ``nn.Linear``. Shapes decide the rest. A name is
split into components and their words, and never matched by substrings: ``gate`` is a router and ``gate_proj`` is not,
``embed_tokens`` is an embedding and ``embedder_proj`` is not. Ambiguous parameters get AdamW, which is never wrong, but
may train slower.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from math import prod

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from muonfx.core.checks import warn_caller
from muonfx.select.params import ParamInfo, Params, plain_name, read_params
from muonfx.select.rules import Label, Labels, Rule, apply_rules, make_labels
from muonfx.select.views import PLAIN_LEAVES, class_name_fits, is_convolution
from muonfx.tree.display import format_list

__all__ = ["default_labels", "default_labels_by_name"]

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
    {"token", "tokens", "tok", "position", "positions", "pos", "in", "out", "state", "action", "return", "timestep"}
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


def default_labels(
    model_or_params: Params, rules: Sequence[Rule] = (), *, muon: Label = "muon", other: Label = "adamw"
) -> Labels:
    """Label each parameter for Muon or AdamW: hidden matrices "muon", other parameters "adamw", frozen ones None.

    `partition` then applies one transform to the parameters of each label. A parameter that is None instead of a
    tensor gets the label None. The first rule that matches a parameter decides:

    1. your own rules, in their order;
    2. frozen (``requires_grad=False``): None, so no transform updates it;
    3. a weight of an embedding module, or tied to one, as an output head often is: ``other``;
    4. a parameter of a norm module: ``other``;
    5. a factor of an adapter by name (``lora_A``, ``hada_w1_a``, ...) or a part of a parametrization (weight norm):
       ``other``, because the weight is the product of its factors;
    6. fewer than two dimensions, or a bias by name: ``other``;
    7. by name an embedding, a token or position table, an output head, a MoE router, a gain, a norm, the convolution
       of raw input, or the rates of a state-space layer and the maps to them (``x_proj``, ``dt_proj``): ``other``;
    8. a shape without a matrix to orthogonalize: a side is 1 after flattening to (first dim, rest); a depthwise
       convolution; a convolution with at most 3 input or output channels, as for images; or a matrix whose short side
       is at most 4 and whose long side is at least 32 times as long: ``other``;
    9. every other parameter: ``muon``. It is a hidden matrix, a stack of matrices, a fused matrix, or a convolution.

    The result also has a view (a `MatrixView`: how a tensor divides into matrices) for each stack of experts, and for
    each transposed or fused matrix. ``Muon`` and ``muon_with_adamw`` use these views by default. For other chains,
    pass ``view=labels.view()`` to the transforms.

    Module types are known if a model is given. For named tensors, as when ``partition`` calls this function, names and
    shapes decide, and a warning lists the supposed hidden matrices; `default_labels_by_name` does not warn. The name
    component ``gate`` is a router, unless it is inside an expert or next to an ``up`` or ``down`` matrix with as many
    dims, as in a gated MLP.

    Args:
        model_or_params: an ``nn.Module``; a mapping or iterable of names and tensors; or any pytree of tensors.
        rules: your own (predicate, label) pairs, such as ``(path("*.gate.*"), "adamw")``; they take precedence over
            the default rules.
        muon: the label of hidden matrices.
        other: the label of all other trained parameters.

    Returns:
        `Labels`, a mapping from parameter name to label, in the order of the parameters.

    Raises:
        TypeError: a rule is not a (Predicate, label) pair, or a parameter is not a tensor.
        ValueError: a name occurs twice, or a parameter has no shape yet.

    Warns:
        UserWarning: one of ``rules`` matches no parameter; named tensors without a model were labelled as hidden
            matrices; or it is unknown why a hidden parameter has three or more dims, which would be flattened.

    Follows Keller Jordan's Muon (hidden layers; not the embedding, the head, the first convolution, gains and biases)
    and Moonlight, arXiv 2502.16982. To train routers with Muon, add the rule ``(path("*.gate.weight"), "muon")``.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 32))
    >>> default_labels(model)["2.weight"], default_labels(model).reason("0.weight")
    ('muon', 'embedding (module type Embedding)')
    >>> from muonfx.select import path
    >>> default_labels(model, [(path("2.*"), None)])["2.weight"] is None
    True
    """
    found, infos = _labels(model_or_params, rules, muon, other)
    if torch.compiler.is_compiling():
        return found
    hidden = [info for info in infos if found.reason(info.name).startswith(_HIDDEN)]
    said = ""
    if hidden and not isinstance(model_or_params, nn.Module):
        said += (
            " saw names and shapes, without module types, and labelled these as hidden matrices: "
            f"{format_list([info.name for info in hidden])}. An embedding or a head with an unusual name would be "
            "among them. Pass the model, default_labels(model), or use default_labels_by_name if the names are reliable"
        )
    views = found.views
    unknown = [info for info in hidden if info.ndim > 2 and info.name not in views and not is_convolution(info)]
    if unknown:
        said += (
            ": these have more than two dims for an unknown reason, and all dims after the first are flattened: "
            f"{format_list([f'{info.name!r} {info.shape}' for info in unknown], str)}. Give Muon's orthogonalize, or "
            "each transform that takes a view, view=muonfx.MatrixView({'*.name': '... out in -> ... out in'}) for a "
            "stack of matrices (out, in), '... in out -> ... out in' if each is (in, out), 'out a b -> out (a b)' for "
            "one matrix whose columns are two dims"
        )
    if said:
        warn_caller(f"default_labels{said}")
    return found


def default_labels_by_name(
    params: Params, rules: Sequence[Rule] = (), *, muon: Label = "muon", other: Label = "adamw"
) -> Labels:
    """Label named tensors "muon" or "adamw" as `default_labels` does, without its warning about unknown module types.

    Use this function if there is no model and the names are reliable. Without module types, an embedding named
    ``lookup`` looks like a hidden matrix, and a stack of matrices like a convolution. Arguments and errors are as
    in `default_labels`.

    >>> import torch
    >>> default_labels_by_name({"wte.weight": torch.zeros(8, 4), "h.fc.weight": torch.zeros(4, 4)})
    Labels({'wte.weight': 'adamw', 'h.fc.weight': 'muon'})
    """
    return _labels(params, rules, muon, other)[0]


_HIDDEN = "hidden matrix"


def _labels(
    model_or_params: Params, rules: Sequence[Rule], muon: Label, other: Label
) -> tuple[Labels, tuple[ParamInfo, ...]]:
    infos, absent = read_params(model_or_params)
    decided = apply_rules(infos, rules, "user rule")
    gated = _gated_mlps(infos)
    known = _known_by_others(infos)
    for info in infos:
        if info.name in decided:
            continue
        if not info.requires_grad:
            decided[info.name] = (None, "frozen")
        elif reason := known.get(info.name) or _not_hidden(info, gated):
            decided[info.name] = (other, reason)
        else:
            decided[info.name] = (muon, f"{_HIDDEN} ({info.ndim}-D)")
    return make_labels(model_or_params, infos, decided, absent, other), infos


def _not_hidden(info: ParamInfo, gated: frozenset[tuple[str, int]]) -> str | None:
    """Return the reason, as text, to train a parameter with AdamW; None if it is a hidden matrix, for Muon."""
    if reason := _by_type(info):
        return reason
    for part in (part for name in info.names for part in name.split(".")):
        if "lora" in _words(part) or _ADAPTER.match(part.lower()):
            return f"low-rank factor (name component {part!r})"
    if info.ndim < 2:
        return f"{info.ndim}-D"
    return _by_name(info, gated) or _by_shape(info) or _first_convolution(info)


def _by_type(info: ParamInfo) -> str | None:
    for module in info.modules:
        if issubclass(module, nn.Embedding | nn.EmbeddingBag) or class_name_fits(module, _EMBEDDING_CLASS):
            tied = f", tied with {info.tied[0]!r}" if info.tied else ""
            return f"embedding (module type {module.__name__}{tied})"
    for module in info.modules:
        is_norm = issubclass(module, _NORMS) or class_name_fits(module, _NORM_CLASS)
        if is_norm and not issubclass(module, nn.Linear | _ConvNd):
            return f"norm (module type {module.__name__})"
    return None


def _known_by_others(infos: Sequence[ParamInfo]) -> dict[str, str]:
    """Find parameters that get AdamW because of other parameters; return a dict from name to the reason as text."""
    # The lengths and directions of weight norm, and similar parts, form one weight. A projector that is a direct child
    # of the model next to a classifier is a part of its head.
    names = {info.name for info in infos}
    layers = {info.name: _layer_of_model(_components(info.name)) for info in infos}
    head = "classifier" in layers.values()
    found = {name: "name component 'projector'" for name, layer in layers.items() if head and layer == "projector"}
    for info in infos:
        above, _, leaf = info.name.rpartition(".")
        sibling = {"weight_g": "weight_v", "weight_v": "weight_g", "original1": "original0"}.get(leaf)
        if leaf == "original0" or (sibling and f"{above}.{sibling}".removeprefix(".") in names):
            found[info.name] = f"part of a parametrized weight (name component {leaf!r})"
    return found


def _by_name(info: ParamInfo, gated: frozenset[tuple[str, int]]) -> str | None:
    for name in info.names:  # any name of a tied tensor decides
        parts = _components(name)
        if _words(parts[-1])[-1:] == ["bias"]:
            return f"bias (name component {parts[-1]!r})"
        named = _embedding_component(parts) or _head_component(parts) or _router_component(parts, info.ndim, gated)
        own = _own_component(parts)[1]
        if info.module is None and _ends_in(_words(own), _NORM_WORDS):  # a known module type has decided
            named = named or own
        if named:
            return f"name component {named!r}"
    return None


def _embedding_component(parts: list[str]) -> str | None:
    held, own = _own_component(parts)
    words = _words(own)
    if _ends_in(words, _EMBEDDING_WORDS) or words[-2:] in (["embedding", "table"], ["bias", "table"], ["pos", "bias"]):
        return own
    for pair in (words[:2], words[-2:]):  # embed_tokens, vision_embed_tokens
        if pair and pair[0] in _EMBEDDING_WORDS and _EMBEDDED.issuperset(pair[1:]):
            return own
    if own.lower() in _STATE_SPACE or own == "relative_attention_bias":
        return own
    if not held and _is_table(own, words):
        return own
    if held and parts[-2:-1] == ["shared"]:  # the embedding of encoder and decoder in T5 and BART
        return own
    # The layer that embeds patches may be nested: patch_embed.proj, to_patch_embedding.2.
    return next((part for part in parts if "patch" in _words(part) and _ends_in(_words(part), _EMBEDDING_WORDS)), None)


def _is_table(own: str, words: list[str]) -> bool:
    """Return True if the name ``own`` of a parameter, in ``words``, suggests a token table, gain, rate or bias."""
    if own.lower() in _ELEMENTWISE or _ends_in(words, _TABLES | _GAINS):
        return True
    if words[-1:] in (["u"], ["v"]) and "bias" in words:  # biases of relative attention
        return True
    if words[:2] == ["rel", "pos"] or words[:1] == ["latents"]:
        return True
    return bool({"embedding", "embeddings"} & set(words)) and {"proj", "projection"}.isdisjoint(words)


def _head_component(parts: list[str]) -> str | None:
    held, own = _own_component(parts)
    for part in parts:
        words = _words(part)
        of_attention = words[-1:] == ["head"] and not {"attn", "attention", "multi"}.isdisjoint(words)
        if "_".join(words) in _HEADS or (_ends_in(words, _HEAD_WORDS) and not of_attention):
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


def _by_shape(info: ParamInfo) -> str | None:
    rows, columns = info.shape[0], prod(info.shape[1:])
    if rows == 1 or columns == 1:
        return "a side of 1: a vector"
    if info.ndim > 2 and info.shape[1] == 1:
        return "depthwise: one vector a channel"
    if (info.module is not None or info.ndim > 3) and is_convolution(info) and min(info.shape[:2]) <= _IMAGE_CHANNELS:
        return f"convolution from or to {min(info.shape[:2])} channels"
    if info.ndim == 2 and 0 < min(info.shape) <= _FEW and max(info.shape) >= _MANY * min(info.shape):
        return f"from or to {min(info.shape)} features"
    return None


def _first_convolution(info: ParamInfo) -> str | None:
    """Return the reason for AdamW, as text, if the name is that of the convolution of the raw input; else None."""
    for parts in map(_components, info.names) if is_convolution(info) else ():
        own = _own_component(parts)[1]
        above = [part for part in parts[:-2] if not part.isdigit()]
        at = parts.index("conv_layers") if "conv_layers" in parts else -1  # in speech encoders
        if own in _FIRST_CONVOLUTIONS and (_layer_of_model(parts) == own or (above and _is_front(above[-1]))):
            return f"convolution of the input (name component {own!r})"
        if at > 0 and parts[at + 1 : at + 2] == ["0"] and any(map(_is_front, parts[:at])):
            return "convolution of the input (name component 'conv_layers', the first)"
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
