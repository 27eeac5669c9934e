"""Training loops that compose transforms over ranks, against their formulas in float64: local steps and MuonBP."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import muonfx as mfx
from muonfx import sharding
from tests.formulas import EXACT
from tests.processes import Here, World, on_ranks
from tests.sharding.cases import Placed, laid_out, some
from tests.sharding.counting import Counted, counting

pytestmark = pytest.mark.dist

Tree = dict[str, Tensor]
START = {"up": some(6, 4).double(), "down": some(4, 6, seed=1).double()}
RATE, DECAY = 0.05, 0.9


def polar(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left @ right


def averaged(memory: Tree, name: str, gradient: Tensor) -> Tensor:
    """Nesterov's look-ahead of the average of the gradients."""
    memory[name] = DECAY * memory.get(name, torch.zeros_like(gradient)) + (1 - DECAY) * gradient
    return DECAY * memory[name] + (1 - DECAY) * gradient


# ------------------------------------------------------------------------------------------------------- local steps

ROUNDS, STEPS, OUTER_RATE, OUTER_DECAY = 4, 3, 0.7, 0.6


def gradient(rank: int, params: Tree, step: int) -> Tree:
    """The gradient of a loss that differs between ranks and steps."""
    return {
        name: (rank + 1) * (param - 2 * START[name].roll(rank + step, 0)).tanh()
        for name, param in params.items()
    }


class LocalSteps:
    """The loop of docs/local-steps.md on one rank."""

    def __init__(self, here: Here) -> None:
        self.rank = here.rank
        self.params = {name: nn.Parameter(leaf.clone()) for name, leaf in START.items()}
        self.inner = mfx.TransformOptimizer(
            self.params, mfx.muon(RATE, decay=DECAY, orthogonalize=EXACT)
        )
        momentum = mfx.momentum(OUTER_DECAY, nesterov=True, heavy_ball=True)
        self.layout = sharding.zero(self.detached(), here.group)
        self.stx = sharding.sharded(
            mfx.chain(momentum, mfx.scale_by_learning_rate(OUTER_RATE)), self.layout
        )
        self.start = self.layout.shard(self.detached())
        self.state = self.stx.init(self.start)

    def detached(self) -> Tree:
        return {name: param.detach() for name, param in self.params.items()}

    def take_start(self) -> None:
        for name, leaf in self.layout.gather(self.start).items():
            self.params[name].detach().copy_(leaf)

    def inner_steps(self, turn: int) -> None:
        for step in range(STEPS):
            for name, leaf in gradient(self.rank, self.detached(), turn * STEPS + step).items():
                self.params[name].grad = leaf
            self.inner.step()

    def outer_step(self) -> None:
        mean = self.layout.reduce_scatter(self.detached())
        difference = {name: self.start[name] - mean[name] for name in self.start}
        updates, self.state = self.stx.update(difference, self.state, self.start)
        self.start = mfx.apply_updates(self.start, updates)
        self.take_start()

    def save(self, folder: Path) -> None:
        mfx.checkpoint.save(folder / "outer", self.state, tx=self.stx, params=self.start)
        mfx.checkpoint.save(folder / f"inner-{self.rank}", self.inner.transform_state)

    def load(self, folder: Path) -> None:
        self.state = mfx.checkpoint.load(folder / "outer", like=self.state, tx=self.stx)
        self.start = mfx.checkpoint.load_params(folder / "outer", like=self.start, tx=self.stx)
        self.take_start()
        own = self.inner.transform_state
        saved = mfx.checkpoint.load(folder / f"inner-{self.rank}", like=own)
        mfx.tree.map(lambda leaf, new: leaf.copy_(new), own, saved)


def local_steps_by_formula(size: int) -> Iterator[Tree]:
    """Yield the parameters after each round, from one process that computes the steps of all ranks."""
    start, outer = START, {name: torch.zeros_like(leaf) for name, leaf in START.items()}
    memories: list[Tree] = [{} for _ in range(size)]
    for turn in range(ROUNDS):
        ends = []
        for rank, memory in enumerate(memories):
            params = start
            for step in range(STEPS):
                grads = gradient(rank, params, turn * STEPS + step)
                params = {
                    name: param
                    - RATE
                    * 0.2
                    * max(param.shape) ** 0.5
                    * polar(averaged(memory, name, grads[name]))
                    for name, param in params.items()
                }
            ends.append(params)
        delta = {name: sum(leaf - end[name] for end in ends) / size for name, leaf in start.items()}
        outer = {name: OUTER_DECAY * m + delta[name] for name, m in outer.items()}
        start = {
            name: x - OUTER_RATE * (delta[name] + OUTER_DECAY * outer[name])
            for name, x in start.items()
        }
        yield start


