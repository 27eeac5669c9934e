"""The time of one iteration by phase and rank, for each candidate of `benchmarks.sharding`.

torch's profiler records an iteration on every rank. Each moment of a rank's main thread is assigned to the innermost
span that has a phase: orthogonalization, waiting for or packing a message, forward and backward, other operators of
torch, or Python. Messages, recorded in gloo's threads, have a separate lane below; a message overlaps with the
phases above it.

Collectives of at most `SMALL` bytes count as agreement. Others are part of the exchange out if they begin before the
last matrices of the rank, else of the exchange back. If matrices are gathered one by one, nearly all are "out".
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import plots, sharding, world
from benchmarks import sharding_peers as peers
from benchmarks.peers import versioned
from benchmarks.report import load
from benchmarks.sharding import Candidate, Size

PICTURE = Path(__file__).parent.parent / "docs" / "assets" / "sharding_timeline.svg"
SMALL = 1 << 16
ITERATIONS = 9
"""Recorded iterations per candidate, interleaved. The fastest one is kept, as it is the least disturbed."""

OUT, BACK, AGREEMENT = "exchange out", "exchange back", "agreement"
PHASES = {
    "forward, backward": "#8d99ae",
    "orthogonalize": "#5b6ee1",
    AGREEMENT: "#b45cb0",
    OUT: "#d0702c",
    BACK: "#e0a83c",
    "pack, unpack": "#c2485a",
    "elementwise": "#2a9d8f",
    "Python": "#565b66",
}
"""Phases and their colours. For messages, the main thread shows the time of waiting, and the lane that of sending."""

PLACES = {
    "forward, backward": [
        ("benchmarks.sharding", "GPT.forward"),
        ("torch.autograd", "_engine_run_backward"),
    ],
    "orthogonalize": peers.ORTHOGONALIZE,
    "waiting": [("torch.distributed", "Work.wait")],
    "pack, unpack": [
        ("muonfx.sharding.communication.messages", "copied"),
        ("muonfx.sharding.communication.matrix_stage", "copied"),
    ],
}
"""Functions that are wrapped in a span while recording."""


DRAWN = {("FSDP2", 2), ("ZeRO-1", 2)}
"""Cases and numbers of processes to draw. Others, and the candidates in `NOT_DRAWN`, have sums by phase only."""
NOT_DRAWN = ("full_tensor() of update and parameter, distribute_tensor", "muonfx, flat")
FINEST = 0.001
"""Share of an iteration; shorter spans are not drawn."""


class Span(NamedTuple):
    """A phase of a rank's thread or a message, in milliseconds from the start of the iteration."""

    phase: str
    begin: float
    end: float


