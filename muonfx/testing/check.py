"""Checking of one transform against all laws that apply to it, on generated examples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import hypothesis
import hypothesis.errors
import torch
from hypothesis import strategies as st

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.checks import INIT_RUNS_ON_META, positive_int
from muonfx.core.transform import check_extras
from muonfx.internal.display import format_count
from muonfx.internal.progress import reporting
from muonfx.testing import laws as _  # noqa: F401 - fills LAWS
from muonfx.testing.examples import Example, params_and_grads, standard_examples
from muonfx.testing.extras import Extra, WrittenExtra, with_extras
from muonfx.testing.law import LAWS, Law, LawFunction, select
from muonfx.testing.violation import LawViolation, LawViolations


@dataclass(frozen=True)
class LawReport:
    """The result of `check_transform`: the laws that hold for a transform, and the laws that were not checked.

    Attributes:
        tx: the repr of the transform.
        held: a dict from the name of each law that holds to the number of examples on which it was checked.
        left_out: a dict from the name of each law that was not checked to the reason.

    >>> print(
    ...     LawReport(
    ...         "scale(factor=2.0)",
    ...         {"identity_is_neutral": 10},
    ...         {"pickle_gives_an_equal_transform": "skipped"},
    ...     )
    ... )
    scale(factor=2.0): 1 law holds
      identity_is_neutral (10 examples)
    left out
      pickle_gives_an_equal_transform: skipped
    """

    tx: str
    held: dict[str, int]
    left_out: dict[str, str]

    def __str__(self) -> str:
        """Return the report as text, with a line for each law."""
        lines = [f"{self.tx}: {format_count(len(self.held), 'law holds', 'laws hold')}"]
        for name, count in self.held.items():
            lines.append(f"  {name} ({format_count(count, 'example', 'examples')})")
        if self.left_out:
            lines.append("left out")
        for name, reason in self.left_out.items():
            lines.append(f"  {name}: {reason}")
        return "\n".join(lines)


def laws_for(tx: Transform) -> dict[str, str | None]:
    """Return a dict with the name of every law: None if it applies to the transform, else the reason why not.

    >>> import muonfx as mfx
    >>> reasons = laws_for(mfx.clip_by_global_norm(1.0))
    >>> reasons["update_remembers_nothing"] is None, reasons["element_transforms_see_one_element"]
    (True, 'its locality is TREE')
    """
    reasons: dict[str, str | None] = {}
    for name, law in LAWS.items():
        reasons[name] = law.why_not(tx)
    return reasons


@functools.cache
def _strategy(ranks: tuple[int, int]) -> st.SearchStrategy[Example]:
    return params_and_grads(ranks=ranks)


def suitable_params(tx: Transform) -> st.SearchStrategy[Example]:
    """Return a hypothesis strategy that draws examples (parameters and gradients) which the transform accepts.

    The transform is first tried on a tree whose leaves have any number of dims. If it raises an error, it is tried on a
    tree whose leaves have two or more dims.

    Raises:
        TypeError: the transform raises an error on both trees; the message begins with this error. Parameters of
            certain names are given as a strategy: ``st.just(Example.of({"layer.weight": (4, 3)}))``.

    >>> import muonfx as mfx
    >>> from hypothesis import given
    >>> @given(suitable_params(mfx.orthogonalize()))
    ... def has_matrices(example):
    ...     assert all(leaf.ndim >= 2 for leaf in mfx.tree.tensors(example.params))
    >>> has_matrices()
    """
    return _strategy(_suitable_ranks(tx))


def _require_transform(tx: object) -> None:
    if not isinstance(tx, Transform):
        name = getattr(tx, "__name__", type(tx).__name__)
        raise TypeError(
            f"found {tx!r}, expected a Transform: call a factory to get one, as in {name}()"
        )


def _suitable_ranks(tx: Transform) -> tuple[int, int]:
    """Return the minimal and maximal number of dims of the leaves that the transform accepts.

    >>> import muonfx as mfx
    >>> _suitable_ranks(mfx.scale(2.0)), _suitable_ranks(mfx.orthogonalize())
    ((0, 4), (2, 4))
    """
    _require_transform(tx)
    if _error_of_a_step(tx, (0, 4)) is None:
        return 0, 4
    # A transform of matrices has raised an error about scalars or vectors. An error about matrices is a mistake.
    error = _error_of_a_step(tx, (2, 4))
    if error is not None:
        raise _raised_on_examples(tx, error) from error
    return 2, 4


def _error_of_a_step(tx: Transform, ranks: tuple[int, int]) -> Exception | None:
    """Return the error that a step on leaves with these numbers of dims raises, or None."""
    params, steps = standard_examples(ranks)[0]
    try:
        tx.update(steps[0], tx.init(params), params)
    except WrittenExtra:  # a mistake on any tree, which a law reports
        return None
    except Exception as error:
        return error
    return None


def _raised_on_examples(tx: Transform, error: Exception) -> TypeError:
    """Return the error for a transform that raises an error both on leaves of 0 to 4 dims and on matrices."""
    if INIT_RUNS_ON_META in str(error):  # other examples would raise it too
        return TypeError(f"{error}. The transform is {tx!r}")
    return TypeError(
        f"{tx.name} raised {type(error).__name__}: {error}\n(on parameters of 2 to 4 dims)\n"
        "Expected a transform that accepts parameters of 0 to 4 dims, or of 2 to 4 dims. If it requires parameters of "
        "certain names or of other shapes, give check_transform a strategy of examples, as in "
        "params=st.just(testing.Example.of({'layer.weight': (4, 3)})) with hypothesis.strategies as st, or "
        f"params=testing.params_and_grads(ranks=(2, 2)). The transform is {tx!r}"
    )


def check_transform(
    tx: Transform,
    *,
    laws: Iterable[str | LawFunction] | None = None,
    skip: Iterable[str | LawFunction] = (),
    params: st.SearchStrategy[Example] | None = None,
    max_examples: int | None = None,
    seed: int | None = None,
    updates_dtype: torch.dtype | Callable[[torch.dtype], torch.dtype] | None = None,
    extras: Mapping[str, Extra] | None = None,
    stop_at_first: bool = True,
    progress: bool | Callable[[str], None] = True,
) -> LawReport:
    """Check a transform against every law that applies to it, on generated trees of parameters and gradients.

    Args:
        tx: the transform.
        laws: the laws to check, as names or functions. None: all laws.
        skip: the laws not to check, as names or functions.
        params: a hypothesis strategy that draws `Example` values, such as ``params_and_grads(ranks=(2, 2))``, or
            ``st.just(Example.of({"layer.weight": (4, 3)}))`` for a transform of named parameters. None:
            `suitable_params`, and `standard_examples`.
        max_examples: the number of examples that are made. Each law is checked on a part of them: from a half, for fast
            laws, to a hundredth, such as compilation; at least one. `LawReport` has the numbers. None: the number in
            the hypothesis profile.
        seed: the seed of the examples. None: the hypothesis profile decides whether examples are reproducible.
        updates_dtype: the documented dtype of the updates, if it is not the dtype of the gradients; or a function from
            the dtype of a parameter to the dtype of its update.
        extras: the extra arguments of every update, such as ``{"value": 0.5}`` for a transform that reads the loss: a
            dict from each name to a number, a 0-d tensor, or a function of the number of the step, which receives and
            returns a 0-d tensor. `with_extras` passes them.
        stop_at_first: True: raise at the first law that does not hold, since it often explains later ones. False: check
            all laws, and then raise one `LawViolations` with every violation.
        progress: True: the law that is checked is shown on stderr; on a terminal it replaces the law before, elsewhere
            a line is printed every three seconds. False: nothing is shown. A function: it is called with one line for
            each law, such as ``"muon: law 3 of 58, empty_trees_are_taken"``.

    Returns:
        A `LawReport`, which prints as a list of the laws that hold and of the laws that were left out.

    Raises:
        LawViolation: a law does not hold. The message names the law, the leaf and the values found, and shows the
            smallest example that was found.
        LawViolations: with ``stop_at_first=False``, one or more laws do not hold. The message has all their messages.
        ValueError: a name in ``laws`` or ``skip`` is not the name of a law; or ``max_examples`` is below 1.
        TypeError: without ``params``, the transform raises an error on the examples of `suitable_params`. Or it
            requires an extra argument that ``extras`` lacks, or does not accept a name in ``extras``. Or ``laws`` or
            ``skip`` is a string, not a list.

    >>> import muonfx as mfx
    >>> report = check_transform(
    ...     mfx.scale(2.0),
    ...     laws=["identity_is_neutral", "update_remembers_nothing"],
    ...     max_examples=5,
    ...     progress=print,
    ... )
    scale: law 1 of 2, update_remembers_nothing
    scale: law 2 of 2, identity_is_neutral
    >>> list(report.held)
    ['update_remembers_nothing', 'identity_is_neutral']
    """
    _require_transform(tx)
    tx = _with_extras(tx, extras or {})
    number = hypothesis.settings().max_examples
    if max_examples is not None:
        positive_int("max_examples", max_examples)
        number = max_examples
    applicable, left_out = _applicable_laws(tx, laws, skip)
    if not applicable:
        return LawReport(repr(tx), {}, left_out)

    standard: list[Example] = []
    if params is None:
        ranks = _suitable_ranks(tx)
        params = _strategy(ranks)
        standard = standard_examples(ranks)[: number - number // 4]  # the others are drawn
    drawn = _drawn(params, number - len(standard), seed)

    held: dict[str, int] = {}
    violations: list[LawViolation] = []
    with reporting(progress) as report:
        for index, law in enumerate(applicable, start=1):
            report(f"{tx.name}: law {index} of {len(applicable)}, {law.name}")
            check = _check_of_example(law, tx, updates_dtype)
            examples = _share(law.share, standard, drawn)
            violation = _first_violation(check, examples)
            if violation is None:
                held[law.name] = len(examples)
                continue
            smaller = None
            if law.share >= SLOW:
                smaller = _shrunk(check, params, number, seed)
            smallest = smaller or _on_one_leaf(check, violation)
            if stop_at_first:
                # The error within the law, if it raised one.
                raise smallest from violation.__cause__
            violations.append(smallest)
    if violations:
        raise LawViolations(violations)
    return LawReport(repr(tx), held, left_out)


def _applicable_laws(
    tx: Transform, laws: Iterable[str | LawFunction] | None, skip: Iterable[str | LawFunction]
) -> tuple[list[Law], dict[str, str]]:
    """Return the selected laws that apply to a transform, and a dict from the name of each other law to the reason."""
    selected, left_out = select(LAWS, laws, skip)
    applicable: list[Law] = []
    for law in selected:
        why_not = law.why_not(tx)
        if why_not is None:
            applicable.append(law)
        else:
            left_out[law.name] = why_not
    return applicable, left_out


def _with_extras(tx: Transform, extras: Mapping[str, Extra]) -> Transform:
    """Return a transform that passes extra arguments to every update of ``tx``; without any, return ``tx`` itself."""
    if tx.extras.required - extras.keys():
        raise _requires_extras(tx)
    # The names, with some number as their values.
    check_extras(tx, dict.fromkeys(extras, torch.ones(())))
    if not extras:
        return tx
    return with_extras(tx, {name: _as_number(extra) for name, extra in extras.items()})


def _as_number(extra: Any) -> Any:
    """Return a number as a float32 tensor, which is a numeric argument of `with_extras`; other values as they are.

    Laws change numeric arguments and take derivatives by them. A float in a dict would be fixed.
    """
    if isinstance(extra, int | float) and not isinstance(extra, bool):
        return torch.tensor(extra, dtype=torch.float32)
    return extra


def _requires_extras(tx: Transform) -> TypeError:
    """Return the error for a transform with an extra argument, such as ``value``, that has no default."""
    names = sorted(tx.extras.required)
    expected = ", ".join([f"{name!r}: 0.5" for name in names])
    return TypeError(
        f"{tx.name} requires the extra argument {'= and '.join(names)}=: give check_transform the values of every "
        f"update, as in extras={{{expected}}}. A value is a number, a 0-d tensor, or a function of the step"
    )


Check = Callable[[Example], None]
"""A function that checks a law on an example, and raises `LawViolation` if the law does not hold."""


def _check_of_example(law: Law, tx: Transform, updates_dtype: Any) -> Check:
    """Return a function that checks a law of a transform on an example."""
    if law.name == "updates_look_like_the_gradients":  # the only law with an option
        return lambda example: law.check(tx, *example, updates_dtype=updates_dtype)
    return lambda example: law.check(tx, *example)


def _first_violation(check: Check, examples: list[Example]) -> LawViolation | None:
    """Return the violation of the first example on which a law does not hold, or None if it holds on all."""
    try:
        for example in examples:
            check(example)
    except LawViolation as violation:
        return violation
    return None


def _share(share: float, standard: list[Example], drawn: list[Example]) -> list[Example]:
    """Return the fraction ``share`` of the examples, at least one: half of them standard examples, half drawn ones.

    If there are too few of one kind, there are more of the other. Drawn examples are sorted by size; the largest is
    among those returned, and so are others of all sizes.
    """
    count = math.ceil((len(standard) + len(drawn)) * share)
    drawn_count = min(count // 2, len(drawn))
    standard_share = standard[: count - drawn_count]
    return standard_share + _evenly_spaced(drawn, count - len(standard_share))


def _evenly_spaced(examples: list[Example], count: int) -> list[Example]:
    """Return a number of items at equal distances in a list: the last one first, then earlier ones.

    Of 90 items, 10 are those with the indices -1, -10, -19 and so on.
    """
    return [examples[-1 - number * len(examples) // count] for number in range(count)]


def _size(example: Example) -> tuple[int, int]:
    """Return the number of elements and the number of tensors of an example."""
    tensors = list(tree.tensors(example))
    return sum(leaf.numel() for leaf in tensors), len(tensors)


def _for_each(
    function: Check, strategy: st.SearchStrategy[Example], number: int, seed: int | None
) -> None:
    """Call a function on a number of examples that a hypothesis strategy draws.

    If it raises an error, hypothesis shrinks the example to the smallest with an error, and raises this error.
    """
    settings = hypothesis.settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=seed is None and hypothesis.settings().derandomize,  # a seed excludes it
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType] - an Enum of its own kind
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,  # the violation shows the example
    )

    # hypothesis runs tests: functions that it decorates and then calls once for each drawn example.
    @settings
    @hypothesis.given(strategy)
    def call_on_drawn(example: Example) -> None:
        function(example)

    test = call_on_drawn
    if seed is not None:
        test = hypothesis.seed(seed)(test)
    test()


def _drawn(strategy: st.SearchStrategy[Example], number: int, seed: int | None) -> list[Example]:
    """Return a number of examples that a hypothesis strategy draws, sorted by size.

    Drawing takes longer than most laws. So the list is cached if the next call would draw the same examples: with a
    seed, or in a hypothesis profile without randomness.
    """
    if seed is not None or hypothesis.settings().derandomize:
        return _drawn_once(strategy, number, seed)
    return _newly_drawn(strategy, number, seed)


def _newly_drawn(
    strategy: st.SearchStrategy[Example], number: int, seed: int | None
) -> list[Example]:
    examples: list[Example] = []
    if number:  # hypothesis accepts no 0
        _for_each(examples.append, strategy, number, seed)
    examples.sort(key=_size)
    return examples


_drawn_once = functools.cache(_newly_drawn)


SLOW = 0.05
"""A law checked on less than this share of the examples is too slow for hypothesis to shrink a counterexample."""


def _shrunk(
    check: Check, strategy: st.SearchStrategy[Example], number: int, seed: int | None
) -> LawViolation | None:
    """Return the `LawViolation` of the smallest example that hypothesis finds by shrinking, or None if none fails.

    The examples are drawn again, since hypothesis can shrink only an example that it has drawn itself.
    """
    try:
        _for_each(check, strategy, max(number, 100), seed)
    except LawViolation as violation:
        return violation
    except hypothesis.errors.Flaky:  # the law fails only sometimes, so no example can be shrunk
        pass
    return None


def _on_one_leaf(check: Check, violation: LawViolation) -> LawViolation:
    """Return a violation on an example with a single leaf, which is easier to understand; else the given violation.

    Each leaf of the example of the given violation is checked alone, until one violates the law too. For parameters
    ``{"w": ..., "b": ...}``, these are the examples with ``{"w": ...}`` and with ``{"b": ...}``.
    """
    example = violation.example
    # A law may raise a violation without an example, or with one that is no dict of leaves.
    if not isinstance(example, Example) or not isinstance(example.params, dict):
        return violation
    for name in example.params:
        example_of_leaf = example.map_trees(lambda values, name=name: {name: values[name]})
        # Without an error, the law holds on this leaf alone, so try the next.
        try:
            check(example_of_leaf)
        except LawViolation as smaller_violation:
            return smaller_violation
    return violation  # only several leaves together violate the law
