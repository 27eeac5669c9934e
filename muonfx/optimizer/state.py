"""A transform's state as torch sees it: leaves by path, and what must match when a saved state is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from muonfx import tree
from muonfx.tree import PyTree

__all__ = ["by_path", "matched", "path_of"]


def path_of(entries: tuple[Any, ...]) -> str:
    """Write the way to a leaf as it is shown in ``optimizer.state``."""
    return "/".join(map(str, entries))


def by_path(state: PyTree) -> dict[str, Any]:
    """The leaves of a state by path."""
    return {path_of(path): leaf for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True)}


def matched(
    groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]], given: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Pair this optimizer's state leaves with the given values, or raise an error that lists every difference."""
    saved = given["param_groups"]
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
            have, want = given["state"].get(index, {}), state[param]
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
