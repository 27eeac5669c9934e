"""Train a task with several optimizers, rates and seeds, and return rows of losses."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import torch
from torch import Tensor

from muonfx import checkpoint, tree
from muonfx.core.checks import warn_caller
from muonfx.core.transform import Transform
from muonfx.core.value import walk
from muonfx.internal.arguments import check_plain, float_of, plain_arguments
from muonfx.internal.progress import Report, reporting
from muonfx.studies.checks import (
    are_same_losses,
    check_task,
    draws_random_numbers,
    require_optimizers,
    transforms_by_rate,
)
from muonfx.studies.sweep import EvalParams, Progress, Sweep
from muonfx.studies.task import Task

REPORTS = 20
"""Number of reports of a run if `study` gets no ``report_every``."""

AVERAGES = "averages of the batches"
"""The beginning of keys in the description of a saved study."""

Rows = list[dict[str, Any]]


class Run(NamedTuple):
    """One training run of a study."""

    rate: float
    seed: int


@plain_arguments
def study(
    task: Task,
    optimizers: Mapping[str, Callable[[float], Transform]],
    *,
    rates: Sequence[float] | Mapping[str, Sequence[float]],
    seeds: Sequence[int],
    steps: int,
    report_every: int | None = None,
    eval_params: Mapping[str, EvalParams] | None = None,
    folder: str | os.PathLike[str] | None = None,
    vmap: bool = True,
    progress: bool | Report = True,
) -> Rows:
    """Train a task with each optimizer, at each rate, from each seed, and return the losses as rows.

    Random numbers of the loss, as in dropout, depend on the seed and the step alone: all optimizers and
    rates share them, and a continued study draws them again. The random state of the caller is restored.

    Args:
        task: parameters, batches and loss.
        optimizers: dict from a name to a function of a rate that returns a transform.
        rates: the rates to try with every optimizer, or a dict from the name of an optimizer to its rates.
        seeds: the seeds, which select initial parameters and batches. All optimizers and rates share them.
        steps: the number of steps of each run.
        report_every: the number of steps between two rows of a run. None: a run has 20 rows, or one each step if it is
            shorter. The last step always has a row.
        eval_params: dict from the name of an optimizer to a function of a state and parameters, as
            `muonfx.contrib.schedule_free_eval_params`, which returns the parameters for its validation losses. The
            others have validation losses of the parameters that are trained.
        folder: a folder to which the runs are saved at each report, so that the same call continues an interrupted
            study, and returns at once if it is complete. None: nothing is saved.
        vmap: True: all rates and seeds of an optimizer train as one batch. Their transforms may then differ in numbers
            only, and memory grows with the number of runs. False: one run after another, as always if the loss draws
            random numbers, because random numbers of a batch of runs depend on the number of runs.
        progress: True: a line on stderr; False: none; or a function that is called with each line.

    Returns:
        A list of dicts with the keys ``optimizer``, ``rate``, ``seed``, ``step``, ``loss`` (the mean of the training
        losses since the last row), and ``validation_loss`` if the task has a validation batch. A run that diverged has
        losses of NaN or inf. ``pandas.DataFrame(rows)`` makes a table of them.

    Raises:
        TypeError: an argument, or a result of its functions, has another type.
        ValueError: there is nothing to train, two calls of a function of the task differ, ``rates`` or ``eval_params``
            name other optimizers, the runs of an optimizer cannot train as one batch, or ``folder`` has runs of another
            study.

    Warns:
        UserWarning: an optimizer increases the loss or does not use its rate, the first gradient is zero, or validation
            losses of ``schedule_free`` are not measured at the average.

    Example:
        >>> import muonfx as mfx
        >>> task = mfx.studies.Task(
        ...     init=lambda seed: {"w": torch.zeros(2)},
        ...     batch=lambda seed, step: torch.tensor([1.0, 2.0]),
        ...     loss=lambda params, target: (params["w"] - target).square().sum(),
        ... )
        >>> sgd = lambda rate: mfx.scale_by_learning_rate(rate)
        >>> for row in mfx.study(
        ...     task, {"sgd": sgd}, rates=[0.1, 0.5], seeds=[0], steps=2, progress=False
        ... ):
        ...     print(row["rate"], row["step"], round(row["loss"], 2))
        0.1 1 5.0
        0.1 2 3.2
        0.5 1 5.0
        0.5 2 0.0
    """
    if not isinstance(folder, str | os.PathLike | None):
        raise TypeError(f"folder: found {folder!r}, expected a path or None")
    require_optimizers(optimizers)
    rates_by_name = _rates_by_name(rates, optimizers)
    eval_params = eval_params or {}
    if not set(eval_params) <= set(optimizers):
        raise ValueError(
            f"eval_params: found {sorted(eval_params)}, expected names of {sorted(optimizers)}"
        )
    _require_work(seeds, steps, report_every)
    interval = report_every or math.ceil(steps / REPORTS)
    report_steps = [*range(interval, steps, interval), steps]
    rows: Rows = []
    with torch.random.fork_rng(), reporting(progress) as report:
        check_task(task, int(seeds[0]))
        # All optimizers are made before the first one trains, so that a mistake in the last one is reported at once.
        transforms: dict[str, dict[float, Transform]] = {}
        for name, make_transform in optimizers.items():
            transforms[name] = transforms_by_rate(name, make_transform, rates_by_name[name])
        # The numbers that `torch.func.vmap` draws depend on the number of runs, so a run alone would have other ones.
        vmap = vmap and not draws_random_numbers(task, int(seeds[0]))
        for name, transform_at in transforms.items():
            runs = [Run(rate, int(seed)) for rate in rates_by_name[name] for seed in seeds]
            for batch_of_runs in _trained_together(runs, vmap=vmap):
                sweep = _sweep(task, name, transform_at, batch_of_runs, eval_params.get(name))
                path = None
                if folder is not None:
                    path = Path(folder) / _file_name(name, batch_of_runs)
                losses = _losses_at(sweep, name, batch_of_runs, report_steps, path, report)
                rows += _rows(
                    name,
                    batch_of_runs,
                    report_steps,
                    losses,
                    has_validation=task.validation is not None,
                )
    return rows


def _trained_together(runs: list[Run], *, vmap: bool) -> list[list[Run]]:
    """Return the runs in groups that train as one batch: all of them, or each alone."""
    if vmap:
        return [runs]
    return [[run] for run in runs]


def _sweep(
    task: Task,
    name: str,
    transform_at: Mapping[float, Transform],
    runs: list[Run],
    eval_params: EvalParams | None,
) -> Sweep:
    """Return a `Sweep`, which trains several runs of one optimizer together. Raise if their transforms do not fit.

    Args:
        task: parameters, batches and loss.
        name: the name of the optimizer, for the error.
        transform_at: the transform for each rate.
        runs: the rate and the seed of each run.
        eval_params: returns the parameters to validate; None for those that are trained.
    """
    transforms = [transform_at[run.rate] for run in runs]
    # One batch of runs has one transform with a number for each run, so the transforms may differ in numbers only.
    try:
        return Sweep(task, transforms, [run.seed for run in runs], eval_params)
    except ValueError as error:
        raise ValueError(
            f"optimizers[{name!r}]: its transforms of {len(runs)} runs cannot train as one batch; pass vmap=False "
            f"({error})"
        ) from error


def _losses_at(
    sweep: Sweep,
    name: str,
    runs: list[Run],
    report_steps: list[int],
    path: Path | None,
    report: Report,
) -> Tensor:
    """Train several runs of an optimizer together, and return their losses: shape (reports, runs, 2).

    The last dim has the training loss and the validation loss. A run is the training at one rate from one seed.

    Args:
        sweep: trains the runs.
        name: the name of the optimizer.
        runs: the rate and the seed of each run.
        report_steps: the steps after which the losses are recorded, such as [5, 10, 12]. The last one ends the runs.
        path: the folder to which the runs are saved at each report, so that they can be continued; None to save
            nothing.
        report: receives a line of text at each report.
    """
    progress = sweep.start()
    _warn_of_trained_params(sweep, name)
    losses = torch.full((len(report_steps), len(sweep.seeds), 2), torch.nan, dtype=torch.float64)
    steps_taken = 0
    saves: _Saves | None = None
    if path is not None:
        saves = _Saves(
            path, _description_of(name, runs, report_steps, sweep, progress), tree.names(sweep.tx)
        )
        steps_taken, progress, losses = saves.resume(sweep, progress, losses)
    for index, step in enumerate(report_steps):
        if step <= steps_taken:  # the saved study has made this report
            continue
        progress, training_losses = sweep.train(progress, range(steps_taken, step))
        losses[index, :, 0] = training_losses
        losses[index, :, 1] = sweep.validation_losses(progress)
        steps_taken = step
        if saves is not None:
            saves.save(steps_taken, progress, losses)
        lowest = training_losses.nan_to_num(nan=math.inf).min()  # NaN: the run has diverged
        report(
            f"{name}: step {steps_taken} of {report_steps[-1]}, {len(sweep.seeds)} runs, lowest loss {lowest:.4g}"
        )
    return losses


def _warn_of_trained_params(sweep: Sweep, name: str) -> None:
    """Warn if `schedule_free` is validated at the parameters that it trains, and not at their average.

    The average is the result of its training, and ``eval_params`` selects it.
    """
    if sweep.task.validation is None or sweep.eval_params is not None:
        return
    # `schedule_free` may be a part of the transform, such as its first transform in a chain.
    for _, part in walk(sweep.tx):
        if part.factory.__name__ == "schedule_free":
            warn_caller(
                f"optimizers[{name!r}]: validation losses of schedule_free are measured at the parameters that are "
                f"trained, not at the average; pass eval_params={{{name!r}: muonfx.contrib.schedule_free_eval_params}}"
            )
            return


def _rows(
    name: str, runs: list[Run], report_steps: list[int], losses: Tensor, *, has_validation: bool
) -> Rows:
    """Return the losses of an optimizer as rows, a dict for each run and each report.

    For example ``{"optimizer": "muon", "rate": 0.1, "seed": 0, "step": 5, "loss": 2.3}``. ``losses`` has the shape
    (reports, runs, 2): the training loss and the validation loss.
    """
    rows: Rows = []
    # `unbind` divides the losses by run: each part has the shape (reports, 2).
    for run, losses_of_run in zip(runs, losses.unbind(1), strict=True):
        for step, (training_loss, validation_loss) in zip(
            report_steps, losses_of_run.tolist(), strict=True
        ):
            row = {
                "optimizer": name,
                "rate": run.rate,
                "seed": run.seed,
                "step": step,
                "loss": training_loss,
            }
            if has_validation:
                row["validation_loss"] = validation_loss
            rows.append(row)
    return rows


class _Saves(NamedTuple):
    """The checkpoint of a sweep, which is replaced at each report."""

    path: Path
    """The folder of the checkpoint."""
    description: dict[str, Any]
    """The arguments and the first losses of the study, by which it is recognized, as `_description_of` returns them."""
    names_of_numbers: list[str]
    """The names of the numbers in the description, such as "scale_by_adam.b2"."""

    def resume(self, sweep: Sweep, start: Progress, losses: Tensor) -> tuple[int, Progress, Tensor]:
        """Return the number of steps, the progress and the losses with which the runs of a sweep begin or continue.

        The arguments are as in `load`. Raise ValueError if another validation batch, or another loss on it, gave the
        saved validation losses. First losses would not show it: with a last layer of zeros, all batches have the same.
        """
        steps_taken, progress, losses = self.load(start, losses)
        if steps_taken:  # 0 if nothing was saved
            report_index = self.description["reports"].index(steps_taken)
            saved_losses = losses[report_index, :, 1].tolist()
            validation_losses = sweep.validation_losses(progress).tolist()
            if not are_same_losses(saved_losses, validation_losses):
                key = f"validation losses at step {steps_taken}"
                raise self._another_study(_difference(key, saved_losses, validation_losses))
        return steps_taken, progress, losses

    def save(self, step: int, progress: Progress, losses: Tensor) -> None:
        """Replace the checkpoint by the progress after ``step`` steps."""
        state = {"optimizer": progress.state, "losses": losses}
        checkpoint.save(
            self.path, state, params=progress.params, step=step, extra={"study": self.description}
        )

    def load(self, start: Progress, losses: Tensor) -> tuple[int, Progress, Tensor]:
        """Return the number of steps, the progress and the losses with which an interrupted study continues.

        Args:
            start: the progress before the first step, which is returned with 0 steps if there is no checkpoint.
            losses: the table for the losses of all reports.

        Raises:
            ValueError: the checkpoint is of another study.
        """
        try:
            index = checkpoint.inspect(self.path)
        except checkpoint.NotFoundError:  # the study begins
            return 0, start, losses
        self._require_same_study(index.extra.get("study", {}))  # before tensors are read
        state = checkpoint.load(self.path, like={"optimizer": start.state, "losses": losses})
        params = checkpoint.load_params(self.path, like=start.params)
        assert index.step is not None
        return index.step, Progress(params, state["optimizer"]), state["losses"]

    def _require_same_study(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError if the checkpoint was saved by a call of `study` with another task or other arguments.

        ``saved`` is the description in the checkpoint, such as ``{"optimizer": "muon", "rates": [0.1], ...}``.
        """
        for key, value in self.description.items():
            saved_value = saved.get(key)  # None if the key was not saved
            if _is_same_item(key, saved_value, value):
                continue
            if key == "numbers" and saved_value is not None:
                raise self._another_study(self._different_numbers(saved_value))
            raise self._another_study(_difference(key, saved_value, value))

    def _different_numbers(self, saved_numbers: list[Any]) -> str:
        """Return the numbers of the transform that differ as text: ``scale_by_adam.b2 was 0.95, and is now 0.9``.

        Each number is a list of its values in all runs, or the value of a run alone.
        """
        numbers = self.description["numbers"]
        differences: list[str] = []
        for name, saved_number, number in zip(
            self.names_of_numbers, saved_numbers, numbers, strict=True
        ):
            if saved_number != number:
                differences.append(
                    _difference(name, _shown_number(saved_number), _shown_number(number))
                )
        return "; ".join(differences)

    def _another_study(self, difference: str) -> ValueError:
        return ValueError(
            f"folder: {self.path} has runs of another study: {difference}; pass another folder, or remove this one"
        )


