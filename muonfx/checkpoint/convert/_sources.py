"""Optimizers in the form of torch.optim: param_groups, and a state for each parameter under their own keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonfx.checkpoint.convert._leaves import Leaf, filled, flat, gathered
from muonfx.core import Transform, chain
from muonfx.select.partition import partition
from muonfx.transforms import add_decayed_weights, momentum, orthogonalize, scale_by_learning_rate, scale_by_shape
from muonfx.transforms.scale import ShapeRule
from muonfx.tree import PyTree
from muonfx.tree.display import format_list

__all__ = ["Entry", "Given", "Group", "Keys", "Optim", "Options", "Source", "composed", "muon_chain"]

Group = Mapping[str, Any]
"""The hyperparameters of some parameters, under the optimizer's own names."""
Entry = Mapping[str, Any]
"""The optimizer's state of one parameter, under its own keys."""
Options = Mapping[str, Any]
"""Arguments for `orthogonalize` from the caller of a recipe."""
Optim = torch.optim.Optimizer | Mapping[str, Any]
"""An optimizer, or its ``state_dict()``."""
Given = Optim | Sequence[Optim]
"""An optimizer, its ``state_dict()``, or several of these that share the parameters of one model."""


@dataclass(frozen=True)
class Keys:
    """The keys of the tensors in an entry of one kind; ``step`` is None if the optimizer does not count steps."""

    first: str
    second: str | None = None
    step: str | None = None


@dataclass(frozen=True)
class Source:
    """The form in which one optimizer class stores its state."""

    name: str
    kind: Callable[[Group, Entry], str]  # returns "muon", "adamw" or "lion"
    keys: Mapping[str, Keys]  # by kind
    heavy_ball: bool  # True if momenta are sums, False if they are averages
    chain_of: Callable[[Group, str, torch.Size, Options], Transform]
    make_step: Callable[[int], object] = int  # converts a number of steps to the type in the entry

    def read(
        self, given: Given, tx: Transform, params: PyTree, names: Sequence[str] | None, step: int | None
    ) -> PyTree:
        """Make the state of a transform from the optimizer's state."""
        leaves = {name: self._leaf(group, entry) for name, group, entry in self._entries(given, params, names)}
        return filled(tx, params, leaves, heavy_ball=self.heavy_ball, step=step)

    def recipe(self, given: Given, params: PyTree, names: Sequence[str] | None, options: Options) -> Transform:
        """Return the chain that computes the same update as the optimizer."""
        shapes = {name: param.shape for name, param in flat(params).items()}
        found: dict[str, tuple[str, Transform]] = {}
        for name, group, entry in self._entries(given, params, names):
            kind = self.kind(group, entry)
            try:
                found[name] = kind, self.chain_of(group, kind, shapes[name], options)
            except KeyError as missing:
                raise ValueError(f"{name!r}: its group in {self.name} has no {missing}, only {sorted(group)}") from None
            except ValueError as problem:
                raise ValueError(f"{name!r}: {problem}") from None
        return composed(found)

    def write(self, state: PyTree, given: Optim, params: PyTree, names: Sequence[str] | None) -> dict[str, Any]:
        """Return a state dict of the optimizer with its own groups and a transform's state."""
        found = gathered(state)
        saved, of_names = _named(given, flat(params), names, self.name)
        entries: dict[int, dict[str, Any]] = {}
        for group, group_names in zip(saved["param_groups"], of_names, strict=True):
            for index, name in zip(group["params"], group_names, strict=True):
                old = saved["state"].get(index, {})
                kind = self.kind(group, old)
                leaf = found.get(name)
                if leaf is None or leaf.kind != kind:
                    has = "nothing" if leaf is None else f"a {leaf.kind} state"
                    raise ValueError(f"{name!r} has a {kind} state in {self.name}; the muonfx state has {has} for it")
                entries[index] = {**old, **self._entry(leaf)}
        return {**saved, "state": entries}

    def _entries(self, given: Given, params: PyTree, names: Sequence[str] | None) -> list[tuple[str, Group, Entry]]:
        several = list(given) if isinstance(given, Sequence) else [given]
        found: list[tuple[str, Group, Entry]] = []
        for one in several:
            saved, of_names = _named(one, flat(params), names, self.name)
            for group, group_names in zip(saved["param_groups"], of_names, strict=True):
                for index, name in zip(group["params"], group_names, strict=True):
                    found.append((name, group, saved["state"].get(index, {})))
        seen = [name for name, _, _ in found]
        if twice := sorted({name for name in seen if seen.count(name) > 1}):
            raise ValueError(f"{self.name}: {twice[0]!r} is in two optimizers or groups")
        return found

    def _leaf(self, group: Group, entry: Entry) -> Leaf:
        kind = self.kind(group, entry)
        keys = self.keys[kind]
        counted = None if keys.step is None else entry.get(keys.step, group.get(keys.step))
        second = None if keys.second is None else entry.get(keys.second)
        return Leaf(kind, entry.get(keys.first), second, None if counted is None else int(counted))

    def _entry(self, leaf: Leaf) -> dict[str, Any]:
        keys = self.keys[leaf.kind]
        assert leaf.first is not None
        entry: dict[str, Any] = {keys.first: leaf.first.clone()}
        if keys.second is not None and leaf.second is not None:
            entry[keys.second] = leaf.second.clone()
        if keys.step is not None and leaf.step is not None:
            entry[keys.step] = self.make_step(leaf.step)
        return entry


