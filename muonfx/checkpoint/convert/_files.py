"""Files of ``torch.save``, read without running anything that is in them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

__all__ = ["read_plain"]


def read_plain(path: Path) -> Any:
    """Read tensors and plain values; nothing else is unpickled.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it holds something else, or is broken; the message names the file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about files that it goes on to refuse
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # on broken files torch's reader fails in many ways: KeyError, struct.error, ...
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ValueError(f"{path}: expected tensors and plain values, found something else: {reason}") from None
