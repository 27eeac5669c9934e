"""`diagnose`: the size of each parameter's next update, and the singular values before and after orthogonalization."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import polar, tree
from muonfx.core import Transform, transform
from muonfx.core.transform import within
from muonfx.internal.display import Report, Row, Shown, Table, format_list
from muonfx.optimizer import TransformOptimizer
from muonfx.polar.iteration import row_normalized
from muonfx.sharding.transform import Sharded
from muonfx.transforms import orthogonalize
from muonfx.transforms.matrices import Matrices, MatrixView
from muonfx.tree import PyTree

_GOAL = 0.65  # below the band of every coefficient set: the lowest, of "keller", begins at 0.68
_SHARE = 0.9  # of the singular values of a momentum, which the steps should lift to the goal
_MOST_STEPS = 30


class Spectrum(NamedTuple):
    """Singular values of one parameter before and after `orthogonalize`; of several matrices, the worst values."""

    minimum: float
    maximum: float
    """The least and the largest singular value after orthogonalization."""
    rms: float
    """The root mean square of all singular values after orthogonalization."""
    tail: float
    """The singular value of the momentum, divided by its Frobenius norm, that 90 % of them reach."""
    steps: int
    """The number of Newton-Schulz steps of the transform."""
    steps_needed: int | None
    """The fewest steps that lift 90 % of the singular values to 0.65 or more; None: 30 are too few."""


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
    """Singular values before and after `orthogonalize`; None if it does not update the parameter, or by a NaN."""

    @property
    def role(self) -> str:
        """The name with "*" in place of numbers, such as "blocks.*.up.weight", which is the same for all layers."""
        levels = self.name.split(".")
        for index, level in enumerate(levels):
            if level.isdigit():
                levels[index] = "*"
        return ".".join(levels)

    @property
    def update_per_weight(self) -> float:
        """`update_rms` divided by `weight_rms`; infinity for a weight of zeros."""
        return self.update_rms / self.weight_rms if self.weight_rms else math.inf


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The size and spectrum of each parameter's next update; `diagnose` returns it, and it prints as a table.

    A role is the set of parameters with one name in all layers, such as "blocks.*.up.weight". The table has a row for
    each role, with means of ratios and RMS, and the worst of other values; ``to_text(depth=0)`` shows only these. The
    attribute ``rows`` has a `ParameterDiagnosis` for each parameter that has a gradient. If gradients are NaN or
    infinite, the first line names them.

    >>> import muonfx as mfx
    >>> tx, params = mfx.muon(2e-3), {"blocks.0.up": torch.eye(4)}
    >>> mfx.diagnose((tx, tx.init(params), params, params)).rows[0].role
    'blocks.*.up'
    """

    rows: tuple[ParameterDiagnosis, ...]
    nonfinite: tuple[str, ...] = ()
    """The names of parameters whose gradients are NaN or infinite."""

    def metrics(self) -> dict[str, float]:
        """Return a flat dict for a logger, with keys such as "diagnose/blocks.0.up.weight/update_rms"."""
        metrics: dict[str, float] = {}
        for row in self.rows:
            # The sizes of the update, then the singular values, if the parameter has some.
            values: dict[str, float | None] = {
                "update_rms": row.update_rms,
                "update_per_weight": row.update_per_weight,
                "update_per_rate": row.update_per_rate,
            }
            if row.spectrum is not None:  # the parameter is orthogonalized
                values |= row.spectrum._asdict()
            for key, value in values.items():
                if value is not None:  # None: the chain has no such value
                    metrics[f"diagnose/{row.name}/{key}"] = float(value)
        return metrics

    def report(self) -> Report:
        """Return the printed table: a row for each parameter with the sizes and singular values of its next update.

        Parameters with the same name in all layers have one row, "blocks.*.up (12)", and their rows below it. The lines
        after the table explain its columns.
        """
        # The key is the name with "*" for numbers: "blocks.*.up".
        rows_of_role: dict[str, list[ParameterDiagnosis]] = {}
        for row in self.rows:
            rows_of_role.setdefault(row.role, []).append(row)
        table_rows = [_row_of_role(role, rows) for role, rows in rows_of_role.items()]
        titles = ("parameter", "per rate", "per weight", "min", "max", "rms", "tail", "needed")
        legend = (
            "per rate, per weight: the update before the learning rate, and relative to the weight\n"
            "min, max, rms: singular values after orthogonalization\n"
            f"tail: {_SHARE:.0%} of the singular values of the momentum, divided by its norm, are at least this\n"
            f"needed: steps that lift this share to {_GOAL}, and the steps that are taken"
        )
        columns_of_numbers = range(1, len(titles))  # all but the name are aligned at the right
        table = Table(titles, table_rows, right=columns_of_numbers)
        if self.nonfinite:
            return Report((_text_of_nonfinite(self.nonfinite), table, legend))
        return Report((table, legend))


