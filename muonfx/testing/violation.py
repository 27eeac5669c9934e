"""The errors `LawViolation` and `LawViolations`, and the comparisons of trees that raise `Breach`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.compact import QuantizedDtype
from muonfx.core.value import Recorded
from muonfx.internal.display import format_count
from muonfx.tree import PyTree


class LawViolation(AssertionError):
    """Raised if a transform violates a law. The message shows the law, the transform, the leaf and the example.

    Attributes:
        law: the name of the law.
        tx: the transform; only its repr if the error was pickled.
        leaf: the name of the leaf that breaks the law, or None if no single leaf does.
        found: a text with the found and the expected values.
        example: the `Example` on which the law does not hold, or None.
    """

    def __init__(
        self, law: str, tx: object, leaf: str | None, found: str, example: Any = None
    ) -> None:
        """Store the parts from which the message is formatted."""
        super().__init__(law, tx, leaf, found, example)
        self.law = law
        self.tx = tx
        self.leaf = leaf
        self.found = found
        self.example = example

    def __reduce__(self) -> tuple[Any, ...]:
        # A transform that has a local function cannot be pickled. The error reaches another process all the same.
        return LawViolation, (self.law, self._tx_text(), self.leaf, self.found, self.example)

    def _tx_text(self) -> str:
        return self.tx if isinstance(self.tx, str) else repr(self.tx)

    def __str__(self) -> str:
        """Return the message."""
        message = f"{self.law} does not hold for {self._tx_text()}\n  "
        if self.leaf:
            message += f"at {self.leaf}: "
        message += self.found
        if self.example is not None:
            message += "\n  on the example\n" + textwrap.indent(repr(self.example), "    ")
        return message


class LawViolations(AssertionError):
    """Raised if a transform violates laws, and all laws were to be checked. The message has the text of each violation.

    Attributes:
        violations: a list with a `LawViolation` for each law that does not hold.

    >>> print(
    ...     LawViolations(
    ...         [LawViolation("identity_is_neutral", "scale(factor=2.0)", "w", "found 3.0")]
    ...     )
    ... )
    1 law does not hold:
    identity_is_neutral does not hold for scale(factor=2.0)
      at w: found 3.0
    """

    def __init__(self, violations: list[LawViolation]) -> None:
        super().__init__(violations)
        self.violations = violations

    def __str__(self) -> str:
        """Return the message."""
        title = format_count(len(self.violations), "law does not hold", "laws do not hold")
        return "\n".join([f"{title}:", *map(str, self.violations)])


class Breach(Exception):
    """The failure of a law, raised inside it. The decorator `law` turns it into a `LawViolation` with the transform."""

    def __init__(self, leaf: str | None, found: str) -> None:
        super().__init__(leaf, found)
        self.leaf, self.found = leaf, found


def shown(leaf: object) -> str:
    """Return one line that describes a leaf: its dtype, its shape, and its values if they are few.

    >>> shown(torch.tensor([1.0, 2.5])), shown(torch.zeros(100, 100)), shown(None)
    ('float32 (2,) [1.0, 2.5]', 'float32 (100, 100)', 'None')
    """
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    text = f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    # Reading its values would wait for the device, or they do not exist (meta)
    if leaf.device.type != "cpu":
        return f"{text} on {leaf.device}"
    if not leaf.is_contiguous():
        text += f" strides {leaf.stride()}"
    if 0 < leaf.numel() <= 12:  # values of larger tensors would not fit into one line
        text += f" {_rounded(leaf.detach().tolist())}"
    return text


def _rounded(values: object) -> Any:
    """Return a number, or nested lists of numbers, with floats rounded to five digits."""
    if isinstance(values, list):
        return list(map(_rounded, values))
    if isinstance(values, float):
        return float(f"{values:.5g}")
    return values


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have equal bits, so that NaN equals NaN, and 0.0 differs from -0.0.

    >>> (
    ...     bits_equal(torch.tensor(torch.nan), torch.tensor(torch.nan)),
    ...     bits_equal(torch.tensor(0.0), torch.tensor(-0.0)),
    ... )
    (True, False)
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.device.type == "meta":  # it has no values
        return True
    # Integers compare bits. As floats, NaN would differ from itself, and 0.0 would equal -0.0.
    integer_dtype = _INTEGERS[a.dtype.itemsize]  # of the same size, so that its values are the bits
    return torch.equal(a.detach().view(integer_dtype), b.detach().view(integer_dtype))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return True if two tensors differ by at most ``tolerance`` times their largest magnitude; NaN equals NaN.

    >>> is_close(torch.tensor([100.0, 0.0]), torch.tensor([100.0, 0.5]), tolerance=0.01)
    True
    """
    if bits_equal(a, b):  # usual, and faster to see
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # In float64, so that the difference itself is not rounded. Its bound is relative to the largest finite element.
    a = a.detach().double()
    b = b.detach().double()
    largest = max(_largest_finite(a), _largest_finite(b))
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * largest, equal_nan=True)


