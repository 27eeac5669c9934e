"""Detect ``torch.func`` transforms and tracers, under which plain kernels cannot be used.

torch has no public API for these queries. Outside `muonfx.polar` they are made only here.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor

from muonfx.tree.symbols import called_once

__all__ = ["functorch_is_active", "is_traced", "is_wrapped", "matches", "without_transforms"]

_C = cast("Any", torch._C)


def functorch_is_active() -> bool:
    """Return True inside ``vmap``, ``grad``, ``jvp`` or another transform of ``torch.func``."""
    return bool(_C._are_functorch_transforms_active())


def is_wrapped(x: Tensor) -> bool:
    """Return True if a tensor is wrapped by ``torch.func``: batched, or tracked by a derivative."""
    return bool(_C._functorch.is_functorch_wrapped_tensor(x))


@contextmanager
def without_transforms() -> Generator[None]:
    """Suspend all ``torch.func`` transforms for a block, so that tensors created in it are plain."""
    if not functorch_is_active():
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def is_traced() -> bool:
    """Return True if ``torch.compile`` or ``make_fx`` records operators, so that values cannot be read."""
    if torch.compiler.is_compiling():
        return True
    # Importing the module would import sympy. If it is not loaded, no operators are recorded.
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


@called_once
def matches(name: str, pattern: str) -> bool:
    """Match a whole name with a glob, as `fnmatch.fnmatchcase`, which torch.compile cannot trace."""
    return fnmatchcase(name, pattern)
