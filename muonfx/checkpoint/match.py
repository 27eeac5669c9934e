"""The target of a load: the tree to fill, the differences from the checkpoint that are allowed, and their check."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from muonfx.checkpoint.errors import MismatchError, first_of_each_kind
from muonfx.checkpoint.files import no_collection
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.names import PARAMS, in_section, named_tensors, plain_names
from muonfx.checkpoint.spec import StateSpec, described, spec_of_named
from muonfx.core import Transform
from muonfx.core.checks import warn_caller
from muonfx.tree import PyTree, Spec
from muonfx.tree.arguments import close_names
from muonfx.tree.display import format_list
from muonfx.tree.dtypes import widens
from muonfx.tree.renaming import Rename, new_names, prefix_renaming

__all__ = ["Allow", "Rules", "Target", "matches", "patterns_of"]

_NUMBERS = re.compile(r"(\w+)=(-?(?:torch\.tensor\()?[\d.][\w.+-]*)")
"""A numeric argument in the ``repr`` of a transform: its name and the number."""

Allow = bool | str | Collection[str]
"""An ``allow_...`` argument of `load`: True for all leaves, False for none, or one or more patterns of names."""


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a leaf name: it is the name, its first levels, or a glob like ``*/mu/*``."""
    return name == pattern or name.startswith(pattern.rstrip("/") + "/") or fnmatchcase(name, pattern)


def patterns_of(given: Allow) -> tuple[str, ...]:
    """Convert an ``allow_...`` argument of `load` to a tuple of patterns: True to ``("*",)``, False to ``()``."""
    if isinstance(given, bool):
        return ("*",) if given else ()
    return (given,) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True)
class Rules:
    """The arguments of `load` that allow differences between a checkpoint and ``like``, such as ``allow_missing``."""

    allow_missing: tuple[str, ...]
    allow_extra: tuple[str, ...]
    allow_other_chain: bool
    cast: Mapping[str, torch.dtype]
    rename: Rename

    def described(self) -> dict[str, str]:
        """Return a dict from argument name to text, to compare between ranks; all functions have the same text."""

        def text(given: object) -> str:
            if callable(given):
                return "a function"
            return repr(sorted(given.items()) if isinstance(given, Mapping) else given)

        return {name: text(given) for name, given in vars(self).items()}


def match(index: Index, want: StateSpec, rules: Rules, *, section: str, where: str) -> dict[str, str | None]:
    """Return a dict from leaf name in ``want``, the requested state, to the leaf's name in the checkpoint.

    A leaf that is missing has None. Raise `MismatchError` with all differences that ``rules`` does not allow.
    """
    problems: list[str] = []
    advice: list[str] = []
    names, wrong = plain_names(index.leaves), list[str]()
    if rules.rename:
        names, wrong = new_names(names, rules.rename)
    there: dict[str, str] = {}  # the new name of each leaf in the section -> its name in the checkpoint
    for old, new in names.items():
        if in_section(new, section):
            if new in there:
                wrong.append(f"both {there[new]!r} and {old!r} would be {new!r}")
            there[new] = old
        elif section and in_section(old, section):
            wrong.append(f"{old!r} would be {new!r}, expected a name that begins with '{section}/'")
    if wrong:
        problems += [f"rename:    {problem}" for problem in wrong]
        advice.append(
            "rename= maps names in the checkpoint to names in `like`: whole names, first levels of names, or patterns "
            "such as {'*/encoder.*': '*/model.encoder.*'}"
        )
    have = {name: index.leaves[written].spec for name, written in there.items()}
    moved = {} if section else _moved(have, want, rules)
    if rules.allow_other_chain:
        sources = {name: source for name in want if (source := _source(name, moved)) is not None}
        used = set(sources.values())
        there = {name: written for name, written in there.items() if name in want or name not in used} | {
            name: there[source] for name, source in sources.items()
        }
    else:
        _check_chain(index, want, moved, problems, advice)
    everything = [*names.values(), *want]
    for what in ("allow_missing", "allow_extra", "cast"):
        for pattern in getattr(rules, what):
            if pattern != "*" and not any(matches(pattern, name) for name in everything):
                close = close_names(pattern.strip("*/"), everything, "/")
                near = f", close: {format_list(close)}" if close else ""
                problems.append(f"{what}: {pattern!r} matches no leaf of the checkpoint or of `like`{near}")
                advice.append(f"correct or remove {pattern!r} in {what}: a name, the first levels of names, or a glob")

    missing = [name for name in want if name not in there and not _any(rules.allow_missing, name)]
    extra = [name for name in there if name not in want.leaves and not _any(rules.allow_extra, name)]
    problems += [f"missing:   {name!r}, {described(want[name])}, is not in the checkpoint" for name in missing]
    problems += [f"extra:     {name!r} is in the checkpoint and not in `like`" for name in extra]
    if missing and extra and not moved:
        found = {} if rules.rename else prefix_renaming(extra, missing)
        shown = repr(found) if found else "{name in the checkpoint: name in `like`}"
        advice.append(f"if only the names of leaves differ: rename={shown}")
    if missing:
        advice.append(f"to keep the values of `like` for missing leaves: allow_missing={_patterns(missing, want)}")
    if extra:
        advice.append(f"to ignore leaves of the checkpoint: allow_extra={_patterns(extra, there)}")
    if not section and missing and all(f"{PARAMS}/{name}" in index.leaves for name in missing):
        advice = ["to load parameters: load_params(path, like); to load a state: like=tx.init(params)"]
    _check_leaves(index, want, rules, there, problems, advice)
    if problems:
        lines, hints = "\n  ".join(first_of_each_kind(problems)), "\n  ".join(dict.fromkeys(advice))
        text = f"{where} does not fit, nothing was loaded:\n  {lines}" + (f"\nwhat to do:\n  {hints}" if hints else "")
        raise MismatchError(text, problems)
    if moved and rules.allow_other_chain:
        warn_caller(f"{where}: found other names than in `like`, loaded {_shown(moved)}")
    return {name: there.get(name) for name in want}


