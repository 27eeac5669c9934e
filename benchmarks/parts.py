"""The time of a step by part (products, passes over memory, Python), and a comparison with the limits of the machine.

In every round, each candidate takes a step without and a step with PyTorch's profiler.

- *Products* are matrix products (`PRODUCTS`). *Passes* are all other operators that read or write elements, including
  kernels fused by `torch.compile`. Nested operators count as part of the outermost one. Exceptions are a pass inside a
  product (`addmm` copies its first operand) and a product inside another operator. Operators that only create views or
  allocate memory count as neither. Only the thread of the step is counted, since it waits for its helper threads.
- *Python* is the rest of the step: interpreter, dispatch, views and allocation. The profiler's own cost per operator
  (`event_cost`) is subtracted.
- The parts of a step add up to its time without the profiler's cost. `sum over step` is the median ratio of this sum to
  the step without the profiler in the same round. It is close to 1 if the profiler does not distort the result.

The roofline: `peaks` measures the rates of large products and of a large copy in the same process. The operations of a
candidate follow from the shapes of its products. Every step needs at least `least_bytes` (read gradients once, read and
write momentum and parameters once) and `least_flops` (five quintic steps with half of each symmetric product, in the
cheaper form). The rate of the copy is that of main memory; passes over cached data can be faster.

HeavyBall and Dion are compiled. Dion has no release: clone github.com/microsoft/dion and put it on PYTHONPATH.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch._inductor import config as inductor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

import muonfx as mfx
from benchmarks.measure import interleaved, summary
from benchmarks.peers import COMMON, Optimizer, installed, optimizers
from benchmarks.quality import matrix
from benchmarks.step import BASELINE, SETS, Shape, about, stepper
from muonfx import polar

# Silences the profiler, which otherwise prints two lines per step.
os.environ.setdefault("KINETO_LOG_LEVEL", "7")

PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1}
"""Operators that multiply matrices, and the position of the first factor among their tensors."""

ALLOCATE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize",
    "resize_as",
    "set",
}
"""Operators that allocate memory without writing to it."""

REGION = "muonfx: one step"
BASE, STEPS = "polar_express_5", 5


class Event(Protocol):
    """An operator or a region of the profiler."""

    @property
    def name(self) -> str:
        """Name, with the namespace if it is an operator."""
        ...

    @property
    def cpu_time_total(self) -> float:
        """Microseconds, including nested events."""
        ...

    @property
    def cpu_children(self) -> Sequence[Event]:
        """Nested events."""
        ...


class Parts(NamedTuple):
    """Seconds of one step."""

    products: float
    passes: float
    python: float


class Peaks(NamedTuple):
    """The best rates measured in this process."""

    flops: Mapping[str, float]
    """Operations per second of large products, by dtype."""
    bytes: float
    """Bytes read and written per second by a large copy."""


# ------------------------------------------------------------------------------------------------------- one step


@cache
def kind(name: str) -> str:
    """Return "product", "pass", or "none" for regions, views and allocations.

    >>> [
    ...     kind(name)
    ...     for name in (
    ...         "aten::baddbmm",
    ...         "aten::mul_",
    ...         "aten::t",
    ...         "aten::empty",
    ...         "Optimizer.step#Muon.step",
    ...     )
    ... ]
    ['product', 'pass', 'none', 'none', 'none']
    >>> kind("graph_0_cpp_fused_add_mul_0")
    'pass'
    """
    if "cpp_fused" in name:  # a kernel of torch.compile
        return "pass"
    operator = name.partition("::")[2]
    if not operator or " " in name:
        return "none"
    operator = operator.removesuffix("_")
    if operator in PRODUCTS:
        return "product"
    schemas = torch._C._jit_get_schemas_for_operator(name)
    results = [result for schema in schemas for result in schema.returns]
    # The overload is unknown. `to` may copy, and then has a nested event that counts.
    view = any(
        result.alias_info is not None and not result.alias_info.is_write for result in results
    )
    return "none" if view or not schemas or operator in ALLOCATE else "pass"


def split(event: Event) -> tuple[float, float]:
    """Return the microseconds of products and of passes in an event, including nested events.

    >>> from types import SimpleNamespace as Node
    >>> copy = Node(name="aten::copy_", cpu_time_total=3.0, cpu_children=[])
    >>> addmm = Node(name="aten::addmm", cpu_time_total=10.0, cpu_children=[copy])
    >>> split(Node(name="step", cpu_time_total=20.0, cpu_children=[addmm, copy]))
    (7.0, 6.0)
    """
    inner = [split(child) for child in event.cpu_children]
    products, passes = (sum(part) for part in zip(*inner, strict=True)) if inner else (0.0, 0.0)
    if kind(event.name) == "product":
        return event.cpu_time_total - passes, passes
    if kind(event.name) == "pass":
        return products, event.cpu_time_total - products
    return products, passes


def operations(name: str, shapes: Sequence[Sequence[int]]) -> int:
    """Return the floating-point operations of a product, from the shapes of its tensors.

    >>> operations("aten::baddbmm", [(3, 4, 4), (3, 4, 5), (3, 5, 4)])
    480
    """
    first = PRODUCTS[name.partition("::")[2].removesuffix("_")]
    left, right = shapes[first], shapes[first + 1]
    return 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)


def within(event: Event) -> Iterator[Event]:
    """Yield an event and its nested events, outermost first, but not the events inside a product."""
    yield event
    for child in event.cpu_children if kind(event.name) != "product" else ():
        yield from within(child)


def flops(step: Callable[[], None]) -> dict[str, int]:
    """Return the floating-point operations of the products of one step, by dtype.

    >>> flops(lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 4)))
    {'float32': 48}
    """
    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
        record_function(REGION),
    ):
        step()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    given = {event.correlation_id(): event for event in profiler.profiler.kineto_results.events()}
    names = {
        "float": "float32",
        "c10::BFloat16": "bfloat16",
        "c10::Half": "float16",
        "double": "float64",
    }
    count = Counter[str]()
    for event in (one for top in _called(profiler) for one in within(top)):
        if isinstance(event, FunctionEvent) and kind(event.name) == "product":
            inputs = given[event.id]
            dtype = inputs.dtypes()[0]
            count[names.get(dtype, dtype)] += operations(event.name, inputs.shapes())
    return dict(count)


def _called(profiler: profile) -> Sequence[Event]:
    """Return the events of the step on its thread."""
    (region,) = (event for event in profiler.events() or () if event.name == REGION)
    return region.cpu_children


def profiled(step: Callable[[], None], cost: float) -> Parts:
    """Return the parts of a step. `cost` is the profiler's time per event in seconds."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(REGION):
        start = time.perf_counter()
        step()
        spent = time.perf_counter() - start
    called = _called(profiler)
    microseconds = [split(event) for event in called]
    products, passes = (1e-6 * sum(part[i] for part in microseconds) for i in (0, 1))
    events = sum(1 for _ in _all(called))
    return Parts(products, passes, spent - cost * events - products - passes)


