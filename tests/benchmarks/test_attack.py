"""The attack on checkpoints: it finds what is lost, ours loses nothing, and the page has the table of the result."""

import io
from pathlib import Path
from typing import Any

import torch

from benchmarks import attack, report

PAIRS = attack.candidates()


def save_in_place(state: dict[str, Any], path: Path) -> None:
    """Overwrite a file for each tensor, without checksums."""
    path.mkdir(exist_ok=True, parents=True)
    for name, value in state.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        (path / name).write_bytes(buffer.getvalue())


def load_in_place(state: dict[str, Any], path: Path) -> None:
    for name, value in state.items():
        value.copy_(torch.load(path / name))


def test_an_attack_finds_what_is_lost(tmp_path: Path):
    row = attack.attack(save_in_place, load_in_place, tmp_path, flips=30)
    assert row["kills"]["wrong"] == 2  # after one new file of three, and after two
    assert row["flipped bits"]["wrong"] > 0
    assert row["fp32 into bf16"] == {"wrong": 1}


def test_our_storage_and_our_functions_lose_nothing(tmp_path: Path):
    for name in ("muonfx: Writer", "muonfx: save and load"):
        row = attack.attack(*PAIRS[name], tmp_path / name[-4:], flips=20)
        assert set(row["kills"]) == {"whole"}
        assert row["kills"]["whole"] > 10
        assert set(row["flipped bits"]) <= {"refused", "whole"}
        assert set(row["truncated or missing files"]) == {"refused"}
        assert row["fp32 into bf16"] == {"refused": 1}


def test_the_page_has_the_table_of_the_result():
    text = attack.PAGE.read_text(encoding="utf-8")
    begin = report.BEGIN.format("attack")
    assert text.partition(begin)[2].partition(report.END)[0].strip() == attack.table().strip()
    result = report.load("checkpoint_attack")
    assert result is not None
    for row in result["rows"]:
        if row["candidate"].startswith("muonfx"):
            assert all(cell.startswith("0 of ") for cell in attack.lost(row).values()), row