def _check_chain(
    index: Index, want: StateSpec, moved: Mapping[str, str], problems: list[str], advice: list[str]
) -> None:
    """Report that another chain wrote the state, and which states could be loaded under other names."""
    is_other = None not in (index.fingerprint, want.fingerprint) and want.fingerprint != index.fingerprint
    if is_other:
        problems.append(
            f"chain:     the checkpoint was made by {index.chain:.2000} (fingerprint {index.fingerprint}), expected "
            f"{want.chain} (fingerprint {want.fingerprint})"
        )
        advice.append("to continue the saved run: create `tx` and `like` as the checkpoint's chain, shown above")
    if is_other or moved:
        which = f", which loads {_shown(moved)}" if moved else ""
        advice.append(f"if the state has the same meaning for this chain: allow_other_chain=True{which}")


def _shown(moved: Mapping[str, str]) -> str:
    pairs = ((old, new) for new, old in moved.items())
    return ", ".join(" as ".join(repr(levels) if levels else "the whole state" for levels in pair) for pair in pairs)


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(matches(pattern, name) for pattern in patterns)


def _moved(have: Mapping[str, Spec], want: StateSpec, rules: Rules) -> dict[str, str]:
    """Pair states that only moved in the tree, as under another label or into a chain.

    Return a dict from first levels of names in ``like`` to first levels of names in the checkpoint (``have``). It is
    empty unless exactly one pairing fits, in which all names below these levels, shapes and dtypes are equal.
    """
    missing, extra = (
        [name for name in names if name not in others and not _any({*allowed} - {"*"}, name)]
        for names, others, allowed in ((want, have, rules.allow_missing), (have, want, rules.allow_extra))
    )
    if not (missing and extra):
        return {}
    ends: dict[tuple[Spec, str], list[str]] = {}
    for name in extra:
        for end in _ends(name):
            ends.setdefault((have[name], end), []).append(name)
    found: dict[str, str] = {}
    for name in missing:
        end = next((end for end in _ends(name) if (want[name], end) in ends), "")
        near = ends.get((want[name], end), [])
        if len(near) == 1:
            new, old = (whole.removesuffix(end).rstrip("/") for whole in (name, near[0]))
            if found.setdefault(new, old) != old:  # two states have become one
                return {}
    sources = {name: source for name in want if (source := _source(name, found)) is not None}
    uses = Counter(sources.values())
    fits = all(
        name not in have and have.get(source) == want[name] and (uses[source] == 1 or not want[name].shape)
        for name, source in sources.items()  # a scalar, such as a step count, may be copied to several labels
    )
    left = [name for name in extra if name not in uses and any(_is_below(old, name) for old in found.values())]
    return found if fits and not left else {}


