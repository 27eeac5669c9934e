"""Find the view (a `MatrixView`: how a parameter divides into matrices) of each parameter of a model.

A parameter may hold several matrices, such as a stack of experts, or query, key and value concatenated. It may also be
stored transposed. For known layers, the type and the attributes of the module determine the view. Other layers are not
split; if their name suggests several matrices, a note says so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import combinations
from math import prod
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from muonfx.internal.tracing import matches
from muonfx.internal.wrappers import WRAPPERS
from muonfx.routing.params import ParamInfo, Params, module_path, plain_name, written_type
from muonfx.transforms.matrices import MatrixView
from muonfx.transforms.matrix_pattern import parse

T = TypeVar("T")


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shapes of parameters by name."""


class Matrices(NamedTuple):
    """How a parameter divides into matrices."""

    view: MatrixView
    note: str = ""
    """A text for `describe`, such as "query, key, value"; "" if there is nothing to explain."""
    suggested: str | None = None
    """The pattern to suggest, if only names or widths suggest several matrices in a layer of unknown code: ``view``
    does not split it. None otherwise."""


ONE_MATRIX = Matrices(MatrixView())

# Patterns in which ``{out}`` is to be replaced by the rows, which may be divided further.
_PLAIN = "{out} in -> {out} in"
_TRANSPOSED = "in {out} -> {out} in"
_STACK = "... {out} in -> ... {out} in"
_TRANSPOSED_STACK = "... in {out} -> ... {out} in"
_CONVOLUTION = "{out} ... -> {out} (...)"
PLAIN_LEAVES = frozenset({"weight", "kernel", "w", "weight_orig"})
_KERNEL_SIDE = 32
MAYBE_FUSED = "maybe fused, not split"
"""The beginning of the note about a parameter whose name suggests several matrices, in a layer of unknown code."""
ROWS = "<rows>"
"""A placeholder in a suggested pattern, for the number of rows of a part."""
COUNTS_OF_PARTS = (2, 3)
"""The numbers of parts that widths can show: value and gate of a gated linear unit; query, key and value."""


@dataclass(frozen=True)
class _Fused:
    """A layer of a known package whose weight holds several matrices along its rows."""

    layer: str
    """A regular expression for the name of the layer, or of the parameter, in the module that holds it."""
    holder: str
    """A regular expression for the class of that module."""
    parts: str
    """The names of the matrices, separated by commas."""
    rows: int | tuple[str, ...] | str
    """For concatenated matrices, their number or the rows of each; else a pattern of the rows. Sizes are names of
    attributes of the holder, or formulas such as "a*b" and "a//b", in braces if they are in a pattern."""
    requires: str | None = None
    """An attribute of the holder that must be true for this entry to apply."""
    excludes: str | None = None
    """An attribute of the holder that must be false or missing for this entry to apply."""
    package: str = "transformers.models."
    """The package in which the class of the holder must be defined."""


