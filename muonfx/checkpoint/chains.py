"""The differences between the chain of transforms in a checkpoint and the chain that loads it."""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Mapping

from muonfx.core import Transform
from muonfx.core.argument_texts import code_of_value
from muonfx.core.value import Definition, walk

Definitions = dict[str, Definition]
"""The definition of each transform and schedule of a chain, by the name in its code, such as "momentum"."""

ArgumentPath = tuple[str, ...]
"""The levels of an argument in the code of a chain: ("orthogonalize", "view", "['*.wqkv.weight']")."""

_NUMBER = re.compile(r"-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+|float\(.*\)|torch\.tensor\(.*\)", re.DOTALL)
"""The code of a float or a tensor."""

_LONGEST = 200
"""The largest number of characters of a value in an error."""


def chain_differences(saved_chain: str, chain: str, tx: Transform | None) -> list[str]:
    """Return a text for each argument that differs between the code of two chains; ``tx`` is the second one.

    The numbers of transforms and schedules are not compared, since the fingerprint ignores them.

    >>> import muonfx as mfx
    >>> chain_differences("momentum(decay=0.9)", "momentum(nesterov=False)", mfx.momentum(nesterov=False))
    ['nesterov: True in the checkpoint, False here']
    """
    definitions: Definitions = {}
    if tx is not None:
        definitions = {part.factory.__name__: part.factory.definition for _, part in walk(tx)}
    try:
        saved_values = _values_in(saved_chain, definitions)
        values = _values_in(chain, definitions)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # not all code parses: "<function f at 0x7f00>"
        return [_first_difference(saved_chain, chain)]
    differences: list[str] = []
    for path in dict.fromkeys([*saved_values, *values]):
        saved_value = saved_values.get(path, "not set")
        value = values.get(path, "not set")
        outer = path[:-1]
        has_same_outer = not path or saved_values.get(outer) == values.get(outer)  # else `outer` is in the list itself
        if saved_value != value and has_same_outer:
            shown_path = "".join(path).removeprefix(".") or "the chain"
            differences.append(f"{shown_path}: {saved_value:.{_LONGEST}} in the checkpoint, {value:.{_LONGEST}} here")
    return differences or [_first_difference(saved_chain, chain)]  # such as another order of transforms


def _values_in(chain: str, definitions: Definitions) -> dict[ArgumentPath, str]:
    """Return the arguments in the code of a chain by path, with the defaults of arguments that the code leaves out.

    The value of a call is its function, as in "momentum(...)", and the value of each number is "a number".
    """
    values: dict[ArgumentPath, str] = {}
    _add_value((), ast.parse(chain, mode="eval").body, definitions, values)
    return values


def _add_value(path: ArgumentPath, node: ast.expr, definitions: Definitions, values: dict[ArgumentPath, str]) -> None:
    """Add the value of the argument at ``path``, and of all arguments and items in it, to ``values``."""
    code = ast.unparse(node)
    if _NUMBER.fullmatch(code):
        values[path] = "a number"
    elif isinstance(node, ast.Dict):
        values[path] = "{...}"
        for key, item in zip(node.keys, node.values, strict=True):
            item_path = (*path, f"[{ast.unparse(key) if key else '**'}]")
            if isinstance(item, ast.Call | ast.Dict):
                _add_value(item_path, item, definitions, values)
            else:
                values[item_path] = ast.unparse(item)  # also of a number, which the fingerprint includes
    elif isinstance(node, ast.Call):
        values[path] = f"{ast.unparse(node.func)}(...)"
        _add_arguments(path, node, definitions, values)
    else:
        values[path] = code


def _add_arguments(
    path: ArgumentPath, call: ast.Call, definitions: Definitions, values: dict[ArgumentPath, str]
) -> None:
    """Add the values of the arguments of the call at ``path`` to ``values``."""
    definition = definitions.get(ast.unparse(call.func))
    parameters: Mapping[str, inspect.Parameter] = {}  # not known for a function in an argument, such as MatrixView
    if definition is not None:
        parameters = definition.parameters
    names = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    for index, node in enumerate(call.args):
        if index < len(names):
            argument_path = (*path, f".{names[index]}")
        elif isinstance(node, ast.Dict):  # as in MatrixView({...}) and Labels({...})
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


def _path_of_member(path: ArgumentPath, node: ast.expr, values: dict[ArgumentPath, str]) -> ArgumentPath:
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
