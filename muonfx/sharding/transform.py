"""`sharded`: a transform over local tensors that gives the update of the same transform over whole ones."""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import torch
from torch import Tensor

from muonfx import checks, tree
from muonfx.core import NOTHING, Donation, Locality, Transform, _apart
from muonfx.polar import compute_dtype
from muonfx.polar.hardware import settle_cpu_bf16
from muonfx.recorded import make_factory, parts_of
from muonfx.sharding.agreement import agree, compare
from muonfx.sharding.errors import ShardingError
from muonfx.sharding.layout import Layout, is_dtensor, local_of
from muonfx.sharding.layouts import ALIKE
from muonfx.sharding.plan.plan import Machine, Settings
from muonfx.sharding.state import bare, dressed
from muonfx.sharding.walk import Walk
from muonfx.tree import PyTree

__all__ = ["Sharded", "sharded"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Sharded(Transform):
    """What `sharded` makes: a transform whose errors are raised on all ranks alike, before anything is changed."""

    def init(self, params: PyTree) -> PyTree:
        """Build the state for this rank's pieces; all ranks must call it together.

        Args:
            params: the tree of local tensors, or of DTensors. Meta tensors give a state of meta tensors, without a word
                to the other ranks.

        Returns:
            A state of the transform's own structure: local tensors for what is like the parameters, None for what
            another rank owns, and the same counters on all ranks. Of DTensor parameters, DTensors.

        Raises:
            ShardingError: the ranks have different trees, chains or layouts, a local tensor is not what the layout
                says, or something is wrong on another rank.
            TypeError: a leaf is not a floating-point tensor.
        """
        return self._functions[0](params)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, *, donate: bool | Donation = False, **extras: Any
    ) -> tuple[PyTree, PyTree]:
        """Map updates to new updates and the state to the next; all ranks must call it together.

        Args:
            updates: local gradients. A leaf that is None here but not on another rank counts as zero.
            state: what `init` or the previous `update` returned.
            params: local parameters, for transforms that need them.
            donate: as in `Transform.update`.
            **extras: named values for the transforms; the same on all ranks.

        Returns:
            Local updates and the next state.

        Raises:
            ShardingError: something is wrong on another rank, or it is gone.
            TypeError, ValueError: as `Transform.update`. Nothing has been changed on any rank when an error is raised,
                unless a rank is gone.
        """
        given = Donation.of(donate)
        out, new_state = self._functions[1](updates, state, params, donate=given, check=True, **extras)
        return out, new_state if given.state else _apart(new_state, state)


def _factory(constructor: Any) -> Any:
    """A factory of `Sharded`, whose values stand for the transform that they shard."""
    undeclared = dict.fromkeys(("own_locality", "resolve", "rounds_to", "on_stacks"))
    return make_factory(Sharded, constructor, locality=Locality.TREE, reads_params=True, transparent=True, **undeclared)


