"""Tables for the documentation, made from the JSON results and from nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables: written by python -m benchmarks -->", "<!-- end of tables -->"


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _machine(found: dict[str, Any]) -> str:
    m = found["machine"]
    bf16 = f" ({', '.join(m['bf16'])})" if m["bf16"] else ""
    where = m["gpu"] or f"{m['cpu']}{bf16}, {m['threads']} threads"
    return f"{where}; torch {m['torch']}, Python {m['python']}, load average at the end {m['load']:.1f}."


def _milliseconds(value: dict[str, float]) -> str:
    return f"{value['median']:.2f}"


def _ratio(value: dict[str, float]) -> str:
    return f"{value['median']:.2f} ({value['p10']:.2f} to {value['p90']:.2f})"


def _throughput(times: dict[str, float]) -> str:
    """Ratios of times as ratios of throughput."""
    return f"{1 / times['median']:.2f} ({1 / times['p90']:.2f} to {1 / times['p10']:.2f})"


def _bytes(value: int) -> str:
    return f"{value / 2**20:.2f} MiB"


def tables() -> str:
    """All tables as Markdown."""
    parts: list[str] = []
    if speed := _load("adapter_speed"):
        rows = [
            [
                f"{row['optimizer']}: {row['case']}",
                _milliseconds(row["torch"]["milliseconds"]),
                _milliseconds(row["muonfx"]["milliseconds"]),
                _ratio(row["muonfx"]["ratio"]),
                _ratio(row["torch again"]["ratio"]),
            ]
            for row in speed["rows"]
        ]
        head = ["one optimizer step, fp32", "torch, ms", "muonfx, ms", "muonfx / torch", "torch / torch"]
        parts += ["### Time of a step\n", _table(head, rows), f"\n{_machine(speed)}\n"]
    if memory := _load("adapter_memory"):
        rows = [
            [
                f"{row['optimizer']}: {row['case']}",
                *(_bytes(row[key]) for key in ("parameters", "largest parameter", "torch", "muonfx")),
            ]
            for row in memory["rows"]
        ]
        head = ["peak beyond parameters, gradients, state", "parameters", "largest parameter", "torch", "muonfx"]
        parts += ["### Memory of a step\n", _table(head, rows), f"\n{_machine(memory)}\n"]
    if speed := _load("checkpoint_speed"):
        rows = [
            [
                f"{row['what']} of {_bytes(row['bytes'])} in {row['leaves']} leaves",
                *(f"{row[who]['milliseconds']['median']:.0f}" for who in ("safetensors", "muonfx")),
                *(_throughput(row[who]["ratio"]) for who in ("muonfx", "safetensors again")),
            ]
            for row in speed["rows"]
        ]
        head = [
            "a checkpoint",
            "safetensors, ms",
            "muonfx, ms",
            "throughput, muonfx / safetensors",
            "again / safetensors",
        ]
        parts += ["### Checkpoints: time\n", _table(head, rows), f"\n{_machine(speed)}\n"]
    if memory := _load("checkpoint_memory"):
        rows = [
            [row["what"], *(_bytes(row[key]) for key in ("bytes", "largest leaf", "peak beyond"))]
            for row in memory["rows"]
        ]
        head = ["peak of the process beyond the state", "state", "largest leaf", "muonfx"]
        parts += ["### Checkpoints: memory\n", _table(head, rows), f"\n{_machine(memory)}\n"]
    return "\n".join(parts)


def rewrite() -> None:
    """Put the tables into the documentation page, between its two marks."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.split(END)[1]}")