_QKV = "query, key, value"
_ANY = r".*"
_BY_HEAD = "(heads={%s} part=3 dim) -> part (heads dim)"
# The first match applies. `holder` is the class that holds the layer. The entries are read from transformers 5.23, timm
# 1.0, diffusers 0.42 and torchtitan 0.3.0. Each applies to classes of its package only: a class of this name elsewhere
# may differ.
_FUSED = (
    _Fused("c_attn", "GPTBigCodeAttention", _QKV, ("embed_dim", "kv_dim", "kv_dim"), requires="multi_query"),
    _Fused("c_attn", "GPTBigCodeAttention", _QKV, _BY_HEAD % "num_heads", excludes="is_cross_attention"),
    _Fused(
        "c_attn", "(GPT2|DecisionTransformerGPT2|ImageGPT)Attention", "key, value", 2, requires="is_cross_attention"
    ),
    _Fused("c_attn", "(GPT2|DecisionTransformerGPT2|ImageGPT)?Attention", _QKV, 3),
    _Fused(
        "qkv_proj",
        "(Phi3|Phi4Multimodal)Attention",
        _QKV,
        ("config.num_attention_heads*head_dim", "num_key_value_heads*head_dim", "num_key_value_heads*head_dim"),
    ),
    # Four groups of query, value and key, in this order, were the cores of a TPU.
    _Fused("qkv_proj", "CodeGenAttention", "query, value, key", "(cores=4 part=3 dim) -> part (cores dim)"),
    _Fused("qkv_proj", "MiniMaxLightningAttention", _QKV, _BY_HEAD % "num_attention_heads"),
    _Fused("Wqkv", "DbrxAttention", _QKV, ("hidden_size", *("num_key_value_heads*head_dim",) * 2)),
    _Fused("Wqkv", "(ModernBertAttention|MptAttention)", _QKV, 3),
    _Fused("att_proj", "Bark.*Attention", _QKV, 3),
    _Fused("qkv", "Exaone4_5_VisionAttention", _QKV, ("q_dim", "kv_dim", "kv_dim")),
    _Fused("qkv", ".*(Vision|Blip|Mgpstr|PPOCR|Sam|Hiera|SegGpt|Timesformer|VitDet).*Attention", _QKV, 3),
    _Fused(
        "query_key_value",
        "Falcon.*Attention",
        _QKV,
        "(groups={num_kv_heads} (query={num_heads//num_kv_heads} + key=1 + value=1) dim) "
        "-> (groups query dim), (groups key dim), (groups value dim)",
        requires="new_decoder_architecture",
    ),
    _Fused(
        "query_key_value",
        "Falcon.*Attention",
        _QKV,
        ("num_heads*head_dim", "head_dim", "head_dim"),
        requires="multi_query",
    ),
    _Fused("query_key_value", "GPTNeoXAttention", _QKV, _BY_HEAD % "config.num_attention_heads"),
    _Fused("query_key_value", "GPTNeoXJapaneseAttention", _QKV, _BY_HEAD % "num_attention_heads"),
    _Fused("query_key_value", "(Bloom|Persimmon|Falcon).*Attention", _QKV, _BY_HEAD % "num_heads"),
    _Fused(
        "q_proj",
        "Qwen(3Next|3_5|3_5Moe|4ExpText)Attention",
        "query, gate",
        "(heads={config.num_attention_heads} (query={head_dim} + gate={head_dim})) -> (heads query), (heads gate)",
    ),
    _Fused("in_proj_qkv", ".*GatedDeltaNet", _QKV, ("key_dim", "key_dim", "value_dim")),
    _Fused(
        "in_proj_qkvz",
        ".*GatedDeltaNet",
        "query, key, value, gate",
        "(heads={num_k_heads} (query={head_k_dim} + key={head_k_dim} + value={value_dim//num_k_heads} + "
        "gate={value_dim//num_k_heads})) -> (heads query), (heads key), (heads value), (heads gate)",
    ),
    _Fused("in_proj_ba", ".*GatedDeltaNet", "b, a", "(heads={num_k_heads} part=2 dim) -> part (heads dim)"),
    _Fused("kv_proj", "JetMoeAttention", "key, value", 2),
    _Fused("to_kv", _ANY, "key, value", 2),
    _Fused("kv_a_proj_with_mqa", _ANY, "latent, rotary", ("kv_lora_rank", "qk_rope_head_dim")),
    _Fused(
        "kv_b_proj",
        _ANY,
        "key, value",
        "(heads={num_heads} (key={qk_nope_head_dim} + value={v_head_dim})) -> (heads key), (heads value)",
    ),
    _Fused("in_proj", "(Mamba|FalconMamba|JambaMamba)Mixer", "state, gate", 2),
    _Fused("in_proj", "ZambaMambaMixer", "state, gate", "(dim part=2) -> part dim"),
    _Fused(
        "in_proj",
        "(Mamba2|Bamba|FalconH1|NemotronHMamba2|GraniteMoeHybridMamba|Zamba2Mamba)(Mixer|Layer)",
        "gate, state, B, C, dt",
        (*("intermediate_size",) * 2, *("n_groups*ssm_state_size",) * 2, "num_heads"),
    ),
    _Fused("in_proj", "Lfm[23].*ShortConv", "B, C, state", 3),
    _Fused("in_proj", "DisentangledSelfAttention", _QKV, _BY_HEAD % "num_attention_heads"),
    _Fused("[wv][12]", "DbrxExpertGLU", "one matrix an expert", "(part={moe_num_experts} out) -> part out"),
    _Fused("o_a_proj", "DeepseekV4Attention", "one matrix a group", "(part={o_a_proj.n_groups} out) -> part out"),
    _Fused("gate_up_proj", "GptOssExperts", "gate, up", "(dim part=2) -> part dim"),
    _Fused("gate_up_proj", _ANY, "gate, up", 2),
    _Fused("input_linear", "(Granite|JetMoe).*(MLP|MoE)", "gate, up", 2),
    _Fused("Wi", "ModernBert.*MLP", "value, gate", 2),
    _Fused("fc1", "Moonshine.*DecoderMLP", "value, gate", 2),
    _Fused("fc1", "(Moshi|KyutaiSpeechToText)GatingMLP", "gate, value", 2),
    _Fused("linear_1", "Cohere2VisionMultiModalProjector", "value, gate", 2),
    _Fused("linear_start", "Gemma.*LightConv1d", "value, gate", 2),
    _Fused("ext_pw_conv_1d", "Phi4MultimodalAudioGluPointWiseConv", "value, gate", 2),
    _Fused("proj", "ClvpGatedLinearUnit", "value, gate", 2),
    _Fused("pointwise_conv1", ".*ConvolutionModule", "value, gate", 2),
    # timm: query, key and value one after another, or head by head.
    _Fused("qkv", _ANY, _QKV, _BY_HEAD % "num_heads", requires="head_first", package="timm."),
    _Fused(
        "qkv",
        "Attention(Downsample)?",
        _QKV,
        "(heads={num_heads} (query={key_dim} + key={key_dim} + value={val_dim})) "
        "-> (heads query), (heads key), (heads value)",
        requires="key_dim",
        package="timm.",
    ),
    _Fused("qkv", "WindowAttentionGlobal", "key, value", 2, requires="use_global", package="timm."),
    _Fused(
        "qkv",
        "(Mask|Eva|Window|WindowMultiHead|MultiScale|MaskUnit|RelPos|Channel|Diff)?Attention(V2|2d|Cl|Rope|Global)?|XCA|MHSA"
        "|TalkingHeadAttn|CrossCovarianceAttn|LocallyGroupedAttn|FactorAttnConvRelPosEnc|(Rot)?AttentionPool2d",
        _QKV,
        3,
        package="timm.",
    ),
    _Fused("fc1", "GluMlp", "value, gate", 2, package="timm."),
    _Fused("proj", "GEGLU|SwiGLU", "value, gate", 2, package="diffusers."),
    # diffusers: scales, shifts and gates of norms, in equal parts.
    _Fused("linear", "SD35AdaLayerNormZeroX", "nine modulations", 9, package="diffusers."),
    _Fused("linear", "AdaLayerNormZeroSingle", "three modulations", 3, package="diffusers."),
    _Fused("linear", "LuminaRMSNormZero", "four modulations", 4, package="diffusers."),
    _Fused("linear", "(AdaLayerNorm(Zero|Single)|CogVideoXLayerNormZero)", "six modulations", 6, package="diffusers."),
    _Fused("linear", "(AdaLayerNorm(Continuous)?|AdaGroupNorm)", "scale, shift", 2, package="diffusers."),
    _Fused("proj_out_1", "(DiT)?Transformer2DModel", "shift, scale", 2, package="diffusers."),
    _Fused(
        "wqkv",
        "FusedQKVLinear",
        _QKV,
        "(groups (query={heads_per_kv} + key=1 + value=1) dim={head_dim}) "
        "-> (groups query dim), (groups key dim), (groups value dim)",
        package="torchtitan.",
    ),
)
# Modules of PyTorch, names of their parameters, and the number of matrices along the rows. A plain RNN has no gates.
_FUSED_IN_TORCH = (
    (nn.MultiheadAttention, "in_proj_weight", 3, _QKV),
    ((nn.LSTM, nn.LSTMCell), "weight_(ih|hh)", 4, "4 gates"),
    ((nn.GRU, nn.GRUCell), "weight_(ih|hh)", 3, "3 gates"),
)
# Names of layers that are nearly always fused, for unknown code, and names for their parts.
_SUSPECTS = (
    (re.compile(r"(.*_)?w?qkv(_.*)?|c_attn|query_key_value|in_proj_weight", re.IGNORECASE), ("q", "k", "v")),
    (re.compile(r"(.*_)?w?kv(_proj|_linear)?", re.IGNORECASE), ("k", "v")),
    (re.compile(r"(fused_)?(gate_up|up_gate)(_proj)?|w1_?w?[23]", re.IGNORECASE), ("a", "b")),
)
# A layer from a condition to the scales, shifts and gates of norms: adaLN_modulation.1, adaln_single.linear, img_mod.1;
# or a layer in a norm: norm_out.linear; or proj_out_1 in the DiT of diffusers.
_MODULATION = re.compile(r"(^|_)(ada_?(ln|norm|layer_?norm)|modulations?|mod)(_|\d|$)|^proj_out_1$", re.IGNORECASE)
_NORM = re.compile(r"(^|_)norm(_|\d|$)", re.IGNORECASE)
_MODULATION_CLASS = r"^Ada.*Norm|Modulation$|AdaLN"
# The known numbers of modulations: scale and shift; with a gate; of two norms; of three, as in SD 3.5; of four, as in
# CogView 3.
_MODULATIONS = (2, 3, 4, 6, 9, 12)
_USUAL_MODULATIONS = (6, 2)  # two scales, two shifts and two gates, as in DiT; a scale and a shift
MOST_PARTS = max(_MODULATIONS)
"""The largest number of equal parts that one layer is known to return."""
# Names of a layer in a wrapper that has the layer's own name, such as qkv.linear and qkv.base_layer.
_INNER_LAYERS = frozenset(
    {"linear", "lin", "conv", "layer", "out_layer", "base_layer", "base", "inner", "original_module", "proj", "dense"}
)


