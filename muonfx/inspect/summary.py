"""`summary`: the tensors of a state, an optimizer or a model as a tree with shapes, dtypes, bytes and owners."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from muonfx import tree
from muonfx.core import Transform
from muonfx.internal.display import Report, Row, Shown, Table, format_bytes, format_shape
from muonfx.optimizer import TransformOptimizer
from muonfx.sharding.layout import Layout
from muonfx.sharding.shards.dtensors import local_of
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.sharding.state import LeafPlacement, describe_state, interval_of, without_dtensors
from muonfx.sharding.transform import Sharded, binding_of, check_local, is_global
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

    ``str()`` returns plain text, and a notebook shows HTML. ``to_text(depth=1)`` shows only the first level of paths.

    Attributes:
        leaves: a `LeafSummary` for each leaf (tensor or None), in the order of the tree.
        ranks: the number of ranks that the leaves are sharded over; None if nothing is sharded.
        params_nbytes: the bytes of the whole parameters, each counted once; None if they are not known.

    >>> import torch
    >>> import muonfx as mfx
    >>> found = mfx.summary(mfx.momentum().init({"w": torch.zeros(4, 4)}))
    >>> found.nbytes, found.by_dtype()
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
        found: Counter[str] = Counter()
        for leaf in self.leaves:
            found[leaf.dtype] += leaf.nbytes
        return {dtype: nbytes for dtype, nbytes in found.most_common() if nbytes}

    def report(self) -> Report:
        """Return the printed table: a row for each tensor, subtotals for each branch of the tree, and the total."""
        shown: dict[str, Callable[[LeafSummary], str]] = {
            "shape": lambda leaf: "-" if leaf.shape is None else format_shape(leaf.shape),
            "dtype": lambda leaf: leaf.dtype,
        }
        sizes: dict[str, Callable[[LeafSummary], int]] = {"bytes": lambda leaf: leaf.nbytes}
        if not {leaf.device for leaf in self.leaves} <= {"", "meta", "cpu"}:
            shown["device"] = lambda leaf: leaf.device or "-"
        if self.ranks is not None:
            shown["owner"] = lambda leaf: leaf.owner or "-"
            sizes = {"this rank": lambda leaf: leaf.nbytes, "all ranks": lambda leaf: leaf.total_nbytes}

        def row(name: str, leaves: Sequence[LeafSummary], texts: Sequence[str] = (), *children: Row) -> Row:
            padding = [""] * (len(shown) - len(texts))
            sums = (format_bytes(sum(map(size, leaves))) for size in sizes.values())
            return Row((name, *texts, *padding, *sums), children)

        def rows(leaves: Sequence[LeafSummary], depth: int) -> list[Row]:
            groups: dict[tuple[str, ...], list[LeafSummary]] = {}
            for leaf in leaves:
                groups.setdefault(leaf.path[depth : depth + 1], []).append(leaf)
            return [node(group, depth) for group in groups.values()]

        def node(leaves: list[LeafSummary], depth: int) -> Row:
            first, end = leaves[0], depth + 1
            if len(leaves) == 1:
                return row(".".join(first.path[depth:]) or "-", leaves, [show(first) for show in shown.values()])
            # A node with one child shares a row with it: "momentum.trace".
            while all(leaf.path[end] == first.path[end] for leaf in leaves):
                end += 1
            return row(".".join(first.path[depth:end]), leaves, (), *rows(leaves, end))

        tensors = [leaf for leaf in self.leaves if leaf.shape is not None]
        footers = [row(f"total of {_counted(len(tensors), 'tensor')}", tensors)]
        kinds = list(dict.fromkeys(leaf.dtype for leaf in tensors))
        for dtype in kinds if len(kinds) > 1 else ():
            of_dtype = [leaf for leaf in tensors if leaf.dtype == dtype]
            footers.append(row(_counted(len(of_dtype), "tensor"), of_dtype, ("", dtype)))
        titles = ("leaf", *shown, *sizes)
        right = range(1 + len(shown), len(titles))
        return Report((Table(titles, rows(self.leaves, 0), right, footers), *self._compared()))

    def _compared(self) -> tuple[str, ...]:
        """Return a tuple with a sentence like "2 times the 768 B of the parameters"; empty if these are not known."""
        if not self.params_nbytes:
            return ()
        one, every = self.nbytes / self.params_nbytes, self.total_nbytes / self.params_nbytes
        size = format_bytes(self.params_nbytes)
        if self.ranks is None:
            return (f"{one:.2f} times the {size} of the parameters",)
        ranks = _counted(self.ranks, "rank")
        return (f"{one:.2f} times the {size} of the whole parameters on this rank, {every:.2f} times over {ranks}",)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
    if isinstance(what, TransformOptimizer):
        groups = what.param_groups
        params = {n: p for group in groups for n, p in zip(group["param_names"], group["params"], strict=True)}
        return _summarize(what.transform, what.transform_state, None, params)
    what, params = (dict(x.named_parameters()) if isinstance(x, nn.Module) else x for x in (what, params))
    if isinstance(what, Transform):
        if params is None:
            raise TypeError(
                f"summary of {what.name} needs parameters: give the state, summary(tx.init(params)), or summary(tx, "
                "params) for the state that it would make"
            )
        like = tree.map(lambda leaf: torch.empty_like(local_of(leaf), device="meta"), params)
        with warnings.catch_warnings():  # the init of the real state warns
            warnings.simplefilter("ignore")
            return _summarize(what, what.init(like), params, params)
    if type(what) is tuple and len(what) == 2 and isinstance(what[0], Transform):
        return _summarize(*what, params, params)
    _check_what(what)
    return Summary(tuple(_plain_leaves(what)), None, _nbytes_of(params))


def _check_what(what: object) -> None:
    """Raise unless ``what`` is a tree that contains a tensor, or is empty like the state of a stateless transform."""
    if type(what) is tuple and len(what) == 2 and isinstance(what[1], Transform):
        raise TypeError("summary: found a pair (state, transform), expected (transform, state): swap the two")
    present = [leaf for leaf in tree.leaves(what) if leaf is not None]
    if what is None or (present and not any(isinstance(leaf, Tensor | FlatShard) for leaf in present)):
        raise TypeError(
            f"summary: found {type(what).__name__} with no tensor in it; expected a state, a "
            "muonfx.TransformOptimizer, a model, a tree of tensors, or a transform with its parameters"
        )


# -------------------------------------------------------------------------------------------------------- the leaves


def _plain_leaves(values: PyTree) -> list[LeafSummary]:
    """Return a `LeafSummary` for each leaf of a tree. A DTensor or flat shard is listed with its global shape."""
    return [
        _leaf_of(path, leaf.shape if isinstance(leaf, Tensor | FlatShard) else None, local_of(leaf))
        for path, leaf in zip(tree.paths(values), tree.leaves(values), strict=True)
    ]


def _leaf_of(
    path: Iterable[object], shape: Sequence[int] | None, here: object, total: int | None = None, owner: str = ""
) -> LeafSummary:
    """Return the `LeafSummary` of a leaf with the global shape ``shape``; ``here`` is this rank's shard of it."""
    data = here.data if isinstance(here, FlatShard) else here
    words = tuple(map(str, path))
    if not isinstance(data, Tensor):
        kind = "-" if data is None else type(data).__name__
        return LeafSummary(words, None if shape is None else tuple(shape), kind, "", 0, total or 0, owner)
    nbytes = data.numel() * data.dtype.itemsize
    whole = tuple(data.shape if shape is None else shape)
    total = nbytes if total is None else total
    return LeafSummary(words, whole, _written(data.dtype), str(data.device), nbytes, total, owner)