def _row_of_role(role: str, rows: Sequence[ParameterDiagnosis]) -> Row:
    """Return the row of a role, such as "blocks.*.up (12)", with the row of each of its parameters below it."""
    table_rows = [Row(_cells(row.name, [row])) for row in rows]
    if len(table_rows) == 1:
        return table_rows[0]
    return Row(_cells(f"{role} ({len(rows)})", rows), tuple(table_rows))


def _text_of_nonfinite(names: Sequence[str]) -> str:
    """Return the line that names the gradients that are NaN or infinite, which explain odd numbers in the table."""
    return (
        f"gradients that are not finite (NaN or infinite): {format_list(names)}\n"
        "skip_nonfinite skips this step: within it, the values below come from gradients of zero"
    )


def _cells(title: str, rows: Sequence[ParameterDiagnosis]) -> tuple[str, ...]:
    """Return the cells of a table row for one or more parameters, in the columns of `Diagnosis.report`.

    For example ``("up", "0.2", "0.01", "0.8", "1.1", "1", "0.03", "6 of 5")``. Sizes are means over the parameters.
    """
    updates_per_rate: list[float] = []
    updates_per_weight: list[float] = []
    spectra: list[Spectrum] = []
    for row in rows:
        updates_per_weight.append(row.update_per_weight)
        if row.update_per_rate is not None:  # the chain has a learning rate
            updates_per_rate.append(row.update_per_rate)
        if row.spectrum is not None:  # the parameter is orthogonalized
            spectra.append(row.spectrum)
    return (title, _mean(updates_per_rate), _mean(updates_per_weight), *_cells_of_spectra(spectra))


def _mean(values: Sequence[float]) -> str:
    """Return a table cell with the mean of values; "-" without values."""
    if not values:
        return "-"
    return f"{fmean(values):.3g}"


def _cells_of_spectra(spectra: Sequence[Spectrum]) -> list[str]:
    """Return the cells "min", "max", "rms", "tail" and "needed", such as ``["0.8", "1.1", "1", "0.03", "6 of 5"]``.

    A spectrum has the singular values of one parameter. The cells have the worst of several spectra, except for the
    mean of the RMS. "6 of 5" means that 6 steps are needed, and the transform takes 5.
    """
    if not spectra:  # no parameter is orthogonalized
        return ["-"] * 5
    columns: Any = zip(*spectra, strict=True)  # the values of each field of `Spectrum`
    minima, maxima, rms_values, tails, steps, steps_needed = columns
    needed = f">{_MOST_STEPS}"  # for a spectrum for which all of these steps are too few
    if None not in steps_needed:
        needed = str(max(steps_needed))
    return [
        f"{min(minima):.3g}",
        f"{max(maxima):.3g}",
        f"{fmean(rms_values):.3g}",
        f"{min(tails):.3g}",
        f"{needed} of {max(steps)}",
    ]


