"""What the tests of offloading share, here and on ranks: homes to try, and comparisons."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import muonfx as mfx
from muonfx import sharding
from muonfx.program.offload import store
from tests.processes import Here
from tests.sharding.cases import Case, bits, laid_out
from tests.sharding.counting import counting
from tests.sharding.test_law import as_dtensors, held, noted, plain

HOMES = ("memory", "lane", "disk")
"""Host memory, worked in where it lies; host memory behind a lane, as for a GPU; and a disk whose pages are tiny."""


@contextmanager
def at_home(kind: str) -> Iterator[str]:
    """What to give as ``to``."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "memory":
            yield "cpu"
        elif kind == "lane":
            with mock.patch.object(store.Store, "is_direct", return_value=False):
                yield "cpu"
        else:
            with mock.patch.object(store, "SMALLEST", 1):  # also what is smaller than a page goes to the disk
                yield folder
            assert os.listdir(folder) == []  # files without a name


def on_disk(tree: Any) -> list[bool]:
    return [store.folder_of(leaf) is not None for leaf in mfx.tree.tensors(tree)]


def all_bits(tree: Any) -> list[Any]:
    here = map(held, mfx.tree.leaves(tree))
    return [None if leaf is None else bits(plain(leaf)) for leaf in here]


def check_cases(here: Here, cases: list[Case], kind: str, bucket_bytes: int, dtensors: bool) -> None:
    """Check that each case, offloaded, is the same as without: bits, bytes that are sent, and matrices computed."""
    for case in cases:
        noted(check_case, here, case, kind, bucket_bytes, dtensors)


def check_case(here: Here, case: Case, kind: str, bucket_bytes: int, dtensors: bool) -> None:
    params = case.model.params()
    layout = laid_out(case.layout, params, here, case.tx)

    def enter(whole: Any) -> Any:
        local = layout.shard(whole)
        return as_dtensors(local, layout, here, case, params) if dtensors else local

    with at_home(kind) as to:
        plain = sharding.sharded(case.tx, layout, bucket_bytes=bucket_bytes)
        away = sharding.sharded(
            sharding.offload(case.tx, to, bucket_bytes=bucket_bytes), layout, bucket_bytes=bucket_bytes
        )
        wanted_state, state = plain.init(enter(params)), away.init(enter(params))
        assert all_bits(state) == all_bits(wanted_state)
        for step in range(case.model.steps):
            grads, weights = enter(case.model.grads(step)), enter(params)
            with counting(here) as wanted_counts:
                wanted, wanted_state = plain.update(grads, wanted_state, weights)
            before = all_bits((grads, weights, state))
            old = state
            with counting(here) as counts:
                updates, state = away.update(grads, state, weights, donate=mfx.Donation(False, case.donate))
            assert all_bits((grads, weights)) == before[: len(all_bits((grads, weights)))], "inputs changed"
            assert case.donate or all_bits((grads, weights, old)) == before, "inputs changed"
            del old
            assert counts == wanted_counts
            assert all_bits(updates) == all_bits(wanted), f"step {step}"
            assert mfx.tree.flatten(state)[1] == mfx.tree.flatten(wanted_state)[1]
            assert all_bits(state) == all_bits(wanted_state), f"state after step {step}"
        again = sharding.from_global(away, sharding.to_global(away, state))
        assert all_bits(again) == all_bits(state)
        del state, again


def init_in(here: Here, folders: list[str]) -> None:
    """Make a state in a folder, on each rank another; errors are the caller's to look at."""
    params = {"w": torch.zeros(64, 64), "v": torch.zeros(5000)}
    layout = sharding.zero(params, here.group, partition="whole")
    tx = sharding.sharded(sharding.offload(mfx.scale_by_adam(), folders[here.rank]), layout)
    tx.init(layout.shard(params))
