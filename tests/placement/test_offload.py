"""Offloaded states: the same numbers, the place of the state, and how much of it is anywhere at once."""

import copy
import errno
import gc
import os
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import sharding, tree
from muonfx import testing as kit
from muonfx.placement import store, transfer
from muonfx.testing import chains, params_and_grads, transforms
from tests.checkpoint.common import bits
from tests.placement.test_placed import by_place
from tests.processes import Here, World, run_python
from tests.sharding.cases import Case, cases, laid_out
from tests.sharding.counting import counting
from tests.sharding.test_law import as_dtensors, dtensor_cases, held, noted, plain

HOMES = ("memory", "lane", "disk")
"""Host memory, updated in place; host memory with transfers, as for a GPU; and a disk with tiny pages."""


@contextmanager
def at_home(kind: str) -> Iterator[str]:
    """The argument ``to``."""
    with tempfile.TemporaryDirectory() as folder:
        if kind == "memory":
            yield "cpu"
        elif kind == "lane":
            with mock.patch.object(store.Store, "is_direct", return_value=False):
                yield "cpu"
        else:
            # Also what is smaller than a page goes to the disk.
            with mock.patch.object(store, "SMALLEST", 1):
                yield folder
            assert os.listdir(folder) == []  # files without a name


def on_disk(tree: Any) -> list[bool]:
    return [store.folder_of(leaf) is not None for leaf in mfx.tree.tensors(tree)]


def all_bits(tree: Any) -> list[Any]:
    here = map(held, mfx.tree.leaves(tree))
    return [None if leaf is None else bits(plain(leaf)) for leaf in here]


def check_cases(
    here: Here, cases: list[Case], kind: str, bucket_bytes: int, dtensors: bool
) -> None:
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
            sharding.offload(case.tx, to, bucket_bytes=bucket_bytes),
            layout,
            bucket_bytes=bucket_bytes,
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
                updates, state = away.update(
                    grads, state, weights, donate=mfx.Donation(False, case.donate)
                )
            assert all_bits((grads, weights)) == before[: len(all_bits((grads, weights)))], (
                "inputs changed"
            )
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


pytestmark = [
    pytest.mark.filterwarnings("ignore:partition. no parameter has the label"),
    # As it is drawn.
    pytest.mark.filterwarnings("ignore:offload. scale_by_(prodigy|dog|dowg) has the locality TREE"),
]

GIVEN_STATE = mfx.Donation(False, True)
PARAMS = {
    "a.w": torch.randn(40, 30),
    "b.b": torch.randn(2000),
    "b.w": torch.randn(50, 60),
    "c.w": torch.randn(64, 70),
    "s": torch.tensor(1.0),
}
LABELS = {name: "muon" if leaf.ndim == 2 else "adamw" for name, leaf in PARAMS.items()}
FP32 = mfx.orthogonalize(dtype=torch.float32)
MUON = mfx.muon_with_adamw(0.1, labels=LABELS, orthogonalize=FP32)
ADAM = mfx.scale_by_adam(0.0, 0.95)
WITHOUT_MOMENTUM = mfx.muon_with_adamw(0.1, decay=0.0, adam=ADAM, labels=LABELS, orthogonalize=FP32)


