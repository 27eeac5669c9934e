"""Read untrusted files without executing their content: files of ``torch.save``, safetensors, JSON."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from muonfx.checkpoint.files import open_regular, read_regular

__all__ = ["read_json", "read_plain", "read_safetensors"]

_LONGEST_JSON = 1 << 28


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, which must be a regular file."""
    open_regular(path).close()  # refuses a pipe, on which the library would block
    return load_file(path)


def read_json(path: Path) -> Any:
    """Read a JSON file of limited size; errors name the file."""
    try:
        return json.loads(read_regular(path, _LONGEST_JSON))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is no JSON: {problem}") from None


def read_plain(path: Path) -> Any:
    """Read a file of ``torch.save`` that holds tensors and plain values only; errors name the file."""
    open_regular(path).close()  # refuses a pipe, on which torch would block
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about some files before it refuses them
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # on damaged files torch raises KeyError, struct.error and many others
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ValueError(f"{path}: expected tensors and plain values, found something else: {reason}") from None
