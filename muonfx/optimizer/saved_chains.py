"""The code of the transforms of each parameter: a state dict records it, so that a load reports another chain.

The code of a whole chain has the labels, patterns and masks of all parameters. These differ without a reason for a
warning: a layer is frozen or added, parameters are renamed, a stage of a pipeline has others. Therefore the chain of
each parameter is recorded, in which they are replaced by their meaning for this parameter. The chain of "attn.qkv"
in ``partition({"muon": chain(momentum(), orthogonalize(view=view)), ...}, labels)`` is, if ``view`` has a pattern for
it, ``chain(momentum(), orthogonalize(view=MatrixView("(qkv=3 out) in -> qkv out in")))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    visits: tuple[Visit, ...]
    """The visit of the transform, then the visits of the transforms that it calls."""
    rules: Mapping[str, UpdateRule]
    """The transforms of each parameter, by name."""


def chains_of(visited: Stepping | VisitedTransform, names: Iterable[str]) -> dict[str, Transform]:
    """Return what the optimizer's transform does to each named parameter: a chain of transforms without labels.

    For example, ``{"weight": chain(momentum(), scale_by_learning_rate(0.1))}``. Parameters with equal chains have the
    same object. A chain has the numbers with which the optimizer was created, because param groups have the current
    numbers.
    """
    choices = _choices(visited.inner)  # functions that return a label, a pattern or the value of a mask by name
    chain_of_key: dict[tuple[object, ...], Transform] = {}  # to create the chain of many parameters once
    chain_of: dict[str, Transform] = {}
    for name in names:
        # Parameters with the same transforms, patterns and values of masks have equal chains.
        key = (visited.rules[name].indices, *[str(choice(name)) for choice in choices])
        if key not in chain_of_key:
            chain_of_key[key] = _chain_of(name, visited.inner, visited.visits[0])
        chain_of[name] = chain_of_key[key]
    return chain_of


def _choices(tx: Transform) -> list[Callable[[str], object]]:
    """Return, for each argument of the transforms in ``tx`` that differs between parameters, its value by name.

    Each is a function: for the labels ``{"w": "muon", "b": "adamw"}`` of a partition, it returns "muon" for "w".
    """
    choices: list[Callable[[str], object]] = []
    for _, part in walk(tx):
        for value in part.arguments.values():
            if isinstance(value, MatrixView):  # returns the pattern of a parameter, such as "out in -> out in"
                choices.append(value.text)
            elif isinstance(value, Mapping):  # labels or a mask
                choices.append(value.get)
    return choices


def _chain_of(name: str, tx: Transform, visited: Visit) -> Transform:
    """Return what a transform does to one parameter, as a transform without the labels of all parameters.

    For example, for a parameter with the label "muon", it is ``momentum()`` for
    ``partition({"muon": momentum(), "adamw": scale_by_adam()}, labels)``.

    Args:
        name: the name of the parameter.
        tx: the transform.
        visited: the visit of ``tx``. Its ``calls`` are the visits of the inner transforms, with their parameters.
    """
    # A partition or mask gives the parameter to one of its transforms at most. A chain gives it to each of them.
    is_divided = tx.factory is masked or any(call.label is not None for call in visited.calls)
    inner_chains: list[Transform] = []
    for child, call in zip(tx.children, visited.calls, strict=True):
        if name in call.param_names:  # the inner transform updates the parameter
            inner_chains.append(_chain_of(name, child, call))
        elif not is_divided:  # keep the number of inner transforms, which `with_children` needs
            inner_chains.append(identity())
    if is_divided:  # the chain of its label takes the place of the partition
        if not inner_chains:
            return identity()
        return inner_chains[0]
    return _for_parameter(tx.with_children(inner_chains), name)


def _for_parameter(chain: Transform, name: str) -> Transform:
    """Return a transform in which each argument for all parameters has the value for one of them only.

    For example, a view with patterns of many parameters becomes ``MatrixView("out in -> out in")``.
    """
    changes: dict[str, Any] = {}  # the new values by the name of the argument
    for argument, value in chain.arguments.items():
        if isinstance(value, MatrixView):
            changes[argument] = MatrixView(value.text(name))
        elif isinstance(value, Mapping) and name in value:
            changes[argument] = {"parameter": value[name]}  # a dict, as the transform requires
    if changes:
        chain = chain.replace(**changes)
    # Schedules are compared and reported with the numbers of groups. Their replacement is not checked, because its
    # values fit no argument: momentum would refuse a decay of 1.
    parts: list[Any] = list(chain.parts)
    for index, part in enumerate(parts):
        if isinstance(part, Schedule):
            parts[index] = any_schedule()
    return chain.with_parts(parts)


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


def record_of(chain_of: Mapping[str, SavedChain]) -> list[Any]:
    """Return the list in a state dict that has the chains of the parameters of a group, under the key `CHAINS`.

    First the number of parameters, then a list for each chain: its code, its fingerprint, and the names of its
    parameters. The chain of most parameters comes first, without names, to keep the state dict small. It is a list and
    no dict, because torch.distributed.checkpoint stores a list without tensors as one value.

    ``chain_of`` has the chain of each parameter by name, without the components that wrappers add to names.

    >>> first, second = SavedChain("momentum()", "d4c1"), SavedChain("scale(0.5)", "7f1e")
    >>> record_of({"w": first, "v": first, "b": second})
    [3, ['momentum()', 'd4c1'], ['scale(0.5)', '7f1e', 'b']]
    """
    if not chain_of:
        return []
    # The names of the parameters of each chain.
    names_of: dict[SavedChain, list[str]] = {}
    for name, chain in chain_of.items():
        names_of.setdefault(chain, []).append(name)
    usual = max(names_of, key=lambda chain: len(names_of[chain]))  # the chain of most parameters
    record: list[Any] = [len(chain_of), list(usual)]
    for chain, names in names_of.items():
        if chain != usual:
            record.append([*chain, *names])
    return record


def record_of_group(
    visited: Stepping | VisitedTransform, names: Iterable[str], plain_name_of: Mapping[str, str]
) -> list[Any]:
    """Return the list that a state dict has for the chains of the parameters in a group, as `record_of` describes it.

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
    """Return the entries of a saved group, in which the record of its chains has this optimizer's names.

    For example, with ``{"b": "0.bias"}``, the chain ``["scale(0.5)", "7f1e", "b"]`` becomes
    ``["scale(0.5)", "7f1e", "0.bias"]``. `record_of` describes the record.
    """
    if not saved.get(CHAINS):  # for example, torch leaves it out of a flattened state dict
        return saved
    count, *chains = saved[CHAINS]
    record: list[Any] = [count]
    for code, fingerprint, *names in chains:  # the usual chain has no names
        record.append([code, fingerprint, *[new_name_of.get(name, name) for name in names]])
    return {**saved, CHAINS: record}


