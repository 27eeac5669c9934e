"""`diagnose`: the size of each parameter's next update, and the singular values before and after orthogonalization."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import polar, tree
from muonfx.core import Transform, checks, transform
from muonfx.core.transform import within
from muonfx.internal.display import Report, Row, Shown, Table
from muonfx.optimizer import TransformOptimizer
from muonfx.polar.iteration import row_normalized
from muonfx.sharding.transform import Sharded
from muonfx.transforms import orthogonalize
from muonfx.transforms.matrices import split
from muonfx.tree import PyTree

_GOAL = 0.65  # below the band of every coefficient set: the lowest, of "keller", begins at 0.68
_MOST_STEPS = 30


class Spectrum(NamedTuple):
    """Singular values of one parameter before and after `orthogonalize`; of several matrices, the worst values."""

    minimum: float
    maximum: float
    """The least and the largest singular value after orthogonalization."""
    rms: float
    """The root mean square of all singular values after orthogonalization."""
    tail: float
    """The singular value of the momentum, divided by its Frobenius norm, that 90 % of them (``share``) reach."""
    steps: int
    """The number of Newton-Schulz steps of the transform."""
    steps_needed: int | None
    """The fewest steps that lift 90 % of the singular values (``share``) to 0.65 or more; None: 30 are too few."""


class ParameterDiagnosis(NamedTuple):
    """One row of a `Diagnosis`: the next update of one parameter."""

    name: str
    update_rms: float
    """Root mean square of the elements that will be added to the parameter."""
    weight_rms: float
    """Root mean square of the elements of the parameter."""
    update_per_rate: float | None
    """Root mean square of the update before the learning rate multiplies it; None if the chain has no rate."""
    spectrum: Spectrum | None
    """Singular values before and after `orthogonalize`; None if it does not update the parameter."""

    @property
    def role(self) -> str:
        """The name with "*" in place of numbers, such as "blocks.*.up.weight", which is the same for all layers."""
        return ".".join("*" if level.isdigit() else level for level in self.name.split("."))

    @property
    def update_per_weight(self) -> float:
        """`update_rms` divided by `weight_rms`; infinity for a weight of zeros."""
        return self.update_rms / self.weight_rms if self.weight_rms else math.inf


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The size and spectrum of each parameter's next update; `diagnose` returns it, and it prints as a table.

    A role is the set of parameters with one name in all layers, such as "blocks.*.up.weight". The table has a row for
    each role, with means of ratios and RMS, and the worst of other values; ``to_text(depth=0)`` shows only these. The
    attribute ``rows`` has a `ParameterDiagnosis` for each parameter that has a gradient.

    >>> import muonfx as mfx
    >>> tx, params = mfx.muon(2e-3), {"blocks.0.up": torch.eye(4)}
    >>> mfx.diagnose((tx, tx.init(params), params, params)).rows[0].role
    'blocks.*.up'
    """

    rows: tuple[ParameterDiagnosis, ...]
    share: float

    def metrics(self) -> dict[str, float]:
        """Return a flat dict for a logger, with keys such as "diagnose/blocks.0.up.weight/update_rms"."""
        found: dict[str, Any] = {}
        for row in self.rows:
            own = {key: getattr(row, key) for key in ("update_rms", "update_per_weight", "update_per_rate")}
            for key, value in {**own, **(row.spectrum._asdict() if row.spectrum else {})}.items():
                found[f"diagnose/{row.name}/{key}"] = value
        return {key: float(value) for key, value in found.items() if value is not None}

    def report(self) -> Report:
        """Return the table of the parameters' next updates, with lines that explain its columns."""
        roles: dict[str, list[ParameterDiagnosis]] = {}
        for row in self.rows:
            roles.setdefault(row.role, []).append(row)
        shown: list[Row] = []
        for role, rows in roles.items():
            own = tuple(Row(_cells(row.name, [row])) for row in rows)
            shown.append(Row(_cells(f"{role} ({len(rows)})", rows), own) if len(rows) > 1 else own[0])
        titles = ("parameter", "per rate", "per weight", "min", "max", "rms", "tail", "needed")
        legend = (
            "per rate, per weight: the update before the learning rate, and relative to the weight\n"
            "min, max, rms: singular values after orthogonalization\n"
            f"tail: {self.share:.0%} of the singular values of the momentum, divided by its norm, are at least this\n"
            f"needed: steps that lift this share to {_GOAL}, and the steps that are taken"
        )
        return Report((Table(titles, shown, right=range(1, len(titles))), legend))