@dataclass(frozen=True)
class _Stored:
    """A parameter that a known package does not store as a matrix (out, in)."""

    module: str
    leaf: str
    pattern: str
    note: str = ""


_STORED = (
    _Stored("Conv1D", "weight", _TRANSPOSED),
    _Stored(".*MultiModalProjector", "mm_input_projection_weight", _TRANSPOSED),
    _Stored("XLNetRelativeAttention", "[qkvr]", "in heads dim -> (heads dim) in", note="heads side by side"),
    _Stored("XLNetRelativeAttention", "o", "out heads dim -> out (heads dim)", note="heads side by side"),
    _Stored("FunnelRelMultiheadAttention", "r_kernel", "in heads dim -> (heads dim) in", note="heads side by side"),
    _Stored("RecurrentGemmaRglru", "(input|recurrent)_gate_weight", _TRANSPOSED_STACK),
    _Stored("GroupedLinearLayer", "weight", _TRANSPOSED_STACK),
    _Stored(".*FlexibleLinear", "weight", _STACK),
)


def find_matrices(
    model_or_params: Params, infos: Sequence[ParamInfo], read_in_parts: Mapping[str, int]
) -> dict[str, Matrices]:
    """Find how parameters of two or more dims divide into matrices, such as a "qkv" into query, key and value.

    Args:
        model_or_params: the model, or named tensors, which have no module types: only stacks of experts are found
            among them.
        infos: the parameters.
        read_in_parts: the number of vectors that a layer returns, for each layer of which other layers read only parts:
            ``{"mlp.fc1": 2}``.

    Returns:
        A dict from name to `Matrices`: the view, a note for `describe`, and a pattern that is only suggested. A
        convolution is one matrix (out, in x kernel), unless it is transposed or has groups.
    """
    # 1. The decision for a parameter also depends on modules around it, and on the shapes of other parameters.
    modules: dict[str, nn.Module] = {}
    if isinstance(model_or_params, nn.Module):  # a module in two places is found under both paths
        modules = dict(model_or_params.named_modules(remove_duplicate=False))
    shapes = {info.name: info.shape for info in infos}
    # 2. One decision for each parameter. Vectors and scalars have no matrices.
    matrices: dict[str, Matrices] = {}
    for info in infos:
        if info.ndim > 1:
            read_parts = read_in_parts.get(module_path(info.name))
            matrices[info.name] = _matrices_of(info, modules, shapes, read_parts)
    return matrices


def _matrices_of(info: ParamInfo, modules: Mapping[str, nn.Module], shapes: Shapes, read_parts: int | None) -> Matrices:
    """Return how a parameter divides into matrices: by the type of its module, else by the name of its layer.

    The weight of ``nn.LSTM`` has 4 matrices by type, and that of "qkv" in a known class has 3 by name. A function that
    does not recognize the module or the layer returns None, and the next one is tried.

    Args:
        info: the parameter.
        modules: the modules of the model by path.
        shapes: the shapes of all parameters by name.
        read_parts: the number of parts in which other layers read the outputs of its layer; None if they do not.
    """
    # 1. The modules of PyTorch itself: convolutions, recurrent layers and nn.MultiheadAttention.
    owner = modules.get(module_path(info.name))  # None for named tensors without a model
    leaf = plain_name(info.name).rpartition(".")[2]  # "weight" for "attn.qkv.weight"
    matrices_of_torch_module = _of_convolution(owner, info) or _of_torch(owner, leaf)
    if matrices_of_torch_module is not None:
        return matrices_of_torch_module
    # 2. Other modules: first the order of the parameter's dims, then whether its rows are several matrices.
    storage = _storage_by_package(info, leaf, owner) or _storage_by_experts(info, owner, modules, shapes)
    layers = _layers_around(info.name, leaf, owner, modules)
    matrices_of_known_layer = _of_known_layer(info, storage, layers)
    if matrices_of_known_layer is not None:
        return matrices_of_known_layer
    return _of_unknown_layer(info, storage, layers, read_parts, shapes)


def _of_known_layer(info: ParamInfo, storage: _Storage, layers: Sequence[_Layer]) -> Matrices | None:
    """Return the matrices of a layer of a known package, such as query, key and value of GPT-2; None for other layers.

    GPT-2 stores "c_attn" of shape (8, 24) as (in, out). The view splits the 24 into 3 matrices of 8 rows each.

    Args:
        info: the parameter.
        storage: the order of its dims, such as (out, in).
        layers: its layer, and the wrappers around it.
    """
    rows = _number_of_rows(storage.pattern, info.shape)
    for layer in layers:  # for "qkv.linear", first "linear", then "qkv": a wrapper may have the known name
        fused = _fused_layer(layer)  # the entry of the layer in the table of known packages
        if fused is None:
            continue
        pattern = _pattern_of(fused, storage.pattern, layer.holder, rows)
        if pattern is not None:
            return Matrices(MatrixView(pattern), _joined(storage.note, fused.parts))
        # The sizes in the table do not fit, so the parameter remains one matrix.
        note = f"{fused.parts}, of sizes that do not fit {rows} rows: not split"
        return Matrices(MatrixView(_pattern_of_one_matrix(storage.pattern)), _joined(storage.note, note))
    return None


