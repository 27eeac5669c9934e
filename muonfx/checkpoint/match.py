"""Match the leaves of a checkpoint with a requested state, and report every difference in one error.

The stored leaves first get the new names that the caller gives them by ``rename``. Then `moved_leaves` finds states
that only moved in the tree. All other leaves have equal names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

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
    """Convert an ``allow_...`` argument of `load`, which may have several types, to a tuple of patterns.

    A pattern matches names of leaves. ``argument`` is the name of the argument, such as "allow_missing", for the error
    about a value of another type.

    >>> patterns_of("allow_missing", True), patterns_of("allow_missing", False), patterns_of("allow_missing", "adam/mu")
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
            raise TypeError(f"cast: {pattern!r} has the value {dtype!r}, expected a torch.dtype, without quotes")


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
    # 1. The names of the stored leaves without prefixes of wrappers, and after the caller's renaming.
    new_name_of = plain_names(index.leaves)
    renaming_problems: list[str] = []
    if rules.rename:
        new_name_of, renaming_problems = new_names(new_name_of, rules.rename)
    stored_name_of, section_problems = _names_in_section(new_name_of, section)
    renaming_problems += section_problems
    # 2. States that have other names because their transforms moved in the tree. Parameters have no transforms.
    moved: dict[str, str] = {}
    if section == "":
        stored_shapes = {name: index.leaves[stored_name].spec.shape for name, stored_name in stored_name_of.items()}
        moved = moved_leaves(stored_shapes, expected, rules)
    if moved and rules.allow_other_chain:
        stored_name_of = _with_moved_leaves(stored_name_of, expected, moved)
    # 3. All differences that remain, in one error.
    comparison = _Comparison(index, expected, rules, section, objects, stored_name_of, moved)
    comparison.check_all(renaming_problems, new_name_of.values())
    if comparison.problems:
        raise mismatch(where, comparison.problems, comparison.advice)
    if moved and rules.allow_other_chain:
        warn_caller(f"{where}: found other names than in `like`, loaded {_moved_text(moved)}")
    return {name: stored_name_of.get(name) for name in expected.leaves}


# ------------------------------------------------------------------------------------------------------------ renaming


def _names_in_section(new_name_of: Mapping[str, str], section: str | None) -> tuple[dict[str, str], list[str]]:
    """Select the leaves of a section, "params" or "" for the state, by the names that they have after renaming.

    ``new_name_of`` has the new name of each leaf by its name in the checkpoint. Return the reverse dict for the leaves
    of the section, and a text for each mistake: two leaves with one new name, or a parameter whose new name does not
    begin with the section. For the section "params", ``{"params/a": "params/b", "trace/a": "trace/b"}`` becomes
    ``{"params/b": "params/a"}``. If the section is None, all leaves are selected.
    """
    stored_name_of: dict[str, str] = {}
    problems: list[str] = []
    for stored_name, new_name in new_name_of.items():
        if section is None or in_section(new_name, section):
            if new_name in stored_name_of:  # an earlier leaf has this new name already
                problems.append(f"both {stored_name_of[new_name]!r} and {stored_name!r} would be {new_name!r}")
            stored_name_of[new_name] = stored_name
        elif section and in_section(stored_name, section):  # renaming has moved a parameter out of the parameters
            problems.append(f"{stored_name!r} would be {new_name!r}, expected a name that begins with '{section}/'")
    return stored_name_of, problems


# -------------------------------------------------------------------------------------------------------- moved states


