"""The comparison: our rows are those of the plan that runs, and the page shows what the program prints."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.simulator.__main__ import main
from muonfx.sharding.plan import __main__ as plan
from muonfx.sharding.plan.report import WIDTH

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sharding-on-paper.md"
ARGUMENTS = ["--model", "llama-8b", "--mesh", "dp=2,shard=8"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_our_rows_are_those_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, *ARGUMENTS, "--json"))["schemes"]
    assert plan.main([*ARGUMENTS, "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)["schemes"]
    assert [row for row in found if row["ours"]] == ours
    assert [row["scheme"] for row in found if not row["ours"]] == [
        "LLaMA-Factory v1",
        "Dion's Muon",
        "torchtitan's Muon",
        "DeepSpeed ZeRO-1/2",
        "DeepSpeed ZeRO-3",
    ]


def test_a_scheme_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = (
        line for line in printed(capsys, "--model", "gpt2-xl", "--mesh", "dp=8").splitlines() if "Not on" in line
    )
    assert "LLaMA-Factory v1" in line
    assert "Dion's Muon" in line


def test_the_benchmarks_print_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    benchmarks.main(["simulator", *ARGUMENTS])
    assert capsys.readouterr().out == printed(capsys, *ARGUMENTS)


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
