"""The examples run, resume bit for bit, survive Ctrl-C, and say clearly what is wrong."""

import functools
import importlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest
import torch

import muonfx as mfx
from tests.processes import Here, World

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).parent.parent / "examples"
TRAIN_GPT = EXAMPLES / "train_gpt.py"
CHECKPOINTS = "checkpoints"
TINY = ["--optimizer", "muon", "--quick", "--steps", "5", "--batch", "4", "--context", "32"]
OPTIMIZERS = ["muon", "adamw", "normuon", "torch-muon"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch):
    """Import a module of the examples, as train_gpt.py itself finds its neighbours."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


@pytest.fixture
def train_gpt(module, monkeypatch: pytest.MonkeyPatch):
    """The big example, with short samples: each byte of one is a pass through the model."""
    program = module("train_gpt")
    monkeypatch.setattr(program, "generate", functools.partial(program.generate, length=16))
    return program


def start(*command: object, **more: str) -> subprocess.Popen[str]:
    """Start Python with the examples and this checkout on its path."""
    search = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(search),
        **more,
    }
    words = [sys.executable, *map(str, command)]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def run(*command: object) -> tuple[int, str, str]:
    process = start(*command)
    out, err = process.communicate()
    return process.returncode, out, err


def metrics_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def tensors_of(checkpoints: Path) -> dict[str, torch.Tensor]:
    return mfx.checkpoint.read(mfx.checkpoint.latest(checkpoints))


def assert_same_run(
    one: Path, other: Path, one_kept: Path | None = None, other_kept: Path | None = None
) -> None:
    first, second = (
        tensors_of(one_kept or one / CHECKPOINTS),
        tensors_of(other_kept or other / CHECKPOINTS),
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        one_bits, other_bits = (own.reshape(-1).view(torch.uint8) for own in (tensor, second[name]))
        assert torch.equal(one_bits, other_bits), name  # torch cannot compare float8
    one_metrics, other_metrics = metrics_of(one), metrics_of(other)
    for key in ("train_losses", "sample", "config", "steps_done", "final_validation_loss"):
        assert one_metrics[key] == other_metrics[key], key
    assert [(v["step"], v["loss"]) for v in one_metrics["validation"]] == [
        (v["step"], v["loss"]) for v in other_metrics["validation"]
    ]


def interrupt_at(module: ModuleType, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Press Ctrl-C while the batch of a step is drawn."""
    batch = module.Corpus.batch

    def press(self, seed, at, *sizes):
        if at == step:
            signal.raise_signal(signal.SIGINT)
        return batch(self, seed, at, *sizes)

    monkeypatch.setattr(module.Corpus, "batch", press)


# ---------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_quick_run_learns_and_leaves_its_files(tmp_path: Path, optimizer: str) -> None:
    code, out, err = run(TRAIN_GPT, "--quick", "--optimizer", optimizer, "--out", tmp_path)
    assert code == 0, err
    for name in ("loss.png", "metrics.json", "sample.txt"):
        assert (tmp_path / name).stat().st_size > 100
        assert f"{tmp_path / name}\n" in out
    newest = mfx.checkpoint.latest(tmp_path / CHECKPOINTS, verify=True)
    assert f"{newest}\n" in out
    assert mfx.checkpoint.inspect(newest).step == 40
    assert "blocks.0.mlp.up.weight" in out
    assert "tok/s" in err  # the progress bar
    metrics = metrics_of(tmp_path)
    assert metrics["config"]["optimizer"] == optimizer
    assert len(metrics["train_losses"]) == metrics["steps_done"] == metrics["config"]["steps"]
    # The head starts at zero: log 256.
    assert metrics["train_losses"][0] == pytest.approx(5.545, abs=0.01)
    assert [point["step"] for point in metrics["validation"]] == [10, 20, 30, 40]
    assert metrics["final_validation_loss"] == metrics["validation"][-1]["loss"] < 3.3


