"""Read options of `muonfx.Muon` whose values are transforms from a JSON or YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

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
    >>> made = with_parts({"lr_scaling": "original", "orthogonalize": {"dtype": "float32", "view": view}})
    >>> made["lr_scaling"], made["orthogonalize"]
    ('original', orthogonalize(dtype=torch.float32, view=MatrixView({'*.qkv': '(q=4 + kv=2) in -> q in, kv in'})))
    """
    return {name: _part(name, value) for name, value in options.items()}


def _part(name: str, value: object) -> Any:
    if name == "view" and isinstance(value, str | Mapping):
        return MatrixView(cast("str | Mapping[str, str]", value))
    if name != "orthogonalize" or not isinstance(value, Mapping):
        return value
    arguments = {key: _part(key, _from_json(key, item)) for key, item in cast("Mapping[str, Any]", value).items()}
    return orthogonalize(**arguments)


def _from_json(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json("", item) for item in value)
    if isinstance(value, Mapping):
        return {key: _from_json("", item) for key, item in value.items()}
    if name == "dtype" and isinstance(getattr(torch, str(value), None), torch.dtype):
        return getattr(torch, value)
    return value