def _ends(name: str) -> Iterator[str]:
    """Yield the ends of a leaf name that have at least two levels, the longest first: "mu/fc.weight"."""
    levels = name.split("/")
    return ("/".join(levels[at:]) for at in range(len(levels) - 1))


def _is_below(levels: str, name: str) -> bool:
    return not levels or name.startswith(levels + "/")


def _source(name: str, moved: Mapping[str, str]) -> str | None:
    """Return the name in the checkpoint of a leaf whose state moved; None if it did not move."""
    new = max((new for new in moved if _is_below(new, name)), key=len, default=None)
    return None if new is None else f"{moved[new]}/{name[len(new) :].lstrip('/')}".lstrip("/")


def _check_leaves(
    index: Index, want: StateSpec, rules: Rules, there: Mapping[str, str], problems: list[str], advice: list[str]
) -> None:
    narrowed: dict[str, torch.dtype] = {}
    for name, spec in want.leaves.items():
        if name not in there:
            continue
        have = index.leaves[there[name]].spec
        if have == spec and not rules.cast:
            continue
        if have.shape != spec.shape:
            problems.append(f"reshaped:  {name!r} has shape {have.shape} in the checkpoint, expected {spec.shape}")
            advice.append("to load other shapes: create `like` for parameters with the shapes in the checkpoint")
        scales = f"{there[name]}/".replace("/codes/", "/scales/")[:-1]
        if have.dtype != spec.dtype and scales != there[name] and scales in index.leaves:
            problems.append(f"codes:     {name!r} holds codes of {have.dtype}, which have no meaning as {spec.dtype}")
            continue
        chosen = {dtype for pattern, dtype in rules.cast.items() if matches(pattern, name)}
        if chosen - {spec.dtype}:
            asked = ", ".join(sorted(map(str, chosen)))
            problems.append(f"cast:      {name!r} has dtype {spec.dtype} in `like`, and cast= gives {asked}")
            advice.append("cast= allows rounding to the dtype in `like`: to load another dtype, make `like` with it")
        elif not chosen and have.dtype != spec.dtype and not widens(have.dtype, spec.dtype):
            problems.append(f"narrowing: {name!r} is {have.dtype} in the checkpoint, expected {spec.dtype}")
            narrowed[name] = spec.dtype
    if narrowed:
        name, dtype = next(iter(narrowed.items()))
        rest = ", ..." if len(narrowed) > 1 else ""
        advice.append(
            f"to round: cast={{{name!r}: {dtype}{rest}}} (keys are names, first levels of names, or globs); to "
            "keep the values: use a chain with the state dtype of the checkpoint"
        )


