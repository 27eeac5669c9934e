"""Laws of numbers: NaN and infinities, zeros, large and small magnitudes, narrow dtypes, and counts of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from muonfx import tree
from muonfx.compact import QuantizedDtype
from muonfx.core import Locality, Transform
from muonfx.core.transform import within
from muonfx.testing.examples import (
    Example,
    History,
    copied_tree,
    history,
    map_some,
    scaled,
    updates_of,
)
from muonfx.testing.law import law
from muonfx.testing.laws.locality import wider_than
from muonfx.testing.laws.structure import calls
from muonfx.testing.violation import (
    TOLERANCES,
    Breach,
    is_close,
    require_close,
    shown,
    tolerance_of,
    values_within,
    widened,
)
from muonfx.tree import PyTree
from muonfx.tree.elementwise import wide_dtype


def _filled(example: Example) -> Example:
    """Return the example without None, in contiguous memory, with four steps."""
    return example.contiguous().prolonged(4)


def _index_to_replace(leaf: Tensor) -> int:
    """Return the index of the element that `_with_element` replaces: the middle of the first matrix.

    It counts the elements of the flattened leaf: 2 for a leaf of shape (2, 2), and for one of shape (7, 2, 2) too.
    """
    return math.prod(leaf.shape[-2:]) // 2


def _with_element(element: float, grad: Tensor) -> Tensor:
    """Return a gradient in which one element is replaced, in the middle of its first matrix.

    >>> _with_element(9.0, torch.zeros(2, 2))
    tensor([[0., 0.],
            [9., 0.]])
    """
    changed = grad.clone()
    if changed.numel():  # an empty tensor has no element to replace
        changed.view(-1)[_index_to_replace(changed)] = element
    return changed


def _independent_part(locality: Locality, update: Tensor) -> Tensor:
    """Return the part of an update that must not depend on the element that `_with_element` replaces in its gradient.

    The locality is the part of the tree on which an element of the update depends.

    >>> _independent_part(
    ...     Locality.ELEMENT, torch.arange(4.0).reshape(2, 2)
    ... )  # without the element 2
    tensor([0., 1., 3.])
    """
    if locality is Locality.ELEMENT:  # all elements but the replaced one
        elements = update.reshape(-1)
        index = _index_to_replace(update)
        return torch.cat([elements[:index], elements[index + 1 :]])
    # All matrices but the first, in which it is replaced.
    if locality is Locality.MATRIX and update.ndim >= 3:
        matrices = update.reshape(-1, *update.shape[-2:])
        return matrices[1:]
    return update.new_zeros(0)  # all elements may depend on it


@law(on=_filled, unless=wider_than(Locality.LEAF), share=0.1)
def a_nonfinite_gradient_changes_no_other_leaf(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that NaN or infinity in a gradient changes the updates of no other leaf, matrix or element.

    The declared `Locality` determines which updates may change. For LEAF, for example, it is all updates of the leaf,
    and for ELEMENT only that of the same element. Transforms that read the whole tree are left out.

    >>> import muonfx as mfx
    >>> params, steps = mfx.testing.Example.of({"w": (2, 3), "b": (3,)})
    >>> a_nonfinite_gradient_changes_no_other_leaf(mfx.momentum(), params, steps)
    """
    usual_updates = updates_of(tx, params, steps)
    tolerance = tolerance_of(tx, usual_updates, params)
    all_leaves = set(range(len(tree.leaves(params))))  # by their numbers in the tree
    # A fault is in every leaf: other elements and matrices of a leaf keep their updates, as far as declared.
    cases = [all_leaves]
    # Then a fault is in every leaf but one, which keeps all its updates.
    cases += [all_leaves - {number} for number in all_leaves]
    for faulty_leaves in cases:
        expected = _independent_parts(tx.locality, usual_updates, faulty_leaves)
        for fault in ("nan", "inf"):
            updates_by_step = _updates_after(fault, faulty_leaves, tx, params, steps)
            results = _independent_parts(tx.locality, updates_by_step, faulty_leaves)
            what = f"after {fault} in the gradients of {_names_of(faulty_leaves, params)}, updates by step"
            require_close(what, results, expected, "without it", tolerance)