def _of_unknown_layer(
    info: ParamInfo, storage: _Storage, layers: Sequence[_Layer], read_parts: int | None, shapes: Shapes
) -> Matrices:
    """Return one matrix for a layer of unknown code. If several are likely, add the pattern to suggest to the user.

    A "qkv" of shape (24, 8) remains one matrix, since its code is unknown. The note for `describe` then has the pattern
    "(part=3 out) in -> part out in", which a user may pass as a view.

    Args:
        info: the parameter.
        storage: the order of its dims.
        layers: its layer, and the wrappers around it.
        read_parts: the number of parts in which other layers read the outputs of the layer; None if they read them as a
            whole.
        shapes: the shapes of all parameters by name.
    """
    view = MatrixView(_pattern_of_one_matrix(storage.pattern))
    split = _suggested_split(info, storage.pattern, layers, read_parts, shapes)
    if split is None:  # neither names nor widths suggest several matrices
        return Matrices(view, storage.note)
    # A split that is only likely is left to the user: the view does not split, and the note has the pattern.
    return Matrices(view, _joined(storage.note, f"{MAYBE_FUSED}: {split}"), split)


def _suggested_split(
    info: ParamInfo, stored: str, layers: Sequence[_Layer], read_parts: int | None, shapes: Shapes
) -> str | None:
    """Return the pattern that splits a parameter, if names or widths suggest several matrices; else None.

    For a "qkv" of shape (24, 8), the result is "(part=3 out) in -> part out in": left of the arrow the dims of the
    parameter, right of it the matrices. ``stored`` is the order of the dims, with ``{out}`` for the rows. If a name
    suggests three matrices, and the rows do not divide by three, the parts have unequal sizes, as with fewer keys than
    queries. The pattern then has placeholders for the sizes, as in "(q=<rows> + k=<rows> + v=<rows>) in -> q in, k in,
    v in".
    """
    # 1. The name of the layer: "qkv" suggests the parts q, k and v.
    part_names = _names_of_parts(layers)
    if part_names is not None:  # the name decides, also against the widths
        if _number_of_rows(stored, info.shape) % len(part_names) != 0:
            return divided(stored, dict.fromkeys(part_names, ROWS))
        return divided(stored, len(part_names))
    # 2. A modulation of norms, or the widths that other layers read.
    number_of_parts = _parts_of_modulation(info.shape, layers)
    if number_of_parts is None:
        number_of_parts = read_parts
    if number_of_parts is not None:
        return divided(stored, number_of_parts)
    # 3. The widths of another stack of experts.
    return _split_of_stack(info, stored, shapes)


def _split_of_stack(info: ParamInfo, stored: str, shapes: Shapes) -> str | None:
    """Return the pattern that splits each matrix of a stack of experts, if the widths of another stack suggest it.

    8 experts of a gated linear unit, from 32 features to 2 x 24 and back, are stacks in one module:

    - (8, 48, 32) and later (8, 32, 24) as (out, in). The result for the first is "... (part=2 out) in -> ... part out
      in".
    - (8, 32, 48) and later (8, 24, 32) as (in, out). The result is "... in (part=2 out) -> ... part out in".

    ``stored`` is the known order of the dims. If the stack is not known to be transposed, both orders are tried.
    """
    if stored not in (_STACK, _TRANSPOSED_STACK):
        return None
    later_shapes = _later_stacks_beside(info, shapes)
    *_, rows, columns = info.shape
    # As (out, in): the rows are the outputs.
    if stored == _STACK:
        number_of_parts = _parts_read_by(rows, columns, later_shapes)
        if number_of_parts is not None:
            return divided(_STACK, number_of_parts)
    # As (in, out): the columns are the outputs.
    transposed_shapes = [(columns, rows) for rows, columns in later_shapes]
    number_of_parts = _parts_read_by(columns, rows, transposed_shapes)
    if number_of_parts is not None:
        return divided(_TRANSPOSED_STACK, number_of_parts)
    return None


def _later_stacks_beside(info: ParamInfo, shapes: Shapes) -> list[tuple[int, int]]:
    """Return the shapes of the matrices in later stacks of as many matrices, in the module around a stack's layer.

    For ``mlp.experts.fc1`` of shape (8, 48, 32), the stack ``mlp.experts.fc2`` of shape (8, 32, 24) gives (32, 24).
    """
    holder = _path_around_layer(info.name)  # "mlp.experts"
    names = list(shapes)  # in the order of the model
    later_shapes: list[tuple[int, int]] = []
    for name in names[names.index(info.name) + 1 :]:  # only parameters after this one can read its outputs
        shape = shapes[name]
        # All dims but the last two count the matrices: (8,) for a stack of 8.
        if shape[:-2] == info.shape[:-2] and _path_around_layer(name) == holder:
            later_shapes.append((shape[-2], shape[-1]))
    return later_shapes


def _path_around_layer(name: str) -> str:
    """Return the path of the module with a layer: "mlp" for "mlp.fc1.weight", and for "mlp.fc1", a parameter of it."""
    path, _, leaf = name.rpartition(".")
    if leaf in PLAIN_LEAVES:
        return path.rpartition(".")[0]
    return path


def _parts_read_by(returns: int, reads: int, later_shapes: Sequence[tuple[int, int]]) -> int | None:
    """Return the number of parts in which a later matrix reads the outputs of a matrix; None if it reads no parts.

    >>> _parts_read_by(48, 32, [(32, 24)])  # 32 -> 48 features, then 24 -> 32: it reads halves of 48, as a gated MLP
    2

    Args:
        returns: the width that the matrix returns, such as 48.
        reads: the width that it reads, such as 32.
        later_shapes: the widths that each later matrix returns and reads.
    """
    widths_read_later = [reads_later for _, reads_later in later_shapes]
    if returns in widths_read_later:  # all outputs are read together
        return None
    for count in COUNTS_OF_PARTS:  # 2 and 3
        for returns_later, reads_later in later_shapes:
            # The later matrix maps back to the width of the inputs, as the second layer of an MLP does.
            if returns_later == reads and count * reads_later == returns:
                return count
    return None


def _pattern_of_one_matrix(stored: str) -> str | None:
    """Return the pattern of one matrix in this order; None for (out, in) and (out, ...), the default."""
    if stored in (_PLAIN, _CONVOLUTION):
        return None
    return stored.replace("{out}", "out")