def _patterns(names: Sequence[str], among: Iterable[str]) -> list[str]:
    """Return the fewest first levels of names that match ``names`` and no other name in ``among``."""
    others = {levels for name in {*among} - {*names} for levels in accumulate(name.split("/"), "{}/{}".format)}
    found = (
        next((levels for levels in accumulate(name.split("/"), "{}/{}".format) if levels not in others), name)
        for name in names
    )
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Target:
    """The tree that one `load` fills, and the differences from the checkpoint that its caller allows."""

    like: Mapping[str, Any]
    """The leaves of the caller's tree by name: tensors, shards of tensors, or `Spec`s."""
    want: StateSpec
    rules: Rules
    device: torch.device | str | None
    section: str
    """The first level of the leaf names: "params" for parameters, "" (none) for a state."""

    @classmethod
    def of(
        cls,
        like: PyTree | StateSpec,
        tx: Transform | None,
        rules: Rules,
        device: torch.device | str | None,
        section: str,
        *,
        whole: bool,
    ) -> Target:
        """Return the target of a `load`, and check its arguments; with ``whole``, raise if ``like`` has shards."""
        if tx is not None and not isinstance(tx, Transform):
            raise TypeError(f"tx must be a muonfx.Transform or None, found {tx!r}")
        if isinstance(like, StateSpec):
            return cls(like.leaves, like if tx is None else like.of_chain(tx), rules, device, section)
        named = named_tensors(like, section)
        leaves = {name: leaf for name, leaf in named if leaf is not None}
        for name, leaf in leaves.items():
            if whole and hasattr(leaf, "__create_chunk_list__") and getattr(leaf, "whole", None) is None:
                raise TypeError(
                    f"the leaf {name!r} is a {type(leaf).__name__}, of which each rank holds a part: pass group="
                )
        return cls(leaves, spec_of_named(named, like, tx), rules, device, section)

    @no_collection()
    def allocate(self, index: Index, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Allocate the tensors of the tree, after a check that the checkpoint at the path ``where`` fits.

        Return two dicts: all tensors by leaf name, and the tensors to read by their names in the checkpoint.
        """
        sources = match(index, self.want, self.rules, section=self.section, where=where)
        self._warn_of_products(index, where)
        self._warn_of_numbers(index, where)
        leaves = {
            name: self._empty(leaf) if sources[name] is not None else self._copy(name, leaf)
            for name, leaf in self.like.items()
        }
        destinations: dict[str, Any] = {}
        for name, source in sources.items():
            if source is not None:
                leaves[name] = destinations.setdefault(source, leaves[name])
        return leaves, destinations

    def filled(self, leaves: dict[str, Any]) -> PyTree:
        """Return the tree with leaves that were read. A scalar that was read for several leaves is copied for each."""
        first = {id(leaf): name for name, leaf in reversed(leaves.items())}
        return self.want.unflatten(
            {name: leaf if first[id(leaf)] == name else leaf.clone() for name, leaf in leaves.items()}
        )

    def _warn_of_products(self, index: Index, where: str) -> None:
        """Warn if the transform now computes its matrix products in other dtypes than when the checkpoint was saved."""
        real = (leaf.device for leaf in self.like.values() if isinstance(leaf, Tensor) and not leaf.is_meta)
        device = torch.device(self.device or next(real, "cpu"))
        # A state's leaves do not give the parameters' dtype, but the record does: products are float64 exactly for
        # parameters that are float64.
        wide, other = (self.want.products(dtype, device) for dtype in (torch.float64, torch.float32))
        for name, saved in index.products.items():
            now = (wide if saved == "float64" else other).get(name, saved)
            if saved != now:
                warnings.warn(
                    f"{where}: the matrix products of {name!r} were computed in {saved} and are now in {now}, so "
                    f"the resumed run computes other numbers. To continue as before, give it dtype=torch.{saved}",
                    UserWarning,
                    stacklevel=2,
                )

    def _warn_of_numbers(self, index: Index, where: str) -> None:
        """Warn if the transform has other numbers than the one that wrote the checkpoint, as its ``repr`` shows."""
        if self.section or None in (index.fingerprint, self.want.fingerprint) or index.chain == self.want.chain:
            return
        if index.fingerprint != self.want.fingerprint:
            return  # another chain, which `match` has allowed
        saved_numbers, numbers = (_NUMBERS.findall(str(chain)) for chain in (index.chain, self.want.chain))
        lines = ["see the chain in muonfx.checkpoint.inspect(path)"]
        if [name for name, _ in saved_numbers] == [name for name, _ in numbers]:
            pairs = zip(saved_numbers, numbers, strict=True)
            different = [(name, saved, own) for (name, saved), (_, own) in pairs if saved != own]
            if not different:
                return  # only labels differ, which may be written with other names
            lines = [f"{name} is {saved} in the checkpoint, {own} in the code" for name, saved, own in different[:10]]
        warn_caller(
            f"{where}: the checkpoint was saved with other numbers: {'; '.join(lines)}. The code's are used: a "
            "checkpoint has no param_groups. If a torch scheduler has set them, restore the scheduler and the groups "
            "before loading"
        )

    def _empty(self, leaf: Any) -> Any:
        """Allocate a tensor or shard with the shape and dtype of a leaf of ``like``, on the device for the result."""
        if isinstance(leaf, Spec):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device or "cpu")
        if isinstance(leaf, Tensor):
            where = self.device or (leaf.device if leaf.device.type != "meta" else "cpu")
            return torch.empty_like(leaf, device=where, requires_grad=False)
        return leaf.empty_like()

    def _copy(self, name: str, leaf: object) -> Any:
        """Return a copy of a leaf of ``like`` that is missing in the checkpoint."""
        if isinstance(leaf, Spec) or (isinstance(leaf, Tensor) and leaf.device.type == "meta"):
            raise ValueError(
                f"like=: found a spec without values for {name!r}, which is missing in the checkpoint, expected a "
                "state with values to keep: pass like=tx.init(params)"
            )
        room = self._empty(leaf)
        room.copy_(leaf.detach() if isinstance(leaf, Tensor) else leaf)
        return room
