"""The decorator `matrixwise`, which makes transforms from the arithmetic of a stack of matrices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from math import prod
from typing import Any, ParamSpec, overload

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, InitAndUpdate, Locality, MatrixWork, Transform, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.patterns import NamePatterns
from muonfx.core.transform import LeafCost, Position, arguments_at
from muonfx.internal.arguments import plain_fields
from muonfx.internal.tracing import as_start
from muonfx.transforms.leafwise import (
    Slot,
    WideStateDtype,
    init_slot,
    params_for,
    read_slot,
    state_and_step,
    state_dtype,
    update_and_state,
    write_slot,
)
from muonfx.transforms.matrices import Matrices, MatrixView
from muonfx.transforms.matrix_pattern import parse
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

StateAndMatrixStep = tuple[PyTree, Callable[..., tuple[Tensor, PyTree]]]
"""The pair (state, step) that a constructor decorated with `matrixwise` returns."""

MatrixCost = Callable[[int, int, torch.dtype], float]
"""A function ``(rows, columns, dtype) -> operations`` for one matrix; a multiply-add is two operations."""

P = ParamSpec("P")


def matrix_locality(*_: object, view: MatrixView, **__: object) -> Locality:
    """Return the locality MATRIX if ``view`` takes every matrix from the last two dims of a parameter, else LEAF."""
    if isinstance(view.pattern, str) and parse(view.pattern).is_stack:
        return Locality.MATRIX
    return Locality.LEAF


def on_stacks(
    tx: Transform, shapes: Mapping[str, tuple[int, ...]], *, only_matrices: bool = False
) -> tuple[Transform, dict[str, tuple[int, int]]]:
    """Divide parameters into units, such as the heads of a weight, which a transform can update one by one.

    A unit has whole matrices, and all units of a parameter have one shape. So a rank that has a shard of a parameter
    can update the units in its shard. This is the option ``on_stacks`` of `MatrixWork`.

    Args:
        tx: a transform with an argument ``view``.
        shapes: the shape of each parameter, by name.
        only_matrices: leave out parameters whose units are not single matrices.

    Returns:
        A transform for parameters reshaped to (units, rows, columns), and a dict from the names of the parameters that
        have units to (rows, columns).

    >>> import muonfx as mfx
    >>> tx = mfx.orthogonalize(view=MatrixView("(heads=8 out) in -> heads out in"))
    >>> tx_of_heads, shapes = on_stacks(tx, {"q": (64, 16)})
    >>> (
    ...     tx_of_heads.arguments["view"].text("q"),
    ...     shapes,
    ... )  # for q.reshape(8, 8, 16), or for some of its 8 heads
    ('units out=8 in=16 -> units out in', {'q': (8, 16)})
    """
    view: MatrixView = tx.arguments["view"]
    pattern_of_units: dict[str, str] = {}  # from a glob that matches one parameter
    shape_of_units: dict[str, tuple[int, int]] = {}
    for name, pattern in zip(shapes, view.of(list(shapes)), strict=True):
        if pattern is None:  # the whole parameter is one matrix
            continue
        units = pattern.independent(shapes[name])
        if units is None or (only_matrices and not units.are_matrices):
            continue
        # Escaped, since a name may contain "*" or "[".
        pattern_of_units[escape(name)] = units.pattern
        shape_of_units[name] = units.shape
    if not shape_of_units:  # every parameter must be updated as a whole
        return tx, {}
    # Parameters without units keep their pattern.
    new_view = MatrixView(pattern_of_units).extended(view.pattern)
    return tx.replace(view=new_view), shape_of_units


def name_patterns(tx: Transform) -> list[NamePatterns]:
    """Return the globs over parameter names in a transform's ``view``, for the option ``name_patterns``."""
    view = tx.arguments["view"]
    if not isinstance(view.pattern, Mapping) or not view.pattern:
        return []
    globs = tuple((glob,) for glob in view.pattern)
    return [NamePatterns("view", globs, first_counts=True, optional=view.optional_globs)]


