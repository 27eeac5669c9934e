"""`summary`: the tensors of a state, an optimizer or a model as a tree with shapes, dtypes, bytes and owners."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muonfx import tree
from muonfx.core import Transform
from muonfx.internal.display import (
    Report,
    Row,
    Shown,
    Table,
    format_bytes,
    format_count,
    format_shape,
)
from muonfx.internal.wrappers import unwrapped_optimizer
from muonfx.optimizer import TransformOptimizer
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.dtensors import local_of, local_tree
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.state import LeafPlacement, describe_state, interval_of, local_state
from muonfx.sharding.transform import Sharded, binding_of
from muonfx.tree import PyTree


@dataclass(frozen=True)
class LeafSummary:
    """One row of a `Summary`: the path, shape, dtype, device and bytes of one tensor, or a None, in the tree."""

    path: tuple[str, ...]
    shape: tuple[int, ...] | None
    """Shape of the whole tensor, also if this rank holds a shard; None for a leaf that is not a tensor."""
    dtype: str
    """Dtype such as "float32"; for a leaf that is not a tensor its type, or "-" for None."""
    device: str
    """Device of this rank's shard; "" for a leaf that is not a tensor."""
    nbytes: int
    """Bytes on this rank."""
    total_nbytes: int
    """Bytes on all ranks, copies counted; equal to `nbytes` if nothing is sharded."""
    owner: str = ""
    """Ranks that hold the leaf, as text; "" if nothing is sharded."""

    @property
    def name(self) -> str:
        """The dotted path in the tree, such as "momentum.trace.fc"."""
        return ".".join(self.path)


