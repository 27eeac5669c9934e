"""Who is watching: whether tensors at hand belong to a ``torch.func`` transform, so that plain kernels cannot be used.

torch has no public name for these questions; they are asked here and nowhere else outside `muonfx.polar`.
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
    """True if the caller runs inside ``vmap``, ``grad``, ``jvp`` or another transform of ``torch.func``.

    >>> functorch_is_active(), torch.func.vmap(lambda x: x + functorch_is_active())(torch.zeros(1))
    (False, tensor([1.]))
    """
    return bool(_C._are_functorch_transforms_active())


def is_wrapped(x: Tensor) -> bool:
    """True if a tensor is one of ``torch.func``'s: batched, or tracked by a derivative.

    >>> is_wrapped(torch.zeros(1)), torch.func.vmap(lambda x: x + is_wrapped(x))(torch.zeros(1))
    (False, tensor([1.]))
    """
    return bool(_C._functorch.is_functorch_wrapped_tensor(x))


@contextmanager
def without_transforms() -> Generator[None]:
    """Leave all transforms of ``torch.func`` for the length of a block, so that tensors made in it are plain.

    >>> def loss(x):
    ...     with without_transforms():
    ...         return x * is_wrapped(torch.ones(()))
    >>> torch.func.grad(loss)(torch.tensor(3.0))
    tensor(0.)
    """
    if not functorch_is_active():
        yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


def is_traced() -> bool:
    """Tell whether ``torch.compile`` or ``make_fx`` is recording operators, so that no value can be read.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> is_traced(), make_fx(lambda x: x.neg() if is_traced() else x)(torch.zeros(1)).code.count("aten.neg")
    (False, 1)
    """
    if torch.compiler.is_compiling():
        return True
    # Importing it would bring sympy along; while nobody has, nobody records operators.
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


@called_once
def matches(name: str, pattern: str) -> bool:
    """Match a whole name with a glob, as `fnmatch.fnmatchcase` does, which torch.compile cannot trace.

    >>> matches("blocks.0.qkv", "*.qkv")
    True
    """
    return fnmatchcase(name, pattern)
