"""The one exchange between ranks, in which each sends to each as many bytes as it has for it; and what goes wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Exchange", "ShardingError", "collective", "copied", "cut_places"]


class ShardingError(RuntimeError):
    """Ranks disagree, or one of them is gone; raised on all that are left, with what each has found.

    >>> raise ShardingError("rank 2 has another tree")
    Traceback (most recent call last):
    muonfx.sharding.messages.ShardingError: rank 2 has another tree
    """


class Exchange:
    """An exchange under way: made, it has been begun; `wait` ends it.

    What is sent is copied into one buffer, and what is received out of one, each as long as its values: nothing is
    padded. What a rank has for itself is copied directly.

    Args:
        outgoing: for each rank of the group, the tensors for it, in an order that both know.
        expected: for each rank of the group, how many elements come from it.
        dtype: in which values travel; they are rounded to it, and from it to the dtype of what takes them.
        group: the ranks; every one of them must begin the same exchanges in the same order.
        what: what this is, for an error.

    Raises:
        ShardingError: another rank is gone, or did not come within the group's timeout.
    """

    def __init__(
        self,
        outgoing: Sequence[Sequence[Tensor]],
        expected: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        what: str,
    ) -> None:
        self._me = me = dist.get_rank(group)
        self._own = list(outgoing[me])
        sent = [tensors if rank != me else [] for rank, tensors in enumerate(outgoing)]
        self.what = what
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
        self._sizes = [number if rank != me else 0 for rank, number in enumerate(expected)]
        self._sent = torch.empty(sum(sizes), dtype=dtype, device=device)
        _copy_through(self._sent, [tensor for tensors in sent for tensor in tensors], into=True)
        self._received = torch.empty(sum(self._sizes), dtype=dtype, device=device)
        with collective(what):
            self._work: Any = dist.all_to_all_single(
                self._received, self._sent, self._sizes, sizes, group=group, async_op=True
            )

    def wait(self, incoming: Sequence[Sequence[Tensor]]) -> None:
        """Wait for what comes, and copy it to where it belongs.

        Args:
            incoming: for each rank of the group, the tensors that take what comes from it, in the order of its sender.
        """
        with collective(self.what):
            self._work.wait()
        del self._sent
        copied(self._own, incoming[self._me])
        takers = [tensor for rank, tensors in enumerate(incoming) if rank != self._me for tensor in tensors]
        _copy_through(self._received, takers, into=False)
        del self._received, self._own


def cut_places(nbytes: Mapping[int, int], limit: int) -> list[list[int]]:
    """Cut places, in order, into lists of at most so many bytes; a single larger one stands alone.

    >>> cut_places({0: 3, 1: 3, 5: 9, 6: 1}, 6)
    [[0, 1], [5], [6]]
    """
    found: list[list[int]] = []
    room = 0
    for place, size in nbytes.items():
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(place)
        room -= size
    return found


def copied(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors to others, in few calls; one that is its own target is left alone.

    >>> target = torch.zeros(2)
    >>> copied([torch.ones(2)], [target])
    >>> target
    tensor([1., 1.])
    """
    pairs = [(a, b) for a, b in zip(sources, targets, strict=True) if a is not b and a.numel()]
    if pairs:
        torch._foreach_copy_([b for _, b in pairs], [a for a, _ in pairs])


def _copy_through(buffer: Tensor, tensors: Sequence[Tensor], *, into: bool) -> None:
    """Copy tensors into a buffer, one behind the other, or out of it."""
    places = [
        place.view(tensor.shape)
        for place, tensor in zip(buffer.split([tensor.numel() for tensor in tensors]), tensors, strict=True)
    ]
    if into:
        copied(tensors, places)
    else:
        copied(places, tensors)


class collective:
    """A context in which a failure of torch.distributed becomes a `ShardingError` that says what was going on.

    >>> with collective("the exchange"):
    ...     raise RuntimeError("Connection closed by peer")
    Traceback (most recent call last):
    muonfx.sharding.messages.ShardingError: the exchange failed: another rank has ended, ... Connection closed by peer
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Say it in our words."""
        if isinstance(error, RuntimeError) and not isinstance(error, ShardingError):
            raise ShardingError(
                f"{self.what} failed: another rank has ended, or did not come within the group's timeout: {error}"
            ) from error
