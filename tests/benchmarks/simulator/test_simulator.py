"""The comparison lists every scheme, and its page shows the output of the program."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.peers import PEERS
from benchmarks.simulator.report import WIDTH
from benchmarks.simulator.tally import OURS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sharding-on-paper.md"
ARGUMENTS = ["--model", "llama-8b", "--mesh", "dp=2,shard=8"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_our_rows_come_first_and_then_the_other_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *ARGUMENTS, "--json"))["schemes"]
    assert [row["scheme"] for row in found] == [scheme.name for scheme in (*OURS, *PEERS)]


def test_a_scheme_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (
        line for line in printed(capsys, "--model", "gpt2-xl", "--mesh", "dp=8").splitlines() if "Not on" in line
    )
    assert "LLaMA-Factory v1" in line
    assert "Dion's Muon" in line


@pytest.mark.parametrize("mesh", ["dp=64,shard=8,tp=8", "dp=8", "shard=512", "dp=1"])
@pytest.mark.parametrize("name", ["gpt2-xl", "gpt-1t"])
def test_a_table_fits_a_page(name: str, mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--model", name, "--mesh", mesh).splitlines()
    assert max(map(len, lines)) <= WIDTH
    (heading,) = (line for line in lines if line.startswith("scheme "))
    rows = [line for line in lines if re.match(r"  .{19}(fsdp2|zero|ddp)", line)]
    assert any("DeepSpeed" in row for row in rows)
    assert all(len(line) == len(heading) for line in rows)


def test_the_page_shows_what_the_program_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```text\n\$ python -m benchmarks\.simulator (.*?)\n(.*?)```", page, flags=re.S)
    assert blocks
    for arguments, output in blocks:
        found = printed(capsys, *arguments.split())
        assert output == found, f"run it with {arguments} and put the output into the page"