def drawn(step: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(step)
    return {name: torch.randn(leaf.shape, generator=draw) for name, leaf in PARAMS.items()}


# --------------------------------------------------------------------------------------------------- the same numbers


def check(
    tx: mfx.Transform, away: mfx.Transform, params: Any, steps: list[Any], *, donate: bool
) -> None:
    """The bits of updates and states, of a transform and of the same with its state away from home."""
    wanted_state, state = tx.init(params), away.init(params)
    assert all_bits(state) == all_bits(wanted_state)
    for grads in steps:
        wanted, wanted_state = tx.update(grads, wanted_state, params)
        before, old = all_bits((grads, params)), all_bits(state)
        given_state = state
        updates, state = away.update(grads, state, params, donate=mfx.Donation(False, donate))
        assert all_bits((grads, params)) == before
        assert donate or all_bits(given_state) == old
        assert mfx.tree.flatten(state)[1] == mfx.tree.flatten(wanted_state)[1]
        assert mfx.tree.spec(updates) == mfx.tree.spec(wanted)
        assert all_bits(updates) == all_bits(wanted)
        assert all_bits(state) == all_bits(wanted_state)


# Without matrices: those of one shape are multiplied in one batch, and buckets cut batches.
ANY = transforms(None) | chains(max_size=3).map(lambda members: mfx.chain(*members))
WRAPPED = st.builds(
    lambda members, wrap: wrap(mfx.chain(*members)),
    chains(min_size=1, max_size=3),
    st.sampled_from(
        (mfx.skip_nonfinite, lambda tx: mfx.accumulate(tx, 2), mfx.as_tensors, mfx.master_params)
    ),
)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EXAMPLES = params_and_grads() | st.sampled_from(DTYPES).flatmap(
    lambda dtype: params_and_grads(dtypes=(dtype,))
)


@given(
    ANY | WRAPPED,
    EXAMPLES,
    st.sampled_from(HOMES),
    st.sampled_from((1, 64, 1 << 26)),
    st.booleans(),
)
def test_offloading_changes_no_bit(
    tx: mfx.Transform, example: Any, home: str, bucket_bytes: int, donate: bool
):
    params, steps = example
    # The tensors of one call depend on the bucket: a list of several dtypes does not round a number that is a
    # tensor, as a schedule's is, and matrices of one shape are multiplied in one batch.
    mixed = len({leaf.dtype for leaf in mfx.tree.tensors(params)}) > 1
    if mixed or mfx.orthogonalize in factories(tx):
        bucket_bytes = 1 << 26
    with at_home(home) as to:
        away = sharding.offload(tx, to, bucket_bytes=bucket_bytes)
        assert mfx.hyperparams(away) == mfx.hyperparams(tx)
        assert away.fingerprint == tx.fingerprint
        check(tx, away, params, steps, donate=donate)


def factories(tx: Any) -> set[Any]:
    return {tx.factory}.union(
        *(factories(part) for part in tx.parts if isinstance(part, mfx.Transform))
    )


CHAINS = {
    "muon": MUON,
    "normuon": mfx.partition(
        {"muon": mfx.normuon(0.1, orthogonalize=FP32), "adamw": mfx.adamw(0.1)}, LABELS
    ),
    "clipped": mfx.chain(mfx.clip_by_global_norm(1.0), MUON),
    "skipping": mfx.skip_nonfinite(mfx.chain(mfx.clip_by_global_norm(1.0), MUON)),
    "accumulated": mfx.accumulate(mfx.chain(mfx.clip_by_global_norm(1.0), MUON), 2),
    "master": mfx.master_params(mfx.chain(mfx.clip_by_global_norm(1.0), MUON)),
    "numbers as tensors": mfx.as_tensors(mfx.chain(mfx.monitor("grad"), MUON)),
    "compact": mfx.scale_by_adam(
        mu_dtype=mfx.int8(min_size=0), nu_dtype=mfx.fp8(64, min_size=0, stochastic=True)
    ),
    "averaged": mfx.chain(MUON, mfx.ema_params(0.9)),
    "schedule free": mfx.contrib.schedule_free(
        mfx.chain(mfx.clip_by_global_norm(1.0), WITHOUT_MOMENTUM), 0.1
    ),
    "nested": mfx.accumulate(mfx.skip_nonfinite(mfx.master_params(MUON)), 2),
}


@pytest.mark.parametrize(
    ("home", "donate"), [("memory", True), ("lane", True), ("disk", True), ("disk", False)]
)
@pytest.mark.parametrize("name", CHAINS)
def test_chains_that_people_train_with(name: str, home: str, donate: bool):
    steps = [drawn(step) for step in range(5)]
    steps[1]["b.w"] = None
    steps[2]["a.w"][3, 3] = float("nan")
    if "skip" not in name and name != "nested":
        steps[2]["a.w"][3, 3] = 0.0
    with at_home(home) as to:
        check(
            CHAINS[name],
            sharding.offload(CHAINS[name], to, bucket_bytes=20_000),
            PARAMS,
            steps,
            donate=donate,
        )


def tree_wide(decay: float = 0.9):
    """Undeclared, with a state like the parameters."""

    def init(params):
        return mfx.tree.map(torch.zeros_like, params)

    def update(updates, state, params=None):
        mean = torch.stack([leaf.mean() for leaf in mfx.tree.tensors(updates)]).mean()
        new = mfx.tree.map(lambda u, s: decay * s + u - mean, updates, state)
        return new, mfx.tree.map(lambda s, n: s if n is None else n, state, new)

    return init, update


def summing(decay: float = 0.9):
    """A sum over leaves, and a state like the parameters."""

    def init(params):
        return {"held": mfx.tree.map(torch.zeros_like, params)}

    def update(updates, state, params=None, *, sum_over_leaves):
        total = sum_over_leaves(mfx.tree.map(torch.sum, updates))
        new = mfx.tree.map(lambda u, s: decay * s + u * total, updates, state["held"])
        return new, {"held": new}

    return init, update


@pytest.mark.parametrize("constructor", [tree_wide, summing])
@pytest.mark.parametrize("home", HOMES)
def test_a_transform_of_the_whole_tree_gets_its_whole_state_with_a_warning(
    constructor: Any, home: str
):
    tx = mfx.chain(mfx.transform(constructor)(), mfx.momentum())
    with at_home(home) as to, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        away = sharding.offload(tx, to, bucket_bytes=3)
        check(tx, away, PARAMS, [drawn(1), drawn(2)], donate=False)
    said = (
        [] if home == "memory" else [f"offload: {constructor.__name__} has the locality TREE"]
    )  # there nothing is loaded
    assert [str(one.message).partition(" and a state of")[0] for one in found] == said


def late(first: float = 0.0):
    """Updates that are the very tensors of the old state: each gradient a step later."""

    def init(params):
        return {"last": mfx.tree.map(lambda p: torch.full_like(p, first), params)}

    def update(updates, state, params=None):
        out = mfx.tree.map(lambda u, s: s, updates, state["last"])
        return out, {
            "last": mfx.tree.map(lambda s, u: s if u is None else u, state["last"], updates)
        }

    return init, update


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize(
    "tx",
    [mfx.transform(late, locality=mfx.Locality.ELEMENT)(), mfx.chain(by_place(), mfx.momentum())],
)
def test_updates_may_be_the_old_state_and_a_state_may_know_leaves_by_place(
    tx: mfx.Transform, home: str
):
    with at_home(home) as to:
        check(
            tx,
            sharding.offload(tx, to, bucket_bytes=1),
            PARAMS,
            [drawn(n) for n in range(3)],
            donate=False,
        )
        check(
            tx,
            sharding.offload(tx, to, bucket_bytes=1),
            PARAMS,
            [drawn(n) for n in range(3)],
            donate=True,
        )


def numbered():
    """A state with tensors and a number."""

    def init(params):
        return {"number": 0, "sum": mfx.tree.map(torch.zeros_like, params)}

    def update(updates, state, params=None):
        total = mfx.tree.map(torch.add, state["sum"], updates)
        return total, {"number": state["number"] + 1, "sum": total}

    return init, update


def test_an_inner_state_may_have_numbers_and_tensors(tmp_path: Path):
    labels = dict.fromkeys(PARAMS, "all")
    tx = sharding.offload(mfx.partition({"all": mfx.transform(numbered)()}, labels), tmp_path)
    with pytest.warns(UserWarning, match="locality TREE"):
        state = tx.init(PARAMS)
    for step in range(2):
        _, state = tx.update(drawn(step), state, PARAMS)
    assert [leaf for leaf in mfx.tree.leaves(state) if isinstance(leaf, int)] == [2]


# ---------------------------------------------------------------------------------------------------- one transform


def test_it_is_a_value_like_others_and_goes_inside_a_sharded_transform(tmp_path: Path):
    tx = sharding.offload(mfx.momentum(0.9), tmp_path, bucket_bytes=100)
    assert pickle.loads(pickle.dumps(tx)) == tx
    assert mfx.with_hyperparams(tx, {"decay": 0.5}).arguments["tx"] == mfx.momentum(0.5)
    assert (tx.locality, tx.reads_params) == (mfx.Locality.ELEMENT, False)
    layout = sharding.zero(PARAMS, 1)
    outside = sharding.offload(
        sharding.sharded(MUON, layout, bucket_bytes=7), "cpu", bucket_bytes=5
    )
    assert outside == sharding.sharded(
        sharding.offload(MUON, "cpu", bucket_bytes=5), layout, bucket_bytes=7
    )
    assert (mfx.hyperparams(outside), outside.fingerprint) == (
        mfx.hyperparams(MUON),
        MUON.fingerprint,
    )


# --------------------------------------------------------------------------------------------------- in place


def test_the_state_is_in_files_without_a_name_that_go_with_it(tmp_path: Path):
    tx = sharding.offload(MUON, tmp_path / "made" / "here", bucket_bytes=20_000)
    known = len(store._MAPPED)
    state = tx.init(PARAMS)
    large = [
        leaf for leaf in mfx.tree.tensors(state) if leaf.numel() * leaf.element_size() >= store.PAGE
    ]
    assert len(large) == 3 + 2  # momentum of three matrices, two moments of a vector
    assert all(on_disk(large))
    assert os.listdir(tmp_path / "made" / "here") == []
    before = [leaf.data_ptr() for leaf in large]
    _, after = tx.update(drawn(0), state, PARAMS, donate=GIVEN_STATE)
    # In place.
    assert [
        leaf.data_ptr() for leaf in mfx.tree.tensors(after) if leaf.numel() * 4 >= store.PAGE
    ] == before
    _, second = tx.update(drawn(1), after, PARAMS)
    assert not set(before) & {leaf.data_ptr() for leaf in mfx.tree.tensors(second)}
    assert all(
        on_disk([leaf for leaf in mfx.tree.tensors(second) if leaf.numel() * 4 >= store.PAGE])
    )
    del state, after, second, large
    gc.collect()
    assert len(store._MAPPED) == known


@pytest.mark.parametrize("home", HOMES)
def test_a_state_from_elsewhere_comes_home(home: str):
    with at_home(home) as to:
        tx = sharding.offload(MUON, to, bucket_bytes=20_000)
        plain, state = MUON.init(PARAMS), MUON.init(PARAMS)
        wanted, _ = MUON.update(drawn(0), plain, PARAMS)
        grads = drawn(0) | {"c.w": None}
        updates, state = tx.update(grads, state, PARAMS, donate=GIVEN_STATE)
        assert all_bits({n: updates[n] for n in ("a.w", "b.w")}) == all_bits(
            {n: wanted[n] for n in ("a.w", "b.w")}
        )
        if home == "disk":  # but for the momentum without a gradient, which stays where it is
            assert (
                on_disk([leaf for leaf in mfx.tree.tensors(state) if leaf.ndim]).count(False) == 1
            )
        del state


# ------------------------------------------------------------------------------------------------- the torch optimizer


def trained(tx: mfx.Transform, steps: int, start: Any = None) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 41))
    optimizer = mfx.TransformOptimizer(net, tx)
    if start is not None:
        net.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
    data = torch.randn(8, 40)
    for _ in range(steps):
        optimizer.zero_grad()
        net(data).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()), optimizer