@_factory
def sharded(
    tx: Transform,
    layout: Layout,
    *,
    replicas: str = "auto",
    bucket_bytes: int = 1 << 28,
    exchange_dtype: torch.dtype | None = None,
    machine: Machine | None = None,
    gram: bool = False,
):
    """Make a transform over local tensors of one over whole ones: the same update under any layout.

    ``layout.gather(sharded(tx, layout).update(layout.shard(grads), ...))`` equals ``tx.update(grads, ...)``: bitwise
    where the same kernels work on the same matrices, else within rounding. What looks at single elements is done on the
    pieces as they are; what needs whole matrices gets them, once each, at an owner; sums over the tree go over all
    ranks.

    Args:
        tx: any transform. Its numbers, its state's structure and its fingerprint are those of the result too.
        layout: who holds what.
        replicas: for matrices that several ranks hold whole: "split" lets one compute and send the result, "everyone"
            lets all compute, "auto" takes what is quicker.
        bucket_bytes: about how many bytes an exchange takes at a time, matrices and messages together; a single larger
            matrix goes through alone.
        exchange_dtype: in which dtype matrices travel. None: the one to which they are rounded first of all anyway, so
            that no value changes.
        machine: operations and bytes a second, for "auto"; None: a guess by the kind of device.
        gram: orthogonalize matrices that are cut along their long side where their pieces are, if that sends less: for
            few ranks and long matrices. The result is then within rounding, never bitwise that of one process.

    Returns:
        A transform over trees of local tensors, or of DTensors: then its updates, and the leaves of its state that are
        like parameters, are DTensors too.

    Raises:
        TypeError: ``tx`` is no transform or ``layout`` no layout.
        ValueError: a setting is none of those above.

    Follows no other project; the exchange is the one that Dion (arXiv 2504.05295) and distributed Muon (arXiv
    2502.16982) make, without their padding and for every layout.

    Example:
        >>> import muonfx as mfx
        >>> params = {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
        >>> layout = mfx.sharding.zero(params, 1, partition="flat")
        >>> tx = sharded(mfx.muon_with_adamw(0.1, labels={"w": "muon", "b": "adamw"}), layout)
        >>> local = layout.shard(params)
        >>> updates, state = tx.update(mfx.tree.map(torch.ones_like, local), tx.init(local), local)
        >>> layout.gather(updates)["w"].shape
        torch.Size([4, 4])
    """
    if not isinstance(tx, Transform):
        raise TypeError(f"tx must be a muonfx.Transform, found {tx!r}")
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a muonfx.sharding layout, found {layout!r}")
    if replicas not in ("auto", "split", "everyone"):
        raise ValueError(f"replicas: found {replicas!r}, expected 'auto', 'split' or 'everyone'")
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: found {bucket_bytes!r}, expected an int of 1 or more")
    settings = Settings(replicas, bucket_bytes, exchange_dtype, machine, gram)

    def init(params: PyTree) -> PyTree:
        walk = walk_of(layout.of(params), settings)
        local = tree.map(local_of, params)
        if all(leaf is None or leaf.is_meta for leaf in tree.leaves(local)):
            return walk.init(tx, local)
        state = meet(walk, tx, local)
        return dressed(walk, tx, params, state) if walk.layout.dtensors else state

    @torch.no_grad()
    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        check: bool = False,
        **extras: Any,
    ) -> tuple[PyTree, PyTree]:
        walk = walk_of(layout.of(updates if params is None else params), settings)
        wears = any(is_dtensor(leaf) for values in (updates, params) for leaf in tree.leaves(values))
        own = bare(walk, tx, updates if params is None else params, state)
        out, after = advance(
            walk, tx, updates, own, tree.map(local_of, params), donate=donate, extras=extras, check=check
        )
        if not wears:
            return out, after
        return walk.layout.dressed(out), dressed(walk, tx, updates, after)

    return init, update


def advance(
    walk: Walk,
    tx: Transform,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    donate: Donation,
    extras: dict[str, Any],
    check: bool = False,
    problem: Exception | None = None,
) -> tuple[PyTree, PyTree]:
    """One step on local tensors; the updates only may be DTensors. What is wrong on one rank is raised on all.

    Args:
        walk: the layout and its plans.
        tx: the transform, with the numbers of now.
        updates: local gradients.
        state: of local tensors.
        params: local parameters.
        donate: what may be overwritten.
        extras: named values for the transforms.
        check: whether to look at the trees first, which takes time.
        problem: what the caller has found to be wrong on this rank.
    """
    given = _placed(walk.layout, updates)
    local = tree.map(local_of, given)
    _meet(walk, tx, local if params is None else params)
    local = _agreed(walk, tx, local, state, params, extras, check=check, problem=problem)
    return walk.update(tx, local, state, params, donate, extras)


def introduce(walk: Walk, tx: Transform) -> None:
    """Take a transform as known to all ranks, which have made it alike of one that they have compared."""
    walk.met.setdefault(id(tx._context), tx._context)