@dataclass(frozen=True, repr=False)
class Summary(Shown):
    """A table of the tensors in a state, an optimizer or a model, with their bytes; `summary` returns it.

    ``str()`` returns plain text, and a notebook shows HTML. ``to_text(depth=0)`` shows only the outermost rows.

    Attributes:
        leaves: a `LeafSummary` for each leaf (tensor or None), in the order of the tree.
        ranks: the number of ranks that the leaves are sharded over; None if nothing is sharded.
        params_nbytes: the bytes of the whole parameters, each counted once; None if they are not known.

    >>> import torch
    >>> import muonfx as mfx
    >>> table = mfx.summary(mfx.momentum().init({"w": torch.zeros(4, 4)}))
    >>> table.nbytes, table.by_dtype()
    (64, {'float32': 64})
    """

    leaves: tuple[LeafSummary, ...]
    ranks: int | None = None
    params_nbytes: int | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors (or their shards) that this rank holds."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def total_nbytes(self) -> int:
        """The bytes that all ranks hold together, replicas included."""
        return sum(leaf.total_nbytes for leaf in self.leaves)

    def by_dtype(self) -> dict[str, int]:
        """Return a dict from dtype to the number of bytes on this rank, in descending order of bytes."""
        bytes_of: Counter[str] = Counter()
        for leaf in self.leaves:
            bytes_of[leaf.dtype] += leaf.nbytes
        return {dtype: nbytes for dtype, nbytes in bytes_of.most_common() if nbytes}

    def report(self) -> Report:
        """Return the printed table: a row for each tensor, subtotals for each branch of the tree, and the total.

        The columns are "leaf", "shape", "dtype" and "bytes". For sharded tensors, "owner" is a further column, and
        "this rank" and "all ranks" take the place of "bytes".
        """
        text_titles = ["leaf", *self._text_titles]
        titles_of_bytes = ["bytes"] if self.ranks is None else ["this rank", "all ranks"]
        titles = [*text_titles, *titles_of_bytes]
        columns_of_bytes = range(len(text_titles), len(titles))  # aligned at the right
        table = Table(
            titles, self._rows(self.leaves, 0), right=columns_of_bytes, footers=self._footers()
        )
        if self.params_nbytes:
            return Report((table, self._compared(self.params_nbytes)))
        return Report((table,))

    @cached_property
    def _text_titles(self) -> list[str]:
        """The titles of the columns between the path and the bytes: "shape", "dtype", and others if they are needed."""
        titles = ["shape", "dtype"]
        # A leaf is on an accelerator.
        if any(leaf.device not in ("", "meta", "cpu") for leaf in self.leaves):
            titles.append("device")
        if self.ranks is not None:  # the leaves are sharded over ranks
            titles.append("owner")
        return titles

    def _rows(self, leaves: Sequence[LeafSummary], depth: int) -> list[Row]:
        """Return a row for each entry of the paths at a depth: at depth 0, "momentum" and "scale_by_adam"."""
        leaves_of: dict[tuple[str, ...], list[LeafSummary]] = {}
        for leaf in leaves:
            # A slice, because it is empty where an index would raise: a tree that is one tensor has an empty path.
            leaves_of.setdefault(leaf.path[depth : depth + 1], []).append(leaf)
        return [self._row(group, depth) for group in leaves_of.values()]

    def _row(self, leaves: list[LeafSummary], depth: int) -> Row:
        """Return the row of a branch of the tree, with a child row for each branch or leaf in it.

        For the paths ("adam", "mu", "w") and ("adam", "mu", "b"), the row has the title "adam.mu", and its children
        have the titles "w" and "b".

        Args:
            leaves: the leaves of the branch, whose paths begin with the same entries.
            depth: how many of these entries the titles of the rows around this one have: 1 in the row of "w".
        """
        path = leaves[0].path
        if len(leaves) == 1:
            # A tree that is a single tensor has an empty path.
            title = ".".join(path[depth:]) or "-"
            return self._sum_row(title, leaves, _texts(leaves[0]))
        # The title has all entries that the paths share, "adam" and "mu". The loop ends, since no two paths are equal.
        end = depth + 1
        while all(leaf.path[end] == path[end] for leaf in leaves):
            end += 1
        title = ".".join(path[depth:end])
        return self._sum_row(title, leaves, children=self._rows(leaves, end))

    def _footers(self) -> list[Row]:
        """Return the last rows of the table: the total of all tensors, and of each dtype if there are several."""
        # Others are None, or no tensors.
        tensors = [leaf for leaf in self.leaves if leaf.shape is not None]
        tensors_of_dtype: dict[str, list[LeafSummary]] = {}
        for leaf in tensors:
            tensors_of_dtype.setdefault(leaf.dtype, []).append(leaf)
        footers = [
            self._sum_row(f"total of {format_count(len(tensors), 'tensor', 'tensors')}", tensors)
        ]
        if len(tensors_of_dtype) > 1:  # with one dtype, its total would repeat the first row
            for dtype, group in tensors_of_dtype.items():
                footers.append(
                    self._sum_row(
                        format_count(len(group), "tensor", "tensors"), group, {"dtype": dtype}
                    )
                )
        return footers

    def _sum_row(
        self,
        title: str,
        leaves: Sequence[LeafSummary],
        texts: Mapping[str, str] = {},
        children: Sequence[Row] = (),
    ) -> Row:
        """Return a row of the table with the bytes of one or more leaves together.

        For two leaves of 512 B, the cells are "adam.mu", "", "" and "1.00 KiB": without ``texts``, the shape and the
        dtype are empty.

        Args:
            title: the first cell, such as "adam.mu".
            leaves: the leaves whose bytes are added.
            texts: the cells between the title and the bytes, by the title of the column: {"dtype": "float32"}.
            children: the rows below this one.
        """
        cells = [title]
        for column in self._text_titles:  # "shape", "dtype" and others
            cells.append(texts.get(column, ""))
        nbytes = sum(leaf.nbytes for leaf in leaves)
        cells.append(format_bytes(nbytes))
        if self.ranks is not None:  # the leaves are sharded
            total_nbytes = sum(leaf.total_nbytes for leaf in leaves)
            cells.append(format_bytes(total_nbytes))
        return Row(tuple(cells), tuple(children))

    def _compared(self, params_nbytes: int) -> str:
        """Return the last line of a summary: "1.68 times the 768 B of the parameters".

        For a sharded state, it also compares the bytes on all ranks.
        """
        ratio = self.nbytes / params_nbytes
        size = format_bytes(params_nbytes)
        if self.ranks is None:  # nothing is sharded
            return f"{ratio:.2f} times the {size} of the parameters"
        total_ratio = self.total_nbytes / params_nbytes
        on_this_rank = f"{ratio:.2f} times the {size} of the whole parameters on this rank"
        return f"{on_this_rank}, {total_ratio:.2f} times over {format_count(self.ranks, 'rank', 'ranks')}"