def _joined(*notes: str) -> str:
    """Join the notes that are not empty, as in "stack of 8 matrices; gate, up"."""
    return "; ".join(filter(None, notes))


class _Layer(NamedTuple):
    """A layer, and the module that holds it."""

    name: str
    """The name of the layer in that module, such as "qkv"."""
    holder: nn.Module | None
    """The module, such as an attention; None for named tensors without a model."""


def _layers_around(name: str, leaf: str, owner: nn.Module | None, modules: Mapping[str, nn.Module]) -> list[_Layer]:
    """Return the layer that a parameter belongs to, and after it the wrappers around this layer.

    The names show what a layer is. For ``attn.qkv.linear.weight``, the layers are "linear" in ``attn.qkv``, which shows
    nothing, and "qkv" in ``attn``, which shows it. A parameter of no layer, such as ``mlp.gate_up_proj``, counts as a
    layer itself.

    Args:
        name: the name of the parameter.
        leaf: the last component of its name, such as "weight".
        owner: the module that owns it; None for named tensors without a model.
        modules: the modules of the model by path.
    """
    path = module_path(name)
    # "mlp.gate_up_proj" is in no layer, and for "weight" the layer is the model: the parameter counts as the layer.
    if leaf not in PLAIN_LEAVES or "." not in plain_name(name):
        return [_Layer(leaf, owner)]
    # From the inside to the outside: "attn.qkv.linear" becomes "attn.qkv" and "linear", then "attn" and "qkv".
    layers: list[_Layer] = []
    while path:
        path, _, layer_name = path.rpartition(".")
        if layer_name in WRAPPERS:  # such as "_orig_mod" of torch.compile
            continue
        layers.append(_Layer(layer_name, modules.get(path)))
        is_name_of_any_layer = layer_name in _INNER_LAYERS or layer_name.isdigit()
        if not is_name_of_any_layer:  # this name shows what the layer is, so that no further one is needed
            break
    return layers


def _names_of_parts(layers: Sequence[_Layer]) -> tuple[str, ...] | None:
    """Return names for the matrices that the name of a layer suggests; None for a name that suggests none.

    ``layers`` are the layer and the wrappers around it, which may have the name that shows what the layer is.

    >>> _names_of_parts([_Layer("linear", None), _Layer("qkv", None)])  # "attn.qkv.linear"
    ('q', 'k', 'v')
    """
    for layer in layers:
        for names, part_names in _SUSPECTS:
            if names.fullmatch(layer.name):
                return part_names
    return None


def _parts_of_modulation(shape: tuple[int, ...], layers: Sequence[_Layer]) -> int | None:
    """Return the number of scales, shifts and gates that a layer computes for norms; None if it is no such layer.

    For ``adaLN_modulation.1.weight`` of shape (768, 128), the result is 768 / 128 = 6. ``layers`` are the layer and the
    wrappers around it. Their names, or the class of the module that holds the layer, show that it is a modulation.
    """
    if len(shape) != 2:
        return None
    path = ".".join(layer.name for layer in reversed(layers))  # outermost first: "adaLN_modulation.1"
    if _is_of_class(layers[0].holder, _MODULATION_CLASS) or is_modulation(path):
        return _modulations(*shape)
    return None


def is_modulation(path: str) -> bool:
    """Return True for the path of a modulation: a layer that computes scales, shifts and gates for norms.

    >>> is_modulation("blocks.0.adaLN_modulation.1"), is_modulation("norm_out.linear"), is_modulation("norm")
    (True, True, False)
    """
    components = [component for component in path.split(".") if component not in WRAPPERS]
    # A name such as "adaLN" or "mod" anywhere, or a layer inside a norm. A layer that is called "norm" is a norm.
    if any(map(_MODULATION.search, components)):
        return True
    return any(map(_NORM.search, components[:-1]))  # the modules around the layer


def _modulations(rows: int, columns: int) -> int | None:
    """Return the number of equal parts of a modulation, which are scales, shifts and gates; None if it is one matrix.

    A modulation maps a condition, such as a time step, of ``columns`` features to several vectors of one width, with
    ``rows`` elements together.

    >>> _modulations(768, 128), _modulations(768, 200), _modulations(100, 128)  # exact; assumed; one matrix
    (6, 6, None)
    """
    # The usual case: the condition is as wide as each vector, so that the quotient is the number of vectors.
    for count in _MODULATIONS:
        if rows == count * columns:
            return count
    if rows <= columns:  # it returns less than it reads, so nothing suggests several vectors
        return None
    # The condition has another width than the vectors, and the shape does not show their number. Assume the usual one.
    for count in _USUAL_MODULATIONS:
        if rows % count == 0:
            return count
    return None


def _of_torch(owner: nn.Module | None, leaf: str) -> Matrices | None:
    """Return the matrices of a parameter in which a module of PyTorch concatenates several; None for another parameter.

    ``owner`` is the module of the parameter, and ``leaf`` the last component of its name. The "weight_ih_l0" of an
    ``nn.LSTM`` has the matrices of 4 gates, one below the other.

    >>> _of_torch(nn.LSTM(8, 16), "weight_ih_l0").view
    MatrixView('(part=4 out) in -> part out in')
    """
    for module_types, leaf_pattern, count, note in _FUSED_IN_TORCH:
        if isinstance(owner, module_types) and re.match(leaf_pattern, leaf):
            return Matrices(MatrixView(divided(_PLAIN, count)), note)
    return None


def divided(stored: str, parts: int | Mapping[str, int] | Mapping[str, str]) -> str:
    """Return the `MatrixView` pattern of a parameter whose rows are several concatenated matrices.

    ``stored`` is the pattern of an undivided parameter, with ``{out}`` for the rows. ``parts`` is a number of equal
    matrices, or a dict from the name of each matrix to its number of rows, or to a placeholder for it.

    >>> divided("{out} in -> {out} in", {"q": 4, "k": 2})
    '(q=4 + k=2) in -> q in, k in'
    """
    if isinstance(parts, int):  # equal parts, which become a stack: 3 gives "(part=3 out) in -> part out in"
        return _with_rows(stored, f"(part={parts} out)", ["part out"])
    # Parts of unequal sizes, each with a name and a result of its own.
    rows = " + ".join(f"{name}={size}" for name, size in parts.items())
    return _with_rows(stored, f"({rows})", list(parts))


