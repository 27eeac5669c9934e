"""Let the ranks agree before any of them changes a tensor: on a call, on which gradients are None, and on errors.

The ranks compare digests in one all-reduce. Only if these differ does each rank make texts of the compared values,
and all ranks raise one error that names the first difference.

Before that, each rank checks its own arguments in a block ``with errors_on_all_ranks(group):``. An error in the block
takes the place of this rank's digests, so that all ranks raise.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.checks import warn_caller
from muonfx.core.value import named_numbers
from muonfx.internal.tracing import without_transforms
from muonfx.sharding.communication.differences import (
    Facts,
    difference_text,
    errors_by_rank,
    first_difference,
    listed,
)
from muonfx.sharding.communication.messages import all_objects, collective, host_device
from muonfx.sharding.digests import digest
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.shards.table import ShardTable
from muonfx.tree import PyTree

_ERROR = 2
"""The urgency of a rank that has an error. It is larger than the urgency of a request."""

_REQUEST = 1
"""The urgency of a rank that has no error, but a request, such as to compare replicas."""

_CALL_WORDS = 3
"""The number of words in the digest of the values that must be equal on all ranks."""

_VALUE_WORDS = 2
"""The number of words in the digest of a value that may differ, such as the dtypes of gradients."""

_LARGEST_WORD = 0x3FFFFFFF
"""The largest number of 30 bits. Such a number and its negative fit into the int32 numbers of the message."""

_BELOW_ALL_WORDS = -0x40000000
"""A number below all words and below their negatives."""

NO_FACTS: Facts = {}
"""For a call of which only the name must be equal on all ranks."""

NO_VALUE = object()
"""In the place of a value that a rank does not have, so that only the values of the other ranks are compared."""


class Agreement(NamedTuple):
    """The result of `agree`, equal on all ranks."""

    are_equal: bool
    """True if each value in `compared` is the same on all ranks that have one."""
    is_requested: bool
    """True if any rank passed a `request`."""


@contextmanager
def errors_on_all_ranks(group: dist.ProcessGroup | None) -> Generator[None]:
    """Raise an error of the ``with`` block on all ranks. The ranks without an error raise one that shows it.

    All ranks run such a block for the checks that each makes alone. The next message of the group, in the block or
    after it, must be a call of `agree` with one value to compare. The others would wait there for a rank that raised
    alone. So a rank with an error sends it in that message, and then raises. Without an error, the block sends nothing.

    Args:
        group: the ranks that run the block together; None for a single rank, which waits for no other.
    """
    try:
        yield
    except Exception as error:
        if group is not None and dist.get_world_size(group) > 1 and not _is_shared(error, group):
            # The message is a plain tensor, also for an error inside `torch.func.grad`
            with without_transforms():
                _send_error(error, group)
            _note_shared(error, group)
        raise


def _note_shared(error: Exception, group: dist.ProcessGroup) -> None:
    """Record in an error that all ranks of a group raise it, or one that shows it, so that no block sends it again."""
    vars(error)["_shared_in_group"] = group.group_name


def _is_shared(error: Exception, group: dist.ProcessGroup) -> bool:
    """Return True if all ranks of a group raise an error, or one that shows it, as recorded by `_note_shared`."""
    return vars(error).get("_shared_in_group") == group.group_name


def agree(
    operation: str,
    group: dist.ProcessGroup,
    *,
    same: Facts = NO_FACTS,
    compared: Sequence[object] = ("",),
    explain: Callable[[], Facts] | None = None,
    request: bool = False,
) -> Agreement:
    """Check that all ranks make the same call. Raise on all of them if not, or if a rank has an error.

    All ranks call this before they change a tensor. In a step, for example, they call
    ``agree("a step", group, same={"learning rate": 0.1})``. If one of them has the rate 0.2, all raise. An error of a
    rank in the block of `errors_on_all_ranks` before the call is raised here on the other ranks.

    They may also compare values that may differ. If rank 0 passes ``compared=["float32", 7]`` and rank 1
    ``["bfloat16", 7]``, ``are_equal`` of the result is False on both.

    Args:
        operation: the name of the call, such as "a step", which must be equal on all ranks.
        group: all ranks of this process group make the call together.
        same: facts that must be equal on all ranks, by the subject that the error names.
        compared: values that may differ between ranks. `NO_VALUE` equals any value. By default one empty text, because
            the message of a rank with an error has room for one value.
        explain: returns the facts for the error, if `same` only has hashes of them. None: `same` itself.
        request: True to request something of all ranks, such as a comparison of replicas.
    """
    # 1. One all-reduce of this rank's urgency (1 with a request, else 0; a rank with an error sends 2), a hash of the
    # call, and a hash of each value that may differ. It returns the largest of each number on any rank. A signed hash
    # is made so that `_are_equal` finds from its maxima whether all ranks have the same.
    urgency = [_REQUEST if request else 0]
    call = _signed_hash((operation, same), _CALL_WORDS)
    values = [_signed_hash(value, _VALUE_WORDS) for value in compared]
    [largest_urgency], call_maxima, *value_maxima = _maxima_over_ranks(
        [urgency, call, *values], group, operation
    )
    # 2. The maxima are equal on all ranks. So if one rank has an error, or makes another call, all ranks raise.
    if largest_urgency == _ERROR:
        error_of_rank = all_objects(None, group, operation)  # this rank has no error
        error = ShardingError(f"nothing was changed on any rank:\n{errors_by_rank(error_of_rank)}")
        _note_shared(error, group)
        raise error
    if not _are_equal(call_maxima):
        facts = same
        if explain is not None:
            facts = explain()
        error = _difference({"calls": operation, **facts}, group)
        _note_shared(error, group)
        raise error
    are_equal = all(map(_are_equal, value_maxima))
    return Agreement(are_equal, is_requested=largest_urgency == _REQUEST)


def _send_error(error: Exception, group: dist.ProcessGroup) -> None:
    """Send this rank's error to the other ranks, which receive it in `agree`."""
    operation = "reporting an error"
    # In place of the hashes of the call and of one compared value, which the other ranks ignore after an error.
    numbers = [0] * (2 * _CALL_WORDS + 2 * _VALUE_WORDS)
    _maxima_over_ranks([[_ERROR], numbers], group, operation)
    all_objects(f"{type(error).__name__}: {error}", group, operation)


