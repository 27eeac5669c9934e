"""The command line: plain tables, and exit codes that a script can use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import muonfx as mfx
from muonfx.checkpoint.__main__ import main
from tests.checkpoint.common import small_params, trained
from tests.processes import ROOT

ck = mfx.checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tx = mfx.chain(mfx.momentum(), mfx.scale_by_adam(mu_dtype=torch.bfloat16))
    for step in (1, 2):
        params, state = trained(tx, small_params(), step)
        ck.save(
            ck.step_path(tmp_path, step), state, tx=tx, params=params, step=step, extra={"seed": 7}
        )
    return tmp_path


def test_what_a_checkpoint_does_not_have_is_a_dash(tmp_path: Path):
    path = ck.save(tmp_path / "params", None, params=small_params())
    heading, _ = str(ck.inspect(path)).split("\n\n", 1)
    assert "step        -\nchain       -\nwritten by  muonfx" in heading
    assert "\nextra       -\nfiles       1, " in heading
    assert "objects" not in heading


def test_inspect_shows_a_checkpoint_or_a_folder(folder: Path, capsys):
    assert main(["inspect", str(ck.step_path(folder, 2))]) == 0
    out = capsys.readouterr().out
    for expected in (
        "step        2\n",
        "chain       chain(momentum(), scale_by_adam(mu_dtype=torch.bfloat16)) (fingerprint ",
        'extra       {"seed": 7}\n',
        "scale_by_adam/mu/blocks.0.up.weight  (6, 4)  bfloat16   48 B      1\n",
        "\n17 leaves, 890 B\n",
    ):
        assert expected in out
    next(ck.step_path(folder, 1).glob("*.safetensors")).unlink()
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "the data file cannot be read" in lines[1]
    assert lines[2] == "step-000000002     2      17  890 B  looks whole"


def test_verify_reads_every_byte(folder: Path, capsys):
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.count(": good, 17 leaves, 890 B\n") == 2
    data = next(ck.step_path(folder, 2).glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"\xff")
    assert main(["verify", str(folder)]) == 1
    assert "step-000000002: damaged" in capsys.readouterr().out
    assert main(["verify", str(folder / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_names_from_a_stranger_cannot_write_to_the_terminal(tmp_path: Path, capsys):
    ck.save(tmp_path, {"\x1b[2J\nfake": torch.ones(1)}, extra={"\x1b": "\x9b"})
    main(["inspect", str(tmp_path)])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\x9b" not in out
    assert r"\x1b[2J\nfake" in out


def test_clean_names_what_it_removes(folder: Path, capsys):
    (left := ck.step_path(folder, 1) / f"data-{'0' * 16}-00000-of-00001.safetensors").write_bytes(
        b"unfinished"
    )
    assert main(["clean", str(folder)]) == 0
    assert capsys.readouterr().out == f"{left}\n1 files removed\n"


def test_a_reader_that_stops_early_gets_no_traceback(folder: Path):
    command = [sys.executable, "-m", "muonfx.checkpoint", "inspect", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()  # as `| head` does
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
