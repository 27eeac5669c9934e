"""Gradient accumulation: one update from several micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Donation, Locality, Transform, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import require_transform
from muonfx.internal.tracing import is_traced, is_wrapped, uncompiled
from muonfx.transforms.leafwise import WideStateDtype, read_wide, write, zeros
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew


class AccumulateState(NamedTuple):
    """State of the transform `accumulate`: sums of gradients, counts of micro-batches, and the inner state."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of micro-batches since the last update: int64, in CPU memory, so that reading it does not sync."""
    seen: Tensor
    """For each parameter, the number of micro-batches since the last update in which it had a gradient: a 1-D int64
    tensor in CPU memory. Parameters are sorted by their path in the tree."""
    sums: PyTree
    """The sums of gradients since the last update: a tree like the parameters, in the storage dtype."""
    inner: PyTree
    """The state of the inner transform."""


_Outcome = tuple[PyTree, AccumulateState]
"""The result of a micro-batch: its updates, and the new state."""


def _check_boundary(boundary: object) -> None:
    """Raise unless the extra argument ``boundary`` is a bool, None, or a bool tensor of one element."""
    if boundary is None or isinstance(boundary, bool):
        return
    if not isinstance(boundary, Tensor) or boundary.dtype != torch.bool or boundary.numel() != 1:
        raise TypeError(
            f"accumulate: found boundary={boundary!r}, expected True, False, None or a bool tensor of one element"
        )


# TREE although leaves are added one by one: a leaf whose gradient is None may have had one in an earlier micro-batch.
@transform(
    locality=Locality.TREE,
    combinator=Combinator(Locality.ELEMENT, skips_steps=True),
    check_extras=lambda tx, extras: _check_boundary(extras.get("boundary")),
)
def accumulate(inner: Transform, every: int, *, mean: bool = True, dtype: WideStateDtype = "auto"):
    """Accumulate the gradients of several micro-batches and run the inner transform after the last one.

    At all other micro-batches the updates are zero. By default, a counter in the state finds the last micro-batch of
    each group. The extra argument ``boundary`` of `update` marks it instead:
    ``update(grads, state, params, boundary=True)``. The inner transform runs only for the last micro-batch; under
    ``torch.compile``, ``torch.cond`` makes this choice. Under ``torch.func.vmap`` over the state, and in ``make_fx``,
    the inner transform runs at every call, and its result is used or dropped.

    A gradient of None counts as zero. If it was None in all micro-batches of a group, the update is None. A compiled
    function leaves its graph for a micro-batch with such gradients, which is an error with ``fullgraph=True``.

    Args:
        inner: the transform to run on the accumulated gradients.
        every: the number of micro-batches in each group.
        mean: divide the sum by the number of micro-batches.
        dtype: storage dtype of the sums. "auto" is float32, or float64 for float64 parameters; None is the dtype of
            each parameter.

    Raises:
        TypeError: at `update`, ``boundary`` is neither a bool nor None nor a bool tensor of one element.
        ValueError: ``every`` is not an int of 1 or more, or ``dtype`` is a string other than "auto".

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.accumulate(mfx.scale(-1.0), every=2)
        >>> state = tx.init({"w": torch.zeros(1)})
        >>> first, state = tx.update({"w": torch.tensor([1.0])}, state)
        >>> second, state = tx.update({"w": torch.tensor([3.0])}, state)
        >>> first["w"], second["w"]
        (tensor([0.]), tensor([-2.]))
    """
    checks.positive_int("every", every)
    checks.state_dtype("dtype", dtype)
    require_transform("accumulate: inner", inner)

    accumulation = _Accumulation(inner, every, mean, dtype)
    return accumulation.init, accumulation.update


