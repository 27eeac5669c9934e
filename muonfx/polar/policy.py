"""Choose how a matrix is orthogonalized: dtype, method and products. `explain` gives the reasons.

*Dtype.* bf16 is the default on accelerators. A CPU without bf16 instructions, or a build of torch without the kernels,
runs bf16 hundreds of times slower than fp32, so bf16 on a CPU requires both. Polynomials that use their whole interval
diverge in bf16 and get a wider dtype. Derivatives are meaningless in bf16 and get at least fp32. On CUDA, fp16 is as
fast as bf16 and rounds to three more bits. It is taken for shapes where it allows fewer stages than bf16, unless the
elements of a matrix may be too small for fp16 (`LARGEST_IN_FP16`). The matrix and the result are still rounded to bf16,
so that ranks send two bytes for each element, whatever the shape.

*Method.* The standard iteration multiplies by the long side twice in each step. The Gram form multiplies by it twice in
each stage (several steps on one Gram matrix) and takes more small products (`muonfx.polar.stages`). The method with
fewer multiply-adds is chosen; a symmetric product counts as its share of a full product, and a pass over a small matrix
as multiply-adds of the same time. The number of steps in a stage depends on the dtype (`muonfx.polar.stability`): for
any finite matrix, rounding keeps singular values near their band (the interval of exact arithmetic).

*Products.* On a CPU, only half of each large symmetric product is computed, by blocks, and the other half is mirrored.
On GPUs of compute capability 9 and 10, quack-kernels does the same where it is installed and passes a self-test at
first use (`muonfx.polar.quack`).

The choice depends on the shape of one matrix, the dtypes, the device and whether derivatives are taken. It depends on
neither batch size, values nor time, so the same matrix always gets the same result.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from muonfx.internal.display import Report, Shown, Table, format_bytes, format_shape
from muonfx.internal.tracing import called_once, fixed
from muonfx.polar import quack
from muonfx.polar.coefficients import CoefficientsLike
from muonfx.polar.hardware import cpu_has_amx, cpu_has_bf16, cuda_capability
from muonfx.polar.polynomials import Polynomials, polynomials
from muonfx.polar.products import Products, ProductsLike
from muonfx.polar.rates import BUILT_IN, UNKNOWN, Rates
from muonfx.polar.stability import TOLERANCE, growth_by_rounding, stable_restarts
from muonfx.polar.stages import GramStage, restarts_of, staged, standard
from muonfx.tree.elementwise import wide_dtype

SUPPORTED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that `orthogonalize` accepts for inputs and for matrix products."""

DTypeLike = torch.dtype | Literal["auto"]
"""The dtype of matrix products; "auto" for the choice of `compute_dtype`."""

MethodLike = Literal["auto", "standard", "gram"] | tuple[int, ...]
"""The form of the iteration: "standard", "gram" (several steps on one Gram matrix), or "auto" to choose one.

A tuple is the Gram form with this number of steps on each Gram matrix: (2, 3) for two steps on the first, and three on
the second. It is taken as given; if rounding may push singular values out of their band, a warning says so."""

# The rounding errors of the Gram form fall with the side. From 256 on they were measured at no more than 1.5 times the
# errors of the standard iteration.
SMALLEST_GRAM = 256
"""Least short side for which "auto" takes several steps on one Gram matrix; for smaller sides that rounds more."""

LARGEST_IN_FP16 = 1 << 28
"""Largest number of elements of a matrix for which "auto" takes fp16.

A matrix of 2^28 elements and norm 1 has elements of 2^-14 on average (root mean square): the smallest normal number of
fp16. Smaller elements are rounded to multiples of 2^-24, so their errors are at most 2^-25, and 2^-11 in all (Frobenius
norm): one unit roundoff, which `muonfx.polar.stability` adds to the norm of every matrix."""

_BLOCKS_AT_ONCE = 1 << 20
"""Largest number of elements in all Gram matrices of a batch, if symmetric products are computed by blocks."""


