"""Convert optimizer states from and to other Muon and AdamW implementations, with ``read``, ``write`` and ``recipe``.

A format is the name of another optimizer: "torch" (``torch.optim.Muon`` and ``AdamW``), "keller" (Keller Jordan's
Muon), "moonlight", or "dion" (``dion.Muon``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from muonfx.checkpoint.convert.formats import FORMATS, GROUP_STEP, Format, Group, Keys, Values
from muonfx.checkpoint.convert.states import Leaf, filled, flat, gathered
from muonfx.core import Transform
from muonfx.core.checks import warn_caller
from muonfx.core.partition import partition
from muonfx.internal.arguments import did_you_mean
from muonfx.internal.display import format_list
from muonfx.tree import PyTree

__all__ = ["FormatName", "read", "recipe", "write"]

FormatName = Literal["torch", "keller", "moonlight", "dion"]
"""The name of another optimizer, from and to which states can be converted."""


Names: TypeAlias = Sequence[str] | Sequence[Sequence[str]] | None
"""The names of an optimizer's parameters, in its order; for several optimizers, a list with such a list for each."""


def __dir__() -> list[str]:
    return sorted(__all__)


def read(
    format: FormatName,
    source: Any,
    tx: Transform,
    params: PyTree,
    *,
    names: Names = None,
    step: int | None = None,
) -> PyTree:
    """Convert the state of another optimizer to the state of a transform.

    Args:
        format: the name of the other optimizer.
        source: an optimizer, its ``state_dict()``, or a list of these if several optimizers train one model. DTensors,
            as FSDP2 has, are converted where they are, if ``params`` have the same shards. Collect other distributed
            state first, such as the momenta of Keller Jordan's ``MuonWithAuxAdam``.
        tx: the transform that will use the state. `recipe` makes one with the same updates as the other optimizer.
        params: the parameters by name, such as ``dict(model.named_parameters())``. If ``source`` is an optimizer of
            these tensors, its parameters get their names from here.
        names: the names of the parameters in the order of the optimizer, for a state dict without names; a list of
            such lists for several state dicts.
        step: the number of steps taken. Required if the transform counts steps, and the source has no step count or
            has different step counts for different parameters.

    Returns:
        A new state of ``tx`` with copies of the tensors, in the dtypes of ``tx.init(params)``.

    Raises:
        ValueError: the format or a name is unknown, or source and transform do not fit; the message lists all
            differences.

    Example:
        >>> model = torch.nn.Linear(4, 3, bias=False)
        >>> optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
        >>> model(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> params = dict(model.named_parameters())
        >>> state = read("torch", optimizer, recipe("torch", optimizer, params), params)
        >>> bool(
        ...     (
        ...         state["momentum"].trace["weight"]
        ...         == optimizer.state[model.weight]["momentum_buffer"]
        ...     ).all()
        ... )
        True
    """
    form = _format(format)
    leaves: dict[str, Leaf] = {}
    for entry in _entries(form, source, flat(params), names):
        keys = form.keys[entry.kind]
        moments = [entry.values.get(key) for key in keys.moments]
        leaves[entry.name] = Leaf(entry.kind, moments, _steps_of(entry, keys))
    return filled(tx, params, leaves, heavy_ball=form.heavy_ball, step=step)


def _steps_of(entry: _Entry, keys: Keys) -> int | None:
    """Return the number of steps that another optimizer has counted for a parameter; None if it counts none.

    AdamW has it in the state of the parameter, ``entry.values["step"]``, and Dion also in ``entry.group["step"]``.
    """
    steps = None
    if keys.step is not None:
        steps = entry.values.get(keys.step)
    if steps is None:
        steps = entry.group.get(GROUP_STEP)
    if steps is None:
        return None
    return int(steps)


