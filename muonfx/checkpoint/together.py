"""Do a step of a save or load on one process or on all ranks of a group, with one error on all ranks.

A save and a load are written once, as a few steps. In a step, every rank computes a value, rank 0 merges the values of
all ranks, and each rank receives its answer. An error on one rank is raised on all. In one process the merge gets one
value, and errors are raised as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from muonfx.checkpoint.errors import CheckpointError, LostRanksError, ReplacedError, WriteError
from muonfx.sharding.communication.differences import errors_by_rank, first_difference, listed
from muonfx.sharding.communication.waiting import ranks_that_claimed, wait_for_all
from muonfx.sharding.errors import ShardingError

Value = TypeVar("Value")
Answer = TypeVar("Answer")


class _Outcome(NamedTuple):
    """The value that a function has returned on a rank, or the error that it has raised."""

    value: Any = None
    error: Exception | None = None
    """The error, in a form that can be sent to other ranks. For an interrupt, it is an error with the same text."""
    interrupt: BaseException | None = None
    """An interrupt, such as KeyboardInterrupt. It is not sent: this rank raises it again after the step."""


class _Reply(NamedTuple):
    """The message of rank 0 to a rank at the end of a step: its answer, or the errors of all ranks."""

    answer: Any
    error_of_rank: dict[int, Exception]
    """The errors of the ranks that have failed. If there are any, no rank receives an answer."""


class Together:
    """The ranks of a process group, or one process without a group, which is rank 0 of 1.

    Every rank calls the same methods in the same order.

    Args:
        group: the process group; None for one process.
        path: the path of the checkpoint, which begins errors that do not name it.
        action: the save or load, which begins the error if the group cannot be used.
    """

    def __init__(self, group: Any, path: object, action: str) -> None:
        self.group = group
        self.path = path
        self.rank = 0
        """The rank of this process in the group."""
        self.size = 1
        """The number of ranks in the group."""
        if group is not None:
            check_group(group, action)  # `action` begins its error, such as "the save to runs/a: group=..."
            self.rank = dist.get_rank(group)
            self.size = dist.get_world_size(group)

    def meet(self, call: str) -> None:
        """Wait until all ranks make the same call, such as "checkpoint.save"; raise if some do not make it.

        Without this, a rank that never calls `save` would let the others wait in a communication.
        """
        if self.group is None:  # one process waits for no other
            return
        try:
            wait_for_all(self.group, call)
        except ShardingError as error:
            raise LostRanksError(str(error)) from error

    def step(self, compute: Callable[[], Value], merge: Callable[[list[Value]], Sequence[Answer]]) -> Answer:
        """Let each rank ``compute`` a value, and rank 0 ``merge`` all values to a list of answers; return this rank's.

        With the values 3 and 4 on two ranks, and ``merge=lambda values: [sum(values)] * len(values)``, both ranks
        receive 7. If ``compute`` fails on a rank, or ``merge`` on rank 0, all ranks raise one error. A rank that is
        interrupted, as by Ctrl-C, first takes part in the communication, for which the others wait.
        """
        if self.group is None:  # one process is rank 0 of 1: one value, one answer
            (answer,) = merge([compute()])
            return answer
        # 1. An error is sent in place of the value: a rank that raised it at once would let the others wait forever.
        computed = _attempt(compute)
        outcomes = self._gather(computed._replace(interrupt=None))  # of all ranks, on rank 0 only
        # 2. Rank 0 sends an answer to each rank, or the errors of all ranks.
        replies: list[_Reply] = []  # on the other ranks, which have none to send
        interrupt_of_merge: BaseException | None = None
        if self.rank == 0:
            replies, interrupt_of_merge = self._replies(outcomes, merge)
        reply = self._scatter(replies)
        # 3. All ranks have communicated, so each may raise. An interrupt comes first: it is of this rank alone, and the
        # other ranks raise the error that was sent for it.
        for interrupt in (computed.interrupt, interrupt_of_merge):
            if interrupt is not None:
                raise interrupt
        if reply.error_of_rank:
            raise_one_error(reply.error_of_rank, self.path)
        return reply.answer

    def _replies(
        self, outcomes: Sequence[_Outcome], merge: Callable[[list[Any]], Sequence[Any]]
    ) -> tuple[list[_Reply], BaseException | None]:
        """On rank 0, merge the values of all ranks; return the reply to each rank, and an interrupt of the merge.

        The values 3 and 4 become ``[_Reply(7, {}), _Reply(7, {})]`` if ``merge`` sums them. If rank 1 has an error in
        place of a value, both replies are ``_Reply(None, {1: error})``.
        """
        error_of_rank = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error is not None}
        if error_of_rank:  # values are missing, so there is nothing to merge
            return [_Reply(None, error_of_rank)] * self.size, None
        values = [outcome.value for outcome in outcomes]
        merged = _attempt(lambda: list(merge(values)))
        if merged.error is not None:
            return [_Reply(None, {self.rank: merged.error})] * self.size, merged.interrupt
        return [_Reply(answer, {}) for answer in merged.value], None

    def _gather(self, outcome: _Outcome) -> list[_Outcome]:
        """Return the outcomes of all ranks on rank 0, and an empty list elsewhere."""
        outcomes: list[Any] = []
        if self.rank == 0:
            outcomes = [None] * self.size  # torch fills this list
        with _communication():
            merging_rank = dist.get_global_rank(self.group, 0)  # rank 0 of the group, by its number among all processes
            # torch requires None in place of a list on ranks that receive nothing.
            dist.gather_object(outcome, outcomes or None, dst=merging_rank, group=self.group)
        return outcomes

    def _scatter(self, replies: list[_Reply]) -> _Reply:
        """Return this rank's item of ``replies``, a list on rank 0 that is empty elsewhere."""
        received: list[Any] = [None]
        with _communication():
            merging_rank = dist.get_global_rank(self.group, 0)
            dist.scatter_object_list(received, replies or None, src=merging_rank, group=self.group)
        return received[0]


