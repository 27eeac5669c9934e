"""Where the time of one iteration goes, rank by rank: for each candidate of `benchmarks.sharding`.

torch's profiler records an iteration on every rank. Each moment of a rank's own thread belongs to the innermost span
that says what it is for: to a matrix being orthogonalized, to a message being waited for or packed, to forward and
backward, to an operator of torch outside of these, or else to Python. Messages on their way are a lane of their own, as
gloo's threads see them; what lies above a message while it travels is what it overlaps with.

Operators of at most `SMALL` bytes count as agreement, others as the exchange out or back: out if begun before the rank
has computed its last matrix of the iteration, so "out" is everything where matrices are gathered one by one.
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

from benchmarks import sharding, world
from benchmarks import sharding_peers as peers
from benchmarks.peers import versioned
from benchmarks.sharding import Candidate, Size

PICTURE = Path(__file__).parent.parent / "docs" / "assets" / "sharding_timeline.svg"
SMALL = 1 << 16
ITERATIONS = 9
"""Of each candidate that are recorded; the one with the median time is kept."""

OUT, BACK, AGREEMENT = "exchange out", "exchange back", "agreement"
PHASES = {
    "forward, backward": "#8d99ae",
    "orthogonalize": "#6f78e8",
    AGREEMENT: "#b45cb0",
    OUT: "#d0702c",
    BACK: "#e0a83c",
    "pack, unpack": "#c2485a",
    "elementwise": "#2a9d8f",
    "Python": "#565b66",
}
"""Of a rank's thread, in the order of the tables; those of messages are waiting there, and travelling in their lane."""

PLACES = {
    "forward, backward": [("benchmarks.sharding", "GPT.forward"), ("torch.autograd", "_engine_run_backward")],
    "orthogonalize": peers.ORTHOGONALIZE,
    "waiting": [("torch.distributed", "Work.wait")],
    "pack, unpack": [("muonfx.sharding.messages", "copied"), ("muonfx.sharding.matrix_stage", "copied")],
}
"""Functions that are wrapped in a span for the time being."""


class Span(NamedTuple):
    """A part of a lane, in milliseconds from the start of the iteration."""

    phase: str
    begin: float
    end: float


class Message(NamedTuple):
    """A collective from its beginning to its end, as gloo's threads see it."""

    phase: str
    begin: float
    end: float
    what: str
    nbytes: int


# --------------------------------------------------------------------------------------------------------- recording


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Wrap the functions of `PLACES` in spans with the name of their phase."""
    with contextlib.ExitStack() as stack:
        for phase, places in PLACES.items():
            for module, path in places:
                *parents, name = path.split(".")
                if module.partition(".")[0] not in sys.modules:
                    continue  # a peer that has no part in this
                owner: Any = import_module(module)
                for parent in parents:
                    owner = getattr(owner, parent)
                stack.enter_context(mock.patch.object(owner, name, _in_span(phase, getattr(owner, name))))
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


def record(candidate: Candidate) -> tuple[float, list[Span], list[Message]]:
    """Record one iteration; all ranks call it together. Its milliseconds, this rank's spans, and its messages."""
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
    messages = [_message(event, max(computed, default=0.0)) for event in sorted(travelling, key=lambda one: one.begin)]
    total = whole.duration_ns() / 1e6
    return total, _spans(own, messages, total), messages


def _nbytes(event: Any) -> int:
    sizes = [shape for shape in event.shapes() if shape and not isinstance(shape[0], list)]
    sizes += [shape for shapes in event.shapes() if shapes and isinstance(shapes[0], list) for shape in shapes]
    return 4 * sum(int(torch.Size(size).numel()) for size in sizes)


def _message(event: _Event, last: float) -> Message:
    phase = AGREEMENT if event.nbytes <= SMALL else OUT if event.begin < last else BACK
    return Message(phase, event.begin, event.end, event.name.removeprefix("gloo:"), event.nbytes)


def _spans(events: list[_Event], messages: list[Message], total: float) -> list[Span]:
    """The phases of a thread, without gaps: at each moment that of the innermost event that has one."""
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


def _phase(event: _Event, around: str, messages: list[Message]) -> str:
    """The phase of an event, within what is around it."""
    if event.name == "waiting" or event.name.startswith(("c10d::", "_c10d_functional::")):
        # It waits for the message that ends last before it does.
        over = [message for message in messages if message.begin < event.end]
        return max(over, key=lambda one: min(one.end, event.end), default=Message(AGREEMENT, 0, 0, "", 0)).phase
    if event.name in PLACES:
        return event.name
    return "elementwise" if around == "Python" else around


# ---------------------------------------------------------------------------------------------------------------- rows


def measure(size: Size, case: str) -> list[dict[str, Any]]:
    """The rows of a case: on each rank its spans, and the messages of the first; called on every rank."""
    rows: list[dict[str, Any]] = []
    for one in sharding.candidates(size, case):
        if one.name.endswith(("again", "alone")):
            continue
        for _ in range(sharding.ITERATIONS):
            one.iterate()
        recorded = [record(one) for _ in range(ITERATIONS)]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, recorded)
        slowest = [max(rank[turn][0] for rank in gathered) for turn in range(ITERATIONS)]
        kept = sorted(range(ITERATIONS), key=slowest.__getitem__)[ITERATIONS // 2]
        ranks = [{"spans": spans, "messages": messages} for _, spans, messages in (rank[kept] for rank in gathered)]
        rows.append(
            {
                "case": case,
                "processes": len(gathered),
                "candidate": one.name,
                "package": versioned(one.package),
                "milliseconds": slowest[kept],
                "phases": {phase: _mean(ranks, phase) for phase in PHASES},
                "hidden": {phase: _hidden(ranks, phase) for phase in (OUT, BACK)},
                "collectives": len(ranks[0]["messages"]),
                "small": sum(message.phase == AGREEMENT for message in ranks[0]["messages"]),
                "ranks": ranks,
            }
        )
    return rows


def _mean(ranks: list[dict[str, Any]], phase: str) -> float:
    """Milliseconds of a phase, on average over the ranks."""
    return sum(span.end - span.begin for rank in ranks for span in rank["spans"] if span.phase == phase) / len(ranks)


def _hidden(ranks: list[dict[str, Any]], phase: str) -> float:
    """Milliseconds that messages of a phase travelled while their rank did something else, on average."""
    travelled = sum(one.end - one.begin for rank in ranks for one in rank["messages"] if one.phase == phase)
    return max(0.0, travelled / len(ranks) - _mean(ranks, phase))


def times(
    *,
    processes: tuple[int, ...] = (2, 4),
    size: Size = Size(),  # noqa: B008  a frozen value
    cases: tuple[str, ...] = sharding.CASES,
) -> list[dict[str, Any]]:
    """For each case, number of processes and candidate: a recorded iteration, and its milliseconds by phase."""
    if not peers.deepspeed_runs():
        cases = tuple(case for case in cases if not case.startswith("ZeRO"))
    return [row for number in processes for case in cases for row in world.run(number, measure, size, case)]