def write(
    format: FormatName, state: PyTree, target: Any, params: PyTree, *, names: Names = None
) -> dict[str, Any]:
    """Convert the state of a transform to a state dict for another optimizer.

    Args:
        format: the name of the other optimizer.
        state: the state of a chain with momentum, Adam or Lion. For "moonlight" and "dion", the momentum must be
            ``momentum(heavy_ball=True)``.
        target: the optimizer or its ``state_dict()``. The result has its parameter groups and hyperparameters. Groups
            that count steps, as in "dion", get the number of steps of the state.
        params: the parameters by name, such as ``dict(model.named_parameters())``.
        names: the names of the parameters in the order of the optimizer, for a state dict without names.

    Returns:
        The argument of ``optimizer.load_state_dict``.

    Raises:
        TypeError: ``target`` is neither an optimizer nor a state dict of one.
        ValueError: ``state`` has no momentum, Adam or Lion state for a parameter of ``target``.

    Example:
        >>> import muonfx as mfx
        >>> model = torch.nn.Linear(4, 3)
        >>> params = dict(model.named_parameters())
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> optimizer.load_state_dict(
        ...     write("torch", mfx.adamw(1e-3).init(params), optimizer, params)
        ... )
        >>> sorted(optimizer.state[model.bias])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    form = _format(format)
    leaves = gathered(state)
    saved = _state_dict_of(form, target)
    states: dict[int | str, dict[str, Any]] = {}  # by the number of the parameter, or by its name
    for entry in _entries(form, target, flat(params), names):
        leaf = _leaf_for(entry, leaves, form)
        states[entry.number] = _values_of(leaf, entry, form)
    steps = {leaf.step for leaf in leaves.values() if leaf.step is not None}
    groups = [_with_steps(group, steps) for group in saved["param_groups"]]
    return {**saved, "state": states, "param_groups": groups}


def _values_of(leaf: Leaf, entry: _Entry, form: Format) -> dict[str, Any]:
    """Return the state of a parameter as the other optimizer has it, from its state here, the ``leaf``.

    For ``Leaf("adamw", [mu, nu], 100)``, it is ``{"exp_avg": mu, "exp_avg_sq": nu, "step": tensor(100.)}`` in torch.
    """
    keys = form.keys[entry.kind]
    values = dict(entry.values)  # those without a counterpart here, such as "use_muon", stay
    values.update(zip(keys.moments, leaf.moments, strict=True))
    if keys.step is not None and leaf.step is not None:
        values[keys.step] = form.make_step(leaf.step)
    return values


def _with_steps(group: Group, steps: set[int]) -> Group:
    """Return a group that counts steps with the number of steps of the converted state, and any other as it is.

    >>> _with_steps({"algorithm": "muon", "step": 0}, {7})
    {'algorithm': 'muon', 'step': 7}
    """
    if GROUP_STEP not in group or not steps:
        return group
    return {**group, GROUP_STEP: max(steps)}


def _leaf_for(entry: _Entry, leaves: Mapping[str, Leaf], form: Format) -> Leaf:
    """Return the leaf for a parameter of the other optimizer; raise if there is none, or one of another kind."""
    leaf = leaves.get(entry.name)
    if leaf is not None and leaf.kind == entry.kind:
        return leaf
    kind_in_state = "nothing" if leaf is None else f"a {leaf.kind} state"
    raise ValueError(
        f"{entry.name!r} has a {entry.kind} state in {form.title}; the muonfx state has {kind_in_state} for it"
    )


def recipe(
    format: FormatName,
    source: Any,
    params: PyTree,
    *,
    names: Names = None,
    rate: Literal["lr", "initial_lr"] | None = None,
    **options: Any,
) -> Transform:
    """Return a chain of transforms that computes the same updates as another optimizer.

    The hyperparameters are the current values in its parameter groups. One format differs slightly: Moonlight's AdamW
    adds eps before the bias correction of the second moment, and muonfx adds it afterwards. The relative difference of
    an update is at most 3.5 eps divided by the corrected root of the second moment, and decreases with the steps.

    Args:
        format: the name of the other optimizer.
        source: the optimizer, its ``state_dict()``, or a list of these, as in `read`.
        params: the parameters by name, such as ``dict(model.named_parameters())``.
        names: the names of the parameters in the order of the optimizer, as in `read`.
        rate: the entry of each group that is the learning rate of the chain. "initial_lr" is the rate that a scheduler
            of torch multiplies: pass it to create the scheduler again for the new optimizer. "lr" is the current rate.
            None: "lr", with a warning if "initial_lr" differs.
        **options: arguments of `muonfx.orthogonalize`: ``dtype=``, which is bf16 in most other implementations, and
            ``coefficients="quintic"`` for a ``dion.Muon`` that was made with ``use_polar_express=False``.

    Returns:
        A chain. If parameters need different chains, a `muonfx.partition` of several chains.

    Raises:
        ValueError: a setting has no equivalent in these chains, such as ``amsgrad``, ``cautious_wd`` or an eps of
            ``torch.optim.Muon`` other than its default; or the format or a name is unknown, or a group has no
            "initial_lr".

    Warns:
        UserWarning: a group has an "initial_lr" other than its "lr", and ``rate`` is None.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3, 4))
        >>> recipe(
        ...     "torch", torch.optim.Muon([weight], lr=0.1), {"w": weight}
        ... )  # doctest: +NORMALIZE_WHITESPACE
        chain(momentum(), orthogonalize(coefficients='keller'), scale_by_shape(lr_scaling='original'),
              add_decayed_weights(weight_decay=0.1), scale_by_learning_rate(learning_rate=0.1))
    """
    form = _format(format)
    if rate not in (None, "lr", "initial_lr"):
        raise ValueError(f"rate: found {rate!r}, expected 'lr' or 'initial_lr'")
    tensors = flat(params)
    entries = _entries(form, source, tensors, names)
    label_of: dict[str, str] = {}
    chains: dict[str, Transform] = {}
    for entry in entries:
        tx = _chain_of(form, entry, tensors[entry.name].shape, rate, options)
        label = _label_for(tx, entry.kind, chains)
        chains[label] = tx
        label_of[entry.name] = label
    if rate is None:
        _warn_of_scheduled_rate(form, entries)
    if len(chains) == 1:
        (chain,) = chains.values()
        return chain
    return partition(chains, label_of)


def _chain_of(
    form: Format, entry: _Entry, shape: torch.Size, rate: str | None, options: Mapping[str, Any]
) -> Transform:
    """Return the chain that updates a parameter as the other optimizer does; its errors begin with the name.

    ``rate`` and ``options`` are arguments of `recipe`.
    """
    group = entry.group
    try:
        if rate == "initial_lr":
            group = {**group, "lr": group["initial_lr"]}
        return form.chain_of(group, entry.kind, shape, options)
    except KeyError as missing:
        raise ValueError(
            f"{entry.name!r}: its group in {form.title} has no {missing}, only {sorted(entry.group)}"
        ) from None
    except ValueError as problem:
        raise ValueError(f"{entry.name!r}: {problem}") from None


def _warn_of_scheduled_rate(form: Format, entries: Sequence[_Entry]) -> None:
    """Warn if a scheduler has changed a rate of the source: a new scheduler would multiply the changed rate again.

    A scheduler of torch keeps the rate without its factor in the group as "initial_lr". One warning is enough.
    """
    for entry in entries:
        lr = float(entry.group["lr"])
        initial_lr = float(entry.group.get("initial_lr", lr))
        if lr != initial_lr:
            warn_caller(
                f"convert.recipe: a scheduler has changed the rate of {entry.name!r} in {form.title} from {initial_lr} "
                f'("initial_lr") to {lr} ("lr"), and the chain has {lr}. Pass rate="initial_lr" if the new optimizer '
                'gets a scheduler, which multiplies this rate, or rate="lr" to keep the current rate'
            )
            return


def _label_for(tx: Transform, kind: str, chains: Mapping[str, Transform]) -> str:
    """Return the label for the chain ``tx`` of a parameter: the label of an equal chain, or else a new one.

    ``kind`` is "muon", "adamw" or "lion". The first new label is "muon", for a Muon with another learning rate it is
    "muon_2", then "muon_3". ``chains`` has the chains so far by label.
    """
    for label, chain in chains.items():
        if chain == tx:
            return label
    # "muon" and "muon_2"
    labels_of_kind = [label for label in chains if label.partition("_")[0] == kind]
    if not labels_of_kind:
        return kind
    return f"{kind}_{len(labels_of_kind) + 1}"


class _Entry(NamedTuple):
    """One parameter of the other optimizer: its group and state, and its key in the optimizer's ``state_dict()``."""

    name: str
    kind: str
    """Which optimizer updates the parameter: "muon", "adamw" or "lion"."""
    group: Group
    values: Values
    number: int | str
    """The key of the parameter in ``state_dict()["state"]``: a number, or the name in torch's state dicts by name."""


