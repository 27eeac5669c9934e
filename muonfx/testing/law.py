"""The decorator `law`, which makes a function a law, and the registry `LAWS` of all laws."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from muonfx.core import Transform
from muonfx.testing.examples import Example, copied
from muonfx.testing.violation import Breach, LawViolation
from muonfx.tree import PyTree

LawFunction = Callable[..., None]
"""The type of a law: a function of a transform, parameters, and a list with the gradients of each step."""


@dataclass(frozen=True)
class Law:
    """A law (a property that every transform must have) and the settings with which it is checked.

    Attributes:
        name: the law as a short sentence with underscores, such as "identity_is_neutral".
        check: the function ``(tx, params, steps, **options)``, which raises `LawViolation` if the law does not hold.
        family: the name of the module in `muonfx.testing.laws` that contains the law.
        why_not: a function from a transform to the reason why the law does not apply to it, or to None.
        share: the fraction of the generated examples on which the law is checked; small for slow laws.

    >>> from muonfx.testing import LAWS
    >>> LAWS["identity_is_neutral"].family
    'algebra'
    """

    name: str
    check: LawFunction
    family: str
    why_not: Callable[[Transform], str | None]
    share: float


LAWS: dict[str, Law] = {}
"""Every law by name. They are checked in this order, because a failure of an early law explains later failures."""


L = TypeVar("L")


def select(
    registry: Mapping[str, L],
    laws: Iterable[str | LawFunction] | None,
    skip: Iterable[str | LawFunction],
) -> tuple[list[L], dict[str, str]]:
    """Return the laws of a registry to check, and a dict from the name of each skipped law to "skipped".

    Args:
        registry: all laws by name, such as `LAWS`. It determines the order.
        laws: the laws to check, as names or functions. None: all laws.
        skip: the laws not to check, as names or functions.

    Raises:
        TypeError: ``laws`` or ``skip`` is a text.
        ValueError: a law is not in the registry.

    >>> select({"a": "law a", "b": "law b", "c": "law c"}, laws=None, skip=["b"])
    (['law a', 'law c'], {'b': 'skipped'})
    """
    names = list(registry)
    if laws is not None:
        names = _names("laws", laws)
    skipped = _names("skip", skip)
    unknown = [repr(name) for name in names + skipped if name not in registry]
    if unknown:
        raise ValueError(
            f"found {', '.join(unknown)}, expected names of laws: {', '.join(registry)}"
        )
    selected: list[L] = []
    for name, law in registry.items():
        if name in names and name not in skipped:
            selected.append(law)
    return selected, dict.fromkeys(skipped, "skipped")


def _names(argument: str, laws: Iterable[str | LawFunction]) -> list[str]:
    if isinstance(laws, str):  # its letters would be taken for names
        raise TypeError(f"{argument}: found {laws!r}, expected a list of laws: [{laws!r}]")
    # The name of a function, or the string itself. Another value, such as a `Law`, is then reported as unknown.
    return [str(getattr(law, "__name__", law)) for law in laws]


@contextmanager
def without_torchs_own_warnings() -> Generator[None]:
    """Ignore torch's warnings about its own use of ``torch.jit``, in forward mode and inductor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit")
        yield


def _check_one(
    function: LawFunction, tx: Transform, example: Example, options: dict[str, Any]
) -> None:
    """Check a law on a copy of one example, and raise every error as `LawViolation`, which shows this example.

    A law is a function of a transform, parameters and the gradients of each step, which raises an error if it does not
    hold.
    """
    name = function.__name__
    try:
        # A copy, so that a transform that overwrites its input does not change the example in the message.
        function(tx, *example.map(copied), **options)
    except LawViolation:  # raised by another law that this one calls
        raise
    except Breach as breach:  # a comparison within the law has failed
        raise LawViolation(name, tx, breach.leaf, breach.found, example) from None
    except Exception as error:
        # Tracers append pages of advice, so only the first paragraph is shown; the cause has the whole message.
        paragraph = str(error).split("\n\n")[0]
        message = " ".join(paragraph.split())
        # A law that changes the gradients of the example notes the change, which the example does not show.
        for change in getattr(error, "__notes__", ()):
            message += f" ({change})"
        raise LawViolation(
            name, tx, None, f"raised {type(error).__name__}: {message}", example
        ) from error


def law(
    *,
    on: Callable[[Example], Example | list[Example]] = lambda example: example,
    unless: Callable[[Transform], str | None] = lambda tx: None,
    share: float = 1.0,
) -> Callable[[LawFunction], LawFunction]:
    """Register a function as a law (a property that every transform must have).

    The function receives a transform, parameters, and a list with the gradients of each step. It raises an error,
    such as an AssertionError, if the law does not hold.

    Args:
        on: a function that prepares each generated example, for example by converting it to float64. If it returns a
            list, the law is checked on each example of the list.
        unless: a function from a transform to the reason why the law does not apply to it, or to None.
        share: the fraction of the generated examples on which the law is checked.

    Returns:
        A decorator. The decorated function checks the law on a copy of the example that ``on`` returns, and raises
        every error as `LawViolation`.

    Example:
        >>> import muonfx as mfx
        >>> @law()
        ... def updates_are_small(tx, params, steps):
        ...     updates, _ = tx.update(steps[0], tx.init(params), params)
        ...     assert mfx.tree.norm(updates) < 1, "an update is large"
        >>> updates_are_small(mfx.scale(9.0), *Example.of({"w": (3,)}))
        Traceback (most recent call last):
            ...
        muonfx.testing.violation.LawViolation: updates_are_small does not hold for scale(factor=9.0)
          raised AssertionError: an update is large
          ...
        >>> del LAWS["updates_are_small"]
    """

    def register(function: LawFunction) -> LawFunction:
        check = _on_prepared_examples(function, on)
        name = function.__name__
        # "algebra" of "muonfx.testing.laws.algebra"
        family = function.__module__.rpartition(".")[2]
        LAWS[name] = Law(name, check, family, why_not=unless, share=share)
        return check

    return register


def _on_prepared_examples(
    function: LawFunction, prepare: Callable[[Example], Example | list[Example]]
) -> LawFunction:
    """Return a law that checks ``function`` on a prepared example, or on each of them if ``prepare`` returns a list."""

    @functools.wraps(function)
    def check(tx: Transform, params: PyTree, steps: list[PyTree], **options: Any) -> None:
        examples = prepare(Example(params, list(steps)))
        if isinstance(examples, Example):
            examples = [examples]
        for example in examples:
            _check_one(function, tx, example, options)

    return check
