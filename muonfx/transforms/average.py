"""Copies of the parameters in the state: a running average, and a master copy in higher precision."""

from __future__ import annotations

import functools
from operator import is_not
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Donation, Locality, Transform, apply_updates, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.core.transform import require_transform
from muonfx.internal.tracing import as_start
from muonfx.transforms.leafwise import (
    Leaf,
    Slot,
    StateDtype,
    WideStateDtype,
    copies,
    leafwise,
    params_for,
)
from muonfx.tree import Present, PyTree
from muonfx.tree import elementwise as ew


class EmaParamsState(NamedTuple):
    """State of the transform `ema_params`: the averaged parameters."""

    average: PyTree
    """The averaged parameters: a tree like the parameters in the storage dtype, or a `QuantizedState`."""


@leafwise(reads_params="updated", position="last_observer")
def ema_params(decay: ScalarOrSchedule = 0.999, *, dtype: StateDtype = "auto"):
    """Store a running average of the updated parameters in the state, and return the updates unchanged.

    Put it at the end of a chain, so that it receives the final updates. The average starts at the initial parameters.
    Read it as ``state.average``.

    Args:
        decay: weight of the old average, in [0, 1).
        dtype: storage dtype of the average: "auto" (float32, or float64 for float64 parameters), a floating or
            quantized dtype, or None for the dtype of each parameter.

    Raises:
        ValueError: ``decay`` is out of range, or ``dtype`` is a string other than "auto"; at `update`, ``params`` is
            missing.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.ema_params(0.9)
        >>> params = {"w": torch.zeros(1)}
        >>> tx.update({"w": torch.ones(1)}, tx.init(params), params)[1].average
        {'w': tensor([0.1000])}
    """
    decay = checks.in_unit_interval("decay", decay)

    def step(u: Leaf, s: EmaParamsState, p: Leaf):
        average = s.average.lerp(p, 1.0 - decay)
        return u, EmaParamsState(average)

    slot = Slot(dtype, start="params")
    return EmaParamsState(slot), step


def _corrected(copy: Tensor, param: Tensor, *, reuse: bool) -> Tensor:
    """Return the fp32 master copy of a bf16 parameter, after elements that were changed elsewhere are taken over.

    An element of the parameter should be the rounded element of the copy: 1.0 for 1.001. If it is not, another function
    has changed it, for example by loading weights, and the copy starts again from it. ``reuse`` overwrites the copy.
    """
    param = as_start(param)  # detached from autograd, unless derivatives pass through the state
    is_rounded_copy = copy.to(param.dtype) == param
    corrected = torch.where(is_rounded_copy, copy, param.to(copy.dtype))
    if reuse:
        return copy.copy_(corrected)
    return corrected


class MasterParamsState(NamedTuple):
    """State of the transform `master_params`: the copy of the parameters and the state of the inner transform."""

    master: PyTree
    """The copy of the parameters in higher precision; the model's parameters are its rounded values."""
    inner: PyTree
    """The state of the inner transform, created from the master copy."""


@transform(
    locality=lambda inner, dtype: inner.locality,
    combinator=Combinator(Locality.ELEMENT),
    position="last",
)
def master_params(inner: Transform, dtype: WideStateDtype = "auto"):
    """Run a chain on a copy of the parameters in higher precision, so that no small update is lost.

    The inner chain receives gradients and parameters in the dtype of the copy, and its updates are added to the copy.
    The returned updates are the difference between the rounded new copy and the parameters, so `apply_updates` gives
    exactly the rounded copy. Updates accumulate in the copy even if each is too small to change a bf16 parameter.

    Args:
        inner: the whole chain, including the learning rate.
        dtype: the dtype of the master copy. "auto" is float32, or float64 for float64 parameters; None is the dtype of
            each parameter.

    If an element of a parameter is not the rounded copy, it was changed elsewhere, for example by loading or clipping
    weights. The copy then starts again from this element, without the bits that rounding had lost.

    Returns:
        A transform whose updates have the dtype of the master copy, not of the gradients.

    Raises:
        ValueError: ``dtype`` is a string other than "auto"; at `update`, ``params`` is missing.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.master_params(mfx.scale(-1.0))
        >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(4):
        ...     updates, state = tx.update(
        ...         {"w": torch.full((1,), 1e-3, dtype=torch.bfloat16)}, state, params
        ...     )
        ...     params = mfx.apply_updates(params, updates)
        >>> params["w"], round(float(state.master["w"]), 4)
        (tensor([0.9961], dtype=torch.bfloat16), 0.996)
    """
    checks.state_dtype("dtype", dtype)
    require_transform("master_params: inner", inner)

    def init(params: PyTree) -> MasterParamsState:
        master = copies(params, dtype)
        return MasterParamsState(master, inner.functions.init(master))

    def update(
        updates: PyTree,
        state: MasterParamsState,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: object,
    ):
        """Update the master copy by the inner transform; return the steps of the parameters to its rounded values.

        The master copy is a copy of the parameters in higher precision: 1.001 for a bf16 parameter of 1.0. If the inner
        update is 0.004, the copy becomes 1.005. The returned step is 0.0078125, to the nearest bf16 number.
        """
        params = params_for("master_params", params)
        present = Present(updates)  # the leaves that have a gradient
        # Where a parameter was changed elsewhere, for example by loading weights, its copy starts again from it.
        correct = functools.partial(_corrected, reuse=donate.state)
        copies_so_far = present.pick(state.master)
        corrected_copies = list(map(correct, copies_so_far, present.pick(params)))
        master = present.fill(corrected_copies, state.master)

        gradients = present.pick(updates)
        wide_gradients = ew.cast_like(gradients, corrected_copies)
        # A gradient that has the dtype of its copy is not cast. If all are cast, the new tensors may be overwritten.
        are_new = all(map(is_not, wide_gradients, gradients))
        wide_updates = present.fill(wide_gradients)
        donation = Donation(updates=donate.updates or are_new, state=donate.state)
        inner_updates, inner_state = inner.run(
            wide_updates, state.inner, master, donate=donation, **extras
        )
        new_master = apply_updates(master, inner_updates, donate=donate.state)
        # Each parameter plus its step is exactly the rounded copy.
        out = tree.map(_step_to_rounded, inner_updates, new_master, params)
        return out, MasterParamsState(new_master, inner_state)

    return init, update


def _step_to_rounded(update: Tensor, copy: Tensor, param: Tensor) -> Tensor:
    """Return the rounded new master copy minus the parameter. Leaves whose ``update`` is None are left out."""
    rounded_copy = copy.to(param.dtype)
    return rounded_copy.to(copy.dtype) - param.to(copy.dtype)
