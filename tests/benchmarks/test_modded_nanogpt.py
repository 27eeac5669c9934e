"""The contender for modded-nanogpt's track, with a tiny model and tiny files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import muonfx as mfx
from benchmarks.track import modded_nanogpt as track
from benchmarks.track.modded_nanogpt import (
    ADAM_DECAY,
    ADAM_RATES,
    GPT,
    MUON_DECAY,
    MUON_RATE,
    Config,
)
from tests.processes import Here, World

TINY = Config(
    width=32,
    depth=1,
    head=16,
    vocabulary=16,
    context=8,
    batch=16,
    microbatch=4,
    validation_tokens=512,
    steps=20,
)
CPU = torch.device("cpu")


def write_tokens(
    path: Path, tokens: np.ndarray, *, magic: int = track.MAGIC, count: int | None = None
) -> None:
    header = np.zeros(track.HEADER, dtype=np.int32)
    header[:3] = magic, track.VERSION, tokens.size if count is None else count
    path.write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Tokens that count upwards, so that a model can learn them."""
    for index in range(2):
        write_tokens(tmp_path / f"fineweb_train_{index:06}.bin", np.arange(2000) % TINY.vocabulary)
    write_tokens(tmp_path / "fineweb_val_000000.bin", np.arange(2000) % TINY.vocabulary)
    return tmp_path


def test_the_loss_falls_and_is_validated_as_on_the_track(data: Path):
    losses = track.train(TINY, data, 0, CPU)
    assert list(losses) == [0, TINY.steps]
    assert losses[0] == pytest.approx(np.log(TINY.vocabulary), rel=1e-3)  # the head starts at zero
    assert losses[TINY.steps] < 0.5 * losses[0]


def test_two_ranks_train_as_one(data: Path):
    alone = track.train(TINY, data, 0, CPU)
    world = World(2)
    try:
        both = world.check(2, train_on_rank, data=data)
    finally:
        world.close()
    for losses in both:
        assert losses == pytest.approx(alone, rel=2e-2)  # sums of bf16 gradients in another order


def train_on_rank(here: Here, data: Path) -> dict[int, float]:
    return track.train(TINY, data, 0, CPU)


def test_the_full_model_has_the_parameters_of_the_track():
    with torch.device("meta"):
        model = GPT(Config())
    matrices = 12 * 12 * 768**2 + 2 * 50304 * 768
    biases = 12 * (4 + 4 + 1) * 768 + 50304
    gains = (2 * 12 + 2) * 768
    assert sum(param.numel() for param in model.parameters()) == matrices + biases + gains
    labels = mfx.default_labels(model, roles=True)
    assert sum(label == "hidden" for label in labels.values()) == 6 * 12
    assert labels["embed.weight"] == "embedding"
    assert labels["head.weight"] == "head"
    assert set(labels.values()) == {"hidden", *ADAM_RATES}


@pytest.mark.parametrize(
    ("step", "factor"), [(0, 1.0), (975, 1.0), (2113, 1137 / 2275), (3249, 1 / 2275)]
)
def test_rates_are_constant_and_then_fall_to_zero(step: int, factor: float):
    schedule = mfx.warmup_stable_decay_schedule(MUON_RATE, 0, round(track.COOLDOWN * 3250), 3250)
    assert schedule(step) == pytest.approx(factor * MUON_RATE)


def test_two_steps_are_those_of_plain_loops():
    torch.manual_seed(0)
    model = GPT(TINY)
    model.reset()
    model.float()  # rounding of the embedding would hide differences
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    state = {name: [torch.zeros_like(param) for _ in range(2)] for name, param in expected.items()}
    labels = mfx.default_labels(model, roles=True)
    optimizer = track.make_optimizer(model, TINY.steps)
    for count in (1, 2):
        for name, param in model.named_parameters():
            grad = torch.randn_like(param)
            param.grad = grad.clone()
            if labels[name] == "hidden":
                step_of_muon(expected[name], grad, state[name])
            else:
                step_of_adamw(expected[name], grad, state[name], ADAM_RATES[labels[name]], count)
        optimizer.step()
    for name, param in model.named_parameters():
        # Products of Muon are bf16.
        tolerance = 2e-2 * MUON_RATE if labels[name] == "hidden" else 1e-5
        torch.testing.assert_close(param, expected[name], atol=tolerance, rtol=1e-5, msg=name)


def step_of_muon(param: torch.Tensor, grad: torch.Tensor, state: list[torch.Tensor]) -> None:
    average = state[0].mul_(0.95).add_(grad, alpha=0.05)
    left, _, right = torch.linalg.svd(0.05 * grad + 0.95 * average, full_matrices=False)
    update = left @ right * max(1, param.shape[0] / param.shape[1]) ** 0.5
    param.mul_(1 - MUON_RATE * MUON_DECAY).sub_(update, alpha=MUON_RATE)


def step_of_adamw(
    param: torch.Tensor, grad: torch.Tensor, state: list[torch.Tensor], rate: float, count: int
) -> None:
    first = state[0].mul_(0.8).add_(grad, alpha=0.2) / (1 - 0.8**count)
    second = state[1].mul_(0.95).addcmul_(grad, grad, value=0.05) / (1 - 0.95**count)
    param.mul_(1 - rate * ADAM_DECAY).sub_(first / (second.sqrt() + 1e-10), alpha=rate)


def test_ranks_read_the_parts_of_one_batch_and_files_follow_each_other(tmp_path: Path):
    paths = [tmp_path / "a.bin", tmp_path / "b.bin"]
    write_tokens(paths[0], np.arange(100))
    write_tokens(paths[1], np.arange(100, 200))
    whole = list(track.batches(paths, 32, 8))
    assert [int(inputs[0, 0]) for inputs, _ in whole] == [0, 32, 64, 100, 132, 164]
    for inputs, targets in whole:
        assert torch.equal(targets, inputs.long() + 1)
    parts = [list(track.batches(paths, 32, 8, rank, 2)) for rank in range(2)]
    for index, (inputs, _) in enumerate(whole):
        assert torch.equal(torch.cat([parts[0][index][0], parts[1][index][0]]), inputs)


def test_wrong_data_are_refused(data: Path, tmp_path: Path):
    write_tokens(tmp_path / "other.bin", np.arange(10), magic=1)
    with pytest.raises(ValueError, match=r"other\.bin: found the header"):
        track.read_tokens(tmp_path / "other.bin")
    write_tokens(tmp_path / "short.bin", np.arange(10), count=20)
    with pytest.raises(ValueError, match=r"found 10 tokens, expected 20"):
        track.read_tokens(tmp_path / "short.bin")
    with pytest.raises(ValueError, match="too few tokens"):
        track.train(replace(TINY, steps=100), data, 0, CPU)
    with pytest.raises(ValueError, match="no fineweb_val"):
        track.files_of(tmp_path / "empty", "val")
