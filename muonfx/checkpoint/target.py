"""The target of a load: the requested leaves and the tensors that receive their values."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonfx.checkpoint.index import Index
from muonfx.checkpoint.names import named_tensors
from muonfx.checkpoint.rules import Rules, match
from muonfx.checkpoint.spec import StateSpec, spec_of_named
from muonfx.core import Transform
from muonfx.tree import PyTree, Spec

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """The tree that a load produces, independent of the checkpoint that it reads."""

    like: Mapping[str, Any]
    """The leaves of the caller's tree by name: tensors, shards of tensors, or `Spec`s."""
    want: StateSpec
    rules: Rules
    device: torch.device | str | None
    section: str
    """The top level of the names: "" for a state, "params" for parameters."""

    @classmethod
    def of(
        cls,
        like: PyTree | StateSpec,
        tx: Transform | None,
        rules: Rules,
        device: torch.device | str | None,
        section: str,
        *,
        whole: bool,
    ) -> Target:
        """Check the arguments of ``load``; with ``whole``, require that ``like`` holds no shards of tensors."""
        if tx is not None and not isinstance(tx, Transform):
            raise TypeError(f"tx must be a muonfx.Transform or None, found {tx!r}")
        if isinstance(like, StateSpec):
            return cls(like.leaves, like if tx is None else like.of_chain(tx), rules, device, section)
        named = named_tensors(like, section)
        leaves = {name: leaf for name, leaf in named if leaf is not None}
        for name, leaf in leaves.items():
            if whole and hasattr(leaf, "__create_chunk_list__") and getattr(leaf, "whole", None) is None:
                raise TypeError(
                    f"the leaf {name!r} is a {type(leaf).__name__}, of which each rank holds a part: say group="
                )
        return cls(leaves, spec_of_named(named, like, tx), rules, device, section)

    def make_room(self, index: Index, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Allocate the target leaves; return all by name, and those to read by their names in the checkpoint."""
        sources = match(index, self.want, self.rules, section=self.section, where=where)
        self._warn_of_products(index, where)
        leaves = {
            name: self._empty(leaf) if sources[name] is not None else self._copy(name, leaf)
            for name, leaf in self.like.items()
        }
        return leaves, {source: leaves[name] for name, source in sources.items() if source is not None}

    def _warn_of_products(self, index: Index, where: str) -> None:
        """Warn if the run that wrote the checkpoint computed its matrix products in other dtypes."""
        real = (leaf.device for leaf in self.like.values() if isinstance(leaf, Tensor) and not leaf.is_meta)
        device = torch.device(self.device or next(real, "cpu"))
        # A state's leaves do not give the parameters' dtype, but the record does: products are float64 exactly for
        # parameters that are float64.
        wide, other = (self.want.products(dtype, device) for dtype in (torch.float64, torch.float32))
        for name, saved in index.products.items():
            now = (wide if saved == "float64" else other).get(name, saved)
            if saved != now:
                warnings.warn(
                    f"{where}: the matrix products of {name!r} were computed in {saved} and are now in {now}, so "
                    f"the resumed run computes other numbers. To continue as before, give it dtype=torch.{saved}",
                    UserWarning,
                    stacklevel=2,
                )

    def rebuild(self, leaves: dict[str, Any]) -> PyTree:
        """Put leaves, given by name, into the structure of the caller's tree."""
        return self.want.unflatten(leaves)

    def _empty(self, leaf: Any) -> Any:
        """Allocate a tensor for the values of a leaf."""
        if isinstance(leaf, Spec):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device or "cpu")
        if isinstance(leaf, Tensor):
            where = self.device or (leaf.device if leaf.device.type != "meta" else "cpu")
            if type(leaf) is Tensor and leaf.is_meta and leaf.is_contiguous():  # `empty_like` is slow for meta tensors
                return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=where)
            return torch.empty_like(leaf, device=where, requires_grad=False)
        return leaf.empty_like()

    def _copy(self, name: str, leaf: Any) -> Any:
        """Copy the value in ``like`` of a leaf that is missing in the checkpoint."""
        if isinstance(leaf, Spec) or (isinstance(leaf, Tensor) and leaf.device.type == "meta"):
            raise ValueError(
                f"the leaf {name!r} is missing in the checkpoint, which is allowed, but like= has no values to keep: "
                "give a state, tx.init(params), instead of a spec"
            )
        room = self._empty(leaf)
        room.copy_(leaf.detach() if isinstance(leaf, Tensor) else leaf)
        return room
