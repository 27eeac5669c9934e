"""Muon for torchtitan: an optimizers container for a training configuration."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from importlib import import_module
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from muonfx.core.chain_differences import CHAINS
from muonfx.core.checks import warn_caller
from muonfx.engines.parts import with_parts
from muonfx.internal.wrappers import unwrapped
from muonfx.optimizer.muon import Muon, labels_for
from muonfx.optimizer.resuming import first_lines
from muonfx.optimizer.saved_chains import ChainRecord, SavedChain, record_of
from muonfx.sharding.communication.messages import all_objects

__all__ = ["muon"]


# The result is untyped, since torchtitan is imported only when it is needed.
def muon(
    lr: float = 2e-3,
    *,
    adamw_lr: float | dict[str, float] | None = None,
    weight_decay: float = 0.1,
    **options: Any,
) -> Any:
    """Return Muon for a configuration of torchtitan: ``Trainer.Config(optimizer=muon(lr=3e-4, adamw_lr=1.2e-3))``.

    torchtitan's own optimizers container accepts only a fixed list of optimizers. This function configures another
    container, with one `muonfx.Muon` for each model part; the types of modules decide which parameters Muon trains.
    Schedulers, logs and checkpoints work as with any other container. The fields ``lr``, ``adamw_lr`` and
    ``weight_decay`` can be overridden on torchtitan's command line: ``--optimizer.lr 0.01``.

    Args:
        lr: the learning rate of Muon.
        adamw_lr: the learning rate of AdamW, or a dict with one for each role; None for ``lr``. Each role must be in
            some model part of some rank.
        weight_decay: the decoupled weight decay of Muon and AdamW.
        options: further arguments of `muonfx.Muon`, whose values may come from a JSON file; see `muonfx.engines.parts`.

    Returns:
        A ``Config`` of a ``torchtitan.components.optimizer.OptimizersContainer``. Three fields that are for
        torchtitan's own optimizers must keep their defaults, or ``build`` raises ValueError: ``param_groups``,
        ``implementation`` and ``optimizer_factory_kwargs_by_name``.

    Raises:
        ModuleNotFoundError: torchtitan is not installed.

    >>> config = muon(lr=3e-4, adamw_lr=1.2e-3)  # doctest: +SKIP
    >>> optimizers = config.build(model_parts=[model])  # doctest: +SKIP
    """
    return _container().Config(lr=lr, adamw_lr=adamw_lr, weight_decay=weight_decay, options=options)


@cache
def _container() -> Any:
    """Return a subclass of torchtitan's container, with its ``Config``, in which each model part has a `Muon`.

    The class is defined here, because its base class exists only after torchtitan was imported. Its methods do not
    depend on that: see `_MuonContainerMethods`.
    """
    base = _container_of_torchtitan()

    class MuonContainer(_MuonContainerMethods, base):
        canonical_fqn = staticmethod(
            import_module("torchtitan.components.checkpointer.utils").canonical_fqn
        )

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            lr: float = 2e-3
            adamw_lr: float | dict[str, float] | None = None
            weight_decay: float = 0.1
            options: dict[str, Any] = field(default_factory=dict[str, Any])

    return MuonContainer


def _container_of_torchtitan() -> Any:
    """Return torchtitan's own class of an optimizers container, whose optimizers are from a fixed list."""
    return import_module("torchtitan.components.optimizer").OptimizersContainer