@pytest.mark.parametrize("differentiate", [torch.func.grad, torch.func.jacrev])
def test_derivatives_through_a_step_are_an_error(differentiate: Any):
    tx = sharding.offload(mfx.momentum(0.9))

    def last_update(start: torch.Tensor) -> torch.Tensor:
        params = {"w": start}
        updates, _ = tx.update(params, tx.init(params), params)
        return updates["w"].sum()

    with pytest.raises(RuntimeError, match="differentiate the transform without offload"):
        differentiate(last_update)(torch.ones(2))


@pytest.mark.parametrize("home", HOMES)
def test_the_torch_optimizer_steps_alike_and_continues_a_plain_run(home: str):
    inner = mfx.muon_with_adamw(
        0.02, 0.01, orthogonalize=FP32, labels=mfx.routing.default_labels_by_name
    )
    tx = mfx.chain(mfx.clip_by_global_norm(1.0), inner)
    wanted, saved, _ = trained(tx, 4)
    half = trained(tx, 2)
    with at_home(home) as to:
        away = sharding.offload(tx, to, bucket_bytes=4096)
        for steps, start in ((4, None), (2, half)):
            found, shown, optimizer = trained(away, steps, start)
            assert all_bits(found) == all_bits(wanted)
            assert shown["param_groups"] == saved["param_groups"]
        if home == "disk":
            assert all(
                on_disk([leaf for leaf in mfx.tree.tensors(optimizer.transform_state) if leaf.ndim])
            )
        del optimizer


