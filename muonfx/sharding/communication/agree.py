"""Let the ranks agree before any of them changes a tensor: on a call, on which gradients are None, and on errors.

The ranks compare digests in one all-reduce. Only if these differ does each rank make texts of the compared values,
and all ranks raise one error that names the first difference.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.sharding.communication.differences import Facts, difference_text, errors_by_rank, first_difference, listed
from muonfx.sharding.communication.messages import all_objects, collective, host_device
from muonfx.sharding.digests import digest
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.remembered import remembered
from muonfx.sharding.shards.table import ShardTable
from muonfx.tree import PyTree

_ERROR = 2
"""The first number of the message of a rank that has an error. It is larger than 1, the first number of a request."""

_CALL_WORDS = 3
"""The number of words in the digest of the values that must be equal on all ranks."""

_VALUE_WORDS = 2
"""The number of words in the digest of a value that may differ, such as the dtypes of gradients."""

_LARGEST_WORD = 0x3FFFFFFF
"""The largest number of 30 bits."""

NO_VALUE = object()
"""In the place of a value that a rank does not have, so that only the values of the other ranks are compared."""


class Agreement(NamedTuple):
    """The result of `agree`, equal on all ranks."""

    are_equal: list[bool]
    """For each value in `compared`, True if all ranks that have one passed the same."""
    is_requested: bool
    """True if any rank passed a `request`."""


def agree(
    what: str,
    group: dist.ProcessGroup,
    problem: BaseException | None = None,
    *,
    same: object = "",
    compared: Sequence[object] = ("",),
    explain: Callable[[], Facts] = dict,
    request: bool = False,
) -> Agreement:
    """Check with one all-reduce that all ranks make the same call. Raise the error of any rank (`problem`) on all.

    Args:
        what: the name of the call, which must be equal on all ranks.
        group: all ranks of this process group make the call together.
        problem: an error that this rank already has.
        same: a value that must be equal on all ranks.
        compared: values that may differ between ranks; the result has a bool for each. `NO_VALUE` equals any value.
        explain: returns texts for the error to compare, if the calls are not the same.
        request: True to request something of all ranks, such as a comparison of replicas.
    """
    # The message of a rank, and the maximum over ranks of each of its numbers, have these fields:
    #   1. the urgency: 0, 1 for a request, 2 for an error
    #   2. three words of a hash of the call, and the complements of these words
    #   3. for each value in `compared`, two words of its hash, and the complements
    # With one value, the message has 44 bytes in every call, so ranks that make different calls find that out.
    urgency = int(request)
    if problem is not None:
        urgency = _ERROR
    fields = [[urgency], _words_and_complements((what, same), _CALL_WORDS)]
    for value in compared:
        fields.append(_words_and_complements(value, _VALUE_WORDS))
    numbers = list(chain.from_iterable(fields))
    message = torch.tensor(numbers, dtype=torch.int32, device=host_device(group))
    with collective(what):
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    maxima = message.cpu().split(list(map(len, fields)))
    most_urgent, call_maxima, *value_maxima = list(map(Tensor.tolist, maxima))
    if most_urgent == [_ERROR]:
        _raise_errors(what, problem, group)
    if not _are_equal(call_maxima):
        _raise_difference({"calls": what, **explain()}, group)
    return Agreement(list(map(_are_equal, value_maxima)), is_requested=most_urgent != [0])


def _words_and_complements(value: object, count: int) -> list[int]:
    """Hash a value to `count` words of 30 bits. Return the words, and then `_LARGEST_WORD` minus each of them.

    The maximum over ranks of a word is the largest word. The maximum of its complement belongs to the least word. If
    rank 0 has the word 5 and rank 1 the word 7, the maxima are 7 and `_LARGEST_WORD` - 5, so the words differ. The
    zeros of `NO_VALUE` change no maximum.
    """
    if value is NO_VALUE:
        return [0] * (2 * count)
    hashed = hashlib.blake2b(repr(value).encode(), digest_size=4 * count).digest()
    numbers = struct.unpack(f">{count}I", hashed)  # big-endian numbers of 32 bits
    words = [number & _LARGEST_WORD for number in numbers]
    return words + [_LARGEST_WORD - word for word in words]


def _are_equal(maxima: Sequence[int]) -> bool:
    """Return True if all ranks have the same words, from the maxima over ranks of `_words_and_complements`."""
    count = len(maxima) // 2
    largest_words = maxima[:count]
    least_words = [_LARGEST_WORD - maximum for maximum in maxima[count:]]
    return largest_words == least_words


def _raise_errors(what: str, problem: BaseException | None, group: dist.ProcessGroup) -> None:
    """Raise this rank's error, or, if it has none, an error that shows the errors of other ranks."""
    text = None if problem is None else f"{type(problem).__name__}: {problem}"
    error_of_rank = all_objects(text, group, what)
    if problem is not None:
        raise problem
    raise ShardingError(f"nothing was changed on any rank:\n{errors_by_rank(error_of_rank)}")


