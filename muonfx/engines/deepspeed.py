"""DeepSpeed: one client optimizer for ZeRO stages 0 to 3, with and without offload.

DeepSpeed flattens the parameters of each group, cuts the buffer (stages 1 and 2) or each parameter (stage 3) among the
ranks, puts this rank's part in fp32 into ``param_groups`` in the place of the parameters, and steps on that. Here the
pieces of the parameters are found in it again: that is a layout, and the step is that of `muonfx.sharding.sharded`.
The state lies in ``optimizer.state`` of the flat tensor as flat tensors of its length, so that DeepSpeed saves, loads
and shows it as it does Adam's.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonfx import tree
from muonfx.checkpoint.dtypes import widens
from muonfx.core import Donation, Locality, Transform
from muonfx.hyperparams import hyperparams, with_hyperparams
from muonfx.optimizer.groups import Route, routes_of, split_by_route
from muonfx.optimizer.state import path_of
from muonfx.optimizer.values import GroupNumbers, check_shapes, unchanged
from muonfx.program.lower import lower
from muonfx.recipes import muon_with_adamw
from muonfx.select import default_labels
from muonfx.sharding.cut import Intervals, Replicas
from muonfx.sharding.layout import Layout
from muonfx.sharding.transform import sharded
from muonfx.tree import PyTree, Spec

__all__ = ["Muon", "ZeroOptimizer", "initialize", "optimizer"]

CONFIG_TYPE = "muonfx.Muon"
"""The "type" of an optimizer in a configuration that `initialize` takes."""


def optimizer(model: nn.Module, tx: Transform) -> ZeroOptimizer:
    """A transform as DeepSpeed's client optimizer: ``deepspeed.initialize(model=model, optimizer=...)``.

    The configuration must allow it: ``"zero_allow_untested_optimizer": true``, and with offload of the optimizer also
    ``"zero_force_ds_cpu_optimizer": false``. All else (stage, precision, accumulation, clipping, schedulers,
    sub-groups, ``zero.Init``) is DeepSpeed's own business.

    Args:
        model: as it is given to DeepSpeed, or made under ``deepspeed.zero.Init``; its parameters that require grad are
            trained.
        tx: the transform. It must not look at the whole tree (`clip_by_global_norm`): DeepSpeed steps one flat tensor
            at a time, and clips gradients itself.

    Returns:
        The optimizer: groups by route as those of `muonfx.TransformOptimizer`, with torch's keys.

    Raises:
        TypeError: ``model`` is no module, or ``tx`` no transform.
        ValueError: ``tx`` looks at the whole tree, or leaves out a parameter that requires grad; the message names it.

    >>> import muonfx as mfx
    >>> model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    >>> made = optimizer(model, mfx.muon_with_adamw(0.02, 1e-3, labels=mfx.default_labels(model)))
    >>> [(group["label"], group["lr"]) for group in made.param_groups]
    [('muon', 0.02), ('adamw', 0.001)]
    """
    return ZeroOptimizer(model, tx)


def Muon(
    model: nn.Module,
    lr: float = 2e-3,
    *,
    weight_decay: float = 0.1,
    adamw_lr: float | None = None,
    rules: Iterable[tuple[Any, str | None]] = (),
    **options: Any,
) -> ZeroOptimizer:
    """Muon for the hidden matrices of a model and AdamW for the rest, as DeepSpeed's client optimizer.

    Args:
        model: as for `optimizer`.
        lr: the learning rate of Muon.
        weight_decay: decoupled, of both.
        adamw_lr: the learning rate of AdamW; None: ``lr``.
        rules: (predicate, label) pairs that come before the default routing, as for `muonfx.Muon`.
        options: further arguments of `muonfx.muon_with_adamw`.

    Raises:
        TypeError, ValueError: as `optimizer` and `muonfx.muon_with_adamw`.

    >>> [group["label"] for group in Muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).param_groups]
    ['muon', 'adamw']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
    options.setdefault("adamw_weight_decay", weight_decay)
    labels = default_labels(model, list(rules))
    return ZeroOptimizer(model, muon_with_adamw(lr, adamw_lr, weight_decay=weight_decay, labels=labels, **options))