class _MuonContainerMethods:
    """The methods of an optimizers container of torchtitan in which each model part has a `Muon`."""

    model_parts: list[nn.Module]
    """The parts of the model on this rank, such as the stages of a pipeline."""
    optimizers: list[Muon]
    """The optimizer of each model part."""
    canonical_fqn: Callable[[str], str]
    """torchtitan's function that removes the components of wrappers from a name."""
    _post_init: Callable[[list[Tensor]], None]
    """The method of the base class that initializes it as a torch optimizer of the given parameters."""

    def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
        """Make a `Muon` for each model part, such as a stage of a pipeline."""
        _require_same_fields(config, _container_of_torchtitan().Config())
        rates = {"lr": config.lr, "adamw_lr": config.adamw_lr, "weight_decay": config.weight_decay}
        # Values from a file become transforms and dtypes.
        options = {**rates, **with_parts(config.options)}
        self.model_parts = model_parts
        self.optimizers = []
        all_params: list[Tensor] = []
        for model_part, options_of_part in zip(
            model_parts, _options_of_parts(options, model_parts), strict=True
        ):
            optimizer = Muon(model_part, **options_of_part)
            self.optimizers.append(optimizer)
            for group in optimizer.param_groups:
                all_params.extend(group["params"])
        self._post_init(all_params)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of all model parts in one, with torchtitan's canonical names of the parameters.

        A checkpoint with these names loads with and without activation checkpointing, which wraps layers.
        """
        state_dict: dict[str, Any] = cast("Any", super()).state_dict()
        return {self.canonical_fqn(key): value for key, value in state_dict.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict with canonical names into the optimizers of all model parts.

        Schedulers of torchtitan compute all rates from the rates of the code, to which saved rates are scaled.
        """
        base: Any = super()
        # 1. Undo the renaming of `state_dict`, since the base class reads the keys of its own state dict.
        renamed = dict(state_dict)
        for key in base.state_dict():
            canonical_key = self.canonical_fqn(key)
            if canonical_key in renamed:
                renamed[key] = renamed.pop(canonical_key)
        # 2. While the base class loads the optimizers, hooks change the state dict of each.
        changed_rates: list[str] = []
        hooks: list[Any] = []
        for optimizer in self.optimizers:
            hooks.append(
                optimizer.register_load_state_dict_pre_hook(partial(_with_saved_chains, renamed))
            )
            hooks.append(
                optimizer.register_load_state_dict_pre_hook(
                    partial(_with_rates_of_code, changed_rates)
                )
            )
        try:
            base.load_state_dict(renamed)
        finally:
            for hook in hooks:
                hook.remove()
        # 3. Last, because a warning may be turned into an error, and the load must be complete then.
        if changed_rates:
            _warn_of_other_rates(changed_rates)


def _warn_of_other_rates(changed_rates: Sequence[str]) -> None:
    """Warn of rates that differ between a state dict and the code, with a line for each group."""
    warn_caller(
        f"load_state_dict: the state dict was saved with other rates: {first_lines(changed_rates)}; the code's are "
        "used, from which torchtitan's scheduler computes the rates of all steps"
    )


_BY_ROLE = ("adamw_lr", "adamw_weight_decay")
"""The arguments of `Muon` that may be a dict with a number for each role."""


def _options_of_parts(
    options: Mapping[str, Any], model_parts: Sequence[nn.Module]
) -> list[dict[str, Any]]:
    """Return the arguments of `Muon` for each model part, without numbers for roles that only other parts have.

    The last stage of a pipeline has no embedding: there, ``{"embedding": 0.3, "head": 0.02}`` becomes ``{"head":
    0.02}``. All ranks must call this together. Roles that no part of any rank has are kept, so that `Muon` raises.
    """
    arguments = [name for name in _BY_ROLE if isinstance(options.get(name), Mapping)]
    if not arguments:
        return [dict(options) for _ in model_parts]
    roles_of_parts = [_roles_of(model_part, options.get("labels")) for model_part in model_parts]
    all_roles = _on_any_rank(set[str]().union(*roles_of_parts))
    options_of_parts: list[dict[str, Any]] = []
    for roles in roles_of_parts:
        roles_of_others = all_roles - roles
        options_of_part = dict(options)
        for name in arguments:
            number_of_role: dict[str, Any] = {}
            for role, number in options[name].items():
                if role not in roles_of_others:
                    number_of_role[role] = number
            options_of_part[name] = number_of_role
        options_of_parts.append(options_of_part)
    return options_of_parts