def moved_leaves(stored: Shapes, expected: StateSpec, rules: Rules) -> dict[str, str]:
    """Find the leaves that have other names in the checkpoint, because their transform was elsewhere in the tree.

    A state may be under another label or in a chain now: the result ``{"partition/muon/trace/w": "muon/trace/w"}`` has
    the new name and the name in the checkpoint. ``stored`` has the shapes of the leaves in the checkpoint. The dict is
    empty if a step count would have several values: those of several states that become one, or that of the leaf with
    its name and that of the parameters that moved.
    """
    # Leaves that the caller allows to be missing or extra have no partner to search for.
    all_shapes = {name: spec.shape for name, spec in expected.leaves.items()}
    shapes = _leaves_to_match(all_shapes, stored, rules.allow_missing)
    stored_shapes = _leaves_to_match(stored, all_shapes, rules.allow_extra)
    if shapes.keys() <= stored_shapes.keys() or stored_shapes.keys() <= shapes.keys():
        return {}  # the usual case: no leaf has another name, at most some are missing or extra
    # From leaf name to name in the checkpoint, and for some step counts all counts that they could come from.
    source_of, equal_counts = sources(shapes, stored_shapes)
    moved: dict[str, str] = {}
    for name, stored_name in source_of.items():
        if name in equal_counts:  # several step counts would become this one
            return {}
        if name == stored_name:  # it has not moved
            continue
        if name in stored:  # the checkpoint has this leaf, and it would get the values of another
            return {}
        moved[name] = stored_name
    return _moved_with_parameters(moved, shapes)


def _leaves_to_match(shapes: Shapes, partners: Shapes, allowed: Iterable[str]) -> Shapes:
    """Return the leaves that may have moved: those that the caller does not explicitly allow to be missing or extra.

    ``partners`` are the leaves on the other side, in the checkpoint or in the state. A leaf that has a partner of the
    same name stays in, whatever the ``allowed`` patterns are. With ``allowed=["mu"]``, "mu/w" is left out unless
    ``partners`` has "mu/w" too, and "nu/w" stays in.
    """
    patterns = [pattern for pattern in allowed if pattern != "*"]  # states that "*" matches may have moved, too
    leaves: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if name in partners or not matches_any(patterns, name):
            leaves[name] = shape
    return leaves


def _moved_with_parameters(moved: Mapping[str, str], shapes: Shapes) -> dict[str, str]:
    """Return the moved leaves, but omit a step count that moved otherwise than every state of a parameter.

    ``moved`` has new names and names in the checkpoint, such as ``{"new/adam/count": "adam/count"}``. A step count
    alone is not evidence of a move: the one with the closest name may be of another transform. So this entry is
    returned only if a leaf such as "new/adam/mu/w" has moved in the same way, from "adam/mu/w". If the whole state has
    only 0-d leaves, as of a schedule, all are returned.
    """
    has_only_scalars = all(shape == () for shape in shapes.values())
    if has_only_scalars:
        return dict(moved)
    # The moves that leaves of parameters show, as texts: "'adam' as 'new/adam'".
    moves_of_parameters: set[str] = set()
    for name, stored_name in moved.items():
        if shapes[name] != ():
            moves_of_parameters.add(_move(name, stored_name))
    # These leaves themselves, and the step counts with one of their moves.
    moved_together: dict[str, str] = {}
    for name, stored_name in moved.items():
        if _move(name, stored_name) in moves_of_parameters:
            moved_together[name] = stored_name
    return moved_together


def _with_moved_leaves(
    stored_name_of: Mapping[str, str], expected: StateSpec, moved: Mapping[str, str]
) -> dict[str, str]:
    """Put the leaves of moved states under their new names, so that they match ``expected`` like all other leaves.

    With ``moved={"new/trace/w": "trace/w"}``, the key "trace/w" of ``stored_name_of`` becomes "new/trace/w".
    """
    names = dict(stored_name_of)
    # First all old names go, then all new ones are added: a new name may be the old name of another moved leaf.
    for old_name in moved.values():
        if old_name not in expected.leaves:  # otherwise another leaf has this name now, and keeps it
            names.pop(old_name, None)  # it may be gone already: a step count may get several new names
    for name, old_name in moved.items():
        names[name] = stored_name_of[old_name]
    return names


def _moved_text(moved: Mapping[str, str]) -> str:
    """Return moved states as text: "'adamw' as 'partition/adamw', the whole state as 'inner'"."""
    texts = [_move(name, stored_name) for name, stored_name in moved.items()]
    return ", ".join(dict.fromkeys(texts))  # each once