def _independent_parts(
    locality: Locality, updates_by_step: list[PyTree], faulty_leaves: Collection[int]
) -> list[PyTree]:
    """Return the updates of each step with only the `_independent_part` of each faulty leaf; other leaves stay whole.

    For the locality LEAF, nothing remains of a faulty leaf: {"w": u, "b": v} becomes {"w": an empty tensor, "b": v}.
    """

    def part_of(update: Tensor) -> Tensor:
        return _independent_part(locality, update)

    return [map_some(part_of, faulty_leaves, updates) for updates in updates_by_step]


def _names_of(numbers: Collection[int], params: PyTree) -> list[str]:
    """Return the names of the leaves with the given numbers in a tree."""
    names = tree.names(params)
    return [names[number] for number in sorted(numbers)]


_LARGE_ELEMENTS = {torch.float32: 1e30, torch.float64: 1e300}
"""Large elements, by the dtype of the computation: sums of a few are finite, their squares are infinite."""


def _with_large_element(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient in which one element is 1e30, or 1e300 in float64.

    No number of float16 is large enough. So the gradient is converted to the dtype in which its update is computed,
    which is at least float32 and no narrower than the dtype of the parameter.

    >>> _with_large_element(
    ...     torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    ... )
    tensor([1.0000e+30])
    """
    dtype = wide_dtype(grad.dtype, param.dtype)
    return _with_element(_LARGE_ELEMENTS[dtype], grad.to(dtype))


def _with_another_element(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient in which one element has the other sign and a larger magnitude."""
    old_element = float(grad.view(-1)[_index_to_replace(grad)])
    return _with_element(-2.0 * old_element - 1.0, grad)


_FAULTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nan": lambda grad, param: _with_element(math.nan, grad),
    "inf": lambda grad, param: _with_element(math.inf, grad),
    "a large element": _with_large_element,
    "another element": _with_another_element,
}
"""For the name of a fault in messages, a function of a gradient and its parameter that puts it into the gradient."""


def _updates_after(
    fault: str, faulty_leaves: Collection[int], tx: Transform, params: PyTree, steps: list[PyTree]
) -> list[PyTree]:
    """Return the updates of each step with one of the `_FAULTS` in the first gradients of leaves, by their numbers."""
    param_leaves = tree.leaves(params)
    faulty_grads, treedef = tree.flatten(steps[0])
    for number in faulty_leaves:
        faulty_grads[number] = _FAULTS[fault](faulty_grads[number], param_leaves[number])
    names = _names_of(faulty_leaves, params)
    with _add_note_to_errors(
        f"after {fault} in the gradients of {names} at step 0, which the law puts in"
    ):
        return updates_of(tx, params, [tree.unflatten(treedef, faulty_grads), *steps[1:]])


@contextmanager
def _add_note_to_errors(change: str) -> Generator[None]:
    """Add a note to an error in the block: how the law has changed the example, which the message shows unchanged."""
    try:
        yield
    except Exception as error:
        error.add_note(change)
        raise


def _skips_nonfinite(tx: Transform) -> str | None:
    return (
        "skip_nonfinite leaves out nonfinite gradients by design"
        if calls(tx, "skip_nonfinite")
        else None
    )


