"""The comparison lists every scheme, and its page shows the output of the program."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.peers import PEERS
from benchmarks.simulator.tally import OURS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sharding-on-paper.md"
ARGUMENTS = ["--model", "llama-8b", "--mesh", "dp=2,shard=8"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_our_rows_come_first_and_then_the_other_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *ARGUMENTS, "--json"))["schemes"]
    assert [row["scheme"] for row in found] == [scheme.name for scheme in (*OURS, *PEERS)]


def test_the_page_shows_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```text\n\$ python -m benchmarks\.simulator (.*?)\n(.*?)```", page, flags=re.S)
    assert blocks
    for arguments, output in blocks:
        found = printed(capsys, *arguments.split())
        assert output == found, f"run it with {arguments} and put the output into the page"
