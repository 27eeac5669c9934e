"""The phases of an iteration cover it, and each is what the innermost span says."""

from pathlib import Path

import pytest

from benchmarks import measure, report
from benchmarks import sharding_timeline as timeline
from benchmarks.sharding_timeline import AGREEMENT, BACK, OUT, Span, _Event, _message, _spans


def test_each_moment_belongs_to_the_innermost_span_that_has_a_phase():
    travelling = [_Event("gloo:all_reduce", 1, 2, 100), _Event("gloo:all_to_all", 2.5, 4, 1 << 20)]
    messages = [_message(event, last=5) for event in travelling]
    own = [
        _Event("waiting", 1, 2, 0),
        _Event("c10d::alltoall_base_", 2.5, 2.6, 0),
        _Event("waiting", 3, 4, 0),
        _Event("orthogonalize", 5, 8, 0),
        _Event("aten::mm", 6, 7, 0),
        _Event("pack, unpack", 8, 9, 0),
        _Event("aten::copy_", 8, 8.5, 0),
        _Event("aten::mul", 9, 9.5, 0),
    ]
    spans = _spans(own, messages, 10)
    assert spans == [
        Span("Python", 0.0, 1),
        Span(AGREEMENT, 1, 2),
        Span("Python", 2, 2.5),
        Span(OUT, 2.5, 2.6),
        Span("Python", 2.6, 3),
        Span(OUT, 3, 4),
        Span("Python", 4, 5),
        Span("orthogonalize", 5, 8),
        Span("pack, unpack", 8, 9),
        Span("elementwise", 9, 9.5),
        Span("Python", 9.5, 10),
    ]
    assert _message(_Event("gloo:all_to_all", 6, 7, 1 << 20), last=5).phase == BACK


def test_what_is_kept_is_drawn_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    lanes = {"spans": [Span("orthogonalize", 0, 3), Span("Python", 3, 4)], "messages": [Span(OUT, 1, 2)]}
    row = {
        "case": "FSDP2",
        "processes": 2,
        "candidate": "muonfx",
        "milliseconds": 4.0,
        "phases": dict.fromkeys(timeline.PHASES, 0.5),
        "collectives": {AGREEMENT: 1, OUT: 1, BACK: 1},
        "ranks": [timeline._drawn(lanes, 4.0)] * 2,
    }
    measure.save("sharding_timeline", [row])
    picture = timeline.draw(tmp_path / "picture.svg")
    assert picture is None or "rank 1" in picture.read_text()
    assert "| FSDP2, 2: muonfx | 4 | 0.5 |" in report.sharding_timeline()
