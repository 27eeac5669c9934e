"""Match the leaves of a checkpoint with a requested state, and report every difference in one error.

The stored leaves first get the new names that the caller gives them by ``rename``. Then `moved_leaves` finds states
that only moved in the tree. All other leaves have equal names.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from muonfx.checkpoint.errors import mismatch, narrowing, reshaped
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.leaves import (
    PARAMS,
    SCHEDULER,
    StateSpec,
    described,
    in_section,
    plain_names,
)
from muonfx.checkpoint.sources import Shapes, equal_levels, find_sources
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
    return (
        name == pattern or name.startswith(pattern.rstrip("/") + "/") or fnmatchcase(name, pattern)
    )


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Return whether any of the patterns matches a leaf name."""
    return any(matches(pattern, name) for pattern in patterns)


def patterns_of(argument: str, allow: Allow) -> tuple[str, ...]:
    """Convert an ``allow_...`` argument of `load`, which may have several types, to a tuple of patterns.

    A pattern matches names of leaves. ``argument`` is the name of the argument, such as "allow_missing", for the error
    about a value of another type.

    >>> (
    ...     patterns_of("allow_missing", True),
    ...     patterns_of("allow_missing", False),
    ...     patterns_of("allow_missing", "adam/mu"),
    ... )
    (('*',), (), ('adam/mu',))
    """
    if isinstance(allow, bool):  # all names, or none
        return ("*",) if allow else ()
    if isinstance(allow, str):  # one pattern; a string is a collection too, of its characters
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
        """Check the arguments, and store patterns of names: True becomes ``("*",)``, and "mu" becomes ``("mu",)``."""
        self.allow_missing = patterns_of("allow_missing", allow_missing)
        self.allow_extra = patterns_of("allow_extra", allow_extra)
        if not isinstance(allow_other_chain, bool):
            raise TypeError(f"allow_other_chain must be True or False, found {allow_other_chain!r}")
        self.allow_other_chain = allow_other_chain
        self.cast = {} if cast is None else cast
        _require_dtypes(self.cast)
        self.rename = rename or {}

    def arguments(self) -> dict[str, str]:
        """Return a dict from argument name to text, to compare between ranks: ``{"allow_extra": "('*',)", ...}``."""
        texts: dict[str, str] = {}
        for name, value in vars(self).items():
            texts[name] = repr(value)
            if isinstance(value, Mapping):  # equal dicts may have other orders
                texts[name] = repr(sorted(value.items()))
        return texts


def _require_dtypes(cast: object) -> None:
    """Raise unless the argument ``cast`` of `load` is a dict such as ``{"momentum/trace": torch.bfloat16}``.

    Likely mistakes are a dtype alone, and a dtype as a string, ``{"momentum/trace": "bfloat16"}``.
    """
    if not isinstance(cast, Mapping):
        raise TypeError(
            f"cast must be a dict from names of leaves to dtypes, found {cast!r}: pass names, first levels of "
            "names, or globs, such as cast={'momentum/trace': torch.bfloat16}"
        )
    for pattern, dtype in cast.items():
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"cast: {pattern!r} has the value {dtype!r}, expected a torch.dtype, without quotes"
            )