def _texts(leaf: LeafSummary) -> dict[str, str]:
    """Return the cells of a leaf by the title of the column."""
    shape = "-" if leaf.shape is None else format_shape(leaf.shape)
    return {
        "shape": shape,
        "dtype": leaf.dtype,
        "device": leaf.device or "-",
        "owner": leaf.owner or "-",
    }


def summary(what: PyTree, params: PyTree = None) -> Summary:
    """Return a table of the tensors of a state, an optimizer or a model: shapes, dtypes, bytes and owners.

    Args:
        what: a state or any other tree of tensors; a `TransformOptimizer`; a model, for its parameters; a transform,
            with ``params``, for the state that it would create, which is not allocated; or a pair of a transform and
            its state, which shows for a sharded state the owners (the ranks that hold each leaf).
        params: the parameters, a tree of tensors or a model, to compare the bytes with. For a sharded transform and its
            state, pass this rank's parameters; this is required only before the first use of the transform, and only if
            its layout (which rank holds which shard) has other names for them.

    Returns:
        A `Summary`, which prints as a table in a terminal and is shown as HTML in a notebook. The values of tensors
        are not read, so the host does not wait for a device.

    Raises:
        TypeError: a transform alone, without ``params``, or a value that is not a tree of tensors.
        ShardingError: the state does not belong to the sharded transform of the pair.

    >>> import torch
    >>> import muonfx as mfx
    >>> params = {"wte": torch.zeros(16, 8), "fc": torch.zeros(8, 8)}
    >>> tx = mfx.muon_with_adamw(1e-3, 4e-3, labels={"wte": "adamw", "fc": "muon"})
    >>> mfx.summary(tx.init(params), params)
    leaf                    shape   dtype       bytes
    adamw.scale_by_adam                      1.01 KiB
      count                 scalar  int64         8 B
      mu.wte                16 x 8  float32     512 B
      nu.wte                16 x 8  float32     512 B
    muon.momentum.trace.fc  8 x 8   float32     256 B
    -------------------------------------------------
    total of 4 tensors                       1.26 KiB
    1 tensor                        int64         8 B
    3 tensors                       float32  1.25 KiB
    <BLANKLINE>
    1.68 times the 768 B of the parameters
    """
    if isinstance(what, torch.optim.Optimizer):
        what = unwrapped_optimizer(what)
    if isinstance(what, TransformOptimizer):
        return _summarize(
            what.transform, what.transform_state, params=_params_of(what), local_params=None
        )
    params = _without_module(params)
    if isinstance(what, Transform):
        return _summarize(what, _state_on_meta(what, params), params=params, local_params=params)
    if type(what) is tuple and len(what) == 2 and isinstance(what[0], Transform):
        tx, state = what
        return _summarize(tx, state, params=params, local_params=params)
    values = _without_module(what)
    _require_tensors(values)
    return Summary(tuple(_plain_leaves(values)), None, _nbytes_of(params))


def _params_of(optimizer: TransformOptimizer) -> dict[str, Tensor]:
    """Return the parameters of an optimizer by name."""
    params: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        params.update(zip(group["param_names"], group["params"], strict=True))
    return params


def _state_on_meta(tx: Transform, params: PyTree) -> PyTree:
    """Return the state that a transform would create for parameters, on the meta device, which allocates nothing.

    Its tensors have shapes and dtypes, which a summary shows, and no values.
    """
    if params is None:
        raise TypeError(
            f"summary of {tx.name} needs parameters: give the state, summary(tx.init(params)), or summary(tx, "
            "params) for the state that it would make"
        )
    meta_params = tree.map(lambda leaf: torch.empty_like(local_of(leaf), device="meta"), params)
    with warnings.catch_warnings():  # the init of the real state warns
        warnings.simplefilter("ignore")
        return tx.init(meta_params)