def _maxima_over_ranks(
    values: Sequence[list[int]], group: dist.ProcessGroup, operation: str
) -> list[list[int]]:
    """Return, for each list of numbers, the largest of each number on any rank. This is one all-reduce.

    For ``[[0], [7, 5]]`` on rank 0 and ``[[1], [6, 8]]`` on rank 1, both get ``[[1], [7, 8]]``. In a call of `agree`
    with one value, a rank sends 11 numbers of 4 bytes.
    """
    numbers = list(itertools.chain.from_iterable(values))
    message = torch.tensor(numbers, dtype=torch.int32, device=host_device(group))
    with collective(operation):
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=group)
    maxima = message.tolist()
    maxima_of_values: list[list[int]] = []
    start = 0
    for numbers_of_value in values:
        end = start + len(numbers_of_value)
        maxima_of_values.append(maxima[start:end])
        start = end
    return maxima_of_values


def _signed_hash(value: object, count: int) -> list[int]:
    """Return numbers for a value, whose maxima over ranks show whether all ranks have the same value.

    They are a hash of the value in `count` words of 30 bits, and the same words with a negative sign. If rank 0 has the
    word 5 and rank 1 the word 7, the maxima are 7 and -5: the largest word is 7 and the least is 5, so the values
    differ. Thus one all-reduce suffices, whose message does not grow with the number of ranks.
    """
    if value is NO_VALUE:
        # Changes no maximum, so only the values of the other ranks count.
        return [_BELOW_ALL_WORDS] * (2 * count)
    text = repr(value)
    hashed = hashlib.blake2b(text.encode(), digest_size=4 * count).digest()
    numbers = struct.unpack(f">{count}I", hashed)  # of 32 bits each
    words = [number & _LARGEST_WORD for number in numbers]
    negative_words = [-word for word in words]
    return words + negative_words


def _are_equal(maxima: list[int]) -> bool:
    """Return True if all ranks have the same value, from the maxima over ranks of its `_signed_hash`."""
    count = len(maxima) // 2
    largest_words = maxima[:count]
    least_words = [-maximum for maximum in maxima[count:]]
    return largest_words == least_words


