"""Examples on which laws are checked, and hypothesis strategies that draw trees of tensors and examples.

A strategy draws structures, shapes and a seed; the values are generated from the seed. Therefore examples are built
fast, and shrink to few and small leaves.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from muonfx import tree
from muonfx.testing.violation import shown
from muonfx.tree import PyTree

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The floating dtypes of generated tensors; failing examples shrink to the first."""


class Example(NamedTuple):
    """Parameters and the gradients of some steps, as trees of equal structure. Unpacks as ``params, steps``.

    Attributes:
        params: the tree of parameters.
        steps: a list with the tree of gradients of each optimizer step.

    >>> Example.of({"w": (2, 1)}, steps=1)
    params   'w': float32 (2, 1) [[...], [...]]
    step 0   'w': float32 (2, 1) [[...], [...]]
    """

    params: PyTree
    steps: list[PyTree]

    @classmethod
    def of(
        cls, shapes: PyTree, *, steps: int = 2, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> Example:
        """Build an example from a dict of shapes, with normally distributed values from a seed.

        >>> params, steps = Example.of({"w": (2, 3), "b": ()}, steps=4)
        >>> params["w"].shape, len(steps)
        (torch.Size([2, 3]), 4)
        """
        generator = torch.Generator().manual_seed(seed)

        def random_tree() -> PyTree:
            leaves: dict[str, Tensor] = {}
            for name, shape in shapes.items():
                leaves[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(
                    dtype
                )
            return leaves

        params = random_tree()
        grads_of_steps = [random_tree() for _ in range(steps)]
        return cls(params, grads_of_steps)

    def __repr__(self) -> str:
        """Return a line for each leaf: its name, dtype and shape, and its values if they are few."""
        lines = _lines_of_tree("params", self.params)
        for step, grads in enumerate(self.steps):
            lines += _lines_of_tree(f"step {step}", grads)
        return "\n".join(lines)

    def map(self, function: Any) -> Example:
        """Return the example with a function applied to every parameter and gradient."""
        return self.map_trees(lambda values: tree.map(function, values))

    def map_trees(self, function: Callable[[PyTree], PyTree]) -> Example:
        """Return the example with a function applied to the tree of parameters and to the gradients of each step."""
        return Example(function(self.params), [function(grads) for grads in self.steps])

    def dense(self) -> Example:
        """Return the example with a tensor in place of each parameter or gradient that is None.

        >>> Example({"w": None}, [{"w": None}]).dense()
        params   'w': float32 (2, 2) [[0.25, 0.25], [0.25, 0.25]]
        step 0   'w': float32 (2, 2) [[0.625, 0.625], [0.625, 0.625]]
        """
        params = _filled(self.params, lambda number: torch.full((2, 2), 0.25))
        param_leaves = tree.leaves(params)

        def any_gradient(number: int) -> Tensor:
            return 0.5 * param_leaves[number] + 0.5  # of the parameter's shape and dtype

        return Example(params, [_filled(grads, any_gradient) for grads in self.steps])

    def contiguous(self) -> Example:
        """Return the example in contiguous memory, with a tensor in place of each None."""
        return self.dense().map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format))

    def precise(self) -> Example:
        """Return the example in float64, for comparisons with a small tolerance.

        The tensors are contiguous, and each leaf that is None becomes a tensor.
        """
        return self.contiguous().map(lambda leaf: leaf.detach().double())

    def smooth(self, steps: int = 2) -> Example:
        """Return an example of the same shapes with random float64 values away from zero, where derivatives exist."""
        generator = torch.Generator().manual_seed(0)

        def random_like(leaf: Tensor) -> Tensor:
            drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float64)
            return drawn + drawn.sign() * 0.1  # 0.02 becomes 0.12, and -0.02 becomes -0.12

        shapes = self.dense().params
        params = tree.map(random_like, shapes)
        grads_of_steps = [tree.map(random_like, shapes) for _ in range(steps)]
        return Example(params, grads_of_steps)

    def shortened(self, steps: int = 2) -> Example:
        """Return the example with at most ``steps`` optimizer steps."""
        return Example(self.params, self.steps[:steps])

    def prolonged(self, steps: int) -> Example:
        """Return the example with at least ``steps`` optimizer steps: its gradients are repeated in order.

        >>> len(Example.of({"w": ()}, steps=2).prolonged(5).steps)
        5
        """
        number_of_steps = max(steps, len(self.steps))
        # Three steps become 0, 1, 2, 0 and 1, for example.
        repeated_steps = list(islice(cycle(self.steps), number_of_steps))
        return Example(self.params, repeated_steps)


