"""What an adversarial reader found, each once."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import muonfx as mfx
from muonfx.checkpoint import convert

ck = mfx.checkpoint
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_process_that_ends_at_once_waits_for_a_large_save(tmp_path: Path):
    call = f"mfx.checkpoint.save_async({str(tmp_path / 'a')!r}, {{'w': torch.ones(3_000_000)}})"
    code = f"import torch, muonfx as mfx; {call}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
    assert ck.read(tmp_path / "a")["w"].sum() == 3_000_000


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_a_run_that_goes_back_keeps_what_it_writes(tmp_path: Path, keep: int):
    for step in (80, 90, 100, 60, 70):
        path = ck.save(ck.step_path(tmp_path, step), {"w": torch.ones(1)}, step=step, keep=keep)
        assert ck.verify(path).step == step
        assert len(ck.checkpoints(tmp_path)) <= keep


def test_links_and_the_files_of_others_stay(tmp_path: Path):
    archive, other = tmp_path / "archive", tmp_path / "run" / "step-1"
    ck.save(archive, {"w": torch.ones(1)})
    other.mkdir(parents=True)
    (other / "index.json").write_text('{"mine": 1}')
    (tmp_path / "run" / "step-000000002").symlink_to(archive)
    for step in (5, 10, 11):
        ck.save(ck.step_path(tmp_path / "run", step), {"w": torch.ones(2)}, step=step, keep=1)
    assert json.loads((other / "index.json").read_text()) == {"mine": 1}
    assert ck.verify(archive)


@pytest.mark.parametrize("dtype", [mfx.int8(), mfx.fp8()], ids=["int8", "fp8"])
def test_codes_are_never_taken_for_values(tmp_path: Path, dtype: mfx.Compact):
    params = {"w": torch.randn(64, 96)}
    path = ck.save(tmp_path / "a", mfx.chain(mfx.momentum(dtype=dtype)).init(params))
    with pytest.raises(ck.MismatchError, match=r"holds codes of .* which mean nothing as torch\.float32"):
        ck.load(
            path,
            like=mfx.chain(mfx.momentum()).init(params),
            rename={"momentum/trace/codes/w": "momentum/trace/w"},
            allow_extra=["momentum/trace/scales/w"],
            cast={"momentum/trace/w": torch.float32},
        )


def test_a_save_in_the_background_goes_where_it_was_asked_to(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saving = ck.save_async("here", {"w": torch.ones(2_000_000)})
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    assert saving.wait() == tmp_path / "here"
    assert ck.verify(tmp_path / "here")
    with pytest.raises(ValueError, match="path must name a folder"):
        ck.save("", {"w": torch.ones(1)})


def test_torch_muon_with_another_eps_has_no_chain():
    weight = torch.nn.Parameter(torch.randn(8, 4))
    with pytest.raises(ValueError, match="there is no chain for eps=1000"):
        convert.torch_recipe(torch.optim.Muon([weight], lr=0.1, eps=1e3), {"w": weight})


def test_older_groups_of_keller_keep_their_numbers():
    group = {"params": [0], "lr": 0.02, "momentum": 0.95, "nesterov": False, "ns_steps": 3, "weight_decay": 0.0}
    found = repr(convert.keller_recipe({"state": {}, "param_groups": [group]}, {"w": torch.zeros(3, 2)}, names=["w"]))
    assert "nesterov=False" in found
    assert "steps=3" in found


def test_compact_states_survive_fake_tensors():
    tx = mfx.momentum(dtype=mfx.int8(code="dynamic", min_size=0, block=64))
    for _ in range(2):
        with FakeTensorMode():
            params = {"w": torch.zeros(128)}
            tx.update(params, tx.init(params), params)
        params = {"w": torch.randn(128)}
        updates, _ = tx.update(params, tx.init(params), params)
        assert type(updates["w"]) is torch.Tensor


def test_what_is_no_state_dict_is_one_sentence(tmp_path: Path, capsys):
    file = io.BytesIO()
    torch.save({"model": {"w": torch.ones(2)}}, file)
    (tmp_path / "run.pt").write_bytes(file.getvalue())
    (tmp_path / "names.json").write_text("5")
    assert convert.main(["torch", str(tmp_path / "run.pt"), "out", "--params", str(tmp_path / "run.pt")]) == 2
    assert "expected a state dict" in capsys.readouterr().err