def match(
    index: Index,
    expected: StateSpec,
    rules: Rules,
    *,
    section: str | None,
    where: str,
    objects: Collection[str] | None = None,
) -> dict[str, SavedLeaf]:
    """Return a dict from leaf name in ``expected``, the requested state, to the leaf of the checkpoint.

    Missing leaves are left out. Raise `MismatchError` with all differences that ``rules`` does not allow.

    Args:
        index: the index of the checkpoint.
        expected: the requested state.
        rules: the differences that are allowed.
        section: "params" to match parameters, "" to match a state, None to match both.
        where: the path of the checkpoint, for messages.
        objects: the names of values that are no tensors and that an optimizer loads; None if none are loaded.
    """
    # 1. The stored leaves by their names without prefixes of wrappers, and after the caller's renaming.
    all_saved, mistakes = saved_leaves(index, rules.rename, section)
    saved = {name: leaf for name, leaf in all_saved.items() if in_section(name, section)}
    # 2. States that have other names because their transforms moved in the tree. Parameters have no transforms.
    moved: dict[str, str] = {}
    if section == "":
        saved_shapes = {name: leaf.spec.shape for name, leaf in saved.items()}
        moved = moved_leaves(saved_shapes, expected, rules)
    loads_moved = bool(moved) and rules.allow_other_chain
    if loads_moved:
        saved = _under_new_names(saved, moved, expected)
    # 3. All differences that remain, in one error.
    comparison = _Comparison(index, expected, rules, section, objects, saved, moved)
    comparison.compare(mistakes, all_saved)
    if comparison.problems:
        raise mismatch(where, comparison.problems, comparison.advice)
    if loads_moved:
        warn_caller(f"{where}: found other names than in `like`, loaded {_moved_text(moved)}")
    return {name: saved[name] for name in expected.leaves if name in saved}


# ------------------------------------------------------------------------------------------------------------ renaming


class SavedLeaf(NamedTuple):
    """A leaf of a checkpoint, which is found by its name after ``rename=``, such as "trace/b"."""

    stored_name: str
    """The name in the checkpoint, with the prefixes of wrappers such as ``torch.compile``: "trace/_orig_mod.a"."""
    plain_name: str
    """The name without the prefixes, before renaming: "trace/a"."""
    spec: Spec


def saved_leaves(
    index: Index, rename: Rename, section: str | None
) -> tuple[dict[str, SavedLeaf], list[str]]:
    """Return the leaves of a checkpoint by their names after renaming, and error texts about mistakes in ``rename``.

    ``section`` is "params" to load parameters, "" for a state, or None for both. Mistakes in other sections are left
    out, but the leaves of all sections are returned.

    >>> from muonfx.checkpoint.index import Leaf
    >>> index = Index(leaves={"trace/_orig_mod.a": Leaf(Spec((2,), torch.float32), chunks=())})
    >>> saved_leaves(index, {"trace/a": "trace/b"}, section="")[0]["trace/b"].stored_name
    'trace/_orig_mod.a'
    """
    plain_name_of = plain_names(index.leaves)
    new_name_of = dict(plain_name_of)
    mistakes: list[str] = []
    if rename:
        new_name_of, mistakes = new_names(plain_name_of, rename)
    mistakes += _mistakes_in_new_names(new_name_of, section)
    saved: dict[str, SavedLeaf] = {}
    for stored_name, new_name in new_name_of.items():
        saved[new_name] = SavedLeaf(
            stored_name, plain_name_of[stored_name], index.leaves[stored_name].spec
        )
    return saved, [f"rename:    {mistake}" for mistake in mistakes]


ADVICE_ON_RENAMING = (
    "rename= maps names in the checkpoint to names in `like`: whole names, first levels of names, or patterns such as "
    "{'*/encoder.*': '*/model.encoder.*'}"
)


def _mistakes_in_new_names(new_name_of: Mapping[str, str], section: str | None) -> list[str]:
    """Return an error text for two leaves that get one name by ``rename=``, and for a parameter that leaves "params".

    ``section`` is "params" if parameters are loaded, "" for a state, or None for both.

    >>> _mistakes_in_new_names({"trace/a": "trace/c", "trace/b": "trace/c"}, "")
    ["both 'trace/a' and 'trace/b' would be 'trace/c'"]
    >>> _mistakes_in_new_names({"params/a": "b"}, "params")
    ["'params/a' would be 'b', expected a name that begins with 'params/'"]
    """
    mistakes: list[str] = []
    stored_name_of: dict[str, str] = {}
    for stored_name, new_name in new_name_of.items():
        if in_section(new_name, section):
            if new_name in stored_name_of:
                mistakes.append(
                    f"both {stored_name_of[new_name]!r} and {stored_name!r} would be {new_name!r}"
                )
            stored_name_of[new_name] = stored_name
        elif section == PARAMS and in_section(stored_name, PARAMS):  # as parameters are loaded
            mistakes.append(
                f"{stored_name!r} would be {new_name!r}, expected a name that begins with '{PARAMS}/'"
            )
    return mistakes