def meet(walk: Walk, tx: Transform, local: PyTree) -> PyTree:
    """Compare chains, parameters and layouts between ranks, and make the state of local tensors."""
    _meet(walk, tx, local)
    return walk.init(tx, local)


def settings_of(tx: Sharded) -> Settings:
    """What the caller of `sharded` has chosen."""
    return Settings(*(tx.arguments[name] for name in Settings._fields))


def walk_of(layout: Layout, settings: Settings) -> Walk:
    """The walk of a layout with some settings; there is one."""
    key = ("walk", settings)
    if key not in layout.derived:
        layout.derived[key] = Walk(layout, settings)
    return layout.derived[key]


def _meet(walk: Walk, tx: Transform, local: PyTree) -> None:
    """Require, once, that all ranks have the same chain, parameters and layout; settle what "auto" stands for."""
    layout = walk.layout
    key = id(tx._context)
    if key in walk.met:
        return
    problem: Exception | None = None
    try:
        checks.check_params(local)
        _check_pieces(layout, local)
    except (TypeError, ValueError, ShardingError) as error:
        problem = error
    if layout.size > 1 and layout.group is None:
        raise ShardingError(f"{layout!r} has no process group: it is only to look at and to plan with")
    device = tree.device_of(local)
    fastest = compute_dtype(torch.float32, device)
    if layout.group is not None and layout.size > 1:
        said = compare(
            {
                "chains": repr(tx),
                "parameters": {name: f"{spec.shape} {spec.dtype}" for name, spec in layout._specs.items()},
                "layouts": _digest(layout),
                "kinds of device": device.type,
                "settings": repr(walk.settings),
                "own dtype": fastest,
                "own sums of bits": _sums_of_bits(layout, local),
            },
            layout.group,
            problem,
        )
        _check_alike(layout, [theirs["own sums of bits"] for theirs in said])
        dtypes = [theirs["own dtype"] for theirs in said]
        if len(set(dtypes)) > 1:
            # On CPUs it is a measurement, which may come out differently: fp32 suits all.
            if device.type != "cpu":
                raise ShardingError(
                    f"the ranks' devices compute in different dtypes, {dtypes}: give orthogonalize a dtype"
                )
            settle_cpu_bf16(False)
            fastest = torch.float32
    elif problem is not None:
        raise problem
    walk.compute = fastest
    walk.like = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), local)
    walk.met[key] = tx._context  # kept, so that no other can have its id


def _sums_of_bits(layout: Layout, local: PyTree) -> dict[str, int]:
    """A checksum of the local tensors of parameters that lie on different meshes on different ranks."""
    named = dict(zip(tree.names(local), tree.leaves(local), strict=True))
    found = {name: named.get(name) for name in layout.derived.get(ALIKE, ())}
    return {
        name: int(leaf.contiguous().view(torch.uint8).sum(dtype=torch.int64)) if leaf.numel() else 0
        for name, leaf in found.items()
        if isinstance(leaf, Tensor) and not leaf.is_meta
    }


def _check_alike(layout: Layout, said: list[dict[str, int]]) -> None:
    """Require that what lies on several meshes is the same, as far as the same pieces have the same checksum."""
    for name in said[0]:
        for ranks in layout.holders(name).values():
            odd = next((rank for rank in ranks if said[rank].get(name) != said[ranks[0]].get(name)), None)
            if odd is not None:
                raise ShardingError(
                    f"{name!r} lies on different meshes on different ranks and has other values on rank {odd} than on "
                    f"rank {ranks[0]}: if these are different parameters, give them different names, or place them on "
                    "one mesh of more dims"
                )


def _check_pieces(layout: Layout, local: PyTree) -> None:
    for name, leaf in zip(tree.names(local), tree.leaves(local), strict=True):
        if leaf is not None and not layout.piece(name).fits(leaf):
            raise ShardingError(
                f"{name!r} has a local tensor of shape {tuple(leaf.shape)}, the layout says "
                f"{layout.piece(name).shape}: was the tree sharded by this layout?"
            )


