"""`MatrixView` (how a parameter divides into matrices), and the code that splits and joins tensors by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import Tensor

from muonfx.core import Transform
from muonfx.core.transform import within
from muonfx.internal.tracing import is_traced, matches
from muonfx.transforms.matrix_pattern import Division, Pattern, parse
from muonfx.tree import Present, PyTree

STACK = "... out in -> ... out in"
"""The pattern of a `MatrixView` for a stack of matrices (..., out, in), such as the experts of a layer."""


@dataclass(frozen=True, repr=False, eq=False)
class MatrixView:
    """How a parameter divides into matrices, for transforms such as `muonfx.orthogonalize` (argument ``view=``).

    One parameter may hold several matrices: query, key and value in one weight, one matrix per head, or a stack of
    experts. Each matrix is then updated as if it were a parameter of its own. A pattern in the style of einops
    describes the division. Left of the arrow, it names the axes in each dim of the parameter. Right of the arrow, it
    names the dims of the matrices: batch dims first, then the rows (output features) and the columns (input features).

    ====================================================  ================================================
    ``"(qkv=3 out) in -> qkv out in"``                    three matrices of equal size, one after another
    ``"(q=512 + k=128 + v=128) in -> q in, k in, v in"``  matrices of unequal sizes, one after another
    ``"(ff part=2) in -> part ff in"``                    two matrices whose rows alternate
    ``"(heads=8 d) in -> heads d in"``                    a matrix for each head
    ``"out (heads=8 d) -> heads out d"``                  a matrix for each head, for heads in the columns
    ``"(heads=8 qkv=3 d) in -> qkv (heads d) in"``        query, key and value, interleaved by head
    ``"(h=8 (k=128 + v=64)) in -> h k in, h v in"``       a key and a value matrix for each head
    ``"... out in -> ... out in"``                        a stack of matrices
    ``"in out -> out in"``                                a matrix that is stored transposed
    ``"out ... -> out (...)"``                            a convolution as one matrix; this is the default
    ====================================================  ================================================

    The size of an axis is written ``name=size``. In each dim, one size may be left out; it follows from the shape.
    ``a + b`` are parts that are concatenated along a dim; on the right there is one result for each part, separated by
    commas. ``...`` is any number of dims.

    Args:
        pattern: a pattern for all parameters; or a mapping from globs over dotted names to patterns, of which the first
            that matches a parameter's name applies. Without a pattern (None, or no glob matches), the parameter is one
            matrix: its first dim forms the rows, and all other dims form the columns.

    Raises:
        TypeError: the pattern is not a string, a mapping of strings or None.
        ValueError: a pattern is malformed; the message says which rule of the syntax it breaks.

    Example:
        >>> import muonfx as mfx
        >>> view = mfx.MatrixView({"*.qkv.weight": "(qkv=3 out) in -> qkv out in"})
        >>> tx = mfx.chain(mfx.orthogonalize(view=view), mfx.scale_by_shape("spectral", view=view))
        >>> weight = {"attn.qkv.weight": torch.randn(12, 4)}
        >>> updates, _ = tx.update(weight, tx.init(weight))
        >>> query = {"query": weight["attn.qkv.weight"][:4]}
        >>> alone = mfx.chain(mfx.orthogonalize(), mfx.scale_by_shape("spectral"))
        >>> torch.allclose(
        ...     updates["attn.qkv.weight"][:4],
        ...     alone.update(query, alone.init(query))[0]["query"],
        ...     atol=1e-2,
        ... )
        True
    """

    pattern: str | Mapping[str, str] | None = None
    _parsed: ClassVar[Mapping[str | None, Pattern]]
    optional_globs: ClassVar[frozenset[str]] = frozenset()
    """The globs of the pattern that may match no parameter without a warning, because the user has not written them."""

    def __post_init__(self) -> None:
        """Parse the patterns of a new view, and raise an error if one of them is malformed.

        ``pattern`` is one text for all parameters, such as "in out -> out in", or a mapping from globs over names to
        texts, such as ``{"*.head.weight": "in out -> out in"}``, or None.
        """
        texts: list[object] = []
        if isinstance(self.pattern, Mapping):
            # Copy it, so that later changes by the caller have no effect. The class is frozen: no plain assignment.
            object.__setattr__(self, "pattern", dict(self.pattern))
            texts += self.pattern.values()
        elif self.pattern is not None:
            texts.append(self.pattern)
        parsed = {text: _parse(text) for text in texts}
        object.__setattr__(self, "_parsed", parsed)  # now, since a tracer would parse at every call

    def __repr__(self) -> str:
        return "MatrixView()" if self.pattern is None else f"MatrixView({self.pattern!r})"

    def __eq__(self, other: object) -> bool:
        """Return True if two views have the same patterns in the same order, as the first matching glob applies."""
        if not isinstance(other, MatrixView):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> object:
        if isinstance(self.pattern, Mapping):
            return tuple(self.pattern.items())
        return self.pattern

    def of(self, names: Sequence[str]) -> list[Pattern | None]:
        """Return a list with the parsed pattern that applies to each parameter name; None if no pattern applies."""
        if not isinstance(self.pattern, Mapping):  # one for all names
            return [self._parsed.get(self.pattern)] * len(names)
        return [self._parsed.get(self.text(name)) for name in names]

    def text(self, name: str) -> str | None:
        """Return the pattern that applies to a parameter name, as text; None if no pattern applies."""
        if not isinstance(self.pattern, Mapping):
            return self.pattern
        for glob, text in self.pattern.items():
            if matches(name, glob):
                return text
        return None

    def is_set_for(self, name: str) -> bool:
        """Return True if this view has a pattern, such as ``"in out -> out in"``, for the parameter with this name."""
        return self.text(name) is not None

    def extended(self, more: str | Mapping[str, str] | None) -> MatrixView:
        """Return this view with further patterns, for the parameters for which it has none.

        The view ``{"*.q": "a"}``, extended by ``{"*.q": "b", "*.k": "c"}``, is ``{"*.q": "a", "*.k": "c"}``. (These
        letters are short for patterns.) There is no warning if a glob in ``more`` matches no parameter.
        """
        # A single pattern applies to all parameters already.
        if not more or isinstance(self.pattern, str):
            return self
        if isinstance(more, str):
            more = {"*": more}  # for all names
        patterns = dict(self.pattern or {})
        # The first glob that matches a name applies, so the patterns of this view come first. It also comes last here,
        # so that its pattern is kept if both have the same glob.
        view = MatrixView({**patterns, **more, **patterns})
        new_globs = more.keys() - patterns.keys()
        # The class is frozen.
        object.__setattr__(view, "optional_globs", self.optional_globs | new_globs)
        return view


def _parse(text: object) -> Pattern:
    """Parse a pattern such as "(qkv=3 out) in -> qkv out in"; errors name `MatrixView`, the class of the argument."""
    if not isinstance(text, str):
        raise TypeError(
            f"MatrixView: found {text!r}, expected a pattern such as '(qkv=3 out) in -> qkv out in', or a "
            "mapping from globs over parameter names to patterns"
        )
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"MatrixView: {error}") from None


def view_of(tx: Transform) -> MatrixView | None:
    """Return the argument ``view`` of a transform (how parameters divide into matrices); None if it is not set."""
    if "view" not in tx.factory.definition.parameters:
        return None
    view = tx.arguments["view"]
    return view if isinstance(view, MatrixView) else None


def first_view(tx: Transform) -> MatrixView:
    """Return the view of the first transform within a transform that has one, or a view without patterns."""
    for transform in within(tx):
        view = view_of(transform)
        if view is not None:
            return view
    return MatrixView()


class Matrices:
    """The tensors of a tree, divided into matrices by a `MatrixView`; `fill` joins results into such a tree.

    Lists of matrices are flat: the stacks of matrices (..., rows, columns) of the first tensor come first, then the
    stacks of the second tensor, and so on. `grouped` turns such a list into a list for each tensor. A stack may be a
    view of its tensor.

    >>> view = MatrixView("(q=4 + k=2) in -> q in, k in")
    >>> matrices = Matrices(view, {"a": torch.zeros(6, 8), "b": None})
    >>> (
    ...     [tuple(leaf.shape) for leaf in matrices.leaves],
    ...     [tuple(stack.shape) for stack in matrices.stacks],
    ... )
    ([(6, 8)], [(4, 8), (2, 8)])
    """

    def __init__(self, view: MatrixView, values: PyTree) -> None:
        """Split the tensors of a tree, such as the updates or the parameters; leaves of None are skipped."""
        self.present = Present(values)  # the positions of the tensors in the tree
        # The tensors, in the order of the tree.
        self.leaves: list[Tensor] = self.present.pick(values)
        self._patterns = _patterns_of(view, self.present, len(self.leaves))
        self._are_matrices = view.pattern is None and {leaf.ndim for leaf in self.leaves} <= {2}
        self._divisions = self._find_divisions()
        self.stacks = self.split(self.leaves)  # the stacks of all tensors

    def _find_divisions(self) -> list[Division | None]:
        """Apply the pattern of each tensor to its shape; None for a tensor that is one matrix, without a pattern.

        Tensors of one pattern and shape, such as the fused weights of all layers, share the result.

        Raises:
            ValueError: a tensor has fewer than two dims and no pattern, or its shape does not fit its pattern.
        """
        if self._are_matrices:
            return []
        divisions: list[Division | None] = []
        division_of: dict[object, Division] = {}
        can_be_shared = not is_traced()  # a shape with symbols cannot be hashed
        for index, (pattern, leaf) in enumerate(zip(self._patterns, self.leaves, strict=True)):
            if pattern is None:
                if leaf.ndim < 2:
                    raise ValueError(
                        f"{self._name_and_shape(index, leaf)}, expected at least two dims: give vectors and scalars "
                        "another transform, with muonfx.muon_with_adamw or muonfx.partition"
                    )
                divisions.append(None)
                continue
            key: object = index
            if can_be_shared:
                key = (pattern.text, leaf.shape)
            if key not in division_of:
                try:
                    division_of[key] = pattern.division(leaf.shape)
                except ValueError as error:
                    raise ValueError(f"{self._name_and_shape(index, leaf)}: {error}") from None
            divisions.append(division_of[key])
        return divisions

    def split(self, leaves: list[Tensor]) -> list[Tensor]:
        """Split tensors with the shapes of the tensors in the tree; return the stacks (..., rows, columns) of all.

        Without a pattern, all dims after the first are flattened to one matrix: a convolution of shape (8, 4, 3, 3)
        becomes one matrix of shape (8, 36).
        """
        if self._are_matrices:  # each tensor is one matrix as it is
            return leaves
        stacks: list[Tensor] = []
        for division, leaf in zip(self._divisions, leaves, strict=True):
            if division is not None:
                stacks += division.split(leaf)
            elif leaf.ndim == 2:
                stacks.append(leaf)
            else:
                # A product, not -1, which is ambiguous for an empty tensor.
                stacks.append(leaf.reshape(leaf.shape[0], prod(leaf.shape[1:])))
        return stacks

    def _name_and_shape(self, index: int, leaf: Tensor) -> str:
        """Return the beginning of an error about a tensor, such as "'bias' has shape (3,)"."""
        # Found only for an error, since this takes time for a nested tree.
        name = self.present.names()[index]
        return f"{name!r} has shape {tuple(leaf.shape)}"

    def join(self, stacks: list[Tensor]) -> list[Tensor]:
        """Undo `split`: join the stacks of all tensors into tensors with the shapes of the tensors in the tree.

        For a fused weight of 12 rows, with the pattern ``"(q=4 + k=4 + v=4) in -> q in, k in, v in"``, three stacks
        of 4 rows each become one tensor of 12 rows again.
        """
        if self._are_matrices:  # each stack is a whole tensor
            return stacks
        leaves: list[Tensor] = []
        for division, stacks_of_leaf, leaf in zip(
            self._divisions, self.grouped(stacks), self.leaves, strict=True
        ):
            if division is None:  # one matrix, such as a flattened convolution
                leaves.append(stacks_of_leaf[0].reshape(leaf.shape))
            else:
                leaves.append(division.join(stacks_of_leaf))
        return leaves

    def grouped(self, stacks: list[Tensor]) -> list[list[Tensor]]:
        """Turn a flat list of the stacks of all tensors into a list with the stacks of each tensor.

        Take two tensors, the first one with the pattern ``"(q + k) in -> q in, k in"``, and the second one without a
        pattern. The list ``[q, k, weight]`` becomes ``[[q, k], [weight]]``.
        """
        stacks_of_tensors: list[list[Tensor]] = []
        start = 0  # the index of the first stack of the next tensor
        for pattern in self._patterns:
            number_of_stacks = 1  # without a pattern, a tensor is one matrix
            if pattern is not None:
                # The terms right of the arrow: 2 for "q in, k in".
                number_of_stacks = len(pattern.results)
            stacks_of_tensors.append(stacks[start : start + number_of_stacks])
            start += number_of_stacks
        return stacks_of_tensors

    def fill(self, stacks: list[Tensor]) -> PyTree:
        """Return the tree with new matrices, given as `split` returns them."""
        return self.present.fill(self.join(stacks))


def _patterns_of(view: MatrixView, present: Present, number: int) -> list[Pattern | None]:
    """Return the pattern of each of a number of tensors; None if a tensor is one matrix."""
    if isinstance(view.pattern, Mapping):  # from globs over names
        return view.of(present.names())
    return view.of([""] * number)  # one pattern for all names, so these are not needed
