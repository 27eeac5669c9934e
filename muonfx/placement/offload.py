"""`offload`: a transform whose state is in host memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ParamSpec

import torch

from muonfx.core import Donation, InitAndUpdate, Transform
from muonfx.core.donation import NOTHING
from muonfx.core.transform import Declaration, Outermost, require_transform
from muonfx.core.value import Factory, Memory, make_factory, with_memory
from muonfx.internal.arguments import bind
from muonfx.internal.tracing import is_differentiated
from muonfx.placement.bucketed import require_room
from muonfx.placement.placed import PlacedTransforms, Where
from muonfx.placement.store import IN_MEMORY, Store
from muonfx.tree import PyTree

P = ParamSpec("P")

DEVICES = {"cuda", "meta", "mps", "xpu", "disk", "gpu", "nvme"}


class Offloaded(Transform):
    """A transform whose state is in host memory or on disk between steps, as `offload` returns it."""

    @classmethod
    def _record(cls, factory: Factory, /, *args: Any, **kwargs: Any) -> Any:
        """Build the result of a call of `offload`, which the function `offload` (here `factory`) returns.

        For a sharded transform, ``offload(sharded(tx, layout))``, it is ``sharded(offload(tx), layout)``: all ranks
        agree on a step before any of them loads state.

        Args:
            factory: the function `offload`, as users call it.
            *args: the arguments of the call.
            **kwargs: the arguments of the call by name.
        """
        bound_call = bind("offload", factory.__signature__, args, kwargs)
        arguments = bound_call.arguments  # a dict by name; a change of it changes `bound_call`
        if isinstance(arguments.get("to"), os.PathLike):
            arguments["to"] = os.fspath(arguments["to"])
        tx = arguments["tx"]
        is_sharded = isinstance(tx, Outermost)
        if not is_sharded:
            return super()._record(factory, *bound_call.args, **bound_call.kwargs)
        # Call `offload` for the transform within `sharded`, and put the result in its place.
        arguments["tx"] = tx.arguments["tx"]  # so the call below is offload(tx)
        offloaded = factory(*bound_call.args, **bound_call.kwargs)
        return tx.replace(tx=offloaded)

    @property
    def name(self) -> str:
        """The name of the inner transform, so that offloading does not rename its state within a chain."""
        return self.arguments["tx"].name


def _factory(constructor: Callable[P, InitAndUpdate]) -> Callable[P, Transform]:
    """Decorate the function `offload`, so that it returns an `Offloaded` that has the locality of its `tx`."""
    declaration = Declaration(
        locality=lambda tx, to, *, bucket_bytes: tx.locality,
        reads_params=lambda tx, to, *, bucket_bytes: tx.reads_params,
    )
    return make_factory(Offloaded, constructor, declaration, is_stand_in=True)


@_factory
@with_memory
def offload(
    _cache: Memory,
    tx: Transform,
    to: str = "cpu",
    *,
    bucket_bytes: int = 1 << 26,
):
    """Keep a transform's state in host memory or on disk between steps, and load it bucket by bucket in each step.

    A bucket is the state of some parameters. While one bucket is updated, the next is loaded and the previous is
    written back, so the device holds two buckets at most. Step counts and other 0-d tensors stay on the device. If a
    transform within a wrapper such as `accumulate` reads all leaves, all of the wrapper's state may be loaded at once.

    Updates and states equal the results of ``tx`` bit for bit, with one exception: matrices of equal shape are
    computed in batches, and if they are in different buckets, the batches differ and results may differ by rounding.
    With ``donate=True``, which `TransformOptimizer` passes, the state is overwritten in place. Otherwise `update`
    writes a second copy of the state to host memory or to a new file.

    Args:
        tx: any transform. A sharded one stays outermost: ``offload(sharded(tx, layout))`` is
            ``sharded(offload(tx), layout)``.
        to: "cpu" for host memory, which is pinned if parameters are on a CUDA device; or a folder on a disk, which is
            created if necessary. Several ranks and runs can share a folder. The disk space is freed when the state is
            deleted or the process ends.
        bucket_bytes: the approximate bytes of state that are loaded at a time. A larger tensor is loaded alone. A
            sharded transform loads matrices in the buckets in which they are sent between ranks instead.

    Returns:
        A transform with the hyperparameters of ``tx`` and the same structure of the state. Checkpoints of ``tx`` can be
        loaded for it, and its checkpoints for ``tx``.

    Raises:
        TypeError: ``tx`` is not a transform, or ``to`` is not a path.
        ValueError: ``to`` is the name of another device, or ``bucket_bytes`` is less than 1.
        RuntimeError: `update` is called within ``grad``, ``vjp`` or ``jvp`` of ``torch.func``.
        OSError: the folder cannot be created or written to, or its disk is full. ``init``, and an ``update`` that needs
            a second copy, raise it before anything is changed.

    The division of work follows ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857).

    Example:
        >>> import muonfx as mfx
        >>> tx = offload(mfx.momentum(0.9, nesterov=False), "cpu")
        >>> params = {"w": torch.zeros(2)}
        >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
        >>> state.trace["w"].device, updates["w"]
        (device(type='cpu'), tensor([0.1000, 0.1000]))
    """
    require_transform("tx", tx)
    store = _store(to, bucket_bytes)
    # A cache of transforms that run with their state in the store. Transforms with other numbers share it.
    placed: PlacedTransforms = _cache.setdefault("placed", PlacedTransforms(Where(store=store)))

    def init(params: PyTree) -> PyTree:
        return placed(tx, params).functions.init(params)

    @torch.no_grad()
    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Run ``tx`` with its state in host memory or on disk (the store), and write the new state there.

        If the disk has no room for the new state, this raises OSError before anything is changed.
        """
        if is_differentiated():
            raise RuntimeError(
                "offload: torch.func differentiates this step, and state that is copied to and from its store has no "
                "derivatives: differentiate the transform without offload"
            )
        shaped_like_params = updates if params is None else params
        require_room(store, state, shaped_like_params, donate)
        # Loads and stores the state, bucket by bucket.
        tx_with_stored_state = placed(tx, shaped_like_params)
        return tx_with_stored_state.run(updates, state, params, donate=donate, **extras)

    return init, update


