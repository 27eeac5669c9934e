"""Read options of `muonfx.Muon` whose values are transforms from a JSON or YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from muonfx.core import Transform
from muonfx.transforms import orthogonalize
from muonfx.transforms.matrices import MatrixView


def with_parts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of `muonfx.Muon` that were read from a JSON or YAML file: mappings become transforms.

    In the file, ``orthogonalize`` is a mapping of arguments of `muonfx.orthogonalize`. Its ``view`` (how a tensor
    divides into matrices) is a pattern, or a mapping from globs of names to patterns, as in `muonfx.MatrixView`.
    Lists in these mappings become tuples, and names of dtypes become dtypes. Other options are unchanged.

    Raises:
        TypeError: a mapping has an unknown argument; the message suggests a known one.

    >>> view = {"*.qkv": "(q=4 + kv=2) in -> q in, kv in"}
    >>> options = with_parts(
    ...     {"lr_scaling": "original", "orthogonalize": {"dtype": "float32", "view": view}}
    ... )
    >>> options["lr_scaling"], options["orthogonalize"]
    ('original', orthogonalize(dtype=torch.float32, view=MatrixView({'*.qkv': '(q=4 + kv=2) in -> q in, kv in'})))
    """
    arguments = options.get("orthogonalize")
    if not isinstance(arguments, Mapping):
        return dict(options)
    return {**options, "orthogonalize": _orthogonalize(cast("Mapping[str, Any]", arguments))}


def _orthogonalize(options: Mapping[str, Any]) -> Transform:
    """Return `muonfx.orthogonalize` with arguments from a JSON or YAML file.

    >>> _orthogonalize({"dtype": "float32"})
    orthogonalize(dtype=torch.float32)
    """
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        if name == "view" and isinstance(value, str | Mapping):
            arguments[name] = MatrixView(cast("str | Mapping[str, str]", value))
        elif name == "dtype":
            arguments[name] = _dtype_of_name(value)
        else:
            arguments[name] = _with_tuples(value)
    return orthogonalize(**arguments)


def _dtype_of_name(value: Any) -> Any:
    """Return the dtype of a name, since a JSON file has no dtypes. Return any other value with tuples for lists.

    >>> _dtype_of_name("float32"), _dtype_of_name([1, 2])
    (torch.float32, (1, 2))
    """
    dtype = getattr(torch, str(value), None)
    if isinstance(dtype, torch.dtype):
        return dtype
    return _with_tuples(value)


def _with_tuples(value: Any) -> Any:
    """Convert the lists in a value from a JSON file, which has no tuples, to tuples.

    >>> _with_tuples({"coefficients": [[1, 2], [3, 4]]})
    {'coefficients': ((1, 2), (3, 4))}
    """
    if isinstance(value, list):
        return tuple(map(_with_tuples, value))
    if isinstance(value, Mapping):
        return {key: _with_tuples(item) for key, item in value.items()}
    return value
