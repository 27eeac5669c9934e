"""Describe the leaves of a state without allocating it: names, global shapes and dtypes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from muonfx import tree
from muonfx.checkpoint.names import named_tensors
from muonfx.core import Transform
from muonfx.core.checks import check_tree
from muonfx.core.precision import product_dtypes
from muonfx.core.transform import require_transform
from muonfx.core.value import strip_transparent
from muonfx.tree import PyTree, Spec


def described(spec: Spec) -> str:
    """Return a shape and dtype as text for messages, such as "(2, 3) float32"."""
    return f"{spec.shape} {str(spec.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class StateSpec:
    """The names, global shapes and dtypes of a state's leaves, without their values.

    `muonfx.spec` returns it, and `muonfx.checkpoint.load` accepts it in place of a state. Iteration gives the names.

    Attributes:
        leaves: a dict from name to `muonfx.tree.Spec` (shape and dtype), in the order of the state; it omits None.
        fingerprint: a hash of the structure of the transform; None if the transform is not known.
        chain: the code that constructs the transform; None if the transform is not known.

    >>> import muonfx as mfx
    >>> spec = mfx.spec(mfx.momentum(), {"w": torch.zeros(2, 3, dtype=torch.bfloat16)})
    >>> print(spec)
    trace/w  (2, 3)  float32
    >>> spec["trace/w"].dtype, spec.nbytes
    (torch.float32, 24)
    """

    leaves: dict[str, Spec]
    fingerprint: str | None = None
    chain: str | None = None
    _treedef: Any = field(default=None, repr=False)
    _names: tuple[str, ...] = field(default=(), repr=False)
    _tx: Transform | None = field(default=None, repr=False, compare=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self.leaves)

    def __len__(self) -> int:
        return len(self.leaves)

    def __contains__(self, name: object) -> bool:
        return name in self.leaves

    def __getitem__(self, name: str) -> Spec:
        return self.leaves[name]

    def __str__(self) -> str:
        """Return one line for each leaf: name, shape, dtype."""
        name_width = max([len(name) for name in self.leaves], default=0)
        shape_width = max([len(str(spec.shape)) for spec in self.leaves.values()], default=0)
        lines: list[str] = []
        for name, spec in self.leaves.items():
            dtype_name = str(spec.dtype).removeprefix("torch.")
            lines.append(f"{name:{name_width}}  {spec.shape!s:{shape_width}}  {dtype_name}")
        return "\n".join(lines)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole state: each leaf is counted once, at its global shape."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @classmethod
    def of(cls, state: PyTree) -> StateSpec:
        """Return the `StateSpec` (names, global shapes and dtypes of the leaves) of an existing state.

        Raises:
            TypeError: a leaf is not a tensor; the message names it.

        >>> print(StateSpec.of({"w": torch.zeros(2)}))
        w  (2,)  float32
        """
        return spec_of_named(named_tensors(state), state)

    def of_chain(self, tx: Transform) -> StateSpec:
        """Return a copy with the fingerprint of a transform (a hash of its structure).

        A `load` that receives the copy raises an error if the checkpoint has another fingerprint, because another
        transform wrote it.
        """
        return replace(self, fingerprint=tx.fingerprint, chain=repr(strip_transparent(tx)), _tx=tx)

    def products(self, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
        """Return the dtype in which each transform multiplies matrices, as in ``{"orthogonalize": "bfloat16"}``.

        It is the dtype for parameters of this ``dtype`` on this ``device``. The dict is empty if no transform is known.
        """
        if self._tx is None:
            return {}
        return product_dtypes(strip_transparent(self._tx), [dtype], device)

    def unflatten(self, leaves: dict[str, Any]) -> PyTree:
        """Return a state tree with the leaves in a dict by name; leaves without an entry in the dict are None."""
        return tree.unflatten(self._treedef, [leaves.get(name) for name in self._names])


def spec_of_named(named: list[tuple[str, Any]], values: PyTree, tx: Transform | None = None) -> StateSpec:
    """Return the `StateSpec` of the tree ``values``; ``named`` is a list of its (name, leaf) pairs."""
    leaves = {name: Spec(tuple(leaf.shape), leaf.dtype) for name, leaf in named if leaf is not None}
    names = tuple(name for name, _ in named)
    state_spec = StateSpec(leaves, _treedef=tree.flatten(values)[1], _names=names)
    if tx is None:
        return state_spec
    return state_spec.of_chain(tx)


def spec(tx: Transform, params: PyTree) -> StateSpec:
    """Return the names, shapes and dtypes of a transform's state, without allocating the state.

    Args:
        tx: the transform.
        params: the parameters on any device, including meta; only global shapes and dtypes are used.

    Returns:
        A `StateSpec`, made by ``tx.init`` on meta tensors. `muonfx.checkpoint.load` accepts it in place of a state.

    Raises:
        TypeError: ``tx`` is not a transform, or a parameter is not a floating-point tensor.

    Example:
        >>> import muonfx as mfx
        >>> params = {
        ...     "up.weight": torch.empty(50_000, 8_000, device="meta"),
        ...     "up.bias": torch.empty(50_000, device="meta"),
        ... }
        >>> spec = mfx.spec(mfx.muon_with_adamw(1e-2, labels=mfx.routing.default_labels_by_name), params)
        >>> print(spec)
        adamw/scale_by_adam/count       ()             int64
        adamw/scale_by_adam/mu/up.bias  (50000,)       float32
        adamw/scale_by_adam/nu/up.bias  (50000,)       float32
        muon/momentum/trace/up.weight   (50000, 8000)  float32
        >>> spec.nbytes
        1600400008
    """
    require_transform("tx", tx)
    check_tree("params", params)
    meta = tree.map(lambda leaf: torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta"), params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # labels without a parameter are reported when the state itself is made
        state = strip_transparent(tx).init(meta)
    return spec_of_named(named_tensors(state), state, tx)