def cost_of_matrices(view: MatrixView, of_matrix: MatrixCost) -> LeafCost:
    """Return a function for the cost of a parameter: the cost of one of its matrices, summed over all of them.

    The function is the option ``cost`` of `MatrixWork`, by which parameters are distributed over ranks.

    Args:
        view: divides a parameter into matrices.
        of_matrix: from the rows, columns and dtype of one matrix to its cost, in operations.

    >>> view = MatrixView("(heads=8 d) in -> heads d in")
    >>> cost = cost_of_matrices(view, lambda rows, columns, dtype: rows * columns**2)
    >>> cost("q", (64, 10), torch.float32)  # 8 heads of shape (8, 10)
    6400.0
    """

    def cost(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> float:
        leaf = torch.empty(shape, device="meta")  # has a shape, but no memory
        total = 0.0
        for stack in Matrices(view, {name: leaf}).stacks:
            rows, columns = stack.shape[-2:]
            number_of_matrices = prod(stack.shape[:-2])  # of all batch dims; 1 without any
            total += number_of_matrices * of_matrix(rows, columns, dtype)
        return total

    return cost


def _one_zero(matrices: Tensor) -> Tensor:
    return matrices.new_zeros((*matrices.shape[:-2], 1, 1))


def _shared_dims(stacks: Sequence[Tensor]) -> int:
    """Return the number of batch dims if all stacks of matrices have the same batch dims, else 0."""
    batch_shapes = {stack.shape[:-2] for stack in stacks}
    if len(batch_shapes) > 1:
        return 0
    return len(batch_shapes.pop())


@plain_fields
@dataclass(frozen=True)
class MatrixSlot:
    """Declares one tensor for each matrix, such as a norm or a basis, as a part of a `matrixwise` transform's state.

    If a parameter is one stack of matrices (..., rows, columns), the state is stored as ``start`` returns it. If the
    view divides a parameter into matrices of several shapes, their states are flattened and concatenated:
    (..., elements). The dtype is fixed at `init` and never changes.

    Args:
        start: a function from a parameter's matrices (..., rows, columns) to their initial state, a tensor with the
            same batch dims and any last two dims. The state's shape must depend on the shape of the matrices only. The
            default is one zero for each matrix, (..., 1, 1).
        dtype: the storage dtype. "auto" is float32, or float64 for float64 parameters; None is the dtype of each
            parameter.
        saturates: whether a value beyond the range of the storage dtype is stored as the largest finite number instead
            of infinity.

    Raises:
        TypeError: the dtype is not floating point, or another argument has another type.
        ValueError: the dtype is a string other than "auto".

    >>> import muonfx as mfx
    >>> mfx.MatrixSlot(dtype=torch.bfloat16).dtype
    torch.bfloat16
    """

    start: Callable[[Tensor], Tensor] = _one_zero
    dtype: WideStateDtype = "auto"
    saturates: bool = False

    def __post_init__(self) -> None:
        checks.state_dtype("dtype", self.dtype)

    def split(self, stored: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Divide the stored state of one parameter: return a list with the state of each stack of its matrices.

        Take 8 heads with a key and a value each, whose states have the shapes (8, 3, 3) and (8, 2, 2). They are stored
        as one tensor of shape (8, 9 + 4), which is divided again here.
        """
        if len(matrices) == 1:  # the state of a single stack is stored as it is
            return [stored]
        batch_dims = _shared_dims(matrices)  # 1: the dim of the heads
        shapes = [self._shape_of_state(stack) for stack in matrices]
        # [9, 4]: all dims after the batch dims were flattened
        lengths = [prod(shape[batch_dims:]) for shape in shapes]
        flat_states = stored.split(lengths, dim=-1)
        return list(map(torch.reshape, flat_states, shapes))

    def _shape_of_state(self, stack: Tensor) -> torch.Size:
        """Return the shape of the state of a stack of matrices, computed on the meta device."""
        meta_stack = stack.new_empty(stack.shape, device="meta")
        return self.start(meta_stack).shape

    def rounded(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        """Convert a state to its storage dtype. If the slot ``saturates``, clamp it to the dtype's range first."""
        limit = torch.finfo(dtype).max
        if self.saturates and torch.finfo(state.dtype).max > limit:
            state = state.clamp(-limit, limit)
        return state.to(dtype)

    def join(self, states: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
        """Return the state to store for one parameter from the states of its stacks of matrices; inverts `split`."""
        if len(states) == 1:
            return states[0]
        batch_dims = _shared_dims(matrices)
        flat_states = [state.flatten(batch_dims) for state in states]
        return torch.cat(flat_states, dim=-1)


@overload
def matrixwise(constructor: Callable[P, StateAndMatrixStep], /) -> Callable[P, Transform]: ...


@overload
def matrixwise(
    *,
    reads_params: bool = False,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
    cost: Callable[[Transform, str, torch.dtype], MatrixCost] | None = None,
) -> Callable[[Callable[P, StateAndMatrixStep]], Callable[P, Transform]]: ...


def matrixwise(
    constructor: Callable[..., StateAndMatrixStep] | None = None,
    *,
    reads_params: bool = False,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
    cost: Callable[[Transform, str, torch.dtype], MatrixCost] | None = None,
) -> Any:
    """Turn a function into a factory of transforms that apply one computation to every matrix.

    The decorated function, called the constructor, has a keyword-only argument ``view``, a `MatrixView`, which divides
    each parameter into matrices. It returns a pair (state, step). The state is a NamedTuple, dict or tuple, and
    declares the parts of the transform's state: a `Slot` is one tensor for each parameter, which the step receives as
    matrices, and a `MatrixSlot` is a tensor of another shape for each matrix. A transform without state has
    ``EmptyState()``.

    The step is ``step(u, s) -> (u, s)``, or ``step(u, s, p)`` with ``reads_params=True``. It receives the updates of a
    stack of matrices (..., rows, columns), their state as it was declared, and their parameters. It returns new
    tensors. A stack may contain small matrices of several parameters, so the step must treat each matrix separately.
    All operands have one dtype: the widest among them, at least fp32. The results are rounded to the update's dtype and
    to the storage dtypes of the state.

    The state has no `StepCount` and no `Number`, which `muonfx.leafwise` allows: the step runs separately for each
    stack, and would return several values of a number that all leaves share. A `MatrixSlot` has a number per matrix.

    The transform checks that parameters are matrices, divides them by the view, skips gradients of None and empty
    matrices, and joins the results. Use `muonfx.leafwise` for elementwise work and `muonfx.transform` for the rest.

    Args:
        constructor: the decorated function. It validates its arguments, and its name becomes the transform's name.
        reads_params: whether the step receives the parameters. ``Slot(start="params")`` requires it too.
        position: the place in a chain relative to the learning rate, as for `muonfx.transform`.
        short_names: a dict from a key of torch's parameter groups to the arguments that it sets, such as
            ``{"momentum": "decay"}``, as for `muonfx.transform`.
        cost: ``(transform, device, dtype) -> function``, as for `MatrixWork`. The returned function maps the
            rows, columns and dtype of one matrix to the number of operations of its update.

    Returns:
        A factory with the constructor's name, signature and docstring. Its transforms have locality MATRIX if the view
        takes matrices from the last two dims, else LEAF.

    Raises:
        TypeError: the constructor has no argument ``view``, or one that is not keyword-only, or does not return a state
            of slots and a step.
        ValueError: at `init`, a leaf is not a matrix or does not fit the view; at `update`, ``params`` is missing
            although the step reads the parameters, or the step returns an update with another shape.

    Example:
        >>> import muonfx as mfx
        >>> @mfx.matrixwise(position="sets_size")
        ... def divide_by_average_norm(
        ...     decay: float = 0.9, *, view: mfx.MatrixView = mfx.MatrixView()
        ... ):
        ...     def step(u, s):
        ...         norm = decay * s["norm"] + (1 - decay) * torch.linalg.matrix_norm(
        ...             u, keepdim=True
        ...         )
        ...         return u / norm, {"norm": norm}
        ...
        ...     return {"norm": mfx.MatrixSlot()}, step
        >>> tx = divide_by_average_norm(0.5, view=mfx.MatrixView("(part=2 out) in -> part out in"))
        >>> params = {"attn.qkv": torch.zeros(2, 2)}
        >>> tx.update({"attn.qkv": torch.tensor([[3.0, 4.0], [0.0, 1.0]])}, tx.init(params))[0]
        {'attn.qkv': tensor([[1.2000, 1.6000],
                [0.0000, 2.0000]])}
    """
    if constructor is None:  # written with options: @matrixwise(position="last")
        return functools.partial(
            matrixwise,
            reads_params=reads_params,
            position=position,
            short_names=short_names,
            cost=cost,
        )
    name = constructor.__name__
    default_view = _default_view(constructor)

    @functools.wraps(constructor)
    def init_and_update(
        *args: object, view: MatrixView = default_view, **kwargs: object
    ) -> InitAndUpdate:
        """Call the constructor, and return the functions of the transform that its state and step describe."""
        returned = constructor(*args, view=view, **kwargs)
        state, step = state_and_step(
            f"{name}: a matrixwise", returned, (Slot, MatrixSlot), reads_params
        )
        formula = _MatrixFormula(name, view, state, step, reads_params)
        return formula.init, formula.update

    # The option is for one matrix, and `transform` requires the cost of a whole parameter.
    cost_of_leaf = None
    if cost is not None:
        cost_of_leaf = functools.partial(_cost_of_leaf, cost)
    as_transform = transform(
        locality=matrix_locality,
        reads_params=reads_params,
        # How a parameter is divided into parts for several ranks, and how long a rank takes for it.
        matrices=MatrixWork(
            on_stacks=functools.partial(_on_stacks, constructor), cost=cost_of_leaf
        ),
        name_patterns=name_patterns,
        position=position,
        short_names=short_names,
    )
    return as_transform(init_and_update)


def _default_view(constructor: Callable[..., StateAndMatrixStep]) -> MatrixView:
    """Return the default of a constructor's argument ``view``, by which a parameter is divided into matrices.

    For ``def f(decay, *, view: MatrixView = MatrixView())``, it is ``MatrixView()``. Raise TypeError without such an
    argument.
    """
    argument = inspect.signature(constructor).parameters.get("view")
    if argument is None or not isinstance(argument.default, MatrixView):
        raise TypeError(
            f"matrixwise: {constructor.__name__} has no argument view; give it a keyword argument "
            "view: MatrixView = MatrixView(), by which callers choose the matrices of a parameter"
        )
    if argument.kind is not inspect.Parameter.KEYWORD_ONLY:
        raise TypeError(
            f"matrixwise: found an argument view of {constructor.__name__} that may be passed by position, expected a "
            "keyword-only argument: write *, view: MatrixView = MatrixView()"
        )
    return argument.default


def _on_stacks(
    constructor: Callable[..., StateAndMatrixStep],
    tx: Transform,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Transform, dict[str, tuple[int, int]]]:
    """Divide parameters into units, as `on_stacks` does, for a transform that `matrixwise` has made.

    ``constructor`` is the decorated function, ``tx`` a transform that it has created, and ``shapes`` the shape of each
    parameter by name.
    """
    # A schedule, such as a decay, is the number of step 0.
    state, _ = constructor(**arguments_at(tx, 0))
    has_matrix_state = any(isinstance(slot, MatrixSlot) for slot in tree.leaves(state))
    # A matrix state of a stack of stacks has more dims than the state of a stack, so only plain stacks qualify.
    return on_stacks(tx, shapes, only_matrices=has_matrix_state)


def _cost_of_leaf(
    cost: Callable[[Transform, str, torch.dtype], MatrixCost],
    tx: Transform,
    device: str,
    dtype: torch.dtype,
) -> LeafCost:
    """Return the function of `cost_of_matrices` for a transform, from the option ``cost`` of `matrixwise`."""
    return cost_of_matrices(tx.arguments["view"], cost(tx, device, dtype))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix product ``a @ b``, whose bits on a CPU do not depend on the number of matrices in a batch."""
    if b.shape[-1] > 1:
        return a @ b
    # For a single column, torch uses another kernel for one matrix than for several.
    return (a.contiguous() * b.mT).sum(-1, keepdim=True)


def init_matrix_slot(slot: MatrixSlot, matrices: Matrices) -> PyTree:
    """Return the initial state tree for the matrices of the parameters, such as a norm of zero for each matrix.

    A parameter is divided into one stack of matrices or several, such as query and key. Each stack has a state, and the
    states of a parameter are joined into one tensor.
    """
    leaves = list(map(as_start, matrices.leaves))  # detached values, from which the state may start
    tensors: list[Tensor] = []
    for leaf, stacks in zip(leaves, matrices.grouped(matrices.split(leaves)), strict=True):
        # Zeros of shape (8, 1, 1), for 8 heads.
        states = [slot.start(stack.contiguous()) for stack in stacks]
        tensors.append(slot.rounded(slot.join(states, stacks), state_dtype(slot.dtype, leaf.dtype)))
    return matrices.present.fill(tensors)


def read_matrix_slot(slot: MatrixSlot, matrices: Matrices, old_tree: PyTree) -> list[Tensor]:
    """Return the state of each stack of matrices, for the leaves that have a gradient."""
    states: list[Tensor] = []
    stored_states = matrices.present.pick(old_tree)
    for stored, stacks in zip(stored_states, matrices.grouped(matrices.stacks), strict=True):
        states += slot.split(stored, stacks)
    return states


def write_matrix_slot(
    slot: MatrixSlot, matrices: Matrices, states: list[Tensor], old_tree: PyTree
) -> PyTree:
    """Return a state tree with new states for the leaves that have a gradient, in the storage dtype."""
    old_tensors = matrices.present.pick(old_tree)
    joined = map(slot.join, matrices.grouped(states), matrices.grouped(matrices.stacks))
    tensors = [slot.rounded(new, old.dtype) for new, old in zip(joined, old_tensors, strict=True)]
    return matrices.present.fill(tensors, old_tree)


class _MatrixFormula:
    """A step and its declared state, which runs the step on stacks of matrices."""

    def __init__(
        self,
        name: str,
        view: MatrixView,
        declared: PyTree,
        step: Callable[..., Any],
        reads_params: bool,
    ) -> None:
        """Store the arguments, and the slots of the state by name.

        Args:
            name: the name of the transform, for errors.
            view: divides a parameter into matrices.
            declared: the state, with a slot in place of each tree: ``{"norm": MatrixSlot()}``.
            step: computes the new update and the new state of a stack of matrices, as ``step(u, {"norm": n})``.
            reads_params: whether the step receives the parameters too.
        """
        self._name = name
        self._view = view
        self._declared = declared
        # {"norm": MatrixSlot()}
        self._slots: dict[str, Slot | MatrixSlot] = dict(tree.named_leaves(declared))
        self._step = step
        self._reads_params = reads_params

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state. Raise an error if a parameter does not fit the view."""
        matrices = Matrices(self._view, params)
        containers = tree.flatten(self._declared)[1]
        trees: list[PyTree] = []
        for name, slot in self._slots.items():
            if isinstance(slot, MatrixSlot):
                trees.append(init_matrix_slot(slot, matrices))
            else:  # a tensor in the shape of each parameter
                trees.append(init_slot(slot, name, params))
        return tree.unflatten(containers, trees)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING
    ) -> tuple[PyTree, PyTree]:
        """Split updates, states and parameters into matrices, run the step on them, and join the results.

        Take the state ``{"norm": MatrixSlot()}`` and two parameters of one matrix each. The operands of the step are
        ``[[u1, u2], [norm1, norm2], [p1, p2]]``, and the outputs are the lists of the new updates and norms.
        """
        # 1. A list of matrices for the updates, for each tree of the state, and for the parameters if they are read.
        matrices = Matrices(self._view, updates)
        containers = tree.flatten(self._declared)[1]  # the NamedTuple, dict or tuple of the state
        old_trees = tree.subtrees(containers, state)
        operands = [matrices.stacks]
        for slot, old_tree in zip(self._slots.values(), old_trees, strict=True):
            operands.append(_read(slot, matrices, old_tree))
        if self._reads_params:
            leaves = matrices.present.pick(params_for(self._name, params))
            operands.append(matrices.split(leaves))

        # 2. Run the step: once for all small matrices of one shape, which are stacked, and once for each large matrix.
        new_updates, *new_states = ew.by_stacks(
            self._run_on_stack, *operands, results=1 + len(self._slots)
        )

        # 3. Join the matrices of each parameter.
        new_trees: list[PyTree] = []
        for slot, states, old_tree in zip(self._slots.values(), new_states, old_trees, strict=True):
            new_trees.append(_written(slot, matrices, states, old_tree))
        return matrices.fill(new_updates), tree.unflatten(containers, new_trees)

    def _run_on_stack(self, *operands: Tensor) -> list[Tensor]:
        """Run the step on one stack of matrices, in fp32 or wider. Return the new update, rounded, and the new states.

        The operands are the update of these matrices, then each state, and then the parameters if the step reads them:
        u, n and p for ``step(u, {"norm": n}, p)``.
        """
        old_values = operands[: 1 + len(self._slots)]  # the update and the states
        old_update = old_values[0]
        if old_update.numel() == 0:  # a matrix without elements has nothing to compute
            return ew.clone(old_values)
        # The step receives all operands in one dtype: the widest of them, at least fp32.
        dtypes = [operand.dtype for operand in operands]
        wide_dtypes = [ew.wide_dtype(*dtypes)] * len(operands)
        wide_operands = ew.cast(operands, wide_dtypes)
        outputs = self._call_step(wide_operands)
        for output, old_value in zip(outputs, old_values, strict=True):
            if output.shape != old_value.shape:
                raise ValueError(
                    f"{self._name}: the step returns shape {tuple(output.shape)}, expected {tuple(old_value.shape)}"
                )

        new_update, *new_states = _separate(outputs, wide_operands)
        # States are rounded when they are written: a quantized dtype rounds a whole leaf, not a matrix.
        return [new_update.to(old_update.dtype), *new_states]

    def _call_step(self, operands: list[Tensor]) -> list[Tensor]:
        """Call the step with operands in a list, and return its outputs as a list: the update and the states.

        For the operands ``[u, n, p]`` and the state ``{"norm": n}``, the call is ``step(u, {"norm": n}, p)``. If it
        returns ``(v, {"norm": m})``, the result is ``[v, m]``.
        """
        update, *states_and_params = operands
        number_of_states = len(self._slots)
        containers = tree.flatten(self._declared)[1]  # the NamedTuple, dict or tuple of the state
        state = tree.unflatten(containers, states_and_params[:number_of_states])
        params = states_and_params[number_of_states:]  # empty, or one stack
        returned = self._step(update, state, *params)
        new_update, new_state = update_and_state(self._name, returned)
        new_states = tree.subtrees(containers, new_state)
        return [new_update, *new_states]


def _read(slot: Slot | MatrixSlot, matrices: Matrices, old_tree: PyTree) -> list[Tensor]:
    """Return the state of each stack of matrices, from the state tree of a slot."""
    if isinstance(slot, MatrixSlot):
        return read_matrix_slot(slot, matrices, old_tree)
    return matrices.split(read_slot(slot, matrices.present, old_tree))


def _written(
    slot: Slot | MatrixSlot, matrices: Matrices, states: list[Tensor], old_tree: PyTree
) -> PyTree:
    """Return the state tree of a slot with a new state for each stack of matrices."""
    if isinstance(slot, MatrixSlot):
        return write_matrix_slot(slot, matrices, states, old_tree)
    return write_slot(slot, matrices.present, matrices.join(states), old_tree)


def _separate(outputs: list[Tensor], operands: list[Tensor]) -> list[Tensor]:
    """Return the outputs of a step, with a copy of each that is an operand or an earlier output too.

    The transforms after this one may overwrite its updates, and must not change its state. In ``return m, {"trace":
    m}``, the update and the state are one tensor, and the state becomes a copy.
    """
    separate_outputs: list[Tensor] = []
    for index, output in enumerate(outputs):
        earlier_tensors = [*operands, *outputs[:index]]
        if any(output is tensor for tensor in earlier_tensors):
            output = output.clone()
        separate_outputs.append(output)
    return separate_outputs
