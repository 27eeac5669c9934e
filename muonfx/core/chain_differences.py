"""The differences between the chain of transforms that saved a state and the chain that loads it."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from muonfx.core.transform import unused_name

CHAINS = "chain_code"
"""The key of a param group, in the state dict of an optimizer, with the code of the transforms of its parameters."""

ArgumentPath = tuple[str, ...]
"""The levels of an argument in the code of a chain: (".orthogonalize", ".view", "['*.wqkv.weight']")."""

_NUMBER = re.compile(
    r"-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+|float\(.*\)|torch\.tensor\(.*\)", re.DOTALL
)
"""The code of a float or a tensor."""

_TENSOR_OF_ONE_NUMBER = re.compile(r"torch\.tensor\(\[?([^\[\],]+)\]?, dtype=torch\.(\w+)\)")
"""The code of a tensor of one element, with groups for its number and its dtype."""

_OBJECT = re.compile(r"<[^<>]*(<[^<>]*>)?[^<>]*>")
"""The ``repr`` of an object without code, such as "<function <lambda> at 0x7f00>". It differs in every process."""

_LONGEST = 200
"""The largest number of characters of a value in a message."""


class _Value(NamedTuple):
    """The value of an argument, or a member of a chain."""

    head: str
    """Its code, which is compared. A call has its function only, "momentum(...)", since its arguments are compared."""
    code: str
    """Its whole code, for messages."""


_NOT_SET = _Value("not set", "not set")
"""The value of an argument, or a member of a chain, that only the other code has."""


class Differences(NamedTuple):
    """Texts about the arguments that differ between the code of two chains."""

    structure: list[str]
    """A text for each argument that is no number. `differences_of_chains` returns at least one."""
    numbers: list[str]
    """A text for each number, which the fingerprints of chains ignore."""


def differences_of_chains(saved_chain: str, chain: str) -> Differences:
    """Compare the chain that saved a state with the one that loads it: return texts about arguments that differ.

    Both are given as Python code, as ``repr`` returns it.

    >>> differences = differences_of_chains(
    ...     "momentum(decay=0.9)", "momentum(decay=0.5, nesterov=False)"
    ... )
    >>> differences.numbers
    ['decay: 0.9 in the checkpoint, 0.5 here']
    >>> differences.structure
    ['nesterov: not set in the checkpoint, False here']
    """
    try:
        saved_values = _values_in(saved_chain)
        values = _values_in(chain)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # code that Python cannot parse
        text = _first_difference(saved_chain, chain)
        return Differences([text], [text])  # it may be a number or not
    differences = _differences_of_values(saved_values, values)
    if not differences.structure:  # for example, the transforms are in another order
        differences.structure.append(_first_difference(saved_chain, chain))
    return differences


def _differences_of_values(
    saved_values: Mapping[ArgumentPath, _Value], values: Mapping[ArgumentPath, _Value]
) -> Differences:
    """Compare the values of all arguments, by their paths in the code of two chains: return texts about differences.

    The values 0.9 and 0.5 at (".momentum", ".decay") give "momentum.decay: 0.9 in the checkpoint, 0.5 here".
    """
    differences = Differences([], [])
    for path in dict.fromkeys([*saved_values, *values]):  # all arguments of either chain, each once
        saved_value = saved_values.get(path, _NOT_SET)
        value = values.get(path, _NOT_SET)
        # The head of ``momentum(decay=0.9)`` is "momentum(...)", since the decay has a path of its own.
        is_same = saved_value.head == value.head
        # The larger difference is shown.
        if is_same or _is_within_difference(path, saved_values, values):
            continue
        is_number = _is_number(path, saved_value) and _is_number(path, value)
        if is_number and _are_same_number(saved_value.code, value.code):
            continue  # as for a float and a tensor, or for tensors of two dtypes
        shown_path = "".join(path).removeprefix(".") or "the chain"
        text = f"{shown_path}: {saved_value.code:.{_LONGEST}} in the checkpoint, {value.code:.{_LONGEST}} here"
        if is_number:
            differences.numbers.append(text)
        else:
            differences.structure.append(text)
    return differences


def _is_within_difference(
    path: ArgumentPath,
    saved_values: Mapping[ArgumentPath, _Value],
    values: Mapping[ArgumentPath, _Value],
) -> bool:
    """Return True if the argument that contains the one at ``path`` differs already, as another function does."""
    if not path:
        return False
    outer = path[:-1]  # (".momentum",) for (".momentum", ".decay")
    return saved_values.get(outer, _NOT_SET).head != values.get(outer, _NOT_SET).head


def _is_number(path: ArgumentPath, value: _Value) -> bool:
    """Return True for the code of a float or tensor, except in a dict, whose numbers the fingerprint includes."""
    if path and path[-1].endswith("]"):  # an item of a dict
        return False
    return value == _NOT_SET or _NUMBER.fullmatch(value.code) is not None


def _are_same_number(saved_code: str, code: str) -> bool:
    """Return True for the code of two floats or tensors if one number is the other, rounded to its own dtype.

    >>> _are_same_number("0.1", "torch.tensor(0.10000000149011612, dtype=torch.float32)")
    True
    >>> _are_same_number("0.1", "torch.tensor(0.1, dtype=torch.float_of_another_torch)")
    False
    """
    saved_number = _number_in(saved_code)
    number = _number_in(code)
    if saved_number is None or number is None:
        return False
    if torch.equal(saved_number.to(number.dtype), number):
        return True
    return torch.equal(number.to(saved_number.dtype), saved_number)


def _number_in(code: str) -> Tensor | None:
    """Return the number in the code of a float or a tensor of one element: a float in float64. None for other code."""
    text = code
    dtype = torch.float64
    match = _TENSOR_OF_ONE_NUMBER.fullmatch(code)
    if match is not None:
        text = match[1]
        dtype = getattr(torch, match[2], None)
    try:
        number = float(text)
    except ValueError:  # "float('inf')", "not set", or a tensor of several elements
        return None
    is_known = isinstance(dtype, torch.dtype)  # another release of torch may have saved it
    if not is_known or not dtype.is_floating_point:
        return None
    return torch.tensor(number, dtype=dtype, device="cpu")


def _values_in(chain: str) -> dict[ArgumentPath, _Value]:
    """Return the value of each argument in the code of a chain, by path: the names of the arguments that contain it.

    >>> list(_values_in("chain(momentum(decay=0.9))"))
    [(), ('.momentum',), ('.momentum', '.decay')]
    """
    # A name, so that "module.f.<locals>.<lambda>" becomes "module.f._._".
    code = _OBJECT.sub("_", chain)
    return _values_at((), ast.parse(code, mode="eval").body)


def _values_at(path: ArgumentPath, node: ast.expr) -> dict[ArgumentPath, _Value]:
    """Return the value of the argument at ``path``, and of all arguments and items in it.

    ``node`` is the parsed code of the argument. It is compared as code, since the checkpoint has no objects.

    >>> node = ast.parse("momentum(decay=0.9)", mode="eval").body
    >>> for path, value in _values_at((".momentum",), node).items():
    ...     print(path, value.head)
    ('.momentum',) momentum(...)
    ('.momentum', '.decay') 0.9
    """
    code = ast.unparse(node)
    head = code
    items: list[tuple[str, ast.expr]] = []  # pairs such as (".decay", the parsed code 0.9)
    if isinstance(node, ast.Dict):
        head = "{...}"
        for key, item in zip(node.keys, node.values, strict=True):
            items.append((_level_of_key(key, item), item))
    elif _is_call(node):
        head = f"{ast.unparse(node.func)}(...)"
        items = list(_positional_arguments(node).items())
        items += [(f".{keyword.arg}", keyword.value) for keyword in node.keywords]
    values = {path: _Value(head, code)}
    for level, item in items:
        values |= _values_at((*path, level), item)
    return values


def _is_call(node: ast.expr) -> TypeGuard[ast.Call]:
    """Return True for a call, as of a transform; not for ``float("inf")``, which is a number."""
    return isinstance(node, ast.Call) and not _NUMBER.fullmatch(ast.unparse(node))


def _level_of_key(key: ast.expr | None, item: ast.expr) -> str:
    """Return the last level of the path of an item of a dict, which is shown in messages.

    It is ".muon" for a transform, as in the name "muon.momentum.decay" of its number. Else it is the key in brackets.
    ``key`` is the code of the key, or None for ``**`` in a dict.

    >>> def level(code):
    ...     parsed = ast.parse(code, mode="eval").body
    ...     return _level_of_key(parsed.keys[0], parsed.values[0])
    >>> level("{'muon': momentum(0.9)}"), level("{'*.fc.weight': 0.5}")
    ('.muon', "['*.fc.weight']")
    """
    if _is_call(item) and isinstance(key, ast.Constant):  # a transform under a string
        label = str(key.value)
        if label.isidentifier():
            return f".{label}"
    key_code = ast.unparse(key) if key else "**"
    return f"[{key_code}]"


def _positional_arguments(call: ast.Call) -> dict[str, ast.expr]:
    """Return the positional arguments of a call, by the names that messages give to them.

    In "momentum.decay: 0.9 in the checkpoint, 0.5 here", the first argument of a chain has the name ".momentum".

    >>> def levels(code):
    ...     return list(_positional_arguments(ast.parse(code, mode="eval").body))
    >>> levels(
    ...     "chain(scale(0.5), scale(2.0))"
    ... )  # a transform: the name that it has in the state of the chain
    ['.scale', '.scale_2']
    >>> levels(
    ...     "partition({'a': scale(0.5)}, {'w': 'a'})"
    ... )  # the dict of transforms adds no name: "muon.momentum"
    ['', '.labels']
    >>> (
    ...     levels("MatrixView('in out -> out in')"),
    ...     levels("f(1, 2)"),
    ... )  # an index only if there are several
    ([''], ['[0]', '[1]'])
    """
    is_partition = ast.unparse(call.func) == "partition"
    arguments: dict[str, ast.expr] = {}
    for index, argument in enumerate(call.args):
        if isinstance(argument, ast.Call):  # a transform; a second `scale` is "scale_2"
            level = unused_name(f".{ast.unparse(argument.func)}", arguments)
        elif is_partition and isinstance(argument, ast.Dict):
            # The first has the transforms, the second the labels.
            level = ".labels" if index else ""
        elif len(call.args) == 1:
            level = ""
        else:
            level = f"[{index}]"
        arguments[level] = argument
    return arguments


def _first_difference(saved_chain: str, chain: str) -> str:
    """Return a text with the part of each code around the first character that differs, up to 200 characters of it.

    It is used if no single argument can be reported, for example if the code has another order or cannot be parsed.
    """
    common_text = os.path.commonprefix([saved_chain, chain])  # noqa: RUF071 - of characters, not of paths
    # Half of the part is before the difference.
    start = max(0, len(common_text) - _LONGEST // 2)
    end = start + _LONGEST
    return f"...{saved_chain[start:end]}... in the checkpoint, ...{chain[start:end]}... here"