# --------------------------------------------------------------------------------------------------------- recording


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Wrap the functions of `PLACES` in spans with the name of their phase."""
    with contextlib.ExitStack() as stack:
        for phase, places in PLACES.items():
            for module, path in places:
                *parents, name = path.split(".")
                if module.partition(".")[0] not in sys.modules:
                    continue  # a package that is not installed
                owner: Any = import_module(module)
                for parent in parents:
                    owner = getattr(owner, parent)
                stack.enter_context(
                    mock.patch.object(owner, name, _in_span(phase, getattr(owner, name)))
                )
        yield


def _in_span(phase: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(phase):
            return function(*args, **kwargs)

    return call


class _Event(NamedTuple):
    name: str
    begin: float
    end: float
    nbytes: int


def record(candidate: Candidate) -> tuple[float, list[Span], list[Span]]:
    """Record one iteration and return its milliseconds, this rank's spans and its messages; a collective."""
    with marked(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        dist.barrier()
        with record_function("iteration"):
            candidate.iterate()
    events = found.profiler.kineto_results.events()
    (whole,) = (event for event in events if event.name() == "iteration")
    start, thread = whole.start_ns(), whole.start_thread_id()
    own: list[_Event] = []
    travelling: list[_Event] = []
    for event in events:
        begin = (event.start_ns() - start) / 1e6
        one = _Event(event.name(), begin, begin + event.duration_ns() / 1e6, _nbytes(event))
        if one.begin >= 0 and event is not whole and one.begin < whole.duration_ns() / 1e6:
            if one.name.startswith("gloo:"):
                travelling.append(one)
            elif event.start_thread_id() == thread:
                own.append(one)
    computed = [event.begin for event in own if event.name == "orthogonalize"]
    messages = [
        _message(event, max(computed, default=0.0))
        for event in sorted(travelling, key=lambda one: one.begin)
    ]
    total = whole.duration_ns() / 1e6
    return total, _spans(own, messages, total), messages


def _nbytes(event: Any) -> int:
    sizes = [shape for shape in event.shapes() if shape and not isinstance(shape[0], list)]
    sizes += [
        shape
        for shapes in event.shapes()
        if shapes and isinstance(shapes[0], list)
        for shape in shapes
    ]
    return 4 * sum(int(torch.Size(size).numel()) for size in sizes)


def _message(event: _Event, last: float) -> Span:
    phase = AGREEMENT if event.nbytes <= SMALL else OUT if event.begin < last else BACK
    return Span(phase, event.begin, event.end)


def _spans(events: list[_Event], messages: list[Span], total: float) -> list[Span]:
    """Return the phases of a thread without gaps, from the innermost event that has a phase at each moment."""
    spans: list[Span] = []
    stack: list[tuple[float, str]] = [(total, "Python")]
    at = 0.0

    def until(time: float) -> None:
        nonlocal at
        if time > at:
            phase = stack[-1][1]
            if spans and spans[-1].phase == phase:
                spans[-1] = spans[-1]._replace(end=time)
            else:
                spans.append(Span(phase, at, time))
            at = time

    for event in sorted(events, key=lambda one: (one.begin, -one.end)):
        while stack[-1][0] <= event.begin and len(stack) > 1:
            until(stack[-1][0])
            stack.pop()
        until(event.begin)
        stack.append((min(event.end, stack[-1][0]), _phase(event, stack[-1][1], messages)))
    while stack:
        until(stack[-1][0])
        stack.pop()
    return spans


def _phase(event: _Event, around: str, messages: list[Span]) -> str:
    """Return the phase of an event, given the phase around it."""
    if event.name == "waiting" or event.name.startswith(("c10d::", "_c10d_functional::")):
        # It waits for the last message that ends before the event does.
        over = [message for message in messages if message.begin < event.end]
        return max(
            over, key=lambda one: min(one.end, event.end), default=Span(AGREEMENT, 0, 0)
        ).phase
    if event.name in PLACES:
        return event.name
    return "elementwise" if around == "Python" else around


# ---------------------------------------------------------------------------------------------------------------- rows


def measure(size: Size, case: str) -> list[dict[str, Any]]:
    """Return the rows of a case, with the spans of each rank and the messages of rank 0; a collective."""
    alive = [
        one for one in sharding.candidates(size, case) if not one.name.endswith(("again", "alone"))
    ]
    for one in alive:
        for _ in range(sharding.ITERATIONS):
            one.iterate()
    recorded: dict[str, list[tuple[float, list[Span], list[Span]]]] = {
        one.name: [] for one in alive
    }
    for _ in range(ITERATIONS):
        for one in alive:
            recorded[one.name].append(record(one))
    rows: list[dict[str, Any]] = []
    for one in alive:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, recorded[one.name])
        slowest = [max(rank[turn][0] for rank in gathered) for turn in range(ITERATIONS)]
        kept = slowest.index(min(slowest))
        ranks = [
            {"spans": spans, "messages": messages}
            for _, spans, messages in (rank[kept] for rank in gathered)
        ]
        rows.append(
            {
                "case": case,
                "processes": len(gathered),
                "candidate": one.name,
                "package": versioned(one.package),
                "milliseconds": slowest[kept],
                "phases": {phase: _mean(ranks, phase) for phase in PHASES},
                "hidden": {phase: _hidden(ranks, phase) for phase in (OUT, BACK)},
                "collectives": {
                    phase: sum(one.phase == phase for one in ranks[0]["messages"])
                    for phase in (AGREEMENT, OUT, BACK)
                },
                "ranks": [
                    _drawn(rank, slowest[kept])
                    for rank in ranks
                    if (case, len(ranks)) in DRAWN and one.name not in NOT_DRAWN
                ],
            }
        )
    return rows


