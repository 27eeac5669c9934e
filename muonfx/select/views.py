"""Views of parameters that are not a single matrix stored as (out, in).

A parameter may hold several matrices, such as a stack of experts, or query, key and value concatenated. It may also be
stored transposed. For known layers, the type and the attributes of the module determine the view. Other layers are not
split; if their name suggests several matrices, it is reported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import escape
from itertools import combinations
from math import prod
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from muonfx.select.matrix_view import Blocks, Dims, MatrixView
from muonfx.select.params import ParamInfo, Params, plain_name, written_type
from muonfx.tree.tracing import matches

__all__ = ["PLAIN_LEAVES", "class_name_fits", "find_matrices", "is_convolution", "patterns"]

T = TypeVar("T")
Found = tuple[MatrixView, str, int | None]
"""A view, a note for the report, and the number of matrices that the name suggests if the layer is unknown."""

STACK: Dims = ((-2,), (-1,))
TRANSPOSED_STACK: Dims = ((-1,), (-2,))
TRANSPOSED: Dims = ((1,), (0,))
PLAIN_LEAVES = frozenset({"weight", "kernel", "w", "weight_orig"})
_KERNEL_SIDE = 32


@dataclass(frozen=True)
class _Fused:
    """A layer of known code that holds several matrices concatenated along its rows."""

    layer: str
    holder: str
    parts: str
    sizes: int | tuple[str, ...] | None
    """Number of equal blocks, or attributes of the holder ("a*b" is a product); None if interleaved."""
    given: tuple[tuple[str, bool], ...] = ()
    """Attributes of the holder with the truth values that the entry requires."""


_QKV = "query, key, value"
_HEADS = "query, key and value interleaved by head"
_ANY = r".*"
# The first match applies. `holder` is the class that holds the layer. The entries are read from transformers 5.23 and
# apply to classes of that package only: a class of the same name elsewhere may have another layout.
_FUSED = (
    _Fused("c_attn", "GPTBigCodeAttention", _QKV, ("embed_dim", "kv_dim", "kv_dim"), (("multi_query", True),)),
    _Fused("c_attn", "GPTBigCodeAttention", _HEADS, None),
    _Fused(
        "c_attn", "(GPT2|DecisionTransformerGPT2|ImageGPT)Attention", "key, value", 2, (("is_cross_attention", True),)
    ),
    _Fused("c_attn", "(GPT2|DecisionTransformerGPT2|ImageGPT)?Attention", _QKV, 3),
    _Fused(
        "qkv_proj",
        "(Phi3|Phi4Multimodal)Attention",
        _QKV,
        ("config.num_attention_heads*head_dim", "num_key_value_heads*head_dim", "num_key_value_heads*head_dim"),
    ),
    _Fused("qkv_proj", "(CodeGenAttention|MiniMaxLightningAttention)", _HEADS, None),
    _Fused("Wqkv", "DbrxAttention", _QKV, ("hidden_size", *("num_key_value_heads*head_dim",) * 2)),
    _Fused("Wqkv", "(ModernBertAttention|MptAttention)", _QKV, 3),
    _Fused("att_proj", "Bark.*Attention", _QKV, 3),
    _Fused("qkv", "Exaone4_5_VisionAttention", _QKV, ("q_dim", "kv_dim", "kv_dim")),
    _Fused("qkv", ".*(Vision|Blip|Mgpstr|PPOCR|Sam|Hiera|SegGpt|Timesformer|VitDet).*Attention", _QKV, 3),
    _Fused(
        "query_key_value",
        "Falcon.*Attention",
        _QKV,
        ("num_heads*head_dim", "head_dim", "head_dim"),
        (("multi_query", True), ("new_decoder_architecture", False)),
    ),
    _Fused("query_key_value", _ANY, _HEADS, None),
    _Fused("in_proj_qkv", ".*GatedDeltaNet", _QKV, ("key_dim", "key_dim", "value_dim")),
    _Fused("in_proj_qkvz", _ANY, "query, key, value and gate interleaved by head", None),
    _Fused("in_proj_ba", _ANY, "two interleaved by head", None),
    _Fused("kv_proj", "JetMoeAttention", "key, value", 2),
    _Fused("to_kv", _ANY, "key, value", 2),
    _Fused("kv_a_proj_with_mqa", _ANY, "latent, rotary key", ("kv_lora_rank", "qk_rope_head_dim")),
    _Fused("kv_b_proj", _ANY, "key and value interleaved by head", None),
    _Fused("in_proj", "(Mamba|FalconMamba|JambaMamba)Mixer", "state, gate", 2),
    _Fused("in_proj", "ZambaMambaMixer", "state and gate interleaved by head", None),
    _Fused(
        "in_proj",
        "(Mamba2|Bamba|FalconH1|NemotronHMamba2|GraniteMoeHybridMamba|Zamba2Mamba)(Mixer|Layer)",
        "gate, state, B, C, dt",
        (*("intermediate_size",) * 2, *("n_groups*ssm_state_size",) * 2, "num_heads"),
    ),
    _Fused("in_proj", "Lfm2.*ShortConv", "B, C, state", 3),
    _Fused("in_proj", "DisentangledSelfAttention", _HEADS, None),
    _Fused("gate_up_proj", "GptOssExperts", "gate and up interleaved by row", None),
    _Fused("gate_up_proj", _ANY, "gate, up", 2),
    _Fused("input_linear", "(Granite|JetMoe).*(MLP|MoE)", "gate, up", 2),
    _Fused("Wi", "ModernBert.*MLP", "value, gate", 2),
)
# Names of layers that are nearly always fused, for unknown code.
_SUSPECTS = (
    (re.compile(r"(.*_)?w?qkv(_.*)?|c_attn|query_key_value|in_proj_weight", re.IGNORECASE), 3),
    (re.compile(r"(.*_)?w?kv(_proj|_linear)?|(fused_)?(gate_up|up_gate)(_proj)?|w1_?w?[23]", re.IGNORECASE), 2),
)


@dataclass(frozen=True)
class _Stored:
    """A parameter of known code that is not stored as (out, in)."""

    module: str
    leaf: str
    dims: Dims | None
    blocks: str | None = None
    note: str = ""


_STORED = (
    _Stored("Conv1D", "weight", TRANSPOSED),
    _Stored(".*MultiModalProjector", "mm_input_projection_weight", TRANSPOSED),
    _Stored("XLNetRelativeAttention", "[qkvr]", ((1, 2), (0,)), note="heads side by side"),
    _Stored("XLNetRelativeAttention", "o", ((0,), (1, 2)), note="heads side by side"),
    _Stored("FunnelRelMultiheadAttention", "r_kernel", ((1, 2), (0,)), note="heads side by side"),
    _Stored("RecurrentGemmaRglru", "(input|recurrent)_gate_weight", TRANSPOSED_STACK),
    _Stored("GroupedLinearLayer", "weight", TRANSPOSED_STACK),
    _Stored(".*FlexibleLinear", "weight", STACK),
    _Stored("DeepseekV4GroupedLinear", "weight", None, "n_groups", "one block a group"),
    _Stored("DbrxExpertGLU", "[wv][12]", None, "moe_num_experts", "one block an expert"),
)


def find_matrices(model_or_params: Params, infos: Iterable[ParamInfo]) -> dict[str, Found]:
    """Return the parameters that are not a single matrix stored as (out, in), with their views.

    Named tensors have no module types; only stacks of experts are found among them. A convolution is one matrix (out,
    in x kernel) and is listed only if it is transposed or has groups.
    """
    infos = tuple(infos)
    modules = (
        dict(model_or_params.named_modules(remove_duplicate=False)) if isinstance(model_or_params, nn.Module) else {}
    )
    shapes = {info.name: info.shape for info in infos}
    found = {info.name: _found(info, modules, shapes) for info in infos if info.ndim >= 2}
    return {name: own for name, own in found.items() if own != _ONE_MATRIX}


_ONE_MATRIX: Found = (MatrixView(), "", None)


def _found(info: ParamInfo, modules: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]]) -> Found:
    # The tensors of a parametrized weight are below the module that owns the weight.
    above = f".{info.name}".rpartition(".")[0].partition(".parametrizations.")[0].removeprefix(".")
    owner = modules.get(above)
    if is_convolution(info):
        return _of_convolution(owner, info)
    plain = [part for part in plain_name(info.name).split(".") if part != "base_layer"]
    leaf = plain[-1]
    if isinstance(owner, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return MatrixView(blocks=3), _QKV, None
    if isinstance(owner, nn.RNNBase | nn.RNNCellBase) and leaf.startswith(("weight_ih", "weight_hh")):
        gates = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}.get(written_type(owner).__name__)
        return _ONE_MATRIX if gates is None else (MatrixView(blocks=gates), f"{gates} gates", None)
    view, stored = _stored(info, leaf, owner, shapes)
    if view.blocks:
        return view, stored, None
    (matrix,) = view.split(torch.empty(info.shape, device="meta"), info.name)
    # The layer or parameter by its name in the module that holds it.
    is_layer = leaf in PLAIN_LEAVES and len(plain) > 1
    own = plain[-2] if is_layer else leaf
    holder = modules.get(above.removesuffix(".base_layer").rpartition(".")[0]) if is_layer else owner
    blocks, parts = _blocks(own, holder, matrix.shape[-2])
    suspected = None
    if not parts and (suspected := next((n for names, n in _SUSPECTS if names.fullmatch(own)), None)):
        glob = "*." + ".".join(plain_name(info.name).split(".")[-2:])
        parts = f"maybe fused, not split: to split equal parts, blocks={{{glob!r}: {suspected}}}"
    return MatrixView(view.dims, blocks), "; ".join(filter(None, (stored, parts))), suspected


def _of_convolution(owner: nn.Module | None, info: ParamInfo) -> Found:
    if isinstance(owner, _ConvTransposeNd):
        grouped = f"; {owner.groups} groups, not split" if owner.groups > 1 else ""
        return MatrixView(((1,), (0, *range(2, info.ndim)))), f"transposed convolution{grouped}", None
    if isinstance(owner, _ConvNd) and owner.groups > 1:
        return MatrixView(blocks=owner.groups), f"{owner.groups} groups", None
    return _ONE_MATRIX


def _stored(
    info: ParamInfo, leaf: str, owner: nn.Module | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[MatrixView, str]:
    """Return the view of a parameter as it is stored, without splitting fused rows, and a note."""
    kind = written_type(owner) if owner is not None else None
    for known in _STORED:
        if class_name_fits(kind, f"^{known.module}$") and re.fullmatch(known.leaf, leaf):
            # A missing attribute, of another package's class, splits nothing.
            blocks = (known.blocks and _number(owner, known.blocks)) or None
            return MatrixView(known.dims, blocks), known.note or _stack_note(info, known.dims)
    if info.ndim < 3 or not (_is_expert(info) or class_name_fits(kind, "Experts?$")):
        return MatrixView(), ""
    transposed = getattr(owner, "is_transposed", None)  # declared by transformers
    prefix = info.name[: info.name.rfind(".") + 1]
    up, down = shapes.get(f"{prefix}gate_up_proj"), shapes.get(f"{prefix}down_proj")
    if transposed is None and up and down:
        transposed = up[-2:] == (down[-1], 2 * down[-2])
    dims = TRANSPOSED_STACK if transposed is True else STACK
    return MatrixView(dims), _stack_note(info, dims)


def _stack_note(info: ParamInfo, dims: Dims | None) -> str:
    return f"stack of {prod(info.shape[:-2])} matrices" if dims in (STACK, TRANSPOSED_STACK) else ""


def _blocks(own: str, holder: nn.Module | None, rows: int) -> tuple[Blocks | None, str]:
    """Return the blocks of a fused parameter if they are certain, and a note."""
    if holder is None:
        return None, ""
    kind = written_type(holder)
    if kind.__module__.startswith("torchtitan.") and kind.__name__ == "FusedQKVLinear":
        return None, f"{_HEADS}: not split"
    for known in _FUSED if kind.__module__.startswith("transformers.models.") else ():
        if known.layer != own or not re.fullmatch(known.holder, kind.__name__):
            continue
        if any(bool(getattr(holder, name, None)) is not wanted for name, wanted in known.given):
            continue
        sizes = known.sizes
        if sizes is None:
            return None, f"{known.parts}: not split"
        counts = (rows // sizes,) * sizes if isinstance(sizes, int) else tuple(_number(holder, s) for s in sizes)
        if sum(counts) != rows or 0 in counts:
            return None, f"{known.parts}, of sizes that do not add up to {rows}: not split"
        return len(counts) if len(set(counts)) == 1 else counts, known.parts
    return None, ""


def _number(module: nn.Module | None, product: str) -> int:
    """Return a product of attributes of a module, with 0 for a missing one."""
    factors = (
        functools.reduce(lambda at, name: getattr(at, name, 0), f.split("."), module) for f in product.split("*")
    )
    return prod(factor if isinstance(factor, int) else 0 for factor in factors)


def _is_expert(info: ParamInfo) -> bool:
    """Return True if a component of the name has the word expert, experts or moe."""
    return any(re.search(r"(^|_)(experts?|moe)(_|$)", part) for name in info.names for part in name.split("."))


def is_convolution(info: ParamInfo) -> bool:
    """Return True for the kernel of a convolution, by module type if known, else by its short sides."""
    if info.ndim < 3:
        return False
    if info.module is not None:
        return class_name_fits(info.module, "Conv") and not class_name_fits(info.module, "^Conv1D$")
    if info.ndim == 3 and (_is_expert(info) or info.name.rpartition(".")[2] not in PLAIN_LEAVES):
        return False
    # A stack of stacks also has four dims, but its sides are longer than a kernel's.
    return max(info.shape[2:]) <= _KERNEL_SIDE


@functools.lru_cache(maxsize=1024)
def class_name_fits(module: type | None, pattern: str) -> bool:
    """Return True if a pattern is found in the name of a class or of one of its bases."""
    names = [] if module is None else [base.__name__ for base in module.__mro__]
    return any(map(re.compile(pattern).search, names))


def patterns(values: Mapping[str, T], others: Iterable[str]) -> dict[str, T]:
    """Return values by a few short globs, each of which matches only names with its value and none of `others`."""
    # Globs begin with `*`, since wrappers add components in front of names.
    found: dict[str, T] = {}
    rest = [name for name in others if name not in values]
    for name, value in values.items():
        if any(matches(name, pattern) for pattern in found):
            continue
        strangers = [*rest, *(other for other, own in values.items() if own != value)]
        globs = (glob for glob in _globs(name) if not any(matches(other, glob) for other in strangers))
        found[next(globs, escape(name))] = value
    return found


def _globs(name: str) -> Iterator[str]:
    """Yield globs for a name: most wildcards for numbers first, then shortest, with at least two components."""
    parts = [escape(part) for part in name.split(".")]
    words = [at for at, part in enumerate(parts) if not part.isdigit()]
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    for kept in range(len(numbers) + 1):
        for literal in combinations(numbers, kept):
            shown = ["*" if at in numbers and at not in literal else part for at, part in enumerate(parts)]
            for start in reversed(words[:-1] or words or [0]):
                yield ("*." if start else "*") + ".".join(shown[start:])
