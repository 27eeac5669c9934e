"""Checking of one transform against all laws that apply to it, on generated examples."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import hypothesis
import hypothesis.errors
import torch
from hypothesis import strategies as st

from muonfx import tree
from muonfx.core import Transform
from muonfx.internal.progress import reporting
from muonfx.testing import laws as _  # noqa: F401 - fills LAWS
from muonfx.testing.examples import Example, params_and_grads, standard_examples
from muonfx.testing.law import LAWS, Law, LawFunction
from muonfx.testing.violation import LawViolation


@dataclass(frozen=True)
class LawReport:
    """The result of `check_transform`: the laws that hold for a transform, and the laws that were not checked.

    Attributes:
        tx: the repr of the transform.
        held: a dict from the name of each law that holds to the number of examples on which it was checked.
        left_out: a dict from the name of each law that was not checked to the reason.

    >>> print(
    ...     LawReport("scale(factor=2.0)", {"identity_is_neutral": 10}, {"pickle_gives_an_equal_transform": "skipped"})
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
        lines = [f"{self.tx}: {_counted(len(self.held), 'law holds', 'laws hold')}"]
        for name, count in self.held.items():
            lines.append(f"  {name} ({_counted(count, 'example', 'examples')})")
        if self.left_out:
            lines.append("left out")
        for name, reason in self.left_out.items():
            lines.append(f"  {name}: {reason}")
        return "\n".join(lines)


def _counted(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def laws_for(tx: Transform) -> dict[str, str | None]:
    """Return a dict with the name of every law: None if it applies to the transform, else the reason why not.

    >>> import muonfx as mfx
    >>> found = laws_for(mfx.clip_by_global_norm(1.0))
    >>> found["update_remembers_nothing"] is None, found["element_transforms_see_one_element"]
    (True, 'its locality is TREE')
    """
    reasons: dict[str, str | None] = {}
    for name, law in LAWS.items():
        reasons[name] = law.why_not(tx)
    return reasons


def _selected(laws: Iterable[str | LawFunction]) -> list[Law]:
    """Return the laws with these names, in the order of `LAWS`."""
    names: list[str] = []
    unknown: list[str] = []
    for law in laws:
        name = str(getattr(law, "__name__", law))  # of a function, or the name itself
        names.append(name)
        if name not in LAWS:
            unknown.append(repr(name))
    if unknown:
        raise ValueError(f"found {', '.join(unknown)}, expected names of laws: {', '.join(LAWS)}")
    return [law for name, law in LAWS.items() if name in names]


_SHAPES_OF_RANKS = {
    (0, 4): {"w": (2, 3), "b": (2,), "s": (), "k": (2, 1, 2), "empty": (0, 3)},
    (2, 4): {"w": (2, 3), "k": (2, 1, 2), "empty": (0, 3)},
}
"""By the minimal and maximal number of dims of leaves: the shapes on which a transform is tried."""


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
        raise TypeError(f"found {tx!r}, expected a Transform: call a factory to get one, as in {name}()")


def _suitable_ranks(tx: Transform) -> tuple[int, int]:
    """Return the minimal and maximal number of dims of the leaves that the transform accepts: (0, 4) or (2, 4)."""
    _require_transform(tx)
    errors: list[Exception] = []
    for ranks, shapes in _SHAPES_OF_RANKS.items():
        params, steps = Example.of(shapes, steps=1)
        try:
            tx.update(steps[0], tx.init(params), params)
        except Exception as error:
            errors.append(error)
        else:
            return ranks
    error_on_any, error_on_matrices = errors
    raise _raised_on_examples(tx, error_on_any, error_on_matrices) from error_on_matrices


def _raised_on_examples(tx: Transform, error_on_any: Exception, error_on_matrices: Exception) -> TypeError:
    """Return the error for a transform that raises both on leaves of 0 to 4 dims and on matrices."""
    text_of_any = f"{type(error_on_any).__name__}: {error_on_any}"
    text = f"{type(error_on_matrices).__name__}: {error_on_matrices}"
    message = f"{tx.name} raised {text}\n(on parameters of 2 to 4 dims"
    # On vectors, a transform of matrices raises an error about its input, not the mistake that its author looks for.
    if text_of_any == text:
        message += ", and of 0 to 4 dims)"
    else:
        message += f"; on parameters of 0 to 4 dims {text_of_any})"
    return TypeError(
        f"{message}\nExpected a transform that accepts one of them. If it requires parameters of certain names or of "
        "other shapes, give check_transform a strategy of examples, as in "
        "params=st.just(testing.Example.of({'layer.weight': (4, 3)})) with hypothesis.strategies as st, or "
        f"params=testing.params_and_grads(ranks=(2, 2)). The transform is {tx!r}"
    )


Check = Callable[[Example], None]
"""A function that checks a law on an example, and raises `LawViolation` if the law does not hold."""


@dataclass(frozen=True)
class _Examples:
    """The examples of one call of `check_transform`, which all laws use: drawing takes longer than most laws.

    Attributes:
        standard: those of the `standard_examples` that are used, most important first.
        drawn: the drawn examples, those with more elements later.
        strategy: the strategy that drew them, used again to shrink a counterexample.
        number: the number of examples that hypothesis draws to shrink a counterexample.
        seed: the seed of the strategy, or None.
    """

    standard: list[Example]
    drawn: list[Example]
    strategy: st.SearchStrategy[Example]
    number: int
    seed: int | None

    @classmethod
    def of(cls, tx: Transform, params: st.SearchStrategy[Example] | None, number: int, seed: int | None) -> _Examples:
        """Draw ``number`` examples; if no strategy is given, some of them are the `standard_examples`."""
        standard: list[Example] = []
        if params is None:
            ranks = _suitable_ranks(tx)
            params = _strategy(ranks)
            number_drawn = number // 4  # at least
            standard = standard_examples(ranks)[: number - number_drawn]
        drawn: list[Example] = []
        if number > len(standard):
            drawn = _drawn(params, number - len(standard), seed)
        return cls(standard, sorted(drawn, key=_size), params, number, seed)

    @property
    def pool(self) -> list[Example]:
        """All examples."""
        return [*self.drawn, *self.standard]

    def share(self, share: float) -> list[Example]:
        """Return a share of the examples, at least one: half of them the first standard ones, and drawn ones.

        The drawn examples are evenly spaced from the largest to smaller ones.
        """
        count = math.ceil(len(self.pool) * share)
        standard_count = max(math.ceil(count / 2), count - len(self.drawn))
        examples = self.standard[:standard_count]
        drawn_count = count - len(examples)
        for index in range(drawn_count):
            examples.append(self.drawn[-1 - index * len(self.drawn) // drawn_count])
        return examples

    def smallest_violation(self, law: Law, check: Check, violation: LawViolation) -> LawViolation:
        """Return the violation on the smallest example that breaks the law: shrunk, drawn, or one leaf of the first."""
        shrunk = None
        if law.share >= SLOW:
            shrunk = _shrunk(check, self.strategy, self.number, self.seed)
        return shrunk or _smallest_unshrunk(check, self.pool, violation.example) or violation


def _size(example: Example) -> tuple[int, int]:
    """Return the number of elements and the number of tensors of an example."""
    tensors = list(tree.tensors(example))
    return sum(leaf.numel() for leaf in tensors), len(tensors)


def check_transform(
    tx: Transform,
    *,
    laws: Iterable[str | LawFunction] | None = None,
    skip: Iterable[str | LawFunction] = (),
    params: st.SearchStrategy[Example] | None = None,
    max_examples: int | None = None,
    seed: int | None = None,
    updates_dtype: torch.dtype | Callable[[torch.dtype], torch.dtype] | None = None,
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
        max_examples: the number of examples for each law. Slow laws, such as compilation, use a part of them. None:
            the number in the hypothesis profile.
        seed: the seed of the examples. None: the hypothesis profile decides whether examples are reproducible.
        updates_dtype: the documented dtype of the updates, if it is not the dtype of the gradients; or a function from
            the dtype of a parameter to the dtype of its update.
        progress: True: the law that is checked is shown on stderr; on a terminal it replaces the law before, elsewhere
            a line is printed every three seconds. False: nothing is shown. A function: it is called with one line for
            each law, such as ``"muon: law 3 of 58, empty_trees_are_taken"``.

    Returns:
        A `LawReport`, which prints as a list of the laws that hold and of the laws that were left out.

    Raises:
        LawViolation: a law does not hold. The message names the law, the leaf and the values found, and shows the
            smallest example that was found.
        ValueError: a name in ``laws`` or ``skip`` is not the name of a law.
        TypeError: without ``params``, the transform raises an error on the examples of `suitable_params`.

    >>> import muonfx as mfx
    >>> report = check_transform(
    ...     mfx.scale(2.0), laws=["identity_is_neutral", "update_remembers_nothing"], max_examples=5, progress=print
    ... )
    scale: law 1 of 2, update_remembers_nothing
    scale: law 2 of 2, identity_is_neutral
    >>> list(report.held)
    ['update_remembers_nothing', 'identity_is_neutral']
    """
    _require_transform(tx)
    skipped = _selected(skip)
    checked: list[Law] = []
    left_out: dict[str, str] = {}
    for law in _selected(LAWS if laws is None else laws):
        why_not = law.why_not(tx)
        if law in skipped:
            why_not = "skipped"
        if why_not is None:
            checked.append(law)
        else:
            left_out[law.name] = why_not
    if not checked:
        return LawReport(repr(tx), {}, left_out)

    examples = _Examples.of(tx, params, max_examples or hypothesis.settings().max_examples, seed)
    held: dict[str, int] = {}
    with reporting(progress) as report:
        for number, law in enumerate(checked, start=1):
            report(f"{tx.name}: law {number} of {len(checked)}, {law.name}")
            options: dict[str, Any] = {}
            if updates_dtype is not None and "updates_dtype" in inspect.signature(law.check).parameters:
                options["updates_dtype"] = updates_dtype
            held[law.name] = _check_law(law, tx, examples, options)
    return LawReport(repr(tx), held, left_out)


def _check_law(law: Law, tx: Transform, examples: _Examples, options: dict[str, Any]) -> int:
    """Check one law, and return the number of examples on which it was checked.

    Raises:
        LawViolation: the law does not hold; with the smallest example that shows it.
    """
    check = functools.partial(_check_example, law, tx, options)
    examples_of_law = examples.share(law.share)
    try:
        for example in examples_of_law:
            check(example)
    except LawViolation as violation:
        smallest = examples.smallest_violation(law, check, violation)
        raise smallest from violation.__cause__  # the error within the law, if it raised one
    return len(examples_of_law)


def _check_example(law: Law, tx: Transform, options: dict[str, Any], example: Example) -> None:
    law.check(tx, *example, **options)


def _for_each(function: Check, strategy: st.SearchStrategy[Example], number: int, seed: int | None) -> None:
    """Call a function on drawn examples. If it raises an error, hypothesis shrinks the example and raises it again."""
    settings = hypothesis.settings(
        max_examples=number,
        deadline=None,
        database=None,
        derandomize=seed is None and hypothesis.settings().derandomize,  # a seed excludes it
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),  # pyright: ignore[reportArgumentType] - an Enum of its own kind
        report_multiple_bugs=False,
        print_blob=False,
    )

    @settings
    @hypothesis.given(strategy)
    def call_on_drawn(example: Example) -> None:
        function(example)

    if seed is None:
        call_on_drawn()
    else:
        hypothesis.seed(seed)(call_on_drawn)()


_pools: dict[Any, list[Example]] = {}


def _drawn(strategy: st.SearchStrategy[Example], number: int, seed: int | None) -> list[Example]:
    """Return a list of drawn examples. All laws use the same list, because drawing takes longer than most laws.

    The list is cached if the examples are reproducible.
    """
    fixed = seed is not None or hypothesis.settings().derandomize
    if fixed and (strategy, number, seed) in _pools:
        return _pools[strategy, number, seed]
    pool: list[Example] = []
    _for_each(pool.append, strategy, number, seed)
    if fixed:
        _pools[strategy, number, seed] = pool
    return pool


SLOW = 0.05
"""A law checked on less than this share of the examples is too slow for hypothesis to shrink a counterexample."""


def _smallest_unshrunk(check: Check, pool: list[Example], failing: object) -> LawViolation | None:
    """Return the `LawViolation` of the smallest example that breaks a law, in the pool or a small one.

    The small ones are the single leaves of the example ``failing``, which broke the law. Only ten examples are tried,
    because this is for laws that are slow.
    """
    nonempty = [example for example in pool if any(_size(example))]
    candidates = sorted(_single_leaves(failing) + nonempty, key=_size)
    for candidate in candidates[:10]:
        try:
            check(candidate)
        except LawViolation as violation:
            return violation
    return None


def _single_leaves(example: object) -> list[Example]:
    """Return an example with one leaf for each leaf of an example whose parameters are a dict; else none."""
    if not isinstance(example, Example) or not isinstance(example.params, dict):
        return []
    return [example.map_trees(lambda values, name=name: {name: values[name]}) for name in example.params]


def _shrunk(check: Check, strategy: st.SearchStrategy[Example], number: int, seed: int | None) -> LawViolation | None:
    """Return the `LawViolation` of the smallest example that hypothesis finds by shrinking, or None if none fails."""
    try:
        _for_each(check, strategy, max(number, 100), seed)
    except LawViolation as violation:
        # A new object, without hypothesis' notes about the same example.
        return LawViolation(violation.law, violation.tx, violation.leaf, violation.found, violation.example)
    except hypothesis.errors.Flaky:  # the law fails only sometimes, so no example can be shrunk
        pass
    return None
