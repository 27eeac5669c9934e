"""Modes that surround a step, such as autocast and other defaults: they change no bit of an update or a state."""

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import muonfx as mfx
from muonfx import testing as kit
from tests import variants
from tests.public import NO_MATCH
from tests.transforms.tables import EVERY_CASE, Case, Tensors
from tests.transforms.test_numbers import bits

pytestmark = NO_MATCH


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


Mode = Callable[[], AbstractContextManager[Any]]

MODES: dict[str, Mode] = {
    "autocast to bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default dtype fp64": lambda: default_dtype(torch.float64),
    "default dtype bf16": lambda: default_dtype(torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
}


def run(tx: mfx.Transform, params: Tensors, steps: list[Tensors]) -> list[Any]:
    """Return the initial state, and the updates and states of all steps."""
    return [tx.init(params), kit.examples.history(tx, params, steps)]


@pytest.mark.parametrize("case", EVERY_CASE)
def test_no_ambient_mode_changes_a_bit(case: Case):
    params, steps = case.example(3)
    usual = bits(run(case.tx, params, steps))
    stored = pickle.dumps(case.tx)
    for name, mode in MODES.items():
        with mode():
            tx = pickle.loads(stored)  # constructed in this mode, too
            results = run(tx, params, steps)
        assert bits(results) == usual, name
        assert bits(run(tx, params, steps)) == usual, f"after {name}"


WHOLE = mfx.MatrixView()


@mfx.matrixwise
def times_own_gram(*, view: mfx.MatrixView = WHOLE):
    """A transform of a user whose product autocast would round to bf16."""

    def start(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.mT @ matrix

    def step(u: torch.Tensor, s: dict[str, torch.Tensor]):
        return u @ u.mT @ u, {"gram": s["gram"] + u.mT @ u}

    return {"gram": mfx.MatrixSlot(start)}, step


@mfx.transform
def rotate():
    """A transform of a user written with `transform`, with a product in `init` and in `update`."""

    def init(params: mfx.tree.PyTree):
        return {"basis": mfx.tree.map(lambda p: p @ p.mT, params)}

    def update(updates: mfx.tree.PyTree, state: mfx.tree.PyTree, params: mfx.tree.PyTree = None):
        return mfx.tree.map(lambda u, basis: basis @ u, updates, state["basis"]), state

    return init, update


@mfx.schedule
def from_a_table():
    """A schedule of a user that creates a tensor without a device."""
    return lambda count: torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64)[
        count.long().clamp(max=2)
    ]


OF_A_USER = [
    times_own_gram(),
    rotate(),
    mfx.chain(rotate(), times_own_gram()),
    mfx.accumulate(rotate(), 2),
]


@pytest.mark.parametrize("tx", OF_A_USER, ids=repr)
@pytest.mark.parametrize(
    "mode", ["autocast to bf16", "autocast to fp16", "inference mode", "no grad"]
)
def test_a_transform_of_a_user_runs_outside_autocast(tx: mfx.Transform, mode: str):
    params, steps = kit.Example.of({"w": (9, 7), "v": (5, 6)}, steps=2)
    usual = bits(run(tx, params, steps))
    with MODES[mode]():
        results = run(tx, params, steps)
    assert bits(results) == usual


@pytest.mark.parametrize("mode", MODES)
def test_a_schedule_has_the_same_values_in_every_mode(mode: str):
    cosine = mfx.cosine_decay_schedule(0.1, 10)
    table = from_a_table()
    usual = [[schedule(count) for count in (0, 2)] for schedule in (cosine, table)]
    tx = mfx.scale(table)
    params, steps = kit.Example.of({"w": (3,)}, steps=2)
    usual_updates = bits(run(tx, params, steps))
    with MODES[mode]():
        values = [[schedule(count) for count in (0, 2)] for schedule in (cosine, from_a_table())]
        results = run(tx, params, steps)
    assert values == usual
    assert bits(results) == usual_updates


def _trained(
    make: Callable[[torch.nn.Module], torch.optim.Optimizer], mode: Mode
) -> list[torch.Tensor]:
    """Return the parameters of a small model after two steps of an optimizer that is made and run in a mode."""
    model = torch.nn.Sequential(*[torch.nn.Linear(6, 6, bias=False) for _ in range(3)])
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.data = torch.randn(6, 6, generator=generator)
        param.grad = torch.randn(6, 6, generator=generator)
    with mode():
        optimizer = make(model)
        for _ in range(2):
            optimizer.step()
    return [param.detach() for param in model.parameters()]


SOAP = variants.soap(mfx.linear_schedule(0.1, 0.0, 4))
LABELS = {"0.weight": "muon", "1.weight": "muon", "2.weight": "adamw"}
OPTIMIZERS = {
    "Muon": lambda model: mfx.Muon(model, 0.1, labels=LABELS),
    "SOAP": lambda model: mfx.TransformOptimizer(model.named_parameters(), SOAP),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_an_optimizer_is_the_same_in_every_mode(name: str, mode: str):
    make = OPTIMIZERS[name]
    usual = _trained(make, contextlib.nullcontext)
    for found, expected in zip(_trained(make, MODES[mode]), usual, strict=True):
        assert torch.equal(found, expected)


IMPORT = """
import torch
torch.set_default_dtype(torch.float64)
with torch.device("meta"):
    import muonfx as mfx
    from muonfx import contrib, compact, polar
    tx = mfx.chain(mfx.momentum(dtype=mfx.int8(min_size=0, code="dynamic")), mfx.orthogonalize(), mfx.scale(-0.1))
    polar.band("keller"), polar.fit_coefficients(2, 0.1)
torch.set_default_dtype(torch.float32)
params = {"w": torch.arange(12, dtype=torch.float32).reshape(3, 4)}
print(tx.update(params, tx.init(params))[0]["w"].tolist())
"""


def test_an_import_under_other_defaults_changes_no_bit():
    usual = IMPORT.replace('torch.device("meta")', 'torch.device("cpu")').replace(
        "(torch.float64)", "(torch.float32)"
    )
    outputs = [
        subprocess.check_output([sys.executable, "-W", "ignore", "-c", text])
        for text in (IMPORT, usual)
    ]
    assert outputs[0] == outputs[1]