def _raise_difference(facts: Facts, group: dist.ProcessGroup) -> None:
    """Raise a ShardingError that names the first of the `facts` that differs between ranks, and these ranks.

    All ranks first gather digests to find the subject, and then the fact itself. Facts may be long.
    """
    operation = "finding out what differs"
    digests = {subject: digest(fact) for subject, fact in facts.items()}
    difference = first_difference(all_objects(digests, group, operation))
    if difference is None:
        raise ShardingError(
            "nothing was changed on any rank: found different calls, parameters or options on different ranks, "
            "expected the same: construct and step the optimizer in the same way on all ranks"
        )
    subject, ranks = difference
    different_rank = ranks[0]  # all of these ranks have the same fact; rank 0 has another
    fact: object = None
    if dist.get_rank(group) in (0, different_rank):  # the other ranks send None
        fact = facts.get(subject)
    fact_of_rank = all_objects(fact, group, operation)
    text = difference_text(fact_of_rank[0], fact_of_rank[different_rank], listed(ranks))
    raise ShardingError(
        f"nothing was changed on any rank: the ranks have different {subject}: {text}\nAll ranks must have the same."
    )


def warn_together(message: str, group: dist.ProcessGroup) -> None:
    """Issue a warning on all ranks of a group. If a rank turns warnings into errors, raise on all ranks."""
    # If one rank alone raised, the others would wait for it in the next collective.
    problem: Warning | None = None
    try:
        warnings.warn(message, stacklevel=3)
    except Warning as error:
        problem = error
    agree("a warning", group, problem)


# -------------------------------------------------------------------------------------------------------------- leaves

DTYPES = tuple(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point}, key=str))
_CODES = {dtype: code for code, dtype in enumerate(DTYPES, 1)}

_NONE = 0
"""The code of a leaf that is None, or no floating tensor. Each dtype has a code of 1 or more."""

UNPLACED = 64
"""Added to the dtype code of a gradient whose DTensor placements differ from its parameter's, such as Partial."""


class LeafAgreement(NamedTuple):
    """Which leaves of a tree only some ranks have. All attributes are equal on all ranks."""

    missing: Mapping[int, Sequence[int]]
    """For each leaf that is None on some ranks only, by its index: its code on each rank."""
    is_requested: bool
    """True if any rank passed a `request`."""

    def dtype_of(self, index: int) -> torch.dtype:
        """Return the dtype of a leaf of `missing`, which at least one rank has."""
        return DTYPES[max(self.missing[index]) % UNPLACED - 1]

    def is_unplaced(self, index: int) -> bool:
        """Return True if a leaf is a gradient with other DTensor placements than its parameter, such as Partial."""
        return max(self.missing[index]) > UNPLACED

    def ranks_with(self, index: int) -> set[int]:
        """Return the ranks on which a leaf of `missing` is a tensor."""
        return {rank for rank, code in enumerate(self.missing[index]) if code != _NONE}


