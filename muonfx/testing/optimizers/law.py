"""The registry of the laws for optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from muonfx.testing.violation import Breach

Build = Callable[[nn.Module], Optimizer]
"""A function that returns a new optimizer for a model, such as ``lambda model: AdamW(model.parameters(), lr=0.01)``."""


class NotApplicable(Exception):
    """Raised by a law that cannot be checked on an optimizer; the text is the reason."""


@dataclass(frozen=True)
class Outcome:
    """The result of one law.

    Attributes:
        failure: what was found if the law does not hold, else None.
        reason_left_out: why the law was not checked, or None.
    """

    failure: str | None = None
    reason_left_out: str | None = None


@dataclass(frozen=True)
class OptimizerLaw:
    """A property that optimizers should have.

    Attributes:
        name: the name of its function, such as "frozen_parameters_stay".
        sentence: the law in one sentence.
        check: a function that receives a `Build` and raises an error if the law does not hold.
        needs_ranks: True if the law is checked in several processes of ``torch.distributed``.

    >>> from muonfx.testing import OPTIMIZER_LAWS
    >>> OPTIMIZER_LAWS["autocast_changes_nothing"].sentence
    'A step under torch.autocast has the bits of a step outside of it.'
    """

    name: str
    sentence: str
    check: Callable[[Build], None]
    needs_ranks: bool = False


def outcome_of(law: OptimizerLaw, build: Build) -> Outcome:
    """Check a law in this process, and return whether it holds. Any error of the optimizer is a failure of the law.

    ``build`` returns a new optimizer for a model. An `Outcome` without texts is the result of a law that holds.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning of the optimizer is no failure
            law.check(build)
    except NotApplicable as reason:  # the law cannot be checked on this optimizer
        return Outcome(reason_left_out=str(reason))
    except Breach as breach:  # a comparison within the law has failed
        return Outcome(failure=f"{breach.leaf}: {breach.found}")
    except Exception as error:  # raised by the optimizer
        first_line = str(error).strip().partition("\n")[0]
        return Outcome(failure=f"raised {type(error).__name__}: {first_line}")
    return Outcome()


OPTIMIZER_LAWS: dict[str, OptimizerLaw] = {}
"""All laws for optimizers by name, in the order in which `check_optimizer` checks them."""


def optimizer_law(
    function: Callable[[Build], None], *, needs_ranks: bool = False
) -> Callable[[Build], None]:
    """Register a function as a law. The first line of its docstring is the sentence of the law.

    With ``needs_ranks``, every rank of a process group checks it.
    """
    name = function.__name__
    assert function.__doc__ is not None
    sentence = function.__doc__.splitlines()[0]
    OPTIMIZER_LAWS[name] = OptimizerLaw(name, sentence, function, needs_ranks)
    return function