def _format(format: str) -> Format:
    """Return the `Format` with a name such as "keller"; raise ValueError for an unknown name."""
    if format not in FORMATS:
        raise ValueError(
            f"format: found {format!r}, expected one of {[*FORMATS]}{did_you_mean(format, list(FORMATS))}"
        )
    return FORMATS[format]


def _entries(form: Format, source: Any, params: Mapping[str, Tensor], names: Names) -> list[_Entry]:
    """Return the name, group and state of each parameter of ``source``, an optimizer or state dict, or a list of these.

    The ``state_dict()`` of an optimizer of torch is such as ``{"state": {0: {"exp_avg": tensor}}, "param_groups":
    [{"lr": 0.1, "params": [0]}]}``. The number 0 gets its name from ``params`` or ``names``, arguments of `read`.
    """
    optimizers: Sequence[Any] = source if isinstance(source, Sequence) else [source]
    names_of_each = _names_of_each(form, names, len(optimizers))
    entries: dict[str, _Entry] = {}
    for optimizer, names_of_optimizer in zip(optimizers, names_of_each, strict=True):
        saved = _state_dict_of(form, optimizer)
        groups: list[Group] = saved["param_groups"]
        ordered_names = _names_in_order(optimizer, groups, params, names_of_optimizer)
        name_of = _names_by_number(form, groups, ordered_names, params)  # {0: "fc.weight"}
        for group in groups:
            for number in group["params"]:
                name = name_of[number]
                if name in entries:
                    raise ValueError(
                        f"{form.title}: found {name!r} in two optimizers or groups, expected one"
                    )
                values = saved["state"].get(number, {})  # none before the first step
                entries[name] = _Entry(name, form.kind_of(group, values), group, values, number)
    return list(entries.values())