class _Accumulation:
    """The functions ``init`` and ``update`` of `accumulate`, for its arguments ``inner``, ``every`` and so on."""

    def __init__(self, inner: Transform, every: int, mean: bool, dtype: WideStateDtype) -> None:
        self._inner = inner
        self._every = every
        self._mean = mean
        self._dtype: WideStateDtype = dtype

    def init(self, params: PyTree) -> AccumulateState:
        """Return sums of zero, with both counts in CPU memory, where Python can read them without a sync."""
        # On the meta device, nothing is computed.
        host = "meta" if device_of(params).type == "meta" else "cpu"
        number_of_leaves = len(tree.leaves(params))
        return AccumulateState(
            count=torch.zeros((), dtype=torch.int64, device=host),
            seen=torch.zeros(number_of_leaves, dtype=torch.int64, device=host),
            sums=zeros(params, self._dtype),
            inner=self._inner.functions.init(params),
        )

    def update(
        self,
        updates: PyTree,
        state: AccumulateState,
        params: PyTree = None,
        *,
        boundary: bool | Tensor | None = None,
        donate: Donation = NOTHING,
        **extras: object,
    ) -> _Outcome:
        """Add the gradients of a micro-batch to the sums; after the last one of a group, run the inner transform.

        ``boundary`` marks the last micro-batch: a bool, a bool tensor, or None to count to ``every``.
        """
        _check_boundary(boundary)
        if torch.compiler.is_compiling() and _lacks_gradients(updates, state.sums):
            # A parameter gets an update if its count of gradients is not zero, and a graph cannot read a count.
            return _run_outside_the_graph(
                self._run, updates, state, params, boundary, donate, extras
            )
        return self._run(updates, state, params, boundary, donate, extras)

    def _run(
        self,
        updates: PyTree,
        state: AccumulateState,
        params: PyTree,
        boundary: bool | Tensor | None,
        donate: Donation,
        extras: dict[str, object],
    ) -> _Outcome:
        """Add the gradients of a micro-batch to the sums. At the last one of a group, run the inner transform.

        ``boundary`` is True for the last one, False for others, or None to count. With ``every=4``, the fourth is then
        the last. The updates of all others are zero.
        """
        accumulated = _add_gradients(updates, state, donate)
        is_last = boundary
        if is_last is None:
            is_last = accumulated.count >= self._every
        if isinstance(is_last, Tensor):
            # Python cannot branch on a tensor without a value.
            is_unknown = is_traced() or is_wrapped(is_last)
            if is_unknown:
                return self._run_traced(is_last, accumulated, updates, params, extras)

        if not is_last:
            return _wait(updates, accumulated)
        updated_leaves = updates
        # A compiled graph has all gradients, and cannot read their counts.
        if not torch.compiler.is_compiling():
            updated_leaves = _leaves_with_any_gradient(updates, params, accumulated)
        # The gradients are new tensors.
        donation = Donation(updates=donate.state, state=donate.state)
        return self._step(updated_leaves, accumulated, params, donation, extras)

    def _run_traced(
        self,
        is_last: Tensor,
        accumulated: AccumulateState,
        updates: PyTree,
        params: PyTree,
        extras: dict[str, object],
    ) -> _Outcome:
        """Return the result of a micro-batch if Python cannot read ``is_last``, in a graph or under ``torch.func``.

        A leaf is updated if it has a gradient in this micro-batch. Whether it had one in an earlier one is a count in
        ``accumulated``, which Python cannot read either.
        """
        # The two possible results, as functions of the accumulated state: with the inner transform, and without it.
        step = functools.partial(
            self._step, updates, params=params, donation=NOTHING, extras=extras
        )
        wait = functools.partial(_wait, updates)
        if torch.compiler.is_compiling():
            return _cond(is_last, step, wait, accumulated, updates)

        def choose(after_step: Tensor, after_wait: Tensor) -> Tensor:
            condition = is_last.to(after_step.device)
            return torch.where(condition, after_step, after_wait)

        # Compute both. Under `vmap` over several states, some states are at their last micro-batch and others not.
        return tree.map(choose, step(accumulated), wait(accumulated))

    def _step(
        self,
        updated_leaves: PyTree,
        accumulated: AccumulateState,
        params: PyTree,
        donation: Donation,
        extras: dict[str, object],
    ) -> _Outcome:
        """Run the inner transform on the mean gradient of a group of micro-batches, and set sums and counts to zero.

        For the sum 4.0 of 2 micro-batches, the inner transform receives 2.0. ``updated_leaves`` has a tensor in the
        dtype of the gradient for each leaf that gets an update, and None for all others.
        """
        present = Present(updated_leaves)  # the leaves that are not None
        sums = present.pick(accumulated.sums)
        if self._mean:
            number = accumulated.count.to(torch.float64)
            wide_gradients = [total / _scalar_for(number, total) for total in sums]
        else:
            wide_gradients = ew.clone(sums)  # copies, which the inner transform may overwrite
        narrow_gradients = ew.cast_like(wide_gradients, present.pick(updated_leaves))
        gradients = present.fill(narrow_gradients)
        new_updates, inner_state = self._inner.run(
            gradients, accumulated.inner, params, donate=donation, **extras
        )
        zero_sums = list(map(torch.zeros_like, sums))
        return new_updates, AccumulateState(
            count=torch.zeros_like(accumulated.count),
            seen=torch.zeros_like(accumulated.seen),
            sums=present.fill(zero_sums, accumulated.sums),
            inner=inner_state,
        )


def _wait(updates: PyTree, accumulated: AccumulateState) -> _Outcome:
    """Return the result of a micro-batch that is not the last one of its group: updates of zero, and the new sums."""
    return tree.map(torch.zeros_like, updates), accumulated


@uncompiled
def _run_outside_the_graph(run: Callable[..., Any], *arguments: object) -> Any:
    """Call a function between two graphs. With ``fullgraph=True`` this is an error of torch."""
    return run(*arguments)


def _lacks_gradients(updates: PyTree, sums: PyTree) -> bool:
    """Return True if the gradient of a parameter is None. Parameters that are None themselves have no sum."""
    for gradient, total in zip(tree.leaves(updates), tree.leaves(sums), strict=True):
        if gradient is None and total is not None:
            return True
    return False


