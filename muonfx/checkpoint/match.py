"""Match the leaves of a checkpoint with a requested state, and report every difference in one error.

The stored leaves first get the new names that the caller gives them by ``rename``. Then `moved_leaves` finds states
that only moved in the tree. All other leaves have equal names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import accumulate

import torch

from muonfx.checkpoint.errors import mismatch
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.leaves import PARAMS, SCHEDULER, StateSpec, described, in_section, plain_names
from muonfx.checkpoint.sources import Shapes, equal_levels, sources
from muonfx.core.chain_differences import differences_of_chains
from muonfx.core.checks import warn_caller
from muonfx.internal.arguments import close_names
from muonfx.internal.display import format_list
from muonfx.internal.renaming import Rename, new_names, prefix_renaming
from muonfx.tree import Spec
from muonfx.tree.dtypes import widens

Allow = bool | str | Collection[str]
"""An ``allow_...`` argument of `load`: True for all leaves, False for none, or one or more patterns of names."""


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a leaf name: it is the name, its first levels, or a glob like ``*/mu/*``."""
    return name == pattern or name.startswith(pattern.rstrip("/") + "/") or fnmatchcase(name, pattern)


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Return whether any of the patterns matches a leaf name."""
    return any(matches(pattern, name) for pattern in patterns)


def patterns_of(argument: str, allow: Allow) -> tuple[str, ...]:
    """Convert an ``allow_...`` argument of `load` to a tuple of patterns: True to ``("*",)``, False to ``()``.

    ``argument`` is its name, such as "allow_missing", for an error about another type.
    """
    if isinstance(allow, bool):
        return ("*",) if allow else ()
    if isinstance(allow, str):
        return (allow,)
    if not isinstance(allow, Collection) or not all(isinstance(pattern, str) for pattern in allow):
        raise TypeError(
            f"{argument} must be True, False, or names of leaves, found {allow!r}: pass a list of names, first levels "
            f"of names, or globs, such as {argument}=['momentum/trace']"
        )
    return tuple(allow)


class Rules:
    """The arguments of `load` that allow differences between a checkpoint and ``like``, such as ``allow_missing``."""

    def __init__(
        self,
        allow_missing: Allow = False,
        allow_extra: Allow = False,
        allow_other_chain: bool = False,
        cast: Mapping[str, torch.dtype] | None = None,
        rename: Rename | None = None,
    ) -> None:
        self.allow_missing = patterns_of("allow_missing", allow_missing)
        self.allow_extra = patterns_of("allow_extra", allow_extra)
        self.allow_other_chain = allow_other_chain
        self.cast = {} if cast is None else cast
        self.rename = rename or {}
        if not isinstance(allow_other_chain, bool):
            raise TypeError(f"allow_other_chain must be True or False, found {allow_other_chain!r}")
        if not isinstance(self.cast, Mapping):
            raise TypeError(
                f"cast must be a dict from names of leaves to dtypes, found {cast!r}: pass names, first levels of "
                "names, or globs, such as cast={'momentum/trace': torch.bfloat16}"
            )
        for pattern, dtype in self.cast.items():
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"cast: {pattern!r} has the value {dtype!r}, expected a torch.dtype, without quotes")

    def arguments(self) -> dict[str, str]:
        """Return a dict from argument name to text, to compare between ranks."""
        texts: dict[str, str] = {}
        for name, value in vars(self).items():
            texts[name] = repr(value)
            if isinstance(value, Mapping):  # equal dicts may have other orders
                texts[name] = repr(sorted(value.items()))
        return texts


def match(
    index: Index,
    expected: StateSpec,
    rules: Rules,
    *,
    section: str | None,
    where: str,
    objects: Collection[str] | None = None,
) -> dict[str, str | None]:
    """Return a dict from leaf name in ``expected``, the requested state, to the leaf's name in the checkpoint.

    A leaf that is missing has None. Raise `MismatchError` with all differences that ``rules`` does not allow.

    Args:
        index: the index of the checkpoint.
        expected: the requested state.
        rules: the differences that are allowed.
        section: "params" to match parameters, "" to match a state, None to match both.
        where: the path of the checkpoint, for messages.
        objects: the names of values that are no tensors and that an optimizer loads; None if none are loaded.
    """
    new_name_of = plain_names(index.leaves)
    problems: list[str] = []  # of rename=
    if rules.rename:
        new_name_of, problems = new_names(new_name_of, rules.rename)
    stored_name_of = _names_in_section(new_name_of, section, problems)
    moved: dict[str, str] = {}
    if section == "":
        stored_shapes = {name: index.leaves[stored_name].spec.shape for name, stored_name in stored_name_of.items()}
        moved = moved_leaves(stored_shapes, expected, rules)
    if moved and rules.allow_other_chain:
        stored_name_of = _with_moved_leaves(stored_name_of, expected, moved)
    comparison = _Comparison(index, expected, rules, section, objects, stored_name_of, moved)
    comparison.check_all(problems, new_name_of.values())
    if comparison.problems:
        raise mismatch(where, comparison.problems, comparison.advice)
    if moved and rules.allow_other_chain:
        warn_caller(f"{where}: found other names than in `like`, loaded {_moved_text(moved)}")
    return {name: stored_name_of.get(name) for name in expected.leaves}


# ------------------------------------------------------------------------------------------------------------ renaming


def _names_in_section(new_name_of: Mapping[str, str], section: str | None, problems: list[str]) -> dict[str, str]:
    """Return a dict from the new name of each leaf in a section to its name in the checkpoint.

    ``new_name_of`` has the leaves of all sections. A text is added to ``problems`` for two leaves with one new name,
    and for a parameter whose new name does not begin with the section.
    """
    stored_name_of: dict[str, str] = {}
    for stored_name, new_name in new_name_of.items():
        if section is None or in_section(new_name, section):
            if new_name in stored_name_of:
                problems.append(f"both {stored_name_of[new_name]!r} and {stored_name!r} would be {new_name!r}")
            stored_name_of[new_name] = stored_name
        elif section and in_section(stored_name, section):
            problems.append(f"{stored_name!r} would be {new_name!r}, expected a name that begins with '{section}/'")
    return stored_name_of


# -------------------------------------------------------------------------------------------------------- moved states


def moved_leaves(stored: Shapes, expected: StateSpec, rules: Rules) -> dict[str, str]:
    """Return a dict from each leaf of a state that only moved in the tree to its name in the checkpoint.

    A state may be under another label or in a chain now: ``{"partition/muon/trace/w": "muon/trace/w"}``. The dict is
    empty if a step count would have several values: those of several states that become one, or that of the leaf with
    its name and that of the parameters that moved.
    """
    all_shapes = {name: spec.shape for name, spec in expected.leaves.items()}
    shapes = _leaves_to_match(all_shapes, stored, rules.allow_missing)
    stored_shapes = _leaves_to_match(stored, all_shapes, rules.allow_extra)
    if shapes.keys() <= stored_shapes.keys() or stored_shapes.keys() <= shapes.keys():  # the usual case
        return {}
    source_of, equal_counts = sources(shapes, stored_shapes)
    moved: dict[str, str] = {}
    for name, source in source_of.items():
        if name in equal_counts:
            return {}
        if name == source:
            continue
        if name in stored:
            return {}
        moved[name] = source
    return _moved_with_parameters(moved, shapes)


def _leaves_to_match(shapes: Shapes, partners: Shapes, allowed: Iterable[str]) -> Shapes:
    """Return the leaves except those that have no partner, and that an ``allowed`` pattern matches."""
    patterns = [pattern for pattern in allowed if pattern != "*"]  # states that "*" matches may have moved, too
    leaves: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name in partners or not matches_any(patterns, name):
            leaves[name] = shape
    return leaves


def _moved_with_parameters(moved: Mapping[str, str], shapes: Shapes) -> dict[str, str]:
    """Return the moved leaves except 0-d leaves with other levels than the moved states of parameters.

    A step count alone is not evidence of a move: the one with the closest name may be of another transform. If the
    whole state has only 0-d leaves, as of a schedule, all are returned.
    """
    if not any(shapes.values()):
        return dict(moved)
    moves_of_parameters = {_move(name, source) for name, source in moved.items() if shapes[name]}
    leaves: dict[str, str] = {}
    for name, source in moved.items():
        if _move(name, source) in moves_of_parameters:
            leaves[name] = source
    return leaves


def _with_moved_leaves(
    stored_name_of: Mapping[str, str], expected: StateSpec, moved: Mapping[str, str]
) -> dict[str, str]:
    """Return ``stored_name_of`` with the leaves of moved states under their names in ``expected``."""
    names = dict(stored_name_of)
    for source in moved.values():
        if source not in expected.leaves:
            names.pop(source, None)  # a scalar may be the source of several leaves
    for name, source in moved.items():
        names[name] = stored_name_of[source]
    return names


def _moved_text(moved: Mapping[str, str]) -> str:
    """Return moved states as text: "'adamw' as 'partition/adamw', the whole state as 'inner'"."""
    return ", ".join(dict.fromkeys([_move(name, source) for name, source in moved.items()]))  # each once


def _move(name: str, source: str) -> str:
    """Return the levels that differ between the names of a leaf as text: "'adamw' as 'partition/adamw'"."""
    equal = equal_levels(name, source)
    return f"{_upper_levels(source, equal)} as {_upper_levels(name, equal)}"


def _upper_levels(name: str, lower: int) -> str:
    """Return the levels of a name above its last ``lower`` ones as text: "'muon'", or "the whole state" for none."""
    levels = name.split("/")[:-lower]
    return repr("/".join(levels)) if levels else "the whole state"


# -------------------------------------------------------------------------------------------------------------- checks


def _unmatched(names: Iterable[str], partners: Collection[str], allowed: Collection[str]) -> list[str]:
    """Return the names that have no partner and match none of the ``allowed`` patterns."""
    return [name for name in names if name not in partners and not matches_any(allowed, name)]


@dataclass
class _Comparison:
    """Finds the differences between a checkpoint and the requested state, and what the caller can do about them."""

    index: Index
    expected: StateSpec
    rules: Rules
    section: str | None
    """The section of the names: "params" for parameters, "" for a state, None for both."""
    objects: Collection[str] | None
    """The names of values that are no tensors and that an optimizer loads; None if none are loaded."""
    stored_name_of: Mapping[str, str]
    """The name in the checkpoint of each leaf, by its name after renaming."""
    moved: Mapping[str, str]
    """The leaves that `moved_leaves` has found under other names."""
    problems: list[str] = field(default_factory=list)
    """A sentence about each difference that the rules do not allow."""
    advice: list[str] = field(default_factory=list)
    """Sentences about how the caller can solve the problems."""

    def check_all(self, renaming_problems: Sequence[str], new_names: Iterable[str]) -> None:
        """Report all differences; ``new_names`` are the names in the checkpoint after renaming, of all sections."""
        self._check_renaming(renaming_problems)
        self._check_chain()
        self._check_patterns([*new_names, *self.expected, *self.index.objects, *(self.objects or ())])
        self._check_names()
        self._check_leaves()

    def _check_renaming(self, problems: Sequence[str]) -> None:
        """Report the problems of ``rename=``."""
        if not problems:
            return
        self.problems += [f"rename:    {problem}" for problem in problems]
        self.advice.append(
            "rename= maps names in the checkpoint to names in `like`: whole names, first levels of names, or patterns "
            "such as {'*/encoder.*': '*/model.encoder.*'}"
        )

    def _check_chain(self) -> None:
        """Report that another chain wrote the state, and which states could be loaded under other names."""
        if self.rules.allow_other_chain:
            return
        fingerprint = self.index.fingerprint
        expected = self.expected
        is_known = fingerprint is not None and expected.fingerprint is not None
        is_other = is_known and fingerprint != expected.fingerprint
        if is_other:
            differences = differences_of_chains(str(self.index.chain), str(expected.chain)).structure
            self.problems += [f"chain:     {difference}" for difference in differences]
            self.advice.append(
                "to continue the saved run: create the transform with the arguments in the checkpoint; "
                "mfx.checkpoint.inspect(path).chain is the code of the whole chain"
            )
        if is_other or self.moved:  # moved states show that it is another chain, also if it is not known
            names = f", which loads {_moved_text(self.moved)}" if self.moved else ""
            self.advice.append(f"if the state has the same meaning for this chain: allow_other_chain=True{names}")
            self._advise_load_changed()

    def _check_patterns(self, names: Collection[str]) -> None:
        """Report patterns of the caller that match none of the leaf names."""
        rules = self.rules
        arguments = {"allow_missing": rules.allow_missing, "allow_extra": rules.allow_extra, "cast": rules.cast}
        for argument, patterns in arguments.items():
            for pattern in patterns:
                if pattern == "*" or any(matches(pattern, name) for name in names):
                    continue
                similar = format_list(close_names(pattern.strip("*/"), names, "/")) or "none"
                self.problems.append(
                    f"{argument}: {pattern!r} matches no leaf of the checkpoint or of `like`, similar: {similar}; "
                    "correct or remove it: a name, the first levels of names, or a glob"
                )

    def _check_names(self) -> None:
        """Report leaves, groups and schedulers that only the checkpoint or only the requested state has."""
        expected = self.expected.leaves
        missing = _unmatched(expected, self.stored_name_of, self.rules.allow_missing)
        for name in missing:
            self.problems.append(f"missing:   {name!r}, {described(expected[name])}, is not in the checkpoint")
        extra = _unmatched(self.stored_name_of, expected, self.rules.allow_extra)
        self.problems += [f"extra:     {name!r} is in the checkpoint and not in `like`" for name in extra]
        self._advise_about_names(missing, extra)
        if self.objects is None:  # `like` is no optimizer
            return
        if missing or extra:  # the chain may be unknown, as in a state dict that `Writer` has written
            self._advise_load_changed()
        stored_objects = self.index.objects
        for name in _unmatched(self.objects, stored_objects, self.rules.allow_missing):
            self.problems.append(f"missing:   {name!r} is not in the checkpoint")
            self.advice.append(
                f"to restore all but {name!r}: allow_missing=[{name!r}]; to store it: save the optimizer itself, not "
                "its transform_state, with scheduler= if it has one"
            )
        if SCHEDULER in stored_objects and _unmatched([SCHEDULER], self.objects, self.rules.allow_extra):
            self.problems.append(f"extra:     {SCHEDULER!r} is in the checkpoint, and scheduler= is not given")
            self.advice.append(f"to load it: scheduler=; to ignore it: allow_extra=[{SCHEDULER!r}]")

    def _advise_about_names(self, missing: Sequence[str], extra: Sequence[str]) -> None:
        """Add the arguments that allow ``missing`` leaves, and ``extra`` leaves of the checkpoint."""
        if missing and self._are_params(missing):
            self.advice = ["to load parameters: load_params(path, like); to load a state: like=tx.init(params)"]
            return
        if missing and extra and not self.moved:
            self.advice.append(f"if only the names of leaves differ: rename={self._renaming_text(missing, extra)}")
        if missing:
            patterns = shortest_levels(missing, self.expected)
            self.advice.append(f"to keep the values of `like` for missing leaves: allow_missing={patterns}")
        if extra:
            patterns = shortest_levels(extra, self.stored_name_of)
            self.advice.append(f"to ignore leaves of the checkpoint: allow_extra={patterns}")

    def _are_params(self, missing: Sequence[str]) -> bool:
        """Return whether the leaves that are missing in the state are the parameters, which are in another section."""
        return self.section == "" and all(f"{PARAMS}/{name}" in self.index.leaves for name in missing)

    def _renaming_text(self, missing: Sequence[str], extra: Sequence[str]) -> str:
        """Return the ``repr`` of a dict that renames ``extra`` leaves to ``missing`` ones, or a description of it."""
        renaming = None
        if not self.rules.rename:  # else the caller's own did not help, so no other is derived
            renaming = prefix_renaming(extra, missing)
        return repr(renaming) if renaming else "{name in the checkpoint: name in `like`}"

    def _advise_load_changed(self) -> None:
        """Add the call that continues a run with other labels, layers or transforms."""
        self.advice.append(
            f"if labels, layers or transforms have changed since: mfx.checkpoint.load_changed(path, {self._like}) "
            "loads what fits, and returns an account of the rest"
        )

    @property
    def _like(self) -> str:
        """The second argument of the call in an advice: "like", or "optimizer" if it is one."""
        return "like" if self.objects is None else "optimizer"

    def _check_leaves(self) -> None:
        """Report leaves whose shape or dtype differs in a way that the rules do not allow."""
        narrowed: list[str] = []
        reshaped: list[str] = []
        for name, spec in self.expected.leaves.items():
            stored_name = self.stored_name_of.get(name)
            if stored_name is None:  # missing, or kept as it is in `like`
                continue
            stored = self.index.leaves[stored_name].spec
            if stored == spec and not self.rules.cast:  # the usual case
                continue
            cast_dtypes = {dtype for pattern, dtype in self.rules.cast.items() if matches(pattern, name)}
            if stored.shape != spec.shape:
                reshaped.append(name)
                self.problems.append(
                    f"reshaped:  {name!r} has shape {stored.shape} in the checkpoint, expected {spec.shape}"
                )
            if stored.dtype != spec.dtype and self._has_codes(stored_name):
                self.problems.append(
                    f"codes:     {name!r} holds codes of {stored.dtype}, which have no meaning as {spec.dtype}"
                )
            elif cast_dtypes:
                self._check_cast(name, spec, cast_dtypes)
            elif not widens(stored.dtype, spec.dtype):
                narrowed.append(name)
                self.problems.append(f"narrowing: {name!r} is {stored.dtype} in the checkpoint, expected {spec.dtype}")
        if reshaped:
            self._advise_shapes(reshaped)
        if narrowed:
            self._advise_cast(narrowed)

    def _advise_cast(self, narrowed: Sequence[str]) -> None:
        """Add the argument that allows to round leaves to a narrower dtype."""
        cast = {**self.rules.cast, **cast_of(narrowed, self.expected.leaves)}
        self.advice.append(
            f"to round: cast={cast} (keys are names, first levels of names, or globs); to keep the values: use a chain "
            "with the state dtype of the checkpoint"
        )

    def _advise_shapes(self, reshaped: Sequence[str]) -> None:
        """Add the calls that load the leaves of a checkpoint other than the ``reshaped`` ones."""
        if self.section == PARAMS:
            to_ignore = [*self.rules.allow_extra, *reshaped]
            advice = f"load_params(path, like={{the parameters that fit}}, allow_extra={to_ignore})"
        else:
            advice = f"mfx.checkpoint.load_changed(path, {self._like})"
        self.advice.append(f"to keep what fits: {advice}")

    def _check_cast(self, name: str, spec: Spec, cast_dtypes: set[torch.dtype]) -> None:
        """Report that ``cast=`` has another dtype than ``like``; it allows rounding, but does not choose the dtype."""
        if cast_dtypes == {spec.dtype}:
            return
        texts = ", ".join(sorted(map(str, cast_dtypes)))
        self.problems.append(f"cast:      {name!r} has dtype {spec.dtype} in `like`, and cast= gives {texts}")
        self.advice.append("cast= allows rounding to the dtype in `like`: to load another dtype, make `like` with it")

    def _has_codes(self, stored_name: str) -> bool:
        """Return whether a leaf has the codes of a quantized state, as "trace/codes/w" if "trace/scales/w" exists.

        A label may be "codes", too: "partition/codes/trace/codes/w". The codes of one tensor are "trace/codes".
        """
        levels = stored_name.split("/")
        for position, level in enumerate(levels):
            if position == 0 or level != "codes":
                continue
            scales_name = "/".join([*levels[:position], "scales", *levels[position + 1 :]])
            if scales_name in self.index.leaves:
                return True
        return False


def cast_of(narrowed: Iterable[str], leaves: Mapping[str, Spec]) -> dict[str, torch.dtype]:
    """Return the argument ``cast`` of `load` that rounds the ``narrowed`` leaves, by the fewest first levels of names.

    ``leaves`` has all leaves of the requested state. Each level matches only leaves of one dtype.

    >>> half = Spec((), torch.bfloat16)
    >>> cast_of(["mu/a", "mu/b"], {"mu/a": half, "mu/b": half, "nu/a": Spec((), torch.float32)})
    {'mu': torch.bfloat16}
    """
    names_of_dtype: dict[torch.dtype, list[str]] = {}
    for name in narrowed:
        names_of_dtype.setdefault(leaves[name].dtype, []).append(name)
    cast: dict[str, torch.dtype] = {}
    for dtype, names in names_of_dtype.items():
        names_of_others = [name for name, spec in leaves.items() if spec.dtype != dtype]
        cast.update(dict.fromkeys(shortest_levels(names, [*names, *names_of_others]), dtype))
    return cast


def shortest_levels(names: Collection[str], all_names: Iterable[str]) -> list[str]:
    """Return the fewest first levels of names that match ``names`` and none of the other names in ``all_names``.

    >>> shortest_levels(["mu/a", "mu/b"], ["mu/a", "mu/b", "nu/a"])
    ['mu']
    """
    other_levels: set[str] = set()
    for name in {*all_names} - {*names}:
        other_levels.update(_first_levels(name))
    chosen: list[str] = []
    for name in names:
        unique_levels = [levels for levels in _first_levels(name) if levels not in other_levels]
        chosen.append(unique_levels[0] if unique_levels else name)
    return list(dict.fromkeys(chosen))  # each once


def _first_levels(name: str) -> list[str]:
    """Return the first levels of a name, the shortest first: "a", "a/b" and "a/b/c" for "a/b/c"."""
    return [*accumulate(name.split("/"), "{}/{}".format)]