def chain_in(record: Sequence[Any], name: str) -> SavedChain:
    """Return the chain of a parameter of the saved group with this record, which has the parameter under this name.

    >>> chain_in([2, ["momentum()", "d4c1"], ["scale(0.5)", "7f1e", "b"]], "b").code
    'scale(0.5)'
    """
    _, usual, *exceptions = record
    for code, fingerprint, *names in exceptions:
        if name in names:
            return SavedChain(code, fingerprint)
    return SavedChain(*usual)  # the record lists no names for the chain of most parameters


def saved_chains(record: Sequence[Any], names: Sequence[str]) -> dict[str, SavedChain]:
    """Return the chain of each named parameter of a saved group; nothing for parameters whose chain is not known.

    >>> saved_chains([2, ["momentum()", "d4c1"], ["scale(0.5)", "7f1e", "b"]], ["w", "b"])["w"]
    SavedChain(code='momentum()', fingerprint='d4c1')

    Args:
        record: the chains in the state dict, as `record_of` returns them, with the names of this optimizer.
        names: the names of the parameters in the saved group.
    """
    count, usual, *exceptions = record
    saved_chain_of: dict[str, SavedChain] = {}
    for code, fingerprint, *exceptional_names in exceptions:
        for name in exceptional_names:
            saved_chain_of[name] = SavedChain(code, fingerprint)
    # torch.distributed.checkpoint merges saved groups whose parameters are in one group now, and keeps one record. And
    # names of exceptions may be unknown here. Both make it unknown which parameters have the usual chain.
    if len(names) <= count and saved_chain_of.keys() <= set(names):
        for name in names:
            saved_chain_of.setdefault(name, SavedChain(*usual))
    return saved_chain_of


def chain_warnings(
    source: str,
    visited: Stepping | VisitedTransform,
    groups: Sequence[TrackedGroup],
    saved_groups: Sequence[Group | None],
) -> list[str]:
    """Return a warning if saved chains differ from the chains of an optimizer in more than numbers, else no warning.

    It is no error, as `muonfx.checkpoint.load` raises it, because torch's functions that load state dicts have no
    argument to allow the difference. Parameters without a saved chain are not compared.

    Args:
        source: begins the warning, such as "load_state_dict: the state dict".
        visited: has the transform of the optimizer.
        groups: the groups of the optimizer.
        saved_groups: the saved group of each group, or None. torch leaves out the record of a flattened state dict.
    """
    lines: list[str] = []
    for tracked, saved in zip(groups, saved_groups, strict=True):
        if saved is not None and saved.get(CHAINS):
            saved_chain_of = saved_chains(saved[CHAINS], saved["param_names"])
            lines += _differences(tracked, chains_of(visited, tracked.names), saved_chain_of)
    if not lines:
        return []
    return [
        f"{source} was saved with another chain. The state fits and was loaded, but updates will differ: "
        f"{first_lines(lines)}. To continue the saved run, create the optimizer with the saved arguments"
    ]


def _differences(
    tracked: TrackedGroup, chain_of: Mapping[str, Transform], saved_chain_of: Mapping[str, SavedChain]
) -> list[str]:
    """Return a line for each argument, except numbers, that differs between saved chains and the chains of a group.

    Args:
        tracked: the group, whose label begins each line.
        chain_of: the chain of each of its parameters in this optimizer.
        saved_chain_of: the chain of each parameter in the state dict.
    """
    # Per pair of chains that differ, the names of the parameters that have them, to report each difference once.
    names_of: dict[tuple[SavedChain, Transform], list[str]] = {}
    for name, chain in chain_of.items():
        saved_chain = saved_chain_of.get(name)
        if saved_chain is not None and saved_chain.fingerprint != chain.fingerprint:
            names_of.setdefault((saved_chain, chain), []).append(name)
    lines: list[str] = []
    for (saved_chain, chain), names in names_of.items():
        titles: list[str] = []  # which parameters differ, such as "group 'muon'", if not all of the optimizer
        if tracked.group.get("label") is not None:
            titles.append(f"group {tracked.group['label']!r}")
        if len(names) < len(chain_of):
            titles.append(format_list(names))
        for difference in differences_of_chains(saved_chain.code, repr(chain)).structure:
            lines.append(", ".join([*titles, difference]))
    return lines
