"""The benchmarks run, at tiny sizes, and their tables and plot say what the results say."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu, leaves, measure, parts, plots, polar, report, sharding, step, world
from benchmarks.quality import judge, matrix, up_to_scale
from muonfx.polar import orthogonalize

TINY = ((8, 8), (8, 24), (3, 8, 16))
TINY_SETS = {"tiny": [(8, 8), (8, 8), (24, 8), (8, 24)]}


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results go to a folder of the test's own."""
    for module in (measure, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_every_time_has_its_quality_and_results_make_tables_and_plot(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compiled candidates take a minute, and run in every real run of the benchmarks.
    measure.save("polar_speed", polar.speed(3, TINY, compiled=False))
    measure.save("polar_quality", polar.quality(TINY, compiled=False))
    measure.save("step_speed", step.speed(3, TINY_SETS, compiled=False))
    measure.save("step_quality", step.quality(TINY_SETS, compiled=False))
    for name, keys in (("polar", ("candidate", "shape")), ("step", ("candidate", "case"))):
        rows = {
            kind: json.loads((results / f"{name}_{kind}.json").read_text())["rows"]
            for kind in ("speed", "quality")
        }
        found = {
            kind: {tuple(str(row[key]) for key in keys) for row in own}
            for kind, own in rows.items()
        }
        assert {row for row in found["speed"] if not row[0].endswith(" again")} == found["quality"]
        for row in rows["quality"]:
            assert 0 <= row["error"] < 0.5
            assert 0 <= row["smallest"] <= row["largest"] < 1.5

    measure.save("polar_scratch", polar.scratch({"tiny": [(8, 8), (24, 8)]}, [torch.float32]))
    page = tmp_path / "page.md"
    marks = [f"{report.BEGIN.format(name)}\nold\n{report.END}\nprose\n" for name in report.SECTIONS]
    page.write_text("\n".join(marks))
    report.rewrite(page)
    text = page.read_text()
    assert "old" not in text
    assert text.count("prose") == len(report.SECTIONS)
    assert "<summary>8 x 24</summary>" in text
    report.rewrite(page)
    assert page.read_text() == text
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "SHOWN", ("8 x 8", "8 x 24"))
    picture = plots.draw(tmp_path / "picture.svg")
    assert picture is not None
    assert "8 x 24" in picture.read_text()


def test_the_benchmarks_of_a_gpu_run_and_print_their_rows() -> None:
    for part, candidates in (("newton-schulz", 5), ("step", 5)):
        rows = list(gpu.PARTS[part](3, 1.0, "cpu", compiled=False, **gpu.REHEARSAL[part]))
        assert len({row["candidate"] for row in rows}) >= candidates
        assert all(row.get("error", 0) < 0.5 for row in rows)
        assert all("ms" in gpu.line({"part": part, **row}) for row in rows)


def gpu_row(candidate: str, **more: object) -> gpu.Row:
    spread = {"median": 2.0, "p10": 1.0, "p90": 3.0}
    return {
        "case": "64 x 64",
        "candidate": candidate,
        "milliseconds": spread,
        "ratio": spread,
        **more,
    }


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three parts with made-up rows, one of which fails in its middle, and a page; return the page."""

    def failing(**options: object):
        yield gpu_row("before the failure", **{"same bits": True})
        raise RuntimeError("out of memory")

    made_up = {
        "newton-schulz": lambda **options: iter(
            [gpu_row("muonfx", error=0.01), gpu_row("plain", error=0.02)]
        ),
        "step": lambda **options: iter([gpu_row("muonfx", **{"bytes at the peak": 2**20})]),
        "graph": failing,
    }
    page = tmp_path / "gpu.md"
    page.write_text(f"{report.BEGIN.format('gpu')}\nold\n{report.END}\n")
    monkeypatch.setattr(gpu, "PARTS", made_up)
    monkeypatch.setattr(report, "GPU_PAGE", page)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return page


def test_a_gpu_run_keeps_the_rows_before_a_failure_and_writes_its_page(fake_gpu: Path) -> None:
    with pytest.raises(SystemExit, match="graph"):
        gpu.main([])
    rows = report.load("gpu")["rows"]
    assert [row["candidate"] for row in rows if "candidate" in row] == [
        "muonfx",
        "plain",
        "muonfx",
        "before the failure",
    ]
    assert [row["part"] for row in rows if "failed" in row] == ["graph"]
    text = fake_gpu.read_text()
    assert "old" not in text
    assert "a GPU" in text
    assert "| 64 x 64: plain | 2.000 | 2.00 (1.00 to 3.00) | 2.0e-02 |" in text
    assert "out of memory" in text


def test_a_part_of_a_gpu_run_replaces_only_its_own_rows(fake_gpu: Path) -> None:
    gpu.main(["newton-schulz"])
    gpu.main(["step"])
    assert [row["part"] for row in report.load("gpu")["rows"]] == [
        "newton-schulz",
        "newton-schulz",
        "step",
    ]
    gpu.main(["newton-schulz"])
    assert [row["part"] for row in report.load("gpu")["rows"]] == [
        "step",
        "newton-schulz",
        "newton-schulz",
    ]


def test_a_part_of_a_gpu_run_stops_after_its_minutes(
    fake_gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.main(["newton-schulz", "--minutes", "0"])
    rows = report.load("gpu")["rows"]
    assert [row.get("candidate") for row in rows] == ["muonfx", None]
    assert rows[-1]["stopped after minutes"] == 0
    assert "stopped after 0 minutes" in capsys.readouterr().out


def test_without_a_gpu_the_benchmarks_are_rehearsed_on_the_cpu(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.main(["--rehearse", "--rounds", "2", "--seconds", "1"])
    out = capsys.readouterr().out
    assert "3 x 8 x 16" in out
    assert "not rehearsed: graph;" in out
    assert not results.exists()


def no_time() -> parts.Peaks:
    return parts.Peaks({"bfloat16": 1e9, "float32": 1e9}, 1e9)


def test_a_step_by_part_adds_up() -> None:
    rows = parts.speed(3, TINY_SETS, compiled=False, measure_peaks=no_time)
    assert {"torch.optim.Muon", "muonfx", "muonfx, keller"} <= {row["candidate"] for row in rows}
    for row in rows:
        assert min(row["parts"][part] for part in ("products", "passes")) > 0
        assert sum(row["parts"].values()) < 3 * row["milliseconds"]["p90"]
        assert row["roofline"]["least products"] == pytest.approx(
            1e-6 * sum(map(parts.least_flops, TINY_SETS["tiny"]))
        )
    # four matrices, five steps of X X^T, its square, and a product with X
    whole = sum(
        5 * 2 * (2 * min(shape) ** 2 * max(shape) + min(shape) ** 3) for shape in TINY_SETS["tiny"]
    )
    assert sum(rows[0]["flops"].values()) == whole


def test_quality_sees_what_is_worse() -> None:
    x = matrix("gaussian", (12, 20))
    good = orthogonalize(x.double(), coefficients="keller", dtype=torch.float64)
    assert judge(good + 0.1 * good, x, "keller").error == pytest.approx(0.1)
    assert judge(up_to_scale(-3 * good, good), x, "keller").error < 1e-9
    values = torch.linalg.svdvals(good)
    found = judge(good, x, "keller")
    assert math.isclose(found.smallest, values.min().item(), rel_tol=1e-6)
    assert math.isclose(found.largest, values.max().item(), rel_tol=1e-6)


# ------------------------------------------------------------------------------------------------- several processes

TINY_MODEL = sharding.Size(width=16, blocks=1, vocabulary=32, tokens=8)


LOOPS = ((1, "whole"), (2, "flat"), (3, "whole"), (3, "flat"))


def ours_against_one_process() -> list[tuple[float, int]]:
    """How far each loop is from one process after three iterations, and how many matrices all ranks orthogonalized."""
    start, wanted = sharding.trained(TINY_MODEL, dist.get_world_size())
    found = []
    for stage, partition in LOOPS:
        one = sharding.ours("ours", TINY_MODEL, stage, partition)
        for _ in range(sharding.ITERATIONS):
            one.iterate()
        apart = sharding.distance(one.whole(), wanted) / sharding.distance(start, wanted)
        found.append((apart, sharding.counted(one)["matrices"]))
    return found


@pytest.mark.slow
@pytest.mark.dist
def test_our_loops_train_as_one_process_does() -> None:
    for apart, matrices in world.run(2, ours_against_one_process):
        assert apart < 0.02  # bf16 inside
        assert matrices == 6


@pytest.mark.slow
@pytest.mark.dist
def test_sharded_rows_say_what_was_sent_and_computed() -> None:
    rows = sharding.speed(3, processes=(2,), size=TINY_MODEL, cases=("FSDP2",))
    found = {row["candidate"]: row for row in rows}
    theirs, ours = found["full_tensor() on every rank"], found["muonfx"]
    assert (theirs["matrices"], ours["matrices"]) == (12, 6)
    assert ours["sent"] < theirs["sent"]
    assert all(row["apart"] < 0.05 for row in rows)


def test_every_aim_for_small_leaves_has_a_measured_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leaves, "COUNTS", (3,))
    rows = leaves.speed(2)
    assert {row["leaves"] for row in rows} == {3}
    assert leaves.AIMS.keys() <= {row["candidate"] for row in rows}
    assert all(row["milliseconds"]["median"] > 0 for row in rows)