def diagnose(
    what: TransformOptimizer | tuple[Transform, PyTree, PyTree, PyTree], **extras: Any
) -> Diagnosis:
    """Measure the next update of each parameter: its size, its orthogonality, and the Newton-Schulz steps it needs.

    Call it after ``backward()`` and before ``step()``. It computes one update, which is dropped: parameters, gradients
    and state do not change. It needs memory for one more state, and computes all singular values in float64. Over
    ranks, all must call it together, and each gathers the whole model. The result prints as a table, and its method
    `Diagnosis.metrics` returns a dict for a logger.

    The iteration lifts large singular values of the momentum to 1 first, so small ones decide how many steps it needs.

    Args:
        what: an optimizer, or a tuple (transform, state, params, grads) of whole trees.
        **extras: further named arguments of the update, such as ``value=loss``, as for ``optimizer.step``.

    Raises:
        TypeError: ``what`` has another type, or its transform is sharded without an optimizer.
        ValueError: no parameter has a gradient; or `orthogonalize` did not run, because a wrapper such as `accumulate`
            runs it only at some calls.

    Example:
        >>> import muonfx as mfx
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        >>> optimizer = mfx.Muon(model, lr=1e-3, adamw_lr=4e-3)
        >>> model(torch.eye(8)).square().sum().backward()
        >>> [row.name for row in mfx.diagnose(optimizer).rows if row.spectrum is not None]
        ['0.weight', '1.weight']
    """
    if isinstance(what, TransformOptimizer):
        tx, state, params, grads = what.snapshot()
    else:
        _require_whole_trees(what)
        tx, state, params, grads = what
    if all(grad is None for grad in tree.leaves(grads)):
        raise ValueError(
            "diagnose: found no gradient, expected at least one: call it after backward(), before step()"
        )
    params = tree.map(lambda leaf: leaf.detach(), params)
    measurements = _Measurements()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # creating the transform has given these warnings
        updates, _ = _watched(tx, measurements).update(grads, state, params, **extras)
    if not measurements.has_orthogonalized:
        _require_no_orthogonalize(tx)
    return Diagnosis(_rows(params, updates, measurements), _nonfinite_leaves(grads))


def _require_no_orthogonalize(tx: Transform) -> None:
    """Raise ValueError if a transform that has orthogonalized nothing contains an `orthogonalize`."""
    for part in within(tx):
        if part.factory is orthogonalize:
            raise ValueError(
                "diagnose: orthogonalize did not run, expected it to run: accumulate runs it only at the last "
                "micro-batch: call diagnose there, or pass boundary=True"
            )


def _nonfinite_leaves(grads: PyTree) -> tuple[str, ...]:
    """Return the names of the gradients that are NaN or infinite in at least one element."""
    return tuple([name for name, grad in _present(grads) if not _is_finite(grad)])


def _rows(
    params: PyTree, updates: PyTree, measurements: _Measurements
) -> tuple[ParameterDiagnosis, ...]:
    """Return a row for each parameter that has an update: its sizes, and its spectrum if it is orthogonalized.

    ``measurements`` has the values that were measured by name while the chain computed the updates.
    """
    weight_of = dict(tree.named_leaves(params))
    rows: list[ParameterDiagnosis] = []
    for name, update in _present(updates):
        row = ParameterDiagnosis(
            name=name,
            update_rms=_rms(update),
            weight_rms=_rms(weight_of[name]),
            update_per_rate=measurements.per_rate.get(name),
            spectrum=measurements.spectra.get(name),
        )
        rows.append(row)
    return tuple(rows)