def store_of(tx: Transform) -> Store:
    """Return where a transform keeps its state between steps; without `offload`, that is `IN_MEMORY`."""
    if not isinstance(tx, Offloaded):
        return IN_MEMORY
    return _store(tx.arguments["to"], tx.arguments["bucket_bytes"])


def inner_of(tx: Transform) -> Transform:
    """Return the transform to which `offload` was applied. Return any other transform unchanged."""
    return tx.arguments["tx"] if isinstance(tx, Offloaded) else tx


def _store(to: str, bucket_bytes: int) -> Store:
    """Return the store for the arguments of `offload`. Raise if ``to`` is a device, such as "cuda:0", or no text.

    >>> _store("cpu", 1024)
    Store(to='cpu', bucket_bytes=1024)
    """
    if not isinstance(to, str):
        raise TypeError(f'to must be "cpu" or the path of a folder, found {to!r}')
    # The name of another device would silently be used as the name of a folder.
    is_device = to.split(":")[0] in DEVICES or to.startswith("cpu:")
    if not to or is_device:
        raise ValueError(
            f'to: found {to!r}, expected "cpu" or the path of a folder; for a folder of this name write "./{to}"'
        )
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: found {bucket_bytes!r}, expected an int of 1 or more")
    if to == "cpu":
        return Store(to, bucket_bytes)
    # An absolute path, so that the folder stays the same if the process changes its working directory.
    folder = os.path.abspath(os.path.expanduser(to))
    return Store(folder, bucket_bytes)
