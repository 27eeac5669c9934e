"""The leaves of a state as a checkpoint holds them: their names, the shards of them on this rank, and their specs.

Names are unique, with "/" between the levels of a tree. A leaf of a state is named by its path,
``momentum/trace/blocks.0.attn.q.weight``; the name of a parameter begins with ``params/``. The state of a chain is a
dict by member name, so a leaf keeps its name when another transform is added to the chain. If a whole recipe becomes a
member of a chain, its names get a prefix.

Special characters in an entry are escaped: ``~0`` is ``~`` and ``~1`` is ``/`` (as in JSON Pointer, RFC 6901). The
prefix ``~2`` marks an entry as a literal string. It is added to an empty string, to a string that reads as an integer
(an index is written in digits), and to a state's own top-level entry ``params`` or ``__metadata__``. ``~`` alone names
a tree that is a single leaf.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.checks import check_tree
from muonfx.core.transform import require_transform
from muonfx.core.value import without_stand_ins
from muonfx.internal.display import Table
from muonfx.internal.wrappers import MAY_BE_WRAPPED, unwrapped
from muonfx.sharding.shards.boxes import Box, cover
from muonfx.sharding.shards.dtensors import is_dtensor
from muonfx.sharding.shards.flat_shard import FlatShard
from muonfx.tree import PyTree, Spec


def is_optimizer(value: object) -> TypeGuard[Any]:
    """Return whether a value is an optimizer whose state is the state of a transform, such as `muonfx.Muon`."""
    return isinstance(value, torch.optim.Optimizer) and hasattr(value, "load_transform_state")


GROUPS = "param_groups"
"""The name of the groups of an optimizer among the values of a checkpoint that are no tensors."""
SCHEDULER = "scheduler"
"""The name of the state of a scheduler: ``{"class": "StepLR", "state": {...}}``."""

_MISTAKEN = {
    Transform: "its state, which tx.init(params) or tx.update(...) returned",
    torch.optim.Optimizer: "a muonfx.TransformOptimizer, or save its state_dict() by torch.distributed.checkpoint with "
    "muonfx.checkpoint.Writer",
    torch.nn.Module: "its parameters and buffers, model.state_dict()",
}
"""Classes of objects that are easily passed instead of a tree, and the code for the tree."""

PARAMS = "params"
"""The top level of the names of parameters."""

_RESERVED = frozenset({PARAMS, "__metadata__"})
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")
_ROOT = "~"


def name_of(path: tuple[Any, ...], section: str = "") -> str:
    """Return the name that a leaf has in a checkpoint: the keys that lead to it in the tree, joined by "/".

    With ``section``, such as "params" for parameters, the name begins with that.

    >>> name_of(("momentum", "trace", "fc.weight")), name_of(("fc.weight",), section="params")
    ('momentum/trace/fc.weight', 'params/fc.weight')
    """
    levels = [_level_of(key) for key in path]
    if section:
        return "/".join([section, *levels])
    if not levels:  # the tree is a single tensor
        return _ROOT
    if levels[0] in _RESERVED:  # a state with a key "params" must not look like the parameters
        levels[0] = "~2" + levels[0]
    return "/".join(levels)


@lru_cache(10_000, typed=True)  # the upper levels are in many names, and 1, 1.0 and True are equal
def _level_of(key: object) -> str:
    """Return one level of a leaf name for a key of a tree, such that different keys have different levels.

    The int 0 becomes "0", and the string "0" becomes "~20". In strings, "~" becomes "~0", and "/" becomes "~1".
    """
    # In Python, a bool is an int, and would get the name of 0 or 1.
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise TypeError(
            f"found the key {key!r} of type {type(key).__name__}, expected a string or an int: keys are part of "
            "the leaf names in a checkpoint"
        )
    if isinstance(key, int):
        return str(int(key))
    # Never contains "~2", which can therefore be a mark.
    level = key.replace("~", "~0").replace("/", "~1")
    reads_as_int = _INTEGER.fullmatch(key) is not None
    if key == "" or reads_as_int:
        return "~2" + level
    return level


def path_of(name: str) -> tuple[str | int, ...]:
    """Return the path in the tree of the leaf with this name; `name_of` is the inverse.

    >>> path_of("groups/0/~20/a~1b")
    ('groups', 0, '0', 'a/b')
    """
    if name == _ROOT:
        return ()
    return tuple(map(_key_of, name.split("/")))


def _key_of(level: str) -> str | int:
    """Return the key of a tree from one level of a leaf name: 0 for "0", "0" for "~20", and "a/b" for "a~1b"."""
    if _INTEGER.fullmatch(level):
        return int(level)
    return level.removeprefix("~2").replace("~1", "/").replace("~0", "~")


def named_tensors(values: PyTree, section: str = "") -> dict[str, Any]:
    """Return a dict from the name of each leaf of a tree to the leaf: ``{"trace/w": tensor}`` for a momentum.

    Names begin with ``section``, such as "params", if given. Prefixes from wrappers like ``torch.compile`` are removed.
    Raise unless each leaf is a tensor, a shard of one, or None.
    """
    for mistaken_class, code in _MISTAKEN.items():
        if isinstance(values, mistaken_class):
            raise TypeError(
                f"found a {type(values).__name__}, expected a tree of tensors: pass {code}"
            )
    # "momentum/trace/_orig_mod.fc.weight" of a compiled model is stored as "momentum/trace/fc.weight".
    names = [name_of(path, section) for path in tree.paths(values)]
    plain_name_of = plain_names(names)
    leaves: dict[str, Any] = {}
    for name, leaf in zip(names, tree.leaves(values), strict=True):
        plain_name = plain_name_of[name]
        if plain_name in leaves:
            raise ValueError(
                f"two leaves have the name {plain_name!r} when the prefixes of wrappers (torch.compile, DataParallel, "
                "...) are removed: rename one of them"
            )
        _require_tensor(plain_name, leaf)
        leaves[plain_name] = leaf
    return leaves


def _require_tensor(name: str, leaf: object) -> None:
    """Raise if a leaf is, for example, a float: a checkpoint stores tensors, shards of tensors, or None.

    A shard is a part of a tensor on one rank, as a DTensor or a `FlatShard` has it.
    """
    if leaf is None or isinstance(leaf, Tensor) or is_sharded(leaf):
        return
    raise TypeError(
        f"the leaf {name!r} is a {type(leaf).__name__}, expected a tensor: a checkpoint stores tensors "
        "and JSON; store a number as a 0-d tensor, or pass it in extra="
    )


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Return a dict from each leaf name to the name without the prefixes of wrappers such as ``torch.compile``.

    >>> plain_names(["momentum/trace/_orig_mod.fc.weight", "momentum/count"])
    {'momentum/trace/_orig_mod.fc.weight': 'momentum/trace/fc.weight', 'momentum/count': 'momentum/count'}
    """
    plain_name_of = {name: name for name in names}
    if not any(map(MAY_BE_WRAPPED.search, plain_name_of)):  # the usual case, decided in little time
        return plain_name_of
    # The names in one dict of the state, as those in "momentum/trace", are unwrapped together: the "module." of
    # DataParallel is removed only if all of them begin with it, since a model may have a module of this name.
    names_in_dict: dict[str, list[str]] = {}
    for name in plain_name_of:
        upper_levels, _, _ = name.rpartition("/")
        names_in_dict.setdefault(upper_levels, []).append(name)
    for upper_levels, leaf_names in names_in_dict.items():
        plain_name_of |= _plain_names_in_dict(upper_levels, leaf_names)
    return plain_name_of