@dataclass
class _Measurements:
    """What `diagnose` measures inside a chain, while the chain runs."""

    spectra: dict[str, Spectrum] = field(default_factory=dict[str, Spectrum])
    """The spectrum of each parameter that an `orthogonalize` updates."""
    per_rate: dict[str, float] = field(default_factory=dict[str, float])
    """The root mean square of the update of each parameter before the learning rate multiplies it."""
    has_orthogonalized: bool = False

    def measure_rate(self, updates: PyTree, _scaled: PyTree) -> None:
        """Measure the size of updates before a learning rate multiplies them."""
        for name, update in _present(updates):
            self.per_rate[name] = _rms(update)

    def measure_orthogonalized(
        self, tx: Transform, updates: PyTree, orthogonalized: PyTree
    ) -> None:
        """Measure the singular values before and after the `orthogonalize` ``tx``."""
        self.has_orthogonalized = True  # also if no parameter has an update
        result_of = dict(tree.named_leaves(orthogonalized))
        for name, update in _present(updates):
            if _is_finite(update) and _is_finite(result_of[name]):  # a NaN has no singular values
                self.spectra[name] = _spectrum(tx, name, update, result_of[name])


def _present(updates: PyTree) -> list[tuple[str, Tensor]]:
    """Return gradients or updates by name. Parameters without a gradient or without elements are left out."""
    present: list[tuple[str, Tensor]] = []
    for name, leaf in tree.named_leaves(updates):
        if leaf is not None and leaf.numel() > 0:
            present.append((name, leaf))
    return present


def _require_whole_trees(argument: Any) -> None:
    """Raise TypeError unless the argument of `diagnose` is a tuple (transform, state, params, grads) of whole trees.

    The trees of a sharded transform have shards only, and singular values need whole matrices.
    """
    is_tuple = (
        isinstance(argument, tuple) and len(argument) == 4 and isinstance(argument[0], Transform)
    )
    if is_tuple and not isinstance(argument[0], Sharded):
        return
    # A sharded transform is a mistake of its own; all other arguments are named by their type.
    argument_kind = "a sharded transform" if is_tuple else type(argument).__name__
    raise TypeError(
        f"diagnose: found {argument_kind}, expected a muonfx.TransformOptimizer, which may be sharded, or a tuple "
        "(transform, state, params, grads) of whole trees"
    )


def _watched(tx: Transform, measurements: _Measurements) -> Transform:
    """Return a transform with the same updates, in which each orthogonalization and learning rate is measured.

    In ``chain(momentum(), orthogonalize(), scale_by_learning_rate(0.1))``, the second and the third transform are
    replaced by ones that also write into ``measurements``.
    """
    if tx.factory is orthogonalize:
        return _measured(tx, partial(measurements.measure_orthogonalized, tx))
    if tx.position == "learning_rate" and not tx.children:
        return _measured(tx, measurements.measure_rate)
    # Another transform, such as a chain, may call transforms to measure.
    return tx.with_children([_watched(child, measurements) for child in tx.children])


def _measured(tx: Transform, measure: Callable[[PyTree, PyTree], None]) -> Transform:
    """Return a transform that runs ``tx``, and calls ``measure`` with the updates before and after it."""

    # It has the name and the properties of ``tx``, so that errors and checks are as without measurements.
    @transform(name=f"muonfx.{tx.name}", locality=tx.locality, position=tx.position)
    def measured():
        def update(updates: PyTree, state: PyTree, params: PyTree = None, **extras: Any):
            new_updates, new_state = tx.run(updates, state, params, **extras)
            measure(updates, new_updates)
            return new_updates, new_state

        return tx.functions.init, update

    return measured()


