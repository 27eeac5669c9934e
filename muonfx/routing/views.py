"""Find the view (a `MatrixView`: how a parameter divides into matrices) of each parameter of a model.

A parameter may hold several matrices, such as a stack of experts, or query, key and value concatenated. It may also be
stored transposed. For known layers, the type and the attributes of the module determine the view. Other layers are not
split; if their name suggests several matrices, a note says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from muonfx.internal.wrappers import WRAPPERS
from muonfx.routing.expert_stacks import Shapes, has_transposed_experts, is_expert, split_of_stack
from muonfx.routing.fused_layers import fused_layer, split_pattern
from muonfx.routing.known_layers import FUSED_IN_TORCH, STORED, SUSPECTS
from muonfx.routing.params import (
    PLAIN_LEAVES,
    ParamInfo,
    Params,
    class_name_fits,
    module_path,
    plain_name,
    written_type,
)
from muonfx.routing.stored_patterns import (
    CONVOLUTION,
    PLAIN,
    STACK,
    TRANSPOSED_STACK,
    in_equal_parts,
    in_parts,
    number_of_rows,
    undivided,
    whole,
)
from muonfx.transforms.matrices import MatrixView


class Division(NamedTuple):
    """How a parameter divides into matrices."""

    view: MatrixView
    note: str = ""
    """A text for `describe`, such as "query, key, value"; "" if there is nothing to explain."""
    suggested: str | None = None
    """The pattern to suggest, if only names or widths suggest several matrices in a layer of unknown code: ``view``
    does not split it. None otherwise."""


ONE_MATRIX = Division(MatrixView())

MAYBE_FUSED = "maybe fused, not split"
"""The beginning of the note about a parameter whose name suggests several matrices, in a layer of unknown code."""
MAYBE_STACK = "maybe a stack, not split"
"""The beginning of the note about a parameter of more than two dims, for an unknown reason."""
ROWS = "<rows>"
"""A placeholder in a suggested pattern, for the number of rows of a part."""
_KERNEL_SIDE = 32
# A layer from a condition to the scales, shifts and gates of norms: adaLN_modulation.1, adaln_single.linear, img_mod.1;
# or a layer in a norm: norm_out.linear; or proj_out_1 in the DiT of diffusers.
_MODULATION = re.compile(
    r"(^|_)(ada_?(ln|norm|layer_?norm)|modulations?|mod)(_|\d|$)|^proj_out_1$", re.IGNORECASE
)
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
    {
        "linear",
        "lin",
        "conv",
        "layer",
        "out_layer",
        "base_layer",
        "base",
        "inner",
        "original_module",
        "proj",
        "dense",
    }
)


def find_divisions(
    model_or_params: Params, infos: Sequence[ParamInfo], read_in_parts: Mapping[str, int]
) -> dict[str, Division]:
    """Find how parameters of two or more dims divide into matrices, so that each is orthogonalized by itself.

    Args:
        model_or_params: the model, or named tensors, which have no module types: only stacks of experts are found
            among them.
        infos: the parameters.
        read_in_parts: the number of vectors that a layer returns, for each layer of which other layers read only parts:
            ``{"mlp.fc1": 2}``.

    Returns:
        A dict from name to `Division`: the view, a note for `describe`, and a pattern that is only suggested. For the
        "c_attn" of GPT-2, the view is "in (part=3 out) -> part out in", and the note "query, key, value".
    """
    modules: dict[str, nn.Module] = {}
    if isinstance(model_or_params, nn.Module):  # a module in two places is found under both paths
        modules = dict(model_or_params.named_modules(remove_duplicate=False))
    shapes = {info.name: info.shape for info in infos}
    divisions: dict[str, Division] = {}
    for info in infos:
        if info.ndim < 2:  # a vector or number has no matrices
            continue
        path = module_path(info.name)
        owner = modules.get(path)
        leaf = plain_name(info.name).rpartition(".")[2]  # "weight" for "attn.qkv.weight"
        layers = _layers_around(info.name, leaf, owner, modules)
        param = _Param(info, leaf, owner, layers, modules, shapes, read_in_parts.get(path))
        divisions[info.name] = _division_of(param)
    return divisions


class _Param(NamedTuple):
    """A parameter, and what shows its division into matrices."""

    info: ParamInfo
    """Its name and its shape."""
    leaf: str
    """The last component of its name, such as "weight"."""
    owner: nn.Module | None
    """The module that owns it; None for named tensors without a model."""
    layers: Sequence[_Layer]
    """Its layer, and after it the wrappers around this layer, which may have the name that shows what the layer is."""
    modules: Mapping[str, nn.Module]
    """The modules of the model by path."""
    shapes: Shapes
    """The shapes of all parameters by name."""
    parts_read: int | None
    """The number of vectors that its layer returns, if other layers read only parts of its outputs; else None."""


def _division_of(param: _Param) -> Division:
    """Return how a parameter divides into matrices, by the first rule that recognizes it.

    The weight of an ``nn.LSTM`` has 4 matrices by its type, and the weight of "c_attn" in GPT-2 has 3 by a table. A
    "qkv" in the user's own code remains one matrix, and a split is only suggested.
    """
    # Each function returns None if it does not recognize the parameter; then ``or`` calls the next one.
    division = _of_convolution(param) or _of_torch(param)  # modules of PyTorch itself
    if division is not None:
        return division
    # The order of its dims, such as (in, out)
    storage = _storage_by_package(param) or _storage_by_experts(param)
    return (
        _of_known_layer(param, storage)
        or _maybe_stack(param, storage)
        or _of_unknown_layer(param, storage)
    )


def _of_known_layer(param: _Param, storage: _Storage) -> Division | None:
    """Return the matrices of a layer of a known package, such as query, key and value of GPT-2; None for other layers.

    GPT-2 stores "c_attn" of shape (8, 24) as (in, out), which ``storage`` describes. The division has the view
    "in (part=3 out) -> part out in", of 3 matrices of 8 rows each, and the note "query, key, value".
    """
    # For "qkv.linear", first "linear", then "qkv": a wrapper may have the known name.
    for layer in param.layers:
        # The matrices of the layer, from a table of known layers.
        fused = fused_layer(layer.name, layer.holder)
        if fused is None:
            continue
        if fused.count == 1:  # one matrix in spite of its name
            return Division(
                MatrixView(undivided(storage.pattern)), _join_notes(storage.note, fused.parts)
            )
        rows = number_of_rows(storage.pattern, param.info.shape)
        pattern = split_pattern(fused, storage.pattern, layer.holder, rows)
        note = fused.parts
        if pattern is None:  # the layer differs from the known one, so that it remains one matrix
            pattern = undivided(storage.pattern)
            note = f"{fused.parts}, of sizes that do not fit {rows} rows: not split"
        return Division(MatrixView(pattern), _join_notes(storage.note, note))
    return None


def _maybe_stack(param: _Param, storage: _Storage) -> Division | None:
    """Return one matrix for a parameter of three or more dims in unknown code, and suggest that it may be a stack.

    For a ``self.w = nn.Parameter(...)`` of shape (8, 64, 32), the suggestion is "... out in -> ... out in". The result
    is None if the parameter has two dims, is a convolution or a known stack of experts, or belongs to no module.
    """
    if param.owner is None:  # named tensors: more than two dims are taken for a convolution
        return None
    # Three or more dims have the pattern of a convolution (out, rest), unless they are a known stack.
    is_flattened = storage.pattern == CONVOLUTION
    if not is_flattened or is_convolution(param.info):
        return None
    stack = _likely_stack(param)
    return Division(MatrixView(), f"{MAYBE_STACK}: {stack}", stack)


def _of_unknown_layer(param: _Param, storage: _Storage) -> Division:
    """Return one matrix, or one stack, for a layer of unknown code, and suggest a split if one is likely.

    For a "qkv" of shape (24, 8), the view does not split it, and the suggestion is "(part=3 out) in -> part out in".
    """
    view = MatrixView(undivided(storage.pattern))
    split = _likely_split(param, storage.pattern)
    if split is None:
        return Division(view, storage.note)
    return Division(view, _join_notes(storage.note, f"{MAYBE_FUSED}: {split}"), split)


def _likely_split(param: _Param, stored: str) -> str | None:
    """Return the pattern that probably splits a parameter into several matrices; None if it is probably just one.

    For a layer "qkv" of shape (24, 8), it is "(part=3 out) in -> part out in". ``stored`` is the order of the dims.
    """
    # 1. The name of the layer, such as "qkv".
    split = _split_by_name(param, stored)
    if split is not None:
        return split
    # 2. The number of vectors that the layer returns: a modulation returns 6, and the first layer of a gated MLP 2.
    count = _number_of_modulations(param) or param.parts_read
    if count is not None:
        return in_equal_parts(stored, count)
    # 3. The widths of the other stacks of experts in its module.
    return split_of_stack(param.info, stored, param.shapes)


def _likely_stack(param: _Param) -> str:
    """Return the pattern of a parameter of three or more dims, on the assumption that it is a stack of matrices.

    A stack of shape (8, 64, 32) has the pattern "... out in -> ... out in". If its matrices hold two each, as the gate
    and the value of a "w13" of shape (8, 96, 32), it has the pattern "... (part=2 out) in -> ... part out in".
    """
    stored = _order_of_stack(param)  # (out, in) or (in, out)
    return (
        _split_by_name(param, stored)
        or split_of_stack(param.info, stored, param.shapes)
        or whole(stored)
    )


def _order_of_stack(param: _Param) -> str:
    """Return the order of the dims of a stack of matrices: `STACK` for (out, in), `TRANSPOSED_STACK` for (in, out)."""
    if has_transposed_experts(param.info, param.owner, param.modules, param.shapes):
        return TRANSPOSED_STACK
    return STACK


def _split_by_name(param: _Param, stored: str) -> str | None:
    """Return a pattern to suggest to the user, if the name of a parameter's layer suggests several matrices; or None.

    For a "qkv" of shape (24, 8), it is "(part=3 out) in -> part out in". A "qkv" of shape (20, 8) has fewer keys than
    queries, and the user must write the sizes in place of "<rows>": "(q=<rows> + k=<rows> + v=<rows>) in -> q in, k in,
    v in". ``stored`` is the order of the dims.
    """
    part_names = _names_of_parts(param.layers)  # ("q", "k", "v") for "qkv"
    if part_names is None:
        return None
    # The dims before the last two may count matrices, one each for q, k and v: (3, 32, 32).
    if param.info.ndim > 2 and len(part_names) == param.info.shape[0]:
        return None
    has_equal_parts = number_of_rows(stored, param.info.shape) % len(part_names) == 0
    if has_equal_parts:
        return in_equal_parts(stored, len(part_names))
    return in_parts(stored, dict.fromkeys(part_names, ROWS))


def _join_notes(*notes: str) -> str:
    """Join the notes that are not empty, as in "stack of 8 matrices; gate, up"."""
    return "; ".join(filter(None, notes))


class _Layer(NamedTuple):
    """A layer, and the module that holds it."""

    name: str
    """The name of the layer in that module, such as "qkv"."""
    holder: nn.Module | None
    """The module, such as an attention; None for named tensors without a model."""


def _layers_around(
    name: str, leaf: str, owner: nn.Module | None, modules: Mapping[str, nn.Module]
) -> list[_Layer]:
    """Return the layer that a parameter belongs to and the modules around it, up to one whose name shows what it is.

    - ``attn.qkv.weight``: the layer "qkv" in ``attn``.
    - ``attn.qkv.linear.weight``: the layer "linear" in ``attn.qkv``, whose name shows nothing, then "qkv" in ``attn``.
    - ``mlp.gate_up_proj``, a parameter without a layer: "gate_up_proj" in ``mlp``.

    Args:
        name: the name of the parameter.
        leaf: the last component of its name, such as "weight".
        owner: the module that owns it; None for named tensors without a model.
        modules: the modules of the model by path.
    """
    is_in_no_layer = leaf not in PLAIN_LEAVES  # not "weight", as in "mlp.gate_up_proj"
    is_model_the_layer = "." not in plain_name(name)  # "weight" alone
    if is_in_no_layer or is_model_the_layer:  # the parameter counts as a layer itself
        return [_Layer(leaf, owner)]
    path = module_path(name)
    # Go from the inside to the outside: "attn.qkv.linear" becomes "attn.qkv" and "linear", then "attn" and "qkv".
    layers: list[_Layer] = []
    while path:
        path, _, layer_name = path.rpartition(".")
        if layer_name in WRAPPERS:  # such as "_orig_mod" of torch.compile
            continue
        layers.append(_Layer(layer_name, modules.get(path)))
        # Names such as "linear" and "0" do not show what a layer is for.
        shows_nothing = layer_name in _INNER_LAYERS or layer_name.isdigit()
        if not shows_nothing:
            break
    return layers


def _names_of_parts(layers: Sequence[_Layer]) -> tuple[str, ...] | None:
    """Return names for the matrices that the name of a layer suggests; None for a name that suggests none.

    ``layers`` are the layer and the wrappers around it, which may have the name that shows what the layer is.

    >>> _names_of_parts([_Layer("linear", None), _Layer("qkv", None)])  # "attn.qkv.linear"
    ('q', 'k', 'v')
    """
    for layer in layers:
        for names, part_names in SUSPECTS:
            if names.fullmatch(layer.name):
                return part_names
    return None


def _number_of_modulations(param: _Param) -> int | None:
    """Return the number of scales, shifts and gates that a layer computes for norms; None if it is no such layer.

    Such a layer is called a modulation. A name shows it, or the class of the module that holds it. For
    ``adaLN_modulation.1.weight`` of shape (768, 128), the number is 768 / 128 = 6.
    """
    if param.info.ndim != 2:
        return None
    names = [layer.name for layer in reversed(param.layers)]
    path = ".".join(names)  # outermost first: "adaLN_modulation.1"
    if not is_modulation(path) and not _is_of_class(param.layers[0].holder, _MODULATION_CLASS):
        return None
    rows, columns = param.info.shape
    return _modulations(rows, columns)


def is_modulation(path: str) -> bool:
    """Return True for the path of a modulation: a layer that computes scales, shifts and gates for norms.

    >>> (
    ...     is_modulation("blocks.0.adaLN_modulation.1"),
    ...     is_modulation("norm_out.linear"),
    ...     is_modulation("norm"),
    ... )
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

    >>> (
    ...     _modulations(768, 128),
    ...     _modulations(768, 200),
    ...     _modulations(100, 128),
    ... )  # exact; assumed; one matrix
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


