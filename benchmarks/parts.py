"""The time of a step by part: products, passes over memory, Python; and how far each is from what the machine can do.

Each candidate takes a step by itself and a step under PyTorch's profiler in every round; all candidates take turns.

- *Products* are matrix products (`PRODUCTS`), *passes* all other operators that read or write elements, also those that
  `torch.compile` has fused. An operator that others call is counted with the outermost, but a pass that a product calls
  (`addmm` copies its first operand) as a pass, and a product that another operator calls as a product. Operators that
  only make views or take memory are neither. The thread that takes the step counts: it waits for those that help it.
- *Python* is the rest of the same step: the interpreter, dispatch, views, allocation; less what the profiler adds, as
  much for each operator as a loop of small ones shows (`event_cost`).
- The parts of a step so add up to that step, less the profiler's share. Whether the profiler distorts is checked
  against the step without it in the same round: `sum over step`, the median of the ratios, should be 1.

The roofline: `peaks` measures in the same process how fast large products and a large copy go. Operations of a
candidate are those of the shapes that its products were called with. No step can do without `least_bytes` (gradients
are read, momentum and parameters read and written, once) and `least_flops` (five quintic steps with half of each
symmetric product, in the form that has fewer operations). The copy's rate is that of memory: a pass over what a cache
still holds can be faster.

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

os.environ.setdefault("KINETO_LOG_LEVEL", "7")  # read at the profiler's first use; else it prints two lines a step

PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1}
"""Operators that multiply matrices: the place of the first of the two among their tensors."""

ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize", "resize_as", "set"}
"""Operators that give memory and do not touch it."""

REGION = "muonfx: one step"
BASE, STEPS = "polar_express_5", 5


class Event(Protocol):
    """An operator or a region of the profiler."""

    @property
    def name(self) -> str:
        """With its namespace, if it is an operator."""
        ...

    @property
    def cpu_time_total(self) -> float:
        """Microseconds, with all that it called."""
        ...

    @property
    def cpu_children(self) -> Sequence[Event]:
        """The events that it called."""
        ...


class Parts(NamedTuple):
    """Seconds of one step."""

    products: float
    passes: float
    python: float


class Peaks(NamedTuple):
    """The best that was measured in this process."""

    flops: Mapping[str, float]
    """Operations a second of large products by dtype."""
    bytes: float
    """Bytes read and written a second by a large copy."""


# ------------------------------------------------------------------------------------------------------- one step


@cache
def kind(name: str) -> str:
    """Give "product" or "pass"; "none" for what is no operator or moves no elements: regions, views, allocation.

    >>> [kind(name) for name in ("aten::baddbmm", "aten::mul_", "aten::t", "aten::empty", "Optimizer.step#Muon.step")]
    ['product', 'pass', 'none', 'none', 'none']
    >>> kind("graph_0_cpp_fused_add_mul_0")
    'pass'
    """
    if "cpp_fused" in name:  # a kernel that torch.compile made
        return "pass"
    operator = name.partition("::")[2]
    if not operator or " " in name:
        return "none"
    operator = operator.removesuffix("_")
    if operator in PRODUCTS:
        return "product"
    schemas = torch._C._jit_get_schemas_for_operator(name)
    results = [result for schema in schemas for result in schema.returns]
    # the overload is not known: `to`, which may copy, then calls what does
    view = any(result.alias_info is not None and not result.alias_info.is_write for result in results)
    return "none" if view or not schemas or operator in ALLOCATE else "pass"


def split(event: Event) -> tuple[float, float]:
    """Microseconds of products and of passes in an event and all that it called.

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
    """Floating-point operations of a product, from the shapes of its tensors.

    >>> operations("aten::baddbmm", [(3, 4, 4), (3, 4, 5), (3, 5, 4)])
    480
    """
    first = PRODUCTS[name.partition("::")[2].removesuffix("_")]
    left, right = shapes[first], shapes[first + 1]
    return 2 * math.prod(left) * (right[-1] if len(right) > 1 else 1)


def within(event: Event) -> Iterator[Event]:
    """An event and all that it called, outermost first; not what a product calls."""
    yield event
    for child in event.cpu_children if kind(event.name) != "product" else ():
        yield from within(child)


