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
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from muonfx.checkpoint.errors import CheckpointError, LostRanksError, ReplacedError, WriteError
from muonfx.sharding.communication.differences import errors_by_rank, first_difference, listed
from muonfx.sharding.communication.waiting import ranks_that_claimed, wait_for_all
from muonfx.sharding.errors import ShardingError

Value = TypeVar("Value")
Answer = TypeVar("Answer")


class Together:
    """The ranks of a process group, or one process without a group, which is rank 0 of 1.

    Every rank calls the same methods in the same order.

    Args:
        group: the process group; None for one process.
        path: the path of the checkpoint, which begins errors that do not name it.
        action: the save or load, which begins the error if the group cannot be used.
    """

    def __init__(self, group: Any, path: object, action: str) -> None:
        """Find the rank of this process in the group. Raise if the group cannot be used."""
        self.group = group
        self.path = path
        self.rank = 0
        """The rank of this process in the group."""
        self.size = 1
        """The number of ranks in the group."""
        if group is not None:
            # `action` begins its error, such as "the save to runs/a: group=..."
            check_group(group, action)
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

    def step(
        self, compute: Callable[[], Value], merge: Callable[[list[Value]], Sequence[Answer]]
    ) -> Answer:
        """Let each rank ``compute`` a value, and rank 0 ``merge`` all values to a list of answers; return this rank's.

        With the values 3 and 4 on two ranks, and ``merge=lambda values: [sum(values)] * len(values)``, both ranks
        receive 7. If ``compute`` fails on a rank, or ``merge`` on rank 0, all ranks raise one error. A rank that is
        interrupted, as by Ctrl-C, first takes part in the communication, for which the others wait.
        """
        if self.group is None:  # one process is rank 0 of 1: one value, one answer
            (answer,) = merge([compute()])
            return answer
        # A rank that raised its error at once would let the others wait forever.
        value, error = _attempt(compute)
        return self._exchange(value, error, merge)

    @contextmanager
    def errors_on_all_ranks(self) -> Generator[None]:
        """Raise an error of the ``with`` block, which all ranks run, on all of them.

        At the end of the block, each rank waits until the blocks of all ranks have ended. If one of them failed, all
        ranks raise one error. A rank that is interrupted, as by Ctrl-C, takes part in this, too.
        """
        if self.group is None:
            yield
            return
        error: BaseException | None = None
        try:
            yield
        except BaseException as block_error:
            error = block_error
        self._exchange(None, error, list)  # the ranks have no values to merge

    def _exchange(
        self,
        value: Value,
        error: BaseException | None,
        merge: Callable[[list[Value]], Sequence[Answer]],
    ) -> Answer:
        """Send the value of this rank, or its error, to rank 0, and return its answer; raise if a rank has an error."""
        # 1. Rank 0 receives the values and errors of all ranks.
        values, error_of_rank = self._gather(value, error)
        # 2. Rank 0 sends an answer to each rank, or the errors of all ranks.
        answers: list[Answer] = []  # the other ranks have none to send
        # If a rank has an error, values are missing, and there is nothing to merge.
        if self.rank == 0 and not error_of_rank:
            answers, error = _attempt(lambda: list(merge(values)))
            if error is not None:
                error_of_rank = {0: _sendable(error)}
        answer, error_of_rank = self._scatter(answers, error_of_rank)
        # 3. All ranks have communicated, so each may raise. An interrupt, such as KeyboardInterrupt, comes first: it is
        # of this rank alone, and the other ranks raise the error that was sent for it.
        if error is not None and not isinstance(error, Exception):
            raise error
        if error_of_rank:
            raise_one_error(error_of_rank, self.path)
        return answer

    def _gather(
        self, value: Any, error: BaseException | None
    ) -> tuple[list[Any], dict[int, Exception]]:
        """Send the value of this rank, or its error, to rank 0; return all values and errors there, none elsewhere.

        If rank 0 has the value 3, and rank 1 an error, rank 0 returns ``([3, None], {1: error})``.
        """
        if error is not None:
            error = _sendable(error)
        outcomes: list[Any] = []
        if self.rank == 0:
            outcomes = [None] * self.size  # torch fills this list
        with _communication():
            # Rank 0 of the group, by its number among all processes.
            merging_rank = dist.get_global_rank(self.group, 0)
            # torch requires None in place of a list on ranks that receive nothing.
            dist.gather_object((value, error), outcomes or None, dst=merging_rank, group=self.group)
        values = [sent_value for sent_value, _ in outcomes]
        error_of_rank = {
            rank: sent_error
            for rank, (_, sent_error) in enumerate(outcomes)
            if sent_error is not None
        }
        return values, error_of_rank

    def _scatter(
        self, answers: list[Any], error_of_rank: dict[int, Exception]
    ) -> tuple[Any, dict[int, Exception]]:
        """Send an answer from rank 0 to each rank, or all errors in place of it; return what this rank has received.

        The arguments are empty on the other ranks.
        """
        if error_of_rank:
            answers = [None] * self.size
        replies = [(answer, error_of_rank) for answer in answers]
        received: list[Any] = [None]
        with _communication():
            merging_rank = dist.get_global_rank(self.group, 0)
            dist.scatter_object_list(received, replies or None, src=merging_rank, group=self.group)
        return received[0]


def _attempt(compute: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Call a function, and return its value and None, or None and the error or interrupt that it raised."""
    try:
        return compute(), None
    except BaseException as error:
        return None, error


def _sendable(error: BaseException) -> Exception:
    """Return an error that pickle can send to other ranks: the same one if its class is ours or of Python.

    Another class may be local, or its instances may not be restorable from their arguments by pickle. The other ranks
    are not interrupted with this one, so they get an ordinary error for an interrupt.
    """
    has_known_class = isinstance(error, CheckpointError) or type(error).__module__ == "builtins"
    if isinstance(error, Exception) and has_known_class:
        return error
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
        # -1 for a process that is not in the group
        if dist.is_initialized() and dist.get_rank(group) >= 0:
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
    # A rank without an error has None.
    text_of_rank: list[str | None] = [None] * (max(error_of_rank) + 1)
    for rank, error in error_of_rank.items():
        text_of_rank[rank] = str(error)
        # Errors of this package name the path themselves.
        if not isinstance(error, CheckpointError):
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
    texts = _around_first_difference(
        [texts_of_rank.get(name, "missing") for texts_of_rank in arguments]
    )
    raise CheckpointError(
        f"{outcome}: the ranks {action} with different {name}=, expected the same on all:\n{errors_by_rank(texts)}"
    )


def _around_first_difference(texts: Sequence[str]) -> list[str]:
    """Return of long texts, such as a chain's, 100 characters before their first difference, and 100 after it."""
    common_text = os.path.commonprefix(texts)  # noqa: RUF071 - of characters, not of paths
    start = max(0, len(common_text) - 100)
    return [text[start : start + 200] for text in texts]