def _difference(facts: Facts, group: dist.ProcessGroup) -> ShardingError:
    """Return an error that names the first difference between the facts of the ranks. All ranks call this.

    Facts are values by subject, such as ``{"calls": "a step", "parameters": "['w', 'b']"}``. They may be long, and the
    ranks may be thousands. So the ranks exchange a digest of each fact, and then only two ranks send one fact.
    """
    operation = "finding out what differs"
    # 1. The first subject on which a rank differs from rank 0, and the ranks that all have that other fact.
    digests = {subject: digest(fact) for subject, fact in facts.items()}
    difference = first_difference(all_objects(digests, group, operation))
    if difference is None:
        return _unexplained_difference()
    subject, ranks = difference
    # 2. The fact of rank 0, and that of one of the different ranks. The remaining ranks send None.
    different_rank = ranks[0]
    fact: object = None
    if dist.get_rank(group) in (0, different_rank):
        fact = facts.get(subject)
    fact_of_rank = all_objects(fact, group, operation)
    text = difference_text(fact_of_rank[0], fact_of_rank[different_rank], listed(ranks))
    return ShardingError(
        f"nothing was changed on any rank: the ranks have different {subject}: {text}\nAll ranks must have the same."
    )


def _unexplained_difference() -> ShardingError:
    """Return an error for ranks whose compared values differ, but not the facts that explain them."""
    return ShardingError(
        "nothing was changed on any rank: found different calls, parameters or options on different ranks, "
        "expected the same: construct and step the optimizer in the same way on all ranks"
    )


def warn_together(message: str, group: dist.ProcessGroup) -> None:
    """Issue a warning on all ranks of a group. If a rank turns warnings into errors, raise on all ranks.

    With ``warnings.simplefilter("error")`` on one rank, only this rank would raise, and the others would wait for it
    in the next collective. So the ranks first agree that none of them has an error.
    """
    with errors_on_all_ranks(group):
        warn_caller(message)  # raises the warning itself if a filter turns it into an error
    agree("a warning", group)


# ----------------------------------------------------------------------------------------------------- compared values

_SMALL = 64
"""Values of a CPU tensor are compared at every step if it has at most this number of elements."""


def comparable(value: object) -> object:
    """Return a value for ranks to compare: a number or text, or a description. It never syncs with a GPU.

    >>> comparable(0.5), comparable(torch.tensor(3)), comparable(torch.zeros(100))
    (0.5, '3 of torch.int64', 'a tensor (100,) of torch.float32')
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, Tensor):
        return type(value).__qualname__
    # To read values on another device would wait for it. They are compared when replicas are verified.
    is_on_cpu = value.device.type == "cpu"
    if is_on_cpu and value.numel() <= _SMALL:
        return f"{value.tolist()} of {value.dtype}"
    return f"a tensor {tuple(value.shape)} of {value.dtype}"


def comparable_numbers(tx: Transform) -> dict[str, object]:
    """Return the current hyperparameters of a transform by dotted name, such as "muon.momentum"."""
    cache = tx.derived
    if "numbers" not in cache:
        cache["numbers"] = named_numbers(tx)
    if not tx.tensors:
        return cache["numbers"]
    return {name: comparable(number) for name, number in cache["numbers"].items()}


# -------------------------------------------------------------------------------------------------------------- leaves

DTYPES = tuple(
    sorted(
        {d for d in vars(torch).values() if isinstance(d, torch.dtype) and d.is_floating_point},
        key=str,
    )
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES, 1)}

_NONE = 0
"""The code of a leaf that is None, or no floating tensor. Each dtype has a code of 1 or more."""

_UNPLACED = 64
"""Added to the dtype code of a gradient whose DTensor placements differ from its parameter's, such as Partial."""


class MissingLeaf(NamedTuple):
    """A leaf of a tree that is a tensor on some ranks, and None on the others."""

    dtype: torch.dtype
    ranks: frozenset[int]
    """The ranks on which it is a tensor."""
    is_unplaced: bool
    """True for a gradient with other DTensor placements than its parameter, such as Partial."""


class LeafAgreement(NamedTuple):
    """Which leaves of a tree only some ranks have. Both attributes are equal on all ranks."""

    missing: Mapping[str, MissingLeaf]
    """The leaves that are None on some ranks only, by name, in the order of the tree."""
    is_requested: bool
    """True if any rank passed a `request`."""