def flops(step: Callable[[], None]) -> dict[str, int]:
    """Operations of the products of one step, by dtype.

    >>> flops(lambda: torch.mm(torch.ones(2, 3), torch.ones(3, 4)))
    {'float32': 48}
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler, record_function(REGION):
        step()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    given = {event.correlation_id(): event for event in profiler.profiler.kineto_results.events()}
    names = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16", "double": "float64"}
    count = Counter[str]()
    for event in (one for top in _called(profiler) for one in within(top)):
        if isinstance(event, FunctionEvent) and kind(event.name) == "product":
            inputs = given[event.id]
            dtype = inputs.dtypes()[0]
            count[names.get(dtype, dtype)] += operations(event.name, inputs.shapes())
    return dict(count)


def _called(profiler: profile) -> Sequence[Event]:
    """The events within the region of the step, on its thread."""
    (region,) = (event for event in profiler.events() or () if event.name == REGION)
    return region.cpu_children


def profiled(step: Callable[[], None], cost: float) -> Parts:
    """The parts of a step; `cost`: seconds that the profiler adds for an event."""
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
    """Seconds that the profiler adds for one operator: the least of five loops of small ones with it, and without.

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
    """Bytes that a step must move: gradients are read, momentum and parameters read and written.

    >>> least_bytes([(10, 10)])
    2000
    """
    return 5 * size * sum(map(math.prod, shapes))


@cache
def least_flops(shape: Shape, coefficients: str = BASE) -> float:
    """Operations of five quintic steps with half of each symmetric product, in the form that has fewer.

    >>> least_flops((64, 64)) / (5 * 64**3)  # X X^T and its square by halves, and one whole product
    4.0
    """

    def halves(method: polar.MethodLike) -> float:
        plan = polar.explain(shape, coefficients=coefficients, steps=STEPS, method=method, dtype=torch.bfloat16)
        short, long = plan.shape
        lengths = [len(stage.steps) for stage in plan.stages]
        # a stage is two products with the long side, one of them symmetric; small ones are all symmetric
        small = STEPS + 3 * sum(length - 1 for length in lengths)
        return len(lengths) * 3 * short**2 * long + small * short**3

    return min(halves("standard"), halves("gram"))


def peaks(seconds: float = 0.5, side: int = 1024) -> Peaks:
    """Measure how fast large products and a large copy go: the best time of several shapes."""

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
    """Milliseconds at the peak rates of all that was done and of all that must be done, and the ratios.

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
        named, orthogonalize=mfx.orthogonalize(coefficients=coefficients), labels=mfx.select.default_labels_by_name
    )


def candidates(compiled: bool) -> Iterator[Optimizer]:
    """Each package's Muon as it comes, the baseline first; ours once more with the coefficients of the others."""
    for one in optimizers(compiled=compiled):
        if one.default:
            yield one
    if compiled and (dion := installed("dion", brings="its clone on PYTHONPATH")):
        make = partial(dion.Muon, lr=1e-3, weight_decay=0.1, nesterov=True)
        yield Optimizer("Dion", make, BASE, True, "dion")
    for coefficients, name in ((BASE, "muonfx"), (COMMON, f"muonfx, {COMMON}")):
        yield Optimizer(name, partial(_ours, coefficients), coefficients, coefficients == BASE, "muonfx")


def speed(
    rounds: int,
    sets: Mapping[str, list[Shape]] = SETS,
    *,
    compiled: bool = True,
    seconds: float = math.inf,
    measure_peaks: Callable[[], Peaks] = peaks,
) -> list[dict[str, Any]]:
    """A row for each candidate and set: the step and its parts in milliseconds, and its roofline.

    `seconds`: for one set, see `interleaved`. `measure_peaks`: called before and after, the better counts.
    """
    cost, before = event_cost(), measure_peaks()
    rows: list[dict[str, Any]] = []
    for case, shapes in sets.items():
        with inductor.patch({"cpp.enable_kernel_profile": True}):  # fused kernels show themselves to the profiler
            rows += _case(case, shapes, rounds, compiled, seconds, cost)
    after = measure_peaks()
    peak = Peaks(
        {dtype: max(rate, after.flops[dtype]) for dtype, rate in before.flops.items()}, max(before[1], after[1])
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
        step()  # a second time: state is made at the first
        counted[one.name] = flops(step)
        runs[one.name] = step
        runs[f"{one.name}, profiled"] = lambda step=step, own=parts[one.name]: own.append(profiled(step, cost))
    times = interleaved(runs, rounds=rounds, seconds=seconds)
    found = summary({one.name: times[one.name] for one in them}, BASELINE)
    rows: list[dict[str, Any]] = []
    for one in them:
        alone = times[one.name]
        own = parts[one.name][-len(alone) :]  # those after the warm-up
        ratios = [sum(part) / step for part, step in zip(own, alone, strict=True)]
        rows.append(
            {
                **about(one, case),
                **found[one.name],
                "parts": {name: 1e3 * statistics.median(getattr(part, name) for part in own) for name in Parts._fields},
                "sum over step": statistics.median(ratios),
                "flops": counted[one.name],
            }
        )
    return rows