def _of_torch(param: _Param) -> Division | None:
    """Return the matrices of a parameter in which a module of PyTorch concatenates several; None for another parameter.

    The "weight_ih_l0" of an ``nn.LSTM`` has the matrices of 4 gates, one below the other: its view is
    "(part=4 out) in -> part out in".
    """
    for module_types, leaf_pattern, count, note in FUSED_IN_TORCH:
        if isinstance(param.owner, module_types) and re.match(leaf_pattern, param.leaf):
            return Division(MatrixView(in_equal_parts(PLAIN, count)), note)
    return None


def _of_convolution(param: _Param) -> Division | None:
    """Return the matrices of a transposed convolution, or of one with groups; None for another parameter.

    A convolution with two groups holds two matrices along its output channels, each of its own input channels. Its view
    is "(part=2 out) ... -> part out (...)".
    """
    if not is_convolution(param.info):
        return None
    owner = param.owner
    if isinstance(owner, _ConvTransposeNd):  # PyTorch stores it as (in, out, kernel)
        note = "transposed convolution"
        if owner.groups > 1:
            note += f"; {owner.groups} groups, not split"
        return Division(MatrixView("in out ... -> out (in ...)"), note)
    if isinstance(owner, _ConvNd) and owner.groups > 1:
        # The rows of a group are next to each other.
        pattern = in_equal_parts(CONVOLUTION, owner.groups)
        return Division(MatrixView(pattern), f"{owner.groups} groups")
    return None