def _is_same_item(key: str, saved_value: Any, value: Any) -> bool:
    """Return True if an item of the description of a study, such as "rates", is as it was saved, up to rounding.

    >>> (
    ...     _is_same_item("first losses", [2.0], [2.0 + 1e-9]),
    ...     _is_same_item("rates", [2.0], [2.0 + 1e-9]),
    ... )
    (True, False)
    """
    if saved_value == value:
        return True
    # Another machine rounds these otherwise.
    is_computed = key == "first losses" or key.startswith(AVERAGES)
    return is_computed and saved_value is not None and are_same_losses(saved_value, value)


def _description_of(
    name: str, runs: list[Run], report_steps: list[int], sweep: Sweep, start: Progress
) -> dict[str, Any]:
    """Return what identifies a study: its arguments, and what differs for another transform or another task.

    These are the transform, first losses, and averages of the batches of the first, the middle and the last step, with
    keys such as ``"averages of the batches at step 19"``. They show other batches also where the losses do not: if the
    last layer begins with zeros.
    """
    numbers: list[Any] = []
    for number in tree.leaves(sweep.tx):
        # Numbers are not rounded to float32.
        numbers.append(torch.as_tensor(number, dtype=torch.float64).tolist())
    description: dict[str, Any] = {
        "optimizer": name,
        "rates": list(dict.fromkeys(run.rate for run in runs)),  # each once
        "seeds": list(dict.fromkeys(run.seed for run in runs)),
        "reports": report_steps,
        "transform": sweep.tx.fingerprint,
        "numbers": numbers,
        "first losses": sweep.first_losses(start).tolist(),
    }
    steps = report_steps[-1]
    for step in sorted({0, steps // 2, steps - 1}):
        description[f"{AVERAGES} at step {step}"] = sweep.batch_averages(step)
    return description


def _difference(key: str, saved_value: object, value: object) -> str:
    return f"{key} was {saved_value!r}, and is now {value!r}"


def _shown_number(number: Any) -> Any:
    """Return a number of a transform for a message: 0.9 for the values [0.9, 0.9] of two runs, or values that differ.

    >>> _shown_number([0.9, 0.9]), _shown_number([0.1, 0.3]), _shown_number(0.9)
    (0.9, [0.1, 0.3], 0.9)
    """
    if not isinstance(number, list):
        return number
    are_equal = all(value == number[0] for value in number)
    return number[0] if are_equal else number


def _file_name(name: str, runs: list[Run]) -> str:
    """Return the name of the folder of a sweep: ``runs of muon``, or ``muon, rate 0.1, seed 0`` for a run alone.

    >>> _file_name("../muon", [Run(0.1, 0), Run(0.1, 1)])
    'runs of ..%2Fmuon'
    """
    text = f"runs of {name}"
    if len(runs) == 1:
        text = f"{name}, rate {runs[0].rate!r}, seed {runs[0].seed}"
    return quote(text, safe=" ,")  # "/" in a name would be a folder of its own


def _rates_by_name(
    rates: Sequence[float] | Mapping[str, Sequence[float]], optimizers: Mapping[str, object]
) -> dict[str, list[float]]:
    """Return the rates of each optimizer, from the arguments of `study`; raise if one has none, or one twice.

    >>> _rates_by_name([0.1, 1], {"muon": ..., "adamw": ...})
    {'muon': [0.1, 1.0], 'adamw': [0.1, 1.0]}
    """
    if not isinstance(rates, Iterable):
        raise TypeError(
            f"rates: found {rates!r}, expected a list of rates, or a dict from optimizer to list"
        )
    if not isinstance(rates, Mapping):  # the same for all optimizers
        rates = dict.fromkeys(optimizers, rates)
    if set(rates) != set(optimizers):
        raise ValueError(
            f"rates: found rates for {sorted(rates)}, expected rates for {sorted(optimizers)}"
        )
    # Each optimizer needs a rate. As floats, because the caller may have given ints or tensors.
    rates_by_name: dict[str, list[float]] = {}
    for name in optimizers:
        rates_of_name: list[float] = []
        for rate in rates[name]:
            number = check_plain("study", "rates", rate, frozenset({"float"}))
            rates_of_name.append(float_of("study: rates", number))
        if not rates_of_name or len(set(rates_of_name)) < len(rates_of_name):
            raise ValueError(
                f"rates: found {rates_of_name} for {name!r}, expected at least one rate, each once"
            )
        rates_by_name[name] = rates_of_name
    return rates_by_name


def _require_work(seeds: Sequence[int], steps: int, report_every: int | None) -> None:
    """Raise an error if there is nothing to train, by the arguments of `study`: no seeds or steps.

    An example is ``seeds=3`` instead of ``range(3)``.
    """
    if not isinstance(seeds, Iterable):
        raise TypeError(f"seeds: found {seeds!r}, expected a sequence of ints, such as range(3)")
    if len(seeds) == 0 or len(set(seeds)) < len(seeds):  # an array has no truth value
        raise ValueError(f"seeds: found {list(seeds)}, expected at least one seed, each once")
    if steps < 1:
        raise ValueError(f"steps: found {steps}, expected at least 1")
    if report_every is not None and report_every < 1:
        raise ValueError(f"report_every: found {report_every}, expected at least 1, or None")