# -------------------------------------------------------------------------------------------------------- moved states


def moved_leaves(stored: Shapes, expected: StateSpec, rules: Rules) -> dict[str, str]:
    """Find the leaves that have other names in the checkpoint, because their transform was elsewhere in the tree.

    A state may be under another label or in a chain now: the result ``{"partition/muon/trace/w": "muon/trace/w"}`` has
    the new name and the name in the checkpoint. It is empty if nothing has moved, or if it is not certain which leaf
    has moved. ``stored`` has the shapes of the leaves in the checkpoint.
    """
    # Leaves that the caller allows to be missing or extra have no partner to search for.
    all_shapes = {name: spec.shape for name, spec in expected.leaves.items()}
    shapes = _leaves_to_match(all_shapes, stored, rules.allow_missing)
    stored_shapes = _leaves_to_match(stored, all_shapes, rules.allow_extra)
    if shapes.keys() <= stored_shapes.keys() or stored_shapes.keys() <= shapes.keys():
        return {}  # the usual case: no leaf has another name, at most some are missing or extra
    # `source_of` has the name in the checkpoint for each leaf, and `equal_counts` all counts that a step count may
    # come from.
    source_of, equal_counts = find_sources(shapes, stored_shapes)
    moved = {name: stored_name for name, stored_name in source_of.items() if name != stored_name}
    # Several states become one, whose step counts may differ; or a leaf that is stored would get another one's values.
    is_uncertain = bool(equal_counts) or not moved.keys().isdisjoint(stored)
    if is_uncertain:
        return {}
    return _without_lone_counts(moved, shapes)


def _under_new_names(
    saved: Mapping[str, SavedLeaf], moved: Mapping[str, str], expected: StateSpec
) -> dict[str, SavedLeaf]:
    """Return the leaves of a checkpoint, those that have moved under their new names, as `moved_leaves` returns them.

    They then match the requested state like all other leaves. An old name stays if the requested state has it, too.
    """
    renamed = dict(saved)
    for name, old_name in moved.items():
        renamed[name] = saved[old_name]
    for old_name in moved.values():
        if old_name not in expected.leaves:
            renamed.pop(old_name, None)  # a step count may have moved to several names
    return renamed


def _leaves_to_match(shapes: Shapes, partners: Shapes, allowed: Iterable[str]) -> Shapes:
    """Leave out the leaves that the caller allows to be missing or extra, because no other leaf need be found for them.

    ``shapes`` has the leaves of the checkpoint and ``partners`` the leaves of the requested state, or the reverse. A
    leaf that both have stays, whatever the ``allowed`` patterns are: "mu/a" in the example, but not "mu/b".

    >>> _leaves_to_match({"mu/a": (2,), "mu/b": (2,), "nu/b": (2,)}, {"mu/a": (2,)}, allowed=["mu"])
    {'mu/a': (2,), 'nu/b': (2,)}
    """
    # States that "*" matches may have moved, too.
    patterns = [pattern for pattern in allowed if pattern != "*"]
    to_match: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name in partners or not matches_any(patterns, name):
            to_match[name] = shape
    return to_match