class _Storage(NamedTuple):
    """How a parameter is stored, if its rows are not divided further."""

    pattern: str
    """The order of its dims, with ``{out}`` for the rows, such as ``"in {out} -> {out} in"`` for a transposed one."""
    note: str = ""
    """A text for `describe`, such as "stack of 8 matrices"; "" for a plain matrix."""


def _storage_by_package(param: _Param) -> _Storage | None:
    """Return the order of a parameter's dims if a known package does not store it as (out, in), by a table; else None.

    For the weight of a ``Conv1D`` of transformers, stored as (in, out), it is ``_Storage("in {out} -> {out} in")``.
    """
    if param.owner is None:  # named tensors without a model
        return None
    owner_class = written_type(param.owner)
    for known in STORED:
        # The entry has regular expressions for the class of the module and for the name, such as "weight".
        if class_name_fits(owner_class, f"^{known.module}$") and re.fullmatch(
            known.leaf, param.leaf
        ):
            note = known.note or _stack_note(param.info, known.pattern)
            return _Storage(known.pattern, note)
    return None


def _storage_by_experts(param: _Param) -> _Storage:
    """Return the order of a parameter's dims: a stack of matrices if it is of experts, else one matrix (out, rest).

    A tensor of shape (8, 64, 32) is a stack of 8 matrices under the name "experts.w1", and else one matrix (8, 2048).
    The name of the parameter or the class of its module shows that it is of experts.
    """
    if param.info.ndim == 2:
        return _Storage(PLAIN)
    if not is_expert(param.info) and not _is_of_class(param.owner, "Experts?$"):
        return _Storage(CONVOLUTION)  # (out, rest)
    pattern = _order_of_stack(param)
    return _Storage(pattern, _stack_note(param.info, pattern))