def _move(name: str, stored_name: str) -> str:
    """Return the levels that differ between the names of a leaf as text: "'adamw' as 'partition/adamw'"."""
    equal = equal_levels(name, stored_name)
    return f"{_upper_levels(stored_name, equal)} as {_upper_levels(name, equal)}"


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
        """Report all differences, each as a text in ``problems``, with remedies in ``advice``.

        ``new_names`` are the names in the checkpoint after renaming, of the parameters and of the state.
        """
        self._check_renaming(renaming_problems)
        self._check_chain()
        self._check_patterns([*new_names, *self.expected, *self.index.objects, *(self.objects or ())])
        self._check_names()
        self._check_objects()
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
        """Report that another chain wrote the state, and which states could be loaded under other names.

        A chain is the transform with all that it contains, such as "chain(momentum(), scale(-0.1))". It is identified
        by its fingerprint, a hash of its structure.
        """
        if self.rules.allow_other_chain:
            return
        # A fingerprint is None if the state was saved, or is loaded, without its transform: then nothing is compared.
        saved_fingerprint = self.index.fingerprint
        fingerprint = self.expected.fingerprint
        are_known = saved_fingerprint is not None and fingerprint is not None
        is_other_chain = are_known and saved_fingerprint != fingerprint
        if is_other_chain:
            differences = differences_of_chains(str(self.index.chain), str(self.expected.chain)).structure
            self.problems += [f"chain:     {difference}" for difference in differences]
            self.advice.append(
                "to continue the saved run: create the transform with the arguments in the checkpoint; "
                "mfx.checkpoint.inspect(path).chain is the code of the whole chain"
            )
        if is_other_chain or self.moved:  # moved states show that it is another chain, also if it is not known
            names = ""
            if self.moved:
                names = f", which loads {_moved_text(self.moved)}"
            self.advice.append(f"if the state has the same meaning for this chain: allow_other_chain=True{names}")
            self._advise_load_changed()

    def _check_patterns(self, names: Collection[str]) -> None:
        """Report patterns of the caller that match none of the leaf names.

        Such a pattern is probably misspelt: for "momntum/trace", the error suggests "momentum/trace". ``names`` are the
        names on both sides, in the checkpoint and in the requested state.
        """
        rules = self.rules
        arguments = {"allow_missing": rules.allow_missing, "allow_extra": rules.allow_extra, "cast": rules.cast}
        for argument, patterns in arguments.items():
            for pattern in patterns:
                # "*" is for True, which allows all leaves and need not match one.
                if pattern == "*" or any(matches(pattern, name) for name in names):
                    continue
                similar = format_list(close_names(pattern.strip("*/"), names, "/")) or "none"
                self.problems.append(
                    f"{argument}: {pattern!r} matches no leaf of the checkpoint or of `like`, similar: {similar}; "
                    "correct or remove it: a name, the first levels of names, or a glob"
                )

    def _check_names(self) -> None:
        """Report leaves that only the checkpoint ("extra") or only the requested state ("missing") has.

        Leaves that match the caller's ``allow_missing=`` or ``allow_extra=`` are not reported.
        """
        expected = self.expected.leaves
        missing = _unmatched(expected, self.stored_name_of, self.rules.allow_missing)
        for name in missing:
            self.problems.append(f"missing:   {name!r}, {described(expected[name])}, is not in the checkpoint")
        extra = _unmatched(self.stored_name_of, expected, self.rules.allow_extra)
        self.problems += [f"extra:     {name!r} is in the checkpoint and not in `like`" for name in extra]
        self._advise_about_names(missing, extra)
        is_optimizer = self.objects is not None
        if is_optimizer and (missing or extra):  # the chain may be unknown, as in a state dict by `Writer`
            self._advise_load_changed()

    def _check_objects(self) -> None:
        """Report the param groups or the scheduler of an optimizer if the checkpoint or the caller lacks them.

        They are the values that are no tensors: ``{"param_groups", "scheduler"}`` are requested, or only the first.
        """
        if self.objects is None:  # `like` is no optimizer
            return
        stored_objects = self.index.objects
        for name in _unmatched(self.objects, stored_objects, self.rules.allow_missing):
            self.problems.append(f"missing:   {name!r} is not in the checkpoint")
            self.advice.append(
                f"to restore all but {name!r}: allow_missing=[{name!r}]; to store it: save the optimizer itself, not "
                "its transform_state, with scheduler= if it has one"
            )
        # A saved scheduler that is not loaded would be forgotten, so it is ignored only on request. Groups need no such
        # check: an optimizer always requests them, unless `allow_extra=` names them.
        if SCHEDULER in stored_objects and _unmatched([SCHEDULER], self.objects, self.rules.allow_extra):
            self.problems.append(f"extra:     {SCHEDULER!r} is in the checkpoint, and scheduler= is not given")
            self.advice.append(f"to load it: scheduler=; to ignore it: allow_extra=[{SCHEDULER!r}]")

    def _advise_about_names(self, missing: Sequence[str], extra: Sequence[str]) -> None:
        """Add the arguments that allow ``missing`` leaves, and ``extra`` leaves of the checkpoint.

        For example "to keep the values of `like` for missing leaves: allow_missing=['adamw/mu']".
        """
        # The caller has passed parameters in place of a state. No other advice helps, so this one replaces all.
        if missing and self._are_params(missing):
            self.advice = ["to load parameters: load_params(path, like); to load a state: like=tx.init(params)"]
            return
        if missing and extra and not self.moved:  # each side has a name that the other lacks: perhaps one leaf
            self.advice.append(f"if only the names of leaves differ: rename={self._renaming_text(missing, extra)}")
        if missing:
            patterns = shortest_levels(missing, self.expected)
            self.advice.append(f"to keep the values of `like` for missing leaves: allow_missing={patterns}")
        if extra:
            patterns = shortest_levels(extra, self.stored_name_of)
            self.advice.append(f"to ignore leaves of the checkpoint: allow_extra={patterns}")

    def _are_params(self, missing: Sequence[str]) -> bool:
        """Return whether the missing leaves are parameters: "w" is missing in the state, and "params/w" is stored."""
        return self.section == "" and all(f"{PARAMS}/{name}" in self.index.leaves for name in missing)

    def _renaming_text(self, missing: Sequence[str], extra: Sequence[str]) -> str:
        """Return a ``rename=`` for an advice: ``repr`` of a dict from ``extra`` to ``missing`` leaves, if one is found.

        If all names differ by one prefix, it is such as "{'trace/*': 'trace/model.*'}", else a description of the dict.
        """
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
        """Report leaves whose shape or dtype differs in a way that the rules do not allow.

        The advice at the end is about all leaves of one kind together: ``cast={'trace': torch.bfloat16}``.
        """
        reshaped: list[str] = []
        narrowed: list[str] = []
        for name, spec in self.expected.leaves.items():
            stored_name = self.stored_name_of.get(name)
            if stored_name is None:  # missing, or kept as it is in `like`
                continue
            stored_spec = self.index.leaves[stored_name].spec
            if stored_spec == spec and not self.rules.cast:  # the usual case
                continue
            if stored_spec.shape != spec.shape:  # no rule allows it
                reshaped.append(name)
                self.problems.append(
                    f"reshaped:  {name!r} has shape {stored_spec.shape} in the checkpoint, expected {spec.shape}"
                )
            is_narrowed = self._check_dtype(name, stored_name)
            if is_narrowed:
                narrowed.append(name)
        if reshaped:
            self._advise_shapes(reshaped)
        if narrowed:
            self._advise_cast(narrowed)

    def _check_dtype(self, name: str, stored_name: str) -> bool:
        """Report if values of a leaf would lose their meaning or be rounded without the caller's consent.

        A wider dtype, such as fp32 for a stored bf16, is no problem. Return True for a narrower one that ``cast=``
        does not allow: fp32 is stored, and bf16 is requested.
        """
        dtype = self.expected.leaves[name].dtype
        stored_dtype = self.index.leaves[stored_name].spec.dtype
        # 1. Integers that are codes of a quantized state are never converted, also if `cast=` allows it.
        if stored_dtype != dtype and self._has_codes(stored_name):
            self.problems.append(f"codes:     {name!r} holds codes of {stored_dtype}, which have no meaning as {dtype}")
            return False
        # 2. The caller has allowed rounding of this leaf, if the dtype is the one that the caller named.
        cast_dtypes = {cast_dtype for pattern, cast_dtype in self.rules.cast.items() if matches(pattern, name)}
        if cast_dtypes:
            self._check_cast(name, dtype, cast_dtypes)
            return False
        # 3. Without the caller's consent, only a dtype that holds every stored value exactly will do.
        if widens(stored_dtype, dtype):
            return False
        self.problems.append(f"narrowing: {name!r} is {stored_dtype} in the checkpoint, expected {dtype}")
        return True

    def _advise_cast(self, narrowed: Sequence[str]) -> None:
        """Add the argument that allows to round leaves to a narrower dtype."""
        cast = {**self.rules.cast, **cast_of(narrowed, self.expected.leaves)}
        self.advice.append(
            f"to round: cast={cast} (keys are names, first levels of names, or globs); to keep the values: use a chain "
            "with the state dtype of the checkpoint"
        )

    def _advise_shapes(self, reshaped: Sequence[str]) -> None:
        """Add the call that loads the leaves of a checkpoint other than the ``reshaped`` ones.

        For a state this is `load_changed`. It has no counterpart for parameters, so the reshaped ones are listed as
        leaves to ignore: ``allow_extra=["params/head"]``.
        """
        if self.section == PARAMS:
            to_ignore = [*self.rules.allow_extra, *reshaped]
            advice = f"load_params(path, like={{the parameters that fit}}, allow_extra={to_ignore})"
        else:
            advice = f"mfx.checkpoint.load_changed(path, {self._like})"
        self.advice.append(f"to keep what fits: {advice}")

    def _check_cast(self, name: str, dtype: torch.dtype, cast_dtypes: set[torch.dtype]) -> None:
        """Report that ``cast=`` has another dtype than ``like``; it allows rounding, but does not choose the dtype.

        ``cast_dtypes`` are the dtypes of all patterns of ``cast=`` that match the leaf. With
        ``cast={"trace": torch.float16}`` and "trace/w" of `torch.bfloat16` in ``like``, there is no dtype for both.
        """
        if cast_dtypes == {dtype}:
            return
        texts = ", ".join(sorted([str(cast_dtype) for cast_dtype in cast_dtypes]))
        self.problems.append(f"cast:      {name!r} has dtype {dtype} in `like`, and cast= gives {texts}")
        self.advice.append("cast= allows rounding to the dtype in `like`: to load another dtype, make `like` with it")

    def _has_codes(self, stored_name: str) -> bool:
        """Return whether a leaf has the codes of a quantized state, as "trace/codes/w" if "trace/scales/w" exists.

        A quantized state stores small integers, its codes, and scales that turn them into values. A code has no value
        without its scale, so codes cannot be converted to another dtype.
        """
        levels = stored_name.split("/")
        # Any level after the first may be the one: a label may be "codes", too, as in "partition/codes/trace/codes/w",
        # and the codes of a state that is one tensor are "trace/codes".
        for position, level in enumerate(levels):
            if position == 0 or level != "codes":
                continue
            # The same name with "scales" at this level.
            scales_name = "/".join([*levels[:position], "scales", *levels[position + 1 :]])
            if scales_name in self.index.leaves:
                return True
        return False


def cast_of(narrowed: Iterable[str], leaves: Mapping[str, Spec]) -> dict[str, torch.dtype]:
    """Return the argument ``cast`` of `load` that allows rounding of the ``narrowed`` leaves, in the shortest form.

    Its keys are the fewest first levels of names, "mu" for "mu/a" and "mu/b", that match only leaves of one dtype.
    ``leaves`` has all leaves of the requested state.

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
        # Leaves of the same dtype may be matched too: the cast allows rounding to the dtype that they have.
        names_of_others = [name for name, spec in leaves.items() if spec.dtype != dtype]
        for levels in shortest_levels(names, [*names, *names_of_others]):
            cast[levels] = dtype
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
        # From short to long, so the first of them matches the most names.
        unique_levels = [levels for levels in _first_levels(name) if levels not in levels_of_others]
        if unique_levels:
            shortest[unique_levels[0]] = None
        else:  # another name begins with this whole name, as "a/b" with "a"
            shortest[name] = None
    return list(shortest)


def _first_levels(name: str) -> list[str]:
    """Return the first levels of a name, the shortest first: "a", "a/b" and "a/b/c" for "a/b/c"."""
    levels = name.split("/")
    return ["/".join(levels[:count]) for count in range(1, len(levels) + 1)]
