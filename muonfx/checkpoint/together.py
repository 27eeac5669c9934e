"""Do a step of a save or load on one process or on all ranks of a group, with one error on all ranks.

A save and a load are written once, as a few steps. In a step, every rank computes a value, rank 0 merges the values of
all ranks, and each rank receives its answer. An error on one rank is raised on all. In one process the merge gets one
value, and errors are raised as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from muonfx.checkpoint.errors import CheckpointError, LostRanksError, MismatchError, ReplacedError, WriteError
from muonfx.sharding.communication.differences import errors_by_rank, listed
from muonfx.sharding.communication.waiting import wait_for_all
from muonfx.sharding.errors import ShardingError

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


class _Outcome(NamedTuple):
    """The value that a rank has computed in a step."""

    sent: Any
    """The value to send to other ranks, or the error that was raised instead, in a form that can be sent."""
    interrupt: BaseException | None = None
    """An interrupt of this rank, such as KeyboardInterrupt, which it raises again after the step."""


class _Failures(dict[int, Exception]):
    """The errors of the ranks that have failed, by rank. Each rank receives them in place of its answer."""


def _failures_of(values: Sequence[object]) -> _Failures:
    """Return the errors among the values of the ranks; ``values[rank]`` is a value or an error."""
    return _Failures({rank: value for rank, value in enumerate(values) if isinstance(value, Exception)})


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
        try:
            wait_for_all(self.group, call)
        except ShardingError as error:
            raise LostRanksError(str(error)) from error

    def step(self, compute: Callable[[], Value], merge: Callable[[list[Value]], Sequence[Answer]]) -> Answer:
        """Let each rank ``compute`` a value, and rank 0 ``merge`` the values to one answer for each rank.

        Rank 0 merges only if all ranks have a value. Otherwise, or if the merge fails, all ranks raise one error. A
        rank that is interrupted takes part in the communication until all ranks have an answer.
        """
        computed = _attempt(compute)
        values = self._gather(computed.sent)
        merged = _Outcome([])  # of ranks other than 0
        if self.rank == 0:
            merged = self._merge(values, merge)
        answer = self._scatter(merged.sent)
        for interrupt in (computed.interrupt, merged.interrupt):
            if interrupt is not None:
                raise interrupt
        if isinstance(answer, _Failures):
            raise_one_error(answer, self.path)
        return answer

    def _merge(self, values: list[Any], merge: Callable[[list[Any]], Sequence[Any]]) -> _Outcome:
        """Return the list of answers for the ranks; if a value is an error or the merge fails, `_Failures` for each."""
        failures = _failures_of(values)
        if failures:
            return _Outcome([failures] * self.size)
        merged = _attempt(lambda: list(merge(values)))
        if isinstance(merged.sent, Exception):
            failures = _Failures({self.rank: merged.sent})
            return _Outcome([failures] * self.size, merged.interrupt)
        return merged

    def _gather(self, value: object) -> list[Any]:
        """Return the values of all ranks on rank 0, and an empty list elsewhere."""
        values: list[Any] = []
        if self.rank == 0:
            values = [None] * self.size
        with _communication():
            dist.gather_object(value, values or None, dst=self._merging_rank, group=self.group)
        return values

    def _scatter(self, answers: list[Any]) -> Any:
        """Return this rank's item of ``answers``, a list on rank 0 that is empty elsewhere."""
        received: list[Any] = [None]
        with _communication():
            dist.scatter_object_list(received, answers or None, src=self._merging_rank, group=self.group)
        return received[0]


def _attempt(compute: Callable[[], Any]) -> _Outcome:
    """Return the value of a function, or the error that it raised."""
    try:
        return _Outcome(compute())
    except Exception as error:
        return _Outcome(_sendable(error))
    except BaseException as error:
        return _Outcome(_as_checkpoint_error(error), interrupt=error)


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
    try:
        if dist.is_initialized() and dist.get_rank(group) >= 0:  # -1 for a process that is not in the group
            return group
    except (ValueError, RuntimeError, TypeError, AttributeError):
        pass  # torch does not know the group
    raise CheckpointError(
        f"{action}: group={group!r} is not a process group that can be used: it was destroyed, or this process is "
        "not one of its ranks"
    )


def raise_one_error(failures: Mapping[int, Exception], path: object) -> NoReturn:
    """Raise one error whose message lists the errors of all ranks. Every rank calls this and raises an equal error.

    ``failures`` is a dict from rank to error, and ``path`` is the path of the checkpoint. Ranks with the same message
    share a line.
    """
    texts: list[str | None] = [None] * (max(failures) + 1)
    for rank, error in failures.items():
        texts[rank] = str(error) if isinstance(error, CheckpointError) else f"{path}: {error}"
    first = failures[min(failures)]
    error = _merged_error(first, failures.values(), errors_by_rank(texts))
    if isinstance(first, CheckpointError):  # the new error has its class and text
        raise error from None
    raise error from first


def _merged_error(first: Exception, errors: Iterable[Exception], message: str) -> CheckpointError:
    """Return an error with this message, of the class of the ``first`` error if that is a `CheckpointError`.

    It is a `ReplacedError` if any of the errors is, because the caller then reads the checkpoint again.
    """
    if any(isinstance(error, ReplacedError) for error in errors):
        return ReplacedError(message)
    if isinstance(first, MismatchError):
        return MismatchError(message, first.problems)
    if isinstance(first, WriteError):  # the checkpoint was written if any rank has seen it
        is_written = any(isinstance(error, WriteError) and error.written for error in errors)
        return WriteError(message, written=is_written)
    if isinstance(first, CheckpointError):
        return type(first)(message)
    return CheckpointError(message)


def require_same(arguments: Sequence[Mapping[str, str]], action: str, outcome: str) -> None:
    """Raise if ranks passed different arguments; ``arguments[rank]`` maps argument names to their ``repr``."""
    for name in arguments[0]:
        ranks_of_text: dict[str, list[int]] = {}
        for rank, texts in enumerate(arguments):
            ranks_of_text.setdefault(texts[name], []).append(rank)
        if len(ranks_of_text) == 1:
            continue
        # Of long texts, such as a chain's, only the part around the first difference is shown.
        common_text = os.path.commonprefix(list(ranks_of_text))  # noqa: RUF071 - of characters, not of paths
        start = max(0, len(common_text) - 100)
        shown = [f"{listed(ranks)}: {text[start : start + 200]}" for text, ranks in ranks_of_text.items()]
        raise CheckpointError(
            f"{outcome}: the ranks {action} with different {name}= ({'; '.join(shown)}): pass the same everywhere"
        )
