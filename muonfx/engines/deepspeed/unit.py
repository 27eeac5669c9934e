"""The state and the steps of one flat tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Transform
from muonfx.core.hyperparams import hyperparams, with_hyperparams
from muonfx.engines.deepspeed.pieces import Pieces
from muonfx.optimizer.state import path_of
from muonfx.optimizer.values import fitted, unchanged
from muonfx.sharding.shards import FlatPiece
from muonfx.sharding.transform import sharded
from muonfx.sharding.views import from_global, to_global
from muonfx.tree import PyTree
from muonfx.tree.dtypes import widens

__all__ = ["Unit"]


class Unit:
    """One flat tensor, or the whole parameters of a group at stage 0, with its state and its steps."""

    def __init__(self, tx: Transform, like: Mapping[str, Tensor], pieces: Pieces, state: dict[Tensor, Any]) -> None:
        self.pieces, self._tx = pieces, tx
        self._names = list(like)
        self._values: dict[str, Any] | None = None
        self._now = tx
        self._views: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
        """By key, a flat state tensor and the views of its shards."""
        loaded: list[dict[str, Any]] = [dict(state.get(x, {})) for x in pieces.flat]
        self._state = self._lay_out(self._transform().init(self._among_all(pieces.views(pieces.flat))), state)
        self._specs = {x: {key: tree.spec(kept) for key, kept in state[x].items()} for x in pieces.flat}
        """By tensor, the specs of the entries in ``optimizer.state``."""
        self._checked: list[object] = [state[x] for x in pieces.flat]
        """The entries of ``optimizer.state`` that passed `_check`; a load replaces them."""
        for x, values in zip(pieces.flat, loaded, strict=True):
            if values:
                state[x] = values

    def _transform(self) -> Transform:
        layout = self.pieces.layout
        return self._now if layout is None else sharded(self._now, layout)

    def _among_all(self, some: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Return the leaves of this unit in a tree of all parameters, None for the others."""
        return {name: some.get(name) for name in self._names}

    def _lay_out(self, state: PyTree, held: dict[Tensor, Any]) -> PyTree:
        """Store a state in ``optimizer.state``; leaves with the shape of a shard become views of flat tensors."""
        self._leaves: list[tuple[str, str | None]] = []
        """For each leaf, its key in ``optimizer.state``, and the parameter whose shape it has."""
        local = self.pieces.views(self.pieces.flat)
        for x in self.pieces.flat:
            held[x] = {}
        placed: list[Any] = []
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
            name = path[-1] if path and path[-1] in self._names else None
            own = local.get(name) if isinstance(name, str) else None
            if own is not None and leaf is not None and leaf.shape == own.shape:
                self._leaves.append((path_of(path[:-1]), str(name)))
            else:
                self._leaves.append((path_of(path), None))
            placed.append(leaf)
        for key in dict.fromkeys(key for key, name in self._leaves if name is not None):
            mine = {n: leaf for (k, n), leaf in zip(self._leaves, placed, strict=True) if k == key and n is not None}
            dtypes = {leaf.dtype for leaf in mine.values()}
            if len(dtypes) > 1:
                raise ValueError(f"the state {key!r} has the dtypes {dtypes} in one flat tensor; pin one")
            if self.pieces.layout is None:
                for name, x in local.items():
                    held[x][key] = mine[name]
                continue
            (flat,) = self.pieces.flat
            room = torch.zeros_like(flat, dtype=dtypes.pop(), requires_grad=False)
            held[flat][key] = room
            for name, view in self.pieces.views([room]).items():
                if name in mine:
                    view.copy_(mine[name])
        for (key, name), leaf in zip(self._leaves, placed, strict=True):
            if name is None and leaf is not None:
                for x in self.pieces.flat:
                    held[x][key] = leaf
        self._treedef = tree.flatten(state)[1]
        return self._read(placed, held)

    def _check(self, held: dict[Tensor, Any]) -> None:
        """Require that loaded entries match the transform's state, and cast them to its dtypes."""
        found: list[object] = [held.get(x) for x in self.pieces.flat]
        if all(now is before for now, before in zip(found, self._checked, strict=True)):
            return
        for x, specs in self._specs.items():
            entries: dict[str, Any] = held.get(x, {})
            whose = f"of {self.pieces.names[0]!r} and {len(self.pieces.names) - 1} more"
            if different := sorted(specs.keys() ^ entries.keys()):
                which = "is missing" if different[0] in specs else "belongs to another transform"
                raise ValueError(
                    f"optimizer.state: {different[0]!r} {which}, in the state {whose}; it has {sorted(entries)}, "
                    f"expected {sorted(specs)}: load a state of {self._tx!r}, or begin anew"
                )
            for key, spec in specs.items():
                own = entries[key]
                if tuple(own.shape) != spec.shape or not widens(own.dtype, spec.dtype):
                    raise ValueError(
                        f"optimizer.state: {key!r} {whose} has shape {tuple(own.shape)} and dtype {own.dtype}, "
                        f"expected {spec.shape} and {spec.dtype} or what widens to it"
                    )
                if own.dtype != spec.dtype:
                    entries[key] = own.to(spec.dtype)
        self._checked = [held[x] for x in self.pieces.flat]

    def _read(self, leaves: Sequence[Any], held: dict[Tensor, Any]) -> PyTree:
        """Return the state that is in ``optimizer.state`` now."""
        found: list[Any] = []
        for (key, name), leaf in zip(self._leaves, leaves, strict=True):
            if leaf is None:
                found.append(None)
                continue
            holder = self.pieces.flat[self.pieces.names.index(name)] if self._is_whole(name) else self.pieces.flat[0]
            kept: Tensor = held[holder][key]
            found.append(kept if name is None or self._is_whole(name) else self._views_of(key, kept)[name])
        return tree.unflatten(self._treedef, found)

    def _views_of(self, key: str, kept: Tensor) -> dict[str, Tensor]:
        """Return the shards in a flat state tensor, cached until the tensor is replaced."""
        if key not in self._views or self._views[key][0] is not kept:
            self._views[key] = kept, self.pieces.views([kept])
        return self._views[key][1]

    def _is_whole(self, name: str | None) -> bool:
        return name is not None and self.pieces.layout is None

    def step(self, numbers: dict[str, Any], held: dict[Tensor, Any]) -> None:
        """Step with the given hyperparameters and the state in ``optimizer.state``."""
        self._check(held)
        if self._values is None or not unchanged([numbers], [self._values]):
            self._now = with_hyperparams(self._tx, fitted(hyperparams(self._tx), [numbers])[0]).prepare_all()
            self._values = dict(numbers)
        flat = self.pieces.flat
        params = self.pieces.views([x.detach() for x in flat])
        if self.pieces.layout is None:
            grads: dict[str, Tensor | None] = {n: x.grad for n, x in zip(self.pieces.names, flat, strict=True)}
        else:
            (one,) = flat
            assert one.grad is not None
            grads = dict(self.pieces.views([one.grad]))
        state = self._read(tree.leaves(self._state), held)
        updates, after = self._transform().update(
            self._among_all({n: g for n, g in grads.items() if g is not None}),
            state,
            self._among_all(params),
            donate=Donation(updates=self.pieces.layout is not None, state=True),
        )
        pairs = [(params[name], updates[name]) for name in params if updates[name] is not None]
        if pairs:
            torch._foreach_add_([param for param, _ in pairs], [update for _, update in pairs])
        self._write(tree.leaves(state), tree.leaves(after), held)
        self._state = after

    def _write(self, before: Iterable[Any], after: Iterable[Any], held: dict[Tensor, Any]) -> None:
        """Write the next state in place of the previous one."""
        for (key, name), old, new in zip(self._leaves, before, after, strict=True):
            if new is None or new is old:
                continue
            if name is not None:
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)
            else:
                for x in self.pieces.flat:
                    held[x][key] = new

    def to_global(self, held: dict[Tensor, Any]) -> tuple[dict[str, Any], list[Any]]:
        """Return the parameters and the state leaves in global form; None for leaves of other units."""
        self._check(held)
        params = self.pieces.views([x.detach() for x in self.pieces.flat])
        state = self._read(tree.leaves(self._state), held)
        if self.pieces.layout is not None:
            state = to_global(self._transform(), state, self._among_all(params))
        leaves = [
            leaf if name is None or leaf is None or isinstance(leaf, FlatPiece) else self.pieces.as_leaf(name, leaf)
            for (_, name), leaf in zip(self._leaves, tree.leaves(state), strict=True)
        ]
        return {name: self.pieces.as_leaf(name, param) for name, param in params.items()}, leaves

    def unflatten(self, leaves: Sequence[Any]) -> PyTree:
        """Rebuild a state from its leaves."""
        return tree.unflatten(self._treedef, leaves)

    @torch.no_grad()
    def take(self, params: Mapping[str, Any], leaves: Sequence[Any], held: dict[Tensor, Any]) -> None:
        """Replace the parameters and the state by leaves in the form of `to_global`."""
        views = self.pieces.views([x.detach() for x in self.pieces.flat])
        for name, view in views.items():
            view.copy_(data_of(params[name]).view(view.shape))
        before = self._read(tree.leaves(self._state), held)
        # Copied, since each unit advances its step counters in place.
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        after = self.unflatten(
            [None if old is None else new for old, new in zip(self.to_global(held)[1], own, strict=True)]
        )
        if self.pieces.layout is not None:
            after = from_global(self._transform(), after, self._among_all(views))
        self._write(tree.leaves(before), tree.leaves(after), held)


def data_of(leaf: Tensor | FlatPiece) -> Tensor:
    """Return the values of a leaf on this rank."""
    return leaf.data if isinstance(leaf, FlatPiece) else leaf
