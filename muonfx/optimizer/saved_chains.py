"""The code of the transforms of each parameter: a state dict records it, so that a load reports another chain.

The code of a whole chain has the labels, patterns and masks of all parameters. These differ without a reason for a
warning: a layer is frozen or added, parameters are renamed, a stage of a pipeline has others. Therefore the chain of
each parameter is recorded, in which they are replaced by their meaning for this parameter. The chain of "attn.qkv"
in ``partition({"muon": chain(momentum(), orthogonalize(view=view)), ...}, labels)`` is, if ``view`` has a pattern for
it, ``chain(momentum(), orthogonalize(view=MatrixView("(qkv=3 out) in -> qkv out in")))``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from muonfx.core import Transform, identity, masked
from muonfx.core.chain_differences import CHAINS, differences_of_chains
from muonfx.core.schedules import Schedule, ScheduleFunction, schedule
from muonfx.core.value import walk
from muonfx.core.visit import Visit
from muonfx.internal.display import format_list
from muonfx.optimizer.group_numbers import Group, TrackedGroup
from muonfx.optimizer.resuming import first_lines
from muonfx.optimizer.stepping import Stepping
from muonfx.optimizer.update_rules import UpdateRule
from muonfx.transforms.matrices import MatrixView

# ------------------------------------------------------------------------------------------- the chain of a parameter


class VisitedTransform(NamedTuple):
    """A transform for named parameters, as an optimizer without `Stepping` has it."""

    inner: Transform
    root: Visit
    """The visit of the transform, with the visits of the transforms that it calls."""
    rules: Mapping[str, UpdateRule]
    """The transforms of each parameter, by name."""


def chains_of(visited: Stepping | VisitedTransform, names: Iterable[str]) -> dict[str, Transform]:
    """Return what the optimizer's transform does to each named parameter: a chain of transforms without labels.

    For example, ``{"weight": chain(momentum(), scale_by_learning_rate(0.1))}``. A save records these chains, and a load
    compares them with the saved ones. Parameters with equal chains have the same object. A chain has the numbers from
    the construction of the optimizer, because param groups have the current numbers.

    Args:
        visited: has the optimizer's transform, and the list of transforms that update each parameter.
        names: the names of the parameters.
    """
    # These arguments, such as labels, have a value for each parameter.
    arguments = _arguments_by_name(visited.inner)
    # To create the chain of many parameters once: they have equal chains if the same transforms update them, and their
    # labels, patterns and values of masks are equal.
    chain_of_key: dict[tuple[object, ...], Transform] = {}
    chain_of: dict[str, Transform] = {}
    for name in names:
        indices_of_transforms = visited.rules[name].indices
        key = (indices_of_transforms, *[_text_for(name, argument) for argument in arguments])
        if key not in chain_of_key:
            chain_of_key[key] = _chain_of(name, visited.inner, visited.root)
        chain_of[name] = chain_of_key[key]
    return chain_of


def _arguments_by_name(tx: Transform) -> list[MatrixView | Mapping[Any, Any]]:
    """Return the arguments of the transforms in ``tx`` that have a value for each parameter: views, labels and masks.

    For example, the labels ``{"w": "muon", "b": "adamw"}`` of a partition.
    """
    arguments: list[MatrixView | Mapping[Any, Any]] = []
    for _, part in walk(tx):
        for value in part.arguments.values():
            if isinstance(value, MatrixView | Mapping):
                arguments.append(value)
    return arguments


def _text_for(name: str, argument: MatrixView | Mapping[Any, Any]) -> str:
    """Return the value that an argument has for a parameter, as text: "out in -> out in", "muon", or "True"."""
    value = argument.text(name) if isinstance(argument, MatrixView) else argument.get(name)
    return str(value)


def _chain_of(name: str, tx: Transform, visited: Visit) -> Transform:
    """Return what a transform does to one parameter, as a transform for this parameter alone, which a save records.

    For example, for a parameter with the label "muon", it is ``momentum()`` for
    ``partition({"muon": momentum(), "adamw": scale_by_adam()}, labels)``.

    Args:
        name: the name of the parameter.
        tx: the transform.
        visited: the visit of ``tx``. Its ``calls`` are the visits of the inner transforms, with their parameters.
    """
    is_partition = any(call.label is not None for call in visited.calls)
    if is_partition or tx.factory is masked:
        return _chain_of_label(name, tx, visited)
    inner_chains: list[Transform] = []
    for child, call in zip(tx.children, visited.calls, strict=True):
        if name in call.param_names:  # the inner transform updates the parameter
            inner_chains.append(_chain_of(name, child, call))
        else:
            # Keeps the number of inner transforms, as `with_children` requires.
            inner_chains.append(identity())
    chain_of_name = _for_parameter(tx.with_children(inner_chains), name)
    return _without_schedules(chain_of_name)


def _chain_of_label(name: str, tx: Transform, visited: Visit) -> Transform:
    """Return the chain of the transform to which a partition or mask gives a parameter; `identity` if to none."""
    for child, call in zip(tx.children, visited.calls, strict=True):
        if name in call.param_names:
            return _chain_of(name, child, call)
    return identity()


def _for_parameter(tx: Transform, name: str) -> Transform:
    """Return a transform in which each argument for all parameters has the value for one of them only.

    For example, a view with patterns of many parameters becomes ``MatrixView("out in -> out in")``, and the mask
    ``{"w": True, "b": False}`` becomes ``{"parameter": True}`` for "w". The name "parameter" is the same for all, so
    that two parameters with equal values have equal transforms.
    """
    changes: dict[str, Any] = {}  # the new values by the name of the argument
    for argument, value in tx.arguments.items():
        if isinstance(value, MatrixView):
            changes[argument] = MatrixView(value.text(name))
        elif isinstance(value, Mapping) and name in value:
            changes[argument] = {"parameter": value[name]}
    if not changes:
        return tx
    return tx.replace(**changes)


def _without_schedules(tx: Transform) -> Transform:
    """Return a transform with `any_schedule` in place of each schedule among its own arguments.

    So chains with other schedules are equal: schedules are compared with the numbers of the groups, in `resuming`.
    """
    parts: list[Any] = list(tx.parts)
    for index, part in enumerate(parts):
        if isinstance(part, Schedule):
            parts[index] = any_schedule()
    return tx.with_parts(parts)  # without a check of the values: momentum would refuse a decay of 1


@schedule
def any_schedule() -> ScheduleFunction:
    """Make a schedule that replaces every schedule in the code of a chain. It is never evaluated."""
    return lambda count: count


# -------------------------------------------------------------------------------------------------- record and compare


class SavedChain(NamedTuple):
    """The chain of a parameter in a state dict."""

    code: str
    """Python code that creates the chain, with the numbers with which the optimizer was created."""
    fingerprint: str


class ChainRecord(NamedTuple):
    """The chains of the parameters in a param group that was saved."""

    param_count: int
    """How many parameters the group had."""
    usual_chain: SavedChain
    """The chain of most parameters, whose names are not saved, to keep the state dict small."""
    exceptions: dict[str, SavedChain]
    """The chains of all other parameters by name."""

    @classmethod
    def from_text(cls, text: str) -> ChainRecord:
        """Return the record that a state dict has as JSON; `to_text` is the reverse.

        The first chain, without names, is the chain of all parameters that have no other.

        >>> record = ChainRecord.from_text(
        ...     '[3, ["momentum()", "d4c1"], ["scale(0.5)", "7f1e", "b"]]'
        ... )
        >>> record.exceptions
        {'b': SavedChain(code='scale(0.5)', fingerprint='7f1e')}
        """
        param_count, usual, *chains_with_names = json.loads(text)
        exceptions: dict[str, SavedChain] = {}
        for code, fingerprint, *names in chains_with_names:
            for name in names:
                exceptions[name] = SavedChain(code, fingerprint)
        return cls(param_count, SavedChain(*usual), exceptions)

    def to_text(self) -> str:
        """Return the record as JSON: the number of parameters, the usual chain, and each other chain with its names.

        A state dict has the text, not a list: torch loads a list item by item, and would mix saved and current items.

        >>> chain, other_chain = SavedChain("momentum()", "d4c1"), SavedChain("scale(0.5)", "7f1e")
        >>> ChainRecord(3, chain, {"b": other_chain}).to_text()
        '[3, ["momentum()", "d4c1"], ["scale(0.5)", "7f1e", "b"]]'
        """
        names_of: dict[SavedChain, list[str]] = {}
        for name, chain in self.exceptions.items():
            names_of.setdefault(chain, []).append(name)
        chains_with_names = [[*chain, *names] for chain, names in names_of.items()]
        return json.dumps([self.param_count, self.usual_chain, *chains_with_names])

    def chain_of(self, name: str) -> SavedChain:
        """Return the chain of a parameter that was in the saved group."""
        return self.exceptions.get(name, self.usual_chain)

    def known_chains(self, names: Sequence[str]) -> dict[str, SavedChain]:
        """Return, by name, the chains of the parameters of a saved group, of which ``names`` are the names.

        torch.distributed.checkpoint merges saved groups whose parameters are in one group now, and keeps the record of
        one of them. Then only the chains that the record has by name are known: `exceptions`.
        """
        has_more_names = len(names) > self.param_count
        lacks_names = not self.exceptions.keys() <= set(names)
        if has_more_names or lacks_names:  # the record is of another group
            return self.exceptions
        return {name: self.chain_of(name) for name in names}


def record_of(chain_of: Mapping[str, SavedChain]) -> str:
    """Return the text in which a state dict has the chain of each parameter of a group.

    Most parameters have one chain. To keep the text small, it has no names: here, of 3 parameters all but "b" have it.

    >>> chain, other_chain = SavedChain("momentum()", "d4c1"), SavedChain("scale(0.5)", "7f1e")
    >>> record_of({"w": chain, "v": chain, "b": other_chain})
    '[3, ["momentum()", "d4c1"], ["scale(0.5)", "7f1e", "b"]]'
    """
    if not chain_of:
        return ""
    counts = Counter(chain_of.values())  # how many parameters have each chain
    usual_chain = max(counts, key=lambda chain: counts[chain])
    exceptions = {name: chain for name, chain in chain_of.items() if chain != usual_chain}
    return ChainRecord(len(chain_of), usual_chain, exceptions).to_text()


def record_of_group(
    visited: Stepping | VisitedTransform, names: Iterable[str], plain_name_of: Mapping[str, str]
) -> str:
    """Return the text that a state dict has for the chains of the parameters in a group: `record_of` has an example.

    Args:
        visited: has the transform of the optimizer.
        names: the names of the parameters in the group.
        plain_name_of: each name without the components that wrappers add: ``{"module.0.weight": "0.weight"}``.
    """
    saved_chain_of: dict[Transform, SavedChain] = {}  # to write the code of each chain once
    saved_chain_of_name: dict[str, SavedChain] = {}
    for name, chain in chains_of(visited, names).items():
        if chain not in saved_chain_of:
            saved_chain_of[chain] = SavedChain(repr(chain), chain.fingerprint)
        saved_chain_of_name[plain_name_of[name]] = saved_chain_of[chain]
    return record_of(saved_chain_of_name)


def with_new_names(saved: Mapping[str, Any], new_name_of: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the entries of a saved group, whose record of chains has this optimizer's names of the parameters.

    >>> saved = {CHAINS: '[2, ["momentum()", "d4c1"], ["scale(0.5)", "7f1e", "b"]]'}
    >>> with_new_names(saved, {"b": "0.bias"})[CHAINS]
    '[2, ["momentum()", "d4c1"], ["scale(0.5)", "7f1e", "0.bias"]]'
    """
    if not saved.get(CHAINS):  # for example, torch leaves it out of a flattened state dict
        return saved
    record = ChainRecord.from_text(saved[CHAINS])
    exceptions = {new_name_of.get(name, name): chain for name, chain in record.exceptions.items()}
    return {**saved, CHAINS: record._replace(exceptions=exceptions).to_text()}


