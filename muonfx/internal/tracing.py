"""Detect ``torch.func`` transforms and tracers (``torch.compile``, ``make_fx``), and handle symbolic numbers.

torch has no public API for these queries; they are made only here. With dynamic shapes a compiler replaces sizes by
symbols, and with `dynamic=True` other numbers too. Symbols can be used in arithmetic and compared, which adds guards to
the graph. They cannot be hashed, formatted or stored as constants.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., object])
Number = TypeVar("Number", int, float)
T = TypeVar("T")

_C = cast("Any", torch._C)

_SYMBOLS = frozenset({torch.SymInt, torch.SymFloat})


def uncompiled(function: F) -> F:
    """Decorate a function that torch must not compile: in a compiled function, it runs between two graphs.

    ``torch.compiler.disable`` does the same, but imports the compiler when it decorates, which takes seconds. This
    imports it in the first call of the function.
    """
    return cast("Any", torch)._compile._disable_dynamo(function)


functorch_is_active: Callable[[], bool] = _C._are_functorch_transforms_active
"""Return True inside ``vmap``, ``grad``, ``jvp`` or another transform of ``torch.func``."""


def on_device_of(function: Callable[[Tensor], T], x: Tensor) -> T:
    """Return ``function(x)``, in which new tensors are on the device of ``x`` even if a default device is set."""
    # A default device is a mode on this stack.
    if torch.compiler.is_compiling() or not _C._len_torch_function_stack():
        return function(x)
    with x.device:
        return function(x)


autocast_is_on: Callable[[], bool] = _C._is_any_autocast_enabled
"""Return True inside ``torch.autocast`` for any type of device."""

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu")


def outside_autocast(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function with autocast off, because autocast changes the dtype of matrix products and sums."""
    if not autocast_is_on():  # the usual case
        return function(*args, **kwargs)
    # Turn it off for the first type of device for which it is on.
    for device_type in _AUTOCAST_DEVICES:
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                # Autocast may also be on for another type of device, so this function tests it again.
                return outside_autocast(function, *args, **kwargs)
    return function(*args, **kwargs)


def is_wrapped(x: Tensor) -> bool:
    """Return True if ``torch.func`` batches or differentiates a tensor, which then wraps another tensor."""
    return bool(_C._functorch.is_functorch_wrapped_tensor(x))


def without_transforms() -> AbstractContextManager[object]:
    """Return a context for ``with`` without ``torch.func`` transforms, so that tensors created in it are plain."""
    if not functorch_is_active():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


@contextmanager
def untraced() -> Generator[None]:
    """Suspend ``torch.func``, fake tensors and tracers in a ``with`` block, so that tensors in it have values."""
    from torch.utils._python_dispatch import _disable_current_modes

    with without_transforms(), _disable_current_modes(), torch.no_grad():
        yield


def is_traced(*numbers: float) -> bool:
    """Return True if ``torch.compile`` or ``make_fx`` records operators, or if any of the numbers is symbolic."""
    if torch.compiler.is_compiling() or not _SYMBOLS.isdisjoint(map(type, numbers)):
        return True
    # Importing the module would import sympy. If it is not loaded, no operators are recorded.
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def fixed(number: Number) -> Number:
    """Return a symbolic number as a Python number, others unchanged. A traced graph is valid for this value only.

    If a tensor has 4 rows while a compiler traces, ``fixed(x.shape[0])`` is 4. With dynamic shapes, a compiler replaces
    ``x.shape[0]`` by a symbol, which has a value but represents any size.
    """
    if not is_traced(number):
        return number
    # Slow to import, and loaded if a tracer runs.
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(number)  # pyright: ignore[reportReturnType]


def called_once(function: F) -> F:
    """Decorate a function so that ``torch.compile`` calls it once and treats its result as a constant."""
    # Setting the mark directly avoids the import of the whole compiler, which takes seconds.
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010  # not an attribute that functions have
    return function


@called_once
def matches(name: str, pattern: str) -> bool:
    """Return True if a glob matches a whole name, as `fnmatch.fnmatchcase`, which ``torch.compile`` cannot trace."""
    return fnmatchcase(name, pattern)


def is_watched(*xs: Tensor) -> bool:
    """Return True if autograd, ``torch.func`` or the compiler records these tensors; none may be overwritten then."""
    if torch.compiler.is_compiling() or functorch_is_active():
        return True
    # Within forward_ad.dual_level(), a tensor may carry a tangent.
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


def as_start(x: Tensor) -> Tensor:
    """Return a parameter as the start of a state: detached if it is a leaf of autograd, else with its graph.

    An average of parameters, for example, starts at the parameters. A model's own parameter is a leaf, and every step
    would keep the graphs of all earlier steps. Under ``torch.func``, and for a tensor that was computed from others,
    derivatives pass through the state.
    """
    takes_derivatives = functorch_is_active() or forward_ad._current_level >= 0
    if takes_derivatives or x.grad_fn is not None:
        return x
    return x.detach()


def is_differentiated(*xs: Tensor) -> bool:
    """Return True if autograd or ``torch.func`` takes derivatives of these tensors; `vmap` alone does not count."""
    if _in_derivative():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


@called_once  # a compiler enters the same levels while it traces, and guards them
def _in_derivative() -> bool:
    """Return True inside ``dual_level``, or inside ``grad`` or ``jvp`` of ``torch.func``."""
    if forward_ad._current_level >= 0:
        return True
    if not functorch_is_active():
        return False
    return any(
        level.key() in (TransformType.Grad, TransformType.Jvp)
        for level in get_interpreter_stack() or ()
    )
