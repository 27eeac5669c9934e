"""Laws of structure: states keep their structure, updates have the form of gradients, and None leaves do not change."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.transform import within
from muonfx.testing.examples import (
    DTYPES,
    Example,
    copied_tree,
    in_mixed_dtypes,
    on_meta,
    updates_of,
)
from muonfx.testing.law import law
from muonfx.testing.violation import Breach, require_same, require_spec, shown
from muonfx.tree import PyTree


def _after_a_full_step(example: Example) -> Example:
    """Return the example with an added first step in which every gradient is a tensor, so that the state has values."""
    full = tree.map(lambda p: 0.5 * p + 0.5, example.params)
    return Example(example.params, [full, *example.steps])


@law(on=_after_a_full_step, share=0.4)
def absent_leaves_are_left_alone(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a gradient of None gives an update of None and does not change the state of its parameter.

    With `accumulate`, this holds only for parameters that had no gradient in any step so far.

    >>> import muonfx as mfx
    >>> absent_leaves_are_left_alone(
    ...     mfx.momentum(), {"w": torch.ones(2), "b": None}, [{"w": None, "b": None}]
    ... )
    """
    state = tx.init(params)
    param_names = tree.names(params)
    for step, grads in enumerate(steps):
        steps_to_check = [grads]
        if calls(tx, "accumulate"):  # an earlier gradient may change a state in a step without one
            steps_to_check = steps[: step + 1]
        absent = _names_without_gradient(*steps_to_check)  # of the leaves whose state must stay
        old_state = copied_tree(_state_of(absent, param_names, state))
        structure = tree.flatten(state)[1]
        updates, state = tx.run(grads, state, params)
        if tree.flatten(state)[1] != structure:
            raise Breach(f"step {step}, state", "the structure has changed")
        _require_updates_where_gradients_are(step, updates, grads, absent)
        new_state = _state_of(absent, param_names, state)
        require_same(f"step {step}, state of None gradients,", new_state, old_state, "before")


def calls(tx: Transform, name: str) -> bool:
    """Return True if a transform, or one that it calls, is of the factory with this name."""
    return any(inner.factory.__name__ == name for inner in within(tx))


def _names_without_gradient(*steps: PyTree) -> set[str]:
    """Return the names of the leaves that are None in all of the given steps' gradients.

    >>> _names_without_gradient({"w": torch.ones(2), "b": None}, {"w": None, "b": None})
    {'b'}
    """
    names = set(tree.names(steps[0]))
    for grads in steps:
        for name, grad in tree.named_leaves(grads):
            if grad is not None:
                names.discard(name)
    return names


def _require_updates_where_gradients_are(
    step: int, updates: PyTree, grads: PyTree, absent: set[str]
) -> None:
    """Raise `Breach` (a failed law) unless each gradient has an update, and each parameter in ``absent`` has None.

    For gradients ``{"w": g, "b": None}`` with "b" in ``absent``, updates ``{"w": u, "b": None}`` are correct.
    """
    # Containers and keys first: only trees of equal structure have leaves that can be paired in order.
    if tree.flatten(updates)[1] != tree.flatten(grads)[1]:
        raise Breach(
            f"step {step}",
            f"updates {updates!r} do not have the structure of the gradients {grads!r}",
        )
    for (name, update), grad in zip(tree.named_leaves(updates), tree.leaves(grads), strict=True):
        if name in absent and update is not None:
            raise Breach(
                f"step {step}, updates {name!r}", f"found {shown(update)}, but the gradient is None"
            )
        # A None gradient outside of `absent` may have an update: `accumulate` returns one of earlier gradients.
        if grad is not None and update is None:
            raise Breach(
                f"step {step}, updates {name!r}", f"found None for the gradient {shown(grad)}"
            )


def _parameter_of(state_name: str, param_names: list[str]) -> str | None:
    """Return the parameter of a state leaf: the longest name of a parameter with which its name ends, or None.

    `muonfx.tree.members.parameters_of` finds no parameter in a dict that has other keys too, such as a step count.

    >>> _parameter_of("trace.layers.0.w", ["w", "layers.0.w"])
    'layers.0.w'
    """
    longest = ""
    for name in param_names:
        # With a dot before both, ".trace.new" does not end with ".w".
        is_ending = f".{state_name}".endswith(f".{name}")
        if is_ending and len(name) > len(longest):
            longest = name
    return longest or None


def _state_of(selected: set[str], param_names: list[str], state: PyTree) -> dict[str, object]:
    """Return the leaves of a state, by name, that belong to selected parameters. ``param_names`` are all parameters.

    A leaf such as a count of steps, which belongs to no parameter, is left out.

    >>> _state_of(
    ...     {"w"}, ["w", "b"], {"count": 7, "mu": {"w": 1.0, "b": 2.0}, "nu": {"w": 3.0, "b": 4.0}}
    ... )
    {'mu.w': 1.0, 'nu.w': 3.0}
    """
    leaf_of: dict[str, object] = {}
    for name, leaf in tree.named_leaves(state):
        if _parameter_of(name, param_names) in selected:
            leaf_of[name] = leaf
    return leaf_of


def _also_in_every_dtype(example: Example) -> list[Example]:
    """Return an example, and four copies with mixed dtypes: each leaf has another of the four `DTYPES` in each."""
    examples = [example]
    for shift in range(len(DTYPES)):  # 0: float32 and float64, 1: float64 and bfloat16, and so on
        examples.append(example.dense().map_trees(functools.partial(in_mixed_dtypes, shift)))
    return examples