def _without_lone_counts(moved: Mapping[str, str], shapes: Shapes) -> dict[str, str]:
    """Leave out the step counts that seem to have moved, although no state of a parameter has made the same move.

    A step count alone does not show a move: the one with the closest name may be of another transform. If the requested
    state has nothing but step counts, as of a schedule, all of them stay.

    Args:
        moved: the name in the checkpoint of each moved leaf.
        shapes: the shapes of all leaves of the requested state.

    >>> shapes = {"new/adam/mu/w": (2,), "new/adam/count": (), "decay/count": ()}
    >>> moved = {
    ...     "new/adam/mu/w": "adam/mu/w",
    ...     "new/adam/count": "adam/count",
    ...     "decay/count": "warmup/count",
    ... }
    >>> _without_lone_counts(moved, shapes)
    {'new/adam/mu/w': 'adam/mu/w', 'new/adam/count': 'adam/count'}
    """
    if all(shape == () for shape in shapes.values()):
        return dict(moved)
    moves_of_parameters: set[tuple[str, str]] = set()
    for name, stored_name in moved.items():
        if shapes[name] != ():
            moves_of_parameters.add(_move(stored_name, name))
    remaining: dict[str, str] = {}
    for name, stored_name in moved.items():
        if _move(stored_name, name) in moves_of_parameters:
            remaining[name] = stored_name
    return remaining


def _move(stored_name: str, name: str) -> tuple[str, str]:
    """Return the old and the new name of the transform that moved: two names of a leaf without their equal last levels.

    >>> _move("old/adam/mu/w", "new/adam/mu/w"), _move("adam/mu/w", "new/adam/mu/w")
    (('old', 'new'), ('', 'new'))
    """
    count = equal_levels(stored_name, name)  # at least 1, the parameter or the name of a number
    old_levels = stored_name.split("/")[:-count]
    new_levels = name.split("/")[:-count]
    return "/".join(old_levels), "/".join(new_levels)


def _moved_text(moved: Mapping[str, str]) -> str:
    """Return moved states as text, each move once: "'old' as 'new', the whole state as 'inner'"."""
    texts: dict[str, None] = {}  # each once, in order
    for name, stored_name in moved.items():
        old_transform, new_transform = _move(stored_name, name)
        texts[f"{_quoted(old_transform)} as {_quoted(new_transform)}"] = None
    return ", ".join(texts)


def _quoted(transform: str) -> str:
    """Return the name of a transform in quotes, or "the whole state" for ""."""
    if transform == "":
        return "the whole state"
    return repr(transform)


# -------------------------------------------------------------------------------------------------------------- checks


def _unmatched(
    names: Iterable[str], partners: Collection[str], allowed: Collection[str]
) -> list[str]:
    """Return the names that have no partner and match none of the ``allowed`` patterns."""
    return [name for name in names if name not in partners and not matches_any(allowed, name)]