def agree_on_leaves(
    what: str,
    values: PyTree,
    layout: ShardTable,
    problem: Exception | None = None,
    *,
    unplaced: Iterable[str] = (),
    same: object = "",
    explain: Callable[[], Facts] = dict,
    request: bool = False,
) -> LeafAgreement:
    """Find out which leaves of a tree are None on some ranks. Raise on all ranks if a leaf has different dtypes.

    The ranks first compare one digest of the dtypes of all leaves. Only if it differs do they send the dtypes.

    Args:
        what: the name of the call, which must be equal on all ranks.
        values: the tree on this rank. The names of its leaves must be equal on all ranks.
        layout: the layout of the parameters, which must be equal on all ranks.
        problem: an error that this rank already has; it is raised on all ranks.
        unplaced: the names of the gradients with other DTensor placements than their parameters, such as Partial.
        same: as in `agree`, a further value that must be equal on all ranks.
        explain: as in `agree`, returns texts for the error if `same` differs.
        request: as in `agree`.
    """
    names = tree.names(values)
    # One number for each leaf: its dtype, and if it is `unplaced`.
    codes = bytearray(map(_code_of, tree.leaves(values)))
    for name in unplaced:
        codes[names.index(name)] += UNPLACED
    if layout.size == 1:
        if problem is not None:
            raise problem
        return LeafAgreement({}, request)
    group = require_group(layout)
    agreement = agree(
        what,
        group,
        problem,
        same=(_tree_digest(layout, tuple(names)), same),
        compared=[codes],
        explain=lambda: {**_facts_of_tree(layout, names), **explain()},
        request=request,
    )
    missing: dict[int, Sequence[int]] = {}
    (have_equal_codes,) = agreement.are_equal
    if not have_equal_codes:
        codes_of_rank = _codes_of_all_ranks(codes, layout.rank, group)
        missing = _missing_on_some(names, codes_of_rank)
    return LeafAgreement(missing, agreement.is_requested)


def _facts_of_tree(layout: ShardTable, names: Sequence[str]) -> Facts:
    """Return what must be equal on all ranks about a tree and its layout, by subject, in the order to report."""
    return {
        "parameters": str([*layout.specs]),
        "layouts": f"{layout!r} ({layout.digest})",
        "trees": str(list(names)),
    }


@remembered
def _tree_digest(layout: ShardTable, names: tuple[str, ...]) -> str:
    """Return a hash of the layout and of the names of a tree's leaves, which must be equal on all ranks."""
    return digest((layout.digest, list(layout.specs), names))


def _code_of(leaf: object) -> int:
    """Return the code of a leaf's dtype: 1 or more, or `_NONE` for a leaf that is no floating tensor."""
    if isinstance(leaf, Tensor):
        return _CODES.get(leaf.dtype, _NONE)
    return _NONE


def require_group(layout: ShardTable) -> dist.ProcessGroup:
    """Return the process group of a layout. Raise ShardingError if it was created with a number of ranks instead."""
    if layout.group is None:
        raise ShardingError(
            f"{layout!r} was created with a number of ranks and has no process group, expected a process group: create "
            "it in the running job, after init_process_group. Without a group it supports plan_for, shard and assemble"
        )
    return layout.group


def _codes_of_all_ranks(codes: bytearray, rank: int, group: dist.ProcessGroup) -> list[list[int]]:
    """Send the codes of the leaves of this rank to all ranks. Return the codes of each rank."""
    table = torch.zeros(group.size(), len(codes), dtype=torch.uint8, device=host_device(group))
    table[rank] = torch.tensor(list(codes), dtype=torch.uint8)
    with collective("comparing leaves"):
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    return table.tolist()


def _missing_on_some(names: Sequence[str], codes_of_rank: list[list[int]]) -> dict[int, Sequence[int]]:
    """Return the leaves that only some ranks have, as in `LeafAgreement`. Raise if a leaf has different dtypes.

    ``codes_of_rank[r][i]`` is the code of leaf i on rank r: 0 (`_NONE`) if it is None, else the code of its dtype, plus
    `UNPLACED` for some gradients.
    """
    missing: dict[int, Sequence[int]] = {}
    codes_of_leaves = zip(*codes_of_rank, strict=True)
    for index, (name, codes) in enumerate(zip(names, codes_of_leaves, strict=True)):
        if len(set(codes) - {_NONE}) > 1:
            raise ShardingError(
                f"nothing was changed on any rank: {name!r} has different dtypes or placements on different ranks, "
                "expected equal ones: load and shard the model in the same way on all ranks"
            )
        if len(set(codes)) > 1:  # None on some ranks, a tensor on the others
            missing[index] = codes
    return missing