# ---------------------------------------------------------------------------------------------------- stop and resume


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer", "muon", "--dtype", "fp32"],
        ["--optimizer", "normuon", "--dtype", "bf16"],
        pytest.param(["--optimizer", "torch-muon"], marks=pytest.mark.slow),
        ["--state-dtype", "int8"],
    ],
    ids=" ".join,
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    tmp_path: Path, train_gpt, module, monkeypatch, capsys, options: list[str]
) -> None:
    arguments = [*TINY, "--steps", "10", *options, "--out"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert train_gpt.main([*arguments, str(whole)]) == 0
    with monkeypatch.context() as patched:
        interrupt_at(module("text"), patched, step=6)
        assert train_gpt.main([*arguments, str(stopped)]) == 130
    assert metrics_of(stopped)["steps_done"] == 7  # the step that was under way is done
    assert "--resume" in capsys.readouterr().out
    assert (stopped / "loss.png").exists()
    assert train_gpt.main(["--resume", "--out", str(stopped)]) == 0
    assert_same_run(whole, stopped)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to another process")
def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    kept = tmp_path / "elsewhere"
    quick = (TRAIN_GPT, "--quick", "--optimizer", "muon", "--steps", 150)
    process = start(*quick, "--save-every", 3, "--out", stopped, "--checkpoint", kept)
    while not mfx.checkpoint.checkpoints(kept) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    again = out.split("to continue: ")[1].splitlines()[0]
    done = metrics_of(stopped)["steps_done"]
    assert 3 <= done < 150
    assert mfx.checkpoint.verify(mfx.checkpoint.latest(kept)).step == done
    assert "params/head.weight" in tensors_of(kept)
    assert len(mfx.checkpoint.checkpoints(kept)) <= 2
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(again, shell=True, check=True, capture_output=True, env=environment)
    assert run(*quick, "--out", whole)[0] == 0
    assert_same_run(stopped, whole, kept)


# ---------------------------------------------------------------------------------------------------- several processes


def torchrun(processes: int, *arguments: object) -> tuple[int, str, str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return run(*launcher, TRAIN_GPT, *arguments)


def losses_beside(folder: Path) -> tuple[list[float], list[float]]:
    """The losses of a run on several ranks, and of the same steps in one process."""
    metrics = metrics_of(folder)
    alone = metrics["one_process"]
    return metrics["train_losses"][alone["begin"] :], alone["losses"]


# One start of Python for all layouts: each initializes a new group, at a port of its own.
EACH_WAY = """
import os, sys
import train_gpt
ways, ports, folder, *options = sys.argv[1:]
for way, port in zip(ways.split(), ports.split()):
    os.environ["MASTER_PORT"] = port
    code = train_gpt.main([*options, "--shard", way, "--out", os.path.join(folder, way)])
    if code:
        break
sys.stdout.flush()
os._exit(code)
"""


def free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [str(one.getsockname()[1]) for one in sockets]


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_have_the_losses_of_one_in_every_way(tmp_path: Path) -> None:
    ways = ["ddp", "zero1", "zero2", "zero3", "fsdp2", "tp", "cp"]
    command = ("-c", EACH_WAY, " ".join(ways), " ".join(free_ports(len(ways))), tmp_path, *TINY)
    both = [
        start(*command, MASTER_ADDR="localhost", WORLD_SIZE="2", RANK=str(rank))
        for rank in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said[0][1] + said[1][1]
    for way in ways:
        here, alone = losses_beside(tmp_path / way)
        assert len(here) == len(alone) == 5
        assert here == pytest.approx(alone, abs=2e-5), way
        assert here[-1] < here[0] - 1  # or nothing would have to be the same
        assert f"{way}, 2 processes" in said[0][0]
        assert "rank 1" in (tmp_path / way / "plan.svg").read_text()
        newest = mfx.checkpoint.latest(tmp_path / way / CHECKPOINTS, verify=True)
        assert mfx.checkpoint.inspect(newest).step == 5
    assert said[1][0] == ""  # one process speaks for both


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_goes_on_in_another_way_on_another_number_of_processes(
    tmp_path: Path, train_gpt
) -> None:
    """ZeRO-1 on two, HSDP on four, one: the losses equal the losses of a run in one process."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert train_gpt.main([*TINY, "--steps", "9", "--out", str(whole)]) == 0
    code, _, err = torchrun(
        2, *TINY, "--steps", 9, "--save-every", 3, "--shard", "zero1", "--out", moved
    )
    assert code == 0, err
    rewind(moved, to=6)
    code, out, err = torchrun(4, "--resume", "--save-every", 2, "--shard", "hsdp", "--out", moved)
    assert code == 0, err
    assert len(losses_beside(moved)[0]) == 3  # the seventh to the ninth
    assert "hsdp, 4 processes" in out
    rewind(moved, to=8)
    assert train_gpt.main(["--resume", "--out", str(moved)]) == 0
    assert metrics_of(moved)["train_losses"] == pytest.approx(
        metrics_of(whole)["train_losses"], abs=5e-5
    )
    assert metrics_of(moved)["steps_done"] == 9


def rewind(folder: Path, *, to: int) -> None:
    """Take away the checkpoints that were made later."""
    for path in mfx.checkpoint.checkpoints(folder / CHECKPOINTS):
        if mfx.checkpoint.inspect(path).step > to:
            shutil.rmtree(path)
    assert mfx.checkpoint.inspect(mfx.checkpoint.latest(folder / CHECKPOINTS)).step == to


# --------------------------------------------------------------------------------------------------- small examples


def test_the_loop_to_copy_is_short_and_learns(module, capsys) -> None:
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) < 90
    loss = module("minimal").main(steps=40, batch=8, context=32, width=32, depth=1)
    assert loss < 3.4  # it begins at log 256 = 5.5
    assert f"validation {loss:.3f}" in capsys.readouterr().out


def fsdp2_tp_on_ranks(here: Here, folder: Path, steps: int) -> tuple[list[float], list[str]]:
    sys.path.insert(0, str(EXAMPLES))
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            losses = importlib.import_module("fsdp2_tp").train(folder, steps)
    finally:
        sys.path.remove(str(EXAMPLES))
    return losses, printed.getvalue().splitlines()


def train_on(processes: int, **arguments: object) -> tuple[list[list[float]], list[str]]:
    """The losses of each process of a run that has a default group of its own, and the lines of the first process."""
    world = World(processes)
    try:
        results = world.check(processes, fsdp2_tp_on_ranks, **arguments)
    finally:
        world.close()
    assert not any(lines for _, lines in results[1:])
    return [losses for losses, _ in results], results[0][1]


def logged_numbers(line: str) -> list[float]:
    """The step, the loss, the norm, the rate and the number of skipped steps in a line of the log."""
    return [float(number) for number in re.findall(r"[\d.]+", line)]


@pytest.mark.slow
@pytest.mark.dist
def test_the_fsdp2_and_tensor_parallel_example_resumes_on_fewer_processes(tmp_path: Path) -> None:
    first, first_log = train_on(4, folder=tmp_path / "resumed", steps=12)
    second, second_log = train_on(2, folder=tmp_path / "resumed", steps=16)
    uninterrupted, whole_log = train_on(1, folder=tmp_path / "alone", steps=16)
    assert [len(losses) for losses in (*first, *second)] == [12] * 4 + [4] * 2
    assert first[0] + second[0] == pytest.approx(uninterrupted[0], rel=1e-3)
    assert second[0][-1] < first[0][0] / 10
    log = [logged_numbers(line) for line in first_log + second_log]
    assert [step for step, *_ in log] == [5, 10, 15]
    for numbers, line in zip(log, whole_log, strict=True):
        assert numbers == pytest.approx(logged_numbers(line), rel=1e-2)
    _, _, norm, _, skipped = log[0]
    assert norm > 1  # the gradients are clipped
    assert skipped == 0


@pytest.mark.slow
def test_the_vision_example_learns_with_both_optimizers_and_draws_a_picture(
    module, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    vision = module("vision")
    runs = vision.main(seeds=1, epochs=2, plot=tmp_path / "digits.svg")
    assert list(runs) == ["Muon", "AdamW"]
    for name, [epochs] in runs.items():
        (first, _), (last, wrong) = epochs
        assert last < first, name
        assert wrong < 0.5, name  # guessing is 0.9
    assert (tmp_path / "digits.svg").read_text().count("<path") > 4


@pytest.mark.slow
def test_the_lora_example_trains_the_factors_alone(module) -> None:
    lora = module("lora")
    code, prose, held_out = lora.texts()
    base = lora.pretrained(code, 4, 32)
    for name in lora.RATES:
        losses, model = lora.tune(base, prose, held_out, name, lora.RATES[name], 0, 10)
        assert len(losses) == 11
        assert losses[-1] < losses[0] - 0.01, name
        weights = {
            key.replace("linear.", ""): value
            for key, value in model.state_dict().items()
            if "lora_" not in key
        }
        assert all(torch.equal(value, base[0][key]) for key, value in weights.items())  # frozen