def _stack_note(info: ParamInfo, pattern: str) -> str:
    """Return a note such as "stack of 8 matrices" if the pattern splits a stack; else ""."""
    if pattern not in (STACK, TRANSPOSED_STACK):
        return ""
    return f"stack of {prod(info.shape[:-2])} matrices"


def is_convolution(info: ParamInfo) -> bool:
    """Return True if a parameter is a convolution kernel, such as (64, 3, 7, 7), and not a stack of matrices.

    If its module is known, the type decides. Else it is one if its sides after the first two are at most 32, and, in
    case of three dims, its name ends in "weight" or the like.

    >>> (
    ...     is_convolution(ParamInfo("conv1.weight", (64, 3, 7, 7))),
    ...     is_convolution(ParamInfo("experts.w1", (8, 64, 32))),
    ... )
    (True, False)
    """
    if info.ndim < 3:  # a kernel has at least the dims (out, in, length)
        return False
    if info.module is not None:
        # Conv1D of transformers is a linear layer, in spite of its name.
        is_linear_layer = class_name_fits(info.module, "^Conv1D$")
        return class_name_fits(info.module, "Conv") and not is_linear_layer
    # Three dims are more often a stack of matrices: only a plain name, such as "conv.weight", counts as a kernel.
    leaf = info.name.rpartition(".")[2]
    if info.ndim == 3 and (is_expert(info) or leaf not in PLAIN_LEAVES):
        return False
    # A stack of stacks also has four dims, but its sides are longer than a kernel's.
    return max(info.shape[2:]) <= _KERNEL_SIDE


def _is_of_class(module: nn.Module | None, pattern: str) -> bool:
    """Return True if a regular expression is found in the name of a module's class or of one of its bases."""
    return module is not None and class_name_fits(written_type(module), pattern)