def _written(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------- states over ranks


def _summarize(tx: Transform, state: PyTree, local: PyTree, params: PyTree) -> Summary:
    """Summarize the state of a transform. ``local`` are this rank's parameters, needed before the first use only."""
    if not isinstance(tx, Sharded):
        return Summary(tuple(_plain_leaves(state)), None, _nbytes_of(params))
    binding, inner, like = binding_of(tx, local)
    layout = binding.layout
    whole = sum(spec.nbytes for spec in layout.specs.values())
    described = describe_state(binding, inner, like)
    own = state if is_global(state) else without_dtensors(binding, inner, like, state)
    check_local(layout, described, own)
    found = [
        _sharded_leaf(layout, path, what, leaf)
        for path, what, leaf in zip(tree.paths(own), described, tree.leaves(own), strict=True)
    ]
    return Summary(tuple(found), layout.size, whole)


def _sharded_leaf(layout: Layout, path: Sequence[object], what: LeafPlacement | None, leaf: object) -> LeafSummary:
    if what is None:
        return _leaf_of(path, None, leaf)
    each = what.dtype.itemsize
    if what.name is None:
        total, owner = prod(what.shape) * each * layout.size, "every rank"
    elif what.owned:
        sizes = [(shard.owner, interval_of(what, shard)) for shard in what.shards]
        total = sum((stop - start) * each * (layout.size if rank is None else 1) for rank, (start, stop) in sizes)
        owner = _ranks({rank for rank, _ in sizes}, layout.size)
    else:
        holders = layout.holders(what.name)
        total = sum(piece.numel * len(ranks) * each for piece, ranks in holders.items())
        cut = len(holders) > 1
        ranks = {rank for ranks in holders.values() for rank in ranks}
        owner = ("cut over " if cut else "") + _ranks(ranks, layout.size)
    return replace(_leaf_of(path, what.shape, leaf, total, owner), dtype=_written(what.dtype))


def _ranks(ranks: Iterable[int | None], size: int) -> str:
    """Return text that names the given ranks, in a group of ``size`` ranks; None in ``ranks`` means all ranks."""
    named = sorted(rank for rank in ranks if rank is not None)
    if None in ranks or len(named) == size:
        return "every rank"
    if len(named) == 1:
        return f"rank {named[0]}"
    return "ranks " + ", ".join(map(str, named)) if len(named) <= 4 else f"{len(named)} ranks"


def _nbytes_of(params: PyTree) -> int | None:
    if params is None:
        return None
    return sum(leaf.numel() * leaf.dtype.itemsize for leaf in tree.leaves(params) if isinstance(leaf, Tensor))