@law(on=_filled, unless=_skips_nonfinite, share=0.1)
def a_nonfinite_gradient_stays_visible(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that NaN in a gradient gives nonfinite updates of its leaf, until the updates are the usual ones again.

    A transform that returns zeros instead would hide the fault, and the run would go on without training. An infinity
    may also act as a large number does: `clip_by_value` limits both. Leaves whose gradients do not change their
    updates, as in `set_to_zero`, are left out.

    >>> import muonfx as mfx
    >>> a_nonfinite_gradient_stays_visible(mfx.momentum(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    # Only these leaves, given by their numbers in the tree, have an element that can be replaced by NaN.
    nonempty = [number for number, leaf in enumerate(tree.leaves(params)) if leaf.numel()]
    usual_updates = updates_of(tx, params, steps)
    if tx.locality is not Locality.TREE:
        _check_faults(tx, params, steps, usual_updates, nonempty)
        return
    # The fault of a leaf spreads to others, so only one leaf has a fault at a time.
    for number in nonempty:
        _check_faults(tx, params, steps, usual_updates, [number])


def _check_faults(
    tx: Transform,
    params: PyTree,
    steps: list[PyTree],
    usual_updates: list[PyTree],
    faulty_leaves: list[int],
) -> None:
    """Raise `Breach` (a failed law) if updates hide NaN or infinity in the first gradients of some leaves.

    NaN must give nonfinite updates. So must infinity, unless it gives the updates of a large number, as in
    `clip_by_value`. A leaf whose updates do not depend on its gradient is left out.

    ``faulty_leaves`` are the numbers of these leaves in the tree; ``usual_updates`` are the updates without a fault.
    """
    # 1. The updates of each step, if one element of each leaf is NaN, infinity, a large number or another number.
    updates_after: dict[str, list[PyTree]] = {}
    for fault in _FAULTS:
        updates_after[fault] = _updates_after(fault, faulty_leaves, tx, params, steps)
    # 2. The updates of one leaf after the other.
    tolerance = tolerance_of(tx, usual_updates, params)
    for number, name in zip(faulty_leaves, _names_of(faulty_leaves, params), strict=True):
        usual = _of_leaf(number, usual_updates)
        if _all_close(_of_leaf(number, updates_after["another element"]), usual, tolerance):
            continue  # they do not depend on this gradient
        _require_visible(
            f"NaN in the gradient of {name!r}",
            _of_leaf(number, updates_after["nan"]),
            [usual],
            tolerance,
        )
        infinite = _of_leaf(number, updates_after["inf"])
        large: list[Tensor] = []
        for update, infinite_update in zip(
            _of_leaf(number, updates_after["a large element"]), infinite, strict=True
        ):
            # Its gradient may have had a wider dtype.
            large.append(update.to(infinite_update.dtype))
        acts_as_large_number = _all_close(infinite, large, tolerance)
        if not acts_as_large_number:
            _require_visible(
                f"infinity in the gradient of {name!r}", infinite, [usual, large], tolerance
            )


def _of_leaf(number: int, steps: list[PyTree]) -> list[Tensor]:
    """Return the updates of one leaf at each step."""
    return [tree.leaves(updates)[number] for updates in steps]


def _all_close(results: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    return all(is_close(a, b, tolerance) for a, b in zip(results, expected, strict=True))


def _require_visible(
    cause: str, results: list[Tensor], usual_runs: list[list[Tensor]], tolerance: float
) -> None:
    """Raise `Breach` (a failed law) unless one update is nonfinite, and each finite update is a usual one.

    ``cause`` names the fault, "NaN in the gradient of 'w'". ``results`` are the updates of one leaf by step, and so is
    each of the ``usual_runs``. Updates NaN, NaN and then a usual one are correct; zero, zero, zero hide the fault.
    """
    are_finite = [bool(update.isfinite().all()) for update in results]
    if all(are_finite):
        raise Breach(
            None, f"{cause} gives finite updates, first {shown(results[0])}: the fault is hidden"
        )
    for step, update in enumerate(results):
        if not are_finite[step]:  # the fault is visible
            continue
        is_usual = any(is_close(update, updates[step], tolerance) for updates in usual_runs)
        if not is_usual:  # such as zeros in place of NaN
            raise Breach(
                f"step {step}",
                f"after {cause} at step 0, the update is {shown(update)}: the fault is hidden",
            )


@law(on=_filled, share=0.15)
def zero_gradients_give_finite_updates(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that updates and states are finite if gradients, or gradients and parameters, are zero.

    A transform that divides by a norm would give NaN here. This is also checked after a usual step, and for leaves
    whose gradients are zero among others.

    >>> import muonfx as mfx
    >>> zero_gradients_give_finite_updates(
    ...     mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    odd = range(1, len(tree.leaves(params)), 2)
    zeros = tree.map(torch.zeros_like, params)
    zero_steps = tree.map(torch.zeros_like, steps)
    # The parameters and the gradients of each step.
    cases: dict[str, tuple[PyTree, list[PyTree]]] = {
        "zero gradients": (params, zero_steps),
        "zero gradients and parameters": (zeros, zero_steps),
        "zero parameters": (zeros, steps),
        "zero gradients after a usual one": (params, [steps[0], *zero_steps[1:]]),
        "zero gradients for every other leaf": (
            params,
            [map_some(torch.zeros_like, odd, grads) for grads in steps],
        ),
    }
    for when, (case_params, case_steps) in cases.items():
        _finite_history(when, tx, case_params, case_steps)


def _finite_history(when: str, tx: Transform, params: PyTree, steps: list[PyTree]) -> History:
    """Return the updates and the state of each step. Raise `Breach` (a failed law) if one of them is not finite.

    ``when`` names the gradients in the message and in errors of the transform: "zero gradients".
    """
    with _add_note_to_errors(f"for {when}"):
        results = history(tx, params, steps)
    for step, result in enumerate(results):
        for name, leaf in tree.named_leaves(result):
            if (
                isinstance(leaf, Tensor)
                and leaf.is_floating_point()
                and not leaf.double().isfinite().all()
            ):
                raise Breach(
                    f"step {step}, (updates, state) {name!r}", f"found {shown(leaf)} for {when}"
                )
    return results


def _in_single(example: Example) -> Example:
    """Return the example in float32, in contiguous memory, with four steps and normal values away from zero."""
    return example.smooth(4).map(lambda leaf: leaf.float())


MAGNITUDES = (1e-18, 1e18)
"""Far below and above the gradients of training; their squares are still numbers of float32."""


@law(on=_in_single, share=0.1)
def large_and_small_gradients_give_finite_updates(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check float32 gradients with largest elements 1e-18 and 1e18: updates are finite, and are not lost to zero.

    Adding small updates to usual parameters may round them away, so for small gradients the parameters are small too.

    >>> import muonfx as mfx
    >>> large_and_small_gradients_give_finite_updates(
    ...     mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    usual_updates = updates_of(tx, params, steps)
    for magnitude in MAGNITUDES:
        when = f"gradients of {magnitude:g}"
        # Never large: adding a normalized update would round it away.
        param_magnitude = min(1.0, magnitude)
        scaled_steps = [_of_magnitude(grads, magnitude) for grads in steps]
        _finite_history(when, tx, params, scaled_steps)
        # The same with scaled parameters, to which small updates can be added.
        when = f"{when}, and parameters of {param_magnitude:g}"
        results = _finite_history(when, tx, _of_magnitude(params, param_magnitude), scaled_steps)
        _require_nonzero(when, [updates for updates, _ in results], usual_updates)


def _require_nonzero(
    when: str, updates_of_steps: list[PyTree], usual_updates: list[PyTree]
) -> None:
    """Raise `Breach` (a failed law) if all elements of an update are zero that usually is not."""
    named_usual = tree.named_leaves(usual_updates)
    for update, (name, usual_update) in zip(
        tree.leaves(updates_of_steps), named_usual, strict=True
    ):
        if usual_update.any() and not update.any():
            raise Breach(f"updates by step {name!r}", f"are zero for {when}")


def _of_magnitude(grads: PyTree, magnitude: float) -> PyTree:
    """Return the gradients with largest elements of the given magnitude."""
    largest = max(
        (float(leaf.abs().max()) for leaf in tree.tensors(grads) if leaf.numel()), default=1.0
    )
    return scaled(grads, magnitude / largest)


SIZES = {torch.float32: (1.0,), torch.bfloat16: (1.0, 1e-4, 1e4), torch.float16: (1.0, 1e-3, 1e2)}
"""Sizes of gradients in each dtype. The squares of the last two are no numbers of float16."""


def _is_narrow(tx: Transform) -> str | None:
    """Return which argument lets a transform compute in a dtype of 16 or 8 bits, or None if there is none.

    ``momentum(dtype=torch.bfloat16)`` is narrow, and so is ``orthogonalize(dtype="auto")``: the matrix products of
    Newton-Schulz iterations may be in bfloat16. Elsewhere "auto" is the dtype of a state, float32 or float64.
    """
    # Any dtype with fewer than 4 bytes, in the arguments of the transform or of a transform inside it.
    for value in values_within(tx):
        if isinstance(value, QuantizedDtype) or (
            isinstance(value, torch.dtype) and value.itemsize < 4
        ):
            return f"its argument {value} is narrow"
    for inner in within(tx):
        is_newton_schulz = "coefficients" in inner.arguments  # `orthogonalize` and `scale_by_dion2`
        if is_newton_schulz and inner.arguments.get("dtype") == "auto":
            return f'the dtype "auto" of {inner.name} may be narrow'
    return None


@law(on=lambda example: example.smooth(4), unless=_is_narrow, share=0.1)
def narrow_gradients_are_computed_in_wider_dtypes(
    tx: Transform, params: PyTree, steps: list[PyTree]
) -> None:
    """Check that gradients in float32, bfloat16 and float16 have the updates that the same values have in float64.

    So squares and sums are not taken in a dtype of 16 bits, in which they overflow or vanish.

    >>> import muonfx as mfx
    >>> narrow_gradients_are_computed_in_wider_dtypes(
    ...     mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)})
    ... )
    """
    params = _cast(params, torch.float32)
    wide_params = _cast(params, torch.float64)
    for dtype, sizes in SIZES.items():
        for size in sizes:
            narrow_steps = _cast(scaled(steps, size), dtype)
            results = updates_of(tx, params, narrow_steps)
            # The same values, which have been rounded before.
            wide_steps = _cast(narrow_steps, torch.float64)
            expected = updates_of(widened(tx), wide_params, wide_steps)
            tolerance = max(tolerance_of(tx, results), TOLERANCES[dtype])
            what = f"updates of {str(dtype).removeprefix('torch.')} gradients of size {size:g}"
            require_close(what, _cast(results, torch.float64), expected, "in float64", tolerance)


def _cast(values: PyTree, dtype: torch.dtype) -> PyTree:
    return tree.map(lambda leaf: leaf.to(dtype), values)


A_LONG_RUN = 10_000_000
"""The number of steps that every counter must be able to hold."""


@law(on=_filled, share=0.1)
def counts_hold_ten_million_steps(tx: Transform, params: PyTree, steps: list[PyTree]) -> None:
    """Check that a leaf of the state that counts steps counts exactly up to ten million.

    A count in float16 stops at 2,048, in bfloat16 at 256, and one in int8 overflows after 127 steps.

    >>> import muonfx as mfx
    >>> counts_hold_ten_million_steps(mfx.scale_by_adam(), *mfx.testing.Example.of({"w": (2, 3)}))
    """
    _, last_state = history(tx, params, steps)[-1]
    # The numbers of the leaves that count.
    counters = _counters(tx.init(params), last_state, len(steps))
    # The state as after ten million steps, without taking them.
    late_state = map_some(_as_after_a_long_run, counters, copied_tree(last_state))
    _, next_state = tx.run(steps[-1], late_state, params)
    steps_taken = A_LONG_RUN + 1
    named_leaves = tree.named_leaves(next_state)  # [("count", tensor(10000001)), ...]
    for number in counters:
        name, counter = named_leaves[number]
        if not bool((counter.double() == steps_taken).all()):
            raise Breach(f"state {name!r}", f"counts {steps_taken:,} steps as {shown(counter)}")


def _as_after_a_long_run(counter: Tensor) -> Tensor:
    return torch.full(counter.shape, A_LONG_RUN, dtype=torch.float64).to(counter.dtype)


def _counters(first_state: PyTree, last_state: PyTree, steps: int) -> list[int]:
    """Return the numbers of the leaves of a state that have grown by the number of steps.

    >>> _counters(
    ...     {"count": torch.tensor(0), "m": torch.tensor(0.0)},
    ...     {"count": torch.tensor(4), "m": torch.ones(())},
    ...     4,
    ... )
    [0]
    """
    counters: list[int] = []
    leaf_pairs = zip(tree.leaves(first_state), tree.leaves(last_state), strict=True)
    for number, (first, last) in enumerate(leaf_pairs):
        if not isinstance(first, Tensor) or not isinstance(last, Tensor) or not first.numel():
            continue
        if torch.equal(last.double(), first.double() + steps):
            counters.append(number)
    return counters
