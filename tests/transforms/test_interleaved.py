"""Several runs of one transform, updated, saved, restored and reset in any order, are what a replay gives."""

import copy
import io
import pickle
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import muonfx as mfx
from muonfx import testing as kit
from muonfx import tree
from muonfx.testing.violation import bits_equal

pytestmark = pytest.mark.filterwarnings("ignore:partition. no parameter has the label")

RUNS = 3
runs = st.integers(0, RUNS - 1)
kinds = st.sampled_from(["pickle", "deepcopy", "file-like"])


def saved(state: Any, kind: str) -> Any:
    """A copy of a state that shares nothing with it, by one of the ways in which states are kept."""
    if kind == "pickle" and any(leaf.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for leaf in tree.tensors(state)):
        file = io.BytesIO()  # torch 2.13 cannot pickle float8 but by torch.save
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    if kind == "pickle":
        return pickle.loads(pickle.dumps(state))
    if kind == "deepcopy":
        return copy.deepcopy(state)
    # As a checkpoint does: named tensors out, and into the structure of a fresh state.
    named = dict(zip(tree.names(state), [leaf.clone() for leaf in tree.leaves(state)], strict=True))
    return tree.unflatten(tree.flatten(state)[1], [named[name] for name in tree.names(state)])


class Interleaved(RuleBasedStateMachine):
    """Each run holds a state, the updates it gave out, and the seeds of the steps that led there."""

    @initialize(tx=kit.transforms(), shapes=st.sampled_from([{"w": (2, 3)}, {"w": (2, 2), "b": (3,)}, {"s": ()}]))
    def start(self, tx: mfx.Transform, shapes: dict[str, tuple[int, ...]]) -> None:
        self.tx = tx
        self.shapes = shapes
        self.params = kit.Example.of(shapes, steps=0).params
        self.states = [tx.init(self.params) for _ in range(RUNS)]
        self.steps: list[list[int]] = [[] for _ in range(RUNS)]
        self.given_out: list[Any] = [None] * RUNS
        self.kept: list[tuple[Any, list[int]]] = []

    def grads(self, seed: int) -> Any:
        return kit.Example.of(self.shapes, steps=0, seed=seed + 1).params

    @rule(run=runs, seed=st.integers(0, 5), donate=st.booleans())
    def update(self, run: int, seed: int, donate: bool) -> None:
        updates, self.states[run] = self.tx.update(self.grads(seed), self.states[run], self.params, donate=donate)
        self.given_out[run] = tree.map(torch.clone, updates)
        self.steps[run] = [*self.steps[run], seed]

    @rule(run=runs, kind=kinds)
    def snapshot(self, run: int, kind: str) -> None:
        self.kept.append((saved(self.states[run], kind), self.steps[run]))

    @rule(run=runs, which=st.integers(0, 9), kind=kinds)
    def restore(self, run: int, which: int, kind: str) -> None:
        if self.kept:
            state, steps = self.kept[which % len(self.kept)]
            # A copy: the next update may donate it, and the snapshot may be wanted again.
            self.states[run], self.steps[run], self.given_out[run] = saved(state, kind), steps, None

    @rule(run=runs)
    def reset(self, run: int) -> None:
        self.states[run], self.steps[run], self.given_out[run] = self.tx.init(self.params), [], None

    @rule()
    def rebuild_the_transform(self) -> None:
        self.tx = pickle.loads(pickle.dumps(self.tx))

    @invariant()
    def every_run_is_its_replay(self) -> None:
        if not hasattr(self, "tx"):
            return
        for state, steps, given_out in zip(self.states, self.steps, self.given_out, strict=True):
            replayed, updates = self.tx.init(self.params), None
            for seed in steps:
                updates, replayed = self.tx.update(self.grads(seed), replayed, self.params)
            for name, a, b in zip(tree.names(replayed), tree.leaves(state), tree.leaves(replayed), strict=True):
                assert bits_equal(a, b), f"{self.tx!r}, state {name}: {a} is not {b}"
            if given_out is not None:
                for a, b in zip(tree.leaves(given_out), tree.leaves(updates), strict=True):
                    assert a is b or bits_equal(a, b), f"{self.tx!r}, updates: {a} is not {b}"


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = hypothesis.settings(max_examples=40, stateful_step_count=15)
