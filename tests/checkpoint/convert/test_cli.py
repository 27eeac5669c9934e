"""The command line of conversions: what it writes, and what it says when it cannot."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import muonfx as mfx
from muonfx.checkpoint.__main__ import main
from muonfx.checkpoint.convert import cli, recipe


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    torch.save({"training": {"optimizer": optimizer.state_dict()}}, tmp_path / "run.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "names.json").write_text('["0.weight"]')
    return tmp_path, model, optimizer


def test_a_torch_optimizer_becomes_a_checkpoint(run: Any, capsys: pytest.CaptureFixture[str]):
    folder, model, optimizer = run
    arguments = ["torch", folder / "run.pt", folder / "out", "--params", folder / "model.safetensors"]
    arguments += ["--key", "training.optimizer", "--names", folder / "names.json", "--step", 1]
    assert main(["convert", *map(str, arguments)]) == 0
    tx = recipe("torch", optimizer, dict(model.named_parameters()))
    assert capsys.readouterr().out.strip() == repr(tx)
    like = mfx.spec(tx, dict(model.named_parameters()))
    state = mfx.checkpoint.load(folder / "out", like=like, tx=tx)
    assert torch.equal(state["momentum"].trace["0.weight"], optimizer.state[model[0].weight]["momentum_buffer"])
    assert mfx.checkpoint.inspect(folder / "out").step == 1


def test_a_universal_folder_becomes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "zero" / "w"
    folder.mkdir(parents=True)
    torch.save({"param": torch.ones(6)}, folder / "momentum_buffer.pt")
    torch.save({"w": torch.zeros(2, 3), "steps": torch.tensor(3)}, tmp_path / "model.pt")
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": {"params": {"lr": 0.5}}}))
    arguments = ["deepspeed", tmp_path, tmp_path / "out", "--params", tmp_path / "model.pt"]
    assert cli.main([*map(str, arguments)]) == 2
    assert cli.main([*map(str, arguments), "--config", str(tmp_path / "ds.json"), "--rename", "w=v"]) == 0
    (name,) = [name for name in mfx.checkpoint.inspect(tmp_path / "out").leaves if "trace" in name]
    assert name.endswith("momentum/trace/v")
    assert torch.equal(mfx.checkpoint.read(tmp_path / "out")[name], torch.ones(2, 3))
    assert "learning_rate=0.5" in capsys.readouterr().out


class Surprise:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code ran')",)


def test_what_is_wrong_is_one_sentence(run: Any, capsys: pytest.CaptureFixture[str]):
    folder, _, _ = run
    torch.save({"optimizer": Surprise()}, folder / "surprise.pt")
    (folder / "noise.pt").write_bytes(b"\x80\x04noise")
    (folder / "noise.safetensors").write_bytes(bytes(range(64)))
    params = ["--params", str(folder / "model.safetensors")]
    for name, more, message in (
        ("run.pt", ["--key", "elsewhere"], "no 'elsewhere' in"),
        ("run.pt", ["--key", "training.optimizer"], "have no names; give names="),
        ("run.pt", ["--key", "training.optimizer", "--rename", "2=x"], "there is no parameter '2'"),
        ("run.pt", ["--rename", "0"], "expected OLD=NEW"),
        ("surprise.pt", [], "expected tensors and plain values, found something else"),
        ("noise.pt", [], "expected tensors and plain values, found something else"),
        ("nothing.pt", [], "No such file"),
        ("noise.safetensors", [], "header too large"),
    ):
        assert cli.main(["torch", str(folder / name), str(folder / "out"), *params, *more]) == 2
        assert message in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_what_is_no_state_dict_is_one_sentence(tmp_path: Path, capsys):
    file = io.BytesIO()
    torch.save({"model": {"w": torch.ones(2)}}, file)
    (tmp_path / "run.pt").write_bytes(file.getvalue())
    (tmp_path / "names.json").write_text("5")
    assert cli.main(["torch", str(tmp_path / "run.pt"), "out", "--params", str(tmp_path / "run.pt")]) == 2
    assert "expected a state dict" in capsys.readouterr().err
