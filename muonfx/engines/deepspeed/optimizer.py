"""The client optimizer: one parameter group for each label, stepped on the flat tensors of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from muonfx.core import Locality, Transform
from muonfx.core.chain_differences import CHAINS
from muonfx.core.checks import warn_caller
from muonfx.core.hyperparams import hyperparams
from muonfx.core.transform import require_transform
from muonfx.core.visit import visit
from muonfx.engines.deepspeed.flat_optimizer import FlatOptimizer
from muonfx.engines.deepspeed.flat_params import (
    FlatParams,
    are_partitioned,
    flats_of,
    locate,
    locate_at_stage_0,
    name_of_overwritten,
    stage_3_of,
    trained_parameters,
)
from muonfx.engines.deepspeed.parallel import (
    all_ranks,
    expert_group_name,
    gather_objects,
    local_shape_of,
    raising_on_all_ranks,
    ranks_of_step,
    tensor_group_of,
    whole_shape_of,
)
from muonfx.engines.deepspeed.rates import GroupRates
from muonfx.optimizer.group_numbers import (
    Group,
    GroupNumbers,
    Numbers,
    TrackedGroup,
    require_in_range,
)
from muonfx.optimizer.param_groups import defaults_for_schedulers
from muonfx.optimizer.resuming import differences, entries_of_code, entries_to_load, numbers_warning
from muonfx.optimizer.saved_chains import VisitedTransform, chain_warning, record_of_group
from muonfx.optimizer.tracked_groups import OwnedGroup, own_groups
from muonfx.optimizer.update_rules import UpdateRule, pairs_by_rule, update_rules_of
from muonfx.sharding.communication.agree import comparable
from muonfx.sharding.communication.differences import Facts

_REQUESTED_RATE = "requested_lr"
"""The key in a saved group with its learning rate at construction, which DeepSpeed's schedulers overwrite in "lr"."""
_CHECKPOINT = "load_state_dict: DeepSpeed's checkpoint"
"""Begins the warnings of a load, as in "load_state_dict: DeepSpeed's checkpoint was saved with other numbers"."""