def _with_rows(stored: str, rows: str, results: Iterable[str]) -> str:
    """Replace ``{out}`` in a pattern: left of the arrow by ``rows``, right of it by each of ``results``.

    >>> _with_rows("in {out} -> {out} in", "(q=4 + k=2)", ["q", "k"])
    'in (q=4 + k=2) -> q in, k in'
    """
    left, _, right = stored.partition(" -> ")  # the dims of the parameter, and the dims of a matrix
    stored_axes = left.replace("{out}", rows)
    matrices = ", ".join([right.replace("{out}", result) for result in results])
    return f"{stored_axes} -> {matrices}"


def _number_of_rows(stored: str, shape: tuple[int, ...]) -> int:
    """Return the number of rows of the matrix, or of each matrix of the stack, that a parameter of this shape holds.

    ``stored`` is the order of the dims. A transposed matrix of shape (8, 24) has 24 rows:

    >>> _number_of_rows("in {out} -> {out} in", (8, 24))
    24
    """
    # The pattern is applied to a tensor without memory. It does not divide the rows, so that the result is one tensor.
    (stack,) = parse(stored.replace("{out}", "out")).split(torch.empty(shape, device="meta"))
    return stack.shape[-2]


def _of_convolution(owner: nn.Module | None, info: ParamInfo) -> Matrices | None:
    """Return the matrices of a transposed convolution, or of one with groups; None for another parameter.

    A convolution with two groups holds two matrices along its output channels, each of its own input channels.
    """
    if not is_convolution(info):
        return None
    if isinstance(owner, _ConvTransposeNd):  # PyTorch stores it as (in, out, kernel)
        note = "transposed convolution"
        if owner.groups > 1:
            note += f"; {owner.groups} groups, not split"
        return Matrices(MatrixView("in out ... -> out (in ...)"), note)
    if isinstance(owner, _ConvNd) and owner.groups > 1:  # the rows of a group are next to each other
        return Matrices(MatrixView(divided(_CONVOLUTION, owner.groups)), f"{owner.groups} groups")
    return None


class _Storage(NamedTuple):
    """How a parameter is stored, if its rows are not divided further."""

    pattern: str
    """The order of its dims, with ``{out}`` for the rows, such as ``"in {out} -> {out} in"`` for a transposed one."""
    note: str = ""
    """A text for `describe`, such as "stack of 8 matrices"; "" for a plain matrix."""


def _storage_by_package(info: ParamInfo, leaf: str, owner: nn.Module | None) -> _Storage | None:
    """Return the order of a parameter's dims by the table `_STORED` of known packages; None if it is not in the table.

    Most layers store (out, in), and these do not. ``owner`` is the module of the parameter, and ``leaf`` the last
    component of its name. The weight of a ``Conv1D`` of transformers is stored as ``"in {out} -> {out} in"``.
    """
    if owner is None:
        return None
    owner_class = written_type(owner)
    for known in _STORED:
        if class_name_fits(owner_class, f"^{known.module}$") and re.fullmatch(known.leaf, leaf):
            note = known.note or _stack_note(info, known.pattern)
            return _Storage(known.pattern, note)
    return None


def _storage_by_experts(
    info: ParamInfo, owner: nn.Module | None, modules: Mapping[str, nn.Module], shapes: Shapes
) -> _Storage:
    """Return the order of a parameter's dims: a stack of matrices if it is of experts, else one matrix (out, rest).

    A tensor of shape (8, 64, 32) is a stack of 8 matrices under the name "experts.w1", and else one matrix (8, 2048).

    Args:
        info: the parameter.
        owner: the module of the parameter.
        modules: the modules of the model by path.
        shapes: the shapes of all parameters by name.
    """
    if info.ndim == 2:
        return _Storage(_PLAIN)
    if not _is_expert(info) and not _is_of_class(owner, "Experts?$"):
        return _Storage(_CONVOLUTION)
    # A stack, of matrices (out, in) or (in, out).
    pattern = _STACK
    if _has_transposed_experts(info, owner, modules, shapes):
        pattern = _TRANSPOSED_STACK
    return _Storage(pattern, _stack_note(info, pattern))


def _has_transposed_experts(
    info: ParamInfo, owner: nn.Module | None, modules: Mapping[str, nn.Module], shapes: Shapes
) -> bool:
    """Return True if the matrices of a stack of experts are stored as (in, out), not as (out, in).

    transformers declares it in an attribute. Else the shapes of two parameters together show it. With 8 hidden and 32
    inner features, ``gate_up_proj`` maps 8 to 2 x 32 features, and ``down_proj`` maps 32 to 8. Their shapes are

    - (..., 64, 8) and (..., 8, 32) as (out, in),
    - (..., 8, 64) and (..., 32, 8) as (in, out).

    Under other names, the router of the experts shows it; the arguments are those of `_storage_by_experts`.
    """
    # 1. The attribute of transformers.
    declared = getattr(owner, "is_transposed", None)
    if declared is not None:
        return declared is True
    # 2. The shapes of the two parameters.
    holder = info.name[: info.name.rfind(".") + 1]  # "mlp.experts." for "mlp.experts.down_proj"
    gate_up = shapes.get(f"{holder}gate_up_proj")
    down = shapes.get(f"{holder}down_proj")
    if gate_up and down:
        inner, hidden = down[-2:]  # if stored as (in, out): 32 and 8
        return gate_up[-2:] == (hidden, 2 * inner)  # then it is (8, 64); stored as (out, in), it is (64, 8)
    # 3. The router of the experts. Without one, the usual order (out, in) is assumed.
    hidden_width = _width_read_by_router(info, modules)
    return hidden_width is not None and _read_by_rows(info, hidden_width, shapes)


def _width_read_by_router(info: ParamInfo, modules: Mapping[str, nn.Module]) -> int | None:
    """Return the hidden width, which the router of a stack of experts reads; None if no router is found.

    The router is a matrix with one row for each expert: (8, 64) for 8 experts and a width of 64. It is next to the
    experts, as ``moe.router.weight`` for ``moe.experts.w1``, or in one module with them. If several such matrices read
    different widths, the result is None.
    """
    experts_path = _path_without_wrappers(_path_around_layer(info.name))  # "moe.experts" for "moe.experts.w1"
    path_around_experts = _path_without_wrappers(module_path(experts_path))  # "moe"
    for path in (experts_path, path_around_experts):  # the nearest module with a router decides
        module = modules.get(path)
        if module is None:
            continue
        # ``shape[-3]`` is the number of experts, for a stack of shape (8, 32, 64). A router has as many rows.
        widths = {param.shape[1] for param in module.parameters() if param.ndim == 2 and len(param) == info.shape[-3]}
        if widths:
            return widths.pop() if len(widths) == 1 else None
    return None