def _digest(layout: Layout) -> str:
    text = repr([(name, layout.pieces[name]) for name in layout._specs])
    return f"{layout!r} ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


def _placed(layout: Layout, updates: PyTree) -> PyTree:
    """Gradients with the placements of their parameters; those of tensor parallelism may still have to be reduced."""
    if not layout.dtensors:
        return updates

    def at(leaf: Any, name: str) -> Any:
        wanted = layout.dtensors.get(name)
        if wanted is None or not is_dtensor(leaf) or leaf.placements == wanted.placements:
            return leaf
        return leaf.redistribute(placements=wanted.placements)

    return tree.unflatten(
        tree.flatten(updates)[1],
        [
            None if leaf is None else at(leaf, name)
            for name, leaf in zip(tree.names(updates), tree.leaves(updates), strict=True)
        ],
    )


def _agreed(
    walk: Walk,
    tx: Transform,
    local: PyTree,
    state: PyTree,
    params: PyTree,
    extras: dict[str, Any],
    *,
    check: bool,
    problem: Exception | None,
) -> PyTree:
    """The updates that all ranks agree on: what is there on any rank is there on all, as zeros where it was not."""
    layout = walk.layout
    try:
        _check_pieces(layout, local)
        tx.check_extras(extras)
        if check:
            _check_step(walk, tx, local, state, params)
    except (TypeError, ValueError, ShardingError) as error:
        problem = problem or error
    leaves, treedef = tree.flatten(local)
    if layout.group is None or layout.size == 1:
        if problem is not None:
            raise problem
        return local
    boundary = extras.get("boundary")
    codes = [
        0 if not isinstance(leaf, Tensor) or leaf.dtype not in _DTYPES else 1 + _DTYPES.index(leaf.dtype)
        for leaf in leaves
    ]
    names = tree.names(local)
    if problem is not None:  # what is wrong may be the number of leaves
        known = layout.names
        codes, names = [0] * len(known), known
    flags = [isinstance(boundary, bool) and boundary, isinstance(boundary, bool) and not boundary]
    mine = _numbers(tx)
    digest = zlib.crc32(repr(mine).encode()) & 0x7FFFFFFF
    *found, yes, no, most, least = agree([*codes, *flags, digest, 0x7FFFFFFF - digest], layout.group, problem)
    if most != 0x7FFFFFFF - least:
        compare({"numbers in their chains": mine}, layout.group)
    if yes and no:
        raise ShardingError("boundary: some ranks say True and some False; it must be the same on all")
    device = tree.device_of(local)
    for place, (code, leaf) in enumerate(zip(found, leaves, strict=True)):
        if code and leaf is None:
            shape = layout.piece(names[place]).shape
            leaves[place] = torch.zeros(shape, dtype=_DTYPES[code - 1], device=device)
    return tree.unflatten(treedef, leaves)


def _numbers(tx: Transform) -> dict[str, float | str]:
    """The numeric arguments, as far as they can be known without waiting for a device."""
    return {name: value if isinstance(value, float) else "a tensor" for name, value in parts_of(tx)}


def _check_step(walk: Walk, tx: Transform, updates: PyTree, state: PyTree, params: PyTree) -> None:
    checks.check_floating("updates", updates)
    if params is not None:
        checks.check_updates_fit(params, updates)
    like = updates if params is None else params
    if any(leaf is None for leaf in tree.leaves(like)):
        return
    key = ("state", id(tx._context), tuple(tree.names(like)), tuple(leaf.dtype for leaf in tree.leaves(like)))
    derived = walk.derived
    if key not in derived:
        meta = walk.init(tx, tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), like))
        derived[key] = (*tree.flatten(meta), meta)
    checks.check_state_like(tx.name, state, derived[key], with_dtypes=params is not None)
