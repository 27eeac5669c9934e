"""Running mean squares: of elements, and of rows and columns."""

import torch
from torch import Tensor

import muonfx as mfx

SHAPES = {"w": (4, 6), "b": (3,), "k": (5, 3, 4)}


def drawn(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


def after(tx: mfx.Transform, steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    state = tx.init(steps[0])
    for grads in steps:
        updates, state = tx.update(grads, state, grads)
    return updates


def test_debiased_it_is_adam_without_a_first_moment():
    steps = [drawn(seed) for seed in range(4)]
    rms = after(mfx.scale_by_rms(0.99, 1e-6, eps_in_sqrt=False, debias=True), steps)
    torch.testing.assert_close(rms, after(mfx.scale_by_adam(0.0, 0.99, 1e-6), steps))


def factored(**more: object) -> mfx.Transform:
    return mfx.scale_by_factored_rms(min_dim_size_to_factor=2, eps=0.0, **more)


def test_squares_of_rank_one_lose_nothing_by_being_factored():
    rows, columns = torch.rand(4, 1, dtype=torch.float64) + 0.1, torch.rand(1, 6, dtype=torch.float64) + 0.1
    steps = [{"w": size * rows * columns} for size in (1.0, 3.0, 0.5)]
    torch.testing.assert_close(after(factored(), steps), after(factored(factored=False), steps))


def test_what_is_factored_has_no_mean_squares_of_elements():
    state = factored().init(drawn(0) | {"thin": torch.zeros(1, 9)})
    shapes = {name: [tuple(own[name].shape) for own in state[1:]] for name in state.v}
    assert shapes == {
        "w": [(4,), (6,), (0,)],
        "b": [(0,), (0,), (3,)],
        "k": [(3, 4), (5, 3), (0,)],
        "thin": [(0,), (0,), (1, 9)],
    }
