"""The target of a load: the leaves that are wanted, and where their values go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonfx.checkpoint.index import Index
from muonfx.checkpoint.names import named_leaves
from muonfx.checkpoint.rules import Rules, match
from muonfx.checkpoint.spec import StateSpec, spec_of
from muonfx.core import Transform
from muonfx.tree import PyTree, Spec, flatten, unflatten

__all__ = ["Target"]


@dataclass(frozen=True)
class Target:
    """The tree that a load is to make, of whatever checkpoint it finds."""

    like: PyTree | StateSpec
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
        """Check what a caller of ``load`` gave; with ``whole``, that ``like`` holds no pieces of tensors."""
        if tx is not None and not isinstance(tx, Transform):
            raise TypeError(f"tx must be a muonfx.Transform or None, found {tx!r}")
        if isinstance(like, StateSpec):
            return cls(like, like if tx is None else like.of_chain(tx), rules, device, section)
        target = cls(like, spec_of(like, section, tx), rules, device, section)
        for name, leaf in target._leaves().items():
            if whole and hasattr(leaf, "__create_chunk_list__") and getattr(leaf, "whole", None) is None:
                raise TypeError(
                    f"the leaf {name!r} is a {type(leaf).__name__}, of which each rank holds a part: say group="
                )
        return target

    def make_room(self, index: Index, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Find the wanted leaves in the checkpoint at ``where``, and make room for their values.

        Returns:
            The leaves by name, those that the checkpoint lacks, and may, with the values of ``like``; and those that
            are to be read, by their names in the checkpoint.

        Raises:
            MismatchError: the checkpoint is not what is wanted.
            ValueError: a leaf that the checkpoint lacks has no values in ``like`` either.
        """
        sources = match(index, self.want, self.rules, section=self.section, where=where)
        leaves = {
            name: self._empty(leaf) if sources[name] is not None else self._copy(name, leaf)
            for name, leaf in self._leaves().items()
        }
        return leaves, {source: leaves[name] for name, source in sources.items() if source is not None}

    def rebuild(self, leaves: dict[str, Any]) -> PyTree:
        """Put leaves, by name, into the structure of ``like``."""
        if isinstance(self.like, StateSpec):
            return self.like.unflatten(leaves)
        return unflatten(flatten(self.like)[1], [leaves.get(name) for name, _ in named_leaves(self.like, self.section)])

    def _leaves(self) -> dict[str, Any]:
        if isinstance(self.like, StateSpec):
            return dict(self.like.leaves)
        return {name: leaf for name, leaf in named_leaves(self.like, self.section) if leaf is not None}

    def _empty(self, leaf: Any) -> Any:
        """Room for the values of a leaf."""
        if isinstance(leaf, Spec):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device or "cpu")
        if isinstance(leaf, Tensor):
            where = self.device or (leaf.device if leaf.device.type != "meta" else "cpu")
            return torch.empty_like(leaf, device=where, requires_grad=False)
        return leaf.empty_like()

    def _copy(self, name: str, leaf: Any) -> Any:
        """A copy of what ``like`` has for a leaf that is missing in a checkpoint."""
        if isinstance(leaf, Spec) or (isinstance(leaf, Tensor) and leaf.device.type == "meta"):
            raise ValueError(
                f"the leaf {name!r} is missing in the checkpoint, which is allowed, but like= has no values to keep: "
                "give a state, tx.init(params), instead of a spec"
            )
        room = self._empty(leaf)
        room.copy_(leaf.detach() if isinstance(leaf, Tensor) else leaf)
        return room