def _cells(title: str, rows: Sequence[ParameterDiagnosis]) -> tuple[str, ...]:
    """Return the cells of a table row for one or more parameters."""
    rates = [row.update_per_rate for row in rows if row.update_per_rate is not None]
    values: list[float] = [fmean(rates) if rates else math.nan, fmean(row.update_per_weight for row in rows)]
    known = [row.spectrum for row in rows if row.spectrum is not None]
    most = ["-"] * 5
    if known:
        low, high, rms, tail, steps, needed = zip(*known, strict=True)
        values += [min(low), max(high), fmean(rms), min(tail)]
        most = [f"{f'>{_MOST_STEPS}' if None in needed else max(needed)} of {max(steps)}"]
    return (title, *("-" if math.isnan(value) else f"{value:.3g}" for value in values), *most)


def diagnose(
    what: TransformOptimizer | tuple[Transform, PyTree, PyTree, PyTree], *, share: float = 0.9, **extras: Any
) -> Diagnosis:
    """Measure the next update of each parameter: its size, its orthogonality, and the Newton-Schulz steps it needs.

    Call it after ``backward()`` and before ``step()``. It computes one update, which is dropped: parameters, gradients
    and state do not change. It needs memory for one more state, and computes all singular values in float64. Over
    ranks, all must call it together, and each gathers the whole model. The result prints as a table, and its method
    `Diagnosis.metrics` returns a dict for a logger.

    The iteration lifts large singular values of the momentum to 1 first, so small ones decide how many steps it needs.

    Args:
        what: an optimizer, or a tuple (transform, state, params, grads) of whole trees.
        share: the part of a momentum's singular values that the needed steps must lift to 0.65: a number in (0, 1].
        **extras: further named arguments of the update, such as ``value=loss``, as for ``optimizer.step``.

    Raises:
        TypeError: ``what`` has another type, or its transform is sharded without an optimizer.
        ValueError: no parameter has a gradient; ``share`` is outside (0, 1]; or `orthogonalize` did not run, because a
            wrapper such as `accumulate` runs it only at some calls.

    Example:
        >>> import muonfx as mfx
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        >>> optimizer = mfx.Muon(model, lr=1e-3, adamw_lr=4e-3)
        >>> model(torch.eye(8)).square().sum().backward()
        >>> [row.name for row in mfx.diagnose(optimizer).rows if row.spectrum is not None]
        ['0.weight', '1.weight']
    """
    if checks.positive("share", share) > 1:
        raise ValueError(f"share must be in (0, 1], found {share!r}")
    tx, state, params, grads = what.snapshot() if isinstance(what, TransformOptimizer) else _checked(what)
    if all(grad is None for grad in tree.leaves(grads)):
        raise ValueError("diagnose: found no gradient, expected at least one: call it after backward(), before step()")
    spectra: dict[str, Spectrum] = {}
    per_rate: dict[str, float] = {}
    ran: list[object] = []

    def measure(one: Transform, updates: PyTree, out: PyTree) -> None:
        after = dict(tree.named_leaves(out))
        ran.append(one.factory)
        for name, before in tree.named_leaves(updates):
            if before is not None and before.numel() and one.factory is orthogonalize:
                spectra[name] = _spectrum(one, name, before, after[name], share)
            elif before is not None and before.numel():
                per_rate[name] = _rms(before)

    params = tree.map(lambda leaf: leaf.detach(), params)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # creating the transform has given these warnings
        updates, _ = _watched(tx, measure).update(grads, state, params, **extras)
    if orthogonalize not in ran and any(one.factory is orthogonalize for one in within(tx)):
        why = "accumulate runs it only at the last micro-batch: call diagnose there, or pass boundary=True"
        raise ValueError(f"diagnose: orthogonalize did not run, expected it to run: {why}")
    weights = dict(tree.named_leaves(params))
    rows = [
        ParameterDiagnosis(name, _rms(u), _rms(weights[name]), per_rate.get(name), spectra.get(name))
        for name, u in tree.named_leaves(updates)
        if u is not None and u.numel()
    ]
    return Diagnosis(tuple(rows), share)