@dataclass
class _Comparison:
    """A checkpoint and the requested state, and their differences, which `compare` finds."""

    index: Index
    expected: StateSpec
    rules: Rules
    section: str | None
    """The section of the names: "params" for parameters, "" for a state, None for both."""
    objects: Collection[str] | None
    """The names of values that are no tensors and that an optimizer loads; None if none are loaded."""
    saved: Mapping[str, SavedLeaf]
    """The leaves of the checkpoint that belong to the section, by their names after renaming."""
    moved: Mapping[str, str]
    """The leaves that `moved_leaves` has found under other names."""
    problems: list[str] = field(default_factory=list[str])
    """An error text for each difference that the rules do not allow."""
    advice: list[str] = field(default_factory=list[str])
    """Sentences about how the caller can solve the problems."""

    def compare(self, renaming_problems: Sequence[str], saved_names: Iterable[str]) -> None:
        """Add an error text for each difference of any kind that the caller's rules do not allow, and advice.

        Args:
            renaming_problems: error texts about mistakes in ``rename=``, which were found before.
            saved_names: the names of all leaves of the checkpoint, after renaming.
        """
        missing = _unmatched(self.expected, self.saved, self.rules.allow_missing)
        extra = _unmatched(self.saved, self.expected, self.rules.allow_extra)
        all_names = [*saved_names, *self.expected, *self.index.objects, *(self.objects or ())]
        # 1. The arguments of the caller.
        if renaming_problems:
            self.problems += renaming_problems
            self.advice.append(ADVICE_ON_RENAMING)
        self.compare_chains()
        self.check_patterns(all_names)
        # Parameters in place of a state: no other chain, pattern or renaming helps.
        if self.are_params(missing):
            self.advice.clear()
        # 2. The leaves.
        self.compare_names(missing, extra)
        self.compare_objects()
        self.compare_shapes()
        self.compare_dtypes()

    def compare_chains(self) -> None:
        """Add the differences between the chain that wrote the state and the one that will use it.

        A chain is the transform with all that it contains, such as "chain(momentum(), scale(-0.1))". Its fingerprint is
        a hash of its structure, and None if the state was saved, or is loaded, without its transform. ``self.moved``
        has the leaves that now have another name because their transform is elsewhere in the chain.
        """
        saved_fingerprint = self.index.fingerprint
        fingerprint = self.expected.fingerprint
        both_are_known = saved_fingerprint is not None and fingerprint is not None
        has_other_fingerprint = both_are_known and saved_fingerprint != fingerprint
        # Moved leaves show that it is another chain, also without fingerprints. They add only advice here:
        # `compare_names` reports them as missing and extra.
        is_other_chain = has_other_fingerprint or bool(self.moved)
        if self.rules.allow_other_chain or not is_other_chain:
            return
        to_allow = "if the state has the same meaning for this chain: allow_other_chain=True"
        if self.moved:
            to_allow += f", which loads {_moved_text(self.moved)}"
        if has_other_fingerprint:
            # Each is a text such as "nesterov: not set in the checkpoint, False here".
            structure = differences_of_chains(
                str(self.index.chain), str(self.expected.chain)
            ).structure
            self.problems += [f"chain:     {difference}" for difference in structure]
            self.advice.append(
                "to continue the saved run: create the transform with the arguments in the checkpoint; "
                "mfx.checkpoint.inspect(path).chain is the code of the whole chain"
            )
        self.advice += [to_allow, self.advice_to_load_changed()]

    def check_patterns(self, names: Collection[str]) -> None:
        """Add an error text for each pattern of the caller that matches none of the leaf names: probably a typo.

        For ``allow_missing=["momntum/trace"]``, the text suggests "momentum/trace". ``names`` are the names on both
        sides, in the checkpoint and in the requested state.
        """
        rules = self.rules
        arguments = {
            "allow_missing": rules.allow_missing,
            "allow_extra": rules.allow_extra,
            "cast": rules.cast,
        }
        for argument, patterns in arguments.items():
            for pattern in patterns:
                # The pattern "*" comes from True, which allows all leaves and need not match one.
                is_for_all = pattern == "*"
                if not is_for_all and not any(matches(pattern, name) for name in names):
                    self.problems.append(_useless_pattern(argument, pattern, names))

    def compare_names(self, missing: Sequence[str], extra: Sequence[str]) -> None:
        """Add an error text for each ``missing`` leaf, and for each ``extra`` leaf of the checkpoint.

        For example "missing: 'trace/w', (2, 3) float32, is not in the checkpoint", with the advice "to keep the values
        of `like` for missing leaves: allow_missing=['trace']".
        """
        if not missing and not extra:
            return
        for name in missing:
            spec = self.expected.leaves[name]
            self.problems.append(
                f"missing:   {name!r}, {described(spec)}, is not in the checkpoint"
            )
        for name in extra:
            self.problems.append(f"extra:     {name!r} is in the checkpoint and not in `like`")
        # The caller has passed parameters as `like`, in place of a state.
        if self.are_params(missing):
            self.advice.append(
                "to load parameters: load_params(path, like); to load a state: like=tx.init(params)"
            )
        else:
            self.advice += self.advice_on_names(missing, extra)
        is_optimizer = self.objects is not None
        if is_optimizer:  # its chain may be unknown, as in a state dict by `Writer`
            self.advice.append(self.advice_to_load_changed())

    def advice_on_names(self, missing: Sequence[str], extra: Sequence[str]) -> list[str]:
        """Return sentences about the arguments of `load` that help with ``missing`` and ``extra`` leaves.

        For example ["to ignore leaves of the checkpoint: allow_extra=['adamw/mu']"].
        """
        # The section is "model", for example, if the checkpoint has "model/w".
        model_section = self.section_of_model(missing)
        if model_section is not None:
            renaming = {model_section: PARAMS}
            return [
                f"the checkpoint has these parameters as dcp.save writes a model: rename={renaming}"
            ]
        advice: list[str] = []
        # Each side has a name that the other lacks: perhaps one leaf.
        if missing and extra and not self.moved:
            advice.append(self.advice_to_rename(missing, extra))
        if missing:
            patterns = shortest_levels(missing, self.expected)
            advice.append(
                f"to keep the values of `like` for missing leaves: allow_missing={patterns}"
            )
        if extra:
            patterns = shortest_levels(extra, self.saved)
            advice.append(f"to ignore leaves of the checkpoint: allow_extra={patterns}")
        return advice

    def section_of_model(self, missing: Sequence[str]) -> str | None:
        """Return the first levels, such as "model", under which the checkpoint has a missing parameter, or None.

        ``dcp.save({"model": ...})`` writes the parameter "w" as "model/w", and ``missing`` has it as "params/w".
        """
        if self.section != PARAMS:
            return None
        missing_params = {name.removeprefix(f"{PARAMS}/") for name in missing}
        for stored_name in self.index.leaves:
            section, _, param = stored_name.rpartition("/")  # "model" and "w" of "model/w"
            is_of_model = section.split("/")[-1] == "model"
            if is_of_model and param in missing_params:
                return section
        return None

    def are_params(self, missing: Sequence[str]) -> bool:
        """Return whether the missing leaves are parameters: "w" is missing in the state, and "params/w" is stored."""
        has_all = all(f"{PARAMS}/{name}" in self.index.leaves for name in missing)
        return self.section == "" and len(missing) > 0 and has_all

    def advice_to_rename(self, missing: Sequence[str], extra: Sequence[str]) -> str:
        """Return a sentence with the ``rename=`` that gives the ``extra`` leaves the names of the ``missing`` ones.

        For "trace/a" and "trace/b" in the checkpoint, and "trace/model.a" and "trace/model.b" in ``like``, it has
        "rename={'trace/*': 'trace/model.*'}". If the names do not differ by one prefix, it describes the argument.
        """
        argument = "{name in the checkpoint: name in `like`}"
        # A caller who renames leaves already has names that one prefix does not explain.
        if not self.rules.rename:
            renaming = prefix_renaming(extra, missing)
            if renaming:
                argument = repr(renaming)
        return f"if only the names of leaves differ: rename={argument}"

    def compare_objects(self) -> None:
        """Compare the param groups and the scheduler of an optimizer, which the checkpoint or the caller may lack.

        ``self.objects`` are the names of those to load, ``{"param_groups", "scheduler"}`` or one of them.
        """
        if self.objects is None:  # `like` is no optimizer
            return
        for name in _unmatched(self.objects, self.index.objects, self.rules.allow_missing):
            self.problems.append(f"missing:   {name!r} is not in the checkpoint")
            self.advice.append(
                f"to restore all but {name!r}: allow_missing=[{name!r}]; to store it: save the optimizer itself, not "
                "its transform_state, with scheduler= if it has one"
            )
        # A saved scheduler that is not loaded would be forgotten, so it is ignored only on request. Groups need no such
        # check: an optimizer always requests them, unless `allow_extra=` names them.
        if SCHEDULER in _unmatched(self.index.objects, self.objects, self.rules.allow_extra):
            self.problems.append(
                f"extra:     {SCHEDULER!r} is in the checkpoint, and scheduler= is not given"
            )
            self.advice.append(f"to load it: scheduler=; to ignore it: allow_extra=[{SCHEDULER!r}]")

    def pairs(self) -> Iterator[tuple[str, Spec, SavedLeaf]]:
        """Yield the name, the expected shape and dtype, and the leaf of the checkpoint for each leaf that it has."""
        for name, spec in self.expected.leaves.items():
            if name in self.saved:  # else it is missing, or kept as it is in `like`
                yield name, spec, self.saved[name]

    def compare_shapes(self) -> None:
        """Add an error text for each leaf that has another shape in the checkpoint, which no rule allows."""
        reshaped_names: list[str] = []
        for name, spec, saved_leaf in self.pairs():
            if saved_leaf.spec.shape != spec.shape:
                self.problems.append(reshaped(name, saved_leaf.spec.shape, spec.shape))
                reshaped_names.append(name)
        if reshaped_names:
            self.advice.append(self.advice_on_shapes(reshaped_names))

    def advice_on_shapes(self, reshaped_names: Sequence[str]) -> str:
        """Return a sentence with the call that loads all leaves except the ones that have another shape."""
        if self.section != PARAMS:
            return f"to keep what fits: {self.call_of_load_changed()}"
        # `load_changed` has no counterpart for parameters. The caller leaves out those that do not fit.
        to_ignore = [*self.rules.allow_extra, *reshaped_names]
        return f"to keep what fits: load_params(path, like={{the parameters that fit}}, allow_extra={to_ignore})"

    def compare_dtypes(self) -> None:
        """Add an error text for each leaf whose values would be rounded, unless the caller has passed ``cast=``.

        For a stored fp32 and a requested bf16, it is "narrowing: 'trace/w' is torch.float32 in the checkpoint, expected
        torch.bfloat16". A wider dtype than the stored one is no difference.
        """
        narrowed_names: list[str] = []
        for name, spec, saved_leaf in self.pairs():
            dtype = spec.dtype
            stored_dtype = saved_leaf.spec.dtype
            cast_dtypes = self.cast_dtypes(name)
            has_other_cast = any(cast_dtype != dtype for cast_dtype in cast_dtypes)
            # Codes of a quantized state are never converted, also if `cast=` allows it.
            if stored_dtype != dtype and _has_codes(saved_leaf.stored_name, self.index.leaves):
                self.problems.append(
                    f"codes:     {name!r} holds codes of {stored_dtype}, which have no meaning as {dtype}"
                )
            elif has_other_cast:
                self.problems.append(_other_cast(name, dtype, cast_dtypes))
                self.advice.append(
                    "cast= allows rounding to the dtype in `like`: to load another dtype, make `like` with it"
                )
            elif not cast_dtypes and stored_dtype != dtype and not widens(stored_dtype, dtype):
                self.problems.append(narrowing(name, stored_dtype, dtype))
                narrowed_names.append(name)
        if narrowed_names:
            cast = {**self.rules.cast, **cast_of(narrowed_names, self.expected.leaves)}
            self.advice.append(
                f"to round: cast={cast} (keys are names, first levels of names, or globs); to keep the values: use a "
                "chain with the state dtype of the checkpoint"
            )

    def cast_dtypes(self, name: str) -> set[torch.dtype]:
        """Return the dtypes to which the caller allows to round a leaf, by each pattern in ``cast=`` that matches."""
        return {dtype for pattern, dtype in self.rules.cast.items() if matches(pattern, name)}

    def advice_to_load_changed(self) -> str:
        """Return the call that continues a run with other labels, layers or transforms."""
        return (
            f"if labels, layers or transforms have changed since: {self.call_of_load_changed()} loads what fits, and "
            "returns an account of the rest"
        )

    def call_of_load_changed(self) -> str:
        """Return the code of a call of `load_changed`."""
        like = "like" if self.objects is None else "optimizer"
        return f"mfx.checkpoint.load_changed(path, {like})"


