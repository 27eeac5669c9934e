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
from muonfx.transforms.matrices import MatrixView

# ------------------------------------------------------------------------------------------- the chain of a parameter


def chains_of(stepping: Stepping, names: Iterable[str]) -> dict[str, Transform]:
    """Return the chain of each named parameter. Parameters with equal chains have the same object.

    A chain has the numbers with which the optimizer was created, because param groups have the current numbers.
    """
    choices = _choices(stepping.inner)
    chain_of_key: dict[tuple[object, ...], Transform] = {}
    chain_of: dict[str, Transform] = {}
    for name in names:
        # Parameters with the same transforms, patterns and values of masks have equal chains.
        key = (stepping.rules[name].indices, *[str(choice(name)) for choice in choices])
        if key not in chain_of_key:
            chain_of_key[key] = _chain_of(name, stepping.inner, stepping.visits[0])
        chain_of[name] = chain_of_key[key]
    return chain_of


def _choices(tx: Transform) -> list[Callable[[str], object]]:
    """Return a function from a parameter name to its value, for each argument that differs between parameters."""
    choices: list[Callable[[str], object]] = []
    for _, part in walk(tx):
        for value in part.arguments.values():
            if isinstance(value, MatrixView):
                choices.append(value.text)
            elif isinstance(value, Mapping):
                choices.append(value.get)
    return choices


def _chain_of(name: str, tx: Transform, visited: Visit) -> Transform:
    """Return what a transform does to one parameter: a transform without labels, with its pattern and mask only.

    ``visited`` is the visit of ``tx``. A transform that does not receive the parameter is replaced by `identity`.
    """
    inner_chains: list[Transform] = []
    is_divided = tx.factory is masked or any(call.label is not None for call in visited.calls)
    for child, call in zip(tx.children, visited.calls, strict=True):
        if name in call.names:
            inner_chains.append(_chain_of(name, child, call))
        elif not is_divided:
            inner_chains.append(identity())
    if is_divided:  # one of the transforms receives the parameter, or none
        return inner_chains[0] if inner_chains else identity()
    chain = tx.with_children(inner_chains)
    changes: dict[str, Any] = {}
    for argument, value in chain.arguments.items():
        if isinstance(value, Schedule):  # schedules are compared and reported with the numbers of groups
            changes[argument] = any_schedule()
        elif isinstance(value, MatrixView):
            changes[argument] = MatrixView(value.text(name))
        elif isinstance(value, Mapping) and name in value:
            changes[argument] = {"parameter": value[name]}  # a dict, as the transform requires
    return chain.replace(**changes) if changes else chain


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
    """Return what a state dict records of the chains of a group, under the key `CHAINS`.

    It is a list with the number of parameters, then a list for each chain: its code, its fingerprint, and the names of
    its parameters. The first chain belongs to all other parameters, and has no names. It is a list and no dict, because
    torch.distributed.checkpoint stores a list without tensors as one value. Without parameters, it is empty.

    ``chain_of`` has the chain of each parameter by name, without the components that wrappers add to names.

    >>> first, second = SavedChain("momentum()", "d4c1"), SavedChain("scale(0.5)", "7f1e")
    >>> record_of({"w": first, "v": first, "b": second})
    [3, ['momentum()', 'd4c1'], ['scale(0.5)', '7f1e', 'b']]
    """
    if not chain_of:
        return []
    names_of: dict[SavedChain, list[str]] = {}
    for name, chain in chain_of.items():
        names_of.setdefault(chain, []).append(name)
    usual = max(names_of, key=lambda chain: len(names_of[chain]))
    del names_of[usual]
    record: list[Any] = [len(chain_of), list(usual)]
    for chain, names in names_of.items():
        record.append([*chain, *names])
    return record


def record_of_group(stepping: Stepping, names: Iterable[str], plain_name_of: Mapping[str, str]) -> list[Any]:
    """Return the record of the chains of named parameters, a group of an optimizer.

    ``plain_name_of`` has each name without the components that wrappers add.
    """
    saved_chain_of: dict[Transform, SavedChain] = {}  # most parameters have the same chain
    plain_chains: dict[str, SavedChain] = {}
    for name, chain in chains_of(stepping, names).items():
        if chain not in saved_chain_of:
            saved_chain_of[chain] = SavedChain(repr(chain), chain.fingerprint)
        plain_chains[plain_name_of[name]] = saved_chain_of[chain]
    return record_of(plain_chains)


