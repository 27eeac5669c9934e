"""The check of one optimizer against all laws, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.optim import Optimizer

from muonfx.internal.display import Report, Shown, Table
from muonfx.internal.progress import reporting
from muonfx.testing.law import select
from muonfx.testing.optimizers.law import OPTIMIZER_LAWS, Build, outcome_of
from muonfx.testing.optimizers.ranks import outcome_on_ranks
from muonfx.testing.optimizers.runs import seeded


@dataclass(frozen=True, repr=False)
class OptimizerReport(Shown):
    """The result of `check_optimizer`. It prints as a table with a row for each law.

    Attributes:
        optimizer: the name of the optimizer's class.
        failures: a dict from the name of each law that does not hold to what was found.
        held: the names of the laws that hold.
        left_out: a dict from the name of each law that was not checked to the reason.

    >>> print(
    ...     OptimizerReport(
    ...         "Mine", {"autocast_changes_nothing": "under autocast: up.weight differs"}, (), {}
    ...     )
    ... )
    Mine: 0 of 1 laws hold
    law
    autocast_changes_nothing  does not hold  under autocast: up.weight differs
    """

    optimizer: str
    failures: dict[str, str]
    held: tuple[str, ...]
    left_out: dict[str, str]

    def raise_failures(self) -> None:
        """Raise an AssertionError with the printed table if a law does not hold, for use in tests."""
        if self.failures:
            raise AssertionError(str(self))

    def report(self) -> Report:
        """Return the table that is printed for this value: a row for each law, with its result and a sentence."""
        rows: list[tuple[str, str, str]] = []
        # In this order; laws that were not selected have no row.
        for name, law in OPTIMIZER_LAWS.items():
            if name in self.failures:
                rows.append((name, "does not hold", self.failures[name]))
            elif name in self.left_out:
                rows.append((name, "left out", self.left_out[name]))
            elif name in self.held:
                rows.append((name, "holds", law.sentence))

        checked = len(self.held) + len(self.failures)
        title = f"{self.optimizer}: {len(self.held)} of {checked} laws hold"
        return Report((Table(("law", "", ""), rows, title=title),))


def check_optimizer(
    build: Build,
    *,
    laws: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    progress: bool | Callable[[str], None] = True,
) -> OptimizerReport:
    """Check a `torch.optim.Optimizer` of anyone against the laws that training loops rely on.

    Tiny models with fp32 parameters on the CPU are updated with given gradients. Laws of ranks start two processes with
    ``torch.distributed`` (gloo), which import ``build``: it must be a function of a module that they can import.

    Args:
        build: a function that receives a model and returns a new optimizer for all or some of its parameters. Each
            call must return the same optimizer. Its learning rate should be of a usual size, such as 0.01.
        laws: the names of the laws to check. None: all of `OPTIMIZER_LAWS`.
        skip: the names of laws not to check.
        progress: True: the law that is checked is shown on stderr. A function: it is called with a line for each law.

    Returns:
        An `OptimizerReport`. A law that does not hold is an entry of its ``failures``, not an error; in a test, call
        ``raise_failures()``.

    Raises:
        TypeError: ``build`` is a class that does not accept a model; or ``laws`` or ``skip`` is a string, not a list.
        ValueError: a name in ``laws`` or ``skip`` is not the name of a law.

    >>> import torch
    >>> def build(model):
    ...     return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    >>> names = ["torch_save_resumes_the_run", "frozen_parameters_stay"]
    >>> print(check_optimizer(build, laws=names, progress=False))
    SGD: 2 of 2 laws hold
    law
    torch_save_resumes_the_run  holds  A run resumed from torch.save of the state dict ends in the bits of ...
    frozen_parameters_stay      holds  A parameter that is frozen after some steps stays, and trains again once ...
    """
    checked, left_out = select(OPTIMIZER_LAWS, laws, skip)
    optimizer = type(_built(build)).__name__
    held: list[str] = []
    failures: dict[str, str] = {}
    with reporting(progress) as report:
        for number, law in enumerate(checked, start=1):
            report(f"{optimizer}: law {number} of {len(checked)}, {law.name}")
            check = outcome_on_ranks if law.needs_ranks else outcome_of
            outcome = check(law, build)
            if outcome.failure is not None:
                failures[law.name] = outcome.failure
            elif outcome.reason_left_out is not None:
                left_out[law.name] = outcome.reason_left_out
            else:
                held.append(law.name)
    return OptimizerReport(optimizer, failures, tuple(held), left_out)


def _built(build: Build) -> Optimizer:
    """Return an optimizer that ``build`` returns. Raise TypeError for a class that accepts parameters, but no model."""
    try:
        return build(seeded())
    except Exception as error:
        if not isinstance(build, type):
            raise
        raise TypeError(
            f"build: found the class {build.__name__}, which raised {type(error).__name__} for a model ({error}); "
            "expected a function of a model that returns an optimizer, such as\n  def build(model):\n"
            f"      return {build.__name__}(model.parameters(), lr=0.01)"
        ) from error
