"""`TransformOptimizer`: any transform as a ``torch.optim.Optimizer``.

The terms of this file: a parameter's *route* is the list of the program's transforms that have it among their leaves.
Parameters of one route form a *group*, unless the caller passes groups. A *hyperparameter* is a numeric argument of
the transform; each group holds the hyperparameters of its route, and every step reads them. A *stepping* creates the
state and runs the steps, in one process or over ranks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.checks import is_usable
from muonfx.core.contract import require_transform
from muonfx.core.donation import check_writable
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.optimizer.attachment import Attachment, check_lists, check_usable, models_of
from muonfx.optimizer.groups import (
    NOT_HYPERPARAMS,
    NamedParameters,
    Route,
    check_once,
    defaults_for_schedulers,
    hyperparams_of,
    listed,
    named_pairs,
    names_in,
    resolve_groups,
    routes_of,
    split_by_route,
    warn_of_ascent,
)
from muonfx.optimizer.over_ranks import SteppingOverRanks, layout_for
from muonfx.optimizer.ownership import GroupOwner
from muonfx.optimizer.state import Load, path_of, read_state_dict
from muonfx.optimizer.stepping import Stepping
from muonfx.optimizer.values import Group, GroupNumbers, fitted
from muonfx.program.lower import lower
from muonfx.program.nodes import Program
from muonfx.program.offload.transform import inner_of
from muonfx.sharding.dtensors import is_dtensor
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import Settings
from muonfx.sharding.transform import Sharded, settings_of
from muonfx.tree import PyTree
from muonfx.tree.arguments import plain_arguments
from muonfx.tree.renaming import Rename

__all__ = ["TransformOptimizer"]


class Lowered(NamedTuple):
    """A transform, lowered for the parameters of an optimizer."""

    tx: Transform
    layout: Layout | None
    """None if nothing is sharded."""
    program: Program
    routes: dict[str, Route]


class TransformOptimizer(GroupOwner):
    """A transform as a ``torch.optim.Optimizer``, for training loops, schedulers and scalers that expect one.

    Parameters are grouped by their labels in the transform's partitions; given groups are split further. Muon's groups
    come first, then Adam's, then others, and last the groups that are not trained. Each numeric argument of the
    transform is an entry of the groups whose parameters it updates, under torch's name (``lr``, ``weight_decay``,
    ``momentum``, ``betas``, ``eps``) if there is one, and otherwise under the dotted name of `muonfx.hyperparams`
    without the label. The entries are read at every step, so schedulers work. Adam's groups also have the first of
    ``betas`` as ``momentum``, for schedulers and loggers that expect it in every group; after a step the two agree
    again.

    If parameters are DTensors (``fully_shard``, tensor parallelism), or if a ``layout`` is given, each step is a step
    of `muonfx.sharding.sharded`, with the same update as one process. All ranks construct the optimizer, step, add
    groups and load sharded states together. An error on one rank is raised on all.

    The state is created at construction. ``optimizer.state[parameter]`` holds the parameter's part of it, under names
    such as "momentum/trace", and the scalars that all parameters share. Its storage is reused from step to step;
    gradients are only read. State is keyed by parameter name: if the model is sharded, loaded with ``assign=True``,
    moved to another device or materialized after the optimizer was made, or if an engine puts other tensors into
    ``param_groups``, the next step uses the new tensors, and the state is resharded with them.

    Args:
        params: a model, its ``named_parameters()``, a dict of named tensors, or groups: dicts with "params" (named) and
            values for some hyperparameters. Tensors may be given without names if ``model`` is given.
        tx: the transform. Labels and masks see the flat dict of all named parameters.
        donate_grads: let updates be written into the gradients' storage. This saves memory if a transform needs the
            whole tree (such as `clip_by_global_norm`); ``.grad`` is meaningless afterwards.
        bucket_bytes: run elementwise and matrix transforms on at most about this many bytes of parameters at a time.
            Larger buckets are faster for small leaves; smaller buckets use less memory. None: the bytes of the largest
            parameter, at least 4 MiB. On a CPU, elementwise transforms take 64 KiB to 4 MiB of a bucket at a time. For
            sharded parameters: as in `muonfx.sharding.sharded`.
        layout: the layout of plain tensors over ranks, or a function of the named parameters that returns it.
            ``muonfx.sharding.replicated`` under `DistributedDataParallel` divides the matrices among the ranks.
            None: DTensors have their own layout, and other tensors belong to this process.
        model: the model of ``params``, if ``params`` is not the model itself. It names tensors that are given without
            names, here and in `add_param_group`, and its parameters are followed if they are replaced.

    Raises:
        TypeError: unnamed parameters without ``model``, or tensors that cannot be optimized; a layout for parameters
            that are DTensors.
        ShardingError: the ranks have different parameters, chains, layouts or hyperparameters.
        ValueError: two parameters with one name, an unknown hyperparameter in a group (the message lists those
            known), a value out of range, or what FSDP1 leaves of parameters.

    Warns:
        UserWarning: parameters would move uphill, since no transform that acts on them reverses the direction of the
            gradient, as `scale_by_learning_rate` does.

    Example:
        >>> import muonfx as mfx
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
        >>> optimizer = TransformOptimizer(model, mfx.muon_with_adamw(0.02, 1e-3, labels=mfx.default_labels(model)))
        >>> [(group["label"], group["lr"]) for group in optimizer.param_groups]
        [('muon', 0.02), ('adamw', 0.001)]
        >>> model(torch.arange(8)).square().sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model[1].weight])
        ['adamw/scale_by_adam/count', 'muon/momentum/trace']
    """

    @plain_arguments
    def __init__(
        self,
        params: NamedParameters,
        tx: Transform,
        *,
        donate_grads: bool = False,
        bucket_bytes: int | None = None,
        layout: Layout | Callable[[Mapping[str, Tensor]], Layout] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self._settings = Settings()
        if isinstance(tx, Sharded):
            if layout is not None:
                raise TypeError(f"layout: tx is sharded already, over {tx.arguments['layout']!r}; leave layout out")
            tx, layout, self._settings = tx.arguments["tx"], tx.arguments["layout"], settings_of(tx)
        require_transform("tx", tx)
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, found {bucket_bytes}")
        self.donate_grads = donate_grads
        self.bucket_bytes = bucket_bytes
        self._ready = False
        # A dict, because torch.compile replays writes to a dict but not assignments to an optimizer's attributes.
        self._live: dict[str, Any] = {}
        given: Any = params if isinstance(params, nn.Module | Mapping) else list(params)
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
        groups = resolve_groups(given, {} if model is None else names_in([model]))
        named = {name: param for group in groups for name, param in group["params"]}
        if not named:
            raise ValueError("params: found no parameters; pass a model that has some, or model.named_parameters()")
        if callable(layout):
            layout = layout(named)
        if layout is not None and not isinstance(layout, Layout):
            raise TypeError(
                f"layout must be a muonfx.sharding layout, or a function that returns one, found {layout!r}"
            )
        self._given_layout = layout
        self._lowered = self._lower(tx, named)
        self._attachment = Attachment(models_of(given), model, named, alone=self._layout is None)
        warn_of_ascent(self._lowered.program, self._lowered.routes, named)
        super().__init__(groups, {})
        self._start()
        self.defaults.update(defaults_for_schedulers(self.param_groups))

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy needs, torch's and ours."""
        if self._ready:
            self._follow_tensors()  # a copy finds the tensors by "param_names"
        ours = (
            "donate_grads",
            "bucket_bytes",
            "_ready",
            "_live",
            "_lowered",
            "_numbers",
            "_given_layout",
            "_settings",
            "_stepping",
            "_slots",
            "_left_out",
        )
        kept = {name: self.__dict__[name] for name in (*ours, "_labels") if name in self.__dict__}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, which does not know the model of its parameters."""
        super().__setstate__(state)
        if "_numbers" in state:
            self._attachment = Attachment([], None, self._named(), alone=self._layout is None)
            self._note_groups()
            self._stepping.refresh(self.param_groups, self._named())  # now, because the first step may be traced

    # ------------------------------------------------------------------------------------------------ construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is made at once, that of the others is kept.

        Args:
            param_group: "params" (named, or tensors of a model that the optimizer knows) and values for some
                hyperparameters; it is split where labels differ. A parameter that the labels left out before, as
                frozen ones are, leaves its group for a new one.

        Raises:
            ValueError: a hyperparameter that none of these parameters meets; the message lists those they do. A
                parameter is in a group already.
        """
        param_group = listed(param_group)
        if not self._ready:  # torch's constructor adds the groups one by one
            self._add_by_route(param_group, named_pairs(param_group["params"]))
            return
        if self._take_back(param_group):
            return
        self._rebind()
        named = self._named()
        known = names_in(self._attachment.models) | {param: name for name, param in named.items()}
        pairs = named_pairs(param_group["params"], known)
        check_once(pairs)
        unfrozen = {name for name, _ in pairs} & self._left_out
        if taken := [n for n, p in pairs if n in named and (n not in unfrozen or p is not named[n])]:
            raise ValueError(f"a parameter named {taken[0]!r} is in a group already; names must differ over all groups")
        together = {**named, **dict(pairs)}
        check_once(together.items())
        lowered = self._lower(self._transform_for(dict(pairs)), together)
        if still := [name for name in unfrozen if lowered.routes[name].is_left_out]:
            raise ValueError(
                f"{min(still)!r} is in a group already, and the labels leave it out: was it unfrozen "
                "(requires_grad_()) before this call? Labels that were given, and not made by routing, stay as they are"
            )
        before = self._lowered
        former = [(old, old["param_names"], old["params"]) for old in self.param_groups]
        try:
            self._lowered = lowered
            for old, names, params in former if unfrozen else ():
                # Keep a group that becomes empty: schedulers have lists in the order of the groups.
                left = [pair for pair in zip(names, params, strict=True) if pair[0] not in unfrozen]
                old["param_names"], old["params"] = [name for name, _ in left], [param for _, param in left]
            self._add_by_route(param_group, pairs)
            self._start(keep=True)
        except BaseException:
            for old, names, params in former:
                old["param_names"], old["params"] = names, params
            del self.param_groups[len(former) :]
            self._lowered = before
            raise
        self._attachment.add(models_of([param_group]), dict(pairs))

    def _transform_for(self, new: dict[str, Tensor]) -> Transform:
        """Return the transform of an optimizer that has these parameters too."""
        return self.tx

    def _take_back(self, param_group: Group) -> bool:
        """Add a group of parameters that were removed from the lists; return False unless all of them were."""
        given = param_group["params"]
        if isinstance(given, nn.Module | Mapping):
            given = named_pairs(given)
        given = [given] if isinstance(given, Tensor) else given
        params = [item[-1] if isinstance(item, tuple) else item for item in given]
        name_of = self._attachment.names_by_tensor()
        there = {name_of.get(param) for group in self.param_groups for param in group["params"]}
        names = [name_of[param] for param in params if param in name_of]
        if not params or len(names) < len(params) or not there.isdisjoint(names):
            return False
        numbers = self._numbers_of(names)
        values = numbers.complete(param_group, hyperparams(self.tx))
        entries = {"lr": 0.0, **param_group, **numbers.entries(values)}
        self.param_groups.append({**entries, "params": params, "param_names": names})
        return True

    def _add_by_route(self, group: Group, pairs: list[tuple[str, Tensor]]) -> None:
        """Add a group in parts, one for each route of its parameters."""
        parts = split_by_route(pairs, self._lowered.routes)
        own = [self._numbers_of([name for name, _ in part]) for part in parts]
        known = {one.key for numbers in own for one in numbers.hyperparams if not one.is_mirror}
        if pairs and (unknown := sorted(group.keys() - known - NOT_HYPERPARAMS)):
            there = ", ".join(sorted(known)) or "none"
            raise ValueError(f"param_groups: unknown hyperparameter {', '.join(unknown)}; there are {there}")
        defaults = hyperparams(self.tx)
        all_values = [numbers.complete(group, defaults) for numbers in own]
        for values in fitted(defaults, all_values):
            with_hyperparams(self.tx, values).prepare_all()  # raises if one is out of range
        for part, numbers, values in zip(parts, own, all_values, strict=True):
            # Torch takes the names from the parameters, if there are any.
            unnamed: Group = {} if part else {"param_names": []}
            complete = {
                "label": self._lowered.routes[part[0][0]].label if part else None,
                "lr": 0.0,  # torch's schedulers require an lr in every group, also if it is never read
                **unnamed,
                **{key: group[key] for key in group.keys() & NOT_HYPERPARAMS if key != "params"},
                **numbers.entries(values),
            }
            super().add_param_group({**complete, "params": part})
            for key in self.defaults.keys() - complete.keys():
                del self.param_groups[-1][key]  # torch adds all defaults to every group

    def _lower(self, tx: Transform, named: Mapping[str, Tensor]) -> Lowered:
        check_usable(named, self._given_layout)
        layout = layout_for(named, self._given_layout)
        program = lower(inner_of(tx), dict(named) if layout is None else layout.meta(list(named)))
        return Lowered(tx, layout, program, routes_of(program))

    @property
    def tx(self) -> Transform:
        """The transform."""
        return self._lowered.tx

    @property
    def _layout(self) -> Layout | None:
        return self._lowered.layout

    def _numbers_of(self, names: list[str], group: Mapping[str, Any] | None = None) -> GroupNumbers:
        """Return the numbers of a group of one route; an empty group gets the numbers of its entries, or all."""
        if names:
            return GroupNumbers(self._lowered.routes[names[0]].hyperparams)
        every = hyperparams_of(self._lowered.program.transforms())
        return GroupNumbers([n for n in every if group is None or n.key in group])

    def _start(self, *, keep: bool = False) -> None:
        """Create the state and everything that depends on the groups; `keep` keeps the current values."""
        named = self._named()
        numbers = [self._numbers_of(g["param_names"], g) for g in self.param_groups]
        for place, old in enumerate(self._numbers if self._ready else ()):
            if place < len(numbers) and numbers[place].hyperparams == old.hyperparams:
                numbers[place] = old  # it stores which of two keys was written last
        is_as_made = not keep or self._is_as_made()
        made = self._stepping_for(numbers)
        state = made.init(named, self.param_groups)
        if keep:
            state = made.taken_from(self._stepping, state, self._state)
        self._numbers, self._stepping = numbers, made
        self._note_groups()
        self._live["state"] = state
        self._live["made"] = [(leaf, leaf._version) for leaf in tree.tensors(state)] if is_as_made else None
        self._live["anew"] = False
        self._show_all()
        made.share(state)
        self._left_out = {name for name, route in self._lowered.routes.items() if route.is_left_out}
        self._ready = True

    def _note_groups(self) -> None:
        """Store which groups, with which names, the numbers belong to."""
        self._grouped = [(group, list(group["param_names"])) for group in self.param_groups]

    def _distinct_groups(self) -> list[Group]:
        """Return the groups without repetitions, which ``param_groups.extend(param_groups)`` creates."""
        return list({id(group): group for group in self.param_groups}.values())

    def _follow_tensors(self, *, may_repeat: bool = False) -> None:
        """Update the names and numbers of the groups after any change to their lists; errors change nothing."""
        groups: Any = self.param_groups
        is_as_noted = (
            isinstance(groups, list)
            and len(groups) == len(self._grouped)
            and all(
                group is noted
                and group.get("param_names") == names
                and isinstance(group.get("params"), list)
                and self._attachment.is_bound(names, group["params"])
                for group, (noted, names) in zip(groups, self._grouped, strict=True)
            )
        )
        if is_as_noted:
            return
        check_lists(groups)
        groups = self._distinct_groups() if may_repeat else groups
        members = self._attachment.names_of_members(groups)
        routes = self._lowered.routes
        numbers: list[GroupNumbers] = []
        former = {name: own for (_, names), own in zip(self._grouped, self._numbers, strict=True) for name in names}
        empty = {id(group): own for (group, names), own in zip(self._grouped, self._numbers, strict=True) if not names}
        for group, names in zip(groups, members, strict=True):
            if other := next((name for name in names if routes[name] != routes[names[0]]), None):
                raise ValueError(
                    f"param_groups: {names[0]!r} (label {routes[names[0]].label!r}) and {other!r} (label "
                    f"{routes[other].label!r}) are in one group, but different transforms update them: a group "
                    "holds parameters of one label. To change a label, make the optimizer anew"
                )
            own = self._numbers_of(names, group)
            # Reuse the numbers of an earlier group, which store which of two keys was written last.
            known = former.get(names[0]) if names else empty.get(id(group))
            is_free = known is not None and all(known is not other for other in numbers)
            numbers.append(known if known is not None and is_free and known.hyperparams == own.hyperparams else own)
        for group, names in zip(groups, members, strict=True):
            group["params"], group["param_names"] = list(group["params"]), names
            group.setdefault("label", routes[names[0]].label if names else None)
        self._numbers[:] = numbers
        self._stepping.regrouped()
        self._grouped = [(group, list(names)) for group, names in zip(groups, members, strict=True)]

    def _rebind(self, moment: Literal["step", "save", "clear", "else"] = "else") -> None:
        """Bind the state to the tensors now in the groups or the model, resharded by name with the same values."""
        # All ranks call this together, except in two moments without communication: "save", unless the sharding has
        # changed, and "clear" (zero_grad), which leaves the communication to the step.
        self._follow_tensors(may_repeat=moment == "save")
        found = self._attachment.compare(self._named())
        if not found.replaced:
            if self._live["anew"] and moment in ("step", "else"):
                self._live["anew"] = False
                if self._is_as_made():
                    self._start()
            return
        named, is_swap, is_as_made = found.named, found.is_swap, self._is_as_made()
        over_ranks = self._layout is not None or any(map(is_dtensor, named.values()))
        if moment == "clear" and over_ranks and not is_swap:
            for group in self.param_groups:  # as an engine does; the step, with all ranks, moves the state
                group["params"][:] = [named[name] for name in group["param_names"]]
            return
        if moment == "step":
            found.check_in_time(is_first=is_as_made)
        lowered = self._lowered if is_swap else self._lower(self.tx, named)
        if changed := [name for name in named if lowered.routes[name] != self._lowered.routes[name]]:
            raise ValueError(f"{changed[0]!r} has other labels now than when the optimizer was made: make it anew")
        kept = self._lowered, [[*group["params"]] for group in self.param_groups]
        self._lowered = lowered
        for group in self.param_groups:
            group["params"][:] = [named[name] for name in group["param_names"]]
        try:
            if is_swap and (not is_as_made or (over_ranks and moment in ("save", "clear"))):
                self._live["anew"] = is_as_made  # create it again when all ranks are present
                self._show_all()
            else:
                with warnings.catch_warnings():  # construction has given the warnings
                    warnings.simplefilter("ignore")
                    self._start(keep=not is_as_made)
        except BaseException:
            self._lowered, lists = kept
            for group, params in zip(self.param_groups, lists, strict=True):
                group["params"][:] = params
            raise
        self._attachment.bind(named)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters that there are now."""
        if self._ready and not torch.compiler.is_compiling():
            self._rebind("clear")
        super().zero_grad(set_to_none)

    def _is_as_made(self) -> bool:
        """Return True if nothing has been written into the state since it was created."""
        made: list[tuple[Tensor, int]] | None = self._live["made"]
        now = list(tree.tensors(self._state))
        return made is not None and all(
            leaf is own and leaf._version == version for (leaf, version), own in zip(made, now, strict=True)
        )

    def _stepping_for(self, numbers: list[GroupNumbers]) -> Stepping:
        if self._layout is None:
            return Stepping(self.tx, self._lowered.program, numbers, self.bucket_bytes)
        settings = (
            self._settings if self.bucket_bytes is None else self._settings._replace(bucket_bytes=self.bucket_bytes)
        )
        return SteppingOverRanks(self.tx, self._lowered.program, numbers, self._layout, settings)

    def _show_all(self) -> None:
        """Fill ``self.state`` with the leaves of the state."""
        named = self._named()
        leaves = tree.leaves(self._state)
        self._slots: list[tuple[Tensor | None, str]] = []
        for path in tree.paths(self._state):
            owner = named.get(path[-1]) if path and isinstance(path[-1], str) else None
            self._slots.append((owner, path_of(path if owner is None else path[:-1])))
        self._live["shown"] = leaves
        self.state.clear()
        for param in named.values():
            self.state[param] = {}
        for place, ((owner, key), leaf) in enumerate(zip(self._slots, leaves, strict=True)):
            self._place(owner, key, self._stepping.show(place, leaf))

    def _place(self, owner: Tensor | None, key: str, leaf: object) -> None:
        for param in self.state if owner is None else (owner,):
            self.state[param][key] = leaf

    def _named(self) -> dict[str, Tensor]:
        return {
            name: param
            for group in self.param_groups
            for name, param in zip(group["param_names"], group["params"], strict=True)
        }

    @property
    def _state(self) -> PyTree:
        return self._live["state"]

    # ----------------------------------------------------------------------------------------------------- stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **extras: Any) -> Any:
        """Take one step on the parameters' ``.grad``; a parameter without one keeps its value and state.

        Args:
            closure: recomputes the loss with gradients, and returns it.
            **extras: named values for the transforms whose signatures name them, such as ``value=loss``.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: a hyperparameter in a group is out of range, a parameter that the labels leave out has a
                gradient, a parameter was cut since the optimizer was made or is on the meta device, or the model trains
                other parameters and none of these.
            TypeError: a gradient is sparse or complex. Nothing has been changed when an error is raised.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_compiling = torch.compiler.is_compiling()  # a graph is traced for the parameters that there are
        problem: Exception | None = None
        try:
            if not is_compiling:
                self._rebind("step")
                self._attachment.check_real()
                if not self._live.get("warned"):
                    self._warn_of_unread_rates()
            params = self._named()
            updates: dict[str, Tensor | None] = {name: param.grad for name, param in params.items()}
            self._check(updates)
            if not is_compiling:
                check_writable("step: params", params)
                self._attachment.check(params, updates)
        except Exception as error:  # raised by the stepping, on all ranks together
            problem = error
            params = self._attachment.named
            updates = {name: param.grad for name, param in params.items()}
        self._live["state"] = self._stepping.step(
            self.param_groups, params, updates, self._state, donate=self.donate_grads, extras=extras, problem=problem
        )
        self._live["made"] = None  # so that nothing keeps the first state alive
        self._live["anew"] = False
        self._publish()
        return loss

    @property
    def groups_without_rate(self) -> tuple[int, ...]:
        """The places of groups whose ``lr`` nothing reads: the chain has its own schedule, or no learning rate."""
        return tuple([place for place, numbers in enumerate(self._numbers) if "lr" not in numbers.keys])

    def _warn_of_unread_rates(self) -> None:
        """Warn of an lr or a scheduler in the groups if no group has an lr that is read."""
        if len(self.groups_without_rate) < len(self.param_groups):
            return  # a scheduler writes into all groups, also groups without an lr that is read
        for place, group in enumerate(self.param_groups):
            if "initial_lr" in group or (not isinstance(group["lr"], Tensor) and group["lr"] != 0.0):
                self._live["warned"] = True
                warnings.warn(
                    f"param_groups[{place}]: nothing reads this 'lr', found {group['lr']!r}: the chain has its own "
                    "schedule, or no learning rate. For one that can be set here, build the chain with a number",
                    UserWarning,
                    stacklevel=5,  # torch wraps `step`
                )
                return

    def _publish(self) -> None:
        """Update ``self.state`` with the leaves that are new objects."""
        leaves = tree.leaves(self._state)
        for place, (new, shown) in enumerate(zip(leaves, self._live["shown"], strict=True)):
            if new is not shown:
                self._place(*self._slots[place], self._stepping.show(place, new))
        self._live["shown"] = leaves

    def _check(self, updates: Mapping[str, Tensor | None]) -> None:
        if len(self.state) != len(updates):
            raise ValueError(
                "optimizer.state was cleared, but the state lives in transform_state: make the optimizer anew"
            )
        grads = [grad for grad in updates.values() if grad is not None]
        if all(map(is_usable, grads)) and not self._left_out:
            return
        for name, grad in updates.items():
            if grad is None:
                continue
            if not is_usable(grad):
                raise TypeError(f"the gradient of {name!r} must be dense and real, found {grad.layout}, {grad.dtype}")
            if name in self._left_out:
                raise ValueError(
                    f"{name!r} has a gradient, but the labels leave it out (label None); was it unfrozen after they "
                    "were made? optimizer.add_param_group({'params': [...]}) takes in what routing has left out as "
                    "frozen; else make the labels and the optimizer anew"
                )

    # -------------------------------------------------------------------------------------------------- persistence

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the groups in torch's own format; see ``torch.optim.Optimizer.state_dict``.

        Under ``sharding.replicated`` every rank has the whole state. If parameters are DTensors, all ranks must call
        this together for a chain that keeps state at the owner of a matrix (`normalize_neurons`): that state is
        gathered and sharded evenly over the parameter's mesh, so that torch can save, gather and reshard it.

        Raises:
            ShardingError: a rank did not call this, though all must.
        """
        self._rebind("save")
        for group, own in zip(self._distinct_groups(), self._numbers, strict=True):
            own.read(group)  # so that all keys of a number agree
        found = super().state_dict()
        exported = self._stepping.exported(self._state)
        if exported:
            index_of = {id(param): place for place, param in enumerate(self._named().values())}
            held: dict[Any, Any] = dict(found["state"])
            for place, leaf in exported.items():
                owner, key = self._slots[place]
                index = index_of[id(owner)]
                held[index] = {**held[index], key: leaf}
            found["state"] = held
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *, rename: Rename | None = None) -> None:
        """Load what ``state_dict()`` returned, into the storage and the dtypes of this optimizer's state.

        Parameters are found by name, without what ``torch.compile``, ``DistributedDataParallel`` and other wrappers put
        into names. Values are copied. A dtype may widen within its kind; it never follows the parameter's dtype, as
        ``torch.optim`` lets it. If parameters are sharded, all ranks must call this together; a rank that calls it
        alone raises when the group's timeout has passed. Otherwise a rank loads by itself, and the next step raises if
        the ranks have loaded different states.

        Args:
            state_dict: of an optimizer of this transform.
            rename: names of parameters there to names here, as in `muonfx.checkpoint.load`; levels end with a dot.

        Raises:
            ValueError: other groups or parameters, a missing, unexpected or reshaped state leaf, a narrowing dtype,
                the shard of another rank, or a missing hyperparameter; the message names them all.
                Nothing has been changed when an error is raised.
            ShardingError: something is wrong on another rank, or a rank did not call this.

        Warns:
            UserWarning: the groups were saved in another order, and a scheduler's own state may be by that order. Or a
                state dict of ``torch.distributed.checkpoint.state_dict`` has nothing of some parameters, which torch
                accepts under ``strict=False`` only: their state starts anew.
        """
        self._rebind()
        self._attachment.check_real()
        given: dict[str, Any] = dict(state_dict)
        for hook in cast("Any", self)._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, given)
            given = given if changed is None else changed
        places = {
            (id(param), key): place
            for place, (owner, key) in enumerate(self._slots)
            for param in (self.state if owner is None else (owner,))
        }
        loads: list[Load] = []
        saved: list[Group] = []
        problem: Exception | None = None
        try:
            saved, loads, absent = read_state_dict(
                given, self.param_groups, self._numbers, self.state, places, self._stepping.take, rename
            )
            if absent:
                warnings.warn(
                    f"the state dict has nothing of {len(absent)} parameters, such as {absent[0]!r}: their state "
                    "starts anew, as it does in torch under strict=False",
                    stacklevel=2,
                )
                loads += self._loads_of_new_state(absent)
        except Exception as error:  # any exception is reported to the other ranks, which wait for this rank
            problem = error
        with torch.no_grad():
            self._stepping.load(loads, self._state, problem)
        self._live["made"] = None
        self._live["anew"] = False
        for group, old in zip(self.param_groups, saved, strict=True):
            group.update(
                copy.deepcopy({key: value for key, value in old.items() if key not in ("params", "param_names")})
            )
        for hook in cast("Any", self)._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _loads_of_new_state(self, names: Collection[str]) -> list[Load]:
        """Return the loads that reset the state of some parameters."""
        if self._is_as_made():
            return []
        named = self._named()
        owners = {id(named[name]) for name in names}
        with warnings.catch_warnings():  # construction has given the warnings
            warnings.simplefilter("ignore")
            new = tree.leaves(self._stepping_for(self._numbers).init(named, self.param_groups))
        return [
            Load(key, place, leaf, value)
            for place, ((owner, key), leaf, value) in enumerate(
                zip(self._slots, tree.leaves(self._state), new, strict=True)
            )
            if owner is not None and id(owner) in owners and leaf is not None
        ]

    @property
    def transform_state(self) -> PyTree:
        """The state of `transform` as the functional API sees it; its storage is reused by the next step."""
        return self._stepping.shown(self._state)

    @property
    def transform(self) -> Transform:
        """The transform over what this optimizer holds: ``tx``, or what `muonfx.sharding.sharded` makes of it."""
        return self._stepping.transform