def _lines_of_tree(title: str, values: PyTree) -> list[str]:
    """Return one line for each leaf of a tree. The first line begins with the title, the others with spaces.

    >>> _lines_of_tree("step 0", {"w": torch.zeros(1), "b": None})
    ["step 0   'b': None", "         'w': float32 (1,) [0.0]"]
    """
    lines: list[str] = []
    for name, leaf in tree.named_leaves(values):
        lines.append(f"{title:9}{name!r}: {shown(leaf)}")
        title = ""  # only in the first line
    return lines or [f"{title:9}no leaves: {values!r}"]


def map_numbered(function: Callable[[int, Any], Any], values: PyTree) -> PyTree:
    """Return a tree of ``function(number, leaf)`` for each leaf, with its number in the tree. None is a leaf too.

    >>> map_numbered(lambda number, leaf: leaf * number, {"a": 5, "b": 5})
    {'a': 0, 'b': 5}
    """
    leaves, treedef = tree.flatten(values)
    for number, leaf in enumerate(leaves):
        leaves[number] = function(number, leaf)
    return tree.unflatten(treedef, leaves)


def _filled(values: PyTree, tensor_of_number: Callable[[int], Tensor]) -> PyTree:
    """Return a tree in which a tensor replaces each leaf that is None. A function returns it for the leaf's number."""
    return map_numbered(
        lambda number, leaf: tensor_of_number(number) if leaf is None else leaf, values
    )


def map_some(function: Callable[[Any], Any], numbers: Collection[int], values: PyTree) -> PyTree:
    """Return a tree in which a function replaces the leaves with the given numbers; the other leaves stay.

    >>> map_some(lambda leaf: -leaf, {1}, {"a": 5, "b": 5})
    {'a': 5, 'b': -5}
    """
    leaves, treedef = tree.flatten(values)
    for number, leaf in enumerate(leaves):
        if number in numbers:
            leaves[number] = function(leaf)
    return tree.unflatten(treedef, leaves)


def without_leaves(numbers: Collection[int], values: PyTree) -> PyTree:
    """Return a tree in which the leaves with the given numbers are None.

    >>> without_leaves({1}, {"a": 5, "b": 5})
    {'a': 5, 'b': None}
    """
    return map_some(lambda leaf: None, numbers, values)


def only_leaf(number: int, values: PyTree) -> PyTree:
    """Return a tree in which all leaves but leaf ``number`` are None."""
    return map_numbered(lambda index, leaf: leaf if index == number else None, values)


def scaled(values: Any, factor: float) -> Any:
    """Return a tree, or the numeric arguments of a transform, with every leaf multiplied by a factor."""
    return tree.map(lambda leaf: leaf * factor, values)


def as_matrix(leaf: Tensor) -> Tensor:
    """Return a scalar or a vector as a matrix with one row, and any other leaf as it is."""
    if leaf.ndim < 2:
        return leaf.reshape(1, -1)
    return leaf


def copied(leaf: Any) -> Any:
    """Return a copy of a tensor with the same strides, gaps included. Other leaves are returned as they are.

    ``clone`` alone would remove gaps: every second column of a matrix becomes a dense matrix.

    >>> copied(torch.zeros(2, 6)[:, ::2]).stride(), torch.zeros(2, 6)[:, ::2].clone().stride()
    ((6, 2), (3, 1))
    """
    if not isinstance(leaf, Tensor):
        return leaf
    # Strides of zero are not kept: several elements would be one, and cannot be written to.
    if leaf.device.type == "meta" or leaf.is_contiguous() or 0 in leaf.stride():
        return leaf.detach().clone()
    copy = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return copy.copy_(leaf.detach())


def copied_tree(values: PyTree) -> PyTree:
    """Return a tree with copies of its tensors, which have the same strides."""
    return tree.map(copied, values)


def on_meta(values: PyTree) -> PyTree:
    """Return a tree of tensors on the meta device with the shapes and dtypes of the given tree."""
    return tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), values)