def chain_warning(
    source: str,
    visited: Stepping | VisitedTransform,
    groups: Sequence[TrackedGroup],
    saved_groups: Sequence[Group | None],
) -> str | None:
    """Return a warning if other transforms update a parameter than when it was saved, else None.

    For example, its saved chain of transforms is ``chain(momentum(), scale(0.5))``, and now it is ``momentum()``. Other
    numbers are no difference. This is a warning, not an error as in `muonfx.checkpoint.load`, because torch's functions
    that load state dicts have no argument to allow the difference.

    Args:
        source: begins the warning, such as "load_state_dict: the state dict".
        visited: has the transform of the optimizer.
        groups: the groups of the optimizer.
        saved_groups: the group of the state dict for each of these groups, or None. One without chains is not compared.
    """
    lines: list[str] = []
    for tracked, saved in zip(groups, saved_groups, strict=True):
        if saved is None or not saved.get(CHAINS):
            continue
        saved_chain_of = ChainRecord.from_text(saved[CHAINS]).known_chains(saved["param_names"])
        chain_of = chains_of(visited, tracked.names)
        lines += _differences(tracked, chain_of, saved_chain_of)
    if not lines:
        return None
    return (
        f"{source} was saved with another chain. The state fits and was loaded, but updates will differ: "
        f"{first_lines(lines)}. To continue the saved run, create the optimizer with the saved arguments"
    )


