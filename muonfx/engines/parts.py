"""Read the transforms among the options of an optimizer from a JSON or YAML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from muonfx.select import MatrixView
from muonfx.transforms import orthogonalize
from muonfx.tree.arguments import plain_arguments

__all__ = ["with_parts"]

_CONSTRUCTORS: dict[str, Callable[..., Any]] = {"orthogonalize": orthogonalize, "view": plain_arguments(MatrixView)}
"""The constructor of the value of each option that a file gives as a mapping."""


def with_parts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options that were read from a file.

    A file has no transforms, so it gives a mapping of arguments instead: ``orthogonalize`` is a mapping of arguments of
    `muonfx.orthogonalize`, and ``view`` in it a mapping of arguments of `muonfx.MatrixView`. In such a mapping a list
    becomes a tuple and the name of a dtype becomes the dtype. All other options are returned unchanged.

    Raises:
        TypeError: a mapping has an unknown argument; the message suggests a known one.

    >>> view = {"blocks": {"*.qkv": [4, 2]}}
    >>> made = with_parts({"lr_scaling": "original", "orthogonalize": {"dtype": "float32", "view": view}})
    >>> made["lr_scaling"], made["orthogonalize"]
    ('original', orthogonalize(dtype=torch.float32, view=MatrixView(blocks={'*.qkv': (4, 2)})))
    """
    return {name: _part(name, value) for name, value in options.items()}


def _part(name: str, value: object) -> Any:
    make = _CONSTRUCTORS.get(name)
    if make is None or not isinstance(value, Mapping):
        return value
    arguments = {key: _part(key, _from_json(key, item)) for key, item in cast("Mapping[str, Any]", value).items()}
    return make(**arguments)


def _from_json(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_from_json("", item) for item in value)
    if isinstance(value, Mapping):
        return {key: _from_json("", item) for key, item in value.items()}
    if name == "dtype" and isinstance(getattr(torch, str(value), None), torch.dtype):
        return getattr(torch, value)
    return value