def accepts_names(tx: Any, params: PyTree) -> bool:
    """Return False if `init` raises an error, because the transform accepts only certain names of parameters."""
    try:
        tx.init(params)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def updates_of(tx: Any, params: PyTree, steps: Sequence[PyTree], **extras: Any) -> list[PyTree]:
    """Run a transform from its initial state through all steps, and return a list with the updates of each step.

    ``extras`` are extra arguments of every update.
    """
    return [updates for updates, _ in history(tx, params, steps, **extras)]


History = list[tuple[PyTree, PyTree]]
"""The updates and the next state of each step."""


def history(
    tx: Any,
    params: PyTree,
    steps: Sequence[PyTree],
    *,
    change_state: Callable[[PyTree], PyTree] = lambda state: state,
    **extras: Any,
) -> History:
    """Run a transform from its initial state through all steps; return a list with a pair (updates, state) per step.

    The parameters stay the same: updates are not added to them. ``change_state`` is applied to the state before each
    step, for example to store it in another layout. ``extras`` are extra arguments of every update.
    """
    state = tx.init(params)
    results: History = []
    for grads in steps:
        updates, state = tx.update(grads, change_state(state), params, **extras)
        results.append((updates, state))
    return results


_SEEDS = st.integers(0, 2**16)


def _of_half_rank(values: Tensor) -> Tensor:
    """Return matrices of half the full rank. Their nonzero singular values fall from 1 to 0.001."""
    # The random values keep their singular vectors; only the singular values are replaced.
    left, _, right = torch.linalg.svd(values, full_matrices=False)
    rank = (left.shape[-1] + 1) // 2  # 2 of 3, and 2 of 4
    singular_values = torch.logspace(0, -3, rank, dtype=values.dtype)
    # left * diag(singular_values) * right, with the first ``rank`` columns of left and rows of right.
    scaled_columns = left[..., :rank] * singular_values
    return scaled_columns @ right[..., :rank, :]


_SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "vector": (6,),
    "empty": (0, 3),
    "row": (1, 4),
    "square": (4, 4),
    "wide": (3, 5),
    "tall": (5, 3),
    "also_tall": (5, 3),
    "stack": (2, 4, 3),
    "kernel": (3, 2, 1, 2),
}
"""A leaf of every kind on which a mistake may depend: each number of dims, each orientation, and a shape twice."""


def standard_examples(ranks: tuple[int, int] = (0, 4)) -> list[Example]:
    """Return examples with a leaf of every kind, which cover what drawn examples may miss.

    The first are the most important ones: float32, bfloat16, noncontiguous leaves, and gradients of None.

    Args:
        ranks: the minimal and maximal number of dims of a leaf.

    >>> params, steps = standard_examples()[0]
    >>> params["tall"].shape, params["tall"].dtype, len(steps)
    (torch.Size([5, 3]), torch.float32, 3)
    """
    min_ndim, max_ndim = ranks
    shapes = {name: shape for name, shape in _SHAPES.items() if min_ndim <= len(shape) <= max_ndim}

    def example_in(dtype: torch.dtype) -> Example:
        # The same values in every dtype, up to rounding.
        return Example.of(shapes, steps=3, seed=1, dtype=dtype)

    plain = example_in(torch.float32)
    params, steps = plain
    steps_in_layouts = [_in_layouts(grads, step) for step, grads in enumerate(steps)]
    steps_with_nones = [_without_a_third(grads, step) for step, grads in enumerate(steps)]
    return [
        plain,
        example_in(torch.bfloat16),
        Example(_in_layouts(params, 0), steps_in_layouts),
        Example(params, steps_with_nones),
        example_in(torch.float16),
        Example(in_mixed_dtypes(0, params), steps),  # float32 gradients, parameters in mixed dtypes
        plain.map_trees(_nested),
        plain.map(_degenerate),
        example_in(torch.float64),
    ]


def _in_layouts(values: dict[str, Tensor], shift: int) -> dict[str, Tensor]:
    """Return a dict of tensors in different layouts; another ``shift`` gives each of them another layout."""
    return map_numbered(
        lambda number, leaf: laid_out(leaf, LAYOUTS[(number + shift) % len(LAYOUTS)]), values
    )


def _without_a_third(grads: dict[str, Tensor], step: int) -> dict[str, Tensor | None]:
    """Return gradients with None for every third leaf, another third at each step."""
    absent = [number for number in range(len(grads)) if (number + step) % 3 == 0]
    return without_leaves(absent, grads)


