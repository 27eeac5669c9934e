"""Files of strangers, read without running anything that is in them: those of ``torch.save``, safetensors, JSON."""

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
    """Read the tensors of a safetensors file.

    Raises:
        OSError: there is no such file, or it is no ordinary one.
        SafetensorError: it is broken.
    """
    open_regular(path).close()  # the library would wait for a pipe
    return load_file(path)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: there is no such file, or it is no ordinary one, or far too large.
        ValueError: it is no JSON; the message names the file.
    """
    try:
        return json.loads(read_regular(path, _LONGEST_JSON))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is no JSON: {problem}") from None


def read_plain(path: Path) -> Any:
    """Read tensors and plain values; nothing else is unpickled.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it holds something else, or is broken; the message names the file.
    """
    open_regular(path).close()  # torch would wait for a pipe
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about files that it goes on to refuse
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # on broken files torch's reader fails in many ways: KeyError, struct.error, ...
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ValueError(f"{path}: expected tensors and plain values, found something else: {reason}") from None