def _differences(
    tracked: TrackedGroup,
    chain_of: Mapping[str, Transform],
    saved_chain_of: Mapping[str, SavedChain],
) -> list[str]:
    """Return a line for each argument, except numbers, that differs between saved chains and the chains of a group.

    A chain is the list of transforms that update a parameter.

    Args:
        tracked: the group, whose label begins each line.
        chain_of: the chain of each of its parameters in this optimizer.
        saved_chain_of: the chain of each parameter in the state dict, if it is known.
    """
    # Many parameters have the same two chains. They have one line: their names, by these two chains.
    names_of: dict[tuple[SavedChain, Transform], list[str]] = {}
    for name, chain in chain_of.items():
        saved_chain = saved_chain_of.get(name)
        if saved_chain is not None and saved_chain.fingerprint != chain.fingerprint:
            names_of.setdefault((saved_chain, chain), []).append(name)
    lines: list[str] = []
    for (saved_chain, chain), names in names_of.items():
        is_whole_group = len(names) == len(chain_of)
        title = _title(tracked.group.get("label"), names, is_whole_group=is_whole_group)
        differences = differences_of_chains(saved_chain.code, repr(chain))
        lines += [title + difference for difference in differences.structure]
    return lines


def _title(label: str | None, names: Sequence[str], *, is_whole_group: bool) -> str:
    """Return which parameters of a group a line is about, such as "group 'muon', 'w' and 'b', "."""
    title = ""
    if label is not None:
        title += f"group {label!r}, "
    if not is_whole_group:
        title += f"{format_list(names)}, "
    return title
