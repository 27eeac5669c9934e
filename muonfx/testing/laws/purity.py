"""Laws of purity: results depend on inputs only, no input is overwritten, and outputs share no storage with inputs."""

from __future__ import annotations

import operator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.testing.examples import copied, copied_tree, history, scaled, updates_of
from muonfx.testing.law import law
from muonfx.testing.violation import Breach, bits_equal, require_same, shown
from muonfx.tree import PyTree


class Witness:
    """Copies of named trees, to detect later whether a leaf or a container was changed."""

    def __init__(self, **trees: PyTree) -> None:
        self.trees = trees
        self.flattened = {title: tree.flatten(values) for title, values in trees.items()}
        self.snapshots: list[_Snapshot] = []
        for name, leaf in tree.named_leaves(trees):
            if isinstance(leaf, Tensor):
                self.snapshots.append(_Snapshot(name, leaf, copied(leaf), leaf._version))

    def require_unchanged(self, when: str) -> None:
        """Raise `Breach` (a failed law) if a tree has changed. ``when`` starts its message: "update, at step 0,"."""
        for title, values in self.trees.items():
            leaves, structure = tree.flatten(values)
            old_leaves, old_structure = self.flattened[title]
            if structure != old_structure or not all(map(operator.is_, leaves, old_leaves)):
                raise Breach(title, f"{when} has put other leaves into its container")
        for snapshot in self.snapshots:
            snapshot.require_unchanged(when)


class _Snapshot(NamedTuple):
    """A tensor, its name, a copy of its values, and the number of writes to it, which torch counts."""

    name: str
    tensor: Tensor
    copy: Tensor
    version: int

    def require_unchanged(self, when: str) -> None:
        """Raise `Breach` (a failed law) if the tensor has other values, or was written to."""
        if not bits_equal(self.tensor, self.copy):
            raise Breach(
                self.name, f"{when} has changed it from {shown(self.copy)} to {shown(self.tensor)}"
            )
        # Equal bits, but written: the update may have changed the tensor and restored it.
        if self.tensor._version != self.version and self.tensor.numel():
            raise Breach(self.name, f"{when} has written its own values to it (its _version rose)")


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
        _, state = tx.update(grads, state, params)
        witness.require_unchanged(f"update, at step {step},")


def _tensors(values: PyTree) -> list[tuple[str, Tensor]]:
    """Return pairs (name, tensor) of the nonempty tensors of a tree."""
    return [
        (name, leaf)
        for name, leaf in tree.named_leaves(values)
        if isinstance(leaf, Tensor) and leaf.numel()
    ]


def names_by_storage(values: PyTree) -> dict[int, list[str]]:
    """Return the names of the nonempty tensors of a tree by the addresses of their storages.

    The storage is the memory of a tensor, which its views share. Of ``{"w": w, "row": w[0], "b": b}``, the result is
    ``{address of w: ["w", "row"], address of b: ["b"]}``.
    """
    names: dict[int, list[str]] = {}
    for name, leaf in _tensors(values):
        names.setdefault(leaf.untyped_storage().data_ptr(), []).append(name)
    return names


def require_apart(
    what: str, outputs: PyTree, inputs: dict[str, PyTree], *, may_be: PyTree = ()
) -> None:
    """Raise `Breach` (a failed law) if a tensor of the outputs shares its storage with a tensor of the inputs.

    Args:
        what: the name of the outputs in the message, such as "step 0, updates".
        outputs: a tree of tensors.
        inputs: trees of tensors by name, such as ``{"params": params}``.
        may_be: a tree whose tensors may be returned as they are. An update may be the same object as its gradient.
    """
    allowed_objects = tree.ids(may_be)
    input_names = names_by_storage(inputs)
    for name, leaf in _tensors(outputs):
        # The address of its memory, equal for all views of it.
        storage = leaf.untyped_storage().data_ptr()
        if storage in input_names and id(leaf) not in allowed_objects:
            input_name = input_names[storage][0]
            raise Breach(
                f"{what} {name!r}",
                f"shares its storage with {input_name!r}; writing to one changes both",
            )


