"""The base class of `TransformOptimizer`, which moves the optimizer state if parameters are replaced, and copies it."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonfx import tree
from muonfx.core import Transform
from muonfx.optimizer.attachment import Attachment, check_usable, own_groups
from muonfx.optimizer.edits import read_edits, warn_of_shared
from muonfx.optimizer.groups import Group, complete_entries, distinct_routes
from muonfx.optimizer.over_ranks import stepping_for
from muonfx.optimizer.stepping import StateEntries, Stepping
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import Settings
from muonfx.sharding.shards.dtensors import is_dtensor


class FollowingOptimizer(Optimizer):
    """An optimizer that moves its state to the new tensors if parameters are replaced in its groups or its model."""

    # _live has the state, and the `StateEntries` that show it in `optimizer.state`. It is a dict, because torch.compile
    # replays writes to a dict but not assignments to an optimizer's attributes.
    _live: dict[str, Any]
    _given: tuple[Layout | None, Settings]
    _stepping: Stepping
    _attachment: Attachment
    _groups: list[Group]
    bucket_bytes: int | None

    @property
    def param_groups(self) -> list[Group]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The param groups, with the parameters that the model has now.

        Functions of torch read the groups before they call a method of the optimizer: for example,
        ``set_optimizer_state_dict`` looks up each parameter of the groups in a model that may have been sharded since.
        """
        if "state" not in self._live or torch.compiler.is_compiling():
            return self._groups
        replaced = self._attachment.replaced_in_models()
        if replaced:
            for group in self._groups:
                group["params"] = [replaced.get(param, param) for param in group["params"]]
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._groups = groups

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle. Raise TypeError if the optimizer runs over several ranks."""
        if self._stepping.is_over_ranks:
            raise TypeError("an optimizer over ranks cannot be copied: recreate it and load its state_dict()")
        self._adopt_state()
        self._attachment.follow(self._groups, self._stepping)  # a copy finds the tensors by "param_names"
        ours = ("donate_grads", "bucket_bytes", "_live", "_given", "_attachment", "_labels")
        kept = {name: self.__dict__[name] for name in ours if name in self.__dict__}
        return {**super().__getstate__(), **kept, "tx": self._stepping.tx}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer. It has no reference to the model of its parameters."""
        self._live = state["_live"]
        self._groups = state["param_groups"]
        super().__setstate__({key: value for key, value in state.items() if key not in ("tx", "param_groups")})
        named = self._named()
        self._stepping = self._stepping_for(state["tx"], named)
        self._attachment.bind(named)
        self._attachment.follow(self._groups, self._stepping)
        self._stepping.refresh(named, self._attachment.groups)  # now, because the first step may be traced
        own_groups(self)

    def _named(self) -> dict[str, Tensor]:
        return {
            name: param
            for group in self._groups
            for name, param in zip(group["param_names"], group["params"], strict=True)
        }

    def _stepping_for_trained(
        self, tx: Transform, named: Mapping[str, Tensor], others: Mapping[str, Tensor]
    ) -> Stepping:
        """Return the stepping for the named parameters, without those that have the label None."""
        stepping = self._stepping_for(tx, named, others)
        left_out = {name: param for name, param in named.items() if name in stepping.left_out}
        if left_out:
            trained = {name: param for name, param in named.items() if name not in left_out}
            stepping = self._stepping_for(tx, trained, {**others, **left_out})
        return stepping

    def _transform_for(self, new: dict[str, Tensor]) -> Transform:
        """Return the transform to use once ``new`` parameters are added. `Muon` overrides this to label them."""
        return self._stepping.tx

    def _stepping_for(
        self, tx: Transform, named: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None
    ) -> Stepping:
        if others is None:
            others = self._attachment.not_trained_params()
        layout, settings = self._given
        check_usable(named, layout)
        others = {name: param for name, param in others.items() if name not in named}
        return stepping_for(tx, named, others, layout, settings, self.bucket_bytes)

    def _start(self, before: Stepping | None = None) -> None:
        """Create the optimizer state for the current parameters. With ``before``, copy the former state's values."""
        self._attachment.note(self._groups, self._stepping)
        state = self._stepping.init(self._named(), self._attachment.groups)
        if before is not None:
            state = self._stepping.taken_from(before, state, self._live["state"])
        self._live["state"] = state
        self._show_all()
        self._stepping.share(state)

    def _adopt_state(self) -> None:
        """Copy tensors that were assigned to ``optimizer.state`` into the state; start emptied states again."""
        bound = self._attachment.named
        entries: StateEntries = self._live["entries"]
        if not entries.is_edited(self.state, bound):
            return
        current: dict[str, Tensor] = {}
        for group in self._groups:
            current.update(zip(group.get("param_names", ()), group["params"], strict=False))
        params = {name: (param, current.get(name, param)) for name, param in bound.items()}
        edits = read_edits(entries, self.state, params, self._stepping.take)
        state = self._live["state"]
        loads = list(edits.loads)
        if edits.emptied:
            initial = tree.leaves(self._stepping.initial(bound))
            emptied = {id(bound[name]) for name in edits.emptied}
            starts_all = len(emptied) == len(bound)
            for place, (owner, key) in enumerate(entries.slots):
                if starts_all or id(owner) in emptied:
                    loads.append((key, place, initial[place]))
        with torch.no_grad():
            self._stepping.assign(loads, state)
        self._show_all(bound)
        warn_of_shared(edits, len(bound))

    def _show_all(self, named: Mapping[str, Tensor] | None = None) -> None:
        """Fill ``optimizer.state`` with the current state tensors of every parameter."""
        named = self._named() if named is None else named
        self.state.clear()
        for param in named.values():
            self.state[param] = {}
        self._live["entries"] = StateEntries(self._live["state"], named)
        self._live["entries"].update(self.state, self._live["state"], self._stepping.show)

    @contextmanager
    def _all_or_nothing(self) -> Generator[None]:
        """Return a context manager that restores the param groups if an error is raised in its block."""
        stepping, attachment = self._stepping, self._attachment.saved()
        groups = [(group, group.get("param_names"), group["params"]) for group in self._groups]
        try:
            yield
        except BaseException:
            self._stepping = stepping
            self._attachment.restore(attachment)
            for group, names, params in groups:
                group["params"] = params
                if names is not None:
                    group["param_names"] = names
            del self._groups[len(groups) :]
            raise

    def _rebind(self, moment: Literal["step", "save", "clear", "else"] = "else") -> None:
        """If parameters were replaced in the groups or the model, use the new tensors and move the state to them."""
        # All ranks call this together, because it may communicate. Exceptions: "clear" (zero_grad) leaves communication
        # to the next step, and "save" (state_dict) communicates only if the sharding has changed.
        self._adopt_state()
        if self._attachment.is_current(self._groups):
            return
        added = self._attachment.added_in(self._groups)
        if added and moment == "clear" and self._stepping.is_over_ranks:
            return  # the next step, which all ranks take together, creates the state
        if added:
            self._add_listed(added)
        self._attachment.follow(self._groups, self._stepping, may_repeat=moment == "save")
        named = self._named()
        replaced = self._attachment.replaced(named, at_step=moment == "step")
        if not replaced:
            return
        named |= replaced
        is_swap = self._attachment.is_swap(replaced)
        over_ranks = self._stepping.is_over_ranks or any(map(is_dtensor, named.values()))
        if moment == "clear" and over_ranks and not is_swap:
            self._put(named)  # the next step, which all ranks take together, moves the state
            return
        before = self._stepping
        with self._all_or_nothing():
            if not is_swap:
                self._stepping = self._stepping_for(self._stepping.tx, named)
            if changed := [name for name, route in self._stepping.routes.items() if route != before.routes[name]]:
                raise ValueError(
                    f"{changed[0]!r} has other labels now than when the optimizer was created: recreate the optimizer"
                )
            self._put(named)
            if is_swap:
                self._show_all()
            else:
                with warnings.catch_warnings():  # construction has given the warnings
                    warnings.simplefilter("ignore")
                    self._start(None if self._attachment.on_meta else before)
        self._attachment.bind(named)

    def _add_listed(self, added: dict[str, Tensor]) -> None:
        """Create state for parameters of the model that somebody has put into the param groups."""
        before = self._stepping
        bound = self._attachment.named
        with self._all_or_nothing():
            stepping = self._stepping_for(self._transform_for(added), {**bound, **added})
            if stepping.left_out:
                raise ValueError(
                    f"param_groups: {min(stepping.left_out)!r} was added, but its label is None, so that it is not "
                    "trained: remove it from the groups, or recreate the optimizer with other labels"
                )
            self._stepping = stepping
            self._attachment.bind(added)
            for group, names in zip(self._groups, self._attachment.names_of(self._groups), strict=True):
                if not added.keys().isdisjoint(names):
                    complete_entries(stepping.tx, distinct_routes(names, stepping.routes), group)
            self._attachment.follow(self._groups, stepping)
            self._start(before)

    def _put(self, named: Mapping[str, Tensor]) -> None:
        """Put new tensors into all param groups: ``named`` maps each name in "param_names" to its tensor."""
        for group in self._groups:
            group["params"] = [named[name] for name in group["param_names"]]