# ------------------------------------------------------------------------------------------------------------- memory


# Wrappers around a transform of locality TREE: their own state is loaded at once.
WITH_OWN_STATE = {"accumulated", "master", "schedule free", "nested"}


@pytest.mark.parametrize("name", CHAINS)
def test_two_buckets_at_most_are_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch):
    made: list[int] = []
    alive: list[Any] = []
    real = transfer.buffer
    own = int(name in WITH_OWN_STATE)

    def counted(nbytes: int, device: Any, *, pin: bool = False) -> torch.Tensor:
        made.append(nbytes)
        room = real(nbytes, device, pin=pin)
        alive.append(room.untyped_storage()._weak_ref())
        assert sum(not torch.UntypedStorage._expired(ref) for ref in alive) <= 2 + own
        return room

    monkeypatch.setattr(transfer, "buffer", counted)
    largest = 64 * 70 * 4
    steps = 2
    with at_home("disk") as to:
        away = sharding.offload(CHAINS[name], to, bucket_bytes=largest)
        state = away.init(PARAMS)
        for step in range(steps):
            _, state = away.update(drawn(step), state, PARAMS, donate=GIVEN_STATE)
        del state
    # A bucket has at most the two moments of the largest leaf, which is a bucket of its own.
    assert sum(nbytes > 2 * largest + 1024 for nbytes in made) == own * steps
    assert len(made) > own * steps