def _all(events: Sequence[Event]) -> Iterator[Event]:
    for event in events:
        yield event
        yield from _all(event.cpu_children)


def event_cost(calls: int = 2000) -> float:
    """Return the profiler's time per operator, from the fastest of five loops with and without it.

    >>> event_cost(50) < 1e-3
    True
    """
    x = torch.zeros(8)

    def loop() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            x.add_(1)
        return time.perf_counter() - start

    without, under = [], []
    for _ in range(5):
        without.append(loop())
        with profile(activities=[ProfilerActivity.CPU]):
            under.append(loop())
    return max(0.0, min(under) - min(without)) / calls


# -------------------------------------------------------------------------------------------------------- the limit


def least_bytes(shapes: Sequence[Shape], size: int = 4) -> int:
    """Return the minimum bytes of a step: gradients are read, momentum and parameters are read and written.

    >>> least_bytes([(10, 10)])
    2000
    """
    return 5 * size * sum(map(math.prod, shapes))


@cache
def least_flops(shape: Shape, coefficients: str = BASE) -> float:
    """Return the operations of five quintic steps with half of each symmetric product, in the cheaper form.

    >>> least_flops((64, 64)) / (
    ...     5 * 64**3
    ... )  # half of X X^T, half of its square, and one full product
    4.0
    """

    def halves(method: polar.MethodLike) -> float:
        plan = polar.explain(
            shape, coefficients=coefficients, steps=STEPS, method=method, dtype=torch.bfloat16
        )
        short, long = plan.shape
        lengths = [len(stage.steps) for stage in plan.stages]
        # A stage has two products with the long side, one of them symmetric. All small products are symmetric.
        small = STEPS + 3 * sum(length - 1 for length in lengths)
        return len(lengths) * 3 * short**2 * long + small * short**3

    return min(halves("standard"), halves("gram"))


def peaks(seconds: float = 0.5, side: int = 1024) -> Peaks:
    """Measure the rates of large products and of a large copy, as the best of several shapes."""

    def best(call: Callable[[], object], limit: float) -> float:
        call()
        times: list[float] = []
        end = time.perf_counter() + limit
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    shapes = [(side, side, side), (2 * side,) * 3, (side, 4 * side, side), (4 * side, side, side)]
    rates: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for m, k, n in shapes:
            a, b, out = (torch.ones(shape, dtype=dtype) for shape in ((m, k), (k, n), (m, n)))
            rate = 2 * m * k * n / best(partial(torch.mm, a, b, out=out), seconds)
            name = str(dtype).removeprefix("torch.")
            rates[name] = max(rate, rates.get(name, 0.0))
    source = torch.ones(64 * side * side)
    target = torch.empty_like(source)
    return Peaks(rates, 2 * source.nbytes / best(partial(target.copy_, source), 2 * seconds))