def agree_on_leaves(
    operation: str,
    values: PyTree,
    layout: ShardTable,
    *,
    unplaced: Iterable[str] = (),
    same: Facts = NO_FACTS,
    explain: Callable[[], Facts] | None = None,
    request: bool = False,
) -> LeafAgreement:
    """Find out which leaves of a tree are None on some ranks. Raise on all ranks if a leaf has different dtypes.

    If only rank 1 has a gradient for "w", then ``missing["w"]`` has its dtype and ``ranks={1}`` on all ranks.

    Args:
        operation: the name of the call, which must be equal on all ranks.
        values: the tree on this rank. The names of its leaves must be equal on all ranks.
        layout: the layout of the parameters, which must be equal on all ranks.
        unplaced: the names of the gradients with other DTensor placements than their parameters, such as Partial.
        same: as in `agree`, further facts that must be equal on all ranks.
        explain: as in `agree`.
        request: as in `agree`.
    """
    if layout.size == 1:
        return LeafAgreement({}, request)
    group = require_group(layout)
    names = tree.names(values)
    codes = _codes_of_leaves(values, unplaced)  # for each leaf, a number for its dtype, or for None

    def facts_for_error() -> Facts:
        """Return the facts in full, of which `agree` gets hashes."""
        facts = same
        if explain is not None:
            facts = explain()
        return {**_facts_of_tree(layout, names), **facts}

    # 1. The ranks compare one hash of all codes. It may differ, and everything else may not.
    agreement = agree(
        operation,
        group,
        same={"trees": _tree_digest(layout, tuple(names)), **same},
        compared=[codes],
        explain=facts_for_error,
        request=request,
    )
    if agreement.are_equal:  # no leaf is None on some ranks only
        return LeafAgreement({}, agreement.is_requested)
    # 2. They send the codes, to find these leaves.
    codes_of_rank = _codes_of_all_ranks(codes, layout.rank, group)
    return LeafAgreement(_missing_on_some(names, codes_of_rank), agreement.is_requested)


def _codes_of_leaves(values: PyTree, unplaced: Iterable[str]) -> bytearray:
    """Return one number for each leaf of a tree: the code of its dtype, plus `_UNPLACED` for the `unplaced` names."""
    # One byte for each leaf, to be compared and sent fast.
    codes = bytearray(map(_code_of, tree.leaves(values)))
    names = tree.names(values)
    for name in unplaced:
        codes[names.index(name)] += _UNPLACED
    return codes


def _facts_of_tree(layout: ShardTable, names: Sequence[str]) -> Facts:
    """Return what must be equal on all ranks about a tree and its layout, by subject, in the order to report."""
    return {
        "parameters": str([*layout.specs]),
        "layouts": f"{layout!r} ({layout.digest})",
        "trees": str(list(names)),
    }


def _tree_digest(layout: ShardTable, names: tuple[str, ...]) -> str:
    """Return a hash of the layout and of the names of a tree's leaves, which must be equal on all ranks.

    The layout stores it for the next calls, because most steps have the same names.
    """
    if names not in layout.tree_digests:
        layout.tree_digests[names] = digest((layout.digest, names))
    return layout.tree_digests[names]


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
    # Each rank fills its own row, and all others have zeros there: the maximum over ranks is the filled table.
    shape = (group.size(), len(codes))
    table = torch.zeros(shape, dtype=torch.uint8, device=host_device(group))
    table[rank] = torch.tensor(list(codes), dtype=torch.uint8)
    with collective("comparing leaves"):
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    return table.tolist()


def _missing_on_some(
    names: Sequence[str], codes_of_rank: list[list[int]]
) -> dict[str, MissingLeaf]:
    """Return the leaves that only some ranks have, by name. Raise if a leaf has different dtypes.

    ``codes_of_rank[r][i]`` is the code of leaf i on rank r: 0 (`_NONE`) if it is None, else the code of its dtype, plus
    `_UNPLACED` for some gradients. Here "w" is None on rank 1:

    >>> code = _code_of(torch.zeros(1))
    >>> _missing_on_some(["v", "w"], [[code, code], [code, 0]])
    {'w': MissingLeaf(dtype=torch.float32, ranks=frozenset({0}), is_unplaced=False)}
    """
    missing: dict[str, MissingLeaf] = {}
    codes_of_leaves = zip(*codes_of_rank, strict=True)
    for name, codes in zip(names, codes_of_leaves, strict=True):
        # The ranks that have the leaf must agree on its dtype: they then have one code together.
        codes_of_tensors = set(codes) - {_NONE}
        if len(codes_of_tensors) > 1:
            raise ShardingError(
                f"nothing was changed on any rank: {name!r} has different dtypes or placements on different ranks, "
                "expected equal ones: load and shard the model in the same way on all ranks"
            )
        is_on_some_ranks = bool(codes_of_tensors) and _NONE in codes
        if is_on_some_ranks:
            (common_code,) = codes_of_tensors
            is_unplaced = common_code > _UNPLACED
            code_of_dtype = common_code - _UNPLACED if is_unplaced else common_code
            ranks = frozenset([rank for rank, code in enumerate(codes) if code != _NONE])
            # The codes of dtypes begin with 1.
            missing[name] = MissingLeaf(DTYPES[code_of_dtype - 1], ranks, is_unplaced)
    return missing
