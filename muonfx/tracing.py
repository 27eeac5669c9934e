"""Who is watching: whether tensors at hand belong to a ``torch.func`` transform, so that plain kernels cannot be used.

torch has no public name for these two questions; they are asked here and nowhere else outside `muonfx.polar`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["functorch_is_active", "is_wrapped"]

_C = cast("Any", torch._C)


def functorch_is_active() -> bool:
    """Whether the caller runs inside ``vmap``, ``grad``, ``jvp`` or another transform of ``torch.func``.

    >>> functorch_is_active(), torch.func.vmap(lambda x: x + functorch_is_active())(torch.zeros(1))
    (False, tensor([1.]))
    """
    return bool(_C._are_functorch_transforms_active())


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor is one of ``torch.func``'s: batched, or tracked by a derivative.

    >>> is_wrapped(torch.zeros(1)), torch.func.vmap(lambda x: x + is_wrapped(x))(torch.zeros(1))
    (False, tensor([1.]))
    """
    return bool(_C._functorch.is_functorch_wrapped_tensor(x))