def test_the_next_bucket_is_read_before_this_one_is_computed(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    for name in ("_start_to_load", "put"):
        real = getattr(transfer.BucketTransfer, name)
        monkeypatch.setattr(
            transfer.BucketTransfer,
            name,
            lambda self, turn, *rest, name=name, real=real: (
                said.append(f"{name} {turn}"),
                real(self, turn, *rest),
            )[1],
        )
    some = {name: PARAMS[name] for name in ("a.w", "b.b", "b.w")}
    with at_home("disk") as to:
        tx = sharding.offload(mfx.momentum(), to, bucket_bytes=1)
        tx.update(some, tx.init(some), donate=GIVEN_STATE)
    assert said == [
        "_start_to_load 0",
        "_start_to_load 1",
        "put 0",
        "_start_to_load 2",
        "put 1",
        "_start_to_load 3",
        "put 2",
    ]


GROWTH = """
import sys, torch, muonfx as mfx
from muonfx import sharding

def peak() -> int:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) >> 10

torch.set_num_threads(1)
params = {f"w{i:03}": torch.ones(1 << 18) for i in range(256)}  # 256 MiB, and as much of state
tx = sharding.offload(mfx.ema_params(0.9), sys.argv[1], bucket_bytes=8 << 20)
tiny = {"w": torch.ones(4096)}
tx.update(tiny, tx.init(tiny), tiny)
before = peak()
state = tx.init(params)
for _ in range(2):
    _, state = tx.update(params, state, params, donate=mfx.Donation(False, True))
assert abs(float(state.average["w077"].mean()) - 1.19) < 1e-3
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="asks Linux how much memory was resident"
)
def test_a_state_on_disk_takes_no_memory(tmp_path: Path):
    # Freed memory is returned at once, so that the peak is the memory in use.
    said = run_python("-c", GROWTH, tmp_path, MALLOC_MMAP_THRESHOLD_="65536").stdout
    # Two buckets of 8 MiB, and what the arithmetic takes for one; the state is of 256 MiB.
    assert int(said) <= 48


# -------------------------------------------------------------------------------------------------------------- faults


def test_a_folder_that_cannot_be_made_or_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"offload: to='.*file' cannot take 0\.0 MiB of state: File exists"
    ):
        sharding.offload(mfx.momentum(), tmp_path / "file").init(PARAMS)
    monkeypatch.setattr(store.os, "access", lambda path, mode: False)
    with pytest.raises(PermissionError, match="the folder is not writable"):
        sharding.offload(mfx.momentum(), tmp_path).init(PARAMS)


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tx = sharding.offload(CHAINS["clipped"], tmp_path, bucket_bytes=20_000)
    _, state = tx.update(drawn(0), tx.init(PARAMS), PARAMS)
    before = all_bits(state)
    usage = store.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: usage._replace(free=2**14))
    with pytest.raises(OSError, match=r"has 0 MiB free, the state needs") as caught:
        tx.update(drawn(1), state, PARAMS)
    assert caught.value.errno == errno.ENOSPC
    assert all_bits(state) == before
    with pytest.raises(OSError, match="MiB free"):
        tx.init(PARAMS)
    wanted, _ = CHAINS["clipped"].update(drawn(1), state, PARAMS)
    updates, _ = tx.update(drawn(1), state, PARAMS, donate=GIVEN_STATE)  # in place there is room
    assert all_bits(updates) == all_bits(wanted)


def failing(on: str = "b.w"):
    def init(params):
        return {"held": mfx.tree.map(torch.zeros_like, params)}

    def update(updates, state, params=None):
        if updates[on] is not None and bool(updates[on].isnan().any()):
            raise RuntimeError("a bug")
        return updates, {
            "held": mfx.tree.map(lambda s, u: s if u is None else s + u, state["held"], updates)
        }

    return init, update


@pytest.mark.parametrize("home", HOMES)
def test_after_an_error_in_one_bucket_the_old_state_is_good(home: str):
    tx = mfx.transform(failing, locality=mfx.Locality.LEAF)()
    with at_home(home) as to:
        away = sharding.offload(tx, to, bucket_bytes=1)
        _, state = away.update(drawn(0), away.init(PARAMS))
        before = all_bits(state)
        bad = drawn(1)
        bad["b.w"][0, 0] = float("nan")
        with pytest.raises(RuntimeError, match="a bug"):
            away.update(bad, state)
        assert all_bits(state) == before
        wanted, _ = tx.update(drawn(2), state)
        assert all_bits(away.update(drawn(2), state)[0]) == all_bits(wanted)
        del state


# ---------------------------------------------------------------------------------------------------- on real processes

SIZES = st.sampled_from((2, 3, 4))
PLACES = st.tuples(st.sampled_from(HOMES), st.sampled_from((1, 200, 1 << 26)), st.just(False))


def check_on_ranks(world: World, size: int, some: list[Case], place: tuple[Any, ...]) -> None:
    names = ("kind", "bucket_bytes", "dtensors")
    world.check(size, check_cases, cases=some, **dict(zip(names, place, strict=True)))


@pytest.mark.slow
@pytest.mark.dist
@settings(max_examples=settings.default.max_examples // 2)
@given(
    SIZES.flatmap(
        lambda size: st.tuples(st.just(size), st.lists(cases(size), min_size=1, max_size=4))
    ),
    PLACES,
)
def test_sharded_and_offloaded_is_sharded(
    world: World, some: tuple[int, list[Case]], place: tuple[Any, ...]
):
    check_on_ranks(world, *some, place)


@pytest.mark.dist
@settings(max_examples=settings.default.max_examples // 4)
@given(
    SIZES.flatmap(
        lambda size: st.tuples(st.just(size), st.lists(dtensor_cases(size), min_size=1, max_size=3))
    ),
    PLACES,
)
def test_dtensors_are_offloaded(world: World, some: tuple[int, list[Case]], place: tuple[Any, ...]):
    check_on_ranks(world, *some, (*place[:2], True))


@pytest.mark.dist
def test_all_ranks_learn_that_one_has_no_room(world: World, tmp_path: Path):
    (tmp_path / "file").write_text("")
    found = world.run(3, init_in, folders=[str(tmp_path), str(tmp_path / "file"), str(tmp_path)])
    assert [type(failed.error).__name__ for failed in found] == [
        "ShardingError",
        "FileExistsError",
        "ShardingError",
    ]
    assert "rank 1: FileExistsError" in str(found[0].error)
    world.check(3, init_in, folders=[str(tmp_path)] * 3)  # one folder serves all
    assert os.listdir(tmp_path) == ["file"]


@mfx.transform
def largest_of_all():
    """Its state has the size of the parameters, and it needs the whole tree: undeclared, so TREE."""

    def init(params):
        return {"sum": tree.map(torch.zeros_like, params)}

    def update(updates, state, params=None):
        total = tree.map(torch.add, state["sum"], updates)
        largest = max(float(leaf.abs().max()) for leaf in tree.leaves(total))
        return tree.map(lambda leaf: leaf / largest, total), {"sum": total}

    return init, update


@pytest.mark.filterwarnings("ignore:.*locality TREE")
def test_the_state_of_a_transform_of_the_whole_tree_is_stored_also_if_it_is_sharded(tmp_path: Path):
    params = {"a": torch.randn(40, 50), "b": torch.randn(3000)}
    layout = sharding.zero(params, 1, partition="flat")
    local = layout.shard(params)
    ends = []
    for tx in (largest_of_all(), sharding.offload(largest_of_all(), tmp_path)):
        over = sharding.sharded(tx, layout)
        state = over.init(local)
        for _ in range(2):
            updates, state = over.update(local, state, local)
        ends.append((updates, mfx.tree.leaves(state)))
    place = store.Store(str(tmp_path))
    assert [place.has(leaf, torch.device("cpu")) for leaf in ends[1][1]] == [True, True]
    kit.violation.require_same("updates and state", ends[1], ends[0], "in memory")


@pytest.mark.filterwarnings("ignore:.*locality TREE")
def test_a_transform_of_the_whole_tree_may_overwrite_its_loaded_state(tmp_path: Path):
    donations: list[mfx.Donation] = []

    def whole_tree():
        def init(params):
            return tree.map(torch.zeros_like, params)

        def update(updates, state, params=None, *, donate=mfx.core.donation.NOTHING):
            donations.append(donate)
            return updates, tree.map(torch.Tensor.add_, state, updates)

        return init, update

    tx = sharding.offload(mfx.transform(whole_tree)(), tmp_path)
    state = tx.init(PARAMS)
    before = all_bits(state)
    tx.update(drawn(0), state, PARAMS)
    assert donations == [mfx.Donation(updates=False, state=True)]
    assert all_bits(state) == before


def test_the_own_state_of_a_wrapper_is_not_looked_up_after_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # On a GPU, a look-up calls the driver for each tensor; on a disk, it goes through all files that are mapped.
    params = {"w": torch.ones(64, 64), "v": torch.ones(64, 64)}
    tx = sharding.offload(mfx.accumulate(mfx.scale(0.5), 2), str(tmp_path), bucket_bytes=1)
    state = tx.init(params)
    looked_up: list[int] = []
    has = store.Store.has

    def counted(self: store.Store, leaf: torch.Tensor, device: torch.device) -> bool:
        looked_up.append(id(leaf))
        return has(self, leaf, device)

    monkeypatch.setattr(store.Store, "has", counted)
    tx.update({"w": torch.ones(64, 64), "v": torch.ones(64, 64)}, state, params, donate=True)
    for total in [leaf for leaf in tree.tensors(state) if leaf.shape == (64, 64)]:
        # Before the step: whether the store needs room for it, and whether it can be overwritten.
        assert looked_up.count(id(total)) == 2


def test_a_folder_in_the_home_of_the_user_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tx = sharding.offload(mfx.momentum(), "~/state")
    tx.init({"w": torch.zeros(64, 64)})
    assert (tmp_path / "state").is_dir()
