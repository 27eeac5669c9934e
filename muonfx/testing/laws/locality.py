"""Laws of locality: an update depends on no more than the declared locality."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Locality, Transform
from muonfx.core.contract import within
from muonfx.program.lower import resolve_within
from muonfx.testing.examples import Example, history, updates_of
from muonfx.testing.law import law
from muonfx.testing.violation import Breach, require_close, tolerance_of
from muonfx.tree import PyTree

__all__ = [
    "element_transforms_see_one_element",
    "leaf_transforms_see_one_leaf",
    "matrix_transforms_see_one_matrix",
    "tree_transforms_see_sums_over_leaves",
]

# Also used by the laws of declarations: check_elements, check_sums, enlarged, flattened, precise, wider_than.


def wider_than(locality: Locality) -> Callable[[Transform], str | None]:
    def why_not(tx: Transform) -> str | None:
        return f"its locality is {tx.locality.name}" if tx.locality > locality else None

    return why_not


def precise(example: Example) -> Example:
    """Convert an example to dense float64, with at least two steps."""
    return example.precise().prolonged(2)


def flattened(example: Example) -> Example:
    """Flatten every leaf, like the shards of a flat buffer."""
    return example.map(lambda leaf: leaf.reshape(-1))


def enlarged(example: Example) -> Example:
    """Repeat leaves of at most three shapes, for speed, until they have some thousands of elements."""
    leaves = [leaf for leaf in tree.leaves(example.params) if leaf is not None]
    chosen = {tuple(leaf.shape) for leaf in leaves if leaf.numel()}
    kept = sorted(chosen, key=lambda shape: -len(shape))[:3]

    def large(leaf: Tensor) -> Tensor:
        if tuple(leaf.shape) not in kept or not leaf.ndim:
            return leaf
        # The whole leaf has more than 4,096 elements and a half has fewer, so that a change of path there is found.
        times = -(-6000 // leaf.numel())
        rows = -(-70 // leaf.shape[0]) if leaf.ndim >= 2 else times
        columns = -(-times // rows)
        repeats = [rows, *[1] * (leaf.ndim - 2), columns] if leaf.ndim >= 2 else [rows]
        grown = leaf.repeat(repeats)
        # All elements differ, because otherwise a mean over some would equal the mean over all.
        steps = torch.arange(grown.numel(), dtype=grown.dtype).reshape(grown.shape)
        return grown * (1.0 + 0.37 * torch.sin(steps))

    return example.map(large)


@law(on=precise, unless=wider_than(Locality.ELEMENT), share=0.4)
def element_transforms_see_one_element(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """A transform declared ELEMENT commutes with cutting leaves in two, and with permuting the elements of a leaf.

    >>> import muonfx as mfx
    >>> element_transforms_see_one_element(mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    check_elements(tx, params, steps)


def check_elements(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` unless a transform commutes with splitting leaves, and with permuting their elements."""
    example = Example(params, steps)
    whole = updates_of(tx, *example)
    tolerance = tolerance_of(tx, history(tx, params, steps))
    # Two runs on trees with the same names and numbers of dims, as on two ranks of a sharded run.
    halves = [updates_of(tx, *example.map(piece)) for piece in (_first_half, _second_half)]
    wanted = [[tree.map(piece, updates) for updates in whole] for piece in (_first_half, _second_half)]
    for which, found, expected in zip(("first", "second"), halves, wanted, strict=True):
        what = f"updates of the {which} half of each leaf"
        require_close(what, found, expected, "that half of the whole's", _relative(tolerance, whole, expected))
    shuffled = updates_of(tx, *example.map(_shuffled))
    expected = [tree.map(_shuffled, updates) for updates in whole]
    require_close("updates of leaves with permuted elements", shuffled, expected, "the whole's, permuted", tolerance)


def _relative(tolerance: float, whole: PyTree, pieces: PyTree) -> float:
    """Return a looser tolerance for halves: it is relative to a largest magnitude that a half may lack."""
    return tolerance * 1e3 if tolerance < 1e-6 else tolerance


def _first_half(leaf: Tensor) -> Tensor:
    return leaf if leaf.ndim == 0 else leaf.narrow(0, 0, (leaf.shape[0] + 1) // 2).contiguous()


def _second_half(leaf: Tensor) -> Tensor:
    kept = leaf.shape[0] // 2 if leaf.ndim else 0
    return leaf if leaf.ndim == 0 else leaf.narrow(0, leaf.shape[0] - kept, kept).contiguous()


def _shuffled(leaf: Tensor) -> Tensor:
    order = torch.randperm(leaf.numel(), generator=torch.Generator().manual_seed(leaf.numel()))
    return leaf.reshape(-1)[order].reshape(leaf.shape)


def _batched(example: Example) -> Example:
    """Convert every leaf of fewer than three dims to a batch of two different matrices."""

    def widen(leaf: Tensor) -> Tensor:
        if leaf.ndim >= 3:
            return leaf
        matrix = leaf if leaf.ndim == 2 else leaf.reshape(1, -1)
        return torch.stack([matrix, (7.0 * matrix.roll(1, -1) + 0.5).flip(-1)])

    return precise(example).map(widen)


@law(on=_batched, unless=wider_than(Locality.MATRIX), share=0.4)
def matrix_transforms_see_one_matrix(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """A transform declared MATRIX commutes with cutting leaves along a batch dim (any dim but the last two).

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tx = mfx.orthogonalize(view=mfx.MatrixView(((-2,), (-1,))))
    >>> matrix_transforms_see_one_matrix(tx, *Example.of({"w": (2, 2, 3)}))
    """
    example = Example(params, steps)
    whole = updates_of(tx, *example)
    tolerance = tolerance_of(tx, history(tx, params, steps))
    for which, piece in (("first", _first_half), ("second", _second_half)):
        found = updates_of(tx, *example.map(piece))
        expected = [tree.map(piece, updates) for updates in whole]
        what = f"updates of the {which} half of each batch"
        require_close(what, found, expected, "that half of the whole's", _relative(tolerance, whole, expected))


@law(on=precise, unless=wider_than(Locality.LEAF), share=0.4)
def leaf_transforms_see_one_leaf(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """In a transform declared LEAF, or narrower, a leaf's updates do not change when other leaves change or are absent.

    >>> import muonfx as mfx
    >>> leaf_transforms_see_one_leaf(mfx.clip_by_block_rms(0.1), *mfx.testing.Example.of({"w": (2, 3), "b": (3,)}))
    """
    whole = history(tx, params, steps)
    tolerance = tolerance_of(tx, whole)
    names, treedef = tree.names(params), tree.flatten(params)[1]
    for place, name in enumerate(names):

        def others(values: PyTree, change: Callable[[Tensor], Any], place: int = place) -> PyTree:
            kept = [leaf if at == place else change(leaf) for at, leaf in enumerate(tree.leaves(values))]
            return tree.unflatten(treedef, kept)

        changed = Example(
            others(params, lambda p: 5.0 * p + 1.0), [others(grads, lambda g: 7.0 * g - 3.0) for grads in steps]
        )
        gone = [others(grads, lambda g: None) for grads in steps]
        cases = {
            "other leaves have other values": changed,
            "other gradients are None": Example(params, gone),
            "other leaves are None": Example(others(params, lambda p: None), gone),  # as on an owner rank
        }
        for how, other in cases.items():
            for step, (updates, (expected, _)) in enumerate(zip(updates_of(tx, *other), whole, strict=True)):
                found, wanted = ({name: tree.leaves(values)[place]} for values in (updates, expected))
                require_close(f"step {step}, when {how}, the update of", found, wanted, "before", tolerance)


def _needs_more_than_sums(tx: Transform) -> str | None:
    if tx.locality < Locality.TREE:
        return f"its locality is {tx.locality.name}"
    wide = [part for part in within(tx) if part.locality == Locality.TREE]
    alone = [part for part in wide if part.works_on_pieces and "sum_over_leaves" not in part.extras.named]
    if alone:
        return f"{alone[0].name} works on pieces by other means than sums over leaves"
    unnamed = [part for part in wide if "sum_over_leaves" not in part.extras.named and not part.extras[1]]
    if unnamed or not any("sum_over_leaves" in part.extras.named for part in wide):
        name = (unnamed or wide)[0].name
        return f"{name} is TREE and does not name sum_over_leaves: it gets the gathered tree"
    return None


@law(on=precise, unless=_needs_more_than_sums, share=0.2)
def tree_transforms_see_sums_over_leaves(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """A TREE transform that names ``sum_over_leaves`` needs no more than these sums of what is on other ranks.

    Two ranks, played by two threads, hold different leaves, or a half of each; the sums go over both.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> tree_transforms_see_sums_over_leaves(mfx.clip_by_global_norm(0.1), *Example.of({"w": (2, 3), "b": (3,)}))
    """
    check_sums(tx, params, steps)


def check_sums(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` unless two ranks with different leaves, or with halves of them, compute one rank's updates."""
    whole = history(tx, params, steps)
    tolerance = tolerance_of(tx, whole)
    resolved = resolve_within(tx, tree.map(lambda p: p.to("meta"), params))
    halves = _in_halves(resolved, params, steps)
    for step, (expected, _) in enumerate(whole):
        for which, (piece, found) in enumerate(zip((_first_half, _second_half), halves, strict=True)):
            wanted = tree.map(lambda leaf, piece=piece: piece(leaf) if leaf.ndim else leaf, expected)
            title = f"step {step}, on two ranks that hold a half of each leaf, updates of rank {which}"
            require_close(title, found[step], wanted, "that half of one rank's", _relative(tolerance, expected, wanted))
    for what, holder in (("every other leaf", lambda place: place % 2), ("all leaves or none", lambda place: 0)):
        held = _on_two_ranks(tx, params, steps, holder)
        for step, (expected, _) in enumerate(whole):
            for place, (name, leaf) in enumerate(zip(tree.names(expected), tree.leaves(expected), strict=True)):
                found = {name: tree.leaves(held[holder(place)][step])[place]}
                title = f"step {step}, on two ranks that hold {what}, update"
                require_close(title, found, {name: leaf}, "on one rank", tolerance)


def _in_halves(tx: Transform, params: PyTree, steps: list[PyTree]) -> list[list[PyTree]]:
    """Return the updates of two ranks, each with a half of every leaf; leaves without dims count on the first rank."""
    ranks = _Ranks(2)

    def run(rank: int) -> list[PyTree]:
        def mine(leaf: Tensor) -> Tensor:
            return (_first_half, _second_half)[rank](leaf)

        def counted(scalars: PyTree) -> Tensor:
            own = zip(tree.leaves(scalars), tree.leaves(params), strict=True)
            return ranks.sum(rank, [x for x, p in own if x is not None and (p.ndim or rank == 0)])

        local = tree.map(mine, params)
        state = tx.init(local)
        found: list[PyTree] = []
        for grads in steps:
            updates, state = tx.update(tree.map(mine, grads), state, local, sum_over_leaves=counted)
            found.append(updates)
        return found

    return ranks.run(run)


def _on_two_ranks(
    tx: Transform, params: PyTree, steps: list[PyTree], holder: Callable[[int], int]
) -> list[list[PyTree]]:
    ranks = _Ranks(2)

    def run(rank: int) -> list[PyTree]:
        def mine(values: PyTree) -> PyTree:
            leaves, treedef = tree.flatten(values)
            return tree.unflatten(treedef, [x if holder(place) == rank else None for place, x in enumerate(leaves)])

        state = tx.init(params)
        found: list[PyTree] = []
        for grads in steps:
            updates, state = tx.update(mine(grads), state, params, sum_over_leaves=lambda t: ranks.sum(rank, t))
            found.append(updates)
        return found

    return ranks.run(run)


class _Ranks:
    """Threads that sum scalars with each other, as ranks do."""

    def __init__(self, number: int) -> None:
        self.changed = threading.Condition()
        self.given: list[list[Tensor]] = [[] for _ in range(number)]
        self.done = [False] * number

    def sum(self, rank: int, scalars: PyTree) -> Tensor:
        """Sum the scalars of all ranks; the n-th call of each rank meets the n-th calls of the others."""
        own = [leaf.double() for leaf in tree.tensors(scalars)]
        with self.changed:
            self.given[rank].append(torch.stack(own).sum() if own else torch.zeros((), dtype=torch.float64))
            call = len(self.given[rank])
            self.changed.notify_all()
            self.changed.wait_for(lambda: all(map(bool, self._here(call))), timeout=60)
            if any(len(given) < call for given in self.given):
                raise Breach(
                    None, f"one rank takes sum {call} and another does not: they would wait for each other for ever"
                )
            return torch.stack([given[call - 1] for given in self.given]).sum()

    def _here(self, call: int) -> list[bool]:
        return [done or len(given) >= call for done, given in zip(self.done, self.given, strict=True)]

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Run a function of the rank on all ranks at once, and raise the first error of any rank."""
        results: list[Any] = [None] * len(self.done)
        errors: list[Exception] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except Exception as error:
                errors.append(error)
            with self.changed:
                self.done[rank] = True
                self.changed.notify_all()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.done))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