def _useless_pattern(argument: str, pattern: str, names: Collection[str]) -> str:
    """Return the error text for a pattern in an argument such as "allow_missing" that matches none of the names."""
    similar = format_list(close_names(pattern.strip("*/"), names, "/")) or "none"
    return (
        f"{argument}: {pattern!r} matches no leaf of the checkpoint or of `like`, similar: {similar}; correct or "
        "remove it: a name, the first levels of names, or a glob"
    )


def _other_cast(name: str, dtype: torch.dtype, cast_dtypes: set[torch.dtype]) -> str:
    """Return the error text for a leaf that has the dtype ``dtype`` in ``like``, and other dtypes in ``cast=``.

    ``cast_dtypes`` has the dtype of each pattern that matches the leaf. With ``cast={"trace": torch.float16}`` and
    "trace/w" of `torch.bfloat16` in ``like``, there is no dtype for both.
    """
    texts = ", ".join(sorted(map(str, cast_dtypes)))
    return f"cast:      {name!r} has dtype {dtype} in `like`, and cast= gives {texts}"


def _has_codes(stored_name: str, stored_names: Container[str]) -> bool:
    """Return whether a leaf has the codes of a quantized state, as "trace/codes/w" if "trace/scales/w" exists.

    A quantized state stores small integers, its codes, and scales that turn them into values. A code has no value
    without its scale, so codes cannot be converted to another dtype.

    >>> (
    ...     _has_codes("trace/codes/w", ["trace/codes/w", "trace/scales/w"]),
    ...     _has_codes("codes/trace/w", ["codes/trace/w"]),
    ... )
    (True, False)
    """
    levels = stored_name.split("/")
    # Any level after the first may be the one: a label may be "codes", too, as in "partition/codes/trace/codes/w",
    # and the codes of a state that is one tensor are "trace/codes".
    for position, level in enumerate(levels):
        if position == 0 or level != "codes":
            continue
        # The same name with "scales" at this level.
        scales_name = "/".join([*levels[:position], "scales", *levels[position + 1 :]])
        if scales_name in stored_names:
            return True
    return False


