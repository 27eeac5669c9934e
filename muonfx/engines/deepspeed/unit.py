"""`Unit`: one flat tensor of DeepSpeed with its optimizer state, and the step that updates both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.engines.deepspeed.pieces import Pieces
from muonfx.optimizer.groups import fitted
from muonfx.optimizer.stepping import path_of
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.transform import from_global, sharded, to_global
from muonfx.tree import PyTree
from muonfx.tree.dtypes import widens
from muonfx.tree.members import ownership_of

States = dict[Tensor, Any]
"""``optimizer.state``: a dict from tensor to a dict from key, such as ``momentum/trace``, to its state."""


class Unit:
    """One flat tensor that DeepSpeed steps on (at stage 0, all parameters of a group), with its optimizer state."""

    def __init__(self, tx: Transform, like: Mapping[str, Tensor], pieces: Pieces, states: States) -> None:
        self.pieces, self._tx = pieces, tx
        self._names = list(like)
        self._values: dict[str, Any] | None = None
        self._now = tx
        self._views: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
        """A dict from key to a flat state tensor and the torch views of its shards by parameter name."""
        self._leaves: list[tuple[str, str | None] | None] = []
        """For each leaf of the state: its key in ``optimizer.state``, and the parameter whose shape it has, if any."""
        loaded: list[dict[str, Any]] = [dict(states.get(x, {})) for x in pieces.flat]
        self._lay_out(self._transform().init(self._among_all(pieces.views(pieces.flat))), states)
        self._specs = {x: tree.spec(states[x]) for x in pieces.flat}
        """A dict from tensor to the expected shapes and dtypes of its dict in ``optimizer.state``."""
        self._checked: list[object] = [states[x] for x in pieces.flat]
        """The dicts of ``optimizer.state`` that passed `_check`; a load puts others in their place."""
        for x, values in zip(pieces.flat, loaded, strict=True):
            if values:
                states[x] = values

    def _transform(self) -> Transform:
        layout = self.pieces.layout
        return self._now if layout is None else sharded(self._now, layout)

    def _among_all(self, some: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Return ``some`` with an entry for every parameter of the model: None for those that it lacks."""
        return {name: some.get(name) for name in self._names}

    def _lay_out(self, state: PyTree, states: States) -> None:
        """Copy a new state into ``optimizer.state``; tensors like shards become parts of flat tensors."""
        local = self.pieces.views(self.pieces.flat)
        leaves, self._treedef = tree.flatten(state)
        for x in self.pieces.flat:
            states[x] = {}
        shards: dict[str, dict[str, Tensor]] = {}
        owners = ownership_of(state, dict.fromkeys(self._names))
        for path, (name, path_without_name), leaf in zip(tree.paths(state), owners, leaves, strict=True):
            if leaf is None:
                self._leaves.append(None)
                continue
            key = path_of(path_without_name)
            if name not in local or leaf.shape != local[name].shape:
                name, key = None, path_of(path)
            self._leaves.append((key, name))
            if name is not None and self.pieces.is_flat:
                shards.setdefault(key, {})[name] = leaf
            else:
                for x in self.pieces.flat if name is None else [local[name]]:
                    states[x][key] = leaf
        for key, mine in shards.items():
            dtypes = {leaf.dtype for leaf in mine.values()}
            if len(dtypes) > 1:
                raise ValueError(f"the state {key!r} has the dtypes {dtypes} in one flat tensor; pin one")
            (flat,) = self.pieces.flat
            states[flat][key] = torch.zeros_like(flat, dtype=dtypes.pop(), requires_grad=False)
            for name, view in self.pieces.views([states[flat][key]]).items():
                if name in mine:
                    view.copy_(mine[name])

    def _check(self, states: States) -> None:
        """Raise unless a loaded ``optimizer.state`` fits the transform in keys and shapes; cast it to its dtypes."""
        found: list[object] = [states.get(x) for x in self.pieces.flat]
        if all(now is before for now, before in zip(found, self._checked, strict=True)):
            return
        whose = f"of {self.pieces.names[0]!r} and {len(self.pieces.names) - 1} more"
        for x, specs in self._specs.items():
            entries: dict[str, Any] = states.get(x, {})
            if different := sorted(specs.keys() ^ entries.keys()):
                which = "is missing" if different[0] in specs else "belongs to another transform"
                raise ValueError(
                    f"optimizer.state: {different[0]!r} {which}, in the state {whose}; it has {sorted(entries)}, "
                    f"expected {sorted(specs)}: load a state of {self._tx!r}, or start without one"
                )
            for key, spec in specs.items():
                own = entries[key]
                if tuple(own.shape) != spec.shape or not widens(own.dtype, spec.dtype):
                    raise ValueError(
                        f"optimizer.state: {key!r} {whose} has shape {tuple(own.shape)} and dtype {own.dtype}, "
                        f"expected {spec.shape} and {spec.dtype} or a dtype that widens to it"
                    )
                entries[key] = own.to(spec.dtype)
        self._checked = [states[x] for x in self.pieces.flat]

    def _read(self, states: States) -> PyTree:
        """Return the state tree of the transform, built from the tensors in ``optimizer.state``."""
        whole: dict[str, Tensor] = {}
        if not self.pieces.is_flat:
            whole = dict(zip(self.pieces.names, self.pieces.flat, strict=True))
        found: list[Tensor | None] = []
        for entry in self._leaves:
            if entry is None:
                found.append(None)
                continue
            key, name = entry
            kept: Tensor = states[whole[name] if whole and name else self.pieces.flat[0]][key]
            found.append(kept if whole or name is None else self._views_of(key, kept)[name])
        return tree.unflatten(self._treedef, found)

    def _views_of(self, key: str, kept: Tensor) -> dict[str, Tensor]:
        if key not in self._views or self._views[key][0] is not kept:
            self._views[key] = kept, self.pieces.views([kept])
        return self._views[key][1]

    def _write(self, before: PyTree, after: PyTree, states: States) -> None:
        """Write the state after a step to ``optimizer.state``; reuse the memory of the state before the step."""
        for entry, old, new in zip(self._leaves, tree.leaves(before), tree.leaves(after), strict=True):
            if entry is None or new is old:
                continue
            key, name = entry
            if name is None:
                for x in self.pieces.flat:
                    states[x][key] = new
            elif new.data_ptr() != old.data_ptr():
                old.copy_(new)

    def step(self, numbers: dict[str, Any], states: States) -> None:
        """Update parameters and state by one step; ``numbers`` are the group's hyperparameters, by name."""
        self._check(states)
        if numbers is not self._values:
            self._now = with_hyperparams(self._tx, fitted(hyperparams(self._tx), [numbers])[0]).prepare_all()
            self._values = numbers
        params = self.pieces.views([x.detach() for x in self.pieces.flat])
        grads = self.pieces.views([x.grad for x in self.pieces.flat])
        state = self._read(states)
        updates, after = self._transform().update(
            self._among_all(grads),
            state,
            self._among_all(params),
            donate=Donation(updates=self.pieces.is_flat, state=True),
        )
        pairs = [(params[name], updates[name]) for name in params if updates[name] is not None]
        if pairs:
            torch._foreach_add_([param for param, _ in pairs], [update for _, update in pairs])
        self._write(state, after, states)

    def to_global(self, states: States, *, to_load: bool) -> tuple[dict[str, Any], list[Any]]:
        """Return a dict from name to parameter, and a list of the leaves of the optimizer state.

        Each is a whole tensor or a shard with its position (`FlatShard`); None for parameters of other flat tensors.
        """
        self._check(states)
        params = self.pieces.views([x.detach() for x in self.pieces.flat])
        state = self._read(states)
        if self.pieces.layout is not None:
            state = to_global(self._transform(), state, self._among_all(params))
        leaves = tree.leaves(state)
        for place, (entry, leaf) in enumerate(zip(self._leaves, leaves, strict=True)):
            if entry is not None and entry[1] is not None and isinstance(leaf, Tensor):
                leaves[place] = self.pieces.as_leaf(entry[1], leaf, to_load=to_load)
        params_with_positions = {
            name: self.pieces.as_leaf(name, param, to_load=to_load) for name, param in params.items()
        }
        return params_with_positions, leaves

    def unflatten(self, leaves: Sequence[Any]) -> PyTree:
        """Return the optimizer state as a tree, built from a list of its leaves."""
        return tree.unflatten(self._treedef, leaves)

    @torch.no_grad()
    def take(self, params: Mapping[str, Any], leaves: Sequence[Any], states: States) -> None:
        """Copy loaded parameters and state leaves, in the form that `to_global` returns, into the flat tensors."""
        views = self.pieces.views([x.detach() for x in self.pieces.flat])
        for name, view in views.items():
            loaded_param = params[name]
            values = loaded_param.data if isinstance(loaded_param, FlatShard) else loaded_param
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