def _path_without_wrappers(path: str) -> str:
    """Return the path of the module in which wrappers are: "moe.experts" for "moe.experts._orig_mod"."""
    while path.rpartition(".")[2] in WRAPPERS:
        path = module_path(path)
    return path


def _read_by_rows(info: ParamInfo, hidden_width: int, shapes: Shapes) -> bool:
    """Return True if the rows of the matrices of a stack of experts are their inputs, so that they are (in, out).

    With 64 hidden and 24 inner features, an expert maps 64 to 24 features, by one matrix or, with a gate, by two, and
    then 24 to 64. So 64 is the number of inputs of the first stack of two, and of most of three:

    - (8, 24, 64), (8, 64, 24) and (8, 24, 64) are stored as (out, in),
    - (8, 64, 24), (8, 24, 64) and (8, 64, 24) as (in, out).

    The result is False if a stack has other widths, or if all have 64 on the same side.
    """
    # 1. For each stack in the module of the experts, whether its rows are as many as the hidden features.
    holder = _path_around_layer(info.name)
    has_hidden_rows: list[bool] = []  # in the order of the model
    for name, shape in shapes.items():
        if shape[:-2] != info.shape[:-2] or _path_around_layer(name) != holder:
            continue
        rows, columns = shape[-2:]
        if (rows == hidden_width) == (columns == hidden_width):  # both sides are the hidden width, or none
            return False
        has_hidden_rows.append(rows == hidden_width)
    # 2. The side that more stacks have in common is the number of inputs.
    number_with_rows = sum(has_hidden_rows)
    number_with_columns = len(has_hidden_rows) - number_with_rows
    if number_with_rows == 0 or number_with_columns == 0:
        return False
    if number_with_rows == number_with_columns:  # the first stack reads the hidden width
        return has_hidden_rows[0]
    return number_with_rows > number_with_columns


def _stack_note(info: ParamInfo, pattern: str) -> str:
    """Return a note such as "stack of 8 matrices" if the pattern splits a stack; else ""."""
    if pattern not in (_STACK, _TRANSPOSED_STACK):
        return ""
    return f"stack of {prod(info.shape[:-2])} matrices"


def _fused_layer(layer: _Layer) -> _Fused | None:
    """Return the first entry of the table `_FUSED` that applies to a layer; None if the layer is unknown.

    An entry names the matrices that the weight of a layer concatenates. For the layer "c_attn" in a ``GPT2Attention``
    of transformers, it is the entry with query, key and value.
    """
    if layer.holder is None:  # named tensors without a model
        return None
    holder_class = written_type(layer.holder)
    for fused in _FUSED:
        is_of_package = holder_class.__module__.startswith(fused.package)
        # The name of the layer and the class around it must fit as a whole: "qkv" does not fit "qkv_proj".
        has_names = re.fullmatch(fused.layer, layer.name) and re.fullmatch(fused.holder, holder_class.__name__)
        if is_of_package and has_names and _has_attributes(layer.holder, fused):
            return fused
    return None


def _has_attributes(holder: nn.Module, fused: _Fused) -> bool:
    """Return True if a module has the attribute that an entry of the table requires, and not the one it excludes.

    An attribute counts if it is true. ``GPTBigCodeAttention`` has ``multi_query``, True or False, and one entry for
    True: of a query, and of one key and value for all heads.
    """
    if fused.requires is not None and not getattr(holder, fused.requires, None):
        return False
    return fused.excludes is None or not getattr(holder, fused.excludes, None)


def _pattern_of(fused: _Fused, stored: str, holder: nn.Module | None, rows: int) -> str | None:
    """Return the pattern that splits a known layer, with the sizes of its module; None if they do not fit.

    Three equal parts of 24 rows give "(part=3 out) in -> part out in". If the sizes are 16, 4 and 4, the result is
    "(query=16 + key=4 + value=4) in -> query in, key in, value in".

    Args:
        fused: the entry of the table for the layer. Its ``rows`` are a number of equal parts (3), a pattern, or the
            formulas of the sizes of the parts, such as ("embed_dim", "kv_dim", "kv_dim").
        stored: the order of the parameter's dims, such as "{out} in -> {out} in", with "{out}" for the rows.
        holder: the module that has the sizes as attributes.
        rows: the number of rows of the parameter.
    """
    # 1. A pattern, for parts that alternate along the rows.
    if isinstance(fused.rows, str):
        return _pattern_of_interleaved(fused.rows, stored, holder, rows)
    # 2. A number of equal parts.
    if isinstance(fused.rows, int):
        if rows % fused.rows != 0:
            return None
        return divided(stored, fused.rows)
    # 3. The size of each part, from attributes of the module.
    sizes = [_number(holder, formula) for formula in fused.rows]
    if sum(sizes) != rows or 0 in sizes:  # 0 is a missing attribute
        return None
    if len(set(sizes)) == 1:  # as many keys as queries, for example: the same pattern as above
        return divided(stored, len(sizes))
    part_names = fused.parts.split(", ")
    return divided(stored, dict(zip(part_names, sizes, strict=True)))


def _pattern_of_interleaved(template: str, stored: str, holder: nn.Module | None, rows: int) -> str | None:
    """Fill the sizes of a module into a pattern of interleaved rows; return None if they do not fit the rows.

    With 8 heads, the template "(heads={num_heads} part=3 dim) -> part (heads dim)" describes rows of the form
    "(heads=8 part=3 dim) -> part (heads dim)". For ``stored``, "{out} in -> {out} in", which has the columns too, the
    result is "(heads=8 part=3 dim) in -> part (heads dim) in".
    """
    # 1. The sizes, in place of the formulas in braces.
    pattern_of_rows = template
    for formula in re.findall(r"{(.*?)}", template):  # such as "num_heads"
        size = _number(holder, formula)
        if size == 0:  # the module has no such size
            return None
        pattern_of_rows = pattern_of_rows.replace("{" + formula + "}", str(size))
    # 2. The rows as stored, "(heads=8 part=3 dim)", and the rows of each matrix, "part (heads dim)".
    stored_rows, _, matrices_text = pattern_of_rows.partition(" -> ")
    rows_of_matrices = matrices_text.split(", ")
    # 3. The sizes must multiply to the number of rows. The columns play no part in this, so that one column is enough.
    pattern_of_matrix = parse(_with_rows(_PLAIN, stored_rows, rows_of_matrices))
    if not pattern_of_matrix.fits((rows, 1)):
        return None
    return _with_rows(stored, stored_rows, rows_of_matrices)