def _drawn(rank: dict[str, list[Span]], total: float) -> dict[str, list[str]]:
    """Return the lanes of a rank, with a text "phase: begin to end" for each span."""
    return {
        lane: [
            f"{one.phase}: {one.begin:.2f} to {one.end:.2f}"
            for one in spans
            if one.end - one.begin > FINEST * total
        ]
        for lane, spans in rank.items()
    }


def _mean(ranks: list[dict[str, Any]], phase: str) -> float:
    """Return the milliseconds of a phase, as the mean over ranks."""
    return sum(
        span.end - span.begin for rank in ranks for span in rank["spans"] if span.phase == phase
    ) / len(ranks)


def _hidden(ranks: list[dict[str, Any]], phase: str) -> float:
    """Return the milliseconds in which messages of a phase overlap with other work, as the mean over ranks."""
    travelled = sum(
        one.end - one.begin for rank in ranks for one in rank["messages"] if one.phase == phase
    )
    return max(0.0, travelled / len(ranks) - _mean(ranks, phase))


def times(
    *,
    processes: tuple[int, ...] = (2, 4),
    size: Size = Size(),  # noqa: B008  immutable
    cases: tuple[str, ...] = sharding.CASES,
) -> list[dict[str, Any]]:
    """Record an iteration for each case, number of processes and candidate, and return its milliseconds by phase."""
    if not peers.deepspeed_runs():
        cases = tuple(case for case in cases if not case.startswith("ZeRO"))
    return [
        row
        for number in processes
        for case in cases
        for row in world.run(number, measure, size, case)
    ]


# -------------------------------------------------------------------------------------------------------------- picture


def draw(path: Path = PICTURE) -> Path | None:
    """Plot the recorded lanes; return None without results or matplotlib."""
    found = load("sharding_timeline")
    if found is None or (plt := plots.pyplot()) is None:
        return None
    from matplotlib.patches import Patch

    rows = [row for row in found["rows"] if row["ranks"]]
    heights = [len(row["ranks"]) for row in rows]
    figure, every = plt.subplots(
        len(rows),
        figsize=(9.6, sum(0.9 + 0.42 * height for height in heights)),
        height_ratios=[1.5 + height for height in heights],
        squeeze=False,
        layout="constrained",
    )
    for axes, row in zip(every[:, 0], rows, strict=True):
        _lanes(axes, row)
        axes.set_xlim(0, max(one["milliseconds"] for one in rows if one["case"] == row["case"]))
    every[-1, 0].set_xlabel("milliseconds", color=plots.GREY, fontsize=8.5)
    legend = [Patch(color=color, label=phase) for phase, color in PHASES.items()]
    figure.legend(
        handles=legend,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        labelcolor=plots.GREY,
        fontsize=8.5,
    )
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    return path


def _read(line: str) -> Span:
    phase, _, times = line.rpartition(": ")
    begin, end = map(float, times.split(" to "))
    return Span(phase, begin, end)


def _lanes(axes: Any, row: dict[str, Any]) -> None:
    """Draw two lanes for each rank: its thread and, below it, its messages."""
    ticks: list[float] = []
    for rank, lanes in enumerate(row["ranks"]):
        for lane, top, height in (("spans", 0.0, 0.55), ("messages", 0.6, 0.2)):
            for phase in PHASES:
                bars = [
                    (one.begin, one.end - one.begin)
                    for one in map(_read, lanes[lane])
                    if one.phase == phase
                ]
                axes.broken_barh(bars, (rank + top, height), facecolors=PHASES[phase], linewidth=0)
        ticks.append(rank + 0.4)
    axes.set_yticks(ticks, [f"rank {rank}" for rank in range(len(ticks))])
    axes.set_ylim(len(ticks), -0.1)
    title = f"{row['case']}, {row['processes']} processes, {row['candidate']}"
    axes.set_title(
        f"{title}: {row['milliseconds']:.0f} ms", loc="left", fontsize=9.5, color=plots.GREY
    )
    axes.tick_params(which="both", colors=plots.GREY, labelsize=8, length=2)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(plots.GREY)
