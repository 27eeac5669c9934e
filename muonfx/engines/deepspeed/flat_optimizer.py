"""`FlatOptimizer`: updates the parameters in one flat tensor of DeepSpeed, and stores their optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.core.value import prepared
from muonfx.engines.deepspeed.flat_params import FlatParams, WithPosition
from muonfx.optimizer.group_numbers import fitted
from muonfx.optimizer.named_parameters import NamedTensors
from muonfx.optimizer.state_entries import path_of
from muonfx.optimizer.stepping import add_in_place
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.transform import from_global, is_host_counter, sharded, to_global
from muonfx.tree import PyTree, Spec
from muonfx.tree.dtypes import widens
from muonfx.tree.members import ownership_of

States = dict[Tensor, Any]
"""``optimizer.state``: a dict from tensor to a dict from key, such as ``momentum.trace``, to its state."""


class _StateLeaf(NamedTuple):
    """Where a leaf of the state is in ``optimizer.state``."""

    key: str
    """The key, such as ``momentum.trace``."""
    name: str | None
    """The parameter whose shape the leaf has; None for another leaf, such as a step count, which all tensors share."""


class FlatOptimizer:
    """The optimizer of one flat tensor of DeepSpeed; at stage 0, of all parameters of a group.

    Args:
        tx: the transform that updates the parameters.
        whole_params: all parameters of the model in full, as meta tensors.
        flat: the flat tensor, and the positions of the parameters' shards in it.
        states: ``optimizer.state``. New state is put into it, unless it has entries that DeepSpeed has loaded.
    """

    def __init__(
        self, tx: Transform, whole_params: NamedTensors, flat: FlatParams, states: States
    ) -> None:
        """Create the state of the shards in the flat tensor. ``states`` gets it where DeepSpeed has loaded none."""
        self.flat = flat
        """The flat tensor, and the positions of the parameters' shards in it."""
        self._tx = tx
        """The transform with the hyperparameters from construction."""
        self._all_names = list(whole_params)
        """The parameters of the model. All trees have these names, with None for parameters of other flat tensors."""
        self._numbers: dict[str, Any] | None = None
        """The hyperparameters in the last step; None before the first step."""
        self._placed_tx = _placed(tx, flat.layout)
        """The transform with these hyperparameters, as it is applied to the shards of this rank."""
        params = flat.params()
        new_state = self._placed_tx.init(self._with_all_names(params))
        self._treedef = tree.flatten(new_state)[1]
        """The structure of the state."""
        self.state_paths = tree.paths(new_state)
        """The path of each leaf of the state."""
        self._state_leaves = _state_leaves_of(new_state, self._all_names, params)
        """For each leaf of the state, where it is in ``optimizer.state``. A leaf that is None is not in it."""
        new_entries_of = self._entries_of(new_state)
        self._specs: dict[Tensor, dict[str, Spec]] = {
            tensor: tree.spec(entries) for tensor, entries in new_entries_of.items()
        }
        """The expected shape and dtype of each entry in ``optimizer.state``, by tensor and key."""
        _add_missing(new_entries_of, states)

    def _with_all_names(self, params: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return a dict with every parameter of the model, in which those that ``params`` lacks are None."""
        return {name: params.get(name) for name in self._all_names}

    def _entries_of(self, new_state: PyTree) -> States:
        """Return a new state in the form of ``optimizer.state``: a dict from tensor to a dict from key to state.

        At stages 1 to 3, the shards of all parameters are in one tensor for each key, as in
        ``{flat_tensor: {"momentum.trace": flat_momentum, "count": count}}``. At stage 0 they are separate:
        ``{weight: {"momentum.trace": momentum_of_weight, "count": count}, bias: ...}``.
        """
        # A leaf of the state is, for example, the momentum of one parameter.
        entries_of: States = {tensor: {} for tensor in self.flat.tensors}
        for (key, name), leaf in zip(self._state_leaves, tree.leaves(new_state), strict=True):
            if leaf is None:  # of a parameter in another flat tensor
                continue
            if name is None:  # such as a step count, which all tensors share
                for entries in entries_of.values():
                    entries[key] = leaf
            elif self.flat.is_flat:  # stages 1 to 3
                self._add_to_flat_entry(entries_of, key, name, leaf)
            else:  # stage 0: each parameter has its own tensor
                entries_of[self.flat.tensor_of[name]][key] = leaf
        return entries_of

    def _add_to_flat_entry(self, entries_of: States, key: str, name: str, leaf: Tensor) -> None:
        """Copy the state of one parameter to its position in the flat tensor of a key, which is made if it is missing.

        For the key "momentum.trace" and the parameter "fc.weight", it is copied where the flat tensor of the parameters
        has "fc.weight".
        """
        flat_tensor = self.flat.tensor_of[name]
        entries = entries_of[flat_tensor]
        # The first parameter of a key allocates the state of all; padding between shards remains 0.
        if key not in entries:
            entries[key] = torch.zeros_like(flat_tensor, dtype=leaf.dtype, requires_grad=False)
        # A tensor has one dtype, so that all parameters in it must have state of this dtype.
        if entries[key].dtype != leaf.dtype:
            dtypes = (entries[key].dtype, leaf.dtype)
            raise ValueError(
                f"the state {key!r} has the dtypes {dtypes} in one flat tensor; pin one"
            )
        self.flat.view(name, entries[key]).copy_(leaf)

    def check_and_cast(self, states: States) -> None:
        """Raise unless ``optimizer.state``, which may be loaded, fits the transform; cast it to its dtypes.

        For example, a loaded momentum in bf16 is cast to fp32 if the transform has it in fp32.
        """
        for tensor, specs in self._specs.items():
            state_of_key: dict[str, Any] = states.get(tensor, {})
            self._require_keys(state_of_key, specs)
            for key, spec in specs.items():
                self._require_fit(key, state_of_key[key], spec)
                state_of_key[key] = state_of_key[key].to(spec.dtype)

    def step_counts(self, states: States) -> dict[str, int]:
        """Return the step counts in ``states`` (``optimizer.state``), such as ``{"adamw.scale_by_adam.count": 3}``."""
        state_of_key: dict[str, Any] = states[self.flat.tensors[0]]
        counts: dict[str, int] = {}
        for key, name in self._state_leaves:
            if name is None and is_host_counter(state_of_key.get(key)):
                counts[key] = int(state_of_key[key])
        return counts

    def _require_keys(self, state_of_key: Mapping[str, Any], specs: Mapping[str, Spec]) -> None:
        """Raise unless the state of a tensor has exactly the keys of the transform, such as "momentum.trace"."""
        if state_of_key.keys() == specs.keys():
            return
        # Alphabetically, the first key that only one of them has.
        key = min(specs.keys() ^ state_of_key.keys())
        problem = "is missing" if key in specs else "belongs to another transform"
        raise self._misfit(
            key, f"{problem}; found {sorted(state_of_key)}, expected {sorted(specs)}"
        )

    def _require_fit(self, key: str, leaf: Tensor, spec: Spec) -> None:
        """Raise unless a tensor of the state has the expected shape, and a dtype that can be cast without a loss."""
        if tuple(leaf.shape) != spec.shape or not widens(leaf.dtype, spec.dtype):
            raise self._misfit(
                key,
                f"has shape {tuple(leaf.shape)} and dtype {leaf.dtype}, expected {spec.shape} and {spec.dtype} "
                "or a dtype that widens to it",
            )

    def _misfit(self, key: str, problem: str) -> ValueError:
        """Return an error for an entry of a loaded state that does not fit the transform."""
        first_name, *other_names = self.flat.tensor_of
        return ValueError(
            f"optimizer.state: {key!r}, in the state of {first_name!r} and {len(other_names)} more, {problem}: load a "
            f"state of {self._tx!r}, or start without one"
        )

    def _read(self, states: States) -> PyTree:
        """Return the state of the transform as a tree, built from the tensors in ``states`` (``optimizer.state``).

        The leaves share memory with these tensors, so a step may update them in place. In a flat state tensor, a leaf
        is a view of the part that belongs to one parameter: the momentum of "fc.weight" is a part of the tensor at
        ``states[flat_tensor]["momentum.trace"]``.
        """
        first_tensor = self.flat.tensors[0]
        leaves: list[Tensor | None] = []
        for key, name in self._state_leaves:
            if name is None:  # such as a step count: every tensor has the same leaf, or none has it
                leaves.append(states[first_tensor].get(key))
            else:
                entries = states[self.flat.tensor_of[name]]
                leaves.append(self.flat.view(name, entries[key]))
        return tree.unflatten(self._treedef, leaves)

    def _write(self, stored_state: PyTree, new_state: PyTree, states: States) -> None:
        """Write a new state to ``optimizer.state``, into the tensors of ``stored_state``, which `_read` returned."""
        stored_leaves = tree.leaves(stored_state)
        new_leaves = tree.leaves(new_state)
        for state_leaf, stored_leaf, new_leaf in zip(
            self._state_leaves, stored_leaves, new_leaves, strict=True
        ):
            if new_leaf is stored_leaf:  # the step has not replaced it, or both are None
                continue
            if state_leaf.name is None:  # such as a step count: every tensor has the same leaf
                for tensor in self.flat.tensors:
                    states[tensor][state_leaf.key] = new_leaf
            elif new_leaf.data_ptr() != stored_leaf.data_ptr():
                # If the addresses are equal, the step has updated the memory in place.
                stored_leaf.copy_(new_leaf)

    def step(self, numbers: dict[str, Any], states: States) -> None:
        """Update parameters and state by one step; ``numbers`` are hyperparameters, such as ``{"lr": 0.02}``.

        Call `check_and_cast` before.
        """
        # `GroupNumbers.read` returns the same dict until a number changes
        if numbers is not self._numbers:
            self._set_numbers(numbers)
        # The parameters, gradients and state are views of the tensors of DeepSpeed.
        params = self.flat.params()
        grads = {
            name: self.flat.view(name, tensor.grad) for name, tensor in self.flat.tensor_of.items()
        }
        state = self._read(states)
        # A flat gradient may be overwritten, but not one of stage 0, which may be a parameter's own.
        updates, new_state = self._placed_tx.update(
            self._with_all_names(grads),
            state,
            self._with_all_names(params),
            donate=Donation(updates=self.flat.is_flat, state=True),
        )
        add_in_place(params, {name: updates[name] for name in params})
        self._write(state, new_state, states)

    def _set_numbers(self, numbers: dict[str, Any]) -> None:
        """Build the transform again with new hyperparameters."""
        fitted_numbers = fitted(hyperparams(self._tx), numbers)
        self._placed_tx = _placed(
            prepared(with_hyperparams(self._tx, fitted_numbers)), self.flat.layout
        )
        self._numbers = numbers

    def global_leaves(self, states: States, with_position: WithPosition) -> list[Any]:
        """Return the leaves of the optimizer state: whole tensors, or shards with their positions (`FlatShard`).

        Call `check_and_cast` before. A leaf for a parameter of another flat tensor is None. ``with_position`` is
        `FlatParams.with_position`, or `FlatParams.to_save`, with which shards that another rank saves are empty.
        """
        # 1. With a layout, the leaves that the transform shards become `FlatShard`.
        state = self._read(states)
        if self.flat.layout is not None:
            state = to_global(self._placed_tx, state, self._with_all_names(self.flat.params()))
        # 2. Plain tensors are shards of the state of a parameter, or belong to none, as a step count does.
        leaves: list[Any] = []
        for (_, name), leaf in zip(self._state_leaves, tree.leaves(state), strict=True):
            if name is not None and isinstance(leaf, Tensor):
                leaves.append(with_position(self.flat, name, leaf))
            else:
                leaves.append(leaf)
        return leaves

    @torch.no_grad()
    def load(self, params: Mapping[str, Any], leaves: Sequence[Any], states: States) -> None:
        """Copy loaded parameters and state leaves into the flat tensors.

        They have the form that `FlatParams.with_position` returns: a whole tensor, or a `FlatShard` (a shard with its
        position). A leaf for a parameter of another flat tensor is ignored.
        """
        self._load_params(params)
        self._load_state(leaves, states)

    def _load_params(self, params: Mapping[str, Any]) -> None:
        """Copy loaded parameters, each a whole tensor or a `FlatShard`, into the flat tensors."""
        for name, view in self.flat.params().items():
            values = params[name]
            if isinstance(values, FlatShard):
                values = values.data
            view.copy_(values.view(view.shape))

    def _load_state(self, leaves: Sequence[Any], states: States) -> None:
        """Copy the leaves of a loaded state into the tensors of ``states``, which is ``optimizer.state``."""
        stored_state = self._read(states)
        new_leaves: list[Any] = []
        for stored_leaf, loaded_leaf in zip(tree.leaves(stored_state), leaves, strict=True):
            if stored_leaf is None:  # a leaf of another flat tensor
                new_leaves.append(None)
            else:
                new_leaves.append(self._loaded_leaf(loaded_leaf))
        new_state = tree.unflatten(self._treedef, new_leaves)
        if self.flat.layout is not None:
            new_state = from_global(
                self._placed_tx, new_state, self._with_all_names(self.flat.params())
            )
        self._write(stored_state, new_state, states)

    def _loaded_leaf(self, leaf: Tensor | FlatShard) -> Any:
        """Return a leaf of a loaded state in the form of the transform's state: global if it is sharded, else whole."""
        if isinstance(leaf, Tensor):
            return leaf.clone()  # each flat optimizer advances its step counts in place
        is_sharded = self.flat.layout is not None
        if is_sharded:
            return leaf  # a `FlatShard`, which `from_global` replaces by its values
        return leaf.whole


def _placed(tx: Transform, layout: Layout | None) -> Transform:
    """Return a transform for the shards of a rank, or the transform itself if each rank has whole parameters."""
    if layout is None:
        return tx
    return sharded(tx, layout)


def _add_missing(new_entries_of: States, states: States) -> None:
    """Put new state into ``states``, which is ``optimizer.state``, for tensors for which DeepSpeed has loaded none."""
    for tensor, new_entries in new_entries_of.items():
        if not states.get(tensor):
            states[tensor] = new_entries


def _state_leaves_of(
    state: PyTree, all_names: Iterable[str], params: NamedTensors
) -> list[_StateLeaf]:
    """Return for each leaf of a state where it is in ``optimizer.state``.

    A leaf of the shape of a parameter is stored with this parameter: the momentum of "fc.weight" is at
    ``_StateLeaf("momentum.trace", "fc.weight")``. Every tensor has an entry with any other leaf, such as a step count.

    Args:
        state: a new state.
        all_names: the names of all parameters of the model.
        params: the parameters of the flat tensor, or their shards, by name.
    """
    state_leaves: list[_StateLeaf] = []
    # The parameter to which each leaf belongs, if any.
    owners = ownership_of(state, dict.fromkeys(all_names))
    for path, owner, leaf in zip(tree.paths(state), owners, tree.leaves(state), strict=True):
        name = owner.parameter
        # A leaf of another shape, such as a norm of a matrix, cannot be in a flat tensor at the parameter's position.
        if name is not None and name in params and _have_one_shape(leaf, params[name]):
            # `owner.path` is without the name
            state_leaves.append(_StateLeaf(path_of(owner.path), name))
        else:
            state_leaves.append(_StateLeaf(path_of(path), None))
    return state_leaves


def _have_one_shape(leaf: Tensor | None, param: Tensor) -> bool:
    """Return True if a leaf of a state is a tensor with the shape of a parameter."""
    return leaf is not None and leaf.shape == param.shape
