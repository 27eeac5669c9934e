"""Any transform as a ``torch.optim.Optimizer``.

The names of this file: a *route* is what a parameter's labels are in the transform's partitions; parameters of one
route form a *group*, unless the caller gave groups. A *hyperparameter* is a numeric argument of the transform; each
group holds those that its parameters meet, and what stands there counts at every step. A *segment* is a run of
neighbouring transforms of a chain that each look at one leaf at a time, or one transform that looks at the whole
tree. A *piece* is the part of the leaves on which a segment runs at once: one group where groups disagree about a
hyperparameter, and at most so many bytes, so that the updates in memory at one time are those of a piece.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from muonfx import polar, tree
from muonfx.core import Donation, Locality, Transform, chain, chain_entries
from muonfx.hyperparams import hyperparams, with_hyperparams
from muonfx.partition import routes
from muonfx.recipes import muon_with_adamw
from muonfx.recorded import Recorded
from muonfx.select import default_labels
from muonfx.tree import PyTree

__all__ = ["Muon", "TransformOptimizer"]

NamedParameters = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class TransformOptimizer(torch.optim.Optimizer):
    """A transform as a ``torch.optim.Optimizer``, for training loops, schedulers and scalers that expect one.

    Parameters are grouped by their labels in the transform's partitions (one group if there are none), and every
    numeric argument of the transform is an entry of the groups whose parameters meet it, under the dotted name that
    `muonfx.hyperparams` gives, without the label. The learning rate is called ``lr`` and the weight decay
    ``weight_decay``. Entries are read at every step, so learning-rate schedulers work, on each group's own base rate.

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
        if not isinstance(tx, Transform):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"tx must be a muonfx.Transform, found {tx!r}")
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, found {bucket_bytes}")
        self.tx = tx
        self.donate_grads = donate_grads
        self.bucket_bytes = bucket_bytes
        self._ready = False
        groups = _groups(params)
        named = {name: param for group in groups for name, param in group["params"]}
        self._routes = _routes(tx, named)
        if len(groups) == 1 and groups[0].keys() == {"params"}:
            groups = _split_by_route(groups[0]["params"], self._routes)
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
            "_state",
            "_keys",
            "_segments",
            "_slots",
            "_shown",
            "_left_out",
        )
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in ours}, "_values": None}

    # ------------------------------------------------------------------------------------------------ construction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is made at once, that of the others is kept.

        Args:
            param_group: "params" (named) and values for some hyperparameters.
        """
        group = dict(param_group)
        pairs = _named_pairs(group["params"])
        if self._ready:
            named = {**self._named(), **dict(pairs)}
            self._routes = _routes(self.tx, named)
        group["params"] = pairs
        group.setdefault("label", _label(self._routes, pairs))
        own = _hyperparams_of(self.tx, [self._routes[name] for name, _ in pairs])
        unknown = group.keys() - own.keys() - {"params", "label", "param_names", "initial_lr"}
        if unknown:
            raise ValueError(
                f"group {group['label']!r}: unknown hyperparameter {', '.join(sorted(unknown))}; "
                f"there are {', '.join(own) or 'none'}"
            )
        for key, (_, value) in own.items():
            group.setdefault(key, value)
        super().add_param_group(group)
        if self._ready:
            self._start()

    def _start(self) -> None:
        """Make the state for all parameters, keeping what there was, and everything that follows from the groups."""
        named = self._named()
        old = _by_path(self._state) if self._ready else {}
        self._state: PyTree = self.tx.init(named)
        self._adopt({path: leaf for path, leaf in old.items() if path in _by_path(self._state)})
        self._keys: list[dict[str, str]] = [
            {key: name for key, (name, _) in _hyperparams_of(self.tx, self._routes_of(group)).items()}
            for group in self.param_groups
        ]
        self._segments = _segments(self.tx)
        self._left_out = {name for name, route in self._routes.items() if None in route.values()}
        self._values: list[dict[str, Any]] | None = None
        self._ready = True
        self._refresh()

    def _adopt(self, leaves: Mapping[str, Any]) -> None:
        """Put leaves into the state by path, and the state's leaves into ``self.state``."""
        accessors, found, treedef = _accessors(self._state)
        found = [leaves.get(_path(accessor), leaf) for accessor, leaf in zip(accessors, found, strict=True)]
        self._state = tree.unflatten(treedef, found)
        named = self._named()
        self._slots: list[tuple[Tensor | None, str]] = []
        for accessor in accessors:
            *above, last = accessor
            owner = named.get(str(last)) if isinstance(last, str) else None
            self._slots.append((owner, "/".join(map(str, above if owner is not None else accessor))))
        self._shown = found
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

    def _routes_of(self, group: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [self._routes[name] for name in group["param_names"]]

    # ----------------------------------------------------------------------------------------------------- stepping

    def _refresh(self) -> None:
        """Build the transforms for the hyperparameters that stand in the groups now, and the pieces they run on."""
        values = [
            {name: group[key] for key, name in keys.items()}
            for group, keys in zip(self.param_groups, self._keys, strict=True)
        ]
        if self._values is not None and _unchanged(values, self._values):
            return
        self._plans = [self._plan(segment, values) for segment in self._segments]
        self._values = [dict(group) for group in values]

    def _plan(self, segment: _Segment, values: list[dict[str, Any]]) -> list[_Piece]:
        names = hyperparams(segment.tx)
        local = [{segment.prefix + name for name in names} & group.keys() for group in values]
        chosen = [
            {name.removeprefix(segment.prefix): group[name] for name in mine}
            for group, mine in zip(values, local, strict=True)
        ]
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
        own = [list(group["param_names"]) for group in self.param_groups]
        if conflicts:
            runs = [
                (_valid(with_hyperparams(segment.tx, {**agreed, **mine})), mine_names)
                for mine, mine_names in zip(chosen, own, strict=True)
            ]
        else:
            runs = [(_valid(with_hyperparams(segment.tx, agreed)), [name for group in own for name in group])]
        if segment.tx.locality is Locality.TREE:
            return [_Piece(runs[0][0], None)]
        named = self._named()
        limit = self.bucket_bytes or max([_SMALL_BUCKET, *map(_bytes, named.values())])
        pieces = [_Piece(tx, names) for tx, members in runs for names in _buckets(members, named, limit)]
        return [_Piece(pieces[0].tx, None)] if len(pieces) == 1 else pieces

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
        self._check(updates)
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
        segment: _Segment,
        plan: list[_Piece],
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
                mine = {**dict.fromkeys(updates), **{name: updates[name] for name in piece.names or updates}}
                out, new = piece.tx.run(mine, state, params, donate=donate, **extras)
                leaves = [
                    now if now is not was else kept
                    for now, was, kept in zip(tree.leaves(new), before, leaves, strict=True)
                ]
                if apply:
                    _add_in_place(params, out)
                else:
                    results.update({name: out[name] for name in piece.names or updates})
                del mine, out  # not beside those of the next piece
            after = tree.unflatten(treedef, leaves)
        self._state = segment.with_state(self._state, after)
        return results

    def _publish(self) -> None:
        """Show the leaves that are new objects in ``self.state``."""
        leaves = tree.leaves(self._state)
        for (owner, key), new, shown in zip(self._slots, leaves, self._shown, strict=True):
            if new is not shown:
                self._place(owner, key, new)
        self._shown = leaves

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

        Values are copied. A dtype may widen; it never follows the parameter's dtype, as ``torch.optim`` lets it.

        Raises:
            ValueError: other groups or parameters, a missing, unexpected or reshaped state leaf, a narrowing dtype,
                or an unknown hyperparameter; the message names them all. Nothing has been changed when an error is
                raised.
        """
        given: dict[str, Any] = dict(state_dict)
        for hook in cast("Any", self)._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, given)
            given = given if changed is None else changed
        values = _matched(self, given)
        for leaf, value in values:
            leaf.copy_(value)
        for group, saved in zip(self.param_groups, given["param_groups"], strict=True):
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


class Muon(TransformOptimizer):
    """Muon for the hidden matrices of a model and AdamW for everything else, as one optimizer.

    Args:
        params: a model (best: parameters are then routed by module type), named parameters, or groups of these.
        lr: the learning rate of Muon, scaled by ``rule``.
        weight_decay: decoupled, of Muon.
        momentum: decay of Muon's average.
        adamw_lr: the learning rate of AdamW; None: ``lr``, which suits where the rule is "match_rms_adamw".
        adamw_weight_decay: decoupled, of AdamW; None: ``weight_decay``.
        betas: AdamW's.
        rule: as in `muonfx.scale_by_shape`.
        coefficients: of the Newton-Schulz iteration, as in `muonfx.orthogonalize`.
        dtype: of the iteration, as in `muonfx.orthogonalize`.
        rules: (predicate, label) pairs that come before the default routing; labels are "muon", "adamw" and None.
        donate_grads: as in `TransformOptimizer`.
        bucket_bytes: as in `TransformOptimizer`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
        >>> optimizer = Muon(model, lr=0.01, weight_decay=0.1)
        >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        >>> model(torch.arange(8)).square().sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
    """

    def __init__(
        self,
        params: NamedParameters,
        lr: float = 2e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        rule: str = "match_rms_adamw",
        coefficients: str | polar.Coefficients = "polar_express_5",
        dtype: torch.dtype | str = "auto",
        rules: Iterable[tuple[Any, str | None]] = (),
        donate_grads: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        if not isinstance(params, nn.Module):
            params = _groups(params)
        named = params if isinstance(params, nn.Module) else {n: p for group in params for n, p in group["params"]}
        tx = muon_with_adamw(
            lr,
            adamw_lr,
            weight_decay=weight_decay,
            adamw_weight_decay=weight_decay if adamw_weight_decay is None else adamw_weight_decay,
            decay=momentum,
            b1=betas[0],
            b2=betas[1],
            rule=rule,
            coefficients=coefficients,
            dtype=dtype,
            labels=default_labels(named, list(rules)),
        )
        super().__init__(params, tx, donate_grads=donate_grads, bucket_bytes=bucket_bytes)


class _Piece(NamedTuple):
    """A transform and the leaves to run it on at once; None: all of them."""

    tx: Transform
    names: list[str] | None


class _Segment(NamedTuple):
    """Neighbouring transforms of a chain that run together; ``names`` is None where the transform is no chain."""

    tx: Transform
    names: list[str] | None

    @property
    def prefix(self) -> str:
        return ""

    def state_of(self, state: PyTree) -> PyTree:
        return state if self.names is None else {name: state[name] for name in self.names}

    def with_state(self, state: PyTree, part: PyTree) -> PyTree:
        return part if self.names is None else {**state, **part}


def _segments(tx: Transform) -> list[_Segment]:
    entries = chain_entries(tx)
    if tx.locality is not Locality.TREE or entries is None:
        return [_Segment(tx, None)]
    runs: list[list[tuple[str, Transform]]] = []
    for name, part in entries.items():
        local = part.locality is not Locality.TREE
        if local and runs and runs[-1][0][1].locality is not Locality.TREE:
            runs[-1].append((name, part))
        else:
            runs.append([(name, part)])
    return [_Segment(chain(*run), [name for name, _ in run]) for run in runs]


def _groups(params: Any) -> list[dict[str, Any]]:
    """Resolve what the caller gave to groups whose "params" are lists of (name, tensor)."""
    if isinstance(params, nn.Module | Mapping):
        return [{"params": _named_pairs(params)}]
    items: list[Any] = list(params)
    if not items or not all(isinstance(item, dict) for item in items):
        items = [{"params": items}]
    groups: list[dict[str, Any]] = [{**item, "params": _named_pairs(item["params"])} for item in items]
    names = [name for group in groups for name, _ in group["params"]]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two parameters are named {twice[0]!r}; names must differ over all groups")
    return groups


def _named_pairs(params: Any) -> list[tuple[str, Tensor]]:
    if isinstance(params, nn.Module):
        return list(params.named_parameters())
    pairs: list[Any] = list(params.items()) if isinstance(params, Mapping) else list(params)
    for pair in pairs:
        if not (
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        ):
            raise TypeError(
                f"expected named parameters, found {type(pair).__name__}; pass the model, or model.named_parameters(): "
                "labels, masks and checkpoints go by name"
            )
    return pairs


def _routes(tx: Transform, named: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """For each parameter the label that it has in each partition of the transform, by the partition's prefix."""
    found: dict[str, dict[str, Any]] = {name: {} for name in named}
    for prefix, names, labels in routes(tx, dict(named)):
        for name, label in zip(names, labels, strict=True):
            found[name][prefix] = label
    return found


def _split_by_route(pairs: list[tuple[str, Tensor]], routes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        groups.setdefault(tuple(routes[name].items()), []).append((name, param))
    return [{"params": members} for members in groups.values()] or [{"params": []}]


def _label(routes: Mapping[str, Mapping[str, Any]], pairs: list[tuple[str, Tensor]]) -> str | None:
    """The labels that all parameters of a group share, for a person to read."""
    shared = {tuple(routes[name].values()) for name, _ in pairs}
    labels = [label for label in next(iter(shared)) if isinstance(label, str)] if len(shared) == 1 else []
    return "/".join(labels) or None


ALIASES = {"scale_by_learning_rate.learning_rate": "lr", "add_decayed_weights.weight_decay": "weight_decay"}


def _hyperparams_of(tx: Transform, of: list[dict[str, Any]]) -> dict[str, tuple[str, Any]]:
    """The hyperparameters that parameters of these routes meet: key in the group -> (dotted name, default)."""
    met: dict[str, Any] = {}
    stripped: dict[str, str] = {}
    for name, value in hyperparams(tx).items():
        for route in of:
            short = _short(name, route)
            if short is not None:
                met[name], stripped[name] = value, short
    keys: dict[str, tuple[str, Any]] = {}
    for name, value in met.items():
        key = stripped[name]
        if sum(other == key for other in stripped.values()) > 1:
            key = name  # a group that mixes routes keeps the labels in its keys
        alias = next((alias for end, alias in ALIASES.items() if key == end or key.endswith("." + end)), None)
        same = sum(other.endswith(tuple(end for end, a in ALIASES.items() if a == alias)) for other in met)
        keys[alias if alias and same == 1 else key] = (name, value)
    return keys


def _short(name: str, route: Mapping[str, Any]) -> str | None:
    """A hyperparameter's name without the labels of a route; None where the route does not come by."""
    for prefix in sorted(route, key=len, reverse=True):
        label = route[prefix]
        if prefix and not name.startswith(prefix + "."):
            continue
        rest = name[len(prefix) + 1 :] if prefix else name
        if isinstance(label, bool):
            if not label and rest.startswith("inner."):
                return None
            continue
        if label is None or not rest.startswith(f"{label}."):
            return None
        name = (f"{prefix}." if prefix else "") + rest[len(label) + 1 :]
    return name


_SMALL_BUCKET = 1 << 22


def _bytes(param: Tensor) -> int:
    return param.numel() * param.element_size()


def _buckets(names: list[str], named: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Cut names, in order, into lists of at most so many bytes of parameters; a single larger one stands alone."""
    buckets: list[list[str]] = []
    room = 0
    for name in names:
        size = _bytes(named[name])
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(name)
        room -= size
    return buckets or [[]]


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


def _unchanged(new: list[dict[str, Any]], old: list[dict[str, Any]]) -> bool:
    return len(new) == len(old) and all(
        a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a) for a, b in zip(new, old, strict=True)
    )


def _accessors(state: PyTree) -> tuple[list[tuple[Any, ...]], list[Any], Any]:
    leaves, treedef = tree.flatten(state)
    return tree.paths(state), leaves, treedef


def _path(accessor: tuple[Any, ...]) -> str:
    return "/".join(map(str, accessor))


def _by_path(state: PyTree) -> dict[str, Any]:
    accessors, leaves, _ = _accessors(state)
    return {_path(accessor): leaf for accessor, leaf in zip(accessors, leaves, strict=True)}


def _matched(optimizer: TransformOptimizer, given: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Pair this optimizer's state leaves with the given values, or raise an error that lists every difference."""
    groups, saved = optimizer.param_groups, given["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        raise ValueError(
            f"the state has groups of {[len(group['params']) for group in saved]} parameters, this optimizer of "
            f"{[len(group['params']) for group in groups]}; was it made by another optimizer or for another model?"
        )
    wrong: list[str] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    for group, old in zip(groups, saved, strict=True):
        wrong += [
            f"unknown hyperparameter {key!r}" for key in old.keys() - group.keys() - {"initial_lr", "param_names"}
        ]
        wrong += [
            f"missing hyperparameter {key!r}"
            for key in group.keys() - old.keys() - {"initial_lr", "param_names", "label"}
        ]
        for name, param, index in zip(group["param_names"], group["params"], old["params"], strict=True):
            have, want = given["state"].get(index, {}), optimizer.state[param]
            wrong += [f"{name!r} has no {key!r}" for key in want.keys() - have.keys()]
            wrong += [f"{name!r} has an unexpected {key!r}" for key in have.keys() - want.keys()]
            for key in want.keys() & have.keys():
                leaf, value = want[key], have[key]
                if not isinstance(value, Tensor) or value.shape != leaf.shape:
                    wrong.append(f"{name!r}: {key!r} is {_described(value)}, expected {_described(leaf)}")
                elif torch.promote_types(value.dtype, leaf.dtype) != leaf.dtype:
                    wrong.append(f"{name!r}: {key!r} would narrow from {value.dtype} to {leaf.dtype}")
                else:
                    pairs.append((leaf, value))
    if wrong:
        shown = "; ".join(sorted(wrong)[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise ValueError(f"the state does not fit this optimizer, nothing was loaded: {shown}")
    return pairs


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