def _without_module(tree_or_model: PyTree) -> PyTree:
    """Return the parameters of a model as a dict; a tree is returned unchanged."""
    if isinstance(tree_or_model, nn.Module):
        return dict(tree_or_model.named_parameters())
    return tree_or_model


def _require_tensors(values: PyTree) -> None:
    """Raise TypeError for an argument of `summary` that is no tree of tensors, such as ``{"w": 0.5}`` or None.

    A tree without any leaf, such as ``{}``, is the state of a transform without state, and is accepted.
    """
    if type(values) is tuple and len(values) == 2 and isinstance(values[1], Transform):
        raise TypeError(
            "summary: found a pair (state, transform), expected (transform, state): swap the two"
        )
    leaves = [leaf for leaf in tree.leaves(values) if leaf is not None]
    has_only_other_leaves = bool(leaves) and not any(map(_is_tensor, leaves))
    if values is None or has_only_other_leaves:
        raise TypeError(
            f"summary: found {type(values).__name__} with no tensor in it; expected a state, a "
            "muonfx.TransformOptimizer, a model, a tree of tensors, or a transform with its parameters"
        )


# -------------------------------------------------------------------------------------------------------- the leaves


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor | FlatShard)


def _plain_leaves(values: PyTree) -> list[LeafSummary]:
    """Return a row for each leaf of a tree: its path, shape, dtype, device and bytes.

    A DTensor or flat shard is listed with its global shape, and with the bytes of this rank's part.
    """
    summaries: list[LeafSummary] = []
    for path, leaf in zip(tree.paths(values), tree.leaves(values), strict=True):
        global_shape = tuple(leaf.shape) if _is_tensor(leaf) else None
        summaries.append(_leaf_of(path, global_shape, local_of(leaf)))
    return summaries


def _leaf_of(path: Iterable[object], shape: tuple[int, ...] | None, shard: object) -> LeafSummary:
    """Return the `LeafSummary` of a leaf: a tensor, a shard of one, None, or another value.

    ``shape`` is the shape of the whole tensor. Both byte fields have the bytes of this rank. For a sharded state, the
    caller replaces ``total_nbytes`` by the bytes on all ranks.

    >>> _leaf_of(["mu", "w"], (4, 4), torch.zeros(4, 4))
    LeafSummary(path=('mu', 'w'), shape=(4, 4), dtype='float32', device='cpu', nbytes=64, total_nbytes=64, owner='')
    """
    path_texts = tuple(map(str, path))
    data = shard.data if isinstance(shard, FlatShard) else shard
    if isinstance(data, Tensor):
        return LeafSummary(
            path=path_texts,
            shape=shape,
            dtype=_written(data.dtype),
            device=str(data.device),
            nbytes=data.nbytes,
            total_nbytes=data.nbytes,
        )
    type_name = "-" if data is None else type(data).__name__
    return LeafSummary(path_texts, shape, type_name, device="", nbytes=0, total_nbytes=0)


