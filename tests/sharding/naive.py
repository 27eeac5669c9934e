"""How Muon has been sharded wrongly, in one process that plays all ranks: what the tests of known failures fail on.

Each function is the simplest form of a scheme that was released. Gradients come as one dict for each rank; what comes
out is the update of each parameter as the ranks would put it together.
"""

from collections.abc import Sequence
from itertools import accumulate as running

import torch
from torch import Tensor

from muonfx.polar import orthogonalize

Trees = Sequence[dict[str, Tensor]]


def mean(grads: Trees) -> dict[str, Tensor]:
    """What all ranks would have after an all-reduce, added in the order of the ranks."""
    return {name: sum(tree[name].double() for tree in grads).div(len(grads)).float() for name in grads[0]}


def newton_schulz(x: Tensor) -> Tensor:
    return orthogonalize(x, dtype=torch.float32)


def whole(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """The right answer."""
    return {name: newton_schulz(grad) for name, grad in grads.items()}


def _flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in tree.values()])


def _unflat(flat: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = flat.split([leaf.numel() for leaf in like.values()])
    return {name: part.view(leaf.shape) for part, (name, leaf) in zip(parts, like.items(), strict=True)}


def on_partly_reduced_gradients(grads: Trees, cuts: Sequence[int]) -> dict[str, Tensor]:
    """ZeRO with reduce_scatter, as DeepSpeed issue 7807 has it.

    A rank has the mean in its own interval of the buffer only; beyond, its own gradient is still there. A matrix that
    crosses a boundary is orthogonalized as it lies, and each rank keeps its interval of the result.
    """
    reduced, out = _flat(mean(grads)), []
    for rank, tree in enumerate(grads):
        begin, end = cuts[rank], cuts[rank + 1]
        buffer = _flat(tree)
        buffer[begin:end] = reduced[begin:end]
        out.append(_flat(whole(_unflat(buffer, tree)))[begin:end])
    return _unflat(torch.cat(out), grads[0])


def on_shards(grad: Tensor, ranks: int) -> Tensor:
    """Newton-Schulz on each rank's rows, as LLaMA-Factory's first Muon for FSDP2."""
    return torch.cat([newton_schulz(rows) for rows in grad.tensor_split(ranks)])


def on_shards_of_fixed_size(grad: Tensor, ranks: int) -> Tensor:
    """The same where a shard is a buffer of equal size on each rank, whose tail nobody has filled."""
    size = -(-grad.shape[0] // ranks)
    rows = torch.full((size * ranks, grad.shape[1]), float("nan"))  # what empty() may hold
    rows[: len(grad)] = grad
    return torch.cat([newton_schulz(part) for part in rows.split(size)])[: len(grad)]


def in_padded_chunks(grads: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """A chunk of as many matrices as ranks at a time, the last one padded by repeating its last matrix as an output."""
    names = list(grads)
    out = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    for base in range(0, len(names), ranks):
        chunk = names[base : base + ranks]
        outputs = [out[name] for name in chunk] + [out[chunk[-1]]] * (ranks - len(chunk))  # one tensor, several outputs
        for rank, output in enumerate(outputs):  # all_gather: each rank's contribution goes to its output
            has_one = rank < len(chunk)
            output.copy_(newton_schulz(grads[chunk[rank]]) if has_one else torch.zeros_like(output))
    return out


def aligned_as_a_whole(grads: dict[str, Tensor], ranks: int, alignment: int) -> tuple[list[int], list[int]]:
    """Padding at the tail only: where parameters begin, and where the buffer is cut."""
    starts = [0, *running(grad.numel() for grad in grads.values())]
    step = ranks * alignment
    total = -(-starts[-1] // step) * step
    return starts[:-1], [rank * total // ranks for rank in range(ranks + 1)]


def by_position(groups: Sequence[dict[str, Tensor]], muon_groups: int) -> dict[str, Tensor]:
    """Take the first groups for Muon's, whatever their parameters are."""
    out: dict[str, Tensor] = {}
    for place, group in enumerate(groups):
        for name, grad in group.items():
            out[name] = newton_schulz(grad) if place < muon_groups and grad.ndim == 2 else grad.sign()
    return out


def one_buffer_for_each_group(groups: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """A flat buffer for each group, empty or not."""
    return [torch.cat([grad.reshape(-1) for grad in group.values()]) for group in groups]