def _named(
    given: Optim, params: Mapping[str, Tensor], names: Sequence[str] | None, what: str
) -> tuple[dict[str, Any], list[list[str]]]:
    """Return a state dict, and the names of the parameters in each of its groups."""
    if isinstance(given, torch.optim.Optimizer):
        known = {id(param): name for name, param in params.items()}
        members = [param for group in given.param_groups for param in group["params"]]
        if all(id(param) in known for param in members):
            names = [known[id(param)] for param in members]
        given = given.state_dict()
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise TypeError(f"{what}: expected an optimizer or its state_dict(), found {type(given).__name__}")
    saved = dict(given)
    groups: list[Group] = list(saved["param_groups"])
    if names is None and all("param_names" in group for group in groups):
        found = [list(group["param_names"]) for group in groups]
    else:
        count = sum(len(group["params"]) for group in groups)
        if names is None or len(names) != count:
            have = "none" if names is None else str(len(names))
            raise ValueError(
                f"{what}: its {count} parameters have no names; give names=, their names in the optimizer's order "
                f"(found {have}), or the optimizer itself with the parameters that it holds"
            )
        rest = iter(names)
        found = [[next(rest) for _ in group["params"]] for group in groups]
    if unknown := sorted({name for group in found for name in group} - params.keys()):
        raise ValueError(f"{what}: no parameter is called {format_list(unknown)}")
    return saved, found


def composed(found: Mapping[str, tuple[str, Transform]]) -> Transform:
    """Combine one transform per parameter: a single transform if all are equal, else a partition by kind."""
    labels: dict[str, str] = {}
    made: dict[str, Transform] = {}
    for name, (kind, tx) in found.items():
        label = next((label for label, known in made.items() if known == tx), None)
        if label is None:
            number = sum(1 for known in made if known.partition("_")[0] == kind)
            label = f"{kind}_{number + 1}" if number else kind
            made[label] = tx
        labels[name] = label
    return next(iter(made.values())) if len(made) == 1 else partition(made, labels)


def muon_chain(
    decay: Any,
    *,
    nesterov: bool,
    heavy_ball: bool,
    rule: ShapeRule | None,
    lr: Any,
    weight_decay: Any,
    options: Options,
    debias: bool = False,
    **more: Any,
) -> Transform:
    """Return the chain of Muon; ``more`` is passed to `orthogonalize`, and its view also to `scale_by_shape`."""
    orthogonal = orthogonalize(**{**more, **options})
    # float(), since some optimizers hold these numbers in tensors.
    kept = momentum(float(decay), nesterov=nesterov, heavy_ball=heavy_ball, debias=debias)
    return chain(
        kept,
        orthogonal,
        *([scale_by_shape(rule, view=orthogonal.arguments["view"])] if rule is not None else []),
        add_decayed_weights(float(weight_decay)),
        scale_by_learning_rate(float(lr)),
    )
