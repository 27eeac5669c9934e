"""Polynomial coefficients of the Newton-Schulz iteration: the type `Coefficients`, and the known sets in `PRESETS`.

The matrix is first normalized to singular values in [0, 1]. Step `i` then maps each singular value `s` to
`a_i s + b_i s^3 + c_i s^5`. `muonfx.polar.band` returns the interval of the results.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch

from muonfx.internal.tracing import fixed

Step = tuple[float, float, float]


@dataclass(frozen=True)
class Coefficients:
    """The polynomials `a s + b s^3 + c s^5` of a Newton-Schulz iteration, one for each step.

    Args:
        name: the name of the coefficients, used in errors and in `PRESETS`.
        steps: `(a, b, c)` for each step; `(a, b)` means `c = 0`, which saves one matrix product per step.
        source: the paper or project that published the numbers.
        norm_safety: the input is divided by `norm_safety` times its Frobenius norm; above 1, a margin for rounding.
        row_scaling: True to first scale each row by the inverse square root of its row sum of `|X X^T|`
            (almost-orthogonal layers, arXiv 2208.03160). The spectral norm is then at most 1; `norm_safety` is ignored.
        restarts: for `method="gram"`, the numbers of steps after which the Gram matrix `X X^T` is recomputed from `X`;
            the steps between share one Gram matrix. None: after 2, 3, 5, 6, ... steps. For further steps, the last
            distance is repeated. Restarts are added if rounding requires them: in bf16, after nearly every step.

    Raises:
        ValueError: there are no steps, a step is not 2 or 3 finite numbers, `norm_safety` is outside [0.001, 1000], or
            `restarts` are not ascending positive ints.
        TypeError: a coefficient is not a number.

    >>> Coefficients("halley-like", ((1.5, -0.5),)).steps
    ((1.5, -0.5, 0.0),)
    """

    name: str
    steps: tuple[Step, ...]
    source: str = ""
    norm_safety: float = 1.0
    row_scaling: bool = False
    restarts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the fields, and store steps and restarts as tuples: ``[(1.5, -0.5)]`` as ``((1.5, -0.5, 0.0),)``."""
        # The class is frozen, so fields cannot be assigned in the usual way.
        object.__setattr__(self, "steps", _checked_steps(self.steps, self.name))
        if not 1e-3 <= self.norm_safety <= 1e3:
            raise ValueError(
                f"coefficients {self.name!r}: norm_safety is {self.norm_safety!r}, expected a number from 0.001 to 1000"
            )
        if self.restarts is not None:
            if not _are_ascending_counts(self.restarts):
                raise ValueError(
                    f"coefficients {self.name!r}: restarts are {self.restarts!r}, expected ascending numbers of steps"
                )
            object.__setattr__(self, "restarts", tuple(self.restarts))


CoefficientSet = Literal[
    "keller",
    "quintic",
    "polar_express",
    "polar_express_5",
    "polar_express_4",
    "cans",
    "aol",
    "deepseek_v4",
    "cubic",
]
"""The names in `PRESETS`, as a type for annotations."""

CoefficientsLike = CoefficientSet | Coefficients | Sequence[Sequence[float]]
"""Accepted forms of coefficients: a name in `PRESETS`, a `Coefficients`, or a sequence with `(a, b[, c])` per step."""


def _checked_steps(steps: Sequence[Sequence[float]], name: str) -> tuple[Step, ...]:
    """Return steps as triples of floats. Raise if there is none, or one is invalid. `name` is for errors."""
    if len(steps) == 0:
        raise ValueError(f"coefficients {name!r}: no steps; give at least one (a, b, c)")
    return tuple(_checked_step(step, i, name) for i, step in enumerate(steps))


def _are_ascending_counts(numbers: Sequence[object]) -> bool:
    """Return True for ascending ints of at least 1, such as ``(1, 3)``."""
    previous = 0
    for number in numbers:
        if type(number) is not int or number <= previous:
            return False
        previous = number
    return True


