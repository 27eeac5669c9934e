"""The examples run, resume bit for bit, survive Ctrl-C, and say clearly what is wrong."""

import functools
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch

import muonfx as mfx

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

EXAMPLES = Path(__file__).parent.parent / "examples"
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


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run(*arguments: object) -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate()
    return process.returncode, out, err


def metrics_of(folder: Path) -> dict:
    return json.loads((folder / "metrics.json").read_text())


def tensors_of(checkpoints: Path) -> dict[str, torch.Tensor]:
    return mfx.checkpoint.read(mfx.checkpoint.latest(checkpoints))


def assert_same_run(one: Path, other: Path, one_kept: Path | None = None, other_kept: Path | None = None) -> None:
    first, second = tensors_of(one_kept or one / CHECKPOINTS), tensors_of(other_kept or other / CHECKPOINTS)
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
    code, out, err = run("--quick", "--optimizer", optimizer, "--out", tmp_path)
    assert code == 0, err
    for name in ("loss.png", "metrics.json", "sample.txt"):
        assert (tmp_path / name).stat().st_size > 100
        assert f"{tmp_path / name}\n" in out
    newest = mfx.checkpoint.latest(tmp_path / CHECKPOINTS, verify=True)
    assert f"{newest}\n" in out
    assert mfx.checkpoint.inspect(newest).step == 40
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))
    assert "blocks.0.mlp.up.weight" in out
    assert "step/s" in err  # the progress bar
    assert "tok/s" in err
    metrics = metrics_of(tmp_path)
    assert metrics["config"]["optimizer"] == optimizer
    assert metrics["config"]["seed"] == 0
    assert metrics["versions"].keys() == {"python", "torch", "muonfx"}
    assert len(metrics["train_losses"]) == metrics["steps_done"] == metrics["config"]["steps"]
    assert metrics["train_losses"][0] == pytest.approx(5.545, abs=0.01)  # the head starts at zero: log 256
    assert metrics["final_validation_loss"] < 3.3
    assert [point["step"] for point in metrics["validation"]] == [10, 20, 30, 40]
    assert metrics["final_validation_loss"] == metrics["validation"][-1]["loss"] < metrics["validation"][0]["loss"]
    assert metrics["tokens_per_second"] > 0
    assert 0 < metrics["optimizer_share_of_step"] < 1
    assert metrics["seconds"]["wall"] >= metrics["seconds"]["validation"] > 0
    assert metrics["sample"].startswith("def ")


def test_bf16_parameters_learn_with_a_master_in_fp32(tmp_path: Path, train_gpt) -> None:
    assert train_gpt.main([*TINY, "--steps", "12", "--dtype", "bf16", "--out", str(tmp_path)]) == 0
    tensors = tensors_of(tmp_path / CHECKPOINTS)
    weight, master = (tensors[f"{part}/blocks.0.mlp.up.weight"] for part in ("params", "master"))
    assert weight.dtype == torch.bfloat16
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), weight)
    assert metrics_of(tmp_path)["final_validation_loss"] < 4


def test_the_torch_baseline_and_muonfx_with_its_coefficients_go_the_same_way(
    tmp_path: Path, train_gpt, monkeypatch
) -> None:
    original = train_gpt.mfx.orthogonalize
    monkeypatch.setattr(train_gpt.mfx, "orthogonalize", lambda **more: original(coefficients="keller", **more))
    losses = {}
    for name in ("muon", "torch-muon"):
        assert train_gpt.main([*TINY, "--steps", "8", "--optimizer", name, "--out", str(tmp_path / name)]) == 0
        losses[name] = metrics_of(tmp_path / name)["train_losses"]
    # torch.optim.Muon iterates in bf16.
    assert losses["muon"] == pytest.approx(losses["torch-muon"], abs=5e-3)


# ---------------------------------------------------------------------------------------------------- stop and resume


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer", "muon", "--dtype", "fp32"],
        ["--optimizer", "normuon", "--dtype", "bf16"],
        ["--optimizer", "torch-muon"],
        ["--state-dtype", "int8"],
        ["--state-dtype", "fp8"],
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


def test_two_runs_with_one_seed_are_bitwise_equal_and_another_seed_differs(tmp_path: Path, train_gpt) -> None:
    for folder, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert train_gpt.main([*TINY, "--steps", "3", "--seed", seed, "--out", str(tmp_path / folder)]) == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert metrics_of(tmp_path / "a")["train_losses"] != metrics_of(tmp_path / "c")["train_losses"]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to another process")
def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    kept = tmp_path / "elsewhere"
    process = start(
        "--quick", "--optimizer", "muon", "--steps", 150, "--save-every", 3, "--out", stopped, "--checkpoint", kept
    )
    while not mfx.checkpoint.checkpoints(kept) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    again = out.split("to go on: ")[1].splitlines()[0]
    done = metrics_of(stopped)["steps_done"]
    assert 3 <= done < 150
    assert mfx.checkpoint.verify(mfx.checkpoint.latest(kept)).step == done
    assert "params/head.weight" in tensors_of(kept)
    assert len(mfx.checkpoint.checkpoints(kept)) <= 2
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(again, shell=True, check=True, capture_output=True, env=environment)
    assert run("--quick", "--optimizer", "muon", "--steps", 150, "--out", whole)[0] == 0
    assert_same_run(stopped, whole, kept)