def with_new_names(saved: Mapping[str, Any], new_name_of: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the entries of a saved group, in which the record of its chains has this optimizer's names."""
    if not saved.get(CHAINS):
        return saved
    count, *chains = saved[CHAINS]
    record: list[Any] = [count]
    for code, fingerprint, *names in chains:
        record.append([code, fingerprint, *[new_name_of.get(name, name) for name in names]])
    return {**saved, CHAINS: record}


def chain_in(record: Sequence[Any], name: str) -> SavedChain:
    """Return the chain of a parameter of the saved group with this record, which has the parameter under this name."""
    _, usual, *exceptions = record
    for code, fingerprint, *names in exceptions:
        if name in names:
            return SavedChain(code, fingerprint)
    return SavedChain(*usual)


def saved_chains(record: Sequence[Any], names: Sequence[str]) -> dict[str, SavedChain]:
    """Return the chain of each named parameter of a saved group; nothing for parameters whose chain is not known.

    ``record`` is a value of `record_of`, with the names of this optimizer.
    """
    count, usual, *exceptions = record
    saved_chain_of: dict[str, SavedChain] = {}
    for code, fingerprint, *exceptional_names in exceptions:
        saved_chain_of.update(dict.fromkeys(exceptional_names, SavedChain(code, fingerprint)))
    # torch.distributed.checkpoint merges saved groups whose parameters are in one group now, and keeps one record. And
    # names of exceptions may be unknown here. Both make it unknown which parameters have the usual chain.
    if len(names) <= count and saved_chain_of.keys() <= set(names):
        for name in names:
            saved_chain_of.setdefault(name, SavedChain(*usual))
    return saved_chain_of


def chain_warnings(
    source: str, stepping: Stepping, groups: Sequence[TrackedGroup], saved_groups: Sequence[Group | None]
) -> list[str]:
    """Return a warning if saved chains differ from the chains of an optimizer in more than numbers, else no warning.

    It is no error, as `muonfx.checkpoint.load` raises it, because torch's functions that load state dicts have no
    argument to allow the difference. Parameters without a saved chain are not compared.

    Args:
        source: begins the warning, such as "load_state_dict: the state dict".
        stepping: has the transform of the optimizer.
        groups: the groups of the optimizer.
        saved_groups: the saved group of each group, or None. torch leaves out the record of a flattened state dict.
    """
    lines: list[str] = []
    for tracked, saved in zip(groups, saved_groups, strict=True):
        if saved is not None and saved.get(CHAINS):
            saved_chain_of = saved_chains(saved[CHAINS], saved["param_names"])
            lines += _differences(tracked, chains_of(stepping, tracked.names), saved_chain_of)
    if not lines:
        return []
    return [
        f"{source} was saved with another chain. The state fits and was loaded, but updates will differ: "
        f"{first_lines(lines)}. To continue the saved run, create the optimizer with the saved arguments"
    ]


def _differences(
    tracked: TrackedGroup, chain_of: Mapping[str, Transform], saved_chain_of: Mapping[str, SavedChain]
) -> list[str]:
    """Return a line for each argument, except numbers, that differs between saved chains and the chains of a group."""
    # By the saved chain and the chain of this optimizer, if they differ: the names of the parameters that have them.
    names_of: dict[tuple[SavedChain, Transform], list[str]] = {}
    for name, chain in chain_of.items():
        saved_chain = saved_chain_of.get(name)
        if saved_chain is not None and saved_chain.fingerprint != chain.fingerprint:
            names_of.setdefault((saved_chain, chain), []).append(name)
    lines: list[str] = []
    for (saved_chain, chain), names in names_of.items():
        titles: list[str] = []  # which parameters differ, if not all of the optimizer
        if tracked.group.get("label") is not None:
            titles.append(f"group {tracked.group['label']!r}")
        if len(names) < len(chain_of):
            titles.append(format_list(names))
        for difference in differences_of_chains(saved_chain.code, repr(chain)).structure:
            lines.append(", ".join([*titles, difference]))
    return lines