def _checked_step(step: Sequence[float], i: int, name: str) -> Step:
    """Return the numbers of one step as three floats: ``(1.5, -0.5)`` becomes ``(1.5, -0.5, 0.0)``.

    Raise if the step is no sequence of two or three finite numbers. `i` is the index of the step, for errors.
    """
    # A common mistake is one flat list of numbers, such as (3.4, -4.8). And `float` would accept texts and tensors.
    is_sequence = isinstance(step, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_sequence or any(isinstance(number, str | torch.Tensor) for number in step):
        raise TypeError(_wrong_step(step, i, name))
    if len(step) not in (2, 3) or not all(math.isfinite(fixed(number)) for number in step):
        raise ValueError(_wrong_step(step, i, name))
    c = step[2] if len(step) == 3 else 0.0
    return float(step[0]), float(step[1]), float(c)


def _wrong_step(step: object, i: int, name: str) -> str:
    """Return the error text for a step that is no sequence of two or three finite numbers."""
    return (
        f"coefficients {name!r}, step {i}: found {step!r}, expected finite Python numbers (a, b) or (a, b, c) for each "
        "step; to differentiate or map over coefficients, pass them all as one tensor of shape (steps, 3)"
    )


def coefficients(value: CoefficientsLike) -> Coefficients:
    """Convert a name in `PRESETS`, or a sequence with `(a, b[, c])` per step, to `Coefficients`.

    A `Coefficients` is returned unchanged.

    Raises:
        ValueError: the name is unknown (the message lists all names), or the numbers are malformed.
        TypeError: `value` has another type.

    >>> len(coefficients("keller").steps)
    5
    >>> coefficients([(1.5, -0.5)]).steps
    ((1.5, -0.5, 0.0),)
    """
    if isinstance(value, Coefficients):
        return value
    if isinstance(value, str):
        # `PRESETS` is not read: a compiler that has traced the writing to any dict refuses to read a mapping proxy.
        if value not in _SETS:
            raise ValueError(
                f"unknown coefficients {value!r}; known: {', '.join(PRESETS)}; or give a sequence of (a, b, c)"
            )
        return _SETS[value]
    if not isinstance(value, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"coefficients: found {type(value).__name__}, expected a name ({', '.join(PRESETS)}), a Coefficients "
            "or a sequence of (a, b, c)"
        )
    return Coefficients("explicit", tuple(value), "given by the caller")  # type: ignore[arg-type]


def with_safety(value: CoefficientsLike, safety: float) -> Coefficients:
    """Return coefficients that leave a margin for rounding errors: `(a/s, b/s^3, c/s^5)` in all steps but the last.

    With `s = safety`, each of these polynomials divides its input by `s`. Without the margin, rounding in low precision
    can push a singular value above the interval for which the next polynomial was fitted, where the polynomial grows
    fast (arXiv 2505.16932, section on finite precision).

    Args:
        value: a name in `PRESETS`, a `Coefficients` or a sequence of `(a, b[, c])`.
        safety: the divisor, such as 1.01.

    Raises:
        ValueError: `safety` is not finite and positive.

    >>> with_safety([(2.0, -1.0), (2.0, -1.0)], 2.0).steps
    ((1.0, -0.125, 0.0), (2.0, -1.0, 0.0))
    """
    base = coefficients(value)
    if not 0 < safety < math.inf:
        raise ValueError(
            f"with_safety: safety is {safety!r}, expected a finite number above 0, such as 1.01"
        )
    *all_but_last, last = base.steps
    divided = [with_divided_input(step, safety) for step in all_but_last]
    return replace(base, steps=(*divided, last))


def with_divided_input(step: Step, divisor: float) -> Step:
    """Return the polynomial of `s / divisor`, for the polynomial `a s + b s^3 + c s^5` of `s`."""
    a, b, c = step
    return a / divisor, b / divisor**3, c / divisor**5


def schedule(value: Coefficients, steps: int | None = None) -> tuple[Step, ...]:
    """Return a tuple with the polynomial `(a, b, c)` of each Newton-Schulz step. None: one step for each polynomial.

    If there are more steps than polynomials, the last polynomial is repeated.
    """
    return tuple(value.steps[i] for i in step_indices(len(value.steps), steps))


def step_indices(length: int, steps: int | None) -> list[int]:
    """Return the index of the polynomial for each step; from step `length` on, the last polynomial is repeated."""
    if steps is None:
        return list(range(length))
    require_steps(steps)
    return [min(i, length - 1) for i in range(steps)]


def require_steps(steps: int) -> None:
    """Raise an error unless a number of steps is an int of at least 1."""
    if not isinstance(steps, int) or isinstance(steps, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"steps: found {steps!r}, expected an int of at least 1")
    if steps < 1:
        raise ValueError(f"steps: found {steps}, expected at least 1")


_KELLER: Step = (3.4445, -4.7750, 2.0315)

POLAR_EXPRESS_RAW = Coefficients(
    "polar_express_raw",
    (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
    "Polar Express, arXiv 2505.16932, lower bound 1e-3, before any safety factor",
)
"""The published Polar Express table without its safety factor (margin for rounding), for exact arithmetic only."""

CANS_RAW = Coefficients(
    "cans_raw",
    (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "CANS: Newton-Schulz accelerated by Chebyshev-type polynomials, arXiv 2506.10935",
)
"""The published CANS table, for exact arithmetic only: it maps 1.0005, which is 1 with a rounding error, to 1e14."""

_SETS: dict[str, Coefficients] = {
    known.name: known
    for known in (
        Coefficients(
            "keller",
            (_KELLER,) * 5,
            "Keller Jordan's Muon; also torch.optim.Muon and Moonlight",
            restarts=(2, 4),
        ),
        Coefficients(
            "quintic",
            (
                (4.0848, -6.8946, 2.9270),
                (3.9505, -6.3029, 2.6377),
                (3.7418, -5.5913, 2.3037),
                (2.8769, -3.1427, 1.2046),
                (2.8366, -3.0525, 1.2012),
            ),
            "You Jiacheng, for modded-nanogpt; optax calls it dion",
        ),
        replace(
            with_safety(POLAR_EXPRESS_RAW, 1.01),
            name="polar_express",
            source="Polar Express, arXiv 2505.16932, with its safety factor 1.01 on all but the last step",
        ),
        Coefficients(
            "polar_express_5",
            (
                (8.156554524902461, -22.48329292557795, 15.878769915207462),
                (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
            ),
            "Polar Express, arXiv 2505.16932, fitted for 5 steps with safety 2e-2; modded-nanogpt, Dion",
            norm_safety=1.02,
        ),
        Coefficients(
            "polar_express_4",
            (
                (8.137723867174653, -22.71370863518154, 16.325437555605063),
                (3.966694238491836, -2.836751630723559, 0.5224029000745853),
                (3.500323222317591, -2.570502106448555, 0.502553025036824),
                (2.53473791812954, -1.8720452097333415, 0.44099034325234854),
            ),
            "fit_coefficients(4, 0.003, safety=1.01), after Polar Express, arXiv 2505.16932",
            # With two steps in the last stage, the Gram form rounds up to 2.4 times as much.
            restarts=(1, 2, 3),
        ),
        replace(
            with_safety(CANS_RAW, 1.01),
            name="cans",
            source=CANS_RAW.source
            + "; our safety factor 1.01 on all but the last step, or bf16 diverges",
        ),
        Coefficients(
            "aol",
            (
                (4.6051, -9.6552, 5.6769),
                (4.7505, -6.0861, 2.1790),
                (2.7763, -2.3190, 0.5523),
                (2.4231, -2.2861, 0.8193),
            ),
            "Turbo-Muon; the row scaling is from almost-orthogonal layers, arXiv 2208.03160",
            row_scaling=True,
        ),
        Coefficients("deepseek_v4", (_KELLER,) * 8 + ((2.0, -1.5, 0.5),) * 2, "DeepSeek-V4"),
        Coefficients(
            "cubic",
            (
                (3.3657, -3.3421, 0.0),
                (2.5744, -1.4957, 0.0),
                (2.5369, -1.4313, 0.0),
                (2.4419, -1.2764, 0.0),
                (2.2230, -0.9631, 0.0),
            ),
            "arXiv 2606.00371, in the four decimals published there; one matrix product a step fewer",
        ),
    )
}

PRESETS: Mapping[str, Coefficients] = MappingProxyType(_SETS)
"""The built-in coefficients of Newton-Schulz iterations: a read-only mapping from name to `Coefficients`."""