# ---------------------------------------------------------------------------------------------------- several processes


def torchrun(processes: int, *arguments: object) -> tuple[int, str, str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / "train_gpt.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def losses_beside(folder: Path) -> tuple[list[float], list[float]]:
    """The losses of a run that was shared out, and those of the same steps in one process."""
    metrics = metrics_of(folder)
    alone = metrics["one_process"]
    return metrics["train_losses"][alone["begin"] :], alone["losses"]


# One start of Python for all ways: each joins anew, at a port of its own.
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
    search = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", EACH_WAY, " ".join(ways), " ".join(ports), str(tmp_path), *TINY],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(search),
                "MASTER_ADDR": "localhost",
                "WORLD_SIZE": "2",
                "RANK": str(rank),
            },
        )
        for ports in [free_ports(len(ways))]
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
def test_a_run_goes_on_in_another_way_on_another_number_of_processes(tmp_path: Path, train_gpt) -> None:
    """ZeRO-1 on two, HSDP on four, one: the losses are those of a run that was never shared out."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert train_gpt.main([*TINY, "--steps", "9", "--out", str(whole)]) == 0
    code, _, err = torchrun(2, *TINY, "--steps", 9, "--save-every", 3, "--shard", "zero1", "--out", moved)
    assert code == 0, err
    rewind(moved, to=6)
    code, out, err = torchrun(4, "--resume", "--save-every", 2, "--shard", "hsdp", "--out", moved)
    assert code == 0, err
    assert len(losses_beside(moved)[0]) == 3  # the seventh to the ninth
    assert "hsdp, 4 processes" in out
    rewind(moved, to=8)
    assert train_gpt.main(["--resume", "--out", str(moved)]) == 0
    assert metrics_of(moved)["train_losses"] == pytest.approx(metrics_of(whole)["train_losses"], abs=5e-5)
    assert metrics_of(moved)["steps_done"] == 9


def rewind(folder: Path, *, to: int) -> None:
    """Take away the checkpoints that were made later."""
    for path in mfx.checkpoint.checkpoints(folder / CHECKPOINTS):
        if mfx.checkpoint.inspect(path).step > to:
            shutil.rmtree(path)
    assert mfx.checkpoint.inspect(mfx.checkpoint.latest(folder / CHECKPOINTS)).step == to


@pytest.mark.parametrize(
    ("way", "found", "message"),
    [
        ("hsdp", 2, "--shard hsdp: found 2 processes, expected an even number"),
        ("hsdp", 5, "--shard hsdp: found 5 processes, expected an even number"),
        ("tp", 3, "--shard tp: found 3 processes for 2 heads, expected a divisor"),
        ("cp", 3, "--context: found 8, expected a multiple of the 3 processes"),
        ("zero1", 3, "--batch: found 4, expected a multiple of the 3 processes"),
    ],
)
def test_a_number_of_processes_that_does_not_fit_is_a_clear_error(module, way: str, found: int, message: str) -> None:
    check = module("sharded").check_processes
    with pytest.raises(ValueError, match=message):
        check(way, found, heads=2, batch=4, context=8)
    check(way, 4 if way == "hsdp" else 2, heads=2, batch=4, context=8)


WORDS = ["--out", "a folder/it's $HOME", "--text", "*"]


@pytest.mark.skipif(os.name == "nt", reason="asks a POSIX shell")
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_to_go_on_is_what_a_shell_gives_back_to_the_program(
    tmp_path: Path, module, monkeypatch, processes: int
) -> None:
    """A Python and a program that print their arguments take the places of the real ones."""
    folder = tmp_path / "bin of it"
    folder.mkdir()
    fake = folder / "python"
    fake.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(sys, "argv", ["examples/train_gpt.py"])
    monkeypatch.delenv("TRAIN_GPT_MAKE", raising=False)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", "2"] if processes > 1 else []
    for path, begins in ((os.environ["PATH"], "'"), (f"{folder}:{os.environ['PATH']}", "python ")):
        monkeypatch.setenv("PATH", path)
        line = module("options").command_line(WORDS, processes=processes)
        assert line.startswith(begins)  # the bare name only where it leads to the same Python
        done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [*launcher, "examples/train_gpt.py", *WORDS]


# ---------------------------------------------------------------------------------------------------- the text


def test_the_split_depends_on_the_path_alone(tmp_path: Path, module) -> None:
    text = module("text")
    for name in [f"part{i}/file{j}.py" for i in range(6) for j in range(10)]:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n" * 2000)
    before = text.read_corpus(tmp_path)
    for name in (*before.train_files[::2], *before.validation_files[1:]):
        (tmp_path / name).write_text("y = 2\n" * 5000)
    (tmp_path / "part0" / "new.py").write_text("z = 3\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "excluded.py").write_text("no\n")
    after = text.read_corpus(tmp_path)
    files = set(after.train_files + after.validation_files)
    assert files == set(before.train_files + before.validation_files) | {"part0/new.py"}
    assert set(after.validation_files) - {"part0/new.py"} == set(before.validation_files)
    assert after.digest != before.digest


def test_a_batch_is_a_function_of_seed_and_step(module) -> None:
    corpus = module("text").read_corpus()
    inputs, targets = corpus.batch(0, 5, 4, 32)
    assert inputs.shape == targets.shape == (4, 32)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, corpus.batch(0, 5, 4, 32)[0])
    for seed, step in ((0, 6), (1, 5), (2**32, 5)):  # a torch generator would take the last seed for the first
        assert not torch.equal(inputs, corpus.batch(seed, step, 4, 32)[0])


# ---------------------------------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--steps", "0"], "argument --steps: expected a whole number above 0, found '0'"),
        (["--lr", "nan"], "argument --lr: expected a number above 0, found 'nan'"),
        (["--seed", "-1"], "argument --seed: expected a whole number from 0 to 2**63 - 1, found '-1'"),
        (["--context", "1000000000"], "--context: found 1000000000, expected at most"),
        (["--width", "6400000"], "make --batch 16, --context 256, --width 6400000 or --depth 4 smaller"),
        (["--width", "100"], "multiple of 32"),
        (["--lr", "0.1"], "--lr: found 2 optimizers, expected one"),
        (["--offload", "cpu", "--optimizer", "muon", "adamw"], "--offload is for one optimizer"),
        (["--state-dtype", "int8", "--optimizer", "torch-muon"], "leave out --state-dtype"),
        (["--resume"], "there is no checkpoint in"),
        (["--shard", "zero1"], "-m torch.distributed.run --nproc_per_node 2 "),
    ],
)
def test_a_bad_option_is_named_and_the_exit_code_is_2(tmp_path: Path, train_gpt, capsys, arguments, message) -> None:
    with pytest.raises(SystemExit) as caught:
        train_gpt.main([*arguments, "--out", str(tmp_path / "run")])
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert not (tmp_path / "run").exists()


def test_a_folder_without_text_is_a_clear_error(tmp_path: Path, train_gpt, capsys) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SystemExit, match="2"):
        train_gpt.main(["--quick", "--text", str(empty), "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
    assert "too little text" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- small examples


def test_the_loop_to_copy_is_short_and_learns(module, capsys) -> None:
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) < 90
    loss = module("minimal").main(steps=40, batch=8, context=32, width=32, depth=1)
    assert loss < 3.4  # it begins at log 256 = 5.5
    assert f"validation {loss:.3f}" in capsys.readouterr().out


def test_the_vision_example_learns_with_both_optimizers_and_draws_a_picture(module, tmp_path: Path, capsys) -> None:
    pytest.importorskip("sklearn")
    vision = module("vision")
    runs = vision.main(seeds=1, epochs=2, plot=tmp_path / "digits.svg")
    assert list(runs) == ["Muon", "AdamW"]
    for name, [epochs] in runs.items():
        (first, _), (last, wrong) = epochs
        assert last < first, name
        assert wrong < 0.5, name  # guessing is 0.9
    assert (tmp_path / "digits.svg").read_text().count("<path") > 4
    said = capsys.readouterr().out
    labels = {line.split()[0]: "muon" in line.split() for line in said.splitlines() if line.count(".weight")}
    assert labels == {"stem.weight": False, "body1.weight": True, "body2.weight": True, "head.weight": False}


def test_the_lora_example_trains_the_factors_alone_and_merges_them(module, tmp_path: Path) -> None:
    lora = module("lora")
    code, prose, held_out = lora.texts()
    base = lora.pretrained(code, 4, 32)
    for name in lora.RATES:
        losses, model = lora.tune(base, prose, held_out, name, lora.RATES[name], 0, 10)
        assert len(losses) == 11
        assert losses[-1] < losses[0] - 0.01, name
        weights = {key.replace("linear.", ""): value for key, value in model.state_dict().items() if "lora_" not in key}
        assert all(torch.equal(value, base[0][key]) for key, value in weights.items())  # frozen
        trained = [key for key, param in model.named_parameters() if param.requires_grad]
        assert len(trained) == 2 * 6 * len(model.blocks)
        assert all(mfx.select.default_labels_by_name(dict(model.named_parameters()))[key] == "adamw" for key in trained)
        tokens = held_out[:32].long()[None]
        before = model(tokens)
        for block in model.blocks:
            for part in (block.attention, block.mlp):
                for key, layer in list(part.named_children()):
                    setattr(part, key, layer.merged())
        torch.testing.assert_close(model(tokens), before, rtol=1e-4, atol=1e-5)
        assert not [key for key in model.state_dict() if "lora_" in key]