def _spectrum(tx: Transform, name: str, momentum: Tensor, orthogonalized: Tensor) -> Spectrum:
    """Return the singular values of one parameter before and after its orthogonalization, as a few numbers.

    The smallest and the largest value and the RMS are after the orthogonalization. The tail and the needed steps are
    from the values of the momentum.

    Args:
        tx: the `orthogonalize`, with its coefficients and its view (how a parameter divides into matrices).
        name: the name of the parameter.
        momentum: the input of ``tx``.
        orthogonalized: the result of ``tx``.
    """
    argument = tx.arguments["coefficients"]
    if isinstance(argument, Tensor):  # a table of numbers, not a name such as "keller"
        argument = argument.tolist()
    coefficients = polar.coefficients(argument)
    view = tx.arguments["view"]
    # The iteration divides each matrix by its norm first. Only after this, its singular values show how many steps it
    # needs.
    momentum_values: list[Tensor] = []
    for batch in _wide_batches(view, momentum, name):
        normalized = _normalized(batch, coefficients)
        momentum_values.append(_singular_values(normalized))
    orthogonalized_values: list[Tensor] = []
    for batch in _wide_batches(view, orthogonalized, name):
        orthogonalized_values.append(_singular_values(batch).flatten())
    results = torch.cat(orthogonalized_values)  # of all matrices together
    return Spectrum(
        minimum=results.min().item(),
        maximum=results.max().item(),
        rms=_rms(results),
        tail=min(map(_tail, momentum_values)),
        steps=tx.arguments["steps"] or len(coefficients.steps),
        steps_needed=_steps_needed(momentum_values, coefficients),
    )


def _wide_batches(view: MatrixView, leaf: Tensor, name: str) -> list[Tensor]:
    """Return the matrices of a parameter in float64: a batch ``(b, n, m)`` with n <= m for each size of matrices.

    For example, for a weight of shape (12, 4) whose view has three matrices along the rows, it is one batch of shape
    (3, 4, 4). Tall matrices are transposed, which keeps the singular values.
    """
    batches: list[Tensor] = []
    for stack in Matrices(view, {name: leaf}).stacks:
        # All dims before the last two become one: (2, 3, 4, 4) becomes (6, 4, 4).
        batch = stack.double().reshape(-1, *stack.shape[-2:])
        is_tall = batch.shape[-2] > batch.shape[-1]
        batches.append(batch.mT if is_tall else batch)
    return batches


def _tail(values: Tensor) -> float:
    """Return the value that 90 % of each row of ascending values reach; the least of all rows.

    For example, of ten values in a row, nine are at least the second one.
    """
    count = math.ceil(_SHARE * values.shape[-1])
    return values[:, -count].min().item()  # the last `count` values are at least the one at -count


def _steps_needed(spectra: Sequence[Tensor], coefficients: polar.Coefficients) -> int | None:
    """Return the fewest steps that lift 90 % of each row of singular values to the goal of 0.65; None: too many.

    A step of the iteration applies a polynomial to each singular value, so it need not be run on matrices.
    """
    for steps in range(1, _MOST_STEPS + 1):
        lifted = [polar.scalar_polynomial(coefficients, values, steps) for values in spectra]
        if all(map(_reach_goal, lifted)):
            return steps
    return None


def _reach_goal(values: Tensor) -> bool:
    """Return True if in each row of singular values, at least 90 % are at the goal or above."""
    lifted_share = (values >= _GOAL).double().mean(-1)
    return bool((lifted_share >= _SHARE).all())


def _normalized(x: Tensor, coefficients: polar.Coefficients) -> Tensor:
    """Scale matrices as before an iteration with these coefficients, but without their safety factor."""
    if coefficients.row_scaling:
        return row_normalized(x)[0]
    norms = torch.linalg.matrix_norm(x, keepdim=True)  # Frobenius norms
    # A matrix of zeros stays zeros, instead of 0 / 0.
    return x / torch.where(norms == 0, 1.0, norms)


def _singular_values(x: Tensor) -> Tensor:
    """Return singular values (b, n) of float64 matrices (b, n, m), ascending; accurate to 1e-8 of the largest."""
    # Cheaper than an SVD of long matrices.
    return torch.linalg.eigvalsh(x @ x.mT).clamp(min=0).sqrt().cpu()


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _rms(values: Tensor) -> float:
    return (
        torch.linalg.vector_norm(values, dtype=torch.float64) / math.sqrt(values.numel())
    ).item()
