"""`TransformOptimizer`: any transform as a ``torch.optim.Optimizer``.

Terms of this file: the *update rule* of a parameter is the list of transforms that update it, for example those under
its label. Parameters of one update rule form a *group*, unless the caller passes groups. A *hyperparameter* is a
numeric argument of the transform. Each group holds the hyperparameters of its rule, and every step reads them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, TypedDict, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.core.chain_differences import CHAINS
from muonfx.core.checks import warn_caller
from muonfx.core.donation import check_writable
from muonfx.core.hyperparams import check_numbers, with_hyperparams
from muonfx.core.transform import Arguments, require_transform
from muonfx.internal.arguments import plain_arguments
from muonfx.internal.display import format_list
from muonfx.internal.renaming import Rename
from muonfx.internal.tracing import uncompiled
from muonfx.internal.wrappers import unwrapped
from muonfx.optimizer.constructing import constructed_together, group_of
from muonfx.optimizer.group_numbers import CallersTensors, Group, TrackedGroup, with_python_numbers
from muonfx.optimizer.initial_state import InitialState, Path, with_new_leaves
from muonfx.optimizer.local_values import Load
from muonfx.optimizer.lost_decay import NARROW_DTYPES, RoundingCheck
from muonfx.optimizer.named_parameters import (
    Gradients,
    NamedPairs,
    NamedParameters,
    NamedTensors,
    check_once,
    divide,
    divide_frozen,
    named_pairs,
    params_of,
    resolve_groups,
    warn_of_empty_groups,
    with_known_names,
)
from muonfx.optimizer.over_ranks import stepping_for
from muonfx.optimizer.param_groups import (
    complete_entries,
    defaults_for_schedulers,
    new_groups,
)
from muonfx.optimizer.resuming import differences, entries_of_code, entries_to_load, numbers_warning
from muonfx.optimizer.saved_chains import chain_warning, record_of_group
from muonfx.optimizer.state_dict import read_groups, read_state_dict
from muonfx.optimizer.state_entries import (
    StateEntries,
    entries_by_name,
    read_assigned,
    warn_of_shared,
)
from muonfx.optimizer.stepping import FormerState, Stepping
from muonfx.optimizer.tracked_groups import OneRateCheck, TrackedGroups, own_groups
from muonfx.optimizer.tracked_parameters import (
    GradientCheck,
    TrackedParameters,
    check_real,
    check_usable,
    models_of,
    require_dense_and_real,
)
from muonfx.optimizer.update_rules import UpdateRules, distinct_rules, warn_of_ascent
from muonfx.optimizer.whole_state import checked_state, copy_state, require_tensors
from muonfx.sharding.communication.waiting import construction
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import Settings
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.sharding.transform import Sharded, settings_of
from muonfx.tree import PyTree

Loss = TypeVar("Loss")
LayoutLike = Layout | Callable[[Mapping[str, Tensor]], Layout] | None
"""A layout, or a function that returns the layout of named parameters."""


class _Current(TypedDict):
    """The values that the steps of an optimizer change. It is empty until the first state is created.

    A dict, because torch.compile replays writes to a dict, but not assignments to an optimizer's attributes.
    """

    state: PyTree
    """The state of the transform."""
    entries: StateEntries
    """The entries of ``optimizer.state``, which show this state."""
    initial: InitialState | None
    """A record of the leaves that have initial values; None after the first step."""


# Who has what:
#
# - The optimizer owns the state of the transform, and decides when it is created, moved to new tensors, or loaded.
# - Its `Stepping` has the transform with the current numbers. It computes states and steps, in one process or over
#   ranks, and keeps none of them. It is replaced when parameters are added or moved.
# - `StateEntries` has the position of each leaf of the state in ``optimizer.state``, and finds edits of a caller.
# - `TrackedParameters` has the tensors that the state belongs to, and finds those that were replaced.
# - `TrackedGroups` has the groups that the steps read, and finds those that were edited.


class TransformOptimizer(Optimizer):
    """A ``torch.optim.Optimizer`` that applies a transform. It works with PyTorch's schedulers and gradient scalers.

    Groups: parameters are grouped by their labels in `partition`, such as "muon" and "adamw". If you pass a group
    whose parameters have several labels, it is split. Groups with ``momentum`` (Muon) come first, then groups with
    ``betas`` (Adam), then others. Groups keep keys of your own, such as "lr_scale".

    Parameters that are not trained: frozen parameters, and those with the label None, are in no group and have no
    state. They may have any dtype. A gradient under the label None is ignored. A frozen parameter that is trained later
    raises an error until it is added by `add_param_group`.

    Hyperparameters: each numeric argument of the transform is an entry of the groups that it updates. Every step
    reads these entries, so schedulers work. The key is the name that torch uses (``lr``, ``weight_decay``,
    ``momentum``, ``betas``, ``eps``), or else the dotted name in `muonfx.hyperparams` without the label. Adam's groups
    have the first of ``betas`` also as ``momentum``, for schedulers that expect it. If you change either entry, the
    next step sets the other one. If a number is a tensor, each group has a copy of it.

    Sharded parameters: DTensors (from ``fully_shard`` or tensor parallelism) need no ``layout``. The updates are the
    same as in one process. All ranks must construct the optimizer, call ``step``, add groups and load sharded states
    together. An error on one rank is raised on all ranks.

    State: it is created at construction. ``optimizer.state[parameter]`` shows the tensors of one parameter, under keys
    such as "momentum.trace", and the scalars that all parameters share. Each step overwrites the tensors of the state,
    but not the gradients. A tensor that is assigned there, of the same shape, dtype and device, is copied into the
    state. If all entries of a parameter are removed, its state starts again. Other changes are errors. If
    weights are loaded between construction and the first step, the first step initializes the state again from them.

    Replaced parameters: state is stored by parameter name. After construction, the model may be sharded, loaded with
    ``assign=True``, moved to another device, converted (in one process) or materialized from meta, and an engine may
    put other tensors into ``param_groups``. The next step moves, converts and reshards the state with them.

    Args:
        params: a model, its ``named_parameters()``, a dict from names to tensors, or groups. A group is a dict with
            named parameters under "params", and values for some hyperparameters. Names may be omitted if ``model`` is
            given.
        tx: the transform. Its labels and masks receive the flat dict of all named parameters.
        donate_grads: if True, a step may overwrite the gradients. This saves memory if a transform reads the whole
            tree, such as `clip_by_global_norm`, and with Muon for sharded parameters. The values of ``.grad`` are
            undefined after such a step.
        bucket_bytes: the approximate bytes of parameters that elementwise and matrix transforms process at a time.
            Larger buckets are faster for small parameters, and smaller buckets use less memory. None: the size of the
            largest parameter, but at least 8 MiB, on a CPU with AMX 64 MiB, on CUDA 512 MiB. For sharded parameters:
            256 MiB of a rank's shards, and of the buffers of one exchange of matrices.
        layout: for plain tensors in a distributed run: a `muonfx.sharding.Layout`, which describes the shard of each
            parameter on each rank, or a function from the named parameters to a layout. Under
            `DistributedDataParallel`, use ``muonfx.sharding.replicated`` to divide the orthogonalization among the
            ranks. None: plain tensors belong to this process alone.
        model: the model that has ``params``, if ``params`` is not the model itself. It provides the names of tensors
            that are given without names. If its parameters are replaced, the optimizer uses the new ones.

    Raises:
        TypeError: a parameter has no name and ``model`` is not given, a tensor cannot be optimized, a leaf of the state
            is no tensor, or ``layout`` is given for DTensors.
        ShardingError: the ranks have different parameters, transforms, layouts or hyperparameters.
        ValueError: two parameters have the same name, a group has a value out of range, or FullyShardedDataParallel
            (FSDP1) has flattened the parameters.

    Warns:
        UserWarning: some parameters would move in the direction of the gradient, because none of their transforms
            reverses its sign, as `scale_by_learning_rate` does; or a key of a group looks like a misspelt
            hyperparameter; or a group has neither parameters nor "weight_decay", although ``model`` is given and
            nothing is frozen; or rounding to the parameters' dtype, bfloat16 or float16, removes the weight decay or
            most updates.

    Example:
        >>> import muonfx as mfx
        >>> from torch.nn import Embedding, Linear, Sequential
        >>> model = Sequential(Embedding(8, 4), Linear(4, 4), Linear(4, 8))
        >>> tx = mfx.muon_with_adamw(1e-3, 4e-3, labels=mfx.default_labels(model))
        >>> optimizer = TransformOptimizer(model, tx)
        >>> [(group["label"], group["lr"]) for group in optimizer.param_groups]
        [('muon', 0.001), ('adamw', 0.004)]
        >>> model(torch.arange(8)).square().sum().backward()
        >>> optimizer.step()
    """

    _current: _Current
    _layout: Layout | None  # of the parameters, if it was given
    _settings: Settings  # options of the communication
    _steppings: list[Stepping]  # the one that the property `_stepping` returns
    _parameters: TrackedParameters  # the tensors that have state, and their positions in the models
    # The param groups, from which each step reads the hyperparameters.
    _tracked_groups: TrackedGroups
    _gradient_check: GradientCheck
    _rate_check: OneRateCheck  # warns if a scheduler has given all groups one rate
    _rounding_check: RoundingCheck  # warns if rounding to bfloat16 or float16 removes updates
    _callers_tensors: CallersTensors  # the tensors that were hyperparameters in arguments
    _groups: list[Group]  # the list that the property `param_groups` returns

    @constructed_together
    @plain_arguments
    def __init__(
        self,
        params: NamedParameters,
        tx: Transform,
        *,
        donate_grads: bool = False,
        bucket_bytes: int | None = None,
        layout: LayoutLike = None,
        model: nn.Module | None = None,
    ) -> None:
        # 1. Check the arguments, and read the names of the parameters.
        tx, layout, settings = _without_sharding(tx, layout)
        require_transform("tx", tx)
        _require_one_model(tx)
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, found {bucket_bytes}")
        self.donate_grads = donate_grads
        self.bucket_bytes = bucket_bytes
        self._current = cast("_Current", {})  # `_create_state` sets its values
        groups = resolve_groups(params, model)
        named: dict[str, Tensor] = {}
        for group in groups:
            named.update(group["params"])
        if not named:
            raise ValueError(
                "params: found no parameters; pass a model that has some, or model.named_parameters(), which can be "
                "read only once"
            )
        warn_of_empty_groups(groups, model)
        # 2. Find the transforms of each parameter. Frozen parameters, and those with the label None, have none.
        self._layout = _layout_for(named, layout)
        self._settings = settings
        self._callers_tensors = CallersTensors()
        self._steppings = []
        frozen, unfrozen = divide_frozen(named)
        stepping = self._stepping_for(tx, unfrozen, frozen)
        self._stepping = stepping
        trained, left_out = divide(unfrozen, stepping.rules)  # those left out have the label None
        warn_of_ascent(stepping.root, stepping.rules, trained)
        self._track(TrackedParameters(models_of(params), model, trained, frozen, left_out))
        self._callers_tensors.note(stepping.defaults)
        # 3. Create the groups, then the state. torch's constructor calls `add_param_group` for each group. That looks
        # up which transforms update its parameters, so it needs the attributes above.
        super().__init__(groups, {})
        self._create_state(stepping)
        self._rate_check = OneRateCheck(self._tracked_groups.rates())
        self._rounding_check = RoundingCheck()
        self._rounding_check.check(stepping, self._tracked_groups.groups, named)
        self.defaults.update(defaults_for_schedulers(self._groups))
        own_groups(self)

    def __repr__(self) -> str:
        """Return the entries of each group, as torch's optimizers do, with at most ten names of its parameters."""
        lines = [f"{type(self).__name__} ("]
        for index, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {index}")
            for key in sorted(group.keys() - {"params", "param_names"}):
                lines.append(f"    {key}: {group[key]}")
            names: list[str] = group.get("param_names", [])
            lines.append(f"    {len(names)} parameters: {format_list(names, str)}")
        return "\n".join([*lines, ")"])

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for ``copy.deepcopy`` and pickle. Raise TypeError if the optimizer runs over ranks."""
        if self._stepping.is_over_ranks:
            raise TypeError(
                "an optimizer over ranks cannot be copied: recreate it and load its state_dict()"
            )
        # A copy does not have the earlier values by which edits and replaced tensors are found.
        self._use_replacements_alone()
        self._tracked_groups.synchronize()  # the numbers in groups
        attributes: dict[str, Any] = {
            "donate_grads": self.donate_grads,
            "bucket_bytes": self.bucket_bytes,
            "_current": self._current,
            "_layout": self._layout,
            "_settings": self._settings,
            "_rounding_check": self._rounding_check,
            "tx": self._stepping.tx,
            "requested_entries": [
                tracked.numbers.requested_entries for tracked in self._tracked_groups.groups
            ],
        }
        initial = self._current["initial"]
        # Before the first step, a copy may initialize these leaves of the state again.
        if initial is not None:
            attributes["initial_paths"] = initial.unwritten(self._current["state"])
        return {**super().__getstate__(), **attributes}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy, which follows the copies of its models that the same call has made before it.

        For example, ``copy.deepcopy((model, optimizer))`` copies the model first, and the copied optimizer then finds
        the parameters that replace others in the copied model. Python passes ``memo``, the copies by ``id``.
        """
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        copied._parameters.follow_copies(self._parameters, memo)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer from the attributes that `__getstate__` has returned.

        It has no reference to the model of its parameters, until `__deepcopy__` adds one.
        """
        attributes = dict(state)
        tx: Transform = attributes.pop("tx")
        requested_entries: list[Group] = attributes.pop("requested_entries")
        initial_paths: set[Path] | None = attributes.pop("initial_paths", None)
        self._groups = attributes.pop("param_groups")
        super().__setstate__(attributes)  # sets the other attributes of `__getstate__`
        if initial_paths is not None:
            self._current["initial"] = InitialState.to_renew(self._current["state"], initial_paths)
        self._create_helpers(tx)
        for tracked, entries in zip(self._tracked_groups.groups, requested_entries, strict=True):
            tracked.numbers.requested_entries = entries
        own_groups(self)

    def _create_helpers(self, tx: Transform) -> None:
        """Create the attributes that are not copied, for the copied parameters in the groups."""
        named = self._named_params()
        self._callers_tensors = CallersTensors()
        self._steppings = []
        self._stepping = self._stepping_for(tx, named, {})
        self._track(TrackedParameters([], None, trained=named, frozen={}, left_out={}))
        self._tracked_groups.record(self._groups, self._stepping.rules)
        self._rate_check = OneRateCheck(self._tracked_groups.rates())
        # A step does this, too, but torch.compile may trace the first one.
        self._stepping.refresh(named, self._tracked_groups.groups)

    def _track(self, parameters: TrackedParameters) -> None:
        """Create the objects that find replaced parameters, edited groups and missing gradients."""
        self._parameters = parameters
        self._tracked_groups = TrackedGroups(parameters)
        self._gradient_check = GradientCheck(parameters, is_alone=not self._stepping.is_over_ranks)

    # ------------------------------------------------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train. Their state is created now, and the state of all other parameters is kept.

        Args:
            param_group: a dict with the parameters under "params", and values for some hyperparameters. Parameters
                of a model that the optimizer was given have the names of that model; others need names. They become
                one group. If they have several labels, a value such as "lr" applies to all of them, and numbers that
                are not given and differ have keys of their own, such as "adamw.weight_decay". Without "lr", labels with
                different rates become one group each. A parameter that was frozen at construction may be added after
                ``requires_grad_()``.

        Raises:
            TypeError: the group is no dict.
            ValueError: the group has no "params", a parameter is in a group already, all are frozen, all have the
                label None, or a value is out of range.

        Warns:
            UserWarning: a key looks like a misspelt hyperparameter.
        """
        is_constructed = "state" in self._current
        if is_constructed:  # a user adds parameters
            # First, so that the state that is kept is of the current parameters.
            self.follow_model()
            with construction(lambda: group_of(self._tracked_groups.named, self._layout)):
                self._add_trained(param_group)
            return
        # Otherwise torch's constructor calls this for each group of its argument.
        pairs = named_pairs(params_of(param_group))
        trained_pairs = [(name, param) for name, param in pairs if name in self._stepping.rules]
        self._add_groups(self._stepping, param_group, trained_pairs, as_one=False)

    def _add_trained(self, param_group: Group) -> None:
        """Add parameters after construction, as `add_param_group` describes it.

        Frozen parameters, and those with the label None, are put into no group.
        """
        # 1. Find the parameters to train. Nothing is changed yet.
        named = self._named_params()
        name_of = self._parameters.names
        pairs = with_known_names(named_pairs(params_of(param_group), name_of), name_of)
        check_once([*named.items(), *pairs])  # no parameter is added twice
        frozen, unfrozen = divide_frozen(dict(pairs))
        if pairs and not unfrozen:
            raise ValueError(
                f"{pairs[0][0]!r} is frozen: call requires_grad_() before add_param_group"
            )
        stepping = self._extended_stepping(unfrozen, named)
        trained, _left_out = divide(unfrozen, stepping.rules)  # those left out have the label None
        if pairs and not trained:
            raise ValueError(
                f"{pairs[0][0]!r} has the label None, so that it is not trained: recreate the optimizer with "
                "another label for it"
            )
        # 2. Add their groups, and create their state. Earlier parameters keep theirs.
        with self._groups_restored_on_error():
            self._add_groups(stepping, param_group, list(trained.items()), as_one=True)
            self._create_state(stepping)
        # 3. Later steps find tensors that replace these parameters. The new state has also the dtypes of earlier ones.
        self._parameters.add_models(models_of([param_group]))
        self._parameters.track({**named, **trained})
        self._parameters.leave_out(frozen)
        self._rounding_check.check(self._stepping, self._tracked_groups.groups, trained)

    def _extended_stepping(self, added: NamedTensors, earlier: NamedTensors) -> Stepping:
        """Return an object like `_stepping`, which is for fixed parameters, that also updates ``added`` parameters.

        ``earlier`` are the parameters that the optimizer trains already. Both are by name.
        """
        tx = self._transform_for(added)  # has labels for them
        all_params = {**earlier, **added}
        return self._stepping_for(tx, all_params, self._parameters.not_trained_params())

    def _add_groups(
        self, stepping: Stepping, group: Group, pairs: NamedPairs, *, as_one: bool
    ) -> None:
        """Add a param group for named parameters to ``param_groups``, or one for each label.

        Args:
            stepping: has the transforms of the parameters.
            group: the group of the caller, such as ``{"params": ..., "lr": 0.1}``. Hyperparameters that it lacks are
                added.
            pairs: the names and the parameters.
            as_one: True to keep the parameters in one group if the labels have no different rates.
        """
        entries = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        if not pairs:
            empty_group = {"label": None, "lr": 0.0, **entries, "params": [], "param_names": []}
            super().add_param_group(empty_group)
            return
        # To warn if the caller writes into a tensor of which groups have copies.
        self._callers_tensors.note(entries)
        names = [name for name, _param in pairs]
        self._tracked_groups.warn_of_unread_entries(entries, names, stepping.rules)
        for new_group in new_groups(stepping, entries, pairs, as_one=as_one):
            self._append_group(new_group)

    def _append_group(self, group: Group) -> None:
        """Append a group to ``param_groups`` by torch's method, and remove the entries that it adds.

        It adds the entries of ``self.defaults`` that the group lacks, such as "momentum". They are the defaults of
        another group, and the transforms of this one do not read them.
        """
        absent_keys = self.defaults.keys() - group.keys()
        super().add_param_group(group)
        added_group = self._groups[-1]
        for key in absent_keys:
            del added_group[key]

    @property
    def groups_without_rate(self) -> tuple[int, ...]:
        """The indices of the ``param_groups`` whose ``lr`` has no effect.

        Their transforms use a schedule or no learning rate. PyTorch's schedulers require an ``lr``, so it is 0 there.
        """
        indices: list[int] = []
        for index, tracked in enumerate(self._tracked_groups.groups):
            if "lr" not in tracked.numbers.keys:
                indices.append(index)
        return tuple(indices)

    @property
    def param_groups(self) -> list[Group]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The param groups, with the tensors that the model has now for their parameters, as after ``fully_shard``."""
        # Functions of torch read the groups before they call a method of the optimizer. For example,
        # `set_optimizer_state_dict` looks up each parameter of the groups in the model.
        is_constructed = "state" in self._current
        if is_constructed and not torch.compiler.is_compiling():
            self._parameters.put_replacements_into(self._groups)
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._groups = groups

    def _named_params(self) -> NamedTensors:
        """Return a dict from name to parameter, from the param groups: ``{"0.weight": tensor, "0.bias": tensor}``."""
        named: dict[str, Tensor] = {}
        for number, group in enumerate(self._groups):
            names = group["param_names"]
            params = group["params"]
            if len(names) != len(params):
                raise ValueError(
                    f"params: group {number} has {len(params)} tensors, expected the {len(names)} parameters of its "
                    "names. DeepSpeed replaces parameters by flat tensors in its stages 1 to 3: give it "
                    "muonfx.engines.deepspeed.Muon(model, ...)"
                )
            named.update(zip(names, params, strict=True))
        return named

    def _put_in_groups(self, named: NamedTensors) -> None:
        """Write the tensors in ``named``, by parameter name, into the param groups, at the positions of their names."""
        for group in self._groups:
            group["params"] = [named[name] for name in group["param_names"]]

    # ----------------------------------------------------------------------------------------------------- transform

    def _transform_for(self, new: NamedTensors) -> Transform:
        """Return the transform to use once ``new`` parameters are added. `Muon` overrides this to label them."""
        return self._stepping.tx

    @property
    def _stepping(self) -> Stepping:
        """The object that creates the state and runs the steps, in one process or over ranks."""
        return self._steppings[0]

    @_stepping.setter
    def _stepping(self, stepping: Stepping) -> None:
        # In a list, because methods may be called on a wrapper, as Lightning and Fabric return it. It reads attributes
        # of the optimizer, but an attribute that a method assigns would be its own, and the optimizer keep the former.
        self._steppings[:] = [stepping]

    def _stepping_for(
        self, tx: Transform, named: NamedTensors, not_trained: NamedTensors
    ) -> Stepping:
        """Return the object that creates the state of the named parameters and steps on them.

        Args:
            tx: the transform. It may give some parameters the label None, so that they get no state.
            named: the parameters to train, by name.
            not_trained: other parameters of the model, such as frozen ones, which get no state, but are in the layout.
        """
        check_usable(named, self._layout)
        _, others = divide(not_trained, named)
        stepping = self._stepping_without_labels(tx, named, others)
        # Its rules have the parameters with the label None, such as "b" in ``partition(transforms, {"b": None})``.
        names_left_out = {name for name, rule in stepping.rules.items() if rule.is_left_out}
        if not names_left_out:
            return stepping
        left_out, trained = divide(named, names_left_out)
        return self._stepping_without_labels(tx, trained, {**others, **left_out})

    def _stepping_without_labels(
        self, tx: Transform, trained: NamedTensors, others: NamedTensors
    ) -> Stepping:
        """Return the object that steps on all parameters in ``trained``, whatever their labels. Both are by name."""
        return stepping_for(
            tx,
            trained,
            others,
            self._layout,
            self._settings,
            self.bucket_bytes,
            self._callers_tensors,
        )

    # -------------------------------------------------------------------------------------------------------- state

    @property
    def tx(self) -> Transform:
        """The transform that this optimizer was created with. `Muon` extends it if parameters are added.

        It has the initial hyperparameters. The current hyperparameters are in ``param_groups``.
        """
        return self._stepping.tx

    @property
    def transform(self) -> Transform:
        """The transform that updates the parameters: `tx` in one process, ``sharded(tx, layout)`` over ranks.

        It has the current hyperparameters, so a checkpoint that is saved with it records them. Where groups have
        different values, it has the value of the first group.
        """
        self._use_replacements_alone()  # reads the groups, which may have been edited
        numbers = self._stepping.current_numbers(self._tracked_groups.groups)
        tx = with_hyperparams(self.tx, numbers)
        return self._stepping.sharded_if_over_ranks(tx)

    @property
    def transform_state(self) -> PyTree:
        """The current state, in the form that `transform` accepts. The next step overwrites the tensors."""
        self._adopt_state()
        self._update_initial_state_alone()
        return self._current["entries"].with_dtensors(self._current["state"])

    def snapshot(self) -> tuple[Transform, PyTree, dict[str, Tensor], dict[str, Tensor | None]]:
        """Return ``(transform, state, params, grads)`` for a pure update with the current hyperparameters.

        ``transform.update(grads, state, params)`` returns the updates of the next step without taking it. The tensors
        share memory with the optimizer. Over ranks, all ranks must call this together: it gathers whole tensors, and
        the returned transform is not sharded.

        Example:
            >>> import muonfx as mfx
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = TransformOptimizer(model, mfx.scale(-0.1))
            >>> model(torch.ones(2)).sum().backward()
            >>> tx, state, params, grads = optimizer.snapshot()
            >>> tx.update(grads, state, params)[0]
            {'weight': tensor([[-0.1000, -0.1000]])}
        """
        # First adopt what the caller has changed, as a step does.
        self.follow_model()
        self._update_initial_state()
        named = self._named_params()
        params = {name: param.detach() for name, param in named.items()}
        grads = _gradients_of(named)
        return self._stepping.snapshot(
            self._current["state"], params, grads, self._tracked_groups.groups
        )

    def _create_state(self, stepping: Stepping) -> None:
        """Create a state for the parameters in the groups by ``stepping``, and use both from now on.

        If parameters were added or replaced, each leaf that the state so far has keeps its value. All other leaves have
        their initial values. Until the new state is complete, only the records of the groups change.
        """
        self._tracked_groups.record(self._groups, stepping.rules)
        named = self._named_params()
        former: FormerState | None = None
        is_first = "state" not in self._current
        # On the meta device, a state has no values to keep.
        if not is_first and not self._parameters.on_meta:
            former = FormerState(self._stepping, self._current["state"])
        # In inference mode, as in Lightning's hooks of validation, new tensors could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            state = stepping.init(named, self._tracked_groups.groups, former)
        require_tensors(state)
        if former is None:
            initial = InitialState(named, state)
        else:
            # A path names a leaf, such as ("momentum", "trace", "0.weight"). Only leaves of added parameters are new.
            added_paths = set(tree.paths(state)).difference(tree.paths(former.state))
            initial = with_new_leaves(
                self._current["initial"], added_paths, named, state, former.state
            )
        self._stepping = stepping
        self._parameters.follows_dtypes = not stepping.is_over_ranks
        self._current["state"] = state
        self._current["initial"] = initial
        self._show_all(named)

    def _update_initial_state(self) -> None:
        """Before the first step, initialize the state again if weights were loaded after it was created.

        Some transforms copy or measure the parameters in ``init``. Tensors of the state that the caller has loaded or
        written are kept. All ranks must call this together.
        """
        # First: if a trace read the record, the second step would be compiled again.
        if torch.compiler.is_compiling():
            return
        # Has checksums of the weights and of the tensors of the state.
        initial = self._current["initial"]
        if initial is None:  # a step was made
            return
        # The groups may have been edited since, so that a name may be at the position of another tensor there.
        params = {name: param.detach() for name, param in self._tracked_groups.named.items()}
        has_values = not self._parameters.on_meta
        has_changed = has_values and not initial.is_of(params)
        # If one rank has other weights now, all ranks initialize the state again.
        if self._stepping.is_true_on_any_rank(has_changed):
            new_values = self._initial_state_again(params)
            with torch.no_grad():
                self._current["initial"] = initial.renew(params, self._current["state"], new_values)

    def _initial_state_again(self, params: NamedTensors) -> PyTree:
        """Return the initial state of the parameters, without the warnings that construction has given."""
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._stepping.initial_state(params)

    def _update_initial_state_alone(self) -> None:
        """In one process, initialize the state again if weights were loaded since it was created.

        Over ranks, do nothing: the first step does it, together with all ranks.
        """
        # In this order: if a trace read the record, the second step would be compiled again.
        is_before_first_step = (
            not torch.compiler.is_compiling() and self._current["initial"] is not None
        )
        named = self._tracked_groups.named
        if is_before_first_step and not self._is_over_ranks(named.values()):
            self._update_initial_state()

    def _show_all(self, named: NamedTensors) -> None:
        """Fill ``optimizer.state`` again, with the current state: ``{parameter: {"momentum.trace": tensor}}``.

        ``named`` are the parameters by name.
        """
        self.state.clear()
        for param in named.values():
            self.state[param] = {}
        state = self._current["state"]
        entries = StateEntries(state, named)  # finds the parameter and the key of each tensor
        # `show` converts a tensor to a DTensor, over ranks
        entries.update(self.state, state, self._stepping.show)
        self._current["entries"] = entries

    def _adopt_state(self) -> None:
        """If a caller has edited ``optimizer.state``, copy the edits into the state of the transform.

        The steps read that state, and ``optimizer.state`` only shows its tensors.
        """
        entries = self._current["entries"]  # what the optimizer has put into `optimizer.state`
        # The first step keeps tensors that were written.
        if self._current["initial"] is not None:
            entries.count_writes()
        if entries.is_edited(self.state):
            self._copy_edits(entries)

    def _copy_edits(self, entries: StateEntries) -> None:
        """Copy the edits of ``optimizer.state`` into the state of the transform. Raise before any change.

        A tensor of the state receives the values of the one that was assigned in its place, as in
        ``optimizer.state[param]["momentum.trace"] = tensor``. If all entries of a parameter were removed, as by
        ``optimizer.state.clear()``, its state gets initial values. ``optimizer.state`` then shows the tensors of the
        state again. ``entries`` is what it had before the edits.
        """
        named = self._tracked_groups.named
        # 1. Read and check all edits.
        entries_of = entries_by_name(entries, self.state, self._groups)
        removed_names = [
            name for name in named if entries.leaves_of[name] and name not in entries_of
        ]
        assigned_values = read_assigned(entries, entries_of, self._stepping)
        initial_values = self._initial_values_of(removed_names, named)
        # 2. Copy their values.
        state = self._current["state"]
        with torch.no_grad():
            self._stepping.assign(assigned_values + initial_values, state)
        # If weights are loaded before the next step, it initializes these leaves again.
        if initial_values:
            paths = tree.paths(state)
            initial_paths = {paths[load.leaf_index] for load in initial_values}
            self._current["initial"] = with_new_leaves(
                self._current["initial"], initial_paths, named, state, state
            )
        self._show_all(named)
        warn_of_shared(entries, removed_names)

    def _initial_values_of(self, removed_names: list[str], named: NamedTensors) -> list[Load]:
        """Return the initial values of the state of parameters whose entries were removed from ``optimizer.state``.

        ``removed_names`` are their names, and ``named`` all parameters. A leaf that all parameters share, such as a
        step count, is included only if the entries of all were removed.
        """
        if not removed_names:
            return []
        if self._stepping.is_over_ranks:  # the caller may have removed them on one rank only
            raise _emptied_over_ranks(removed_names[0])
        initial_leaves = tree.leaves(self._initial_state_again(named))
        removed = set(removed_names)
        loads: list[Load] = []
        for leaf in self._current["entries"].leaves:
            # The parameter of this leaf, or all parameters if they share it.
            if removed.issuperset(leaf.names):
                loads.append(Load(leaf.index, initial_leaves[leaf.index]))
        return loads

    # ------------------------------------------------------------------------------------------- replaced parameters

    def follow_model(self) -> None:
        """Use tensors that have replaced parameters now, as a step does first. All ranks must call this together."""
        with self._errors_to_waiting_ranks():
            self._use_replacements(is_in_step=False)
        self._update_initial_state_alone()

    def _use_replacements(self, *, is_in_step: bool) -> None:
        """Use tensors that have replaced parameters, and move the state to them. All ranks must call this together.

        In a step, raise ValueError if only the replaced tensors have gradients, and not the new ones.
        """
        self._adopt_state()  # first, so that tensors that the caller has assigned move with the state
        if self._tracked_groups.are_current(self._groups):  # usually
            return
        current_params = self._follow_groups()
        if is_in_step:
            self._parameters.require_new_gradients(current_params)
        self._use_tensors(current_params)

    def _errors_to_waiting_ranks(self) -> AbstractContextManager[None]:
        """Return a context for `_use_replacements`, whose errors are sent to other ranks where the state moves.

        Otherwise they would wait for this rank, which has raised an error before it creates the new state.
        """
        if torch.compiler.is_compiling() or not dist.is_initialized():
            return nullcontext()
        return construction(self._ranks_that_move_state)

    def _ranks_that_move_state(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks that move or create state together before the next step.

        Return None if no state has to move, or if this process moves it alone.
        """
        tensors_to_follow = self._tensors_to_follow()
        if not tensors_to_follow:
            return None
        return group_of([*self._tracked_groups.named.values(), *tensors_to_follow], self._layout)

    def _tensors_to_follow(self) -> list[Tensor]:
        """Return the tensors for which state must be moved or created before the next step.

        They have another device, dtype or sharding than the state, or were put into the groups.
        """
        moved = self._parameters.moved(self._groups)
        added = self._parameters.added_in(self._groups)
        return [*moved, *added.values()]

    def _use_replacements_alone(self) -> None:
        """Use what the user has changed since the last step, as far as this rank can do it without the others.

        The user may have edited ``optimizer.state`` or the groups, replaced parameters, and loaded weights before the
        first step. Over ranks, changes for which all ranks move state together, and errors, are left to the next step.
        Then the groups are not read either.
        """
        try:
            self._adopt_state()
            if not self._tracked_groups.are_current(self._groups):
                tensors_to_follow = self._tensors_to_follow()
                if not tensors_to_follow or not self._is_over_ranks(tensors_to_follow):
                    self._use_tensors(self._follow_groups())
            self._update_initial_state_alone()
        except (TypeError, ValueError):
            # The edits may be wrong on this rank only, while the others have gone on.
            if not self._stepping.is_over_ranks:
                raise

    def _is_over_ranks(self, params: Iterable[Tensor]) -> bool:
        """Return True if the state of parameters is over ranks, or will be, because they have become DTensors."""
        return self._stepping.is_over_ranks or any(map(is_dtensor, params))

    def _follow_groups(self) -> NamedTensors:
        """Read groups that somebody has edited, and return the current tensor of each parameter by name.

        Parameters of the model that were put into the groups get state. Where the model has another tensor than the
        groups, as after ``fully_shard(model)``, the result has the one of the model.
        """
        added = self._parameters.added_in(self._groups)
        if added:
            self._add_params_in_groups(added)
        # Follow other changes, too, such as parameters that were moved to another group.
        self._tracked_groups.follow(self._groups, self._stepping.rules)
        return self._parameters.current_params(self._named_params())

    def _use_tensors(self, named: NamedTensors) -> None:
        """Use the tensors that the parameters have now, and move the state to those that have replaced others.

        If they have the device, dtype and sharding of the replaced ones, the tensors of the state are kept. Otherwise
        new ones are created, and the values are copied.
        """
        replaced = self._parameters.replaced(named)
        if not replaced:
            return
        if self._parameters.have_same_placement(replaced):
            self._put_in_groups(named)
            self._show_all(named)
            self._parameters.track(replaced)  # as the tensors that have state
        else:
            self._move_state(named)
            self._parameters.track(named)

    def _move_state(self, named: NamedTensors) -> None:
        """Create a state for tensors that have replaced parameters, and copy the values of the former state into it.

        ``named`` are all parameters. The new tensors may be on another device, or sharded in another way. Raise
        ValueError if they are on the meta device and the former tensors were not: the state would lose its values.
        """
        if not self._parameters.on_meta:  # else the state has no values that it could lose
            check_real(named)
        with self._groups_restored_on_error(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # construction has given the warnings
            stepping = self._stepping_for(self.tx, named, self._parameters.not_trained_params())
            _require_same_rules(stepping.rules, self._stepping.rules)
            self._put_in_groups(named)
            self._create_state(stepping)

    def _add_params_in_groups(self, added: NamedTensors) -> None:
        """Train parameters of the model that were written into ``param_groups``, and not given to `add_param_group`.

        For example, Lightning writes them there when a run with unfrozen layers is resumed. They get state, and their
        groups get the hyperparameters that are missing. ``added`` are these parameters, by their names in the model.
        """
        earlier = self._tracked_groups.named
        stepping = self._extended_stepping(added, earlier)
        names_left_out = added.keys() - stepping.rules.keys()  # those with the label None
        if names_left_out:
            raise ValueError(
                f"param_groups: {min(names_left_out)!r} was added, but its label is None, so that it is not "
                "trained: remove it from the groups, or recreate the optimizer with other labels"
            )
        with self._groups_restored_on_error():
            names_per_group = self._parameters.names_of(self._groups, added)
            for group, names in zip(self._groups, names_per_group, strict=True):
                has_added = not added.keys().isdisjoint(names)
                if has_added:  # add hyperparameters that it lacks, such as "momentum"
                    complete_entries(stepping, distinct_rules(names, stepping.rules), group)
            self._tracked_groups.adopt(self._groups, names_per_group, stepping.rules)
            self._create_state(
                stepping
            )  # earlier parameters keep their values, in their present dtypes
        self._parameters.track({**earlier, **added})

    @contextmanager
    def _groups_restored_on_error(self) -> Generator[None]:
        """Return a context manager that undoes all changes of the param groups if an error is raised in its block.

        For example, if a parameter cannot be added, the optimizer has the groups that it had before.
        """
        tracked_groups = self._tracked_groups.groups
        # Copies, because a block changes the dicts.
        entries_per_group = [dict(group) for group in self._groups]
        try:
            yield
        except BaseException:
            self._tracked_groups.groups = tracked_groups
            # The dicts stay the same objects, because a scheduler may have them.
            del self._groups[len(entries_per_group) :]  # those that were added
            for group, entries in zip(self._groups, entries_per_group, strict=True):
                group.clear()
                group.update(entries)
            raise

    # ----------------------------------------------------------------------------------------------------- stepping

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None or zeros, also of tensors that replaced parameters of the model."""
        if not torch.compiler.is_compiling():
            # Puts new tensors into the groups, from which torch's method reads them.
            self._use_replacements_alone()
        super().zero_grad(set_to_none)

    @overload
    def step(self, closure: None = None, **extras: Any) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss], **extras: Any) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **extras: Any) -> Any:
        """Update the parameters once from their ``.grad``. A parameter without gradient and its state do not change.

        Args:
            closure: a function that recomputes the loss and its gradients. Called first; ``step`` returns its result.
            **extras: extra arguments of the update, such as ``value=loss``. Each transform receives the arguments that
                it accepts.

        Raises:
            ValueError: a hyperparameter is out of range, or a parameter cannot be updated: it has a gradient, but was
                frozen at construction and not added, it has another shape than at construction, or it is on the meta
                device. Also if none of the optimizer's parameters has a gradient, but others of the model have one.
            TypeError: a gradient is sparse or complex, or no transform accepts an extra argument. No parameter or state
                has been changed when an error is raised.
        """
        if self._stepping.is_over_ranks and torch.compiler.is_compiling():
            return self._step_outside_the_graph(closure, extras)
        return self._step(closure, extras)

    @uncompiled
    def _step_outside_the_graph(
        self, closure: Callable[[], Any] | None, extras: dict[str, Any]
    ) -> Any:
        """Run a step in a compiled function, between two graphs: ranks communicate, which a graph cannot contain."""
        return self._step(closure, extras)

    def _step(self, closure: Callable[[], Any] | None, extras: dict[str, Any]) -> Any:
        """Run a step and return the result of the closure."""
        loss: Any = None
        # The other ranks would wait for one that raises alone.
        with self._stepping.errors_on_all_ranks(), self._errors_to_waiting_ranks():
            if closure is not None:
                loss = _evaluate(closure)
            # A traced graph is valid for the current parameters only.
            if not torch.compiler.is_compiling():
                self._use_replacements(is_in_step=True)
        # `_stepping` may be another object now: over ranks, if the parameters have become DTensors.
        with self._stepping.errors_on_all_ranks():
            params, gradients = self._prepare_step()
        self._update_initial_state()  # before the first step
        # The step may overwrite these tensors.
        donate = Donation(updates=self.donate_grads, state=True)
        call = Arguments(gradients, self._current["state"], params, donate, extras)
        state = self._stepping.step(call)
        self._current["state"] = state
        # Weights that are loaded from now on do not change the state.
        self._current["initial"] = None
        # `optimizer.state` shows it
        self._current["entries"].update(self.state, state, self._stepping.show)
        if self._stepping.has_lacked_gradients:
            self._gradient_check.warn_of_none(params)
        return loss

    def _prepare_step(self) -> tuple[NamedTensors, Gradients]:
        """Return the parameters and their gradients, two dicts by name, for a step.

        Before that, read changes of the user since the last step, such as a new "lr" in a group. Raise if a step cannot
        update the parameters, or would not train the model, for example because gradients are missing.
        """
        params = self._named_params()
        gradients = _gradients_of(params)
        groups = self._tracked_groups
        require_dense_and_real(gradients)
        # A traced graph is valid for the current parameters and groups only.
        is_compiling = torch.compiler.is_compiling()
        # 1. The groups: keys that were added, and numbers, such as a rate that a scheduler has changed.
        if not is_compiling:
            groups.adopt_new_keys(self._stepping.rules)
        self._stepping.refresh(params, groups.groups)  # raises for a wrong number, such as a text
        if not is_compiling:
            groups.warn_of_unread_rate()  # not at construction: schedulers are created later
            self._rate_check.check(groups)
            # 2. The parameters. The model may have been converted since the last step, as by model.to(torch.bfloat16).
            dtypes = {param.dtype for param in params.values()}
            if not NARROW_DTYPES.isdisjoint(dtypes):
                self._rounding_check.check(self._stepping, groups.groups, params)
            if torch.float64 in dtypes:
                self._parameters.warn_of_converted(params)
            check_writable("step: params", params)
            self._gradient_check.check(params, gradients)
            # 3. Tensors that the caller has given for numbers, and has changed without effect.
            self._callers_tensors.warn_of_written()
        return params, gradients

    # -------------------------------------------------------------------------------------------------- persistence

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the groups in the format of ``torch.optim.Optimizer.state_dict``.

        Under ``sharding.replicated`` every rank has the whole state, and may call this alone. For DTensors, all ranks
        must call this together if a transform keeps state on the owner of a matrix (the rank that computes its update),
        as `normalize_neurons` does. That state is returned as DTensors, sharded evenly over the parameter's mesh, so
        that torch can save, gather and reshard it.

        Each group has the code of its schedules and chains, which `load_state_dict` compares with its own.

        Raises:
            ShardingError: all ranks must call this together, and a rank did not.
        """
        self.follow_model()  # the state may have to move to new tensors
        for hook in cast("Any", self)._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self._tracked_groups.synchronize()  # a hook may have written into the groups
        # torch's method would call the post-hooks before the state dict is complete.
        index_of = {param: index for index, param in enumerate(self._named_params().values())}
        saved: dict[str, Any] = {}
        saved["state"] = self._saved_state(index_of)  # {0: {"momentum.trace": tensor}}
        saved["param_groups"] = self._indexed_groups(index_of)  # [{"params": [0], "lr": 0.1, ...}]
        for hook in cast("Any", self)._optimizer_state_dict_post_hooks.values():
            changed = hook(self, saved)
            if changed is not None:
                saved = changed
        return saved

    def _saved_state(self, index_of: Mapping[Tensor, int]) -> dict[Any, Any]:
        """Return the "state" of a state dict: ``{0: {"momentum.trace": tensor}}`` for the first parameter.

        ``index_of`` has the index of each parameter. Entries that a user has put into ``optimizer.state`` under other
        keys than parameters keep their keys.
        """
        state_by_index = {
            index_of.get(param, param): entries for param, entries in self.state.items()
        }
        saved_state = _unshared(state_by_index)
        self._add_exported(saved_state)
        return saved_state

    def _indexed_groups(self, index_of: Mapping[Tensor, int]) -> list[Group]:
        """Return the groups of a state dict, which have the indices of their parameters, and a record of the chain."""
        plain_name_of = unwrapped(self._tracked_groups.named)
        saved_groups: list[Group] = []
        for tracked in self._tracked_groups.groups:
            saved_group = self._saved_group(tracked)
            saved_group["params"] = [index_of[param] for param in tracked.group["params"]]
            saved_group[CHAINS] = record_of_group(self._stepping, tracked.names, plain_name_of)
            saved_groups.append(saved_group)
        return saved_groups

    def _saved_group(self, tracked: TrackedGroup) -> Group:
        """Return the entries of a group to save: all but its parameters, and what the code has requested for it."""
        entries = {key: value for key, value in tracked.group.items() if key != "params"}
        saved_group = {key: with_python_numbers(value) for key, value in entries.items()}
        return saved_group | entries_of_code(self.tx, tracked)

    def _add_exported(self, saved_state: dict[int, Group]) -> None:
        """Add tensors to a saved state that only one of several ranks has in its ``optimizer.state``.

        For example, `normalize_neurons` keeps state on the rank that computes the update of a matrix. All ranks save
        it. ``saved_state`` is ``{0: {"momentum.trace": tensor}}`` for the first parameter.
        """
        # Such tensors by their index in the state.
        exported = self._stepping.exported(self._current["state"])
        if not exported:  # always in one process
            return
        leaves_of = self._current["entries"].leaves_of  # by parameter and key
        for param_index, name in enumerate(self._named_params()):
            for key, leaf in leaves_of[name].items():
                if leaf.index in exported:
                    saved_state[param_index][key] = exported[leaf.index]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, rename: Rename | None = None
    ) -> None:
        """Copy the values of a `state_dict` into the state and the groups of this optimizer.

        Parameters are matched by name, ignoring the prefixes of ``torch.compile``, ``DistributedDataParallel`` and
        other wrappers. If the saved groups have no names, as in torchtitan, they are matched by order. The dtypes of
        the state do not change: a saved value may have a narrower dtype, such as bfloat16 for float32, but not a wider
        one.

        If parameters are sharded, all ranks must call this together; a rank that calls it alone raises after the
        timeout of the process group. Otherwise each rank loads independently, and the next step raises if the ranks
        have loaded different states.

        Args:
            state_dict: the ``state_dict()`` of an optimizer with the same transform.
            rename: how saved parameter names map to this optimizer's names, as in `muonfx.checkpoint.load`, but with
                dots instead of slashes between levels.

        Raises:
            ValueError: the groups, parameters or hyperparameters differ, a number is out of range, or a saved tensor is
                missing, unexpected, has another shape or a wider dtype, or is the shard of another rank. The message
                names each of them.
                Nothing has been changed when an error is raised.
            TypeError: the state dict, its state or a group is no dict. Nothing has been changed.
            ShardingError: another rank raised an error, or did not call this.

        Warns:
            UserWarning: state was saved for parameters that are not trained now, and is not loaded; or parameters have
                no saved state, because they were frozen; or numbers of groups have changed in the code: the state
                dict's are used, except for schedules that have changed; or another chain has saved it.
        """
        self.follow_model()
        check_real(self._named_params())
        state_dict = self._after_hooks(state_dict)
        groups = self._tracked_groups.groups
        entries = self._current["entries"]  # what `optimizer.state` shows
        with self._stepping.loading():
            # Walks through the models, which may raise.
            not_trained = self._parameters.not_trained()
            to_load = read_state_dict(
                state_dict, self._stepping, groups, entries, rename, not_trained
            )
        self._stepping.require_same_on_all_ranks(to_load.without_state)
        with torch.no_grad():
            self._stepping.load(to_load.loads, self._current["state"])
        self._load_groups(to_load.groups, "load_state_dict: the state dict")
        for message in to_load.warnings:
            warn_caller(message)
        for hook in cast("Any", self)._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _after_hooks(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state dict after the hooks that torch calls before it is loaded. A hook may return another one."""
        if not isinstance(state_dict, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                "load_state_dict: expected the result of state_dict(), or torch.load(path) of a file that has it, "
                f"found {type(state_dict).__name__}"
            )
        state_dict = dict(state_dict)  # a hook may also change it in place
        for hook in cast("Any", self)._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        return state_dict

    def saved_groups(self) -> list[Group]:
        """Return the entries of each group, with the names of its parameters and what the code has requested for it.

        `muonfx.checkpoint.save` stores them, and `load_transform_state` reads them.

        >>> params = {"w": torch.nn.Parameter(torch.ones(2))}
        >>> optimizer = TransformOptimizer(params, mfx.scale_by_learning_rate(0.1))
        >>> optimizer.saved_groups()[0]["lr"], optimizer.saved_groups()[0]["param_names"]
        (0.1, ['w'])
        """
        self.follow_model()
        self._tracked_groups.synchronize()
        return [self._saved_group(tracked) for tracked in self._tracked_groups.groups]

    def load_transform_state(
        self, state: PyTree, groups: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Copy a state, such as `muonfx.checkpoint.load` or a converter returns, into the state of this optimizer.

        Over ranks, all ranks must call this together. The dtypes of this optimizer's state do not change.

        Args:
            state: a tree with the structure and shapes of `transform_state`; over ranks, with this rank's shards.
            groups: what `saved_groups` returned, to load the entries of the groups as `load_state_dict` does. None:
                the groups stay as they are.

        Raises:
            ValueError: the state has another structure, a leaf has another shape, or the groups have other members or
                hyperparameters. Nothing has been changed then.
            TypeError: a leaf of the state is no tensor. Nothing has been changed.

        Warns:
            UserWarning: as `load_state_dict`, for ``groups``.

        Example:
            >>> import muonfx as mfx
            >>> tx = mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1))
            >>> optimizer = TransformOptimizer({"w": torch.nn.Parameter(torch.ones(2))}, tx)
            >>> optimizer.load_transform_state(tx.init({"w": torch.zeros(2)}))
            >>> optimizer.transform_state["momentum"].trace
            {'w': tensor([0., 0.])}
        """
        self.follow_model()
        check_real(self._named_params())
        matched_groups: list[Group | None] | None = None
        if groups is not None:
            tracked_groups = self._tracked_groups.groups
            matched_groups = read_groups(
                groups, self.tx, tracked_groups, self._parameters.not_trained()
            )
        current_state = self.transform_state
        state = checked_state(state, current_state)
        # All checks have passed: overwrite the tensors of the state, then the entries of the groups.
        copy_state(state, current_state)
        self._stepping.note_loaded(self._current["state"])
        if matched_groups is not None:
            source = "param_groups: the loaded state"
            self._load_groups(matched_groups, source)
            # Last, because a warning may be turned into an error, and the load must be complete then.
            other_chain = chain_warning(
                source, self._stepping, self._tracked_groups.groups, matched_groups
            )
            if other_chain is not None:
                warn_caller(other_chain)

    def _load_groups(self, saved_groups: Sequence[Group | None], source: str) -> None:
        """Copy the entries of saved groups, such as "lr", into the groups, and warn of numbers that differ.

        Args:
            saved_groups: the saved group of each group, or None if there is none.
            source: the beginning of the warning, such as "load_state_dict: the state dict".
        """
        # A line is "group 'muon', lr: 0.1 in the file, 0.2 in the code; the file's is used", for example.
        lines: list[str] = []
        for tracked, saved_group in zip(self._tracked_groups.groups, saved_groups, strict=True):
            if saved_group is not None:
                # Compare them before the update, which removes the entries.
                lines += differences(self.tx, tracked, saved_group)
                tracked.group.update(entries_to_load(self.tx, tracked, saved_group))
        # Read them now: a scheduler may write "momentum" before the next step, which must not differ from new "betas".
        self._tracked_groups.synchronize()
        self._rate_check.note_loaded(self._tracked_groups)
        if lines:
            warn_caller(numbers_warning(source, lines))


def _without_sharding(tx: Transform, layout: LayoutLike) -> tuple[Transform, LayoutLike, Settings]:
    """Return the transform in ``sharded(tx, layout)`` with its layout and settings, or the arguments unchanged."""
    if not isinstance(tx, Sharded):
        return tx, layout, Settings()
    if layout is not None:
        raise TypeError(
            f"layout: tx is sharded already, over {tx.arguments['layout']!r}; leave layout out"
        )
    return tx.arguments["tx"], tx.arguments["layout"], settings_of(tx)


def _layout_for(named: NamedTensors, layout: LayoutLike) -> Layout | None:
    """Return the argument ``layout``, or its result if it is a function of the named parameters.

    For example, ``layout=muonfx.sharding.zero`` is such a function. Raise TypeError for anything else.
    """
    if callable(layout):
        layout = layout(named)
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(
            "layout must be a muonfx.sharding layout, or a function that returns one, found a "
            f"{type(layout).__name__}: create one, as in muonfx.sharding.zero(params)"
        )
    return layout


def _require_same_rules(rules: UpdateRules, former_rules: UpdateRules) -> None:
    """Raise ValueError if other transforms update a parameter now, so that its former state does not fit."""
    for name, rule in rules.items():
        if rule != former_rules[name]:
            raise ValueError(
                f"{name!r} has other labels now than when the optimizer was created: recreate the optimizer"
            )


def _evaluate(closure: Callable[[], Any]) -> Any:
    """Call the closure of ``step(closure)``, which computes the gradients, and return its result: the loss."""
    if not callable(closure):  # for example, step(loss)
        raise TypeError(
            f"closure must be a function that returns the loss, found a {type(closure).__name__}: call step(), "
            "or step(value=loss) if a transform such as reduce_on_plateau reads the loss"
        )
    with torch.enable_grad():
        return closure()


def _emptied_over_ranks(name: str) -> ValueError:
    """Return an error for a parameter whose entries were removed from ``optimizer.state`` over several ranks."""
    return ValueError(
        f"optimizer.state: the state of {name!r} was emptied, which an optimizer over ranks cannot start "
        "again, because they create a state together: write into its tensors instead, as in "
        "optimizer.state[param]['momentum.trace'].zero_()"
    )


def _gradients_of(params: NamedTensors) -> Gradients:
    """Return the gradient of each parameter by name; None for a parameter without one."""
    return {name: param.grad for name, param in params.items()}


def _unshared(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of a state dict, in which no two parameters have the same tensor.

    A step count is one tensor for all parameters: each but the first gets a copy. Formats such as safetensors do not
    accept one tensor under two names. Values that a hook has added, and that are no dicts, stay the same.
    """
    unshared: dict[Any, Any] = {}
    ids_so_far: set[int] = set()
    for index, entries in state.items():
        if not isinstance(entries, dict):
            unshared[index] = entries
            continue
        unshared[index] = {}
        for key, leaf in entries.items():
            # An earlier parameter has the same tensor object.
            if id(leaf) in ids_so_far and isinstance(leaf, Tensor):
                leaf = leaf.clone()
            ids_so_far.add(id(leaf))
            unshared[index][key] = leaf
    return unshared


def _require_one_model(tx: Transform) -> None:
    """Raise ValueError if a number of a transform has values for several models, as in a transform of `muonfx.stack`.

    For example, a learning rate of shape (3,) is for three models that train together.
    """
    has_dims = any(number.ndim for number in tx.tensors)
    if not has_dims:  # all numbers are floats, or tensors of one element
        return
    try:
        # Accepts only tensors with dims that one model needs, such as a schedule's table of rates.
        check_numbers(tx)
    except ValueError as error:
        raise ValueError(
            f"tx: {error}, with tx.init and tx.update, because an optimizer trains one model"
        ) from None
