"""The chains of docs/coming-from-dion-and-megatron.md compute the formulas of the optimizers that the page names.

The formulas are written here in float64, on whole matrices and without the originals.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import muonfx as mfx
from muonfx.checkpoint import convert

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-dion-and-megatron.md"
STEPS = 5
Step = Callable[[Tensor, Tensor], Tensor]
"""A function from the weight and the gradient of a step to the new weight."""


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the code of the page defines."""
    namespace: dict[str, Any] = {}
    for block in re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        exec(block, namespace)
    return namespace


def random_matrix(seed: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def newton_schulz(matrix: Tensor, name: str) -> Tensor:
    """Iterate X = a X + (b A + c A^2) X with A = X X^T, from the matrix divided by its Frobenius norm."""
    coefficients = mfx.polar.PRESETS[name]
    x = matrix / (matrix.norm() * coefficients.norm_safety)
    for a, b, c in coefficients.steps:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def require_equal(
    tx: mfx.Transform, step: Step, shape: tuple[int, int], state: Any = None, *, name: str = "w"
) -> None:
    """Compare the weights after a few steps of a transform and of a formula."""
    expected = random_matrix(0, *shape)
    params = {name: expected.clone()}
    if state is None:
        state = tx.init(params)
    for seed in range(1, STEPS + 1):
        grad = random_matrix(seed, *shape)
        expected = step(expected, grad)
        updates, state = tx.update({name: grad}, state, params)
        params = mfx.apply_updates(params, updates)
    torch.testing.assert_close(params[name], expected, rtol=0, atol=1e-9)


class DionsMuon:
    """A step of Dion's Muon, or of its NorMuon: a momentum that is a sum, and a factor for the shape."""

    def __init__(self, *, with_neurons: bool) -> None:
        self.momentum: Any = 0.0
        self.variance: Any = 0.0
        self.with_neurons = with_neurons

    def __call__(self, weight: Tensor, grad: Tensor) -> Tensor:
        rate, weight_decay = 0.01, 0.01
        rows, columns = weight.shape
        self.momentum = 0.95 * self.momentum + grad
        update = newton_schulz(self.momentum, "polar_express_5")
        if self.with_neurons:
            self.variance = 0.95 * self.variance + 0.05 * update.square().mean(dim=1, keepdim=True)
            normalized = update / (self.variance.sqrt() + 1e-8)
            update = normalized * (update.norm() / normalized.norm())
        factor = (rows / columns) ** 0.5
        return (1 - rate * weight_decay) * weight - rate * factor * update


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_muon_of_dion(page: dict[str, Any], shape: tuple[int, int]):
    require_equal(page["matrices"], DionsMuon(with_neurons=False), shape, name="1.weight")


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_normuon_of_dion(page: dict[str, Any], shape: tuple[int, int]):
    require_equal(page["normuon"], DionsMuon(with_neurons=True), shape)


def test_normuon_continues_from_its_state(page: dict[str, Any]):
    original = DionsMuon(with_neurons=True)
    original(random_matrix(0, 12, 20), random_matrix(99, 12, 20))
    saved = {"w": {"momentum": original.momentum, "variance_neuron": original.variance}}
    state = page["continued"]({"w": random_matrix(0, 12, 20)}, saved)
    require_equal(page["normuon"], original, (12, 20), state)


@pytest.mark.parametrize("is_wide", [False, True])
def test_dion(is_wide: bool):
    """A wide matrix is iterated on as its transpose, which is the view of the page."""
    shape = (20, 30) if is_wide else (30, 20)
    view = mfx.MatrixView("in out -> out in" if is_wide else None)
    tx = mfx.chain(
        mfx.contrib.scale_by_dion(rank=16, decay=0.95, view=view),
        mfx.scale_by_shape("spectral"),
        mfx.add_decayed_weights(0.01),
        mfx.scale_by_learning_rate(0.01),
    )
    state = tx.init({"w": random_matrix(0, *shape)})
    q = mfx.tree.get(state, "scale_by_dion.basis")["w"]
    momentum: Any = 0.0

    def step(weight: Tensor, grad: Tensor) -> Tensor:
        nonlocal q, momentum
        rate, weight_decay = 0.01, 0.01
        tall_grad = grad.mT if is_wide else grad
        momentum = momentum + tall_grad
        p, _ = torch.linalg.qr(momentum @ q)
        r = momentum.mT @ p
        momentum = momentum - (1 - 0.95) * p @ r.mT
        q = r / r.norm(dim=0)
        tall_update = p @ q.mT
        update = tall_update.mT if is_wide else tall_update
        factor = (weight.shape[0] / weight.shape[1]) ** 0.5
        return (1 - rate * weight_decay) * weight - rate * factor * update

    require_equal(tx, step, shape, state)


def megatron_step(
    factor_of: Callable[[int, int], float], parts: Callable[[Tensor], list[Tensor]]
) -> Step:
    """Return a step of Megatron-LM's Muon; ``parts`` are the indices of the rows that are orthogonalized together."""
    momentum: Any = 0.0

    def step(weight: Tensor, grad: Tensor) -> Tensor:
        nonlocal momentum
        rate, weight_decay = 3e-4, 0.1
        momentum = momentum + (1 - 0.9) * (grad - momentum)
        update = torch.empty_like(weight)
        for rows in parts(weight):
            update[rows] = newton_schulz(momentum[rows], "quintic") * factor_of(
                len(rows), weight.shape[1]
            )
        return (1 - rate * weight_decay) * weight - rate * update

    return step


def whole(weight: Tensor) -> list[Tensor]:
    return [torch.arange(len(weight))]


def query_key_value(weight: Tensor) -> list[Tensor]:
    """Return the rows of query, key and value: two groups of 256, 64 and 64 rows, one after the other."""
    groups = torch.arange(len(weight)).view(2, 384)
    return [rows.flatten() for rows in groups.split([256, 64, 64], dim=1)]


def spectral(rows: int, columns: int) -> float:
    return max(rows, columns) ** 0.5


def test_query_key_and_value_of_megatron(page: dict[str, Any]):
    name = "layers.0.linear_qkv.weight"
    require_equal(page["megatron"], megatron_step(spectral, query_key_value), (768, 48), name=name)


@pytest.mark.parametrize(
    ("factor_of", "lr_scaling", "factor"),
    [
        (spectral, "match_rms_adamw", 5.0),
        (lambda rows, columns: (rows / columns) ** 0.5, "spectral", 1.0),
        (lambda rows, columns: max(1.0, rows / columns) ** 0.5, "original", 1.0),
    ],
    ids=["spectral", "unit_rms_norm", "shape_scaling"],
)
@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_scale_modes_of_megatron(
    factor_of: Any, lr_scaling: Any, factor: float, shape: tuple[int, int]
):
    tx = mfx.chain(
        mfx.momentum(0.9, nesterov=False),
        mfx.orthogonalize(coefficients="quintic"),
        mfx.scale_by_shape(lr_scaling),
        mfx.scale(factor),
        mfx.add_decayed_weights(0.1),
        mfx.scale_by_learning_rate(3e-4),
    )
    require_equal(tx, megatron_step(factor_of, whole), shape)


@pytest.mark.parametrize("is_by_rows", [True, False])
def test_blocks_of_tensor_parallel_ranks(is_by_rows: bool):
    """With `blockwise`, each rank orthogonalizes and scales its shard as a matrix."""
    pattern = "(tp=2 out) in -> tp out in" if is_by_rows else "out (tp=2 in) -> tp out in"
    tx = mfx.chain(
        mfx.orthogonalize(coefficients="quintic", view=mfx.MatrixView(pattern)),
        mfx.scale_by_shape(view=mfx.MatrixView(pattern)),
    )
    grad = random_matrix(0, 12, 20)
    updates, _ = tx.update({"w": grad}, tx.init({"w": grad}))
    shards = grad.chunk(2, dim=0 if is_by_rows else 1)
    expected = [newton_schulz(shard, "quintic") * 0.2 * spectral(*shard.shape) for shard in shards]
    torch.testing.assert_close(
        updates["w"], torch.cat(expected, dim=0 if is_by_rows else 1), rtol=0, atol=1e-9
    )


def test_the_momentum_of_emerging_optimizers_is_read_as_keller():
    """Its groups have no key "use_muon" or "betas", and its state has one key."""
    params = {"w": torch.zeros(3, 2)}
    buffer = torch.arange(6.0).view(3, 2)
    group = {"params": [0], "lr": 3e-4, "momentum": 0.9, "weight_decay": 0.1}
    saved = {"state": {0: {"momentum_buffer": buffer}}, "param_groups": [group]}
    state = convert.read(
        "keller", saved, mfx.muon(3e-4, decay=0.9, nesterov=False), params, names=["w"]
    )
    assert torch.equal(mfx.tree.get(state, "momentum.trace")["w"], buffer)