def initialize(model: nn.Module, config: Mapping[str, Any] | str | Path, **rest: Any) -> tuple[Any, ...]:
    """``deepspeed.initialize`` for a configuration whose optimizer is Muon.

    DeepSpeed knows its own optimizers and torch's by name, and no others. Here the entry ``"optimizer": {"type":
    "muonfx.Muon", "params": {...}}`` is taken out and made with `Muon`, and the two options that client optimizers need
    are set where the configuration does not say otherwise. All else is handed on.

    Args:
        model: as for `optimizer`.
        config: a configuration, or the path of a JSON file with one; it stays as it is.
        rest: further arguments of ``deepspeed.initialize``.

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, data loader, scheduler.

    Raises:
        ValueError: the configuration has no optimizer of that type.
        ModuleNotFoundError: DeepSpeed is not installed.

    >>> initialize(nn.Linear(2, 2), {"optimizer": {"type": "Adam"}})
    Traceback (most recent call last):
    ValueError: config: its optimizer has the type 'Adam', expected 'muonfx.Muon'; any other is DeepSpeed's own business
    """
    given: dict[str, Any] = dict(config) if isinstance(config, Mapping) else json.loads(Path(config).read_text())
    entry = given.pop("optimizer", {})
    if entry.get("type") != CONFIG_TYPE:
        raise ValueError(
            f"config: its optimizer has the type {entry.get('type')!r}, expected {CONFIG_TYPE!r}; any other is "
            "DeepSpeed's own business"
        )
    import deepspeed

    options = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    made = Muon(model, **entry.get("params", {}))
    return deepspeed.initialize(model=model, optimizer=made, config={**options, **given}, **rest)