@pytest.mark.parametrize("size", [2, 3])
@on_ranks()
def test_local_steps_follow_their_formula(here: Here):
    loop = LocalSteps(here)
    for turn, expected in enumerate(local_steps_by_formula(here.size)):
        loop.inner_steps(turn)
        loop.outer_step()
        torch.testing.assert_close(loop.detached(), expected, rtol=0, atol=1e-9)


@on_ranks(2)
def test_local_steps_resume_with_the_same_bits(here: Here, tmp_path: Path):
    straight, resumed = LocalSteps(here), LocalSteps(here)
    for turn in range(2):
        straight.inner_steps(turn)
        straight.outer_step()
    straight.save(tmp_path)
    resumed.load(tmp_path)
    for turn in range(2, ROUNDS):
        for loop in (straight, resumed):
            loop.inner_steps(turn)
            loop.outer_step()
        assert all(
            torch.equal(resumed.params[name], param) for name, param in straight.params.items()
        )


def count_local_steps(here: Here) -> tuple[Counted, Counted]:
    loop = LocalSteps(here)
    loop.inner_steps(0)
    loop.outer_step()
    with counting(here) as inner:
        loop.inner_steps(1)
    with counting(here) as outer:
        loop.outer_step()
    return inner, outer


def test_inner_steps_send_nothing_and_an_outer_step_what_an_all_reduce_sends(world: World):
    total = sum(leaf.numel() * 8 for leaf in START.values())
    for size in (2, 3):
        found = world.check(size, count_local_steps)
        assert all(not inner.sent and inner.matrices == STEPS * len(START) for inner, _ in found)
        assert sum(outer.exchanged for _, outer in found) == 2 * total * (size - 1)
        assert all(outer.else_sent < 300 for _, outer in found)


# ------------------------------------------------------------------------------------------------------------ MuonBP

PERIOD = 3
VIEWS = {"rows": "(part=2 out) in -> part out in", "columns": "out (part=2 in) -> part out in"}


def block_periodic(view: str) -> tuple[mfx.Transform, mfx.Transform]:
    """The two transforms of docs/muon-variants.md, with equal states."""
    in_blocks = EXACT.replace(view=mfx.MatrixView(view))
    return tuple(mfx.muon(RATE, decay=DECAY, orthogonalize=part) for part in (EXACT, in_blocks))


def run_block_periodic(here: Here, cut: str) -> list[tuple[Tree, Counted]]:
    """Return the parameters and the messages after each step."""
    layout = laid_out(Placed(dict.fromkeys(START, ("0" if cut == "rows" else "1",))), START, here)
    whole, blocks = (sharding.sharded(tx, layout) for tx in block_periodic(VIEWS[cut]))
    params = layout.shard(START)
    state, found = whole.init(params), []
    for step in range(2 * PERIOD + 1):
        grads = layout.shard(gradient(0, layout.gather(params), step))
        # The first step also compares parameters and states between ranks, by collectives that `counting` refuses.
        with counting(here) if step else nullcontext(Counted()) as counted:
            stx = whole if step % PERIOD == 0 else blocks
            updates, state = stx.update(grads, state, params)
        params = mfx.apply_updates(params, updates)
        found.append((layout.gather(params), counted))
    return found


def block_periodic_by_formula(cut: str) -> Iterator[Tree]:
    params, memory = START, {}
    for step in range(2 * PERIOD + 1):
        grads, after = gradient(0, params, step), {}
        for name, param in params.items():
            parts = 1 if step % PERIOD == 0 else 2
            blocks = averaged(memory, name, grads[name]).chunk(parts, 0 if cut == "rows" else 1)
            scale = 0.2 * max(blocks[0].shape) ** 0.5
            after[name] = param - RATE * scale * torch.cat(
                [*map(polar, blocks)], 0 if cut == "rows" else 1
            )
        params = after
        yield params


@pytest.mark.parametrize("cut", VIEWS)
def test_block_periodic_muon_sends_nothing_at_steps_in_blocks_of_rows(world: World, cut: str):
    total = sum(leaf.numel() * 8 for leaf in START.values())
    by_rank: list[Any] = world.check(2, run_block_periodic, cut=cut)
    for step, expected in enumerate(block_periodic_by_formula(cut)):
        steps = [found[step] for found in by_rank]
        for params, _ in steps:
            torch.testing.assert_close(params, expected, rtol=0, atol=1e-9)
        is_whole = step % PERIOD == 0
        # Blocks of columns are not contiguous, and are gathered like whole matrices.
        if step > 0 and cut == "rows":
            assert sum(counted.exchanged for _, counted in steps) == (total if is_whole else 0)
            assert sum(counted.matrices for _, counted in steps) == len(START) * (
                1 if is_whole else 2
            )
            assert all(counted.else_sent < 300 for _, counted in steps)