def _number(module: nn.Module | None, formula: str) -> int:
    """Return the value of a formula of module attributes; 0 if one is missing, or a division has a remainder.

    The formulas are products and quotients, such as "config.num_heads*head_dim" and "num_heads//num_kv_heads".

    >>> _number(nn.Linear(6, 4), "in_features*out_features"), _number(nn.Linear(6, 4), "in_features//out_features")
    (24, 0)
    """
    product, _, divisor_name = formula.partition("//")  # without "//", the divisor is ""
    dividend = prod(_size(module, factor) for factor in product.split("*"))
    if not divisor_name:
        return dividend
    divisor = _size(module, divisor_name)
    if divisor == 0 or dividend % divisor != 0:
        return 0
    return dividend // divisor


def _size(module: nn.Module | None, path: str) -> int:
    """Return the attribute "head_dim", or "config.num_heads", of a module; 0 if it is missing or no integer."""
    value: object = module
    for name in path.split("."):
        value = getattr(value, name, 0)
    return value if isinstance(value, int) else 0


def _is_expert(info: ParamInfo) -> bool:
    """Return True if a parameter's name has the word expert, experts or moe.

    >>> _is_expert(ParamInfo("moe.w1", (8, 4, 4))), _is_expert(ParamInfo("shared_expert.w1", (4, 4)))
    (True, True)
    """
    components = ".".join(info.names)
    return re.search(r"(^|_|\.)(experts?|moe)(_|\.|$)", components) is not None


def is_convolution(info: ParamInfo) -> bool:
    """Return True if a parameter is a convolution kernel, such as (64, 3, 7, 7), and not a stack of matrices.

    The type of its module decides. Without a model, its name and its short sides decide.

    >>> is_convolution(ParamInfo("conv1.weight", (64, 3, 7, 7))), is_convolution(ParamInfo("experts.w1", (8, 64, 32)))
    (True, False)
    """
    if info.ndim < 3:  # a kernel has at least the dims (out, in, length)
        return False
    if info.module is not None:  # the Conv1D of transformers is a linear layer
        return class_name_fits(info.module, "Conv") and not class_name_fits(info.module, "^Conv1D$")
    # Three dims are more often a stack of matrices: only a plain name, such as "conv.weight", counts as a kernel.
    if info.ndim == 3 and (_is_expert(info) or info.name.rpartition(".")[2] not in PLAIN_LEAVES):
        return False
    # A stack of stacks also has four dims, but its sides are longer than a kernel's.
    return max(info.shape[2:]) <= _KERNEL_SIDE


def _is_of_class(module: nn.Module | None, pattern: str) -> bool:
    """Return True if a regular expression is found in the name of a module's class or of one of its bases."""
    return module is not None and class_name_fits(written_type(module), pattern)


@functools.lru_cache(maxsize=1024)
def class_name_fits(module: type, pattern: str) -> bool:
    """Return True if a regular expression is found in the name of a class or of one of its bases."""
    return any(re.search(pattern, base.__name__) for base in module.__mro__)


def patterns(values: Mapping[str, T], others: Iterable[str]) -> dict[str, T]:
    """Shorten a dict by parameter name to a few globs, which still match after wrappers have changed the names.

    A glob, such as "*.fc.weight", matches only names with its value, and none of ``others``.

    >>> patterns({"h.0.fc.weight": "a", "h.1.fc.weight": "a", "h.1.proj.weight": "b"}, ["head.fc.weight"])
    {'*h.*.fc.weight': 'a', '*.proj.weight': 'b'}
    """
    names_without_value = [name for name in others if name not in values]
    value_of_glob: dict[str, T] = {}
    for name, value in values.items():
        if any(matches(name, glob) for glob in value_of_glob):  # the glob of an earlier name has this value
            continue
        # The glob must match no name without a value, and none with another value.
        excluded = list(names_without_value)
        for other_name, other_value in values.items():
            if other_value != value:
                excluded.append(other_name)
        value_of_glob[_shortest_glob(name, excluded)] = value
    return value_of_glob


def _shortest_glob(name: str, excluded: Sequence[str]) -> str:
    """Return the most general glob that matches a parameter name and none of the names in ``excluded``.

    >>> _shortest_glob("h.0.fc.weight", ["head.fc.weight"])
    '*h.*.fc.weight'
    """
    for glob in _globs(name):  # the general ones first
        if not any(matches(excluded_name, glob) for excluded_name in excluded):
            return glob
    return escape(name)  # the name itself


def _globs(name: str) -> Iterator[str]:
    """Yield globs for a parameter name, general ones first.

    For ``blocks.0.fc.weight``, these are ``*.fc.weight``, ``*blocks.*.fc.weight`` and ``*blocks.0.fc.weight``, and
    again with the number of the block. They begin with ``*``, since wrappers add components in front of names.
    """
    components = [escape(component) for component in name.split(".")]
    # Where an ending of the name may begin: [0, 2] for blocks.0.fc.weight, at "blocks" and "fc".
    starts = [index for index, component in enumerate(components) if not component.isdigit()]
    if len(starts) > 1:  # the last word, such as "weight", is too general as the start of a glob
        starts.pop()
    if not starts:  # a name of numbers
        starts = [0]
    for glob_components in _with_wildcards(components):
        for start in reversed(starts):  # the shortest endings of the name first
            ending = ".".join(glob_components[start:])
            # The whole name has no dot after "*", so that the glob also matches the name without a wrapper.
            yield f"*.{ending}" if start > 0 else f"*{ending}"


def _with_wildcards(components: Sequence[str]) -> Iterator[list[str]]:
    """Yield copies of a name's components with "*" in place of numbers: first all numbers, then all but one, and so on.

    "*" matches any index, so that the first copy is the most general one. The last one has all numbers as they are.

    >>> list(_with_wildcards(["blocks", "0", "fc"]))
    [['blocks', '*', 'fc'], ['blocks', '0', 'fc']]
    """
    number_positions = [index for index, component in enumerate(components) if component.isdigit()]
    # A literal number remains as it is. There are 0 of them at first, and all in the end.
    for literal_count in range(len(number_positions) + 1):
        for literal_positions in combinations(number_positions, literal_count):
            replaced = list(components)
            for index in number_positions:
                if index not in literal_positions:
                    replaced[index] = "*"
            yield replaced