class ZeroOptimizer(Optimizer):
    """The optimizer that `optimizer` returns for DeepSpeed; it applies a transform to DeepSpeed's flat tensors.

    Raises:
        ValueError: at the first step, if DeepSpeed's mapping of a parameter to a flat tensor is missing or wrong, as
            with ``round_robin_gradients``; the message names the parameter. At any step, if a parameter was frozen,
            unfrozen, added or removed after the optimizer was made, if a scheduler has given all groups one rate, or if
            a number of a group is out of range.
        RuntimeError: an engine has replaced this optimizer by another one, which steps on its groups.

    Example:
        >>> import muonfx as mfx
        >>> model = nn.Linear(2, 2, bias=False)
        >>> made = ZeroOptimizer(model, mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1)))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> made.step()
        >>> list(made.state[model.weight])
        ['momentum.trace']
    """

    def __init__(self, model: nn.Module, tx: Transform) -> None:
        """Create the param groups of a model, one for each label. The state is created in the first step."""
        require_transform("tx", tx)
        _require_steps_of_parts(tx)
        _require_no_extra_argument(tx)
        params = trained_parameters(model)
        whole_params = _whole_params(params)
        tx.init(whole_params)  # raises if the transform cannot handle the parameters
        # The label of each parameter, and the transforms that update it.
        rules = _visited(tx, whole_params).rules
        _require_labels(params, rules)
        # 1. Create ``param_groups``, and ``state``, which is empty.
        super().__init__(_new_groups(tx, params, rules), {})
        own_groups(self)
        self.defaults.update(defaults_for_schedulers(self.param_groups))
        _warn_of_unequal_stages(model, self.param_groups)
        # 2. Attributes that do not change after construction.
        self.tx = tx
        """The transform that updates the parameters."""
        self.model = model
        """The model, in which no parameter may be frozen, unfrozen, added or removed."""
        self._params = params
        """The trained parameters of the model by name. DeepSpeed puts other tensors into the groups."""
        self._whole_params = whole_params
        """The same parameters in full, as meta tensors. ZeRO and AutoTP may partition the model's own."""
        self._all_groups = self.param_groups
        """All param groups. In a step of stages 1 and 2, DeepSpeed replaces ``param_groups`` by one group at a time."""
        self._numbers_of_names = {
            tuple(group["param_names"]): _numbers_from_construction(group, rules)
            for group in self.param_groups
        }
        """The reader of the hyperparameters of each group, by the names of the group's parameters."""
        # 3. Attributes that a step changes.
        self._rates = GroupRates(self.param_groups)
        """Raises if a scheduler writes the same learning rate into all groups."""
        self._accepted_numbers: dict[tuple[str, ...], Numbers] = {}
        """The numbers of each group at the last step, which are in range, by the names of the group's parameters."""
        self._flat_optimizers: dict[Tensor, FlatOptimizer] = {}
        """The optimizer of each flat tensor, by this tensor; at stage 0, of each group, by its first tensor."""
        self._has_stepped = False
        """True after the first call of `step`, also if that only allocated the state."""
        self._write_counts: dict[str, int] = {}
        """How often each parameter of the model had been written to at the last step, to find later writes."""
        self._has_warned_of_overwritten = False
        """True after the warning of weights in the model that a step overwrites."""

    def _numbers_of(self, group: Mapping[str, Any]) -> GroupNumbers:
        """Return the reader of the hyperparameters of a group, which is found by the names of its parameters."""
        return self._numbers_of_names[tuple(group["param_names"])]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, marked so that another optimizer that steps on it raises."""
        super().add_param_group(OwnedGroup(param_group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or unpickled optimizer, and mark its param groups as its own."""
        super().__setstate__(state)
        self.param_groups = [OwnedGroup(group) for group in self.param_groups]
        self._all_groups = self.param_groups
        own_groups(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the flat tensors that DeepSpeed has put into ``param_groups``; all ranks must call this together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # 1. Everything that may fail is done before any tensor is changed. The other ranks may wait for this one in the
        # step, so they get its error.
        flat_optimizers = dict(self._flat_optimizers)
        try:
            with raising_on_all_ranks("a step", self._step_group) as facts:
                group_of_optimizer = self._optimizers_to_step()
                if self._step_group is not None:
                    facts.update(self._facts_of_step(group_of_optimizer))
        except Exception:
            # DeepSpeed would leave the one group of this call there.
            self.param_groups = self._all_groups
            # An error may have left some ranks without the new ones: the next call makes them on all ranks together.
            self._flat_optimizers = flat_optimizers
            raise
        # 2. DeepSpeed may take a first step with zero gradients, only to allocate the state. A real step on zeros would
        # advance the count of AdamW and decay the weights. The next step makes the state again, because weights may be
        # loaded before it, and some transforms copy them.
        is_first = not self._has_stepped
        self._has_stepped = True
        if is_first and self._only_allocates():
            self._flat_optimizers.clear()
            self.state.clear()
            return loss
        # 3. The step of each flat tensor.
        for optimizer, group in group_of_optimizer.items():
            optimizer.step(self._numbers_of(group).read(group), self.state)
        return loss

    @cached_property
    def _step_group(self) -> dist.ProcessGroup | None:
        """All ranks that step the same parameters, or shards of them; None for a single rank."""
        return ranks_of_step(self.model)

    def _optimizers_to_step(self) -> dict[FlatOptimizer, Group]:
        """Return the flat optimizers that take this step, each with the param group of its parameters.

        Any error in them is raised here, before the first of them steps.
        """
        # 1. All groups are read, because DeepSpeed steps them one after another: a wrong hyperparameter of the last one
        # must raise before the first is stepped. The ranks make flat optimizers together, so none of them may begin
        # while another one has an error.
        waiting_group = self._step_group if self._has_new_tensors() else None
        with raising_on_all_ranks("a step", waiting_group):
            self._require_same_trained()
            for group in (*self._all_groups, *self.param_groups):
                self._require_numbers_in_range(group)
            self._rates.check(self._all_groups)
        # 2. The flat optimizers of this call. The ranks create all of them together, before the checks of 3., which may
        # raise on one rank.
        group_of_optimizer: dict[FlatOptimizer, Group] = {}
        for group in self.param_groups:
            for tensor in self._tensors_to_step(group):
                group_of_optimizer[self._flat_optimizer(tensor, group)] = group
        # 3. A state that DeepSpeed has loaded may be of another transform.
        for optimizer in group_of_optimizer:
            optimizer.check_and_cast(self.state)
            written_params = self._params_written_since_last_step(optimizer.flat)
            self._warn_if_overwritten(optimizer.flat, written_params)
        return group_of_optimizer

    def _require_numbers_in_range(self, group: Group) -> None:
        """Raise ValueError if a number of a group was changed to one out of range, such as a negative "lr"."""
        names = tuple(group["param_names"])
        reader = self._numbers_of(group)
        numbers = reader.read(group)
        if numbers is self._accepted_numbers.get(names):  # unchanged since the last step
            return
        require_in_range(self.tx, reader.hyperparams, numbers, hyperparams(self.tx))
        self._accepted_numbers[names] = numbers

    def _facts_of_step(self, group_of_optimizer: Mapping[FlatOptimizer, Group]) -> Facts:
        """Return what must be equal on all ranks that step the same parameters, by the subject of an error.

        For example, "numbers in param_groups[0] ('muon')" is ``{"lr": 0.02, "momentum": 0.95}``.
        """
        facts: dict[str, object] = {"transforms": self.tx.fingerprint}
        title_of: dict[tuple[str, ...], str] = {}
        for index, group in enumerate(self._all_groups):
            title = f"param_groups[{index}] ({group['label']!r})"
            title_of[tuple(group["param_names"])] = title
            facts[f"numbers in {title}"] = _comparable_entries(group, self._numbers_of(group).keys)
        for optimizer, group in group_of_optimizer.items():
            title = title_of[tuple(group["param_names"])]
            facts[f"step counts of {title}"] = optimizer.step_counts(self.state)
        return facts

    def _params_written_since_last_step(self, flat: FlatParams) -> dict[str, Tensor]:
        """Return the parameters of a flat tensor that were written to since the last step, and record these writes.

        At the first step, there are none. ``_version`` of a tensor counts the writes to it, except those to its
        ``data``, which DeepSpeed uses.
        """
        written: dict[str, Tensor] = {}
        for name, stepped_tensor in flat.tensor_of.items():
            param = self._params[name]
            # At stage 0 in fp32, DeepSpeed has no copy to write over it.
            if stepped_tensor is param:
                continue
            count = param._version
            if self._write_counts.get(name, count) != count:
                written[name] = param
            self._write_counts[name] = count
        return written

    def _warn_if_overwritten(self, flat: FlatParams, written_params: Mapping[str, Tensor]) -> None:
        """Warn once if a step overwrites parameters that were written to: DeepSpeed writes its fp32 copies over them.

        There is no warning if the copies have the written values, as after ``refresh_fp32_params``.
        """
        if self._has_warned_of_overwritten or not written_params:
            return
        name = name_of_overwritten(flat, written_params)
        if name is None:
            return
        self._has_warned_of_overwritten = True
        warn_caller(
            f"{name!r}: found values that were written into the model after the last step. They are lost: DeepSpeed "
            "writes its fp32 copy over them. After each such write, as of an average or by load_state_dict, call "
            "engine.optimizer.refresh_fp32_params()"
        )

    def _only_allocates(self) -> bool:
        """Return True if DeepSpeed takes this step only to allocate the state.

        Then all tensors are fp32 copies of the parameters of stage 0, and their gradients are zero.
        """
        model_params = set(self._params.values())
        for group in self.param_groups:
            if not self._has_unflattened_tensors(group):  # not stage 0
                return False
            for tensor in group["params"]:
                is_copy = tensor not in model_params
                has_zero_gradient = tensor.grad is not None and not tensor.grad.any()
                if not (is_copy and has_zero_gradient):  # this is a real step
                    return False
        return True

    def _require_same_trained(self) -> None:
        """Raise if a parameter was frozen, unfrozen, added or removed since the optimizer was constructed.

        DeepSpeed's flat tensors contain the parameters from construction only.
        """
        # Parameters are compared as objects, not by name: a replaced parameter has the same name.
        trained = trained_parameters(self.model)
        trained_before = set(self._params.values())
        for name, param in trained.items():
            if param not in trained_before:
                raise _trained_has_changed(
                    name, "requires grad now, but did not when the optimizer was made"
                )
        trained_now = set(trained.values())
        for name, param in self._params.items():
            if param not in trained_now:
                raise _trained_has_changed(name, "required grad when the optimizer was made")

    def all_flat_optimizers(self) -> list[FlatOptimizer]:
        """Return the `FlatOptimizer` (parameters and their state) of each flat tensor that DeepSpeed steps on.

        A checkpoint needs all of them. Before the first step, this method creates them. All ranks must call it
        together.
        """
        with raising_on_all_ranks("a checkpoint", all_ranks()):
            self._require_same_trained()
        optimizers: list[FlatOptimizer] = []
        for group in self.param_groups:
            for tensor in self._tensors_with_optimizer(group):
                optimizers.append(self._flat_optimizer(tensor, group))
        return optimizers

    @contextmanager
    def without_new_state(self) -> Generator[None]:
        """Return a context manager that removes the state that is made in its block.

        For example, a save before the first step makes the initial state. The next step makes it again, because weights
        may be loaded before it, and some transforms copy them.
        """
        tensors_with_state = {tensor for tensor, entries in self.state.items() if entries}
        try:
            yield
        finally:  # also after an error in the block
            for first_tensor, optimizer in list(self._flat_optimizers.items()):
                if not tensors_with_state.issuperset(optimizer.flat.tensors):
                    del self._flat_optimizers[first_tensor]
            for tensor in self.state.keys() - tensors_with_state:
                del self.state[tensor]

    @torch.no_grad()
    def update_working_copy(self) -> None:
        """Copy the full-precision parameters into the model's parameters, and round them to the dtype of the model.

        At stage 3 a parameter of the model has only this rank's shard, in its attribute ``ds_tensor``.
        """
        for optimizer in self.all_flat_optimizers():
            # Each view is this rank's shard of a parameter in full precision.
            for name, view in optimizer.flat.params().items():
                local_shard = getattr(self._params[name], "ds_tensor", None)
                if local_shard is None:
                    self._params[name].copy_(view)
                else:  # it may be longer than the view, by padding
                    local_shard.data.view(-1)[: view.numel()].copy_(view.reshape(-1))

    def _has_new_tensors(self) -> bool:
        """Return True if this step makes a flat optimizer, as the first step does."""
        for group in self.param_groups:
            for tensor in self._tensors_to_step(group):
                if tensor not in self._flat_optimizers:
                    return True
        return False

    def _tensors_with_optimizer(self, group: Group) -> list[Tensor]:
        """Return the flat tensors of a param group; at stage 0, its first tensor, which has the optimizer of all."""
        if self._has_unflattened_tensors(group):
            return group["params"][:1]
        params = self._params_of(group).values()
        engine = stage_3_of(params)
        if engine is None:
            return group["params"]
        # At stage 3, DeepSpeed puts its flat tensors into the group in a step only.
        return flats_of(engine, params)

    def _tensors_to_step(self, group: Group) -> list[Tensor]:
        """Return the flat tensors of a param group with a gradient in this step; at stage 0, its first tensor."""
        if self._has_unflattened_tensors(group):
            return group["params"][:1]
        return [tensor for tensor in group["params"] if tensor.grad is not None]

    def _flat_optimizer(self, tensor: Tensor, group: Group) -> FlatOptimizer:
        """Return the optimizer of a flat tensor of a group; at stage 0, of the group, by its first tensor.

        The first call for a tensor creates it.
        """
        if tensor not in self._flat_optimizers:
            params = self._params_of(group)
            tensor_group = tensor_group_of(self.model.modules())
            if self._has_unflattened_tensors(group):
                stepped_tensors = dict(zip(group["param_names"], group["params"], strict=True))
                flat = locate_at_stage_0(stepped_tensors, params, self._whole_params, tensor_group)
            else:
                flat = locate(tensor, params, self._whole_params, tensor_group)
            self._flat_optimizers[tensor] = FlatOptimizer(
                self.tx, self._whole_params, flat, self.state
            )
        return self._flat_optimizers[tensor]

    def _has_unflattened_tensors(self, group: Group) -> bool:
        """Return True if a param group has its parameters, or copies of them in fp32, as at stage 0; False if flat.

        For a weight of shape (2, 3), a tensor of this shape is unflattened, and one of shape (6,) is flat.
        """
        params = self._params_of(group).values()
        shapes = [tuple(tensor.shape) for tensor in group["params"]]
        if shapes != [local_shape_of(param) for param in params]:
            return False
        # The flat tensor of a bias that is alone in its group may have the shape of the bias. Only then is ZeRO's mark
        # on the parameters read: they keep it when their engine is destroyed.
        are_vectors = all(len(shape) == 1 for shape in shapes)
        return not (are_vectors and are_partitioned(params))

    def _params_of(self, group: Group) -> dict[str, Tensor]:
        """Return the parameters of the model from which DeepSpeed made a group, by name."""
        return {name: self._params[name] for name in group["param_names"]}

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict. Each group also has what a load compares: numbers of the code, schedules, chains.

        DeepSpeed saves it for each rank.
        """
        state_dict = super().state_dict()
        visited = _visited(self.tx, self._whole_params)
        for tracked, saved_group in zip(
            self._tracked_groups(), state_dict["param_groups"], strict=True
        ):
            names = tracked.names
            saved_group.update(entries_of_code(self.tx, tracked))
            saved_group[CHAINS] = record_of_group(visited, names, {name: name for name in names})
            saved_group[_REQUESTED_RATE] = _requested_rate(tracked)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, and keep the dtypes in it. DeepSpeed calls this with the state of this rank.

        Raises:
            ValueError: the groups have other parameters, or a group lacks a hyperparameter; nothing was loaded. If the
                state belongs to another transform, the next step raises an error.

        Warns:
            UserWarning: numbers of the groups or schedules have changed in the code: the changed schedules of this
                optimizer and the other numbers of the state dict are used; or another chain has saved it.
        """
        saved_groups: list[dict[str, Any]] = state_dict["param_groups"]
        self._require_same_groups(saved_groups)
        # 1. Compare before the load, which replaces the entries of the groups.
        texts = self._warnings_of_load(saved_groups)
        # 2. Load the entries that a resumed run takes. All others stay as they are.
        groups_to_load: list[Group] = []
        for tracked, saved_group in zip(self._tracked_groups(), saved_groups, strict=True):
            entries = entries_to_load(self.tx, tracked, saved_group)
            entries.pop(_REQUESTED_RATE, None)
            groups_to_load.append({**tracked.group, **entries, "params": saved_group["params"]})
        super().load_state_dict({**state_dict, "param_groups": groups_to_load})
        self._restore_dtypes(state_dict)
        # 3. Last, because a warning may be turned into an error, and the load must be complete then.
        for text in texts:
            warn_caller(text)

    def _restore_dtypes(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the state, which torch has cast to the dtypes of the parameters, by the tensors of its state dict."""
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            # A state dict has the number of a parameter in place of the parameter.
            for param, number in zip(group["params"], saved_group["params"], strict=True):
                saved_state: Mapping[str, Any] = state_dict["state"].get(number, {})
                for key, value in saved_state.items():
                    if isinstance(value, Tensor):
                        self.state[param][key] = value.to(param.device, copy=True)

    def _tracked_groups(self) -> list[TrackedGroup]:
        """Return the groups with the names of their parameters and the objects that read their numbers."""
        return [
            TrackedGroup(group, group["param_names"], self._numbers_of(group))
            for group in self.param_groups
        ]

    def _warnings_of_load(self, saved_groups: Sequence[Group]) -> list[str]:
        """Return the warnings of saved groups: other numbers than in the code of this optimizer, or another chain.

        A line of the first one is such as "group 'muon', lr: 0.1 in the file, 0.2 in the code; the file's is used".
        """
        tracked_groups = self._tracked_groups()
        lines: list[str] = []
        for tracked, saved_group in zip(tracked_groups, saved_groups, strict=True):
            # Rates are compared as they were before a scheduler. `differences` reads them from "initial_lr", which
            # torch's schedulers set. DeepSpeed's change "lr" alone, and then it is the rate from construction.
            group = {"initial_lr": _requested_rate(tracked), **tracked.group}
            saved_with_initial_rate = {"initial_lr": saved_group[_REQUESTED_RATE], **saved_group}
            lines += differences(self.tx, tracked._replace(group=group), saved_with_initial_rate)
        texts: list[str] = []
        if lines:
            texts.append(
                f"{numbers_warning(_CHECKPOINT, lines)}. With a scheduler of DeepSpeed, the rates are the code's, as "
                "in org_lrs of WarmupCosineLR"
            )
        visited = _visited(self.tx, self._whole_params)
        other_chain = chain_warning(_CHECKPOINT, visited, tracked_groups, saved_groups)
        if other_chain is not None:
            texts.append(other_chain)
        return texts

    def _require_same_groups(self, saved_groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise unless saved param groups have the parameters and the hyperparameters of this optimizer's groups."""
        # 1. The same parameters in the same groups.
        names_per_group = [group["param_names"] for group in self.param_groups]
        saved_names_per_group = [group.get("param_names") for group in saved_groups]
        if saved_names_per_group != names_per_group:
            raise ValueError(
                f"the state has groups with the parameters {saved_names_per_group}, expected {names_per_group}. If "
                "another optimizer saved it, such as AdamW, load only the weights: engine.load_checkpoint(path, "
                "load_optimizer_states=False, load_lr_scheduler_states=False)"
            )
        # 2. All hyperparameters, such as "lr", and the rate from construction. Further keys, such as a
        # scheduler adds, are accepted.
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            for key in (*self._numbers_of(group).keys, _REQUESTED_RATE):
                if key not in saved_group:
                    first_name = group["param_names"][0]
                    raise ValueError(
                        f"the state has no hyperparameter {key!r} for the group of {first_name!r}"
                    )


def _require_steps_of_parts(tx: Transform) -> None:
    """Raise if a transform reads the whole tree, as clipping by the global norm does."""
    if tx.locality is Locality.TREE:
        raise ValueError(
            f"{tx!r} reads the whole tree, and DeepSpeed steps one flat tensor at a time: use DeepSpeed's "
            '"gradient_clipping" for clipping, and its loss scaler for skipping overflows'
        )


def _require_no_extra_argument(tx: Transform) -> None:
    """Raise if a transform requires an extra argument in each step, as `reduce_on_plateau` requires ``value``."""
    required = sorted(tx.extras.required)
    if required:
        raise ValueError(
            f"{tx!r} requires the extra argument {required[0]!r} in each step, and DeepSpeed calls step() without "
            "arguments: leave this transform out. To lower the rate on a plateau, use a scheduler, such as "
            "torch.optim.lr_scheduler.ReduceLROnPlateau"
        )


def _require_labels(names: Iterable[str], rules: Mapping[str, UpdateRule]) -> None:
    """Raise if a trained parameter has no label, so that no transform updates it.

    ``rules`` has the label of each parameter, and the transforms that update it.
    """
    for name in names:
        if name not in rules or rules[name].is_left_out:
            raise ValueError(
                f"{name!r} requires grad but has no label: give it a label, or freeze it before this call"
            )


def _whole_params(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters that ZeRO or AutoTP may have partitioned in full, as meta tensors by name."""
    return {
        name: torch.empty(whole_shape_of(param), dtype=param.dtype, device="meta")
        for name, param in params.items()
    }


def _visited(tx: Transform, whole_params: Mapping[str, Tensor]) -> VisitedTransform:
    """Return a transform with the transforms that it calls, and the list of those that update each parameter."""
    visits = tuple(visit(tx, whole_params))
    return VisitedTransform(tx, visits[0], update_rules_of(visits))


def _new_groups(
    tx: Transform, params: Mapping[str, Tensor], rules: Mapping[str, UpdateRule]
) -> list[Group]:
    """Return the param groups: parameters with one update rule (their label and transforms) are in one group.

    For Muon with AdamW these are ``{"label": "muon", "lr": 0.02, "momentum": 0.95, "params": [("fc.weight", weight)]}``
    with all hidden matrices, and a group "adamw" with the other parameters. Experts have a group of their own for each
    group of ranks that share them.
    """
    groups: list[Group] = []
    for rule, rule_pairs in pairs_by_rule(params.items(), rules).items():
        for expert_group, pairs in _by_expert_group(rule_pairs).items():
            # Schedulers need an "lr" in each group, also if the rule has none: then it begins at 0.
            entries = GroupNumbers(rule.hyperparams).entries(hyperparams(tx))
            group: Group = {"label": rule.label, "lr": 0.0, **entries, "params": pairs}
            if expert_group is not None:
                # With these entries ZeRO partitions the group among the ranks that have the same experts.
                group["moe"] = True
                group["name"] = expert_group
            groups.append(group)
    return groups


def _numbers_from_construction(group: Group, rules: Mapping[str, UpdateRule]) -> GroupNumbers:
    """Return the reader of the hyperparameters of a new group, which has read them once.

    A number may have two keys in a group, as in "betas" and "momentum". Later reads take the key that has changed since
    this first one. ``rules`` has the transforms of each parameter; all parameters of a group have the same ones.
    """
    first_name = group["param_names"][0]
    numbers = GroupNumbers(rules[first_name].hyperparams)
    numbers.read(group)
    return numbers


def _comparable_entries(group: Group, keys: Iterable[str]) -> dict[str, object]:
    """Return the hyperparameters of a group for ranks to compare, with a text for a tensor.

    >>> _comparable_entries({"lr": torch.tensor(0.5), "betas": (0.9, 0.95)}, ["lr", "betas"])
    {'lr': '0.5 of torch.float32', 'betas': [0.9, 0.95]}
    """
    entries: dict[str, object] = {}
    for key in keys:
        value = group[key]
        if isinstance(value, Sequence):
            entries[key] = [comparable(number) for number in value]
        else:
            entries[key] = comparable(value)
    return entries


def _requested_rate(tracked: TrackedGroup) -> float:
    """Return the learning rate with which a group was made, which schedulers overwrite; 0 if no transform reads it."""
    return float(tracked.numbers.requested_entries.get("lr", 0.0))


def _trained_has_changed(name: str, problem: str) -> ValueError:
    """Return an error for a parameter that was frozen, unfrozen, added or removed after construction."""
    return ValueError(
        f"{name!r} {problem}; DeepSpeed steps on the parameters from then: freeze, unfreeze, add or remove it first, "
        "then make the optimizer and DeepSpeed's engine"
    )


def _warn_of_unequal_stages(model: nn.Module, groups: Sequence[Group]) -> None:
    """Warn if the stages of a pipeline have different groups; all ranks call this together.

    For example, a stage without an embedding may have no parameter for AdamW, and so no group of this label.
    """
    is_pipeline = hasattr(model, "num_stages") and hasattr(model, "topology")
    if not is_pipeline:
        return
    # [["muon", "adamw"], ["muon"]] if only the first of two stages has parameters for AdamW.
    labels_of_ranks = gather_objects([group["label"] for group in groups])
    for rank, labels in enumerate(labels_of_ranks):
        if len(labels) != len(labels_of_ranks[0]):
            warn_caller(
                f"param_groups: found the groups {labels_of_ranks[0]} on rank 0 and {labels} on rank {rank}, because "
                "the pipeline stages have other kinds of parameters. With ZeRO stage 1, DeepSpeed sums the gradient "
                "norm group by group over all stages, and waits forever: use ZeRO stage 0, or another "
                "partition_method, so that each stage has a parameter of each label"
            )
            return


def _by_expert_group(
    pairs: Sequence[tuple[str, Tensor]],
) -> dict[str | None, list[tuple[str, Tensor]]]:
    """Divide (name, parameter) pairs by the group of ranks that share an expert; other parameters have the key None.

    With experts over 2 ranks, the keys are None and "ep_size_2", DeepSpeed's name of the group.
    """
    divided: dict[str | None, list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        divided.setdefault(expert_group_name(param), []).append((name, param))
    return divided
