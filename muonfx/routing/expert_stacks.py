"""Stacks of experts: how their matrices are stored, and whether each holds a gate and a value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import nn

from muonfx.internal.wrappers import WRAPPERS
from muonfx.routing.params import PLAIN_LEAVES, ParamInfo, module_path
from muonfx.routing.stored_patterns import STACK, TRANSPOSED_STACK, in_equal_parts

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""The shapes of parameters by name."""

COUNTS_OF_PARTS = (2, 3)
"""The numbers of parts that widths can show: value and gate of a gated linear unit; query, key and value."""


def is_expert(info: ParamInfo) -> bool:
    """Return True if a parameter's name has the word expert, experts or moe.

    >>> is_expert(ParamInfo("moe.w1", (8, 4, 4))), is_expert(ParamInfo("shared_expert.w1", (4, 4)))
    (True, True)
    """
    components = ".".join(info.names)
    return re.search(r"(^|_|\.)(experts?|moe)(_|\.|$)", components) is not None


def has_transposed_experts(
    info: ParamInfo, owner: nn.Module | None, modules: Mapping[str, nn.Module], shapes: Shapes
) -> bool:
    """Return True if the matrices of a stack of experts are stored as (in, out), not as (out, in), the usual order.

    With a hidden width of 8, an expert "up_proj" of shape (4, 8, 32) reads 8 features, so that it is stored as (in,
    out). The first evidence decides; without any, the result is False.

    Args:
        info: the parameter.
        owner: the module of the parameter. Those of transformers have an attribute ``is_transposed``.
        modules: the modules of the model by path.
        shapes: the shapes of all parameters by name.
    """
    # 1. The module declares it.
    declared = getattr(owner, "is_transposed", None)
    if declared is not None:
        return declared is True
    # 2. The shapes of the two stacks of a gated MLP, "gate_up_proj" and "down_proj", show it.
    holder = info.name[: info.name.rfind(".") + 1]  # "mlp.experts." for "mlp.experts.down_proj"
    gate_up = shapes.get(f"{holder}gate_up_proj")
    down = shapes.get(f"{holder}down_proj")
    if gate_up and down:
        return _is_gated_mlp_transposed(gate_up, down)
    # 3. The router of the experts shows the hidden width, since it reads the same features as they do.
    hidden_width = _width_read_by_router(info, modules)
    return hidden_width is not None and _read_by_rows(info, hidden_width, shapes)


