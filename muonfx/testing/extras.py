"""A wrapper that passes extra arguments, such as ``value=loss``, so that the laws can check a transform that reads one.

The laws call ``update(grads, state, params)``. Here the wrapper adds the extra arguments to every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Donation, Locality, Transform, transform
from muonfx.core.donation import NOTHING
from muonfx.tree import PyTree

Extra = float | Tensor | Callable[[Tensor], float | Tensor]
"""The value of an extra argument, or a function from the number of the step (a 0-d tensor) to it."""


class WithExtrasState(NamedTuple):
    """The state of `with_extras`."""

    step: Tensor
    """The number of updates so far, as a 0-d int64 tensor."""
    inner: PyTree
    """The state of the inner transform."""


def _is_extra(extra: object) -> bool:
    """Return True for a number, a 0-d tensor or a function, which `with_extras` accepts."""
    if isinstance(extra, Tensor):
        return extra.ndim == 0
    is_number = isinstance(extra, int | float) and not isinstance(extra, bool)
    return is_number or callable(extra)


# The wrapper has the locality of the inner transform, since it reads its count of steps only.
@transform(
    locality=lambda inner, extras: inner.locality,
    combinator=Combinator(Locality.ELEMENT),
    reads_params=lambda inner, extras: inner.reads_params,
)
def with_extras(inner: Transform, extras: dict[str, Any]):
    """Pass extra arguments to each update of a transform, as a training loop does with ``value=loss``.

    `check_transform` uses it for its argument ``extras``. With it, a single law checks a transform that reads an extra
    argument: ``laws.update_remembers_nothing(with_extras(tx, {"value": 0.5}), params, steps)``.

    Args:
        inner: the transform that reads the extra arguments.
        extras: a dict from the name of each extra argument to a number, a 0-d tensor, or a function of the number of
            the step. The inner transform receives a 0-d tensor, in float32 for a number. It depends on the state, so
            a compiler has no value of it. A function receives a 0-d int64 tensor: 0 in the first step.

    Raises:
        TypeError: an extra argument is none of these.

    >>> import muonfx as mfx
    >>> @mfx.leafwise
    ... def scale_by_value():
    ...     return mfx.core.EmptyState(), lambda u, s, *, value: (u * value, s)
    >>> tx = with_extras(scale_by_value(), {"value": lambda step: 1.0 + step})
    >>> state = tx.init({"w": torch.zeros(1)})
    >>> for _ in range(2):
    ...     updates, state = tx.update({"w": torch.ones(1)}, state)
    >>> updates
    {'w': tensor([2.])}
    """
    for name, extra in extras.items():
        if not _is_extra(extra):
            raise TypeError(
                f"extras: {name} must be a number, a 0-d tensor or a function of the step, found {extra!r}"
            )

    def init(params: PyTree) -> WithExtrasState:
        """Return the initial state of the inner transform, at step 0."""
        step = torch.zeros((), dtype=torch.int64, device=tree.device_of(params))
        return WithExtrasState(step, inner.functions.init(params))

    def update(
        updates: PyTree,
        state: WithExtrasState,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **other_extras: Any,
    ) -> tuple[PyTree, WithExtrasState]:
        """Run the inner transform with the extra arguments of this step, and count the step."""
        values = {name: _value_at(state.step, extra) for name, extra in extras.items()}
        updates, inner_state = inner.run(
            updates, state.inner, params, donate=donate, **{**other_extras, **values}
        )
        _require_unwritten(values)
        return updates, WithExtrasState(state.step + 1, inner_state)

    if not torch.compiler.is_compiling():  # the signature was read when the transform was created
        _give_defaults(update, extras)
    return init, update


def _value_at(step: Tensor, extra: Extra) -> Tensor:
    """Return the value of an extra argument at a step, as a 0-d tensor that is computed from the state."""
    # torch's compiler cannot decide whether a tensor is callable.
    value = extra if isinstance(extra, Tensor) or not callable(extra) else extra(step)
    # A constant would be known to a compiler and equal for all runs of a batch. A sum with 0 * step is not.
    zero = step.to(torch.float32) * 0.0
    return zero + value


class WrittenExtra(ValueError):
    """An update has written into its extra argument, which is a tensor of the caller."""


def _require_unwritten(values: Mapping[str, Tensor]) -> None:
    """Raise `WrittenExtra` if an update has written into an extra argument, which a caller may use again."""
    if torch.compiler.is_compiling():
        return
    for name, value in values.items():
        # Torch counts writes, but none in inference mode.
        was_written = not value.is_inference() and value._version > 0
        if was_written:
            raise WrittenExtra(
                f"the update has written into its extra argument {name!r}, which is a tensor of the caller: compute a "
                "new tensor"
            )


def _give_defaults(update: Callable[..., object], extras: Mapping[str, Extra]) -> None:
    """Add the extra arguments to the signature of an update, with defaults, so that no caller must pass them."""
    signature = inspect.signature(update)
    *parameters, other_extras = signature.parameters.values()
    for name in extras:
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    update.__signature__ = signature.replace(parameters=[*parameters, other_extras])
