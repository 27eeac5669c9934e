"""Rename leaves or parameters on load, by the caller's entries or by matching the ends of names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

__all__ = ["Rename", "found_renaming", "new_names"]

Rename = Mapping[str, str] | Callable[[str], str]
"""Mapping from old to new names, from leading levels or from patterns with ``*``; or a function of one name."""


def new_names(
    names: Mapping[str, str], rename: Rename, level: str = "/", what: str = "leaf"
) -> tuple[dict[str, str], list[str]]:
    """Rename names; return each written name with its new one, and messages about entries without effect."""
    # An entry `old: new` matches the name `old` and names that begin with `old` and `level`; with `*`, it matches as a
    # pattern, and each `*` of `new` is replaced by the text of the same `*` in `old`. Of several matching entries the
    # most exact one applies: the name itself, then the entry with the most characters other than `*`. `names` maps
    # each written name to the current one, and an entry may match either.
    if callable(rename):
        return _by_function(names, rename)
    wrong: list[str] = []
    entries: list[_Entry] = []
    for old, new in rename.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise TypeError(f"rename must map strings to strings, found {old!r}: {new!r}")
        if "*" in old and old.count("*") != new.count("*"):
            wrong.append(f"{old!r} and {new!r} must have the same number of '*'")
        elif "*" in new and "*" not in old:
            wrong.append(f"{new!r} has a '*', and {old!r} has none that could stand for it")
        else:
            entries.append(_Entry(old, new, level))
    used: set[str] = set()
    fit: set[str] = set()
    found: dict[str, str] = {}
    for written, name in names.items():
        fitting = [
            (entry.exactness(which), place, made, entry)
            for place, entry in enumerate(entries)
            for which in (name, written)
            if (made := entry.new_name(which)) is not None
        ]
        found[written] = name
        if fitting:
            *_, found[written], entry = max(fitting, key=lambda one: (one[0], -one[1]))
            used.add(entry.old)
            fit.update(other.old for *_, other in fitting)
    for old in sorted({entry.old for entry in entries} - used):
        wrong.append(
            f"{old!r} means only what others mean more exactly" if old in fit else f"there is no {what} {old!r}"
        )
    return found, wrong


def found_renaming(extra: Mapping[str, object], missing: Mapping[str, object]) -> dict[str, str]:
    """Find the unique renaming that turns extra leaves into missing ones; {} if there is none or several."""
    # Both map leaf names to shapes. Two leaves are a pair if their shapes are equal and their names end in the same
    # levels: at least field and parameter, or all levels of one of the names. The longest common end decides. Each leaf
    # of the smaller side needs its own partner. The larger side may have leaves left over only if leading levels are
    # all that differs, as when a recipe was put into a chain.
    if len(extra) > len(missing):
        back = found_renaming(missing, extra)
        found = {old: new for new, old in back.items()}
        return found if len(found) == len(back) else {}
    ends: dict[object, list[str]] = {}
    for name, shape in missing.items():
        levels = name.split("/")
        for at in range(len(levels)):
            ends.setdefault((shape, *levels[at:]), []).append(name)
    taken: set[str] = set()
    entries: dict[str, str] = {}
    in_front = True  # the names of every pair differ only in leading levels
    for name, shape in extra.items():
        levels = name.split("/")
        found = next((f for at in range(len(levels)) if (f := ends.get((shape, *levels[at:])))), [])
        if len(found) != 1 or found[0] in taken:
            return {}
        taken.add(found[0])
        other = found[0].split("/")
        most = min(len(levels), len(other))
        same = next((at for at in range(most) if levels[-1 - at] != other[-1 - at]), most)
        if same < min(2, most):
            return {}
        in_front = in_front and same == most
        kept = same - (same == most)  # an entry needs at least one level in the old and the new name
        old, new = "/".join(levels[: len(levels) - kept]), "/".join(other[: len(other) - kept])
        if entries.setdefault(old, new) != new:
            return {}
    return entries if in_front or len(taken) == len(missing) else {}


class _Entry:
    """One entry of a renaming."""

    def __init__(self, old: str, new: str, level: str) -> None:
        self.old, self._new, self._level = old, new, level
        parts = [re.escape(part) for part in old.split("*")]
        self._pattern = re.compile("(.*)".join(parts), re.DOTALL) if len(parts) > 1 else None

    def exactness(self, name: str) -> tuple[bool, int]:
        """Return the rank of the entry among those that match one name; the highest applies."""
        return name == self.old, len(self.old.replace("*", ""))

    def new_name(self, name: str) -> str | None:
        """Return the new name, or None if the entry does not match."""
        if self._pattern is not None:
            found = self._pattern.fullmatch(name)
            if found is None:
                return None
            taken = iter(found.groups())
            return "".join(next(taken) if part == "*" else part for part in re.split(r"(\*)", self._new))
        begin = self.old.rstrip(self._level)
        if name == self.old or name.startswith(begin + self._level):
            return self._new.rstrip(self._level) + name[len(begin) :]
        return None


def _by_function(names: Mapping[str, str], rename: Callable[[str], str]) -> tuple[dict[str, str], list[str]]:
    found = {written: rename(name) for written, name in names.items()}
    for written, new in found.items():
        if not isinstance(new, str):
            raise TypeError(f"rename: the function must return a name, found {new!r} for {written!r}")
    changed = any(found[written] != name for written, name in names.items())
    return found, [] if changed or not names else ["the function changes no name"]
