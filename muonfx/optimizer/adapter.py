"""`TransformOptimizer`: any transform as a ``torch.optim.Optimizer``.

The terms of this file: a parameter's *route* is the list of the program's transforms that have it among their leaves.
Parameters of one route form a *group*, unless the caller passes groups. A *hyperparameter* is a numeric argument of
the transform; each group holds the hyperparameters of its route, and every step reads them. A *stepping* creates the
state and runs the steps, in one process or over ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from muonfx.core import Donation, Transform
from muonfx.core.contract import require_transform
from muonfx.core.donation import check_writable
from muonfx.optimizer.attachment import Attachment, check_real, models_of, own_groups
from muonfx.optimizer.following import FollowingOptimizer
from muonfx.optimizer.groups import (
    Group,
    NamedParameters,
    check_once,
    defaults_for_schedulers,
    groups_by_route,
    named_pairs,
    names_in,
    resolve_groups,
    warn_of_ascent,
    warn_of_unread_rates,
)
from muonfx.optimizer.state import Load, read_state_dict
from muonfx.optimizer.stepping import add_in_place
from muonfx.program.placement import Arguments
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import Settings
from muonfx.sharding.transform import Sharded, settings_of
from muonfx.tree import PyTree
from muonfx.tree.arguments import plain_arguments
from muonfx.tree.renaming import Rename

__all__ = ["TransformOptimizer"]


class TransformOptimizer(FollowingOptimizer):
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
    gradients are only read. State is keyed by parameter name, so parameters may be replaced after construction. The
    model may be sharded, loaded with ``assign=True``, moved to another device or materialized, and an engine may put
    other tensors into ``param_groups``. The next step uses the new tensors, and reshards the state with them.

    Args:
        params: a model, its ``named_parameters()``, a dict of named tensors, or groups: dicts with "params" (named) and
            values for some hyperparameters. Tensors may be given without names if ``model`` is given.
        tx: the transform. Labels and masks see the flat dict of all named parameters.
        donate_grads: if True, updates may overwrite the gradients. This saves memory if a transform needs the whole
            tree (such as `clip_by_global_norm`); ``.grad`` is meaningless afterwards.
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
        settings = Settings()
        if isinstance(tx, Sharded):
            if layout is not None:
                raise TypeError(f"layout: tx is sharded already, over {tx.arguments['layout']!r}; leave layout out")
            tx, layout, settings = tx.arguments["tx"], tx.arguments["layout"], settings_of(tx)
        require_transform("tx", tx)
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, found {bucket_bytes}")
        self.donate_grads = donate_grads
        self.bucket_bytes = bucket_bytes
        self._live = {}
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
        self._given = layout, settings
        self._stepping = self._stepping_for(tx, named)
        self._attachment = Attachment(models_of(given), model, named, alone=not self._stepping.is_over_ranks)
        warn_of_ascent(self._stepping.program, self._stepping.routes, named)
        super().__init__(groups, {})
        self._start()
        self.defaults.update(defaults_for_schedulers(self.param_groups))
        own_groups(self)

    # ------------------------------------------------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is created at once, and the state of the others is kept.

        Args:
            param_group: "params" (named, or tensors of a model that the optimizer was given) and values for some
                hyperparameters; the group is split if labels differ. A parameter that the labels left out before, such
                as a frozen parameter, moves to a new group.

        Raises:
            ValueError: a hyperparameter does not exist for these parameters (the message lists the known names), or a
                parameter is already in a group.
        """
        if "state" not in self._live:  # torch's constructor adds the groups one by one
            self._add_by_route(param_group, named_pairs(param_group["params"]))
            return
        self._rebind()
        before, named = self._stepping, self._named()
        known = names_in(self._attachment.models) | {param: name for name, param in named.items()}
        pairs = named_pairs(param_group["params"], known)
        unfrozen = {name for name, param in pairs if name in before.left_out and param is named[name]}
        check_once([*[pair for pair in named.items() if pair[0] not in unfrozen], *pairs])
        with self._all_or_nothing():
            self._stepping = self._stepping_for(self._transform_for(dict(pairs)), {**named, **dict(pairs)})
            if still := unfrozen & self._stepping.left_out:
                raise ValueError(
                    f"{min(still)!r} is in a group already, and the labels leave it out: call requires_grad_() before "
                    "this, or recreate the optimizer if you gave the labels"
                )
            for group in self.param_groups if unfrozen else ():
                # Keep a group that becomes empty: schedulers have lists in the order of the groups.
                left = [name for name in group["param_names"] if name not in unfrozen]
                group["param_names"], group["params"] = left, [named[name] for name in left]
            self._add_by_route(param_group, pairs)
            self._start(before)
        self._attachment.bind(dict(pairs), models_of([param_group]))

    def _transform_for(self, new: dict[str, Tensor]) -> Transform:
        """Return the transform of an optimizer that has these parameters too."""
        return self.tx

    def _add_by_route(self, group: Group, pairs: list[tuple[str, Tensor]]) -> None:
        """Add a group in parts, one for each route of its parameters."""
        others = {key: value for key, value in group.items() if key != "params"}
        if not pairs:
            super().add_param_group({"label": None, "lr": 0.0, **others, "params": [], "param_names": []})
            return
        for part in groups_by_route(self.tx, self._stepping.routes, others, pairs):
            super().add_param_group(part)
            for key in self.defaults.keys() - part.keys():
                del self.param_groups[-1][key]  # torch adds all defaults to every group

    @property
    def groups_without_rate(self) -> tuple[int, ...]:
        """The indices of groups whose ``lr`` is not read: the chain has its own schedule, or no learning rate."""
        groups = enumerate(self._attachment.groups)
        return tuple([place for place, one in groups if "lr" not in one.numbers.keys])

    # -------------------------------------------------------------------------------------------------------- state

    @property
    def tx(self) -> Transform:
        """The transform."""
        return self._stepping.tx

    @property
    def transform(self) -> Transform:
        """The transform that runs on this optimizer's tensors: ``tx``, or `muonfx.sharding.sharded` of ``tx``."""
        return self._stepping.transform

    @property
    def transform_state(self) -> PyTree:
        """The state of `transform` as the functional API sees it; its storage is reused by the next step."""
        return self._stepping.shown(self._live["state"])

    # ----------------------------------------------------------------------------------------------------- stepping

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the current parameters, including tensors that replaced earlier parameters."""
        if not torch.compiler.is_compiling():
            self._rebind("clear")
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **extras: Any) -> Any:
        """Take one step on the parameters' ``.grad``; a parameter without one keeps its value and state.

        Args:
            closure: recomputes the loss with gradients, and returns it.
            **extras: named values for the transforms whose signatures name them, such as ``value=loss``.

        Returns:
            The result of the closure, else None.

        Raises:
            ValueError: a hyperparameter is out of range, a parameter without a label has a gradient, a parameter has a
                new shape or is on the meta device, or only other parameters of the model have gradients.
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
                if not self._attachment.is_current(self.param_groups):
                    self._rebind("step")
                if not self._live.get("checked_rates"):
                    is_read = len(self.groups_without_rate) < len(self.param_groups)
                    self._live["checked_rates"] = is_read or warn_of_unread_rates(self.param_groups)
            params = self._named() if is_compiling else self._attachment.named
            updates: dict[str, Tensor | None] = {name: param.grad for name, param in params.items()}
            if len(self.state) != len(updates):
                raise ValueError(
                    "optimizer.state was cleared, but it only shows transform_state: recreate the optimizer"
                )
            self._stepping.check_gradients(updates)
            if not is_compiling:
                check_writable("step: params", params)
                self._attachment.check(params, updates)
            self._stepping.refresh(params, self._attachment.groups)
        except Exception as error:  # raised by the stepping, on all ranks together
            problem = error
            params = self._attachment.named
            updates = {name: param.grad for name, param in params.items()}
        call = Arguments(updates, self._live["state"], params, Donation(self.donate_grads, True), extras, add_in_place)
        state = self._live["state"] = self._stepping.step(call, problem)
        self._live["entries"].update(self.state, state, self._stepping.show)
        return loss

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
        for one in self._attachment.groups:
            one.numbers.read(one.group)  # so that all keys of a number agree
        found = super().state_dict()
        index_of = {id(param): index for index, param in enumerate(self._named().values())}
        for place, leaf in self._stepping.exported(self._live["state"]).items():
            owner, key = self._live["entries"].slots[place]
            index = index_of[id(owner)]
            found["state"][index] = {**found["state"][index], key: leaf}
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], *, rename: Rename | None = None) -> None:
        """Load a ``state_dict()`` into the storage and the dtypes of this optimizer's state.

        Parameters are found by name, without the prefixes of ``torch.compile``, ``DistributedDataParallel`` and other
        wrappers; groups without names, as torchtitan saves them, by order. Values are copied. A dtype may widen within
        its kind; it never follows the parameter's dtype, as ``torch.optim`` lets it. If parameters are sharded, all
        ranks must call this together; a rank that calls it alone raises when the group's timeout has passed. Otherwise
        a rank loads by itself, and the next step raises if the ranks have loaded different states.

        Args:
            state_dict: the state of an optimizer of this transform.
            rename: maps saved names to this optimizer's parameter names, as in `muonfx.checkpoint.load`, but with a dot
                instead of a slash between levels.

        Raises:
            ValueError: other groups or parameters, a missing, unexpected or reshaped state leaf, a narrowing dtype,
                the shard of another rank, or a missing hyperparameter; the message names them all.
                Nothing has been changed when an error is raised.
            ShardingError: another rank raised an error, or did not call this.
        """
        self._rebind()
        check_real(self._named())
        given: dict[str, Any] = dict(state_dict)
        for hook in cast("Any", self)._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, given)
            given = given if changed is None else changed
        places = self._live["entries"].places(self.state)
        loads: list[Load] = []
        saved: list[Group] = []
        problem: Exception | None = None
        try:
            saved, loads = read_state_dict(
                given, self._attachment.groups, self.state, places, self._stepping.take, rename
            )
        except Exception as error:  # any exception is reported to the other ranks, which wait for this rank
            problem = error
        with torch.no_grad():
            self._stepping.load(loads, self._live["state"], problem)
        for group, old in zip(self.param_groups, saved, strict=True):
            group.update(
                copy.deepcopy({key: value for key, value in old.items() if key not in ("params", "param_names")})
            )
        for hook in cast("Any", self)._optimizer_load_state_dict_post_hooks.values():
            hook(self)
