"""Find the view (a `MatrixView`: how a parameter divides into matrices) of each parameter of a model.

A parameter may hold several matrices, such as a stack of experts, or query, key and value concatenated. It may also be
stored transposed. For known layers, the type and the attributes of the module determine the view. Other layers are not
split; if their name suggests several matrices, a note says so.
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

from muonfx.select.matrix_view import MatrixView
from muonfx.select.params import ParamInfo, Params, plain_name, written_type
from muonfx.select.pattern import parse
from muonfx.tree.tracing import matches

# fmt: off
__all__ = [
    "MAYBE_FUSED", "PLAIN_LEAVES", "class_name_fits", "divided", "find_matrices", "is_convolution", "patterns",
    "undivided",
]
# fmt: on

T = TypeVar("T")
Found = tuple[MatrixView, str, str | None]
"""The view of a parameter, a note for `describe`, and a pattern if the name of an unknown layer suggests one."""

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


@dataclass(frozen=True)
class _Fused:
    """A layer of a known package whose weight holds several matrices along its rows."""

    layer: str
    """The name of the layer, or of the parameter, in the module that holds it."""
    holder: str
    """A regular expression for the class of that module."""
    parts: str
    """The names of the matrices, separated by commas."""
    rows: int | tuple[str, ...] | str
    """For concatenated matrices, their number or the rows of each; else a pattern of the rows. Sizes are names of
    attributes of the holder, or formulas such as "a*b" and "a//b", in braces if they are in a pattern."""
    given: tuple[tuple[str, bool], ...] = ()
    """Pairs of an attribute of the holder and the truth value that it must have for this entry to apply."""
    package: str = "transformers.models."
    """The package in which the class of the holder must be defined."""


_QKV = "query, key, value"
_ANY = r".*"
_BY_HEAD = "(heads={%s} part=3 dim) -> part (heads dim)"
# The first match applies. `holder` is the class that holds the layer. The entries are read from transformers 5.23 and
# torchtitan 0.3.0. Each applies to classes of its package only: a class of this name elsewhere may differ.
_FUSED = (
    _Fused("c_attn", "GPTBigCodeAttention", _QKV, ("embed_dim", "kv_dim", "kv_dim"), (("multi_query", True),)),
    _Fused("c_attn", "GPTBigCodeAttention", _QKV, _BY_HEAD % "num_heads", (("is_cross_attention", False),)),
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
        (("new_decoder_architecture", True),),
    ),
    _Fused(
        "query_key_value",
        "Falcon.*Attention",
        _QKV,
        ("num_heads*head_dim", "head_dim", "head_dim"),
        (("multi_query", True),),
    ),
    _Fused("query_key_value", "GPTNeoXAttention", _QKV, _BY_HEAD % "config.num_attention_heads"),
    _Fused("query_key_value", "GPTNeoXJapaneseAttention", _QKV, _BY_HEAD % "num_attention_heads"),
    _Fused("query_key_value", "(Bloom|Persimmon|Falcon).*Attention", _QKV, _BY_HEAD % "num_heads"),
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
    _Fused("in_proj", "Lfm2.*ShortConv", "B, C, state", 3),
    _Fused("in_proj", "DisentangledSelfAttention", _QKV, _BY_HEAD % "num_attention_heads"),
    _Fused("gate_up_proj", "GptOssExperts", "gate, up", "(dim part=2) -> part dim"),
    _Fused("gate_up_proj", _ANY, "gate, up", 2),
    _Fused("input_linear", "(Granite|JetMoe).*(MLP|MoE)", "gate, up", 2),
    _Fused("Wi", "ModernBert.*MLP", "value, gate", 2),
    _Fused(
        "wqkv",
        "FusedQKVLinear",
        _QKV,
        "(groups (query={heads_per_kv} + key=1 + value=1) dim={head_dim}) "
        "-> (groups query dim), (groups key dim), (groups value dim)",
        package="torchtitan.",
    ),
)
# Names of layers that are nearly always fused, for unknown code.
_SUSPECTS = (
    (re.compile(r"(.*_)?w?qkv(_.*)?|c_attn|query_key_value|in_proj_weight", re.IGNORECASE), 3),
    (re.compile(r"(.*_)?w?kv(_proj|_linear)?|(fused_)?(gate_up|up_gate)(_proj)?|w1_?w?[23]", re.IGNORECASE), 2),
)


@dataclass(frozen=True)
class _Stored:
    """A parameter that a known package does not store as a matrix (out, in)."""

    module: str
    leaf: str
    pattern: str
    count: str | None = None
    """The module attribute with the number of equal matrices along the rows; None for one matrix."""
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
    _Stored("DeepseekV4GroupedLinear", "weight", _PLAIN, "n_groups", "one matrix a group"),
    _Stored("DbrxExpertGLU", "[wv][12]", _PLAIN, "moe_num_experts", "one matrix an expert"),
)


def find_matrices(model_or_params: Params, infos: Iterable[ParamInfo]) -> dict[str, Found]:
    """Find parameters that are not one matrix stored as (out, in); return a dict from name to view, note and pattern.

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
        return MatrixView(divided(_PLAIN, 3)), _QKV, None
    if isinstance(owner, nn.RNNBase | nn.RNNCellBase) and leaf.startswith(("weight_ih", "weight_hh")):
        gates = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3}.get(written_type(owner).__name__)
        return _ONE_MATRIX if gates is None else (MatrixView(divided(_PLAIN, gates)), f"{gates} gates", None)
    stored, count, note = _stored(info, leaf, owner, shapes)
    if count:
        return MatrixView(divided(stored, count)), note, None
    is_flattened = info.ndim > 2 and stored == _PLAIN
    divisible = _CONVOLUTION if is_flattened else stored  # parts of a flattened tensor keep its further dims
    rows = _rows(divisible, info.shape)
    # The layer or parameter by its name in the module that holds it.
    is_layer = leaf in PLAIN_LEAVES and len(plain) > 1
    own = plain[-2] if is_layer else leaf
    holder = modules.get(above.removesuffix(".base_layer").rpartition(".")[0]) if is_layer else owner
    pattern, parts = _fused(divisible, own, holder, rows)
    suspected = None
    if not parts and (count := next((n for names, n in _SUSPECTS if names.fullmatch(own)), None)):
        glob, suspected = "*" + ".".join(plain_name(info.name).split(".")[-2:]), divided(divisible, count)
        parts = f"{MAYBE_FUSED}: to split equal parts, view={{{glob!r}: {suspected!r}}}"
    if pattern is None and stored != _PLAIN:
        pattern = stored.replace("{out}", "out")
    return MatrixView(pattern), "; ".join(filter(None, (note, parts))), suspected