def _attempt(compute: Callable[[], Any]) -> _Outcome:
    """Call a function, and return its value or the error that it raised, in a form that can be sent to other ranks.

    An interrupt, such as KeyboardInterrupt, is not raised either: this rank must first take part in the communication.
    """
    try:
        return _Outcome(compute())
    except Exception as error:
        return _Outcome(error=_sendable(error))
    except BaseException as error:  # the other ranks get an ordinary error, and this rank raises its interrupt later
        return _Outcome(error=_as_checkpoint_error(error), interrupt=error)


def _sendable(error: Exception) -> Exception:
    """Return an error that pickle can send to other ranks: the same one if its class is ours or of Python.

    Another class may be local, or its instances may not be restorable from their arguments by pickle.
    """
    if isinstance(error, CheckpointError) or type(error).__module__ == "builtins":
        return error
    return _as_checkpoint_error(error)


def _as_checkpoint_error(error: BaseException) -> CheckpointError:
    """Return a `CheckpointError` with the class and the text of another error."""
    return CheckpointError(f"{type(error).__name__}: {error}")


@contextmanager
def _communication() -> Generator[None]:
    """Convert the errors of torch.distributed in the ``with`` block to a `LostRanksError`.

    Such an error means that the ranks can no longer reach each other: one has ended, or the group was destroyed.
    """
    try:
        yield
    except ValueError as error:  # torch raises it for an unknown group
        raise LostRanksError(f"the process group was destroyed during the call: {error}") from error
    except (RuntimeError, AssertionError, OSError) as error:
        raise LostRanksError(
            f"another rank has ended, or did not answer within the group's timeout: {error}"
        ) from error


def check_group(group: Any, action: str) -> None:
    """Raise unless ``group`` is a process group with this rank.

    ``action`` begins the error message: "the save to runs/a: group=... is not a process group that can be used".
    """
    try:
        if dist.is_initialized() and dist.get_rank(group) >= 0:  # -1 for a process that is not in the group
            return
    except (ValueError, RuntimeError, TypeError, AttributeError):
        pass  # torch does not know the group
    raise CheckpointError(
        f"{action}: group={group!r} is not a process group that can be used: it was destroyed, or this process is "
        "not one of its ranks"
    )