def global_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Meta tensors of the parameters as they are when they are whole, also where DeepSpeed holds them in parts.

    >>> global_parameters(nn.Linear(2, 3))["weight"].shape
    torch.Size([3, 2])
    """
    return {
        name: torch.empty(tuple(getattr(param, "ds_shape", param.shape)), dtype=param.dtype, device="meta")
        for name, param in model.named_parameters()
        if param.requires_grad
    }


class ZeroOptimizer(torch.optim.Optimizer):
    """The client optimizer that `optimizer` makes.

    Raises:
        ValueError: at the first step, a flat tensor in which the parameters of its group are not found again, or in
            which other values lie where a parameter should be (``round_robin_gradients``); the message names it.

    Example:
        >>> import muonfx as mfx
        >>> model = nn.Linear(2, 2, bias=False)
        >>> made = ZeroOptimizer(model, mfx.chain(mfx.momentum(), mfx.scale_by_learning_rate(0.1)))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> made.step()
        >>> list(made.state[model.weight])
        ['momentum/trace']
    """

    def __init__(self, model: nn.Module, tx: Transform) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, found {type(model).__name__}")
        if not isinstance(tx, Transform):
            raise TypeError(f"tx must be a muonfx.Transform, found {tx!r}")
        if tx.locality is Locality.TREE:
            raise ValueError(
                f"{tx!r} looks at the whole tree, and DeepSpeed steps one flat tensor at a time: leave clipping to its "
                '"gradient_clipping", and skipping of overflows to its loss scaler'
            )
        self.tx = tx
        self._like = global_parameters(model)
        self._params = {name: param for name, param in model.named_parameters() if name in self._like}
        tx.init(self._like)  # refuses what the transform cannot take
        routes = routes_of(lower(tx, self._like))
        if left_out := [name for name in self._like if name not in routes or routes[name].is_left_out]:
            raise ValueError(
                f"{left_out[0]!r} requires grad, but the labels leave it out: freeze it before, or give it a label"
            )
        defaults = hyperparams(tx)
        self._numbers: dict[tuple[str, ...], GroupNumbers] = {}
        self._units: dict[Tensor, _Unit] = {}
        groups: list[dict[str, Any]] = []
        for part in split_by_route(list(self._params.items()), routes):
            route: Route = routes[part[0][0]]
            numbers = GroupNumbers(route.hyperparams)
            self._numbers[tuple(name for name, _ in part)] = numbers
            values = numbers.entries({name: defaults[name] for name in numbers.names})
            groups.append({"label": route.label, "lr": 0.0, **values, "params": part})
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on what DeepSpeed has put into the groups; all ranks that share its parts together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            numbers = self._numbers[tuple(group["param_names"])]
            for unit in self._units_of(group):
                unit.step(numbers.read(group), self.state)
        return loss

    def _units_of(self, group: Mapping[str, Any]) -> list[_Unit]:
        given: list[Tensor] = group["params"]
        names: list[str] = group["param_names"]
        if [tuple(x.shape) for x in given] == [tuple(self._like[name].shape) for name in names]:
            found = [_whole(names, given)]  # stage 0
        else:
            found = [self._pieces_in(flat, names) for flat in given if flat.grad is not None]
        units: list[_Unit] = []
        for pieces in found:
            first = pieces.flat[0]
            if first not in self._units:
                self._units[first] = _Unit(self.tx, self._like, pieces, self.state)
            units.append(self._units[first])
        return units

    def _pieces_in(self, flat: Tensor, names: Sequence[str]) -> _Pieces:
        if flat in self._units:
            return self._units[flat].pieces
        params = {name: self._params[name] for name in names}
        engine = next((x._z3_optimizer for x in map(_untyped, params.values()) if hasattr(x, "_z3_optimizer")), None)
        pieces = _cut_buffer(flat, params) if engine is None else _cut_parameters(flat, params, engine)
        pieces = pieces.among(self._like)
        _check_values(pieces, params)
        return pieces

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, in the dtypes that it has; DeepSpeed calls it with a rank's own part.

        Raises:
            ValueError: groups of other parameters, or without one of the hyperparameters; nothing has been loaded then.
                A state of another transform is found at the next step.
        """
        saved: list[dict[str, Any]] = state_dict["param_groups"]
        own = [group["param_names"] for group in self.param_groups]
        if (theirs := [group.get("param_names") for group in saved]) != own:
            raise ValueError(f"the state is of groups with the parameters {theirs}, and here they are {own}")
        for names, old in zip(own, saved, strict=True):
            if missing := [one.key for one in self._numbers[tuple(names)].hyperparams if one.key not in old]:
                raise ValueError(f"the state has no hyperparameter {missing[0]!r} for the group of {names[0]!r}")
        super().load_state_dict(state_dict)
        places = chain.from_iterable(group["params"] for group in saved)
        for place, param in zip(places, chain.from_iterable(g["params"] for g in self.param_groups), strict=True):
            for key, value in state_dict["state"].get(place, {}).items():
                if isinstance(value, Tensor):  # torch has cast it to the parameter's dtype
                    self.state[param][key] = value.to(param.device, copy=True)


def _untyped(param: Tensor) -> Any:
    """A parameter with the attributes that DeepSpeed gives it."""
    return param


class _Pieces(NamedTuple):
    """The pieces of parameters in what DeepSpeed steps on."""

    flat: list[Tensor]
    """One flat tensor, or the whole parameters themselves."""
    at: dict[str, tuple[int, int]]
    """By name, where a piece lies in the flat tensor, and how long it is; nothing for whole parameters."""
    begins: dict[str, int]
    """The place in the flattened parameter at which it begins."""
    layout: Layout | None
    """Of all that share the parameters; None where every rank has all."""
    names: tuple[str, ...]

    def among(self, like: Mapping[str, Tensor]) -> _Pieces:
        """The same with a layout that knows all parameters, though those of other flat tensors never come here."""
        layout = self.layout
        assert layout is not None
        others = {name: x for name, x in like.items() if name not in layout.specs}
        specs = {name: Spec(tuple(x.shape), x.dtype) for name, x in others.items()}
        cuts = {name: Replicas(spec.shape, layout.size) for name, spec in specs.items()}
        whole = replace(layout, specs={**layout.specs, **specs}, pieces={**layout.pieces, **cuts}, derived={})
        return self._replace(layout=whole)

    def views(self, flat: Sequence[Tensor]) -> dict[str, Tensor]:
        """The pieces in the flat tensor, or in another of its length, by name."""
        if self.layout is None:
            return dict(zip(self.names, flat, strict=True))
        return {name: flat[0].narrow(0, *self.at[name]).view(self.layout.piece(name).shape) for name in self.names}