def _is_gated_mlp_transposed(gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Return True if the shapes of two stacks of a gated MLP show that they are stored as (in, out).

    4 experts from 8 hidden to 2 x 32 inner features and back, stored as (out, in), and stored as (in, out):

    >>> _is_gated_mlp_transposed(gate_up=(4, 2 * 32, 8), down=(4, 8, 32))
    False
    >>> _is_gated_mlp_transposed(gate_up=(4, 8, 2 * 32), down=(4, 32, 8))
    True
    """
    # If (in, out) is the order, the rows of ``down`` are the inner features, and its columns the hidden features.
    inner, hidden = down[-2:]
    return gate_up[-2:] == (hidden, 2 * inner)


def _width_read_by_router(info: ParamInfo, modules: Mapping[str, nn.Module]) -> int | None:
    """Return the hidden width, which the router of a stack of experts reads; None if no router is found.

    The router is a matrix with one row for each expert. For 8 experts ``moe.experts.w1``, a ``moe.router.weight`` of
    shape (8, 64) is one, in the module "moe" around the experts, so that the result is 64. The module "moe.experts"
    itself may also contain it.
    """
    # "moe.experts" for "moe.experts.w1"
    experts_path = _path_without_wrappers(_path_around_layer(info.name))
    path_around_experts = _path_without_wrappers(module_path(experts_path))  # "moe"
    number_of_experts = info.shape[-3]  # 8 for a stack of shape (8, 32, 64)
    for path in (experts_path, path_around_experts):  # the nearest module with a router decides
        module = modules.get(path)
        if module is None:
            continue
        widths: set[int] = set()
        for param in module.parameters():
            # A router has a row for each expert.
            if param.ndim == 2 and len(param) == number_of_experts:
                widths.add(param.shape[1])
        if len(widths) > 1:  # matrices of several widths may be the router
            return None
        if widths:
            return widths.pop()
    return None


def _path_without_wrappers(path: str) -> str:
    """Return the path of the module in which wrappers are: "moe.experts" for "moe.experts._orig_mod"."""
    while path.rpartition(".")[2] in WRAPPERS:
        path = module_path(path)
    return path


def _read_by_rows(info: ParamInfo, hidden_width: int, shapes: Shapes) -> bool:
    """Return True if most stacks of an expert have the hidden width as their rows: then they are stored as (in, out).

    An expert with a gate has two stacks that read the hidden width, 64, and one that reads the inner width, 24. Without
    a gate, it has one of each, and the first one reads the hidden width.

    >>> shapes = {
    ...     "experts.gate": (8, 64, 24),
    ...     "experts.up": (8, 64, 24),
    ...     "experts.down": (8, 24, 64),
    ... }
    >>> _read_by_rows(ParamInfo("experts.gate", (8, 64, 24)), 64, shapes)
    True

    The result is False if a stack has other widths, or if all have the hidden width on the same side.
    """
    has_hidden_rows: list[bool] = []  # for each stack, in the order of the model
    for shape in _stacks_of_module(info, shapes).values():
        rows, columns = shape[-2:]
        if rows == columns or hidden_width not in (rows, columns):
            return False
        has_hidden_rows.append(rows == hidden_width)
    number_with_rows = has_hidden_rows.count(True)
    number_with_columns = has_hidden_rows.count(False)
    is_same_side = number_with_rows == 0 or number_with_columns == 0
    if is_same_side:
        return False
    if number_with_rows == number_with_columns:  # one of each: the first reads the hidden width
        return has_hidden_rows[0]
    return number_with_rows > number_with_columns


def _stacks_of_module(info: ParamInfo, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all stacks of as many matrices in the module around a stack's layer, in the model's order.

    For ``mlp.experts.fc1``, these are the stacks ``mlp.experts.fc1`` and ``mlp.experts.fc2``.
    """
    holder = _path_around_layer(info.name)  # "mlp.experts"
    stacks: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        # All dims but the last two count the matrices: (8,) for a stack of 8.
        if shape[:-2] == info.shape[:-2] and _path_around_layer(name) == holder:
            stacks[name] = shape
    return stacks


def split_of_stack(info: ParamInfo, stored: str, shapes: Shapes) -> str | None:
    """Return the pattern that splits each matrix of a stack of experts, if a later stack reads a part of its outputs.

    The stack "w13" holds a gate and a value of 24 features each, one below the other, since "w2" reads 24 features:

    >>> shapes = {"experts.w13": (8, 48, 32), "experts.w2": (8, 32, 24)}
    >>> split_of_stack(ParamInfo("experts.w13", (8, 48, 32)), STACK, shapes)
    '... (part=2 out) in -> ... part out in'

    ``stored`` is the order of the dims: `STACK` for (out, in), which is also assumed if the order is not known, or
    `TRANSPOSED_STACK` for (in, out). ``shapes`` has the shapes of all parameters.
    """
    if stored not in (STACK, TRANSPOSED_STACK):
        return None
    stacks = _stacks_of_module(info, shapes)
    names = list(stacks)
    # Only parameters after this one can read its outputs.
    later_names = names[names.index(info.name) + 1 :]
    later_shapes = [stacks[name] for name in later_names]
    # The order (out, in) may be assumed and wrong, so that (in, out) is tried after it.
    orders = (STACK, TRANSPOSED_STACK) if stored == STACK else (TRANSPOSED_STACK,)
    for order in orders:
        number_of_parts = _number_of_parts(info.shape, later_shapes, order)
        if number_of_parts is not None:
            return in_equal_parts(order, number_of_parts)
    return None


def _number_of_parts(
    shape: tuple[int, ...], later_shapes: Sequence[tuple[int, ...]], order: str
) -> int | None:
    """Return the number of parts, 2 or 3, in which a later stack reads the outputs of a stack; None if it reads none.

    For 8 experts of a gated linear unit, from 32 to 2 x 24 features and back, it is 2. If the later stack reads all 48
    features, it is None:

    >>> (
    ...     _number_of_parts((8, 48, 32), [(8, 32, 24)], STACK),
    ...     _number_of_parts((8, 48, 32), [(8, 32, 48)], STACK),
    ... )
    (2, None)

    Args:
        shape: the shape of the stack.
        later_shapes: the shapes of the later stacks.
        order: the order of their dims, `STACK` or `TRANSPOSED_STACK`.
    """
    stack = _widths_of_matrices(shape, order)
    later_stacks = [_widths_of_matrices(later_shape, order) for later_shape in later_shapes]
    for later in later_stacks:
        if later.reads == stack.returns:  # all outputs are read together
            return None
    for count in COUNTS_OF_PARTS:  # 2 and 3
        for later in later_stacks:
            # The second layer of an MLP reads a part, and returns as many features as the first layer reads.
            reads_part = later.reads * count == stack.returns
            if reads_part and later.returns == stack.reads:
                return count
    return None


class _Widths(NamedTuple):
    """The numbers of features that a matrix reads and returns: a matrix of shape (48, 32) reads 32 and returns 48."""

    reads: int
    returns: int


def _widths_of_matrices(shape: tuple[int, ...], order: str) -> _Widths:
    """Return the widths of the matrices in a stack of this shape; ``order`` is `STACK` or `TRANSPOSED_STACK`.

    >>> _widths_of_matrices((8, 48, 32), STACK)
    _Widths(reads=32, returns=48)
    """
    *_, rows, columns = shape
    if order == TRANSPOSED_STACK:
        return _Widths(reads=rows, returns=columns)
    return _Widths(reads=columns, returns=rows)


def _path_around_layer(name: str) -> str:
    """Return the path of the module with a layer: "mlp" for "mlp.fc1.weight", and for "mlp.fc1", a parameter of it."""
    path, _, leaf = name.rpartition(".")
    if leaf in PLAIN_LEAVES:
        return path.rpartition(".")[0]
    return path