def divided(stored: str, parts: int | Mapping[str, int]) -> str:
    """Return the `MatrixView` pattern of a parameter whose rows are several concatenated matrices.

    ``stored`` is the pattern of an undivided parameter, with ``{out}`` for the rows. ``parts`` is a number of equal
    matrices, or a dict from the name of each matrix to its number of rows.

    >>> divided("{out} in -> {out} in", {"q": 4, "k": 2})
    '(q=4 + k=2) in -> q in, k in'
    """
    if isinstance(parts, int):
        return _with_rows(stored, f"(part={parts} out)", ["part out"])
    return _with_rows(stored, "(" + " + ".join(f"{name}={size}" for name, size in parts.items()) + ")", list(parts))


def undivided(pattern: str) -> str:
    """Return the pattern that keeps a parameter as one matrix, given the pattern that splits it into equal parts.

    >>> undivided("in (part=3 out) -> part out in")
    'in whole -> whole in'
    """
    return re.sub(r"\(part=\d+ out\)|part out", "whole", pattern)


def _with_rows(stored: str, rows: str, results: Iterable[str]) -> str:
    """Replace ``{out}`` in a pattern: left of the arrow by ``rows``, right of it by each of ``results``."""
    left, _, right = stored.partition(" -> ")
    return f"{left.replace('{out}', rows)} -> {', '.join(right.replace('{out}', result) for result in results)}"


def _rows(stored: str, shape: tuple[int, ...]) -> int:
    """Return the number of rows if a parameter of this shape is stored as one matrix by the pattern ``stored``."""
    return parse(stored.replace("{out}", "out")).split(torch.empty(shape, device="meta"))[0].shape[-2]


def _of_convolution(owner: nn.Module | None, info: ParamInfo) -> Found:
    if isinstance(owner, _ConvTransposeNd):
        grouped = f"; {owner.groups} groups, not split" if owner.groups > 1 else ""
        return MatrixView("in out ... -> out (in ...)"), f"transposed convolution{grouped}", None
    if isinstance(owner, _ConvNd) and owner.groups > 1:
        return MatrixView(divided(_CONVOLUTION, owner.groups)), f"{owner.groups} groups", None
    return _ONE_MATRIX