def _add_gradients(updates: PyTree, state: AccumulateState, donate: Donation) -> AccumulateState:
    """Return the state after one more micro-batch: its gradients (``updates``) are added to the sums so far.

    For ``{"a": g, "b": None}``, the sum of "a" grows by g, and ``seen``, the number of gradients of each parameter, by
    [1, 0]. A sum is stored in its own dtype, such as bf16. With ``donate.state`` it overwrites the old sum.
    """
    # The sums of the leaves that have a gradient, computed in the wider dtype of both operands.
    present = Present(updates)
    gradients, sums = read_wide(present, updates, state.sums)
    sums = ew.add(sums, gradients, reuse=donate.state)

    # One more gradient for each leaf that has one, in the order of ``seen``: [1, 0].
    leaves = tree.leaves(updates)
    indices = _indices_by_path(updates)
    has_gradient = [leaves[index] is not None for index in indices]
    seen_now = torch.tensor(has_gradient, dtype=torch.int64, device=state.seen.device)
    return AccumulateState(
        count=state.count + 1,
        seen=state.seen + seen_now,
        sums=write(present, sums, state.sums, reuse=donate.state),
        inner=state.inner,
    )


def _indices_by_path(updates: PyTree) -> list[int]:
    """Return the indices of the leaves of a tree, sorted by path: the order of the counts in `AccumulateState.seen`.

    The leaves of an ``OrderedDict`` with the keys "b", "a" have the indices 0 and 1. Sorted by path, these are [1, 0].
    """
    if tree.is_flat(updates):  # a plain dict, whose leaves are in the order of its sorted keys
        return list(range(len(updates)))
    keys: list[list[tuple[str, Any]]] = []
    for path in tree.paths(updates):
        # ("blocks", 0) becomes [("str", "blocks"), ("int", 0)], because Python cannot compare an int with a string.
        keys.append([(type(entry).__name__, entry) for entry in path])
    return sorted(range(len(keys)), key=keys.__getitem__)


def _leaves_with_any_gradient(
    updates: PyTree, params: PyTree, accumulated: AccumulateState
) -> PyTree:
    """Return the last gradients, with a stand-in for None if the parameter had a gradient in an earlier micro-batch.

    All leaves but None then get an update. A stand-in only shows the dtype of this update: it is the parameter, or the
    sum of its gradients if there are no parameters. Take the last gradients ``{"a": g, "b": None, "c": None}``, and 2,
    1 and 0 gradients so far. The result is ``{"a": g, "b": params["b"], "c": None}``.
    """
    leaves, treedef = tree.flatten(updates)
    # The usual case: every parameter has a gradient now.
    if all(leaf is not None for leaf in leaves):
        return updates
    stand_ins = tree.leaves(accumulated.sums if params is None else params)
    counts = accumulated.seen.tolist()  # sorted by path, and on the CPU, so tolist() does not sync
    for index, count in zip(_indices_by_path(updates), counts, strict=True):
        if leaves[index] is None and count > 0:  # no gradient now, but in an earlier micro-batch
            leaves[index] = stand_ins[index]
    return tree.unflatten(treedef, leaves)


def _scalar_for(number: Tensor, total: Tensor) -> Tensor:
    """Return a CPU scalar in a form that can be combined with ``total``: under ``torch.func``, on its device."""
    if torch.compiler.is_compiling() or not is_wrapped(number):
        return number
    return number.to(total.device)


def _cond(
    is_last: Tensor,
    step: Callable[[AccumulateState], _Outcome],
    wait: Callable[[AccumulateState], _Outcome],
    accumulated: AccumulateState,
    updates: PyTree,
) -> _Outcome:
    """Return ``step(accumulated)`` if ``is_last`` is True, else ``wait(accumulated)``, chosen when a graph runs.

    ``torch.cond`` passes plain tensors to both functions and requires tensors as results. So the state is flattened to
    a list, and both functions return their tensors without leaves of None. ``updates`` shows where these are.
    """
    leaves, treedef = tree.flatten(accumulated)

    def step_on_tensors(*leaves: Tensor) -> tuple[Tensor, ...]:
        state = tree.unflatten(treedef, leaves)
        return _copies(step(state))

    def wait_on_tensors(*leaves: Tensor) -> tuple[Tensor, ...]:
        state = tree.unflatten(treedef, leaves)
        return _copies(wait(state))

    tensors = torch.cond(is_last, step_on_tensors, wait_on_tensors, tuple(leaves))
    # They are the tensors of a pair (updates, state) like this one. Build it again, with None where it has None.
    like = Present((updates, accumulated))
    return like.fill(tensors)


def _copies(outcome: _Outcome) -> tuple[Tensor, ...]:
    """Return copies of the tensors in a tree: a branch of ``torch.cond`` must not return an input or a None."""
    return tuple(leaf.clone() for leaf in tree.leaves(outcome) if leaf is not None)