def _whole(names: Sequence[str], given: list[Tensor]) -> _Pieces:
    return _Pieces(given, {}, dict.fromkeys(names, 0), None, tuple(names))


def _cut_buffer(flat: Tensor, params: Mapping[str, Tensor]) -> _Pieces:
    """Stages 1 and 2: the parameters one behind another, with padding, in a buffer that is cut into equal parts."""
    own: dict[str, tuple[int, int, int]] = {}
    for name, param in params.items():
        mapping = getattr(param, "_hp_mapping", None)
        if mapping is not None:
            there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
            own[name] = (there.start, here.start, here.numel)
    group = next((_untyped(x)._dp_group for x in params.values() if hasattr(x, "_dp_group")), None)
    if group is None:
        raise ValueError(
            f"{next(iter(params))!r}: found a flat tensor of {flat.numel()} elements in its group, and nothing that "
            "says where the parameter lies in it; expected ZeRO stage 1, 2 or 3, or whole parameters"
        )
    size = dist.get_world_size(group)
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (flat.numel(), own), group=group)
    length = flat.numel()
    if any(theirs != length for theirs, _ in found):
        raise ValueError(f"ranks have flat tensors of {[theirs for theirs, _ in found]} elements; expected equal parts")
    starts: dict[str, int] = {}
    covered = dict.fromkeys(params, 0)
    for rank, (_, pieces) in enumerate(found):
        for name, (begin, at, numel) in pieces.items():
            start = rank * length + at - begin
            if starts.setdefault(name, start) != start:
                raise _misplaced(name)
            covered[name] += numel
    specs = {name: Spec(_shape(param), flat.dtype) for name, param in params.items()}
    for name, spec in specs.items():
        if covered[name] != prod(spec.shape):
            raise _misplaced(name)
    places = tuple(rank * length for rank in range(size + 1))
    cuts = {name: Intervals(spec.shape, starts[name], places) for name, spec in specs.items()}
    layout = Layout("flat", specs, cuts, size, dist.get_rank(group), group, stage=2)
    at = {name: own[name][1:] if name in own else (0, 0) for name in params}
    begins = {name: own[name][0] if name in own else 0 for name in params}
    return _Pieces([flat], at, begins, layout, tuple(params))


def _cut_parameters(flat: Tensor, params: Mapping[str, Tensor], engine: Any) -> _Pieces:
    """Stage 3: each parameter cut into equal parts, the last of them padded, and a rank's parts one behind another."""
    place = next(i for i, mine in enumerate(engine.fp32_partitioned_groups_flat) if mine is flat)
    name_of = {id(param): name for name, param in params.items()}
    members: list[Any] = engine.fp16_groups[place]
    group = members[0].ds_process_group
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    specs: dict[str, Spec] = {}
    cuts: dict[str, Intervals] = {}
    at: dict[str, tuple[int, int]] = {}
    begins: dict[str, int] = {}
    offset = 0
    for param in members:
        name, part = name_of[id(param)], int(param.ds_tensor.ds_numel)
        specs[name] = Spec(_shape(param), flat.dtype)
        cuts[name] = Intervals(specs[name].shape, 0, tuple(part * one for one in range(size + 1)))
        begins[name] = min(rank * part, prod(specs[name].shape))
        at[name] = (offset, min(part, prod(specs[name].shape) - begins[name]))
        offset += part
    layout = Layout("flat", specs, cuts, size, rank, group, stage=3)
    return _Pieces([flat], at, begins, layout, tuple(specs))


def _shape(param: Tensor) -> tuple[int, ...]:
    return tuple(getattr(param, "ds_shape", param.shape))


def _check_values(pieces: _Pieces, params: Mapping[str, Tensor]) -> None:
    """Require that each piece has the values of its parameter, rounded to the dtype that this has; on all ranks."""
    layout = pieces.layout
    assert layout is not None
    found: list[str | None] = [None] * layout.size
    dist.all_gather_object(found, _differing(pieces, params), group=layout.group)
    if wrong := [name for name in found if name is not None]:
        raise _misplaced(wrong[0])


