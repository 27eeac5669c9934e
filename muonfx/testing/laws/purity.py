"""Laws of purity: results depend on inputs only, no input is overwritten, and outputs share no storage with inputs."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.testing.examples import copied_tree, history, scaled, updates_of
from muonfx.testing.law import law
from muonfx.testing.violation import Breach, bits_equal, require_same, shown
from muonfx.tree import PyTree


class _Snapshot:
    """The structure and leaves of a tree at one time, and copies of its tensors."""

    def __init__(self, values: PyTree) -> None:
        self.leaves, self.structure = tree.flatten(values)
        self.copies = copied_tree(self.leaves)
        self.versions = [getattr(leaf, "_version", None) for leaf in self.leaves]
        """The number of writes to each tensor, which torch counts."""

    def has_leaves_of(self, values: PyTree) -> bool:
        """Return whether a tree has this structure, and as leaves the same objects."""
        leaves, structure = tree.flatten(values)
        return structure == self.structure and all(map(operator.is_, leaves, self.leaves))


class Witness:
    """Copies of named trees, to detect later whether a leaf or a container was changed."""

    def __init__(self, **trees: PyTree) -> None:
        self.trees = trees
        self.snapshots = {title: _Snapshot(values) for title, values in trees.items()}

    def require_unchanged(self, when: str) -> None:
        """Raise `Breach` (a failed law) if a tree has changed. ``when`` starts its message: "update, at step 0,"."""
        for title, values in self.trees.items():
            snapshot = self.snapshots[title]
            if not snapshot.has_leaves_of(values):
                raise Breach(title, f"{when} has put other leaves into its container")
            for number, (name, leaf) in enumerate(tree.named_leaves(values)):
                if not isinstance(leaf, Tensor):
                    continue
                copy = snapshot.copies[number]
                if not bits_equal(leaf, copy):
                    raise Breach(f"{title} {name!r}", f"{when} has changed it from {shown(copy)} to {shown(leaf)}")
                if leaf._version != snapshot.versions[number] and leaf.numel():
                    raise Breach(f"{title} {name!r}", f"{when} has written its own values to it (its _version rose)")


@law(share=0.4)
def update_leaves_its_inputs_unchanged(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `init` and `update` modify no tensor and no container of parameters, gradients or state.

    >>> import muonfx as mfx
    >>> update_leaves_its_inputs_unchanged(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    witness = Witness(params=params)
    state = tx.init(params)
    witness.require_unchanged("init")
    for step, grads in enumerate(steps):
        witness = Witness(gradients=grads, state=state, params=params)
        _, new_state = tx.update(grads, state, params)
        witness.require_unchanged(f"update, at step {step},")
        state = new_state


def _nonempty(values: PyTree) -> list[tuple[str, Tensor]]:
    """Return pairs (name, tensor) of the nonempty tensors of a tree."""
    return [(name, leaf) for name, leaf in tree.named_leaves(values) if isinstance(leaf, Tensor) and leaf.numel()]


def require_apart(what: str, outputs: PyTree, inputs_are: str, inputs: PyTree, *, unless_same: bool = False) -> None:
    """Raise `Breach` (a failed law) if a tensor shares its storage with a tensor of another tree.

    With ``unless_same``, both may contain the same tensor object. ``what`` and ``inputs_are`` name the trees.
    """
    name_of_storage = {leaf.untyped_storage().data_ptr(): name for name, leaf in _nonempty(inputs)}
    ids_of_inputs = tree.ids(inputs)
    for name, leaf in _nonempty(outputs):
        input_name = name_of_storage.get(leaf.untyped_storage().data_ptr())
        if input_name is None or (unless_same and id(leaf) in ids_of_inputs):
            continue
        text = f"shares its storage with {inputs_are} {input_name!r}; writing to one changes both"
        raise Breach(f"{what} {name!r}", text)


@law(share=0.4)
def outputs_share_no_storage_with_inputs(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that outputs of `init` and `update` share no storage with inputs, nor updates with the new state.

    An unchanged tensor may be returned as the same object: a gradient as its update, or a leaf of the state.

    >>> import muonfx as mfx
    >>> outputs_share_no_storage_with_inputs(mfx.master_params(mfx.scale(-1.0)), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    state = tx.init(params)
    require_apart("state from init", state, "params", params)
    for step, grads in enumerate(steps):
        updates, new_state = tx.update(grads, state, params)
        title = f"step {step}, updates"
        require_apart(title, updates, "the gradient", grads, unless_same=True)
        require_apart(title, updates, "the old state", state)
        require_apart(title, updates, "params", params)
        require_apart(title, updates, "the new state", new_state)
        title = f"step {step}, new state"
        require_apart(title, new_state, "the gradient", grads)
        require_apart(title, new_state, "the old state", state, unless_same=True)
        require_apart(title, new_state, "params", params)
        state = new_state


@law(share=0.4)
def updates_do_not_overlap(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that writing to the update of one leaf in place does not change the update of another leaf.

    Updates that are the gradient itself are not tested.

    >>> import muonfx as mfx
    >>> updates_do_not_overlap(mfx.orthogonalize(), *mfx.testing.Example.of({"q": (2, 3), "k": (3, 2)}))
    """
    for grads, updates in zip(steps, updates_of(tx, params, steps), strict=True):
        grad_ids = tree.ids(grads)
        new_updates = [(name, leaf) for name, leaf in _nonempty(updates) if id(leaf) not in grad_ids]
        for number, (name, update) in enumerate(new_updates):
            _require_no_overlap(name, update, new_updates[:number])