def _names_of_each(
    form: Format, names: Names, number_of_optimizers: int
) -> Sequence[Sequence[str] | None]:
    """Return a list with the names of the parameters of each optimizer, or None, from the argument ``names`` of `read`.

    >>> torch_format = FORMATS["torch"]
    >>> _names_of_each(torch_format, ["fc.weight"], 1), _names_of_each(torch_format, None, 1)
    ([['fc.weight']], [None])
    >>> _names_of_each(torch_format, [["fc.weight"], ["fc.bias"]], 2)
    [['fc.weight'], ['fc.bias']]
    """
    if names is None:
        return [None] * number_of_optimizers
    # A list of strings is for one optimizer. If there are several, its length does not fit, which is an error later.
    if any(isinstance(name, str) for name in names):
        return [cast("Sequence[str]", names)] * number_of_optimizers
    if len(names) != number_of_optimizers:
        raise ValueError(
            f"{form.title}: found {len(names)} lists of names for {number_of_optimizers} optimizers or state dicts, "
            "expected one for each: pass names= as a list of lists, in the order of the source"
        )
    return names


def _state_dict_of(form: Format, optimizer: Any) -> Mapping[str, Any]:
    """Return the state dict of an optimizer, or a value that is one already; raise for any other value."""
    state_dict = optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        state_dict = optimizer.state_dict()
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise TypeError(
            f"{form.title}: expected an optimizer or its state_dict(), found {type(state_dict).__name__}"
        )
    return state_dict


def _names_in_order(
    optimizer: object,
    groups: Sequence[Group],
    params: Mapping[str, Tensor],
    names: Sequence[str] | None,
) -> Sequence[str]:
    """Return the names of the parameters of an optimizer or state dict, in its order; none if they are not known.

    Args:
        optimizer: the optimizer or state dict.
        groups: its parameter groups, as a state dict has them.
        params: the parameters by name.
        names: the names from the caller; None if there are none.
    """
    # Best are the names of the tensors themselves, then those from the caller, then those in the groups.
    tensors = _tensors_of(optimizer)
    name_of = {param: name for name, param in params.items()}  # a tensor is hashed by its identity
    are_in_params = name_of.keys() >= set(tensors)
    if tensors and are_in_params:
        return [name_of[tensor] for tensor in tensors]
    if names is not None:
        return names
    return _names_in_groups(groups)


def _tensors_of(optimizer: object) -> list[Tensor]:
    """Return the parameters of an optimizer in its order; none of a state dict, which has numbers instead."""
    tensors: list[Tensor] = []
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            tensors += group["params"]
    return tensors


def _names_in_groups(groups: Sequence[Group]) -> list[str]:
    """Return the names of all parameters in the groups of a state dict, in order.

    A group has them as "params", in place of numbers, or as "param_names". A group with neither adds none.

    >>> _names_in_groups([{"params": ["fc.weight"]}, {"params": [1], "param_names": ["fc.bias"]}])
    ['fc.weight', 'fc.bias']
    """
    names: list[str] = []
    for group in groups:
        has_names_as_params = any(isinstance(param, str) for param in group["params"])
        if has_names_as_params:
            names += group["params"]
        else:
            names += group.get("param_names", [])
    return names


def _names_by_number(
    form: Format,
    groups: Sequence[Group],
    ordered_names: Sequence[str],
    params: Mapping[str, Tensor],
) -> dict[int | str, str]:
    """Return the name of each parameter by its number in the groups of a state dict: ``{0: "fc.weight", ...}``.

    ``ordered_names`` has the names in the order of the groups. Raise unless there is one for each number, and all are
    names of ``params``. A state dict of torch's ``get_optimizer_state_dict`` has names as numbers.
    """
    numbers: list[int | str] = []
    for group in groups:
        numbers += group["params"]
    _require_names(form, ordered_names, len(numbers), params)
    return dict(zip(numbers, ordered_names, strict=True))


def _require_names(
    form: Format, names: Sequence[str], count: int, params: Mapping[str, Tensor]
) -> None:
    """Raise unless there are names for ``count`` parameters, and all are names of ``params``."""
    if len(names) != count:
        number = len(names) or "no"
        raise ValueError(
            f"{form.title}: found {number} names for {count} parameters: pass names=, in the order of the "
            "optimizer (for several, a list of such lists), or the optimizer itself with the parameters that it holds"
        )
    unknown = sorted({*names} - params.keys())
    if unknown:
        raise ValueError(
            f"{form.title}: found the names {format_list(unknown)}, expected names of params"
        )
