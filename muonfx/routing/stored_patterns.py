"""Patterns of a parameter in which ``{out}`` is to be replaced by its rows, which may be divided further."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from muonfx.transforms.matrix_pattern import parse

PLAIN = "{out} in -> {out} in"
TRANSPOSED = "in {out} -> {out} in"
STACK = "... {out} in -> ... {out} in"
TRANSPOSED_STACK = "... in {out} -> ... {out} in"
CONVOLUTION = "{out} ... -> {out} (...)"


def in_equal_parts(stored: str, count: int) -> str:
    """Return the pattern, for a `MatrixView`, that divides the rows of a parameter into matrices of one size.

    ``stored`` is the pattern of the undivided parameter: its dims, and after the arrow the dims of a matrix (out, in).
    In it, "{out}" is a placeholder for the rows. Here, a matrix is divided, and a matrix that is stored transposed:

    >>> in_equal_parts("{out} in -> {out} in", 3)
    '(part=3 out) in -> part out in'
    >>> in_equal_parts("in {out} -> {out} in", 3)
    'in (part=3 out) -> part out in'
    """
    return with_rows(stored, f"(part={count} out)", ["part out"])


def in_parts(stored: str, rows_of: Mapping[str, int | str]) -> str:
    """Return the `MatrixView` pattern of a parameter that holds matrices of unequal sizes, one below the other.

    Here, a parameter holds queries "q" of 4 rows, and below them keys "k" of 2 rows:

    >>> in_parts("{out} in -> {out} in", {"q": 4, "k": 2})
    '(q=4 + k=2) in -> q in, k in'

    Args:
        stored: the pattern of the undivided parameter, in which "{out}" is a placeholder for its rows.
        rows_of: the number of rows of each matrix by its name, or a placeholder for the number.
    """
    names_with_rows = [f"{name}={rows}" for name, rows in rows_of.items()]  # ["q=4", "k=2"]
    all_rows = " + ".join(names_with_rows)
    return with_rows(stored, f"({all_rows})", list(rows_of))


def with_rows(stored: str, all_rows: str, rows_of_matrices: Sequence[str]) -> str:
    """Return a pattern in which "{out}" is replaced by rows: left of the arrow by all rows of the parameter.

    Right of the arrow, the pattern has a matrix for each of ``rows_of_matrices``.

    >>> with_rows("in {out} -> {out} in", "(q=4 + k=2)", ["q", "k"])
    'in (q=4 + k=2) -> q in, k in'
    """
    dims, _, dims_of_matrix = stored.partition(" -> ")  # "in {out}", and "{out} in"
    dims_with_rows = dims.replace("{out}", all_rows)
    # ["q in", "k in"]
    matrices = [dims_of_matrix.replace("{out}", rows) for rows in rows_of_matrices]
    return f"{dims_with_rows} -> {', '.join(matrices)}"


def undivided(stored: str) -> str | None:
    """Return the pattern, for a `MatrixView`, of a parameter that is not divided; None if it needs no pattern.

    A matrix (out, in) and a convolution (out, ...) need none, since every transform takes them for one matrix.

    >>> undivided("in {out} -> {out} in"), undivided("{out} in -> {out} in")
    ('in out -> out in', None)
    """
    if stored in (PLAIN, CONVOLUTION):
        return None
    return whole(stored)


def whole(stored: str) -> str:
    """Return a pattern with "out" in place of "{out}", the rows: they are not divided into several matrices.

    >>> whole("... {out} in -> ... {out} in")
    '... out in -> ... out in'
    """
    return stored.replace("{out}", "out")


def number_of_rows(stored: str, shape: tuple[int, ...]) -> int:
    """Return the number of rows of the matrix, or of each matrix of the stack, that a parameter of this shape holds.

    >>> number_of_rows("in {out} -> {out} in", (8, 24))  # a transposed matrix
    24
    >>> number_of_rows("in heads dim -> (heads dim) in", (8, 3, 16))
    48
    """
    # A pattern may combine dims, as "(heads dim)", so it is applied to a tensor without memory. It does not divide the
    # rows, so that the result is one tensor.
    (stack,) = parse(whole(stored)).split(torch.empty(shape, device="meta"))
    return stack.shape[-2]