def _stored(
    info: ParamInfo, leaf: str, owner: nn.Module | None, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, int | None, str]:
    """Return the storage order of a parameter (a pattern with ``{out}`` for its rows), a number of matrices, a note."""
    kind = written_type(owner) if owner is not None else None
    for known in _STORED:
        if class_name_fits(kind, f"^{known.module}$") and re.fullmatch(known.leaf, leaf):
            # A missing attribute, of another package's class, splits nothing.
            count = (known.count and _number(owner, known.count)) or None
            return known.pattern, count, known.note or _stack_note(info, known.pattern)
    if info.ndim < 3 or not (_is_expert(info) or class_name_fits(kind, "Experts?$")):
        return _PLAIN, None, ""
    transposed = getattr(owner, "is_transposed", None)  # declared by transformers
    prefix = info.name[: info.name.rfind(".") + 1]
    up, down = shapes.get(f"{prefix}gate_up_proj"), shapes.get(f"{prefix}down_proj")
    if transposed is None and up and down:
        transposed = up[-2:] == (down[-1], 2 * down[-2])
    pattern = _TRANSPOSED_STACK if transposed is True else _STACK
    return pattern, None, _stack_note(info, pattern)


def _stack_note(info: ParamInfo, pattern: str) -> str:
    return f"stack of {prod(info.shape[:-2])} matrices" if pattern in (_STACK, _TRANSPOSED_STACK) else ""


def _fused(stored: str, own: str, holder: nn.Module | None, rows: int) -> tuple[str | None, str]:
    """Look up the layer ``own`` of the module ``holder``; return its pattern and a note, or (None, "") if unknown."""
    if holder is None:
        return None, ""
    kind = written_type(holder)
    for known in _FUSED:
        if not kind.__module__.startswith(known.package):
            continue
        if known.layer != own or not re.fullmatch(known.holder, kind.__name__):
            continue
        if any(bool(getattr(holder, name, None)) is not wanted for name, wanted in known.given):
            continue
        pattern = _pattern_of(known, stored, holder, rows)
        return pattern, known.parts if pattern else f"{known.parts}, of sizes that do not fit {rows} rows: not split"
    return None, ""


def _pattern_of(known: _Fused, stored: str, holder: nn.Module, rows: int) -> str | None:
    """Fill the sizes of the module ``holder`` into the pattern of a known layer; None if they do not fit ``rows``."""
    if isinstance(known.rows, str):
        left, _, right = known.rows.partition(" -> ")
        left = re.sub(r"{(.*?)}", lambda field: str(_number(holder, field[1])), left)
        pattern = _with_rows(stored, left, right.split(", "))
        alone = _with_rows(_PLAIN, left, right.split(", "))
        return pattern if "=0" not in left and parse(alone).fits((rows, 1)) else None
    if isinstance(known.rows, int):
        return divided(stored, known.rows) if rows % known.rows == 0 else None
    sizes = [_number(holder, size) for size in known.rows]
    if sum(sizes) != rows or 0 in sizes:
        return None
    equal = len(set(sizes)) == 1
    return divided(stored, len(sizes) if equal else dict(zip(known.parts.split(", "), sizes, strict=True)))


def _number(module: nn.Module | None, formula: str) -> int:
    """Return the value of a formula of module attributes, such as "num_heads*head_dim"; 0 if one is missing."""
    if "//" in formula:
        whole, by = (_number(module, part) for part in formula.split("//"))
        return whole // by if by and whole % by == 0 else 0
    factors = (
        functools.reduce(lambda at, name: getattr(at, name, 0), f.split("."), module) for f in formula.split("*")
    )
    return prod(factor if isinstance(factor, int) else 0 for factor in factors)


def _is_expert(info: ParamInfo) -> bool:
    """Return True if a parameter's name has the word expert, experts or moe."""
    return any(re.search(r"(^|_)(experts?|moe)(_|$)", part) for name in info.names for part in name.split("."))


def is_convolution(info: ParamInfo) -> bool:
    """Return True if a parameter is a convolution kernel, judged by module type, or else by its short sides."""
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
    """Return True if a regular expression is found in the name of a class or of one of its bases."""
    names = [] if module is None else [base.__name__ for base in module.__mro__]
    return any(map(re.compile(pattern).search, names))


def patterns(values: Mapping[str, T], others: Iterable[str]) -> dict[str, T]:
    """Return a dict with globs instead of names. A glob matches only names with its value, and none of ``others``."""
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
    """Yield globs for a parameter name, general ones first: ``*.fc.weight`` for ``blocks.0.fc.weight``."""
    parts = [escape(part) for part in name.split(".")]
    words = [at for at, part in enumerate(parts) if not part.isdigit()]
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    for kept in range(len(numbers) + 1):
        for literal in combinations(numbers, kept):
            shown = ["*" if at in numbers and at not in literal else part for at, part in enumerate(parts)]
            for start in reversed(words[:-1] or words or [0]):
                yield ("*." if start else "*") + ".".join(shown[start:])
