"""The rows of query and key weights that belong to each attention head."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.core import checks
from muonfx.tree.arguments import check_plain, code_of, plain_kinds
from muonfx.tree.tracing import matches

__all__ = ["AttentionHeads", "Part"]

Span = tuple[int, int]
"""The first index of a range and its end (exclusive)."""

_STR, _INT = plain_kinds("str"), plain_kinds("int")
_ENDINGS = ("", ".weight", ".bias", "_weight", "_bias")


@dataclass(frozen=True, repr=False)
class AttentionHeads:
    """The query and key weights of attention modules, and the rows of these that belong to each head.

    A module's weights and biases are found by name: those of ``layers.0.attn`` under ``query="q_proj"`` are
    ``layers.0.attn.q_proj.weight`` and ``.bias``, or a parameter ``layers.0.attn.q_proj`` itself.

    Args:
        module: a glob over the dotted names of attention modules; these names are the keys of ``max_logits``.
        heads: the number of query heads.
        key_heads: the number of key heads, which divides ``heads``; None: as many. Neighbouring query heads share one.
        query: within the module, the name of what holds the query weights.
        key: the same for the key weights. It may be the very name of ``query``, for fused weights.
        query_rows: the rows that consist of one equal block for each query head. None: all rows; of fused weights
            without ``query_dims``, the first of three parts: queries, keys, and values with as many heads as keys.
        key_rows: the rows of the key heads. None: all, or of fused weights without ``key_dims`` the second part.
        query_dims: within each query head's block, the rows that are its query's; None: the whole block but for
            ``rotary_dims``.
        key_dims: the same for the key, where a block has other things too, such as a value.
        rotary_dims: within each query head's block, the rows that meet a rotary key which all heads share.
        axis: the dim of output features in a weight: 0 for ``nn.Linear``, 1 for ``Conv1D``. Of a bias it is its only
            one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: heads are not a multiple of key heads, or a range is empty or negative.

    Example:
        >>> import muonfx as mfx
        >>> mfx.AttentionHeads("*.self_attn", heads=32, key_heads=8)
        AttentionHeads(module='*.self_attn', heads=32, key_heads=8)
        >>> fused = mfx.AttentionHeads("*.attn", heads=12, query="qkv", key="qkv")
        >>> multi_head_latent = mfx.AttentionHeads(
        ...     "*.self_attn",
        ...     heads=128,
        ...     query="q_b_proj",
        ...     key="kv_b_proj",
        ...     query_dims=(0, 128),
        ...     rotary_dims=(128, 192),
        ...     key_dims=(0, 128),
        ... )
    """

    module: str
    heads: int
    key_heads: int | None = None
    query: str = "q_proj"
    key: str = "k_proj"
    query_rows: Span | None = None
    key_rows: Span | None = None
    query_dims: Span | None = None
    key_dims: Span | None = None
    rotary_dims: Span | None = None
    axis: int = 0

    def __post_init__(self) -> None:
        for name in ("module", "query", "key"):
            check_plain("AttentionHeads", name, getattr(self, name), _STR)
        check_plain("AttentionHeads", "axis", self.axis, _INT)
        checks.positive_int("AttentionHeads: heads", self.heads)
        if self.key_heads is not None:
            checks.positive_int("AttentionHeads: key_heads", self.key_heads)
        if self.heads % self.keys:
            raise ValueError(
                f"AttentionHeads: heads must be a multiple of key_heads, found {self.heads} and {self.keys}"
            )
        for name in ("query_rows", "key_rows", "query_dims", "key_dims", "rotary_dims"):
            span = getattr(self, name)
            if span is None:
                continue
            if not (type(span) is tuple and len(span) == 2 and all(type(at) is int for at in span)):
                raise TypeError(f"AttentionHeads: {name} must be a tuple (first, end) of ints or None, found {span!r}")
            if not 0 <= span[0] < span[1]:
                raise ValueError(f"AttentionHeads: {name} must have 0 <= first < end, found {span!r}")

    def __repr__(self) -> str:
        return code_of(self)

    @property
    def keys(self) -> int:
        """The number of key heads."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def is_fused(self) -> bool:
        """True if query and key lie in one parameter."""
        return self.query == self.key

    def patterns(self) -> tuple[tuple[str, ...], ...]:
        """Globs over the names of parameters: those of queries, and those of keys."""
        roots = [f"{self.module}."] * bool(self.module) + [""] * matches("", self.module)
        parts = dict.fromkeys((self.query, self.key))
        return tuple(tuple(root + part + ending for root in roots for ending in _ENDINGS) for part in parts)

    def module_of(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """The module that a parameter belongs to, and what it holds: "query", "key" or both."""
        module = ""
        roles: list[str] = []
        for part, role in ((self.query, "query"), (self.key, "key")):
            for ending in _ENDINGS:
                if f".{name}".endswith(f".{part}{ending}"):
                    owner = name[: -len(part + ending)].removesuffix(".")
                    if matches(owner, self.module):
                        module = owner
                        roles.append(role)
        return (module, tuple(roles)) if roles else None

    def parts(self, name: str, size: int, roles: Iterable[str]) -> list[Part]:
        """The rows of a parameter that are scaled, of so many in all.

        Raises:
            ValueError: they do not fit.
        """
        found: list[Part] = []
        for role in roles:
            is_query = role == "query"
            count = self.heads if is_query else self.keys
            rows, dims = (self.query_rows, self.query_dims) if is_query else (self.key_rows, self.key_dims)
            rotary = self.rotary_dims if is_query else None
            start, end = rows or self._all_rows(name, size, is_query=is_query, whole=dims is not None)
            block, rest = divmod(end - start, count)
            if end > size or rest or any(span is not None and span[1] > block for span in (dims, rotary)):
                raise ValueError(
                    f"qk_clip: of {name!r} with {size} rows, {self!r} takes rows {start} to {end} for {count} equal "
                    f"blocks, one for each {role} head, which does not fit: correct the heads or the ranges"
                )
            spans = [dims] if dims is not None else [(0, rotary[0]), (rotary[1], block)] if rotary else [(0, block)]
            found += [Part(role, start, end, count, span) for span in spans]
            if rotary is not None:
                found.append(Part("rotary", start, end, count, rotary))
        return found

    def _all_rows(self, name: str, size: int, *, is_query: bool, whole: bool) -> Span:
        if not self.is_fused or whole:
            return 0, size
        share, rest = divmod(size, self.heads + 2 * self.keys)
        if rest:
            raise ValueError(
                f"qk_clip: {name!r} has {size} rows, which are not {self.heads} queries, {self.keys} keys and "
                f"{self.keys} values of one size: correct the heads of {self!r}, or give query_rows and key_rows"
            )
        split = self.heads * share
        return (0, split) if is_query else (split, split + self.keys * share)


class Part(NamedTuple):
    """Rows of a parameter that are scaled by factors of one kind."""

    kind: str
    """The kind of factor: "query", "key" or "rotary"."""
    start: int
    end: int
    blocks: int
    """The number of equal blocks in these rows, one for each head."""
    span: Span
    """The scaled rows within each block."""

    def of(self, factors: Tensor, size: int) -> Tensor:
        """Return a factor for each row of a parameter; rows outside get 1."""
        block = (self.end - self.start) // self.blocks
        first, last = self.span
        ones = factors.new_ones
        inner = factors.unsqueeze(1).expand(self.blocks, last - first)
        rows = torch.cat([ones(self.blocks, first), inner, ones(self.blocks, block - last)], dim=1).reshape(-1)
        return torch.cat([ones(self.start), rows, ones(size - self.end)])