def _plain_names_in_dict(upper_levels: str, names: Iterable[str]) -> dict[str, str]:
    """Return the names of the leaves in one dict without the prefixes of wrappers. All begin with ``upper_levels``.

    Names without such a prefix are left out.

    >>> _plain_names_in_dict("trace", ["trace/module.a", "trace/module.b"])
    {'trace/module.a': 'trace/a', 'trace/module.b': 'trace/b'}
    """
    param_of: dict[str, str] = {}
    for name in names:
        param = _key_of(name.rpartition("/")[2])
        # The parameters of a list have no names: the last level is an index.
        if isinstance(param, str):
            param_of[name] = param
    plain_param_of = unwrapped(param_of.values())
    plain_name_of: dict[str, str] = {}
    for name, param in param_of.items():
        plain_param = plain_param_of[param]
        if plain_param != param:
            plain_name_of[name] = name_of((plain_param,), upper_levels)
    return plain_name_of


def in_section(name: str, section: str | None) -> bool:
    """Return whether a name belongs to a section: "params" for parameters, "" for the state, or None for both."""
    if section is None:
        return True
    of_params = name == PARAMS or name.startswith(PARAMS + "/")
    return of_params == (section == PARAMS)


# --------------------------------------------------------------------------------------------------------------- shards


def is_sharded(leaf: Any) -> bool:
    """Return whether a leaf is of a class that describes its shards, such as `FlatShard` or a DTensor."""
    # The class is tested, since tensors look up a missing attribute slowly.
    return hasattr(type(leaf), "__create_chunk_list__")


