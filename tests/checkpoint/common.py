"""Helpers of the checkpoint tests."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import muonfx as mfx


def bits(tensor: Tensor) -> bytes:
    """Shape, dtype and bytes: equal exactly for tensors with equal bits, NaN and -0.0 included."""
    plain = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    # Copied: a tensor of one element counts as contiguous with any stride.
    flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))
    values = flat.view(torch.uint8).tolist() if flat.numel() else []
    return repr((tuple(plain.shape), plain.dtype)).encode() + bytes(values)


def assert_same_tree(one: Any, other: Any) -> None:
    """Same structure, and bitwise the same tensors."""
    leaves, treedef = mfx.tree.flatten(one)
    others, other_treedef = mfx.tree.flatten(other)
    assert treedef == other_treedef
    for name, a, b in zip(mfx.tree.names(one), leaves, others, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or bits(a) == bits(b), name


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder, for hypothesis: a fixture is one for all examples."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def copies(path: Path) -> dict[str, bytes]:
    """All files of a checkpoint, hidden ones included."""
    return {file.name: file.read_bytes() for file in path.iterdir()}


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads for torch, and for reading."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def small_params(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (8, 4),
        "blocks.0.up.weight": (6, 4),
        "blocks.0.up.bias": (6,),
        "scale": (),
    }
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def grads_like(params: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return mfx.tree.map(lambda p: torch.randn(p.shape, generator=generator).to(p.dtype), params)


def trained(tx: mfx.Transform, params: Any, steps: int = 2) -> tuple[Any, Any]:
    """Parameters and state after some steps."""
    state = tx.init(params)
    for step in range(steps):
        updates, state = tx.update(grads_like(params, step), state, params)
        params = mfx.apply_updates(params, updates)
    return params, state
