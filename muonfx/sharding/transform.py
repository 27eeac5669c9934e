"""`sharded`: run a transform on this rank's shards, with the same update as on whole tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec, cast

import torch

from muonfx import tree
from muonfx.core import Donation, InitAndUpdate, Transform
from muonfx.core.contract import Declaration, require_transform
from muonfx.core.definition import make_factory
from muonfx.core.donation import NOTHING, unshared
from muonfx.core.patterns import warn_of_unmatched
from muonfx.program.offload.store import IN_MEMORY, Store
from muonfx.program.offload.transform import inner_of, store_of
from muonfx.program.placement import Arguments
from muonfx.sharding.binding import Binding
from muonfx.sharding.consensus import outside_transforms
from muonfx.sharding.dtensors import local_tree, to_dtensors
from muonfx.sharding.layout import Layout
from muonfx.sharding.plan.assignment import Settings
from muonfx.sharding.replicas import verify_params
from muonfx.sharding.state import state_to_dtensors, without_dtensors
from muonfx.sharding.steps import agreed_call, next_serial, verify_ranks
from muonfx.tree import PyTree

__all__ = ["Sharded", "step_sharded", "init_sharded", "settings_of", "sharded", "bind"]


P = ParamSpec("P")

Replicas = Literal["auto", "split", "everyone"]
"""Which ranks compute a matrix that all ranks hold."""


class Sharded(Transform):
    """The class of the transforms that `sharded` returns. Errors are raised on all ranks, before any tensor changes."""

    @property
    def layout(self) -> Layout:
        """The layout of the parameters."""
        return self.arguments["layout"]

    @property
    def stays_outermost(self) -> bool:
        """Always True: wrappers such as `offload` are applied to the inner transform, inside `sharded`.

        The ranks agree on a step before any of it runs, so a sharded transform must be the outermost transform.
        """
        return True

    def init(self, params: PyTree) -> PyTree:
        """Return this rank's state for its shards of the parameters.

        All ranks must call this together, unless ``params`` are meta tensors.
        """
        return self.functions.init(params)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, *, donate: bool | Donation = False, **extras: Any
    ) -> tuple[PyTree, PyTree]:
        """Return this rank's shards of the new updates, and its next state. All ranks must call this together."""
        problem: TypeError | None = None
        given = NOTHING
        try:
            given = Donation.of(donate)
        except TypeError as error:  # perhaps on this rank only: raised later, on all ranks together
            problem = error
        return self.functions.update(updates, state, params, donate=given, check=True, problem=problem, **extras)


def _factory(constructor: Callable[P, InitAndUpdate]) -> Callable[P, Transform]:
    """Decorate the constructor of `sharded`; its transforms have the hyperparameters and state of their inner one."""
    return make_factory(Sharded, constructor, Declaration(), transparent=True)


