"""The target of a load: the tree to fill, the allocation of its tensors, and warnings about the transform."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muonfx.checkpoint.index import Index
from muonfx.checkpoint.match import Rules, match
from muonfx.checkpoint.names import named_tensors
from muonfx.checkpoint.shards import require_whole
from muonfx.checkpoint.spec import StateSpec, spec_of_named
from muonfx.core import Transform
from muonfx.core.checks import warn_caller
from muonfx.tree import PyTree, Spec

_NUMBERS = re.compile(r"(\w+)=(-?(?:torch\.tensor\()?[\d.][\w.+-]*)")
"""A numeric argument in the ``repr`` of a transform: its name and the number."""


@dataclass(frozen=True)
class Target:
    """The tree that one `load` fills, and the differences from the checkpoint that its caller allows."""

    like: Mapping[str, Any]
    """The leaves of the caller's tree by name: tensors, shards of tensors, or `Spec`s."""
    expected: StateSpec
    rules: Rules
    device: torch.device | str | None
    section: str
    """The first level of the leaf names: "params" for parameters, "" (none) for a state."""

    @classmethod
    def of(
        cls,
        like: PyTree | StateSpec,
        tx: Transform | None,
        rules: Rules,
        device: torch.device | str | None,
        section: str,
        *,
        is_alone: bool,
    ) -> Target:
        """Return the target of a `load`, and check its arguments; without other ranks, ``like`` may have no shards."""
        if tx is not None and not isinstance(tx, Transform):
            raise TypeError(f"tx must be a muonfx.Transform or None, found {tx!r}")
        if isinstance(like, StateSpec):
            expected = like
            if tx is not None:
                expected = like.of_chain(tx)
            return cls(like.leaves, expected, rules, device, section)
        named = named_tensors(like, section)
        leaves = {name: leaf for name, leaf in named if leaf is not None}
        if is_alone:
            for name, leaf in leaves.items():
                require_whole(name, leaf, "pass group=")
        return cls(leaves, spec_of_named(named, like, tx), rules, device, section)

    def allocate(self, index: Index, where: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Allocate the tensors of the tree, after a check that the checkpoint at the path ``where`` fits.

        Return two dicts: all tensors by leaf name, and the tensors to read by their names in the checkpoint.
        """
        stored_name_of = match(index, self.expected, self.rules, section=self.section, where=where)
        self._warn_of_products(index, where)
        self._warn_of_numbers(index, where)
        leaves: dict[str, Any] = {}
        destinations: dict[str, Any] = {}
        for name, leaf in self.like.items():
            stored_name = stored_name_of[name]
            if stored_name is None:
                leaves[name] = self._copy(name, leaf)
                continue
            if stored_name not in destinations:  # a scalar may be read once for several leaves
                destinations[stored_name] = self._empty(leaf)
            leaves[name] = destinations[stored_name]
        return leaves, destinations

    def filled(self, leaves: Mapping[str, Any]) -> PyTree:
        """Return the tree with leaves that were read. A scalar that was read for several leaves is copied for each."""
        separate: dict[str, Any] = {}
        used: set[int] = set()
        for name, leaf in leaves.items():
            separate[name] = leaf
            if id(leaf) in used:
                separate[name] = leaf.clone()
            used.add(id(leaf))
        return self.expected.unflatten(separate)

    def _warn_of_products(self, index: Index, where: str) -> None:
        """Warn if the transform now computes its matrix products in other dtypes than when the checkpoint was saved."""
        if not index.products:
            return
        device = torch.device(self.device or self._device_of_like())
        # A state's leaves do not give the parameters' dtype, but the record does: products are float64 exactly for
        # parameters that are float64.
        products_of_float64 = self.expected.products(torch.float64, device)
        products_of_others = self.expected.products(torch.float32, device)
        for name, saved_dtype in index.products.items():
            products = products_of_float64 if saved_dtype == "float64" else products_of_others
            dtype = products.get(name, saved_dtype)
            if dtype != saved_dtype:
                warnings.warn(
                    f"{where}: the matrix products of {name!r} were computed in {saved_dtype} and are now in {dtype}, "
                    f"so the resumed run computes other numbers. To continue as before, give it "
                    f"dtype=torch.{saved_dtype}",
                    UserWarning,
                    stacklevel=2,
                )

    def _device_of_like(self) -> torch.device:
        """Return the device of the first tensor of ``like`` with values; the CPU if there is none."""
        for leaf in self.like.values():
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                return leaf.device
        return torch.device("cpu")

    def _warn_of_numbers(self, index: Index, where: str) -> None:
        """Warn if the transform has other numbers than the one that wrote the checkpoint, as its ``repr`` shows."""
        if self.section or index.fingerprint is None or self.expected.fingerprint is None:
            return
        if index.fingerprint != self.expected.fingerprint:
            return  # another chain, which `match` has allowed
        if index.chain == self.expected.chain:
            return
        saved_numbers = _NUMBERS.findall(str(index.chain))
        numbers = _NUMBERS.findall(str(self.expected.chain))
        differences = ["see the chain in muonfx.checkpoint.inspect(path)"]
        if [name for name, _ in saved_numbers] == [name for name, _ in numbers]:
            differences = []
            for (name, saved_number), (_, number) in zip(saved_numbers, numbers, strict=True):
                if saved_number != number:
                    differences.append(f"{name} is {saved_number} in the checkpoint, {number} in the code")
        if not differences:
            return  # only labels differ, which may be written with other names
        warn_caller(
            f"{where}: the checkpoint was saved with other numbers: {'; '.join(differences[:10])}. The code's are "
            "used: a checkpoint has no param_groups. If a torch scheduler has set them, restore the scheduler and the "
            "groups before loading"
        )

    def _empty(self, leaf: Any) -> Any:
        """Allocate a tensor or shard with the shape and dtype of a leaf of ``like``, on the device for the result."""
        if isinstance(leaf, Spec):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device or "cpu")
        if not isinstance(leaf, Tensor):
            return leaf.empty_like()
        device = self.device
        if device is None:
            device = leaf.device if leaf.device.type != "meta" else "cpu"
        return torch.empty_like(leaf, device=device, requires_grad=False)

    def _copy(self, name: str, leaf: Any) -> Any:
        """Return a copy of a leaf of ``like`` that is missing in the checkpoint."""
        if isinstance(leaf, Spec) or (isinstance(leaf, Tensor) and leaf.device.type == "meta"):
            raise ValueError(
                f"like=: found a spec without values for {name!r}, which is missing in the checkpoint, expected a "
                "state with values to keep: pass like=tx.init(params)"
            )
        if isinstance(leaf, Tensor):
            leaf = leaf.detach()
        copied = self._empty(leaf)
        copied.copy_(leaf)
        return copied
