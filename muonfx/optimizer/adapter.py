"""Any transform as a ``torch.optim.Optimizer``: one class, long because torch's interface is wide.

The names of this file: a *route* is what a parameter's labels are in the transform's partitions; parameters of one
route form a *group*, unless the caller gave groups. A *hyperparameter* is a numeric argument of the transform; each
group holds those that its parameters meet, and what stands there counts at every step. A *segment* is a run of
neighbouring transforms of a chain that each look at one leaf at a time, or one transform that looks at the whole
tree. A *piece* is the part of the leaves on which a segment runs at once: one group where groups disagree about a
hyperparameter, and at most so many bytes, so that the updates in memory at one time are those of a piece.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, Transform
from muonfx.hyperparams import hyperparams, with_hyperparams
from muonfx.optimizer.groups import (
    NOT_HYPERPARAMS,
    NamedParameters,
    Route,
    hyperparams_of,
    label_of,
    named_pairs,
    resolve_groups,
    routes_of,
    split_by_route,
)
from muonfx.optimizer.pieces import SMALL_BUCKET, Piece, Segment, buckets, bytes_of, segments
from muonfx.optimizer.state import by_path, matched, path_of, saved_groups
from muonfx.recorded import Recorded
from muonfx.tree import PyTree

__all__ = ["TransformOptimizer"]


class TransformOptimizer(torch.optim.Optimizer):
    """A transform as a ``torch.optim.Optimizer``, for training loops, schedulers and scalers that expect one.

    Parameters are grouped by their labels in the transform's partitions (given groups are split further), and every
    numeric argument of the transform is an entry of the groups whose parameters meet it, under the dotted name that
    `muonfx.hyperparams` gives, without the label. The learning rate is called ``lr`` and the weight decay
    ``weight_decay``. Entries are read at every step, so learning-rate schedulers work, on each group's own base rate.
    What `inject_hyperparams` keeps in the state is not in the groups: it counts there alone.

    The state is made at construction. Each parameter's part of it is in ``optimizer.state[parameter]``, under names
    such as "momentum/trace", with the scalars that all share. Its storage is reused from step to step; gradients are
    only read.

    Args:
        params: a model, its ``named_parameters()``, a dict of named tensors, or groups: dicts with "params" (named) and
            values for some hyperparameters.
        tx: the transform. Labels and masks see the flat dict of all named parameters.
        donate_grads: let updates be written into the gradients' storage. Saves memory where a transform looks at the
            whole tree (such as `clip_by_global_norm`), and leaves no meaningful ``.grad`` behind.
        bucket_bytes: run the transform on at most about this many bytes of parameters at a time, where it looks at one
            leaf at a time. More is faster where leaves are small; less takes less memory. None: as many as the
            largest parameter has, or 4 MiB if that is more.

    Raises:
        TypeError: unnamed parameters, or tensors that cannot be optimized.
        ValueError: two parameters with one name, an unknown hyperparameter in a group (the message lists those
            known), or a value out of range.

    Example:
        >>> import muonfx as mfx
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
        >>> optimizer = TransformOptimizer(model, mfx.muon_with_adamw(0.02, 1e-3, labels=mfx.default_labels(model)))
        >>> [(group["label"], group["lr"]) for group in optimizer.param_groups]
        [('adamw', 0.001), ('muon', 0.02)]
        >>> model(torch.arange(8)).square().sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model[1].weight])
        ['adamw/scale_by_adam/count', 'muon/momentum/trace']
    """

    def __init__(
        self,
        params: NamedParameters,
        tx: Transform,
        *,
        donate_grads: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        if not isinstance(tx, Transform):
            raise TypeError(f"tx must be a muonfx.Transform, found {tx!r}")
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, found {bucket_bytes}")
        self.tx = tx
        self.donate_grads = donate_grads
        self.bucket_bytes = bucket_bytes
        self._ready = False
        # In a dict: torch.compile replays what is put into one, but not what is assigned to an optimizer's attributes.
        self._live: dict[str, Any] = {}
        groups = resolve_groups(params)
        named = {name: param for group in groups for name, param in group["params"]}
        if not named:
            raise ValueError("params: found no parameters; pass a model that has some, or model.named_parameters()")
        self._routes = routes_of(tx, named)
        super().__init__(groups, {})
        self._start()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs: torch's part and ours."""
        ours = (
            "tx",
            "donate_grads",
            "bucket_bytes",
            "_ready",
            "_routes",
            "_live",
            "_keys",
            "_segments",
            "_slots",
            "_left_out",
        )
        kept = {name: self.__dict__[name] for name in (*ours, "_rules") if name in self.__dict__}
        return {**super().__getstate__(), **kept, "_values": None}

    # ------------------------------------------------------------------------------------------------ construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is made at once, that of the others is kept.

        Args:
            param_group: "params" (named) and values for some hyperparameters; it is split where labels differ.

        Raises:
            ValueError: a hyperparameter that none of these parameters meets; the message lists those they do.
        """
        group = dict(param_group)
        pairs = named_pairs(group.pop("params"))
        routes = self._routes
        if self._ready:
            named = self._named()
            if taken := [name for name, _ in pairs if name in named]:
                raise ValueError(
                    f"a parameter named {taken[0]!r} is in a group already; names must differ over all groups"
                )
            together = {**named, **dict(pairs)}
            routes = routes_of(self.tx, together)
            # Refuses what the transform cannot take, before anything is changed.
            self.tx.init(tree.map(lambda p: torch.empty_like(p, device="meta"), together))
        parts = split_by_route(pairs, routes)
        own = [hyperparams_of(self.tx, routes[part[0][0]] if part else {}) for part in parts]
        known = {key for keys in own for key in keys}
        if pairs and (unknown := sorted(group.keys() - known - NOT_HYPERPARAMS)):
            there = ", ".join(sorted(known)) or "none"
            raise ValueError(f"param_groups: unknown hyperparameter {', '.join(unknown)}; there are {there}")
        made = [{key: group.get(key, default) for key, (_, default) in keys.items()} for keys in own]
        for keys, values in zip(own, made, strict=True):
            named_values = {name: values[key] for key, (name, _) in keys.items()}
            self._check_shapes(named_values)
            _valid(with_hyperparams(self.tx, named_values))
        rest = {key: group[key] for key in group.keys() & NOT_HYPERPARAMS}
        self._routes = routes
        for part, values in zip(parts, made, strict=True):
            unnamed = {} if part else {"param_names": []}  # torch finds names in the parameters, where there are any
            # torch's schedulers want a rate in every group, also where none applies: nothing here reads that one
            complete = {"label": label_of(routes, part), "lr": 0.0, **unnamed, **rest, **values}
            super().add_param_group({**complete, "params": part})
        if self._ready:
            self._start()

    def _check_shapes(self, values: Mapping[str, Any]) -> None:
        """Refuse a tensor of other shape than the number that it stands for."""
        defaults = hyperparams(self.tx)
        for name, value in values.items():
            default = defaults[name]
            wanted = tuple(default.shape) if isinstance(default, Tensor) else ()
            if isinstance(value, Tensor) and tuple(value.shape) != wanted:
                raise ValueError(f"{name} must be a number or a tensor of shape {wanted}, found {tuple(value.shape)}")

    def _start(self) -> None:
        """Make the state for all parameters, keeping what there was, and everything that follows from the groups."""
        named = self._named()
        old = by_path(self._state) if self._ready else {}
        self._live["state"] = self.tx.init(named)
        new = by_path(self._state)
        self._adopt({path: leaf for path, leaf in old.items() if path in new and leaf.shape == new[path].shape})
        self._keys: list[dict[str, str]] = [
            {key: name for key, (name, _) in hyperparams_of(self.tx, self._route_of(group)).items()}
            for group in self.param_groups
        ]
        self._segments = segments(self.tx)
        self._left_out = {name for name, route in self._routes.items() if None in route.values()}
        self._values: list[dict[str, Any]] | None = None
        self._ready = True
        self._refresh()

    def _adopt(self, leaves: Mapping[str, Any]) -> None:
        """Put leaves into the state by path, and the state's leaves into ``self.state``."""
        paths = tree.paths(self._state)
        found, treedef = tree.flatten(self._state)
        found = [leaves.get(path_of(path), leaf) for path, leaf in zip(paths, found, strict=True)]
        self._live["state"] = tree.unflatten(treedef, found)
        named = self._named()
        self._slots: list[tuple[Tensor | None, str]] = []
        for path in paths:
            owner = named.get(path[-1]) if path and isinstance(path[-1], str) else None
            self._slots.append((owner, path_of(path if owner is None else path[:-1])))
        self._live["shown"] = found
        for param in named.values():
            self.state[param] = {}
        for (owner, key), leaf in zip(self._slots, found, strict=True):
            self._place(owner, key, leaf)

    def _place(self, owner: Tensor | None, key: str, leaf: Any) -> None:
        for param in self.state if owner is None else (owner,):
            self.state[param][key] = leaf

    def _named(self) -> dict[str, Tensor]:
        return {
            name: param
            for group in self.param_groups
            for name, param in zip(group["param_names"], group["params"], strict=True)
        }

    def _route_of(self, group: Mapping[str, Any]) -> Route:
        return self._routes[group["param_names"][0]] if group["param_names"] else {}

    @property
    def _state(self) -> PyTree:
        return self._live["state"]

    # ----------------------------------------------------------------------------------------------------- stepping

    def _refresh(self) -> None:
        """Build the transforms for the hyperparameters that stand in the groups now, and the pieces they run on."""
        values = [
            {name: group[key] for key, name in keys.items()}
            for group, keys in zip(self.param_groups, self._keys, strict=True)
        ]
        if self._values is not None and _unchanged(values, self._values):
            return
        for group in values:
            self._check_shapes(group)
        self._plans = [self._plan(segment, values) for segment in self._segments]
        self._values = [dict(group) for group in values]

    def _plan(self, segment: Segment, values: list[dict[str, Any]]) -> list[Piece]:
        names = hyperparams(segment.tx).keys()
        chosen = [{name: group[name] for name in names & group.keys()} for group in values]
        agreed: dict[str, Any] = {}
        conflicts: list[str] = []
        for group in chosen:
            for name, value in group.items():
                if name in agreed and not _equal(agreed[name], value):
                    conflicts.append(name)
                agreed.setdefault(name, value)
        if conflicts and segment.tx.locality is Locality.TREE:
            raise ValueError(
                f"the groups disagree about {conflicts[0]!r}, which belongs to a transform that looks at all "
                "parameters together; give it one value in all groups"
            )
        runs: list[tuple[dict[str, Any], list[str]]] = []
        for mine, group in zip(chosen, self.param_groups, strict=True):
            values_of_all = {**agreed, **mine} if conflicts else agreed
            same = next((run for run in runs if _all_equal(run[0], values_of_all)), None)
            if same is None:
                runs.append((values_of_all, list(group["param_names"])))
            else:
                same[1].extend(group["param_names"])
        made = [(_valid(with_hyperparams(segment.tx, run)), members) for run, members in runs]
        if segment.tx.locality is Locality.TREE:
            return [Piece(made[0][0], None)]
        named = self._named()
        limit = self.bucket_bytes or max([SMALL_BUCKET, *map(bytes_of, named.values())])
        pieces = [Piece(tx, names) for tx, members in made for names in buckets(members, named, limit)]
        return [Piece(pieces[0].tx, None)] if len(pieces) == 1 else pieces

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **extras: Any) -> Any:
        """Take one step on the parameters' ``.grad``; a parameter without one keeps its value and state.

        Args:
            closure: recomputes the loss with gradients, and returns it.
            **extras: named values for the transforms whose signatures name them, such as ``value=loss``.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: a hyperparameter in a group is out of range, or a parameter that the labels leave out has a
                gradient.
            TypeError: a gradient is sparse or complex. Nothing has been changed when an error is raised.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        params = self._named()
        updates: dict[str, Tensor | None] = {name: param.grad for name, param in params.items()}
        if len(self.state) != len(params):
            raise ValueError(
                "optimizer.state was cleared, but the state lives in transform_state: make the optimizer anew"
            )
        self._check(updates)
        self.tx.check_extras(extras)
        self._refresh()
        donate = Donation(self.donate_grads, True)
        for place, (segment, plan) in enumerate(zip(self._segments, self._plans, strict=True)):
            last = place == len(self._segments) - 1
            updates = self._run(segment, plan, updates, params, donate, extras, apply=last)
            donate = Donation(donate.updates or (segment.tx.keeps_donation_promise and _fresh(updates, params)), True)
        self._publish()
        return loss

    def _run(
        self,
        segment: Segment,
        plan: list[Piece],
        updates: dict[str, Tensor | None],
        params: dict[str, Tensor],
        donate: Donation,
        extras: dict[str, Any],
        *,
        apply: bool,
    ) -> dict[str, Tensor | None]:
        state = segment.state_of(self._state)
        if len(plan) == 1:
            results, after = plan[0].tx.run(updates, state, params, donate=donate, **extras)
            if apply:
                _add_in_place(params, results)
        else:
            results = {}
            before, treedef = tree.flatten(state)
            leaves = list(before)
            for piece in plan:
                mine = {**dict.fromkeys(updates), **{name: updates[name] for name in piece.members(updates)}}
                out, new = piece.tx.run(mine, state, params, donate=donate, **extras)
                leaves = [
                    now if now is not was else kept
                    for now, was, kept in zip(tree.leaves(new), before, leaves, strict=True)
                ]
                if apply:
                    _add_in_place(params, out)
                else:
                    results.update({name: out[name] for name in piece.members(updates)})
                del mine, out  # not beside those of the next piece
            after = tree.unflatten(treedef, leaves)
        self._live["state"] = segment.with_state(self._state, after)
        return results

    def _publish(self) -> None:
        """Show the leaves that are new objects in ``self.state``."""
        leaves = tree.leaves(self._state)
        for (owner, key), new, shown in zip(self._slots, leaves, self._live["shown"], strict=True):
            if new is not shown:
                self._place(owner, key, new)
        self._live["shown"] = leaves

    def _check(self, updates: Mapping[str, Tensor | None]) -> None:
        grads = [grad for grad in updates.values() if grad is not None]
        if all(grad.layout is torch.strided and grad.is_floating_point() for grad in grads) and not self._left_out:
            return
        for name, grad in updates.items():
            if grad is None:
                continue
            if grad.layout is not torch.strided or not grad.is_floating_point():
                raise TypeError(f"the gradient of {name!r} must be dense and real, found {grad.layout}, {grad.dtype}")
            if name in self._left_out:
                raise ValueError(
                    f"{name!r} has a gradient, but the labels leave it out (label None); was it unfrozen after they "
                    "were made? Make the labels and the optimizer anew"
                )

    # -------------------------------------------------------------------------------------------------- persistence

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict()`` returned, into the storage and the dtypes of this optimizer's state.

        Parameters are found by name. Values are copied. A dtype may widen; it never follows the parameter's dtype, as
        ``torch.optim`` lets it.

        Raises:
            ValueError: other groups or parameters, a missing, unexpected or reshaped state leaf, a narrowing dtype,
                or a missing hyperparameter; the message names them all. Nothing has been changed when an error is
                raised.
        """
        given: dict[str, Any] = dict(state_dict)
        for hook in cast("Any", self)._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, given)
            given = given if changed is None else changed
        values = matched(self.param_groups, self._keys, self.state, given)
        for leaf, value in values:
            leaf.copy_(value)
        for group, saved in zip(self.param_groups, saved_groups(self.param_groups, given), strict=True):
            group.update(
                copy.deepcopy({key: value for key, value in saved.items() if key not in ("params", "param_names")})
            )
        self._values = None
        for hook in cast("Any", self)._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @property
    def transform_state(self) -> PyTree:
        """The transform's state as the functional API sees it; its storage is reused by the next step."""
        return self._state


def _add_in_place(params: Mapping[str, Tensor], updates: Mapping[str, Tensor | None]) -> None:
    present = [(params[name], update) for name, update in updates.items() if update is not None]
    if present:
        torch._foreach_add_([param for param, _ in present], [update for _, update in present])


def _fresh(updates: Mapping[str, Tensor | None], params: Mapping[str, Tensor]) -> bool:
    return not any(update is not None and update is params[name].grad for name, update in updates.items())


def _valid(tx: Recorded) -> Any:
    """Build a transform and all within it now, so that a bad value is found before anything is changed."""
    _ = tx.built
    for part in tx._parts:
        if isinstance(part, Recorded):
            _valid(part)
    return tx


def _equal(a: Any, b: Any) -> bool:
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def _all_equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)


def _unchanged(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> bool:
    return len(new) == len(old) and all(_all_equal(a, b) for a, b in zip(new, old, strict=True))