def _differing(pieces: _Pieces, params: Mapping[str, Tensor]) -> str | None:
    """The first parameter that has other values than its piece on this rank."""
    for name, piece in pieces.views(pieces.flat).items():
        held = getattr(params[name], "ds_tensor", None)
        begin = 0 if held is not None else pieces.begins[name]
        source = (params[name] if held is None else held).detach().reshape(-1)
        if piece.numel() == 0:
            continue
        if source.numel() < begin + piece.numel():
            warnings.warn(
                f"{name!r}: DeepSpeed has its values elsewhere, so that nothing shows whether the flat tensor "
                "has them where DeepSpeed says: that is assumed",
                stacklevel=2,
            )
            continue
        known = source[begin : begin + piece.numel()].to(piece.device)
        if not torch.equal(piece.reshape(-1).to(known.dtype).nan_to_num(), known.nan_to_num()):
            return name
    return None


def _misplaced(name: str) -> ValueError:
    return ValueError(
        f"{name!r}: its values are not where DeepSpeed says that they are in the flat tensor, so the update would go "
        'to other parameters. It is so with "round_robin_gradients": true, whose mapping is wrong: set it to false'
    )


class _Unit:
    """One flat tensor, or the whole parameters of a group: its state and its steps."""

    def __init__(self, tx: Transform, like: Mapping[str, Tensor], pieces: _Pieces, state: dict[Tensor, Any]) -> None:
        self.pieces, self._tx = pieces, tx
        self._names = list(like)
        self._values: dict[str, Any] | None = None
        self._now = tx
        loaded: list[dict[str, Any]] = [dict(state.get(x, {})) for x in pieces.flat]
        self._state = self._lay_out(self._transform().init(self._among_all(pieces.views(pieces.flat))), state)
        self._specs = {x: {key: tree.spec(kept) for key, kept in state[x].items()} for x in pieces.flat}
        """By tensor, the entries of ``optimizer.state`` that are the state."""
        self._checked: list[object] = [state[x] for x in pieces.flat]
        """The entries that were found to be whole: a load puts others in their place."""
        for x, values in zip(pieces.flat, loaded, strict=True):
            if values:
                state[x] = values

    def _transform(self) -> Transform:
        layout = self.pieces.layout
        return self._now if layout is None else sharded(self._now, layout)

    def _among_all(self, some: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """The leaves of this unit, in a tree of all parameters."""
        return {name: some.get(name) for name in self._names}

    def _lay_out(self, state: PyTree, held: dict[Tensor, Any]) -> PyTree:
        """Put a state into ``optimizer.state``: what is like the parameters as flat tensors, which it is views of."""
        self._leaves: list[tuple[str, str | None]] = []
        """For each leaf, its key in ``optimizer.state``, and the parameter whose piece it is like."""
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
        """Require that what a load has put into ``optimizer.state`` is the state of this transform, in its dtypes.

        Raises:
            ValueError: an entry is missing or unknown, has another shape, or its dtype would narrow; the message names
                it.
        """
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
        """The state as it stands in ``optimizer.state`` now."""
        found: list[Any] = []
        for (key, name), leaf in zip(self._leaves, leaves, strict=True):
            if leaf is None:
                found.append(None)
                continue
            holder = self.pieces.flat[self.pieces.names.index(name)] if self._is_whole(name) else self.pieces.flat[0]
            kept: Tensor = held[holder][key]
            found.append(kept if name is None or self._is_whole(name) else self.pieces.views([kept])[name])
        return tree.unflatten(self._treedef, found)

    def _is_whole(self, name: str | None) -> bool:
        return name is not None and self.pieces.layout is None

    def step(self, numbers: dict[str, Any], held: dict[Tensor, Any]) -> None:
        """Step with the numbers that stand in the group, on the state in ``optimizer.state``."""
        self._check(held)
        if self._values is None or not unchanged([numbers], [self._values]):
            check_shapes(self._tx, numbers)
            self._now = with_hyperparams(self._tx, numbers).prepare_all()
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
        """Write the next state to where the last one lies."""
        for (key, name), old, new in zip(self._leaves, before, after, strict=True):
            if new is None or new is old:
                continue
            if name is not None:
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)
            else:
                for x in self.pieces.flat:
                    held[x][key] = new