def _checked(what: Any) -> tuple[Transform, PyTree, PyTree, PyTree]:
    """Return the tuple that was passed to `diagnose`, or raise TypeError."""
    fits = isinstance(what, tuple) and len(what) == 4 and isinstance(what[0], Transform)
    if fits and not isinstance(what[0], Sharded):
        return what
    found = "a sharded transform" if fits else type(what).__name__
    raise TypeError(
        f"diagnose: found {found}, expected a muonfx.TransformOptimizer, which may be sharded, or a tuple (transform, "
        "state, params, grads) of whole trees"
    )


def _watched(tx: Transform, record: Callable[[Transform, PyTree, PyTree], None]) -> Transform:
    """Return a transform with the same updates, in which each orthogonalization and learning rate calls ``record``."""
    if tx.factory is not orthogonalize and (tx.children or tx.position != "learning_rate"):
        return tx.with_children(lambda part: _watched(part, record))

    @transform(name=f"muonfx.{tx.name}", locality=tx.locality, position=tx.position)
    def watched():
        def update(updates: PyTree, state: PyTree, params: PyTree = None, **extras: Any):
            out, state = tx.run(updates, state, params, **extras)
            record(tx, updates, out)
            return out, state

        return tx.functions.init, update

    return watched()


def _spectrum(tx: Transform, name: str, before: Tensor, after: Tensor, share: float) -> Spectrum:
    """Measure the matrices of one parameter before and after a transform ``tx``, an `orthogonalize`."""
    given, (pattern,) = tx.arguments["coefficients"], tx.arguments["view"].of([name])
    coefficients = polar.coefficients(given.tolist() if isinstance(given, Tensor) else given)
    spectra = [_singular_values(matrices, coefficients).cpu() for matrices in split(pattern, before, name)]
    tail = min(values[:, -math.ceil(share * values.shape[-1])].min().item() for values in spectra)

    def suffice(steps: int) -> bool:
        after = (polar.scalar_polynomial(coefficients, values, steps) for values in spectra)
        return all(bool(((values >= _GOAL).double().mean(-1) >= share).all()) for values in after)

    needed = next((steps for steps in range(1, _MOST_STEPS + 1) if suffice(steps)), None)
    found = torch.cat([_singular_values(matrices).flatten() for matrices in split(pattern, after, name)]).cpu()
    steps = tx.arguments["steps"] or len(coefficients.steps)
    return Spectrum(found.min().item(), found.max().item(), _rms(found), tail, steps, needed)


def _singular_values(matrices: Tensor, normalized_for: polar.Coefficients | None = None) -> Tensor:
    """Return singular values (matrices, min(rows, columns)), ascending, in float64; accurate to 1e-8 of the largest."""
    x = matrices.double().reshape(-1, *matrices.shape[-2:])
    x = x.mT if x.shape[-2] > x.shape[-1] else x
    if normalized_for is not None:  # as before an iteration with these coefficients
        norms = torch.linalg.matrix_norm(x, keepdim=True)
        x = row_normalized(x)[0] if normalized_for.row_scaling else x / torch.where(norms == 0, 1.0, norms)
    return torch.linalg.eigvalsh(x @ x.mT).clamp(min=0).sqrt()  # cheaper than an SVD of long matrices


def _rms(values: Tensor) -> float:
    return (torch.linalg.vector_norm(values, dtype=torch.float64) / math.sqrt(values.numel())).item()
