"""Gradient accumulation: one update from several micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Donation, Locality, Transform, checks, transform
from muonfx.core.contract import NOTHING, require_transform
from muonfx.transforms.leafwise import WideStateDtype, zeros
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew
from muonfx.tree.tracing import is_traced, is_wrapped


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


def _check_boundary(boundary: object) -> None:
    is_one = isinstance(boundary, Tensor) and boundary.dtype == torch.bool and boundary.numel() == 1
    if not (boundary is None or isinstance(boundary, bool) or is_one):
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

    A gradient of None counts as zero. If it was None in all micro-batches of a group, the update is None.

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

    def init(params: PyTree) -> AccumulateState:
        host = torch.device("meta") if device_of(params).type == "meta" else torch.device("cpu")
        number = len(tree.leaves(params))
        return AccumulateState(
            torch.zeros((), dtype=torch.int64, device=host),
            torch.zeros(number, dtype=torch.int64, device=host),
            zeros(params, dtype),
            inner.functions.init(params),
        )

    def update(
        updates: PyTree,
        state: AccumulateState,
        params: PyTree = None,
        *,
        boundary: bool | Tensor | None = None,
        donate: Donation = NOTHING,
        **extras: object,
    ):
        _check_boundary(boundary)
        at = Present(updates)
        grads, old = at.pick(updates), at.pick(state.sums)
        wide, sums = ew.widest(grads, old)
        sums = ew.store(ew.add(sums, wide, reuse=donate.state), old, reuse=donate.state)
        leaves = tree.leaves(updates)
        present = [leaves[place] is not None for place in _by_path(updates)]
        seen = state.seen + torch.tensor(present, dtype=torch.int64, device=state.seen.device)
        gathered = AccumulateState(state.count + 1, seen, at.fill(sums, state.sums), state.inner)
        due = gathered.count >= every if boundary is None else boundary
        compiling = torch.compiler.is_compiling()
        batched = not compiling and isinstance(due, Tensor) and (is_wrapped(due) or is_traced())
        # Python must know which leaves get an update; a traced call uses the leaves that have a gradient now.
        places = updates if compiling or batched else _ever_seen(updates, gathered)
        outcomes = _Outcomes(inner, updates, places, mean, params, extras)
        if isinstance(due, Tensor) and compiling:
            return outcomes.cond(due, gathered)
        if isinstance(due, Tensor) and batched:
            return outcomes.select(due, gathered)
        return outcomes.step(gathered, donate) if due else outcomes.wait(gathered)

    return init, update


def _by_path(updates: PyTree) -> list[int]:
    """Return the indices of the leaves of a tree, sorted by the path of each leaf."""
    if tree.is_flat(updates):
        return list(range(len(updates)))
    # The name of its type precedes an entry, so that an int is never compared with a string.
    keys = [[(type(entry).__name__, entry) for entry in path] for path in tree.paths(updates)]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _ever_seen(updates: PyTree, gathered: AccumulateState) -> PyTree:
    """Return the gradients, with a tensor for each None whose parameter had a gradient earlier in the group."""
    leaves, treedef = tree.flatten(updates)
    if all(leaf is not None for leaf in leaves):
        return updates
    counts = gathered.seen.tolist()  # on the CPU, so tolist() does not sync
    seen = [count for _, count in sorted(zip(_by_path(updates), counts, strict=True))]
    sums = tree.leaves(gathered.sums)
    return tree.unflatten(treedef, [s if u is None and n else u for u, n, s in zip(leaves, seen, sums, strict=True)])


def _scalar_for(number: Tensor, total: Tensor) -> Tensor:
    """Return a CPU scalar in a form that can be combined with ``total``: under ``torch.func``, on its device."""
    return number if torch.compiler.is_compiling() or not is_wrapped(number) else number.to(total.device)


class _Outcomes(NamedTuple):
    """The two possible results of a call of `accumulate`: `step`, a real update, and `wait`, an update of zero."""

    inner: Transform
    updates: PyTree
    places: PyTree
    """A tree with some tensor for each leaf that gets an update, and None for every other leaf."""
    mean: bool
    params: PyTree
    extras: dict[str, object]

    def step(self, gathered: AccumulateState, donate: Donation) -> tuple[PyTree, AccumulateState]:
        """Run the inner transform on the accumulated gradients; return its updates and a state with sums of zero."""
        at = Present(self.places)
        totals, number = at.pick(gathered.sums), gathered.count.to(torch.float64)
        combined = [total / _scalar_for(number, total) if self.mean else total.clone() for total in totals]
        params = self.updates if self.params is None else self.params
        likes = zip(at.pick(self.updates), at.pick(params), totals, strict=True)
        dtypes = [next(like.dtype for like in one if like is not None) for one in likes]
        out, inner_state = self.inner.run(
            at.fill(ew.cast(combined, dtypes)),
            gathered.inner,
            self.params,
            donate=Donation(self.mean and donate.state, donate.state),
            **self.extras,
        )
        cleared = at.fill([torch.zeros_like(total) for total in totals], gathered.sums)
        return out, AccumulateState(
            torch.zeros_like(gathered.count), torch.zeros_like(gathered.seen), cleared, inner_state
        )

    def wait(self, gathered: AccumulateState) -> tuple[PyTree, AccumulateState]:
        """Return updates of zero and the state with the accumulated gradients."""
        return tree.map(torch.zeros_like, self.updates), gathered

    def select(self, due: Tensor, gathered: AccumulateState) -> tuple[PyTree, AccumulateState]:
        """Compute both results and select one by ``due`` with ``torch.where``; ``vmap`` does so for each state."""
        stepped, waited = self.step(gathered, NOTHING), self.wait(gathered)
        return tree.map(lambda a, b: torch.where(due.to(a.device), a, b), stepped, waited)

    def cond(self, due: Tensor, gathered: AccumulateState) -> tuple[PyTree, AccumulateState]:
        """Choose one of the two results by ``due`` with ``torch.cond``, in a compiled graph."""
        leaves, treedef = tree.flatten(gathered)
        shape = tree.flatten(self.wait(gathered))[1]

        def run(function: Callable[[AccumulateState], PyTree]) -> Callable[..., tuple[Tensor, ...]]:
            def branch(*leaves: Tensor) -> tuple[Tensor, ...]:
                outcome = function(tree.unflatten(treedef, leaves))
                return tuple(leaf.clone() for leaf in tree.leaves(outcome) if leaf is not None)

            return branch

        present = torch.cond(due, run(lambda g: self.step(g, NOTHING)), run(self.wait), tuple(leaves))
        found = iter(present)
        template = tree.leaves((self.updates, gathered))
        return tree.unflatten(shape, [None if leaf is None else next(found) for leaf in template])
