"""Choose how a matrix is orthogonalized: dtype, method and products. `explain` gives the reasons.

*Dtype.* bf16 is the default on accelerators. A CPU without bf16 instructions, or a build of torch without the kernels,
runs bf16 hundreds of times slower than fp32, so bf16 on a CPU requires both. Polynomials that use their whole interval
diverge in bf16 and get a wider dtype. Derivatives are meaningless in bf16 and get at least fp32.

*Method.* The standard iteration multiplies by the long side twice in each step. The Gram form multiplies by it twice in
each stage and takes more small products (`muonfx.polar.stages`). The method with fewer multiply-adds is chosen; a
symmetric product counts as its share of a full product, and a pass over a small matrix as multiply-adds of the same
time. The number of steps in a stage depends on the dtype (`muonfx.polar.stability`): for any finite matrix, rounding
keeps singular values near their band.

*Products.* On a CPU, half of each symmetric product is skipped above a certain size, by blocks. The Triton kernels do
the same on CUDA; they have not been measured on a GPU, so they run only if ``products="triton"`` asks for them.

The choice depends on the shape of one matrix, the dtypes, the device and whether derivatives are taken. It depends on
neither batch size, values nor time, so the same matrix always gets the same result.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from muonfx.polar import kernels
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.hardware import cpu_has_amx, cpu_has_bf16, cuda_capability
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import ProductsLike
from muonfx.polar.rates import Rates, built_in
from muonfx.polar.stability import TOLERANCE, largest, stable_restarts
from muonfx.polar.stages import Stage, staged, standard
from muonfx.tree.display import Report, Table
from muonfx.tree.elementwise import wide_dtype
from muonfx.tree.tracing import called_once, fixed

SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of inputs and of matrix products."""


DTypeLike = torch.dtype | Literal["auto"]
"""How the dtype of matrix products is asked for: by itself, or "auto" for what `compute_dtype` says."""

MethodLike = Literal["auto", "standard", "gram"]
"""How the method is asked for."""

# The rounding errors of the Gram form fall with the side. From 256 on they were measured at no more than 1.5 times the
# errors of the standard iteration.
SMALLEST_GRAM = 256
"""Shortest side for which "auto" takes the Gram form; below, launches and not arithmetic take the time."""


_BLOCKS_AT_ONCE = 1 << 20
"""Largest number of elements of the small matrices of a batch when products are done by blocks."""


class Facts(NamedTuple):
    """Properties of a machine; given explicitly, a plan is the same on every machine."""

    tiles: bool
    """True if the CPU has tile registers (AMX)."""
    kernels: bool
    """True if the Triton kernels run on the device."""


class Reason(NamedTuple):
    """A sentence and its numbers, formatted only when it is printed."""

    text: str
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.text.format(*self.numbers)