@_factory
def sharded(
    tx: Transform,
    layout: Layout,
    *,
    replicas: Replicas = "auto",
    bucket_bytes: int = 1 << 28,
):
    """Build a transform that runs ``tx`` on this rank's shards, with the same update as ``tx`` on whole tensors.

    The gathered updates equal the updates of ``tx`` in one process, bitwise if the same kernels run on the same
    matrices, else within rounding. Elementwise transforms run on the local shards. Each matrix is gathered on one rank,
    computed there once, and scattered back. Sums over the tree, such as a global norm, run over all ranks.

    Args:
        tx: any transform. The result keeps its hyperparameters, its state's structure and its fingerprint.
        layout: the layout of the parameters.
        replicas: which ranks compute a matrix that all ranks hold. "split": one rank, which sends the result to the
            others; "everyone": every rank, without communication; "auto": the faster of the two.
        bucket_bytes: the approximate memory for one exchange of matrices, message buffers included. A matrix that
            needs more is sent alone.

    Returns:
        A transform on trees of local tensors or of DTensors. For DTensor parameters, the updates and the state of
        these parameters are DTensors too, if their placement can be expressed.

    Raises:
        TypeError: ``tx`` is not a transform or ``layout`` is not a layout.
        ValueError: an unknown setting.

    The communication follows Dion (arXiv 2504.05295) and distributed Muon (arXiv 2502.16982), but needs no padding and
    supports every layout.

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
    require_transform("tx", tx)
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a muonfx.sharding layout, found {layout!r}")
    if replicas not in ("auto", "split", "everyone"):
        raise ValueError(f"replicas: found {replicas!r}, expected 'auto', 'split' or 'everyone'")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: found {bucket_bytes!r}, expected an int of 1 or more")
    settings = Settings(replicas, bucket_bytes)
    inner, store = inner_of(tx), store_of(tx)

    def init(params: PyTree) -> PyTree:
        binding = bind(layout, settings, store)
        local = local_tree(params)
        present = [leaf for leaf in tree.leaves(local) if leaf is not None]
        if present and all(leaf.is_meta for leaf in present):
            return binding.executor.init(inner, local)
        with outside_transforms("init of a sharded transform", params) as problem:
            state = init_sharded(binding, inner, params, problem)
        return state_to_dtensors(binding, inner, params, state) if layout.dtensors else state

    @torch.no_grad()
    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        check: bool = False,
        problem: Exception | None = None,
        **extras: Any,
    ) -> tuple[PyTree, PyTree]:
        binding = bind(layout, settings, store)
        like = updates if params is None else params
        own = without_dtensors(binding, inner, like, state) if layout.dtensors else state
        with outside_transforms("update of a sharded transform", updates, own, params, extras) as transformed:
            call = Arguments(updates, own, params, donate, extras)
            out, after = step_sharded(binding, inner, call, check=check, problem=problem or transformed)
        if check and not donate.state:
            after = tree.copy_shared(after, own)
        if not layout.dtensors or (local_tree(updates) is updates and local_tree(params) is params):
            return out, after
        return to_dtensors(layout, out, updates), state_to_dtensors(binding, inner, updates, after, state)

    # A compiled graph cannot contain these collectives.
    return cast("InitAndUpdate", (torch.compiler.disable(init), torch.compiler.disable(update)))


def init_sharded(binding: Binding, tx: Transform, params: PyTree, problem: Exception | None = None) -> PyTree:
    """Verify that the ranks agree, and return this rank's state. An error on one rank is raised on all ranks."""
    try:
        warn_of_unmatched(tx.name_patterns, params)
    except Exception as error:  # perhaps on this rank only: raised on all ranks together
        problem = problem or error
    verify_ranks(binding, tx, params, problem)
    local = local_tree(params)
    state: PyTree = None
    try:
        state = binding.executor.init(tx, local)
    except Exception as error:
        problem = error
    verify_params(binding.layout, local, problem, may_fail=True)
    binding.serial = next_serial(binding.layout)
    return state


def step_sharded(
    binding: Binding,
    tx: Transform,
    call: Arguments,
    *,
    check: bool = False,
    problem: Exception | None = None,
    serial: int | None = None,
) -> tuple[PyTree, PyTree]:
    """Run one step on local tensors; return the updates and the next state. An error on one rank is raised on all."""
    # `tx` has the current hyperparameters; `serial` numbers an optimizer, because several may share a binding.
    local = agreed_call(binding, tx, call, check=check, problem=problem, serial=serial)
    donate, updates, state = unshared(local.donate, local.updates, local.state, local.params)
    return binding.executor.update(tx, local._replace(updates=updates, state=state, donate=donate))


def settings_of(tx: Sharded) -> Settings:
    """Return the settings with which `sharded` built a transform."""
    return Settings(*(tx.arguments[name] for name in Settings._fields))


def bind(layout: Layout, settings: Settings, store: Store = IN_MEMORY) -> Binding:
    """Return the `Binding` of a layout with some settings and a store, created once and cached in the layout."""
    key = ("binding", settings, store)
    if key not in layout.derived:
        layout.derived[key] = Binding(layout, settings, store)
    return layout.derived[key]