def _largest_finite(x: Tensor) -> float:
    """Return the largest magnitude of the finite elements of a nonempty tensor, or 0."""
    return float(x.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _compare(
    what: str,
    results: PyTree,
    expected: PyTree,
    expected_is: str,
    same: Callable[[Tensor, Tensor], bool],
    describe: Callable[[Any], str] = shown,
) -> None:
    """Raise `Breach` (a failed law) unless two trees have one structure and each pair of tensors satisfies ``same``.

    ``what`` names the tree of results and ``expected_is`` the expected tree in the message, as in "step 0, updates" and
    "in eager mode". ``describe`` returns the text for a leaf.
    """
    leaves, structure = tree.flatten(results)
    expected_leaves, expected_structure = tree.flatten(expected)
    if structure != expected_structure:
        text = f"the tree is {structure}, expected the structure of {expected_is}, {expected_structure}"
        raise Breach(what, text)
    for number, (leaf, expected_leaf) in enumerate(zip(leaves, expected_leaves, strict=True)):
        if not _equal_leaves(leaf, expected_leaf, same):
            # Names are made only now, since most comparisons find no difference.
            name = tree.names(expected)[number]
            raise Breach(
                f"{what} {name!r}", _difference(leaf, expected_leaf, expected_is, describe)
            )


def _difference(
    leaf: Any, expected_leaf: Any, expected_is: str, describe: Callable[[Any], str]
) -> str:
    """Return "found ..., expected as ... ..." for two leaves that differ, with the size of a difference in digits."""
    text = f"found {describe(leaf)}, expected as {expected_is} {describe(expected_leaf)}"
    if describe(leaf) == describe(expected_leaf):  # the text has no values, or too few digits
        difference = _largest_finite(leaf.detach().double() - expected_leaf.detach().double())
        text += f": elements up to {_largest_finite(expected_leaf):.1e} differ by up to {difference:.1e}"
    return text


def _equal_leaves(a: object, b: object, same: Callable[[Tensor, Tensor], bool]) -> bool:
    """Return whether two leaves are tensors that satisfy ``same``, or equal objects of one other type."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same(a, b)
    return a is b or (type(a) is type(b) and a == b)


def require_same(what: str, results: PyTree, expected: PyTree, expected_is: str) -> None:
    """Raise `Breach` (a failed law) unless two trees are bitwise equal. ``what`` and ``expected_is`` name the trees."""
    _compare(what, results, expected, expected_is, bits_equal)


def require_close(
    what: str, results: PyTree, expected: PyTree, expected_is: str, tolerance: float
) -> None:
    """Raise `Breach` (a failed law) unless two trees agree within a tolerance, relative to each leaf's maximum."""
    _compare(what, results, expected, expected_is, lambda a, b: is_close(a, b, tolerance))


def require_spec(what: str, results: PyTree, expected: PyTree, expected_is: str) -> None:
    """Raise `Breach` (a failed law) unless two trees agree in structure, shapes, dtypes and devices."""

    def same_spec(a: Tensor, b: Tensor) -> bool:
        return _spec(a) == _spec(b)

    _compare(what, results, expected, expected_is, same_spec, _spec)


def _spec(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return f"{leaf.dtype} {tuple(leaf.shape)} on {leaf.device}"


TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.25}
"""The tolerance of a comparison, relative to a leaf's largest magnitude, by the narrowest dtype of the computation."""

_TOLERANCE_OF_CODES = 0.25
"""For eight-bit codes: the last bit of an fp32 value can decide between two neighbouring codes."""


def tolerance_of(tx: Recorded, *trees: PyTree) -> float:
    """Return the tolerance for comparing results of a transform, by the narrowest dtype in it and in the trees.

    >>> import muonfx as mfx
    >>> tolerance_of(
    ...     mfx.momentum(dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float32)
    ... )  # for bfloat16
    0.25
    """
    tolerance = TOLERANCES[torch.float64]
    for leaf in tree.tensors(trees):
        if leaf.is_floating_point() and leaf.ndim:  # a tensor without dims is a count or a rate
            tolerance = max(tolerance, TOLERANCES.get(leaf.dtype, _TOLERANCE_OF_CODES))
    for value in values_within(tx):
        if isinstance(value, torch.dtype):
            tolerance = max(tolerance, TOLERANCES.get(value, _TOLERANCE_OF_CODES))
        elif isinstance(value, QuantizedDtype):
            tolerance = max(tolerance, _TOLERANCE_OF_CODES)
    return tolerance


def values_within(value: Any) -> Iterator[Any]:
    """Yield a value and all values inside it, recursively: the arguments of transforms and the items of containers.

    >>> list(values_within({"a": [1, 2]}))
    [{'a': [1, 2]}, [1, 2], 1, 2]
    """
    yield value
    items: Iterable[Any] = ()  # a number, a string or None has none
    if isinstance(value, Recorded):
        items = value.arguments.values()
    elif isinstance(value, dict):
        items = value.values()
    elif isinstance(value, tuple | list):
        items = value
    for item in items:
        yield from values_within(item)


def widened(value: Any) -> Any:
    """Return a transform with float64 for every floating dtype in its arguments, to compare derivatives.

    ``momentum(dtype=torch.bfloat16)`` becomes ``momentum(dtype=torch.float64)``. The value may also be an argument, and
    the arguments of a transform are converted recursively.
    """
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, Recorded):  # a transform or a schedule
        arguments: dict[str, Any] = widened(dict(value.arguments))
        return value.replace(**arguments)
    # Only plain containers are rebuilt: a NamedTuple or another subclass may accept other arguments.
    if type(value) in (tuple, list):
        return type(value)(map(widened, value))
    if type(value) is dict:
        return {key: widened(item) for key, item in value.items()}
    return value