@law(share=0.4)
def outputs_share_no_storage_with_inputs(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that outputs of `init` and `update` share no storage with inputs, nor updates with the new state.

    An unchanged tensor may be returned as the same object: a gradient as its update, or a leaf of the state.

    >>> import muonfx as mfx
    >>> outputs_share_no_storage_with_inputs(
    ...     mfx.master_params(mfx.scale(-1.0)), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    state = tx.init(params)
    require_apart("state from init", state, {"params": params})
    for step, grads in enumerate(steps):
        updates, new_state = tx.update(grads, state, params)
        inputs = {"gradients": grads, "old state": state, "params": params}
        require_apart(
            f"step {step}, updates", updates, {**inputs, "new state": new_state}, may_be=grads
        )
        require_apart(f"step {step}, new state", new_state, inputs, may_be=state)
        state = new_state


@law(share=0.4)
def updates_do_not_overlap(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that writing to the update of one leaf in place does not change the update of another leaf.

    Updates that are the gradient itself are not tested.

    >>> import muonfx as mfx
    >>> updates_do_not_overlap(
    ...     mfx.orthogonalize(), *mfx.testing.Example.of({"q": (2, 3), "k": (3, 2)})
    ... )
    """
    for grads, updates in zip(steps, updates_of(tx, params, steps), strict=True):
        gradients = tree.ids(grads)
        new_updates: dict[str, Tensor] = {}
        for name, update in _tensors(updates):
            if id(update) not in gradients:
                new_updates[name] = update
        # Add another number to each update, first in new tensors and then in place. If two overlap, one of them
        # receives both numbers in place.
        expected: dict[str, Tensor] = {}
        for number, (name, update) in enumerate(new_updates.items()):
            expected[name] = update + number
        for number, (name, update) in enumerate(new_updates.items()):
            _add_in_place(name, update, number)
        require_same("updates, each changed in place,", new_updates, expected, "if changed alone")


def _add_in_place(name: str, update: Tensor, number: int) -> None:
    """Add a number to an update in place, or raise `Breach` (a failed law) if torch refuses to write to it."""
    try:
        update.add_(number)
    except RuntimeError as error:  # two of its elements are at one place in memory
        raise Breach(
            f"updates {name!r}", f"cannot be written to, strides {update.stride()}: {error}"
        ) from None


@law(share=0.3)
def update_remembers_nothing(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the same call returns the same bits every time, whatever calls were made before.

    A call is made twice in succession, and two runs call the transform alternately.

    >>> import muonfx as mfx
    >>> update_remembers_nothing(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    # So that no state has the values of the first run.
    other_steps = scaled(list(reversed(steps)), -2)
    expected = copied_tree(history(tx, params, steps))
    other_expected = copied_tree(history(tx, params, other_steps))
    state = tx.init(params)
    other_state = tx.init(params)
    for step in range(len(steps)):
        state = _update_twice(step, tx, steps[step], state, params, expected[step])
        other_state = _update_twice(
            step, tx, other_steps[step], other_state, params, other_expected[step]
        )


def _update_twice(
    step: int,
    tx: Transform,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    expected: tuple[PyTree, PyTree],
) -> PyTree:
    """Raise `Breach` (a failed law) unless two equal calls have the expected results. Return the next state."""
    results = tx.update(grads, state, params)
    require_same(
        f"step {step} of two alternating runs, (updates, state)",
        results,
        expected,
        "when run alone",
    )
    results = tx.update(grads, state, params)
    require_same(f"step {step}, (updates, state)", results, expected, "in the first of two calls")
    return results[1]


@law(share=0.2)
def extras_of_other_transforms_are_ignored(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that a transform in a chain ignores extra arguments of `update` which its signature lacks.

    An extra argument is, for example, ``value=loss``. A chain passes all of them to each of its transforms. If no
    transform accepts one, `update` of the chain raises an error, because the name is probably misspelt.

    >>> import muonfx as mfx
    >>> extras_of_other_transforms_are_ignored(
    ...     mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    state = tx.init(params)
    unknown: dict[str, Any] = {"an_extra_that_nobody_names": torch.ones(())}
    expected = copied_tree(tx.update(steps[0], state, params))
    results = tx.run(steps[0], state, params, **unknown)  # as a chain runs it
    require_same("(updates, state)", results, expected, "without the extra argument")
    accepts_any_name = tx.extras.accepted is None  # by ``**extras``
    if accepts_any_name:
        return
    with suppress(TypeError):  # a direct call must raise it
        tx.update(steps[0], state, params, **unknown)
        raise Breach(
            None, "update accepts an extra argument that no transform names, expected an error"
        )
