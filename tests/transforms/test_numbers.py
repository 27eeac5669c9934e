"""A number gives the same bits as a float, as a tensor and as a schedule."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx.core import ScheduledState
from muonfx.tree import elementwise as ew
from tests.transforms.test_every_transform import EVERY_CASE, SHAPES

pytestmark = [
    pytest.mark.filterwarnings("ignore:partition. no parameter has the label"),
    pytest.mark.filterwarnings("ignore:dims. .*matches none of"),
    pytest.mark.filterwarnings("ignore:blocks. .*matches none of"),
]

SCALES = (1e-45, 1e-30, 1.0, 1e20, 3e38)
"""Of gradients: from the least number of fp32 to the largest, past the squares that overflow."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def followed(tx: mfx.Transform) -> mfx.Transform:
    """Make each number of a transform, and of those within it, a constant schedule."""
    made = tx.with_children(followed) if tx.children else tx
    numbers = {name: value for name, value in made.arguments.items() if isinstance(value, float)}
    return made.replace(**{name: mfx.constant_schedule(value) for name, value in numbers.items()}) if numbers else made


WAYS: dict[str, Callable[[mfx.Transform], mfx.Transform]] = {
    "as tensors": mfx.as_tensors,
    "scheduled": followed,
}


def run(tx: mfx.Transform, params: dict[str, Tensor], steps: list[dict[str, Tensor]]) -> tuple[list[Any], Any]:
    state, found = tx.init(params), []
    for grads in steps:
        updates, state = tx.run(grads, state, params)
        found.append(updates)
    return found, state


def plain(state: Any) -> Any:
    """The state that plain numbers have, without the counts of schedules at any depth."""
    if isinstance(state, ScheduledState):
        return plain(state.inner)
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, tuple):
        parts = [plain(value) for value in state]
        return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)
    return state


def moments(state: Any) -> list[Any]:
    """The state without counts: a transform that takes a schedule itself has one more."""
    return [found for found in bits(plain(state)) if found is not None and found[0] != torch.int64]


def bits(values: Any) -> list[Any]:
    """The leaves, with one bit pattern for all NaNs: which of two NaNs a sum keeps is up to the kernel."""
    found: list[Any] = []
    for leaf in mfx.tree.leaves(values):
        if leaf is None:
            found.append(None)
            continue
        wide = leaf.double() if leaf.is_floating_point() else leaf
        found.append((leaf.dtype, torch.where(wide.isnan(), math.nan, wide).to(wide.dtype).numpy().tobytes()))
    return found


def drawn(tx: mfx.Transform, dtype: torch.dtype, scale: float) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Parameters and gradients that a transform takes: also vectors and numbers, where it does not need matrices."""
    shapes: dict[str, tuple[int, ...]] = {"w": (4, 37), "v": (5, 4)}
    if tx.name == "given_logits":
        shapes = dict(SHAPES)
    draw = torch.Generator().manual_seed(0)

    def tensors(size: float) -> dict[str, Tensor]:
        # As wide as it can be: a gradient of fp32 or bf16 at 3e38 may be infinite.
        return {
            name: (torch.randn(shape, generator=draw, dtype=torch.float64) * size).to(dtype)
            for name, shape in shapes.items()
        }

    for more in ({"b": (19,), "s": ()}, {"b": (19,)}, {}):
        try:
            tx.run(*(lambda p: (p, tx.init(p), p))({n: torch.ones(s) for n, s in (shapes | more).items()}))
        except (ValueError, IndexError):
            continue
        shapes |= more
        break
    return tensors(1.0), [tensors(scale) for _ in range(2)]


@pytest.mark.parametrize(("name", "tx"), EVERY_CASE)
def test_a_number_gives_the_same_bits_wherever_it_is_kept(name: str, tx: mfx.Transform):
    for dtype in DTYPES:
        for scale in SCALES:
            params, steps = drawn(tx, dtype, scale)
            updates, state = run(tx, params, steps)
            for way, change in WAYS.items():
                found, kept = run(change(tx), params, steps)
                assert bits(found) == bits(updates), (way, dtype, scale)
                assert moments(kept) == moments(state), (way, dtype, scale)


def _behind(function: Any, others: list[list[Tensor]], reuse: bool, xs: list[Tensor], number: Any) -> list[Tensor]:
    return function(xs, *others, number, reuse=reuse)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e20, 1e38])
def test_list_arithmetic_gives_the_same_bits_for_a_number_and_a_tensor(dtype: torch.dtype, scale: float, reuse: bool):
    draw = torch.Generator().manual_seed(1)
    sizes = (0, 1, 7, 8, 31, 64, 1025)

    def lists(size: float) -> list[Tensor]:
        long = [torch.randn(2 * n, generator=draw, dtype=torch.float64) * size for n in sizes]
        return [(x[::2] if place % 2 else x[: len(x) // 2]).to(dtype) for place, x in enumerate(long)] + [
            torch.tensor(size, dtype=dtype)
        ]

    for number in (0.1, 0.9, 1 - 0.95, 0.001, -0.3, 1.0, 0.0, 2.5):
        held = torch.tensor(number, dtype=torch.float64)
        xs, ys, zs = lists(1.0), lists(scale), lists(scale)
        operations: dict[str, Callable[[list[Tensor], Any], list[Tensor]]] = {
            "mul": functools.partial(ew.mul, reuse=reuse),
            "shift": functools.partial(ew.shift, reuse=reuse),
            "add": functools.partial(_behind, ew.add, [ys], reuse),
            "lerp": functools.partial(_behind, ew.lerp, [ys], reuse),
            "addcmul": functools.partial(_behind, ew.addcmul, [ys, zs], reuse),
            "clamp": lambda own, c: ew.clamp(own, -abs(c), abs(c)),
        }
        for name, operation in operations.items():
            assert bits(operation(ew.clone(xs), held)) == bits(operation(ew.clone(xs), number)), (name, number)
