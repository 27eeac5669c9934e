"""`Unit`: one flat tensor of DeepSpeed with its optimizer state, and the step that updates both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.core.value import prepared
from muonfx.engines.deepspeed.pieces import Pieces
from muonfx.optimizer.group_numbers import fitted
from muonfx.optimizer.state_entries import path_of
from muonfx.optimizer.stepping import add_in_place
from muonfx.sharding.communication.agree import agree
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.transform import from_global, sharded, to_global
from muonfx.tree import PyTree
from muonfx.tree.dtypes import widens
from muonfx.tree.members import ownership_of

States = dict[Tensor, Any]
"""``optimizer.state``: a dict from tensor to a dict from key, such as ``momentum/trace``, to its state."""


class _StateEntry(NamedTuple):
    """Where a leaf of the state is in ``optimizer.state``."""

    key: str
    """The key, such as ``momentum.trace``."""
    name: str | None
    """The parameter whose shape the leaf has; None for a leaf such as a step count, which all tensors share."""


class Unit:
    """One flat tensor that DeepSpeed steps on (at stage 0, all parameters of a group), with its optimizer state.

    Args:
        tx: the transform that updates the parameters.
        like: all parameters of the model in full, as meta tensors.
        pieces: the flat tensor, and the positions of the parameters' shards in it.
        states: ``optimizer.state``. New state is put into it, unless it has entries that DeepSpeed has loaded.
    """

    def __init__(self, tx: Transform, like: Mapping[str, Tensor], pieces: Pieces, states: States) -> None:
        self.pieces = pieces
        self._tx = tx
        self._names = list(like)
        self._numbers: dict[str, Any] | None = None
        """The hyperparameters in the last step."""
        self._current_tx = tx
        """The transform with these hyperparameters."""
        self._entries: list[_StateEntry | None] = []
        """For each leaf of the state, its entry in ``optimizer.state``; None for a leaf that is None."""
        self._specs: dict[Tensor, PyTree] = {}
        """A dict from tensor to the expected shapes and dtypes of its dict in ``optimizer.state``."""
        loaded_states = {tensor: states[tensor] for tensor in pieces.flat if states.get(tensor)}
        state = self._transform().init(self._among_all(pieces.views(pieces.flat)))
        self._treedef = tree.flatten(state)[1]
        self._lay_out(state, states)
        for tensor in pieces.flat:
            self._specs[tensor] = tree.spec(states[tensor])
        states.update(loaded_states)

    def _transform(self) -> Transform:
        """Return the transform with the current hyperparameters, sharded unless each rank has whole parameters."""
        if self.pieces.layout is None:
            return self._current_tx
        return sharded(self._current_tx, self.pieces.layout)

    def _params(self) -> dict[str, Tensor]:
        """Return the parameters, or their shards, by name; they share memory with the tensors of DeepSpeed."""
        return self.pieces.views([tensor.detach() for tensor in self.pieces.flat])

    def _among_all(self, params: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return ``params`` with an entry for every parameter of the model: None for those that it lacks."""
        return {name: params.get(name) for name in self._names}

    def _lay_out(self, state: PyTree, states: States) -> None:
        """Copy a new state into ``optimizer.state``; tensors like shards become parts of flat tensors."""
        params = self.pieces.views(self.pieces.flat)
        for tensor in self.pieces.flat:
            states[tensor] = {}
        shards_by_key: dict[str, dict[str, Tensor]] = {}
        owners = ownership_of(state, dict.fromkeys(self._names))
        for path, (name, path_without_name), leaf in zip(tree.paths(state), owners, tree.leaves(state), strict=True):
            if leaf is None:
                self._entries.append(None)
            elif name is not None and name in params and leaf.shape == params[name].shape:
                key = path_of(path_without_name)
                self._entries.append(_StateEntry(key, name))
                shards_by_key.setdefault(key, {})[name] = leaf
            else:
                # A leaf of no parameter, such as a step count: every tensor has an entry with it.
                self._entries.append(_StateEntry(path_of(path), None))
                for tensor in self.pieces.flat:
                    states[tensor][path_of(path)] = leaf
        for key, shard_of in shards_by_key.items():
            if self.pieces.is_flat:
                self._lay_out_flat(key, shard_of, states)
            else:
                for name, leaf in shard_of.items():
                    states[params[name]][key] = leaf

    def _lay_out_flat(self, key: str, shard_of: Mapping[str, Tensor], states: States) -> None:
        """Copy the shards of a state, by parameter name, into a new tensor of the length of the flat tensor."""
        dtypes = {shard.dtype for shard in shard_of.values()}
        if len(dtypes) > 1:
            raise ValueError(f"the state {key!r} has the dtypes {dtypes} in one flat tensor; pin one")
        (flat,) = self.pieces.flat
        flat_state = torch.zeros_like(flat, dtype=dtypes.pop(), requires_grad=False)
        states[flat][key] = flat_state
        views = self.pieces.views([flat_state])
        for name, shard in shard_of.items():
            views[name].copy_(shard)

    def check(self, states: States) -> None:
        """Raise unless ``optimizer.state``, which may be loaded, fits the transform; cast it to its dtypes."""
        for tensor, specs in self._specs.items():
            entries: dict[str, Any] = states.get(tensor, {})
            if entries.keys() != specs.keys():
                raise self._other_keys(entries, specs)
            for key, spec in specs.items():
                leaf = entries[key]
                if tuple(leaf.shape) != spec.shape or not widens(leaf.dtype, spec.dtype):
                    raise ValueError(
                        f"optimizer.state: {key!r} {self._owners_text()} has shape {tuple(leaf.shape)} and dtype "
                        f"{leaf.dtype}, expected {spec.shape} and {spec.dtype} or a dtype that widens to it"
                    )
                entries[key] = leaf.to(spec.dtype)

    def _other_keys(self, entries: Mapping[str, Any], specs: Mapping[str, Any]) -> ValueError:
        """Return an error for a key that only the loaded ``entries`` have, or only the transform (``specs``)."""
        key = min(specs.keys() ^ entries.keys())
        problem = "belongs to another transform"
        if key in specs:
            problem = "is missing"
        return ValueError(
            f"optimizer.state: {key!r} {problem}, in the state {self._owners_text()}; it has {sorted(entries)}, "
            f"expected {sorted(specs)}: load a state of {self._tx!r}, or start without one"
        )

    def _owners_text(self) -> str:
        """Return the parameters of this unit for an error: "of 'up.weight' and 3 more"."""
        return f"of {self.pieces.names[0]!r} and {len(self.pieces.names) - 1} more"

    def _read(self, states: States) -> PyTree:
        """Return the state tree of the transform, built from the tensors in ``states`` (``optimizer.state``).

        The leaves share memory with these tensors, so a step may update them in place. In a flat state tensor, a leaf
        is a view of the part that belongs to one parameter.
        """
        views_by_key: dict[str, dict[str, Tensor]] = {}
        leaves: list[Tensor | None] = []
        for entry in self._entries:
            if entry is None:
                leaves.append(None)
            elif entry.name is None:  # every tensor has the same leaf
                leaves.append(states[self.pieces.flat[0]][entry.key])
            else:
                if entry.key not in views_by_key:
                    state_tensors = [states[tensor].get(entry.key) for tensor in self.pieces.flat]
                    views_by_key[entry.key] = self.pieces.views(state_tensors)
                leaves.append(views_by_key[entry.key][entry.name])
        return tree.unflatten(self._treedef, leaves)

    def _write(self, stored_state: PyTree, new_state: PyTree, states: States) -> None:
        """Write a new state to ``optimizer.state``, into the tensors of ``stored_state``, which `_read` returned."""
        leaves = zip(self._entries, tree.leaves(stored_state), tree.leaves(new_state), strict=True)
        for entry, stored_leaf, new_leaf in leaves:
            if entry is None or new_leaf is stored_leaf:
                continue
            if entry.name is None:  # every tensor has the same leaf
                for tensor in self.pieces.flat:
                    states[tensor][entry.key] = new_leaf
            elif new_leaf.data_ptr() != stored_leaf.data_ptr():
                stored_leaf.copy_(new_leaf)

    def step(self, numbers: dict[str, Any], states: States) -> None:
        """Update parameters and state by one step; ``numbers`` are the group's hyperparameters, by name.

        Call `check` before.
        """
        if numbers is not self._numbers:
            fitted_numbers = fitted(hyperparams(self._tx), numbers)
            self._current_tx = prepared(with_hyperparams(self._tx, fitted_numbers))
            self._numbers = numbers
        params = self._params()
        grads = self.pieces.views([tensor.grad for tensor in self.pieces.flat])
        state = self._read(states)
        updates, new_state = self._transform().update(
            self._among_all(grads),
            state,
            self._among_all(params),
            donate=Donation(updates=self.pieces.is_flat, state=True),
        )
        add_in_place(params, {name: updates[name] for name in params})
        self._write(state, new_state, states)

    def to_global(self, states: States, *, to_load: bool) -> tuple[dict[str, Any], list[Any]]:
        """Return a dict from name to parameter, and a list of the leaves of the optimizer state.

        Each is a whole tensor or a shard with its position (`FlatShard`); None for parameters of other flat tensors.
        """
        self.check(states)
        params = self._params()
        state = self._read(states)
        if self.pieces.layout is not None:
            state = to_global(self._transform(), state, self._among_all(params))
        leaves: list[Any] = []
        for entry, leaf in zip(self._entries, tree.leaves(state), strict=True):
            if entry is None or entry.name is None or not isinstance(leaf, Tensor):
                leaves.append(leaf)
            else:
                leaves.append(self.pieces.as_leaf(entry.name, leaf, to_load=to_load))
        params_with_positions: dict[str, Any] = {}
        for name, param in params.items():
            params_with_positions[name] = self.pieces.as_leaf(name, param, to_load=to_load)
        return params_with_positions, leaves

    def unflatten(self, leaves: Sequence[Any]) -> PyTree:
        """Return the optimizer state as a tree, built from a list of its leaves."""
        return tree.unflatten(self._treedef, leaves)

    @torch.no_grad()
    def take(self, params: Mapping[str, Any], leaves: Sequence[Any], states: States) -> None:
        """Copy loaded parameters and state leaves, in the form that `to_global` returns, into the flat tensors."""
        views = self._params()
        for name, view in views.items():
            values = params[name]
            if isinstance(values, FlatShard):
                values = values.data
            view.copy_(values.view(view.shape))
        current_leaves = self.to_global(states, to_load=True)[1]
        new_leaves: list[Any] = []
        for current_leaf, loaded_leaf in zip(current_leaves, leaves, strict=True):
            if current_leaf is None:  # a leaf of another flat tensor
                new_leaves.append(None)
            elif isinstance(loaded_leaf, Tensor):
                new_leaves.append(loaded_leaf.clone())  # each unit advances its step counters in place
            elif self.pieces.layout is None:
                new_leaves.append(loaded_leaf.whole)
            else:
                new_leaves.append(loaded_leaf)
        new_state = self.unflatten(new_leaves)
        if self.pieces.layout is not None:
            new_state = from_global(self._transform(), new_state, self._among_all(views))
        self._write(self._read(states), new_state, states)


def raise_on_all_ranks(problem: Exception, units: Iterable[Unit]) -> None:
    """Raise an error that this rank has before a step on all ranks that wait for it; return if none can wait.

    The other ranks wait in the first of the units that is sharded, where the ranks agree on the step. Without this
    call they would wait until the timeout of the group.
    """
    for unit in units:
        layout = unit.pieces.layout
        if unit.pieces.is_flat and unit.pieces.flat[0].grad is None:
            continue  # no rank steps a flat tensor without a gradient
        if layout is not None and layout.group is not None and layout.size > 1:
            agree("a step", layout.group, problem)
