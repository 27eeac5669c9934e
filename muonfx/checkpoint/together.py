"""Do a step of a save or load on one process or on all ranks of a group, with one error on all ranks.

A save and a load are written once, as a few steps. In a step, every rank computes a value, rank 0 merges the values of
all ranks, and each rank receives its answer. An error on one rank is raised on all. In one process the merge gets one
value, and errors are raised as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from muonfx.checkpoint.errors import CheckpointError, LostRanksError, MismatchError, ReplacedError, WriteError
from muonfx.sharding.communication.differences import listed
from muonfx.sharding.communication.waiting import wait_for_all

Value = TypeVar("Value")
Answer = TypeVar("Answer")


class Alone:
    """One process without a group: rank 0 of 1."""

    rank = 0
    size = 1

    def step(self, compute: Callable[[], Value], merge: Callable[[list[Value]], Sequence[Answer]]) -> Answer:
        """Return the answer of ``merge`` to the value of ``compute``."""
        (answer,) = merge([compute()])
        return answer


class _Failures(dict[int, Exception]):
    """The errors of the ranks that have failed, by rank. Each rank receives them in place of its answer."""


class Together:
    """The ranks of a process group. Every rank calls the same methods in the same order.

    Args:
        group: the process group.
        path: the path of the checkpoint, which begins errors that do not name it.
        action: the save or load, which begins the error if the group cannot be used.
    """

    def __init__(self, group: Any, path: object, action: str) -> None:
        self.group = check_group(group, action)
        self.path = path
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._merging_rank = dist.get_global_rank(group, 0)

    def meet(self, call: str) -> None:
        """Wait until all ranks make the same call, such as "checkpoint.save"; raise if some do not make it."""
        wait_for_all(self.group, call)

    def step(self, compute: Callable[[], Value], merge: Callable[[list[Value]], Sequence[Answer]]) -> Answer:
        """Let each rank ``compute`` a value, and rank 0 ``merge`` the values to one answer for each rank.

        Rank 0 merges only if all ranks have a value. Otherwise, or if the merge fails, all ranks raise one error.
        """
        interrupts: list[BaseException] = []
        value = _attempt(compute, interrupts)
        values = self._gather(value)
        answers: list[Any] = [None] * self.size
        if self.rank == 0:
            failures = _Failures({rank: each for rank, each in enumerate(values) if isinstance(each, Exception)})
            if not failures:
                merged = _attempt(lambda: merge(values), interrupts)
                if isinstance(merged, Exception):
                    failures[0] = merged
                else:
                    answers = [*merged]
            if failures:
                answers = [failures] * self.size
        answer = self._scatter(answers)
        if interrupts:
            raise interrupts[0]
        if isinstance(answer, _Failures):
            raise_one_error(answer, self.path)
        return answer

    def _gather(self, value: object) -> list[Any]:
        """Return the values of all ranks on rank 0, and an empty list elsewhere."""
        values: list[Any] = []
        if self.rank == 0:
            values = [None] * self.size
        with _communication():
            dist.gather_object(value, values or None, dst=self._merging_rank, group=self.group)
        return values

    def _scatter(self, answers: list[Any]) -> Any:
        """Return this rank's item of the list ``answers`` on rank 0."""
        received: list[Any] = [None]
        to_send = None
        if self.rank == 0:
            to_send = answers
        with _communication():
            dist.scatter_object_list(received, to_send, src=self._merging_rank, group=self.group)
        return received[0]


def _attempt(compute: Callable[[], Any], interrupts: list[BaseException]) -> Any:
    """Return the value of a function, or the error that it raised, in a form that can be sent to other ranks.

    An interrupt is also added to ``interrupts``, because the interrupted rank raises it again after the step.
    """
    try:
        return compute()
    except CheckpointError as error:
        return error
    except Exception as error:
        if type(error).__module__ == "builtins":
            return error
        # Such a class may be local, or its instances may not be restorable from their arguments by pickle.
        return CheckpointError(f"{type(error).__name__}: {error}")
    except BaseException as error:
        interrupts.append(error)
        return CheckpointError(f"{type(error).__name__}: {error}")


@contextmanager
def _communication() -> Generator[None]:
    """Convert the errors of torch.distributed to a `LostRanksError`."""
    try:
        yield
    except ValueError as error:  # torch raises it for an unknown group
        raise LostRanksError(f"the process group was destroyed during the call: {error}") from error
    except (RuntimeError, AssertionError, OSError) as error:
        raise LostRanksError(
            f"another rank has ended, or did not answer within the group's timeout: {error}"
        ) from error


def check_group(group: Any, action: str) -> dist.ProcessGroup:
    """Return ``group``; raise unless it is a process group with this rank. ``action`` begins the error message."""
    rank = -1
    try:
        if dist.is_initialized():
            rank = dist.get_rank(group)
    except (ValueError, RuntimeError, TypeError, AttributeError):
        pass  # torch does not know the group
    if rank < 0:
        raise CheckpointError(
            f"{action}: group={group!r} is not a process group that can be used: it was destroyed, or this process is "
            "not one of its ranks"
        )
    return group


def raise_one_error(failures: Mapping[int, Exception], path: object) -> NoReturn:
    """Raise one error whose message lists the errors of all ranks. Every rank calls this and raises an equal error.

    ``failures`` is a dict from rank to error, and ``path`` is the path of the checkpoint. Ranks with the same message
    share a line. The class of the error is `ReplacedError` if any rank has one, because the caller reads again. Else it
    is the class of the lowest failed rank's error if that is a `CheckpointError`, and `CheckpointError` for others.
    """
    ranks_of_text: dict[str, list[int]] = {}
    for rank, error in sorted(failures.items()):
        text = str(error)
        if not isinstance(error, CheckpointError):
            text = f"{path}: {error}"
        ranks_of_text.setdefault(text, []).append(rank)
    message = "\n".join(f"{listed(ranks)}: {text}" for text, ranks in ranks_of_text.items())
    first = failures[min(failures)]
    if any(isinstance(error, ReplacedError) for error in failures.values()):
        raise ReplacedError(message) from first
    if isinstance(first, MismatchError):  # has a second argument
        raise MismatchError(message, first.problems) from first
    if isinstance(first, WriteError):  # the checkpoint was written if any rank has seen it
        is_written = any(getattr(error, "written", False) for error in failures.values())
        raise WriteError(message, is_written) from first
    if isinstance(first, CheckpointError):
        raise type(first)(message) from first
    raise CheckpointError(message) from first


def require_same(arguments: Sequence[Mapping[str, str]], action: str, outcome: str) -> None:
    """Raise if ranks passed different arguments; ``arguments[rank]`` maps argument names to their ``repr``."""
    for name in arguments[0]:
        ranks_of_text: dict[str, list[int]] = {}
        for rank, texts in enumerate(arguments):
            ranks_of_text.setdefault(texts[name], []).append(rank)
        if len(ranks_of_text) == 1:
            continue
        # Of long texts, such as a chain's, only the part around the first difference is shown.
        start = max(0, _common_length([*ranks_of_text]) - 100)
        shown = [f"{listed(ranks)}: {text[start : start + 200]}" for text, ranks in ranks_of_text.items()]
        raise CheckpointError(
            f"{outcome}: the ranks {action} with different {name}= ({'; '.join(shown)}): pass the same everywhere"
        )


def _common_length(texts: Sequence[str]) -> int:
    """Return the number of characters with which all texts begin."""
    for position, characters in enumerate(zip(*texts, strict=False)):
        if len(set(characters)) > 1:
            return position
    return min(map(len, texts))