def in_mixed_dtypes(shift: int, values: PyTree) -> PyTree:
    """Return a tree of tensors with the `DTYPES` in turn, of which the first ``shift`` are skipped.

    >>> values = in_mixed_dtypes(1, {"a": torch.zeros(()), "b": torch.zeros(())})
    >>> values["a"].dtype, values["b"].dtype
    (torch.float64, torch.bfloat16)
    """

    def converted(number: int, leaf: Tensor) -> Tensor:
        dtype = DTYPES[(number + shift) % len(DTYPES)]
        return leaf.to(dtype)

    return map_numbered(converted, values)


def _nested(values: dict[str, Tensor]) -> PyTree:
    """Return the tensors of a dict in dicts, lists, a tuple and a NamedTuple."""
    leaves = list(values.values())
    layers = [{"b": leaves[0], "a": leaves[1]}, tuple(leaves[2:4])]
    return {"layers": layers, "head": Pair(leaves[4], leaves[5:])}


def _degenerate(leaf: Tensor) -> Tensor:
    """Return zeros for vectors, and for matrices a matrix of half the rank."""
    if leaf.ndim < 2 or not leaf.numel():
        return torch.zeros_like(leaf)
    return _of_half_rank(leaf.double()).to(leaf.dtype)


class Pair(NamedTuple):
    """A NamedTuple with two items, used as a container in generated trees."""

    first: Any
    second: Any