def _written(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------- states over ranks


def _summarize(tx: Transform, state: PyTree, *, params: PyTree, local_params: PyTree) -> Summary:
    """Return the summary of the state of a transform, which compares its bytes with the size of the parameters.

    Args:
        tx: the transform. If it is sharded, the summary shows which ranks hold each tensor.
        state: its state; of a sharded transform, this rank's shards.
        params: the parameters, for their size; None if they are not known.
        local_params: this rank's parameters, needed only before the first use of a sharded transform.
    """
    if isinstance(tx, Sharded):
        return _summary_over_ranks(tx, state, local_params)
    return Summary(tuple(_plain_leaves(state)), ranks=None, params_nbytes=_nbytes_of(params))


def _summary_over_ranks(tx: Sharded, state: PyTree, local_params: PyTree) -> Summary:
    """Return the summary of the state of a sharded transform, with the ranks that hold each tensor.

    Args:
        tx: the sharded transform.
        state: this rank's shards of its state.
        local_params: this rank's parameters, needed only before the first use of the transform.
    """
    # The binding of the transform to its parameters has the layout: which rank has which part of each parameter. After
    # the first use, it also has meta tensors like the parameters, which take their place.
    binding, inner_tx, bound_params = binding_of(tx, local_params)
    layout = binding.layout
    # For each tensor of the state, the ranks that hold it.
    placements = describe_state(binding, inner_tx, bound_params)
    shards = local_state(binding, inner_tx, bound_params, state)
    binding.check_state(inner_tx, local_tree(bound_params), shards, with_dtypes=False)
    summaries: list[LeafSummary] = []
    for path, placement, leaf in zip(
        tree.paths(shards), placements, tree.leaves(shards), strict=True
    ):
        summaries.append(_sharded_leaf(layout, path, placement, leaf))
    params_nbytes = sum(spec.nbytes for spec in layout.specs.values())
    return Summary(tuple(summaries), layout.size, params_nbytes)


def _sharded_leaf(
    layout: Layout, path: Sequence[object], placement: LeafPlacement | None, leaf: object
) -> LeafSummary:
    """Return the `LeafSummary` of a leaf of a sharded state, with its bytes on all ranks and its owners.

    The owners are the ranks that hold it, such as "rank 3" or "cut over ranks 0, 1".

    Args:
        layout: which rank has which part of each parameter.
        path: the path of the leaf in the state.
        placement: the position of the leaf on the ranks; None for a leaf that is None.
        leaf: this rank's shard of it.
    """
    if placement is None:
        return _leaf_of(path, None, leaf)
    parts = _parts_of(placement, layout)
    elements = 0  # on all ranks, copies counted
    holding_ranks: set[int] = set()
    for numel, ranks in parts:
        elements += numel * len(ranks)
        holding_ranks.update(ranks)
    owner = _ranks(holding_ranks, layout.size)
    is_cut = len(parts) > 1 and not placement.owned  # matrices that ranks own are whole
    if is_cut:
        owner = f"cut over {owner}"
    total_nbytes = elements * placement.dtype.itemsize
    # This rank's shard may be None, which has no dtype: the placement has it.
    summary_of_shard = _leaf_of(path, tuple(placement.shape), leaf)
    return replace(
        summary_of_shard, dtype=_written(placement.dtype), total_nbytes=total_nbytes, owner=owner
    )


class _Part(NamedTuple):
    """A part of a tensor on some ranks: its number of elements, and the ranks that each have a copy of it."""

    numel: int
    ranks: Sequence[int]


def _parts_of(placement: LeafPlacement, layout: Layout) -> list[_Part]:
    """Return the parts of a leaf of the state that ranks hold.

    For a leaf of 96 elements in two halves on the ranks 0 and 1, they are ``[_Part(48, [0]), _Part(48, [1])]``. If both
    ranks have all elements, the only part is ``_Part(96, [0, 1])``.
    """
    every_rank = range(layout.size)
    if placement.name is None:  # it belongs to no parameter, such as a count
        return [_Part(prod(placement.shape), every_rank)]
    if not placement.owned:  # sharded like its parameter
        return [
            _Part(shard.numel, ranks) for shard, ranks in layout.holders(placement.name).items()
        ]
    # The owner of a matrix, the rank that computes its update, holds its state.
    parts: list[_Part] = []
    for shard in placement.shards:
        # The elements of these matrices in the flattened leaf.
        start, stop = interval_of(placement, shard)
        # Without an owner, every rank computes them.
        owners = every_rank if shard.owner is None else [shard.owner]
        parts.append(_Part(stop - start, owners))
    return parts


def _ranks(ranks: Collection[int], size: int) -> str:
    """Return text for some of ``size`` ranks: "rank 3", "ranks 0, 2", "5 ranks" or "every rank"."""
    if len(ranks) == size:
        return "every rank"
    if len(ranks) == 1:
        return f"rank {min(ranks)}"
    if len(ranks) <= 4:  # more would make the column too wide
        return "ranks " + ", ".join(map(str, sorted(ranks)))
    return f"{len(ranks)} ranks"


def _nbytes_of(params: PyTree) -> int | None:
    if params is None:
        return None
    return sum(leaf.numel() * leaf.dtype.itemsize for leaf in tree.tensors(params))