class Plan(NamedTuple):
    """How matrices of one shape are orthogonalized. Prints as an explanation."""

    shape: tuple[int, int]
    """The short side and the long side."""
    dtype: torch.dtype
    """Of the products."""
    method: Literal["standard", "gram"]
    stages: tuple[Stage, ...]
    """Empty where the coefficients are a tensor."""
    products: Literal["batched", "blocks", "triton"]
    """How the Gram matrix of the whole matrix is made."""
    small_products: Literal["batched", "blocks", "triton"]
    """How products of small matrices are done: as those, or batched where the others do not pay."""
    reasons: tuple[Reason, ...]
    """Why that dtype, that method and those products."""

    @property
    def at_once(self) -> int | None:
        """The most matrices of one batch, or None for no limit: by blocks, as many as fit a cache."""
        return max(1, _BLOCKS_AT_ONCE // self.shape[0] ** 2) if self.products == "blocks" else None

    @property
    def scratch_bytes(self) -> int:
        """The bytes of intermediates that one matrix takes: two of its own size, and some of its Gram matrix's."""
        n, m = self.shape
        longest = max((len(stage.steps) for stage in self.stages), default=1)
        small = 3 if longest == 1 else 6 if longest == 2 else 8  # buffers of `products.Buffered`, and an identity
        return (2 * n * m + small * n * n) * self.dtype.itemsize

    def _heading(self) -> str:
        n, m = self.shape
        cut = " + ".join(str(len(stage.steps)) for stage in self.stages)
        steps = f", steps in stages of {cut}" if self.method == "gram" else ""
        return f"{n} x {m}: {self.method}, {_name_of(self.dtype)}, {self.products}{steps}"

    def __str__(self) -> str:
        lines = [f"  {what:9}{why}" for what, why in zip(("dtype", "method", "products"), self.reasons, strict=True)]
        return "\n".join([self._heading(), *lines])

    def _repr_html_(self) -> str:
        """Return the choices as an HTML table."""
        chosen = (("dtype", _name_of(self.dtype)), ("method", self.method), ("products", self.products))
        rows = [(what, took, str(why)) for (what, took), why in zip(chosen, self.reasons, strict=True)]
        return Report((Table.of(("choice", "taken", "why"), rows, title=self._heading()),)).to_html()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def explain(
    shape: tuple[int, int],
    device: torch.device | str = "cpu",
    *,
    held: torch.dtype = torch.float32,
    coefficients: CoefficientsLike | torch.Tensor = "polar_express_5",
    steps: int | None = None,
    method: MethodLike = "auto",
    restarts: Sequence[int] | None = None,
    dtype: DTypeLike = "auto",
    products: ProductsLike = "auto",
) -> Plan:
    """What `orthogonalize` does with a matrix of this shape, and why; print it to read it.

    Args:
        shape: (rows, columns), either side the longer one.
        device: where the matrix is.
        held: the matrix's own dtype.
        coefficients: as in `orthogonalize`.
        steps: as in `orthogonalize`.
        method: as in `orthogonalize`.
        restarts: as in `orthogonalize`.
        dtype: as in `orthogonalize`.
        products: as in `orthogonalize`.

    Raises:
        TypeError: ``shape`` is no pair of whole numbers.
        ValueError, TypeError, RuntimeError: as `orthogonalize`.

    >>> print(explain((768, 3072), dtype=torch.float32))
    768 x 3072: gram, float32, blocks, steps in stages of 2 + 1 + 2
      dtype    as asked for
      method   ... multiply-adds in stages of 2 + 1 + 2 steps, against ... in the standard form
      products by blocks, which leave out half of symmetric ones: ...
    """
    if isinstance(shape, torch.Tensor):
        raise TypeError(f"shape must be (rows, columns), found a tensor: explain(tuple(x.shape)), {tuple(shape.shape)}")
    if not (isinstance(shape, tuple | list) and len(shape) == 2 and all(type(side) is int for side in shape)):
        raise TypeError(f"shape must be (rows, columns), two whole numbers, found {shape!r}")
    short, long = sorted(shape)
    resolved = polynomials(coefficients, steps, restarts)
    return plan(short, long, held, torch.device(device), resolved, method=method, dtype=dtype, products=products)


def plan(
    short: int,
    long: int,
    held: torch.dtype,
    device: torch.device,
    resolved: Polynomials,
    *,
    method: MethodLike = "auto",
    dtype: DTypeLike = "auto",
    products: ProductsLike = "auto",
    facts: Facts | None = None,
    differentiated: bool = False,
) -> Plan:
    """Make the plan of `explain` from resolved settings; with `facts` and a dtype it does not depend on the machine."""
    fastest = compute_dtype(held, device, dtype)
    if differentiated and dtype == "auto":
        fastest = wide_dtype(fastest)
    compute = stable_dtype(fastest, resolved, dtype)
    if not isinstance(method, str) or method not in ("auto", "standard", "gram"):
        raise ValueError(f"method: found {method!r}, expected 'auto', 'standard' or 'gram'")
    done, why_products = _choose_products(short, long, compute, device, products, facts)
    small = _choose_products(short, short, compute, device, products, facts)[0]
    rates = _rates(device, compute, facts)
    taken, stages, why_method = _choose_method(short, long, compute, rates, resolved, method, (done, small))
    reasons = (_why_dtype(held, device, dtype, compute != fastest, differentiated), why_method, why_products)
    return Plan((short, long), compute, taken, stages, done, small, reasons)


def compute_dtype(
    dtype: torch.dtype,
    device: torch.device,
    requested: DTypeLike = "auto",
    *,
    coefficients: CoefficientsLike | torch.Tensor | None = None,
    steps: int | None = None,
) -> torch.dtype:
    """The dtype for matrix products on inputs of `dtype` on `device`.

    `"auto"` keeps float64. Otherwise it is bf16 on CUDA from compute capability 8.0 on, bf16 on a CPU that has AMX or
    AVX512-BF16 if torch was built with oneDNN, and fp32 everywhere else. With `coefficients` that would diverge by
    rounding there, it is a wider dtype. It is at least fp32 where `orthogonalize` is differentiated.

    The answer depends on the machine and on the build of torch only, so it is always the same on one machine. Two
    machines may differ: choose a dtype for runs that must agree bit for bit.

    Raises:
        ValueError: a string other than "auto".
        TypeError: a dtype that is not one of `SUPPORTED`.

    >>> compute_dtype(torch.float64, torch.device("cpu"))
    torch.float64
    >>> compute_dtype(torch.float32, torch.device("cpu"), torch.bfloat16)
    torch.bfloat16
    """
    if isinstance(requested, str):
        if requested != "auto":
            raise ValueError(f"dtype: found {requested!r}, expected 'auto' or a torch.dtype such as torch.bfloat16")
        fastest = torch.float64 if dtype == torch.float64 else _fastest(device.type, device.index)
        if coefficients is None:
            return fastest
        if isinstance(coefficients, str):
            return _stable_dtype_of_set(coefficients, steps, fastest)
        return stable_dtype(fastest, polynomials(coefficients, steps))
    if requested not in SUPPORTED:
        raise TypeError(f"dtype: found {requested!r}, expected 'auto' or one of {', '.join(map(str, SUPPORTED))}")
    return requested


@called_once  # a tracer calls this once and keeps the answer
def _fastest(kind: str, index: int | None) -> torch.dtype:
    """Return the fastest dtype that is precise enough for inputs of at most fp32."""
    if kind == "cpu":
        fast = cpu_has_bf16()
    elif kind == "cuda":
        fast = cuda_capability(index)[0] >= 8
    else:
        fast = False
    return torch.bfloat16 if fast else torch.float32


def stable_dtype(compute: torch.dtype, resolved: Polynomials, requested: DTypeLike = "auto") -> torch.dtype:
    """Return `compute`, or the narrowest wider dtype in which the polynomials do not diverge by rounding."""
    if resolved.table is not None or _is_stable(resolved, compute):
        return compute
    if requested != "auto":
        _warn_of_rounding(f"in {compute} the standard form of this set may diverge", "with_safety(set, 1.01), or dtype")
        return compute
    return next((d for d in (torch.float32, torch.float64) if _is_stable(resolved, d)), torch.float64)


@functools.lru_cache(maxsize=256)
def _stable_dtype_of_set(name: CoefficientsLike, steps: int | None, compute: torch.dtype) -> torch.dtype:
    """Return `stable_dtype` for a set with a name; a checkpoint and each plan over ranks look it up."""
    return stable_dtype(compute, polynomials(name, steps))


def _is_stable(resolved: Polynomials, compute: torch.dtype) -> bool:
    steps = resolved.steps
    return largest(steps, tuple(range(1, len(steps))), resolved.safety, compute) <= TOLERANCE


@called_once  # warns when it is traced
def _warn_of_rounding(found: str, remedy: str) -> bool:
    warnings.warn(
        f"orthogonalize: {found}: rounding can push singular values out of the interval that its polynomials were "
        f"fitted for, where they grow without bound; use {remedy}='auto'",
        RuntimeWarning,
        stacklevel=2,
    )
    return True


@called_once  # hardware queries cannot be traced
def _why_dtype(
    held: torch.dtype, device: torch.device, requested: DTypeLike, widened: bool, differentiated: bool
) -> Reason:
    if isinstance(requested, torch.dtype):
        return Reason("as asked for")
    if widened:
        return Reason("in a narrower one, rounding would make these polynomials diverge; `with_safety` prevents that")
    if held == torch.float64:
        return Reason("float64 stays float64")
    if differentiated:
        return Reason("at least fp32 for derivatives")
    if device.type == "cpu":
        has = "has" if cpu_has_bf16() else "lacks"
        return Reason(f"bf16 if the CPU has AMX or AVX512-BF16 and torch has oneDNN; here it {has} bf16 products")
    if device.type == "cuda":
        return Reason("compute capability {}.{}; bf16 from 8.0 on", cuda_capability(device.index))
    return Reason(f"fp32 on devices of type {device.type}")


def _choose_products(
    short: int,
    long: int,
    compute: torch.dtype,
    device: torch.device,
    requested: ProductsLike,
    facts: Facts | None,
) -> tuple[Literal["batched", "blocks", "triton"], Reason]:
    if requested not in ("auto", "batched", "blocks", "triton"):
        raise ValueError(f"products: found {requested!r}, expected 'auto', 'batched', 'blocks' or 'triton'")
    if requested == "triton":
        if compute == torch.float64:
            raise ValueError(
                "products: found 'triton' for float64, expected 'batched' or 'blocks': the kernels have none"
            )
        if not _has_kernels(device, facts):
            raise RuntimeError(
                f"products: found 'triton' on {device}, where the kernels do not run (CUDA with capability 8.0 or more "
                "and an installed Triton); use 'auto' or 'batched'"
            )
    if requested != "auto":
        return requested, Reason("as asked for")
    rates, size = _rates(device, compute, facts), short * short * long
    if device.type == "cuda":
        return "batched", Reason(
            "in batches by the BLAS: the kernels have not been measured on a GPU; ask for 'triton'"
        )
    numbers = (size, rates.halved_from)
    bound = f"{{:.1e}} multiply-adds against a bound of {{:.1e}} ({rates.source})"
    if size < rates.halved_from:
        return "batched", Reason(f"in batches by the BLAS: halving symmetric ones does not pay at {bound}", numbers)
    return "blocks", Reason(f"by blocks, which leave out half of symmetric ones: {bound}", numbers)


def _choose_method(
    short: int,
    long: int,
    compute: torch.dtype,
    rates: Rates,
    resolved: Polynomials,
    requested: MethodLike,
    products: tuple[str, str],
) -> tuple[Literal["standard", "gram"], tuple[Stage, ...], Reason]:
    if resolved.table is not None:
        if requested == "gram":
            raise ValueError("method: found 'gram' with a tensor of coefficients, which only the standard form takes")
        return "standard", (), Reason("coefficients that are a tensor are for the standard form")
    plain = standard(resolved.steps)
    if requested == "standard":
        return "standard", plain, Reason("as asked for")
    if requested == "auto" and short < SMALLEST_GRAM:
        return "standard", plain, Reason(f"the Gram form rounds more below a side of {SMALLEST_GRAM}")
    if requested == "auto" and resolved.row_scaling:
        why = "row scaling makes the first Gram matrix anyway, and its eigenvalues are not known"
        return "standard", plain, Reason(why)
    restarts = _restarts(resolved, compute, requested)
    if requested == "auto" and len(restarts) + 1 == len(plain):
        return "standard", plain, Reason(f"{compute} rounds too much for two steps on one Gram matrix")
    short, long = fixed(short), fixed(long)  # the centers are constants of the graph
    mean = None if resolved.row_scaling else 1 / (max(short, 1) * resolved.safety**2)
    stages = staged(resolved.steps, restarts, mean, max(long, 1) / max(short, 1))
    if requested == "gram":
        return "gram", stages, Reason("as asked for")
    costs = (_cost(stages, short, long, rates, products), _cost(plain, short, long, rates, products))
    cut = " + ".join(str(len(stage.steps)) for stage in stages)
    text = f"{{:.2e}} multiply-adds in stages of {cut} steps, against {{:.2e}} in the standard form"
    counted = Reason(text, costs)
    return ("gram", stages, counted) if costs[0] < costs[1] else ("standard", plain, counted)


def _restarts(resolved: Polynomials, compute: torch.dtype, requested: MethodLike) -> tuple[int, ...]:
    """Return restarts that are stable in `compute`; the caller's own restarts are kept for "gram", with a warning."""
    steps, wanted, safety = resolved.steps, resolved.restarts, resolved.safety
    if not resolved.restarts_are_asked or requested == "auto":
        return stable_restarts(steps, wanted, safety, compute)
    if largest(steps, wanted, safety, compute) > TOLERANCE:
        found = f"restarts {wanted} in {compute} leave too many steps on one rounded Gram matrix"
        _warn_of_rounding(found, "restarts=None or method")
    return wanted


def work(plan: Plan, device: torch.device, facts: Facts | None = None) -> float:
    """Return the time to orthogonalize one matrix by this plan, in multiply-adds of full products."""
    ways = (plan.products, plan.small_products)
    return _cost(plan.stages, *plan.shape, _rates(device, plan.dtype, facts), ways)


def _cost(stages: Sequence[Stage], n: int, m: int, rates: Rates, products: tuple[str, str]) -> float:
    """Return multiply-adds, with Gram matrices, squares and passes over small matrices weighted by their time."""
    gram, small = (1.0 if how == "batched" else rates.share for how in products)
    total = 0.0
    for stage in stages:
        extra = len(stage.steps) - 1
        squares = sum(1 for step in stage.steps if step[2] != 0)
        total += (1 + gram) * n * n * m + n**3 * (small * squares + 3 * extra) + 3 * extra * rates.pass_cost * n * n
    return total


def _has_kernels(device: torch.device, facts: Facts | None) -> bool:
    return kernels.available(device) if facts is None else facts.kernels


@called_once  # a tracer calls this once and keeps the answer
def _rates(device: torch.device, compute: torch.dtype, facts: Facts | None) -> Rates:
    if facts is not None:
        return built_in(device.type, facts.tiles, compute)  # independent of the machine that runs this
    return built_in(device.type, device.type == "cpu" and cpu_has_amx(), compute, has_bf16=cpu_has_bf16())