def _require_no_overlap(name: str, update: Tensor, other_updates: list[tuple[str, Tensor]]) -> None:
    """Add one to an update in place, and raise `Breach` (a failed law) if another update changes."""
    copies = [other_update.clone() for _, other_update in other_updates]
    try:
        update.add_(1.0)
    except RuntimeError as error:
        raise Breach(f"updates {name!r}", f"cannot be written to, strides {update.stride()}: {error}") from None
    for (other_name, other_update), copy in zip(other_updates, copies, strict=True):
        if not bits_equal(other_update, copy):
            raise Breach(f"updates {name!r}", f"overlaps the update {other_name!r}")


@law(share=0.3)
def update_remembers_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the same call returns the same bits every time, whatever calls were made before.

    A call is made twice in succession, and two runs call the transform alternately.

    >>> import muonfx as mfx
    >>> update_remembers_nothing(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    state = tx.init(params)
    for step, grads in enumerate(steps):
        expected = copied_tree(tx.update(grads, state, params))
        results = tx.update(grads, state, params)
        require_same(f"step {step}, (updates, state)", results, expected, "in the first of two calls")
        _, state = expected
    _check_interleaved(tx, params, steps)


def _check_interleaved(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Raise `Breach` (a failed law) unless two runs that alternate have the results of each run alone."""
    opposite_steps = scaled(list(reversed(steps)), -2)  # so that no state has the values of the other run
    expected = copied_tree(history(tx, params, steps))
    expected_opposite = copied_tree(history(tx, params, opposite_steps))
    state = tx.init(params)
    opposite_state = tx.init(params)
    for step, (grads, opposite_grads) in enumerate(zip(steps, opposite_steps, strict=True)):
        updates, state = tx.update(grads, state, params)
        what = f"step {step} of two alternating runs, (updates, state)"
        require_same(what, (updates, state), expected[step], "when run alone")
        updates, opposite_state = tx.update(opposite_grads, opposite_state, params)
        require_same(what, (updates, opposite_state), expected_opposite[step], "when run alone")


@law(share=0.2)
def unknown_extras_are_ignored(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a transform in a chain ignores extra arguments of `update` which its signature lacks.

    So a chain passes all of them to all transforms. If no transform accepts one, `update` of the chain raises an
    error, because the name is probably misspelt.

    >>> import muonfx as mfx
    >>> unknown_extras_are_ignored(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    state = tx.init(params)
    grads = steps[0]
    unknown: dict[str, Any] = {"an_extra_that_nobody_names": torch.ones(())}
    expected = copied_tree(tx.update(grads, state, params))
    results = tx.run(grads, state, params, **unknown)  # as a chain runs it
    require_same("(updates, state)", results, expected, "without the extra argument")
    is_refused = False
    try:
        tx.update(grads, state, params, **unknown)
    except TypeError:
        is_refused = True
    accepts_any_name = tx.extras.understood is None
    if not is_refused and not accepts_any_name:
        raise Breach(None, "update accepts an extra argument that no transform names, expected an error")