@law(on=_also_in_every_dtype, share=0.2)
def state_keeps_its_structure_and_dtypes(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that at every step the state has the structure, shapes, dtypes and devices that `init` gave it.

    This is also checked with trees that mix float32, float64, bfloat16 and float16.

    >>> import muonfx as mfx
    >>> params, steps = mfx.testing.Example.of({"w": (2,)}, dtype=torch.bfloat16)
    >>> state_keeps_its_structure_and_dtypes(mfx.momentum(dtype=torch.float32), params, steps)
    """
    initial_state = tx.init(params)
    state = initial_state
    # Each later state is compared with the first, not with the one before it.
    for step, grads in enumerate(steps):
        _, state = tx.run(grads, state, params)
        require_spec(f"step {step}, state", state, initial_state, "init's")


def _also_with_gradients_in_other_dtypes(example: Example) -> list[Example]:
    """Return the examples of `_also_in_every_dtype`, and one whose gradients have other dtypes than the parameters."""
    dense = example.dense()
    steps = [in_mixed_dtypes(1, grads) for grads in dense.steps]
    return [*_also_in_every_dtype(example), dense._replace(steps=steps)]


@law(on=_also_with_gradients_in_other_dtypes, share=0.2)
def updates_look_like_the_gradients(
    tx: Transform,
    params: PyTree,
    steps: list[PyTree],
    *,
    updates_dtype: torch.dtype | Callable[[torch.dtype], torch.dtype] | None = None,
) -> None:
    """Check that updates have the structure, shapes, dtypes and devices of the gradients, also if some are None.

    This is also checked with trees that mix float32, float64, bfloat16 and float16, and with gradients of other dtypes
    than their parameters.

    Args:
        tx: the transform.
        params: the parameters.
        steps: the gradients of each step.
        updates_dtype: the documented dtype of the updates, if it is not the dtype of the gradients; or a function from
            the dtype of a parameter to the dtype of its update.

    >>> import muonfx as mfx
    >>> updates_look_like_the_gradients(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """

    def expected_update(grad: Tensor, param: Tensor) -> Tensor:
        """Return a tensor with the shape, dtype and device that the update of a gradient must have."""
        if updates_dtype is None:
            return grad
        if callable(updates_dtype):
            return grad.detach().to(updates_dtype(param.dtype))
        return grad.detach().to(updates_dtype)

    for step, updates in enumerate(updates_of(tx, params, steps)):
        expected = tree.map(expected_update, steps[step], params)
        require_spec(f"step {step}, updates", updates, expected, "the gradients")


@law(share=0.05)
def empty_trees_are_taken(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that the updates equal the gradients if the tree has no leaves, or only leaves that are None.

    >>> import muonfx as mfx
    >>> empty_trees_are_taken(mfx.momentum(), {}, [])
    """
    # A dict without items, a tuple without items, and the usual tree with None in place of each tensor.
    for empty in ({}, (), tree.map(lambda leaf: None, params)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # labels without parameters are expected here
            state = tx.init(empty)
        for _ in range(2):  # the second step starts from a state that a step has returned
            updates, state = tx.update(empty, state, empty)
            require_same("updates", updates, empty, "the empty gradients")


@law(share=0.3)
def init_on_meta_gives_the_same_spec(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that `init` on the meta device returns meta tensors in the usual structure, shapes and dtypes.

    Meta tensors have no memory, so the form of a state can be found without allocating it.

    >>> import muonfx as mfx
    >>> init_on_meta_gives_the_same_spec(
    ...     mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    state = tx.init(on_meta(params))
    # Both states are moved to the meta device, so that only structures, shapes and dtypes are compared.
    require_spec(
        "state of meta parameters", on_meta(state), on_meta(tx.init(params)), "init's on real ones"
    )
    if not list(tree.tensors(params)):  # no parameter shows that the device is meta
        return
    # A count without dims may have the usual device too; all other leaves take no memory.
    for name, leaf in tree.named_leaves(state):
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.device.type != "meta":
            raise Breach(
                f"state {name!r}",
                f"found {shown(leaf)} in memory, for parameters on the meta device",
            )


@law(share=0.3)
def init_returns_a_state_that_needs_no_grad(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that no tensor of the initial state requires grad, even if the parameters do.

    >>> import muonfx as mfx
    >>> from muonfx.testing import Example
    >>> init_returns_a_state_that_needs_no_grad(
    ...     mfx.master_params(mfx.scale(-1.0)), *Example.of({"w": (2, 3)})
    ... )
    """
    state = tx.init(tree.map(lambda p: p.detach().requires_grad_(), params))
    require_no_grad(
        "state",
        state,
        "every step would keep the graphs of all earlier steps; muonfx.transforms.copies detaches copies",
    )


def require_no_grad(what: str, values: PyTree, reason: str) -> None:
    """Raise `Breach` (a failed law) if a tensor of a tree requires grad: torch then records all that uses it.

    ``what`` names the tree and ``reason`` the harm in the message: "state 'w': requires grad: every step would ...".
    """
    for name, leaf in tree.named_leaves(values):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise Breach(f"{what} {name!r}", f"requires grad: {reason}")