def require_no_other_group(group: Any, path: Path) -> None:
    """Raise if a group of other ranks of this job saves to the same folder, as another stage of a pipeline may do.

    The later of the two saves would replace the earlier one. If the ranks 0 and 1 save to "runs/a", and the ranks 2 and
    3 as well, the second group to come raises. Rank 0 of the group calls this; the folder exists.
    """
    if group is None:  # one process saves alone
        return
    ranks = dist.get_process_group_ranks(group)
    # Two machines may have a folder of one name on disks of their own, with other inodes (numbers on the disk).
    name_of_folder = f"{path} {path.stat().st_ino}"
    # This claims the folder for the group, unless another group has claimed it: then it returns that group's ranks.
    claimed_by = ranks_that_claimed(name_of_folder, group)
    if set(claimed_by).isdisjoint(ranks):
        raise CheckpointError(
            f"{path} was not written by {listed(ranks)}: {listed(claimed_by)} of this job save to it too, and the "
            "later save would replace the earlier one. Use a path for each group, or write the stages of a pipeline to "
            "one checkpoint by torch.distributed.checkpoint.save with muonfx.checkpoint.Writer"
        )


def raise_one_error(error_of_rank: Mapping[int, Exception], path: object) -> NoReturn:
    """Raise one error whose message lists the errors of all ranks, "ranks 0, 2: runs/a was not written: ...".

    Every rank calls this with the same dict from rank to error, and so raises an equal error. It has the class of
    the first error, or is a `ReplacedError` if a rank has raised one, because the caller then reads the checkpoint
    again.
    """
    message = _message_of_all(error_of_rank, path)
    errors = list(error_of_rank.values())
    errors_of_replacement = [error for error in errors if isinstance(error, ReplacedError)]
    chosen_error = (errors_of_replacement or errors)[0]
    if not isinstance(chosen_error, CheckpointError):
        raise CheckpointError(message) from chosen_error
    # A copy with this message, which keeps the other attributes.
    merged_error = copy(chosen_error)
    merged_error.args = (message,)
    if isinstance(merged_error, WriteError):  # the checkpoint was written if any rank has seen it
        merged_error.written = any(getattr(error, "written", False) for error in errors)
    raise merged_error from None


def _message_of_all(error_of_rank: Mapping[int, Exception], path: object) -> str:
    """Return the errors of all ranks as one text. Errors of other packages are prefixed by the path."""
    text_of_rank: list[str | None] = [None] * (max(error_of_rank) + 1)  # None for ranks without an error
    for rank, error in error_of_rank.items():
        text_of_rank[rank] = str(error)
        if not isinstance(error, CheckpointError):  # errors of this package name the path themselves
            text_of_rank[rank] = f"{path}: {error}"
    return errors_by_rank(text_of_rank)


def require_same(arguments: Sequence[Mapping[str, str]], action: str, outcome: str) -> None:
    """Raise if ranks passed different arguments to a save or load.

    ``arguments`` has a dict for each rank, from argument name to ``repr``. With ``[{"step": "1"}, {"step": "2"}]``, the
    action "save" and the outcome "nothing was written", the error begins with "nothing was written: the ranks save with
    different step=", and lists the values by rank.
    """
    if len(arguments) == 1:  # one process has no other to differ from
        return
    difference = first_difference(arguments)
    if difference is None:  # all ranks passed the same
        return
    name, _ = difference
    texts = _around_first_difference([texts_of_rank.get(name, "missing") for texts_of_rank in arguments])
    raise CheckpointError(
        f"{outcome}: the ranks {action} with different {name}=, expected the same on all:\n{errors_by_rank(texts)}"
    )


def _around_first_difference(texts: Sequence[str]) -> list[str]:
    """Return of long texts, such as a chain's, 100 characters before their first difference, and 100 after it."""
    common_text = os.path.commonprefix(texts)  # noqa: RUF071 - of characters, not of paths
    start = max(0, len(common_text) - 100)
    return [text[start : start + 200] for text in texts]