def cast_of(narrowed: Iterable[str], leaves: Mapping[str, Spec]) -> dict[str, torch.dtype]:
    """Return the shortest argument ``cast`` of `load` that allows rounding the ``narrowed`` leaves, for an advice.

    One key such as "mu" is for all leaves whose names begin with it, if all of them have one dtype. ``leaves`` has the
    dtypes of the requested state.

    >>> half = Spec((), torch.bfloat16)
    >>> cast_of(["mu/a", "mu/b"], {"mu/a": half, "mu/b": half, "nu/a": Spec((), torch.float32)})
    {'mu': torch.bfloat16}
    """
    # One pattern can have one dtype, so the names are grouped by it.
    names_of_dtype: dict[torch.dtype, list[str]] = {}
    for name in narrowed:
        names_of_dtype.setdefault(leaves[name].dtype, []).append(name)
    cast: dict[str, torch.dtype] = {}
    for dtype, names in names_of_dtype.items():
        # A pattern may match other leaves of this dtype too: they are not rounded, since they have it.
        names_of_other_dtypes = [name for name, spec in leaves.items() if spec.dtype != dtype]
        cast |= dict.fromkeys(shortest_levels(names, names_of_other_dtypes), dtype)
    return cast


def shortest_levels(names: Collection[str], all_names: Iterable[str]) -> list[str]:
    """Return the fewest first levels of names that match ``names`` and none of the other names in ``all_names``.

    The first levels of "mu/a" are "mu" and "mu/a". An error suggests one level in place of a thousand names.

    >>> shortest_levels(["mu/a", "mu/b"], ["mu/a", "mu/b", "nu/a"])
    ['mu']
    """
    levels_of_others: set[str] = set()  # "nu" and "nu/a" in the example
    for name in set(all_names) - set(names):
        levels_of_others.update(_first_levels(name))
    shortest: dict[str, None] = {}  # each once, in order
    for name in names:
        # The levels are tried from short to long: "mu" and "mu/a" for "mu/a".
        unique_levels = [levels for levels in _first_levels(name) if levels not in levels_of_others]
        unique_levels.append(name)  # the only one if another name begins with it, as "a/b" with "a"
        shortest[unique_levels[0]] = None
    return list(shortest)


def _first_levels(name: str) -> list[str]:
    """Return the first levels of a name, the shortest first: "a", "a/b" and "a/b/c" for "a/b/c"."""
    levels = name.split("/")
    return ["/".join(levels[:count]) for count in range(1, len(levels) + 1)]