class _Reasons(NamedTuple):
    """The reasons for the dtype, the method and the products of a `Plan`, as text."""

    dtype: str
    method: str
    products: str


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """The dtype, method and products that `orthogonalize` uses for one shape. Prints as a table with the reasons.

    >>> import muonfx as mfx
    >>> mfx.polar.explain((512, 2048), dtype=torch.float32).method
    'gram'
    """

    shape: tuple[int, int]
    """The short side and the long side of the matrices."""
    dtype: torch.dtype
    """The dtype of the matrix products."""
    method: Literal["standard", "gram"]
    """The form of the iteration: one step on each Gram matrix `X X^T` ("standard"), or several ("gram")."""
    stages: tuple[GramStage, ...]
    """The steps of the iteration, grouped by the Gram matrix that they use; empty for coefficients in a tensor."""
    products: Products
    """How `X X^T` is computed: in full ("batched"), or half of it by blocks or quack and the other half mirrored."""
    small_products: Products
    """How products of Gram matrices are computed, with the same choices as for `products`."""
    reasons: _Reasons
    """The reasons for the dtype, the method and the products, as text."""
    bound: float | None = None
    """A bound of the largest singular value, divided by its bound in exact arithmetic; None for coefficients in a
    tensor. "auto" and "gram" accept up to 1.125."""
    rounded_to: torch.dtype | None = None
    """The dtype to which a matrix and its result are rounded, if it is not `dtype`: bf16 where "auto" takes fp16."""
    rates: Rates = UNKNOWN
    """The speed of the device at these products, by which they were chosen."""

    @functools.cached_property
    def load(self) -> float:
        """The estimated time for one matrix, in operations: the number that full matrix products do in this time.

        A multiply-add counts as two operations. The count of operations alone would be too low: a product that computes
        one half of a symmetric matrix takes more than half of the time, and passes over memory take time too.
        """
        products = _ChosenProducts(self.products, self.small_products, self.reasons.products)
        multiply_adds = _cost(self.stages, *self.shape, self.rates, products)
        return 2 * multiply_adds

    @property
    def at_once(self) -> int | None:
        """The maximal number of matrices in one batch; None for no limit.

        There is a limit only if `products` is "blocks", so that the Gram matrices of a batch fit the CPU's cache.
        """
        if self.products != "blocks":
            return None
        return max(1, _BLOCKS_AT_ONCE // self.shape[0] ** 2)

    @property
    def scratch_bytes(self) -> int:
        """The bytes of the temporary tensors for one matrix: two tensors of its size, and 3 to 8 Gram matrices."""
        n, m = self.shape
        longest = max((len(stage.steps) for stage in self.stages), default=1)
        # Buffers of `products.Buffered`, and an identity.
        gram_matrices = {1: 3, 2: 6}.get(longest, 8)
        return (2 * n * m + gram_matrices * n * n) * self.dtype.itemsize

    def report(self) -> Report:
        """Return a table with the choices of dtype, method and products, their reasons, rounding and memory."""
        # A row for each choice: what was chosen, and why.
        rows = [
            ("dtype", str(self.dtype).removeprefix("torch."), self.reasons.dtype),
            ("method", self.method, self.reasons.method),
            ("products", self.products, self.reasons.products),
        ]
        if self.bound is not None:
            accepted = f"bound of singular values, over that of exact arithmetic; accepted up to {TOLERANCE}"
            rows.append(("rounding", f"{self.bound:.4f}", accepted))
        scratch = format_bytes(self.scratch_bytes)
        rows.append(
            (
                "scratch",
                scratch,
                "temporary tensors of one matrix; a batch takes at most max_scratch_bytes",
            )
        )
        return Report((Table(("choice", "taken", "reason"), rows, title=format_shape(self.shape)),))


def explain(
    shape: tuple[int, int],
    device: torch.device | str = "cpu",
    *,
    held: torch.dtype = torch.float32,
    coefficients: CoefficientsLike | Tensor = "polar_express_5",
    steps: int | None = None,
    method: MethodLike = "auto",
    dtype: DTypeLike = "auto",
    products: ProductsLike = "auto",
) -> Plan:
    """Return the dtype, method and products that `orthogonalize` uses for a matrix of this shape, with reasons.

    Args:
        shape: the numbers of rows and columns.
        device: the device of the matrix.
        held: the dtype of the matrix itself, which is cast to the dtype of the products.
        coefficients: as in `orthogonalize`.
        steps: as in `orthogonalize`.
        method: as in `orthogonalize`.
        dtype: as in `orthogonalize`.
        products: as in `orthogonalize`.

    Raises:
        TypeError: ``shape`` is not a pair of ints.
        ValueError, TypeError, RuntimeError: as in `orthogonalize`.

    >>> print(explain((768, 3072), dtype=torch.float32))
    768 x 3072
    choice    taken      reason
    dtype     float32    as given
    method    gram       ... multiply-adds in stages of 2 + 1 + 2 steps, ... in the standard form
    products  blocks     skipping half of a symmetric product pays from 6.0e+07 multiply-adds on (...)
    rounding  1.0000     bound of singular values, over that of exact arithmetic; accepted up to 1.125
    scratch   31.50 MiB  temporary tensors of one matrix; a batch takes at most max_scratch_bytes
    """
    if not isinstance(shape, tuple | list) or list(map(type, shape)) != [int, int]:
        raise TypeError(
            f"shape must be (rows, columns), two ints such as tuple(x.shape), found {shape!r}"
        )
    short, long = sorted(shape)
    request = Request(
        short, long, torch.device(device), polynomials(coefficients, steps), method, products
    )
    return plan(request, held, dtype)


class Request(NamedTuple):
    """The inputs of a plan besides dtypes: the sides of the matrix, its device and the settings of the caller."""

    short: int
    long: int
    device: torch.device
    coefficients: Polynomials
    method: MethodLike = "auto"
    products: ProductsLike = "auto"
    portable: bool = False
    """True for a plan that is equal on all machines: installed libraries and CPU features do not count."""


def plan(
    request: Request, held: torch.dtype, dtype: DTypeLike = "auto", *, differentiated: bool = False
) -> Plan:
    """Choose how matrices of one shape are orthogonalized: return a `Plan` of the dtype, method and products.

    Args:
        request: the sides and the device of the matrices, the polynomials, and the settings `method` and `products`.
        held: the dtype of the matrices themselves.
        dtype: as in `orthogonalize`.
        differentiated: whether derivatives are taken; the dtype "auto" is then at least fp32.
    """
    compute, why_dtype = _choose_dtype(request, held, dtype, differentiated)
    check_method(request.method, request.coefficients)
    chosen = plan_in(compute, request, why_dtype)
    if dtype == "auto" and compute == torch.bfloat16 and _has_fast_fp16(request.device):
        chosen = in_fp16_if_better(chosen, request)
    # Stages that the caller has given are kept, also if this dtype rounds too much for them.
    if isinstance(request.method, tuple) and chosen.bound is not None and chosen.bound > TOLERANCE:
        _warn_of_stages(chosen.stages, chosen.dtype, chosen.bound)
    return chosen


def _choose_dtype(
    request: Request, held: torch.dtype, dtype: DTypeLike, differentiated: bool
) -> tuple[torch.dtype, str]:
    """Return the dtype of the products, and the reason for it as text. The arguments are as in `plan`.

    It is the fastest dtype on the device, or a wider one for derivatives or for polynomials that would diverge in it. A
    dtype given by the caller is taken as it is.
    """
    fastest_dtype = compute_dtype(held, request.device, dtype)
    if differentiated and dtype == "auto":
        fastest_dtype = wide_dtype(fastest_dtype)
    compute = stable_dtype(fastest_dtype, request.coefficients, dtype)
    return compute, _why_dtype(
        held, request.device, dtype, compute != fastest_dtype, differentiated
    )


def in_fp16_if_better(in_bf16: Plan, request: Request) -> Plan:
    """Return a plan with products in fp16 if it is better than the given one in bf16, else the given one.

    fp16 rounds to three more bits, so more steps can share one Gram matrix (a stage), which saves products.
    """
    # Elements of a matrix of norm 1 may be too small for fp16.
    if request.short * request.long > LARGEST_IN_FP16:
        return in_bf16
    in_fp16 = plan_in(torch.float16, request)
    if not _is_better_in_fp16(in_fp16, in_bf16):
        return in_bf16
    why_dtype = (
        f"{len(in_fp16.stages)} stages, for which bf16 rounds too much; rounded to bf16 before and after: "
        f"{in_bf16.reasons.dtype}"
    )
    reasons = _Reasons(why_dtype, in_fp16.reasons.method, in_fp16.reasons.products)
    return replace(in_fp16, rounded_to=torch.bfloat16, reasons=reasons)


def check_method(method: MethodLike, coefficients: Polynomials) -> None:
    """Raise ValueError if the argument `method` of `orthogonalize` is invalid, or does not fit the coefficients.

    A tuple such as ``(2, 3)`` has the number of steps on each Gram matrix. It fits if it adds up to all steps.
    """
    if not isinstance(method, tuple) and method not in ("auto", "standard", "gram"):
        raise ValueError(
            f"method: found {method!r}, expected 'auto', 'standard' or 'gram', or the steps of each stage: (2, 3)"
        )
    if coefficients.table is not None and method not in ("auto", "standard"):
        raise ValueError(
            f"method: found {method!r} with a tensor of coefficients, which only the standard form takes"
        )
    if isinstance(method, tuple):
        _check_lengths(method, len(coefficients.steps))


def _check_lengths(lengths: tuple[int, ...], steps: int) -> None:
    """Raise ValueError unless the numbers of steps on each Gram matrix, such as ``(2, 3)``, add up to all steps."""
    are_counts = all(type(length) is int and length > 0 for length in lengths)
    if not are_counts or sum(lengths) != steps:
        raise ValueError(
            f"method: found {lengths!r}, expected numbers of steps of at least 1 that add up to {steps}, such as "
            "(2, 3) for 5: as many as the coefficients have or as steps= gives"
        )


def plan_in(compute: torch.dtype, request: Request, why_dtype: str = "") -> Plan:
    """Choose the method and the products for matrix products in the dtype `compute`; return them as a `Plan`.

    `why_dtype` is the reason for this dtype, as text.
    """
    coefficients = request.coefficients
    # How fast the device is at these products.
    rates = _rates(request.device, compute, request.portable)
    products = _choose_products(compute, rates, request)
    method, stages, why_method = _choose_method(compute, rates, request, products)
    # The bound is of singular values that rounding may produce. It is not known for coefficients in a tensor.
    bound = None
    if coefficients.table is None:
        bound = growth_by_rounding(
            coefficients.steps, restarts_of(stages), coefficients.safety, compute
        )
    shape = (request.short, request.long)
    reasons = _Reasons(why_dtype, why_method, products.why)
    return Plan(
        shape, compute, method, stages, products.large, products.small, reasons, bound, rates=rates
    )


@called_once  # hardware queries cannot be traced
def _has_fast_fp16(device: torch.device) -> bool:
    """Return True if products in fp16 are as fast as in bf16: on CUDA devices from compute capability 8.0 on."""
    return device.type == "cuda" and cuda_capability(device.index)[0] >= 8


def _is_better_in_fp16(in_fp16: Plan, in_bf16: Plan) -> bool:
    """Return True if a plan with products in fp16 is better than one in bf16: faster, or equally fast and more exact.

    A stage is some steps that share one Gram matrix. fp16 rounds less than bf16, so more steps can share one.
    """
    # A tensor of coefficients: its rounding is not bounded.
    if in_fp16.bound is None or in_bf16.bound is None:
        return False
    # A bound above the tolerance means that rounding may push singular values too far from 1.
    fp16_stages = len(in_fp16.stages)
    bf16_stages = len(in_bf16.stages)
    if fp16_stages == bf16_stages:  # they take the same time
        return in_bf16.bound > TOLERANCE and in_fp16.bound < in_bf16.bound
    if fp16_stages > bf16_stages or in_fp16.bound > TOLERANCE:
        return False
    return in_fp16.load < in_bf16.load  # the estimated times


@called_once  # a tracer calls this, and the warning is given while it traces
def _warn_of_stages(stages: tuple[GramStage, ...], compute: torch.dtype, bound: float) -> None:
    """Warn that stages that the caller has chosen, such as ``method=(2, 3)``, may diverge in a dtype."""
    warnings.warn(
        f"orthogonalize: in stages of {_lengths(stages)} steps, rounding to {compute} may make singular values "
        f"{bound:.3g} times as large as in exact arithmetic, above the accepted {TOLERANCE}: give shorter stages, a "
        "wider dtype, or method='gram', which chooses stages",
        RuntimeWarning,
        stacklevel=2,
    )


def _lengths(stages: Sequence[GramStage]) -> str:
    """Return the numbers of steps of stages as text, such as "2 + 1 + 2"."""
    return " + ".join([str(len(stage.steps)) for stage in stages])


def compute_dtype(
    dtype: torch.dtype,
    device: torch.device,
    requested: DTypeLike = "auto",
    *,
    coefficients: CoefficientsLike | Tensor | None = None,
    steps: int | None = None,
) -> torch.dtype:
    """Return the dtype in which `orthogonalize` computes matrix products for inputs of `dtype` on `device`.

    A dtype given as `requested` is returned unchanged. For "auto", float64 inputs use float64. Other inputs use bf16 on
    CUDA from compute capability 8.0 on, bf16 on a CPU with AMX or AVX512-BF16 if torch was built with oneDNN, and fp32
    otherwise. If rounding in this dtype would make the given `coefficients` diverge, a wider dtype is returned.
    `orthogonalize` also uses at least fp32 if derivatives are taken.

    "auto" may differ between machines and builds of torch. Request a dtype for runs that must agree bit for bit.

    Raises:
        ValueError: `requested` is a string other than "auto".
        TypeError: `requested` is a dtype that is not in `SUPPORTED`.

    >>> compute_dtype(torch.float64, torch.device("cpu"))
    torch.float64
    >>> compute_dtype(torch.float32, torch.device("cpu"), torch.bfloat16)
    torch.bfloat16
    """
    if isinstance(requested, str):
        if requested != "auto":
            raise ValueError(
                f"dtype: found {requested!r}, expected 'auto' or a torch.dtype such as torch.bfloat16"
            )
        fastest = torch.float64
        if dtype != torch.float64:
            fastest = _fastest(device.type, device.index)
        if coefficients is None:
            return fastest
        return stable_dtype(fastest, polynomials(coefficients, steps))
    if requested not in SUPPORTED:
        raise TypeError(
            f"dtype: found {requested!r}, expected 'auto' or one of {', '.join(map(str, SUPPORTED))}"
        )
    return requested


@called_once  # a tracer calls this once and keeps the answer
def _fastest(kind: str, index: int | None) -> torch.dtype:
    """Return the fastest dtype of products on a device, bf16 or fp32, for inputs of at most fp32."""
    has_bf16 = (kind == "cpu" and cpu_has_bf16()) or (
        kind == "cuda" and cuda_capability(index)[0] >= 8
    )
    return torch.bfloat16 if has_bf16 else torch.float32


def stable_dtype(
    compute: torch.dtype, coefficients: Polynomials, requested: DTypeLike = "auto"
) -> torch.dtype:
    """Return a dtype in which the iteration converges: `compute` itself, or fp32 or fp64 if `compute` rounds too much.

    A dtype that the user requested is kept, with a warning.
    """
    # Coefficients in a tensor are not checked.
    if coefficients.table is not None or _is_stable(coefficients, compute):
        return compute
    if requested != "auto":
        _warn_of_rounding(compute)
        return compute
    if _is_stable(coefficients, torch.float32):
        return torch.float32
    return torch.float64


def _is_stable(coefficients: Polynomials, compute: torch.dtype) -> bool:
    """Return True if rounding keeps singular values near their bound, with a new Gram matrix for each step."""
    after_every_step = tuple(range(1, len(coefficients.steps)))
    return (
        growth_by_rounding(coefficients.steps, after_every_step, coefficients.safety, compute)
        <= TOLERANCE
    )


@called_once  # a tracer calls this, and the warning is given while it traces
def _warn_of_rounding(compute: torch.dtype) -> None:
    """Warn that the coefficients may diverge in a dtype."""
    warnings.warn(
        f"orthogonalize: in {compute} these coefficients may diverge: rounding can push singular values out of the "
        "interval that the polynomials were fitted for, where they grow without bound; use with_safety(set, 1.01), or "
        "dtype='auto'",
        RuntimeWarning,
        stacklevel=2,
    )


@called_once  # hardware queries cannot be traced
def _why_dtype(
    held: torch.dtype,
    device: torch.device,
    requested: DTypeLike,
    widened: bool,
    differentiated: bool,
) -> str:
    """Return why matrix products have their dtype, as text for `explain`: the first reason that applies.

    >>> _why_dtype(torch.float64, torch.device("cpu"), "auto", widened=False, differentiated=False)
    'float64 stays float64'

    Args:
        held: the dtype of the matrix.
        device: the device of the matrix.
        requested: the setting `dtype` of the caller.
        widened: True if the polynomials would diverge in the fastest dtype, so a wider one was chosen.
        differentiated: True if derivatives are taken.
    """
    if isinstance(requested, torch.dtype):
        return "as given"
    if widened:
        return "rounding in a narrower dtype would make these polynomials diverge; `with_safety` prevents that"
    if held == torch.float64:
        return "float64 stays float64"
    if differentiated:
        return "at least fp32 for derivatives"
    if device.type == "cpu":
        has = "has" if cpu_has_bf16() else "lacks"
        return f"bf16 if the CPU has AMX or AVX512-BF16 and torch has oneDNN; this one {has} bf16 products"
    if device.type == "cuda":
        major, minor = cuda_capability(device.index)
        assumed = (
            "" if torch.cuda.is_available() else ", assumed because torch finds no CUDA device here"
        )
        return f"compute capability {major}.{minor}{assumed}; bf16 from 8.0 on"
    return f"fp32 on devices of type {device.type}"


class _ChosenProducts(NamedTuple):
    """How symmetric products are computed: "batched" in full, "blocks" or "quack" by half and a mirrored copy."""

    large: Products
    """How `X X^T` is computed, the product of the whole matrix `X`."""
    small: Products
    """How products of the small matrices `X X^T` are computed."""
    why: str
    """The reason, as text."""


def _choose_products(compute: torch.dtype, rates: Rates, request: Request) -> _ChosenProducts:
    """Choose how symmetric products are computed: in full, or one half, which is mirrored.

    A choice of the caller is taken as it is. Else quack-kernels is used where it runs. Everywhere else, half of a
    product is skipped if the product is large enough for the device.
    """
    requested = request.products
    if requested not in ("auto", "batched", "blocks"):
        raise ValueError(f"products: found {requested!r}, expected 'auto', 'batched' or 'blocks'")
    if requested != "auto":
        return _ChosenProducts(requested, requested, "as given")
    short, long = request.short, request.long
    if not request.portable and quack.is_capable(request.device):
        refusal = quack.refusal(short, long, compute, request.device)
        if refusal is None:
            return _ChosenProducts(
                "quack", "quack", f"quack-kernels passed its self-test on {request.device}"
            )
        return _ChosenProducts("batched", "batched", refusal)
    threshold = rates.halving_threshold  # the multiply-adds of a large enough product
    multiply_adds_of_large = short * short * long
    multiply_adds_of_small = short**3
    large: Products = "blocks" if multiply_adds_of_large >= threshold else "batched"
    small: Products = "blocks" if multiply_adds_of_small >= threshold else "batched"
    why = f"skipping half of a symmetric product pays from {threshold:.1e} multiply-adds on ({rates.source})"
    return _ChosenProducts(large, small, why)


class _Method(NamedTuple):
    """The form of the iteration, its stages (steps with one Gram matrix each), and the reason for the form as text."""

    form: Literal["standard", "gram"]
    stages: tuple[GramStage, ...]
    why: str


def _choose_method(
    compute: torch.dtype, rates: Rates, request: Request, products: _ChosenProducts
) -> _Method:
    """Choose the form of the iteration, by the argument `method` of `orthogonalize`, such as "auto" or ``(2, 3)``.

    A stage is the steps that share one Gram matrix ``X X^T``. The standard form has one step in each stage, and so
    multiplies by the whole matrix in every step. The Gram form has several: the lengths ``(2, 3)`` are two steps on one
    Gram matrix, and three on the next.
    """
    coefficients = request.coefficients
    method = request.method
    if coefficients.table is not None:
        return _Method("standard", (), "a tensor of coefficients requires the standard form")
    if method == "standard":
        return _Method("standard", standard(coefficients.steps), "as given")
    if method == "auto":
        return _cheaper_method(compute, rates, request, products)
    # The Gram form. Restarts are the numbers of steps after which a new Gram matrix is computed.
    if method == "gram":
        restarts = _stable_restarts(compute, coefficients)
    else:  # the lengths of stages: (2, 1, 2) restarts after 2 and 3 steps
        lengths = [fixed(length) for length in method]
        restarts = tuple(itertools.accumulate(lengths[:-1]))
    return _Method("gram", _gram_stages(restarts, request), "as given")


def _cheaper_method(
    compute: torch.dtype, rates: Rates, request: Request, products: _ChosenProducts
) -> _Method:
    """Return the Gram form if rounding permits it and it costs less than the standard form, else the standard form.

    The Gram form takes several steps on one Gram matrix `X X^T` (a stage), and the standard form one.
    """
    standard_stages = standard(request.coefficients.steps)
    why_not_gram = _why_not_gram(compute, request)
    if why_not_gram:
        return _Method("standard", standard_stages, why_not_gram)
    gram_stages = _gram_stages(_stable_restarts(compute, request.coefficients), request)
    short, long = fixed(request.short), fixed(request.long)
    gram_cost = _cost(gram_stages, short, long, rates, products)
    standard_cost = _cost(standard_stages, short, long, rates, products)
    why = (
        f"{gram_cost:.2e} multiply-adds in stages of {_lengths(gram_stages)} steps, {standard_cost:.2e} in the "
        "standard form"
    )
    if gram_cost < standard_cost:
        return _Method("gram", gram_stages, why)
    return _Method("standard", standard_stages, why)


def _why_not_gram(compute: torch.dtype, request: Request) -> str:
    """Return why "auto" must not take several steps on one Gram matrix `X X^T` (the Gram form), as text; "" if it may.

    >>> request = Request(64, 128, torch.device("cpu"), polynomials("polar_express_5"))
    >>> _why_not_gram(torch.float32, request)
    'the Gram form rounds more below a side of 256'
    """
    coefficients = request.coefficients
    if request.short < SMALLEST_GRAM:
        return f"the Gram form rounds more below a side of {SMALLEST_GRAM}"
    if coefficients.row_scaling:
        return "row scaling computes the first Gram matrix anyway, and its eigenvalues are unknown"
    number_of_stages = len(_stable_restarts(compute, coefficients)) + 1
    # One step in each stage, which is the standard form.
    if number_of_stages == len(coefficients.steps):
        return f"{compute} rounds too much for two steps on one Gram matrix"
    return ""


def _stable_restarts(compute: torch.dtype, coefficients: Polynomials) -> tuple[int, ...]:
    """Return the numbers of steps after which the Gram form needs a new Gram matrix, for products in a dtype."""
    return stable_restarts(coefficients.steps, coefficients.restarts, coefficients.safety, compute)


def _gram_stages(restarts: tuple[int, ...], request: Request) -> tuple[GramStage, ...]:
    """Return the stages of the Gram form, with a new Gram matrix after the numbers of steps in `restarts`.

    The restarts ``(2, 3)`` divide five steps into stages of 2, 1 and 2 steps.
    """
    coefficients = request.coefficients
    short = max(fixed(request.short), 1)  # the centers of stages are constants of a traced graph
    long = max(fixed(request.long), 1)
    # The first X is divided by `safety` times its norm. So the sum of the `short` eigenvalues of X X^T, which is the
    # squared norm of X, is 1 / safety^2. Row scaling gives another sum, which is unknown.
    mean = None
    if not coefficients.row_scaling:
        mean = 1 / (short * coefficients.safety**2)
    return staged(coefficients.steps, restarts, mean, long / short)


def _cost(
    stages: Sequence[GramStage], n: int, m: int, rates: Rates, products: _ChosenProducts
) -> float:
    """Return the estimated time to orthogonalize an `n x m` matrix, in multiply-adds.

    A stage is the steps that share one Gram matrix `R = X X^T`. One stage of one step takes R, its square and a product
    with X, so `2 * n * n * m + n**3` multiply-adds if all are computed in full:

    >>> one_step = standard([(3.0, -3.2, 1.2)])
    >>> _cost(one_step, 100, 1000, UNKNOWN, _ChosenProducts("batched", "batched", why="as given"))
    21000000.0

    By `products`, one half of R or of its square may be skipped, which takes the part `rates.share` of the full time.
    """
    large_share = _share(products.large, rates)
    small_share = _share(products.small, rates)
    total = 0.0
    for stage in stages:
        # 1. Products with the n x m matrix X: R, and at the end of the stage Q X, which has no half to skip.
        long_products = (1 + large_share) * n * n * m
        # 2. Products of n x n matrices, as in `muonfx.polar.iteration.composed`. Each step takes R^2 for its polynomial
        # G = a I + b R + c R^2, unless c is 0. Each but the first also takes G R and G (G R), the new R, and G Q.
        squares = sum(1 for _, _, c in stage.steps if c != 0)
        further_products = 3 * (len(stage.steps) - 1)
        small_products = n**3 * (small_share * squares + further_products)
        # 3. Sums of n x n matrices, limited by the speed of memory.
        passes = further_products * rates.pass_cost * n * n
        total += long_products + small_products + passes
    return total


def _share(products: str, rates: Rates) -> float:
    """Return the time of a symmetric product, as a part of the time of a full one."""
    if products == "batched":  # computed in full
        return 1.0
    return rates.share


@called_once  # a tracer calls this once and keeps the answer
def _rates(device: torch.device, compute: torch.dtype, portable: bool) -> Rates:
    """Return how fast a device is at products in a dtype, from a table of measurements; `UNKNOWN` if it has none.

    CPUs differ in bf16 products: with AMX instructions, with AVX512-BF16, or emulated ("avx2"). If `portable`, the
    result must be the same on all machines, and does not depend on this.
    """
    kind_of_device = device.type
    if kind_of_device == "cpu" and compute == torch.bfloat16 and not portable:
        if cpu_has_amx():
            kind_of_device = "amx"
        elif not cpu_has_bf16():
            kind_of_device = "avx2"
    return BUILT_IN.get((kind_of_device, compute), UNKNOWN)
