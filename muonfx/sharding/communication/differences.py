"""Texts of errors for ranks that differ. These functions do not communicate: they receive what ranks have sent."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence

from muonfx.internal.display import format_list

Facts = Mapping[str, object]
"""Values that must be equal on all ranks: from a subject, which an error names, to a value, or to a dict by name."""


def listed(ranks: Sequence[int]) -> str:
    """Return a text for some ranks, to be used in a message.

    >>> listed([1]), listed([1, 2])
    ('rank 1', 'ranks 1, 2')
    """
    noun = "rank" if len(ranks) == 1 else "ranks"
    numbers = format_list(ranks, str)
    return f"{noun} {numbers}"


def errors_by_rank(error_of_rank: Sequence[str | None]) -> str:
    """Return the errors of all ranks as lines of text. Ranks that have the same error share a line.

    >>> print(errors_by_rank(["ValueError: negative", None, "ValueError: negative"]))
    ranks 0, 2: ValueError: negative
    """
    ranks_with: dict[str, list[int]] = {}  # from the text of an error to the ranks that have it
    for rank, error in enumerate(error_of_rank):
        if error is not None:
            ranks_with.setdefault(error, []).append(rank)
    lines = [f"{listed(ranks)}: {error}" for error, ranks in ranks_with.items()]
    return "\n".join(lines)


def first_difference(
    values_of_rank: Sequence[Mapping[str, object]],
) -> tuple[str, list[int]] | None:
    """Return the first subject on which a rank differs from rank 0, and the ranks that all have that other value.

    Return None if no rank differs.

    >>> first_difference([{"lr": 1, "eps": 2}, {"lr": 1, "eps": 3}, {"lr": 1, "eps": 3}])
    ('eps', [1, 2])
    """
    for subject, expected in values_of_rank[0].items():
        # The value of each rank. The first that differs from rank 0 is reported, with all ranks that have it.
        values = [values_by_subject.get(subject) for values_by_subject in values_of_rank]
        for value in values:
            if value != expected:
                ranks = [rank for rank, other_value in enumerate(values) if other_value == value]
                return subject, ranks
    return None


def difference_text(first: object, second: object, ranks: str) -> str:
    """Return a text that shows how a value of rank 0, `first`, differs from the value `second` of other ranks.

    `ranks` names these ranks, such as "rank 2". The values are dicts, or anything that has a text.

    >>> difference_text({"lr": "0.1", "eps": "0"}, {"lr": "0.2", "eps": "0"}, "rank 2")
    "'lr' is 0.1 on rank 0 and 0.2 on rank 2"
    >>> difference_text(
    ...     {"loss": float("nan"), "value": 1}, {"loss": float("nan"), "value": 1.0}, "rank 2"
    ... )
    "'value' is 1 on rank 0 and 1.0 on rank 2"
    """
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        first_text, second_text = _around_difference(str(first), str(second))
        return f"rank 0 has {first_text}\n  {ranks}: {second_text}"
    # For two dicts, show the first entry that differs. A name may be in one of them only.
    for name in [*first, *second]:
        first_value = first.get(name, "missing")
        second_value = second.get(name, "missing")
        # Ranks compare digests of texts, in which 1 and 1.0 differ, and NaN is equal to itself.
        if repr(first_value) != repr(second_value):
            first_text, second_text = _around_difference(str(first_value), str(second_value))
            return f"{name!r} is {first_text} on rank 0 and {second_text} on {ranks}"
    # All values are equal, so the names must be in another order.
    return f"rank 0 has the order {list(first)}\n  {ranks}: {list(second)}"


_LONGEST = 400
"""The number of characters of a text that an error shows. Of a longer text, it shows the part that differs."""


def _around_difference(first: str, second: str) -> tuple[str, str]:
    """Shorten two long texts to the part around the first character that differs."""
    # `commonprefix` compares characters, so the texts need not be paths.
    common = len(os.path.commonprefix([first, second]))  # noqa: RUF071
    return _excerpt(first, common), _excerpt(second, common)


def _excerpt(text: str, middle: int) -> str:
    if len(text) <= _LONGEST:
        return text
    start = max(0, middle - _LONGEST // 2)
    return f"...{text[start : middle + _LONGEST // 2]}..."