def require_whole(name: str, leaf: Any, advice: str) -> None:
    """Raise if this rank holds only a shard of a leaf. The error ends with ``advice``, such as "pass group="."""
    if is_sharded(leaf) and getattr(leaf, "whole", None) is None:
        raise TypeError(
            f"the leaf {name!r} is a {type(leaf).__name__}, of which each rank holds a part: {advice}"
        )


def shards_of(leaf: Any) -> dict[Box, Tensor]:
    """Return the parts of a tensor that this rank has: a dict from their positions to their values, as views.

    A position is a box, offsets and sizes. For a rank with the rows 4 to 7 of an 8 x 2 matrix, the result is
    ``{Box((4, 0), (4, 2)): rows}``. A plain tensor is one part, the whole.
    """
    shape = tuple(leaf.shape)
    if not is_sharded(leaf):  # a plain tensor
        return {whole_box(shape): leaf.detach()}
    # This rank is not in the leaf's mesh.
    if is_dtensor(leaf) and leaf.device_mesh.get_coordinate() is None:
        return {}
    if 0 in shape:  # one empty part, so that the checkpoint has the leaf at all
        return {whole_box(shape): torch.empty(shape, dtype=leaf.dtype)}
    # An interval of the flattened tensor: parts of rows at its ends, and whole rows.
    if isinstance(leaf, FlatShard):
        shards = {box: leaf.values_in(box) for box in leaf.boxes}
    else:
        shards = _shards_by_protocol(leaf)
    # A rank has an empty part if there are more ranks than rows.
    return {box: values for box, values in shards.items() if box.numel}


class LocalLeaf(NamedTuple):
    """A leaf of this rank's tree, as a save writes it."""

    spec: Spec
    """The global shape and dtype."""
    is_plain: bool
    """True for a plain tensor, which must be equal on all ranks; False for shards with positions of their own."""
    divided_among: int
    """The number of ranks of which each holds other shards; 0 if several ranks may hold the same shard."""
    shards: dict[Box, Tensor]
    """The boxes of the leaf on this rank, with the values in them."""

    @classmethod
    def of(cls, leaf: Any) -> LocalLeaf:
        """Return the shards of a leaf as views."""
        spec = Spec(tuple(leaf.shape), leaf.dtype)
        if not is_sharded(leaf):  # nothing is known about the other ranks
            return cls(spec, True, 0, shards_of(leaf))
        return cls(spec, False, _ranks_without_replicas(leaf), shards_of(leaf))

    def copied(self) -> LocalLeaf:
        """Return a copy of the shards in CPU memory."""
        copies = {box: values.to("cpu", copy=True) for box, values in self.shards.items()}
        return self._replace(shards=copies)


