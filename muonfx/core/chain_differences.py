"""The differences between the chain of transforms that saved a state and the chain that loads it."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from muonfx.core.argument_texts import code_of_value
from muonfx.core.transform import Transform
from muonfx.core.value import Definition, walk

CHAINS = "chain_code"
"""The key of a param group, in the state dict of an optimizer, with the code of the transforms of its parameters."""

Definitions = dict[str, Definition]
"""The definition of each transform and schedule of a chain, by the name in its code, such as "momentum"."""

ArgumentPath = tuple[str, ...]
"""The levels of an argument in the code of a chain: ("orthogonalize", "view", "['*.wqkv.weight']")."""

_NUMBER = re.compile(r"-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+|float\(.*\)|torch\.tensor\(.*\)", re.DOTALL)
"""The code of a float or a tensor."""

_OBJECT = re.compile(r"<[^<>]*(<[^<>]*>)?[^<>]*>")
"""The ``repr`` of an object without code, such as "<function <lambda> at 0x7f00>". It differs in every process."""

_LONGEST = 200
"""The largest number of characters of a value in a message."""


class _Value(NamedTuple):
    """The value of an argument."""

    text: str
    """Its code. A call has its function only, as in "momentum(...)"."""
    is_number: bool = False
    """True for a float or tensor that is itself an argument; the fingerprint ignores it."""


_NOT_SET = _Value("not set", is_number=True)
"""The value of an argument that the other chain alone has; it may be a number or not."""


def structure_differences(saved_chain: str, chain: str, tx: Transform | None) -> list[str]:
    """Return a text for each argument, except numbers, that differs between the code of two chains.

    ``tx`` is the second chain; None if only its code is known.

    >>> import muonfx as mfx
    >>> saved = "momentum(decay=0.9)"
    >>> structure_differences(saved, "momentum(decay=0.5, nesterov=False)", mfx.momentum(0.5, nesterov=False))
    ['nesterov: True in the checkpoint, False here']
    """
    different_values = _different_values(saved_chain, chain, tx)
    if different_values is None:
        return [_first_difference(saved_chain, chain)]
    differences: list[str] = []
    for path, (saved_value, value) in different_values.items():
        if not _are_numbers(saved_value, value):
            differences.append(_text(path, saved_value, value))
    if not differences:  # for example, the transforms are in another order
        differences.append(_first_difference(saved_chain, chain))
    return differences


def number_differences(saved_chain: str, chain: str, tx: Transform | None) -> list[str]:
    """Return a text for each number that differs between the code of two chains, as `structure_differences` does.

    >>> import muonfx as mfx
    >>> number_differences("momentum(decay=0.9)", "momentum()", mfx.momentum())
    ['decay: 0.9 in the checkpoint, 0.95 here']
    """
    different_values = _different_values(saved_chain, chain, tx)
    if different_values is None:
        return ["see the chain in muonfx.checkpoint.inspect(path)"]
    differences: list[str] = []
    for path, (saved_value, value) in different_values.items():
        if _are_numbers(saved_value, value):
            differences.append(_text(path, saved_value, value))
    return differences


def _are_numbers(saved_value: _Value, value: _Value) -> bool:
    return saved_value.is_number and value.is_number


def _text(path: ArgumentPath, saved_value: _Value, value: _Value) -> str:
    """Return the text of a difference: "decay: 0.9 in the checkpoint, 0.95 here"."""
    shown_path = "".join(path).removeprefix(".") or "the chain"
    return f"{shown_path}: {saved_value.text:.{_LONGEST}} in the checkpoint, {value.text:.{_LONGEST}} here"


def _different_values(
    saved_chain: str, chain: str, tx: Transform | None
) -> dict[ArgumentPath, tuple[_Value, _Value]] | None:
    """Return the value in the checkpoint and the value here of each argument for which they differ.

    Of arguments in one another, only the outermost is returned. Return None if the code of a chain cannot be parsed.
    """
    definitions: Definitions = {}
    if tx is not None:
        definitions = {part.factory.__name__: part.factory.definition for _, part in walk(tx)}
    try:
        saved_values = _values_in(saved_chain, definitions)
        values = _values_in(chain, definitions)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    different: dict[ArgumentPath, tuple[_Value, _Value]] = {}
    for path in dict.fromkeys([*saved_values, *values]):
        saved_value = saved_values.get(path, _NOT_SET)
        value = values.get(path, _NOT_SET)
        outer = path[:-1]
        has_same_outer = not path or saved_values.get(outer) == values.get(outer)
        if saved_value != value and has_same_outer:
            different[path] = (saved_value, value)
    return different


def _values_in(chain: str, definitions: Definitions) -> dict[ArgumentPath, _Value]:
    """Return the arguments in the code of a chain by path, with the defaults of arguments that the code leaves out."""
    values: dict[ArgumentPath, _Value] = {}
    code = _OBJECT.sub("_", chain)  # a name, so that "module.f.<locals>.<lambda>" becomes "module.f._._"
    _add_value((), ast.parse(code, mode="eval").body, definitions, values)
    return values


def _add_value(
    path: ArgumentPath, node: ast.expr, definitions: Definitions, values: dict[ArgumentPath, _Value]
) -> None:
    """Add the value of the argument at ``path``, and of all arguments and items in it, to ``values``."""
    code = ast.unparse(node)
    if _NUMBER.fullmatch(code):
        values[path] = _Value(code, is_number=True)
    elif isinstance(node, ast.Dict):
        values[path] = _Value("{...}")
        for key, item in zip(node.keys, node.values, strict=True):
            item_path = (*path, f"[{ast.unparse(key) if key else '**'}]")
            if isinstance(item, ast.Call | ast.Dict):
                _add_value(item_path, item, definitions, values)
            else:
                values[item_path] = _Value(ast.unparse(item))  # also of a number, which the fingerprint includes
    elif isinstance(node, ast.Call):
        values[path] = _Value(f"{ast.unparse(node.func)}(...)")
        _add_arguments(path, node, definitions, values)
    else:
        values[path] = _Value(code)


def _add_arguments(
    path: ArgumentPath, call: ast.Call, definitions: Definitions, values: dict[ArgumentPath, _Value]
) -> None:
    """Add the values of the arguments of the call at ``path`` to ``values``."""
    function_name = ast.unparse(call.func).rpartition(".")[2]  # "soap" of "contrib.soap"
    definition = definitions.get(function_name)
    parameters: Mapping[str, inspect.Parameter] = {}  # not known for a function in an argument, such as MatrixView
    if definition is not None:
        parameters = definition.parameters
    names = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    for index, node in enumerate(call.args):
        if index < len(names):
            argument_path = (*path, f".{names[index]}")
        elif isinstance(node, ast.Dict) or (isinstance(node, ast.Constant) and len(call.args) == 1):
            # The only value of the call, as in MatrixView({...}), MatrixView("in out -> out in") and Labels({...}).
            argument_path = (*path, "")
        else:
            argument_path = _path_of_member(path, node, values)
        _add_value(argument_path, node, definitions, values)
    for keyword in call.keywords:
        _add_value((*path, f".{keyword.arg}"), keyword.value, definitions, values)
    for name, parameter in parameters.items():
        argument_path = (*path, f".{name}")
        if definition is not None and parameter.default is not parameter.empty and argument_path not in values:
            default = code_of_value(definition.as_float(name, parameter.default))
            _add_value(argument_path, ast.parse(default, mode="eval").body, definitions, values)


def _path_of_member(path: ArgumentPath, node: ast.expr, values: dict[ArgumentPath, _Value]) -> ArgumentPath:
    """Return the path of a transform in the chain at ``path``: its function's name, with a number if it is repeated."""
    name = f".{ast.unparse(node.func)}" if isinstance(node, ast.Call) else "[item]"
    member_path = (*path, name)
    count = 1
    while member_path in values:
        count += 1
        member_path = (*path, f"{name}_{count}")
    return member_path


def _first_difference(saved_chain: str, chain: str) -> str:
    """Return a text with the part of each code around the first character that differs."""
    common_text = os.path.commonprefix([saved_chain, chain])  # noqa: RUF071 - of characters, not of paths
    start = max(0, len(common_text) - _LONGEST // 2)
    end = start + _LONGEST
    return f"...{saved_chain[start:end]}... in the checkpoint, ...{chain[start:end]}... here"