LAYOUTS = ("contiguous", "transposed", "gaps", "offset")
"""The memory layouts of generated tensors; failing examples shrink to the first."""


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Return a tensor with the same values in a named memory layout, which sets its strides and storage offset.

    >>> (
    ...     laid_out(torch.zeros(2, 3), "transposed").stride(),
    ...     laid_out(torch.zeros(2, 3), "gaps").stride(),
    ... )
    ((1, 2), (6, 2))
    """
    if layout == "transposed" and values.ndim >= 2:  # columns, not rows, are contiguous in memory
        return values.mT.contiguous().mT
    # Every second element of a buffer; [1, 2] is stored as 1 2 2 3.
    if layout == "gaps" and values.ndim:
        buffer = torch.stack([values, values + 1], dim=-1)
        return buffer[..., 0]
    if layout == "offset":  # all elements of a buffer but the first three
        buffer = torch.cat([values.new_zeros(3), values.reshape(-1)])
        return buffer[3:].view(values.shape)
    return values  # contiguous, or with too few dims for the layout


# The simplest side first; the empty side last, because it should be rare.
_SIDES = (1, 2, 3, 4, 5, 2, 3, 4, 6, 7, 2, 0)


_KEYS = ("w", "b", "blocks.0.q", "head")


@dataclass(frozen=True)
class _RandomLeaf:
    """A leaf of a drawn tree: all properties of a tensor but its values, which depend on a seed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    """One of `LAYOUTS`."""
    fill: str
    """"normal", "lowrank" (matrices of half the full rank) or "zeros"."""
    power: int
    """The values are multiplied by ``2**power``: with the power -2, a normal number 1.0 becomes 0.25."""

    def tensor(self, seed: int) -> Tensor:
        """Return a tensor of these properties, with values from a seed."""
        # Drawn in float64 for every dtype, so that one seed has nearly the same values in all dtypes.
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(self.shape, dtype=torch.float64, generator=generator)
        if self.fill == "lowrank" and values.ndim >= 2 and values.numel():
            values = _of_half_rank(values)
        elif self.fill == "zeros":
            values = values.zero_()
        scaled_values = (values * 2.0**self.power).to(self.dtype)
        return laid_out(scaled_values, self.layout)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a hypothesis strategy that draws a container, such as a dict or a tuple, of children that it draws.

    For children that are leaves, it draws ``{"w": leaf, "b": leaf}`` or ``(leaf,)``. Hypothesis shrinks a failing
    example towards the first strategy in the list below, a dict.
    """
    dicts = st.dictionaries(st.sampled_from(_KEYS), children, min_size=1, max_size=3)
    lists = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        dicts,
        lists,
        lists.map(tuple),
        st.builds(Pair, children, children),
        # An OrderedDict, as a ``state_dict()`` is, whose keys are not in sorted order.
        dicts.map(lambda drawn: OrderedDict(sorted(drawn.items(), reverse=True))),
        st.dictionaries(st.integers(0, 11), children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=2).map(deque),
        # Empty containers only here: an example without tensors tests little.
        st.builds(dict),
    )


def _random_tensors(random_leaves: PyTree, seed: int) -> PyTree:
    """Return a tree of tensors for a tree of `_RandomLeaf` values and None. Each leaf has a seed of its own."""
    seeds = map_numbered(lambda number, leaf: seed + number, random_leaves)
    return tree.map(_RandomLeaf.tensor, random_leaves, seeds)


_IN_ONE_OF_FOUR = st.sampled_from((False, False, False, True))


@st.composite
def _examples(
    draw: st.DrawFn,
    trees_of_random_leaves: st.SearchStrategy[PyTree],
    steps: tuple[int, int],
    nones: bool,
) -> Example:
    """Draw an example: parameters, and gradients of the same structure for 1 to 3 steps if ``steps`` is (1, 3).

    A tree of `_RandomLeaf` values describes tensors (shape, dtype, layout in memory), and a seed gives their values.
    With ``nones``, some gradients are None.
    """
    random_params = draw(trees_of_random_leaves)
    seed = draw(_SEEDS)
    random_grads = random_params  # of the same shapes and dtypes
    # A conversion to float32 would have only values of narrow dtypes.
    if draw(_IN_ONE_OF_FOUR):
        random_grads = _with_properties(random_params, dtype=torch.float32)
    grads_of_steps: list[PyTree] = []
    for step in range(draw(st.integers(*steps))):
        random_grads_of_step = random_grads
        if draw(st.booleans()):
            random_grads_of_step = _with_properties(random_grads, layout="contiguous")
        # Each step has another seed. There are fewer than 1000 leaves, whose numbers are added to it.
        grads = _random_tensors(random_grads_of_step, seed + 1000 * (step + 1))
        if nones:
            grads = without_leaves(_drawn_numbers(draw, len(tree.leaves(grads))), grads)
        grads_of_steps.append(grads)
    return Example(_random_tensors(random_params, seed), grads_of_steps)


def _with_properties(random_leaves: PyTree, **properties: Any) -> PyTree:
    """Return a tree of `_RandomLeaf` values with other properties, such as ``layout="contiguous"``."""
    return tree.map(lambda leaf: dataclasses.replace(leaf, **properties), random_leaves)


def _drawn_numbers(draw: st.DrawFn, count: int) -> list[int]:
    """Draw about one of four numbers below ``count``."""
    return [number for number in range(count) if draw(_IN_ONE_OF_FOUR)]


def params_and_grads(
    *,
    steps: tuple[int, int] = (1, 3),
    ranks: tuple[int, int] = (0, 4),
    dtypes: Sequence[torch.dtype] = DTYPES,
    nones: bool = True,
) -> st.SearchStrategy[Example]:
    """Return a hypothesis strategy that draws an `Example`: a tree of parameters, and a tree of gradients per step.

    Trees are nested containers, such as dicts, tuples and lists. Leaves may be transposed, have gaps between elements,
    or start within a buffer. Gradients have the dtypes of their parameters, or are all float32, as in mixed-precision
    training.

    Args:
        steps: the minimal and maximal number of steps.
        ranks: the minimal and maximal number of dims of a leaf; ``(2, 4)`` for transforms of matrices. The lengths of
            dims are 1 to 7, and rarely 0.
        dtypes: the dtypes of parameters; failing examples shrink to the first.
        nones: whether a parameter, or a gradient in some steps, may be None.

    >>> from hypothesis import given
    >>> @given(params_and_grads())
    ... def gradients_have_the_structure_of_parameters(example):
    ...     params, steps = example
    ...     assert tree.flatten(steps[0])[1] == tree.flatten(params)[1]
    >>> gradients_have_the_structure_of_parameters()
    """
    min_ndim, max_ndim = ranks
    leaf: st.SearchStrategy[Any] = st.builds(
        _RandomLeaf,
        shape=st.lists(st.sampled_from(_SIDES), min_size=min_ndim, max_size=max_ndim).map(tuple),
        dtype=st.sampled_from(tuple(dtypes)),
        layout=st.sampled_from(LAYOUTS),
        fill=st.sampled_from(("normal", "normal", "lowrank", "zeros")),
        power=st.integers(-2, 2),
    )
    if nones:
        leaf = st.one_of(leaf, leaf, leaf, st.none())  # one leaf in four is None
    # The root is a container, because None instead of a tree means a missing argument.
    drawn_trees = _containers(st.recursive(leaf, _containers, max_leaves=4))
    return _examples(drawn_trees, steps, nones)