def _ranks_without_replicas(leaf: Any) -> int:
    """Return the number of ranks of a DTensor's mesh if each of them holds another part, else 0.

    A mesh is a grid of ranks. The result is 8 for a leaf that is divided along both dims of a 2 x 4 mesh. It is 0 if
    one dim replicates the leaf, so that several ranks hold the same part.
    """
    if not is_dtensor(leaf):  # such as a `FlatShard`, which has no mesh
        return 0
    mesh = leaf.device_mesh
    for dim, placement in enumerate(leaf.placements):
        # The ranks along this dim hold equal values.
        if mesh.size(dim) > 1 and not placement.is_shard():
            return 0
    return mesh.size()


def _shards_by_protocol(leaf: Any) -> dict[Box, Tensor]:
    """Return the shards on this rank of a DTensor, or of another object that can list its shards for torch.

    The result maps boxes, the positions of the parts, to their values. The two methods with underscores are the
    protocol of ``torch.distributed._checkpointable``.
    """
    # Imported here, since torch.distributed.checkpoint takes longer to import than muonfx.
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shards: dict[Box, Tensor] = {}
    for chunk in leaf.__create_chunk_list__():
        values: Tensor = leaf.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
        shards[Box(tuple(chunk.offsets), tuple(chunk.sizes))] = values.detach()
    return shards


def problem_of_boxes(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Return None if boxes contain each element of a leaf once, else the reason why they do not."""
    # Most leaves are in one piece, and this takes less time.
    if len(boxes) == 1 and boxes[0] == whole_box(shape):
        return None
    return cover(shape, boxes)


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box with all elements of a leaf of this shape."""
    return Box((0,) * len(shape), shape)


def slices_of(box: Box) -> list[str]:
    """Return a box as one slice for each dim: ["0:4", "2:8"]."""
    return [f"{start}:{end}" for start, end in zip(box.offsets, box.ends, strict=True)]


# ---------------------------------------------------------------------------------------------------------------- specs


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
        transform: the transform that will use the state; None if it is not known.

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
    transform: Transform | None = field(default=None, repr=False, compare=False)

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
        rows = [
            (name, str(spec.shape), str(spec.dtype).removeprefix("torch."))
            for name, spec in self.leaves.items()
        ]
        text = Table(("", "", ""), rows).to_text()
        return text.removeprefix("\n")  # the line of the titles

    @property
    def nbytes(self) -> int:
        """The bytes of the whole state: each leaf is counted once, at its global shape."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @classmethod
    def of(cls, state: PyTree) -> StateSpec:
        """Return the `StateSpec` of an existing state.

        Raises:
            TypeError: a leaf is not a tensor; the message names it.

        >>> print(StateSpec.of({"w": torch.zeros(2)}))
        w  (2,)  float32
        """
        return spec_of_named(named_tensors(state), state)

    def of_chain(self, tx: Transform) -> StateSpec:
        """Return a copy with the fingerprint of a transform, which `load` compares with that in the checkpoint."""
        return replace(
            self, fingerprint=tx.fingerprint, chain=repr(without_stand_ins(tx)), transform=tx
        )

    def unflatten(self, leaves: dict[str, Any]) -> PyTree:
        """Return a state tree with the leaves of a dict by name, or None where the dict has no entry."""
        return tree.unflatten(self._treedef, [leaves.get(name) for name in self._names])


def spec_of_named(
    named: Mapping[str, Any], values: PyTree, tx: Transform | None = None
) -> StateSpec:
    """Return the `StateSpec` of the tree ``values``; ``named`` is the result of `named_tensors`."""
    leaves = {
        name: Spec(tuple(leaf.shape), leaf.dtype)
        for name, leaf in named.items()
        if leaf is not None
    }
    state_spec = StateSpec(leaves, _treedef=tree.flatten(values)[1], _names=tuple(named))
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
        >>> spec = mfx.spec(
        ...     mfx.muon_with_adamw(1e-2, labels=mfx.routing.default_labels_by_name), params
        ... )
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
    meta = tree.map(
        lambda leaf: torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta"), params
    )
    with warnings.catch_warnings():
        # Labels without a parameter are reported when the state itself is made.
        warnings.simplefilter("ignore")
        state = without_stand_ins(tx).init(meta)
    return spec_of_named(named_tensors(state), state, tx)