def roofline(
    shapes: Sequence[Shape], counted: Mapping[str, int], parts: Parts, step: float, peak: Peaks
) -> dict[str, float]:
    """Return the milliseconds of the actual and of the minimum work at peak rates, and the ratios.

    >>> peak = Peaks({"bfloat16": 1e9}, 1e9)
    >>> found = roofline([(100, 100)], {"bfloat16": 10**8}, Parts(0.2, 0.001, 0.0), 0.201, peak)
    >>> found["products over peak"], found["step over least"]
    (2.0, 10.0)
    """
    done = sum(count / peak.flops[dtype] for dtype, count in counted.items())
    products = sum(map(least_flops, shapes)) / max(peak.flops.values())
    moved = least_bytes(shapes) / peak.bytes
    return {
        "products at peak": 1e3 * done,
        "least products": 1e3 * products,
        "least passes": 1e3 * moved,
        "products over peak": parts.products / done,
        "passes over least": parts.passes / moved,
        "step over least": step / (products + moved),
    }


# ------------------------------------------------------------------------------------------------------- candidates


def _ours(coefficients: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    named = {f"h.{i}.weight": param for i, param in enumerate(params)}
    return mfx.Muon(
        named,
        orthogonalize=mfx.orthogonalize(coefficients=coefficients),
        labels=mfx.routing.default_labels_by_name,
    )


def candidates(compiled: bool) -> Iterator[Optimizer]:
    """Yield each package's Muon with default settings, the baseline first, and ours also with common coefficients."""
    for one in optimizers(compiled=compiled):
        if one.default:
            yield one
    if compiled and (
        dion := installed("dion", get="put a clone of github.com/microsoft/dion on PYTHONPATH")
    ):
        make = partial(dion.Muon, lr=1e-3, weight_decay=0.1, nesterov=True)
        yield Optimizer("Dion", make, BASE, True, "dion")
    for coefficients, name in ((BASE, "muonfx"), (COMMON, f"muonfx, {COMMON}")):
        yield Optimizer(
            name, partial(_ours, coefficients), coefficients, coefficients == BASE, "muonfx"
        )


def speed(
    rounds: int,
    sets: Mapping[str, list[Shape]] = SETS,
    *,
    compiled: bool = True,
    seconds: float = math.inf,
    measure_peaks: Callable[[], Peaks] = peaks,
) -> list[dict[str, Any]]:
    """Return a row for each candidate and set, with the parts of a step in milliseconds and its roofline.

    `seconds` is the time limit for one set, see `interleaved`. `measure_peaks` is called before and after the
    measurement, and the higher rates are used.
    """
    cost, before = event_cost(), measure_peaks()
    rows: list[dict[str, Any]] = []
    for case, shapes in sets.items():
        # Makes fused kernels visible to the profiler.
        with inductor.patch({"cpp.enable_kernel_profile": True}):
            rows += _case(case, shapes, rounds, compiled, seconds, cost)
    after = measure_peaks()
    peak = Peaks(
        {dtype: max(rate, after.flops[dtype]) for dtype, rate in before.flops.items()},
        max(before[1], after[1]),
    )
    for row in rows:
        parts = Parts(**{name: 1e-3 * spent for name, spent in row["parts"].items()})
        step = 1e-3 * row["milliseconds"]["median"]
        row["roofline"] = roofline(sets[row["case"]], row["flops"], parts, step, peak)
        row["peaks"] = {"flops": peak.flops, "bytes": peak.bytes}
        row["event cost"] = cost
    return rows


def _case(
    case: str, shapes: list[Shape], rounds: int, compiled: bool, seconds: float, cost: float
) -> list[dict[str, Any]]:
    gradients = [matrix("gaussian", shape, seed) for seed, shape in enumerate(shapes)]
    them = list(candidates(compiled))
    parts: dict[str, list[Parts]] = {one.name: [] for one in them}
    runs: dict[str, Callable[[], object]] = {}
    counted: dict[str, dict[str, int]] = {}
    for one in them:
        step = stepper(one.build, gradients)[1]
        step()
        step()  # the first step created the state
        counted[one.name] = flops(step)
        runs[one.name] = step
        runs[f"{one.name}, profiled"] = lambda step=step, own=parts[one.name]: own.append(
            profiled(step, cost)
        )
    times = interleaved(runs, rounds=rounds, seconds=seconds)
    found = summary({one.name: times[one.name] for one in them}, BASELINE)
    rows: list[dict[str, Any]] = []
    for one in them:
        alone = times[one.name]
        own = parts[one.name][-len(alone) :]  # without the warm-up
        ratios = [sum(part) / step for part, step in zip(own, alone, strict=True)]
        rows.append(
            {
                **about(one, case),
                **found[one.name],
                "parts": {
                    name: 1e3 * statistics.median(getattr(part, name) for part in own)
                    for name in Parts._fields
                },
                "sum over step": statistics.median(ratios),
                "flops": counted[one.name],
            }
        )
    return rows