def _roles_of(model_part: nn.Module, labels: Any) -> set[str]:
    """Return the roles of the parameters of a model part, such as {"hidden", "head"}.

    ``labels`` is the argument of `Muon`.
    """
    with warnings.catch_warnings(action="ignore"):  # `Muon` gives them
        label_of = labels_for(labels, model_part, None, roles=True)
    return {label for label in label_of.values() if label is not None}


def _on_any_rank(roles: set[str]) -> set[str]:
    """Return the union of the roles of all ranks. All ranks must call this together."""
    if not dist.is_initialized():
        return roles
    all_ranks: Any = dist.group.WORLD
    roles_of_ranks: list[set[str]] = all_objects(
        roles, all_ranks, "a comparison of the roles of model parts"
    )
    return roles.union(*roles_of_ranks)


def _with_saved_chains(
    flat: dict[str, Any], optimizer: Any, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return the state dict that torchtitan loads into an optimizer, with the saved chains of its parameters.

    torchtitan takes the keys of the optimizer's groups from its flat state dict. The record of chains is in state dicts
    only.

    ``flat`` has the record under the name of each parameter, such as "param_groups.up.weight.chain_code".
    """
    chain_of = _saved_chains(flat, optimizer)
    groups: list[dict[str, Any]] = []
    for group, live_group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        # The chains of its parameters only: they may be of several saved groups, if the model was divided otherwise.
        chain_in_group = {
            name: chain_of[name] for name in live_group["param_names"] if name in chain_of
        }
        groups.append({**group, CHAINS: record_of(chain_in_group)})
    return {**state_dict, "param_groups": groups}


def _with_rates_of_code(
    changed_rates: list[str], optimizer: Any, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return the state dict that torchtitan loads into an optimizer, with rates that are scaled to the code's rates.

    A scheduler of torchtitan sets rates from the code's, but only from the second step on. If a group has the rate 0.2
    in the code, and was saved with 0.1, which a schedule had decayed to 0.05, the first step has the rate 0.1. A line
    for each such group is appended to ``changed_rates``.
    """
    groups: list[dict[str, Any]] = []
    for group, live_group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        # The rates before any schedule. Without a scheduler, there are none; and no factor leads from a rate of 0.
        saved_rate = group.get("initial_lr", 0)
        rate = live_group.get("initial_lr", saved_rate)
        if saved_rate == 0 or math.isclose(saved_rate, rate, rel_tol=1e-6):
            groups.append(group)
            continue
        groups.append({**group, "lr": group["lr"] / saved_rate * rate, "initial_lr": rate})
        changed_rates.append(
            f"group {live_group['label']!r}, lr: {saved_rate!r} in the file, {rate!r} in the code"
        )
    return {**state_dict, "param_groups": groups}


def _saved_chains(flat: dict[str, Any], optimizer: Any) -> dict[str, SavedChain]:
    """Return the chain with which each parameter of an optimizer was saved. A new parameter is not in the result.

    ``flat`` is the flat state dict. For each parameter, it has a text with the chains of all parameters that were in
    one group with it: from ``{"param_groups.up.weight.chain_code": '[1, ["momentum()", "d4c1"]]'}`` the result is
    ``{"up.weight": SavedChain("momentum()", "d4c1")}``.
    """
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    chain_of: dict[str, SavedChain] = {}
    # A plain name lacks the components of wrappers, such as "_orig_mod".
    for name, plain_name in unwrapped(names).items():
        chains_of_group = flat.get(f"param_groups.{name}.{CHAINS}")
        if chains_of_group:
            chain_of[name] = ChainRecord.from_text(chains_of_group).chain_of(plain_name)
    return chain_of


def _require_same_fields(config: Any, defaults: Any) -> None:
    """Raise unless ``config`` has all values of ``defaults``, torchtitan's own configuration, which have no effect.

    For example, another ``implementation`` than torchtitan's default would be ignored silently.
    """
    for item in fields(defaults):
        value = getattr(config, item.name)
        if value != getattr(defaults, item.name):
            raise ValueError(
                f"{item.name}: found {value!r}, which is for torchtitan's own optimizers and has no effect on "
                "muonfx.Muon: leave it out; labels route parameters"
            )
