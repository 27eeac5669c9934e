"""Hypothesis strategies that draw transforms: every public transform with valid arguments, and chains of them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from muonfx import contrib, recipes, routing, tree
from muonfx import transforms as tfs
from muonfx.compact import fp8, int8
from muonfx.core import (
    Combinator,
    Donation,
    Locality,
    Transform,
    add_updates,
    chain,
    identity,
    set_to_zero,
    stateless,
    transform,
)
from muonfx.core import schedules as sch
from muonfx.core.donation import NOTHING
from muonfx.core.partition import masked, partition
from muonfx.routing.roles import ROLES
from muonfx.tree import PyTree

Strategy = st.SearchStrategy[Any]


def schedules() -> st.SearchStrategy[sch.Schedule]:
    """Return a hypothesis strategy that draws any public schedule, with small valid arguments.

    >>> from hypothesis import find
    >>> find(schedules(), lambda drawn: drawn(0) != drawn(1))
    linear_schedule(start=0.0, end=0.125, steps=1)
    """
    values = st.sampled_from((0.0, 0.125, 0.5, 1.0))
    # Short, so that an example of a few steps reaches the end of a schedule.
    lengths = st.integers(0, 4)

    # The lengths of the phases are drawn, since a total number of steps must not be less than their sum.
    def cosine(peak: float, warmup: int, decay: int) -> sch.Schedule:
        return sch.warmup_cosine_decay_schedule(peak, warmup, warmup + decay)

    def trapezoid(peak: float, warmup: int, decay: int, stable: int) -> sch.Schedule:
        return sch.warmup_stable_decay_schedule(peak, warmup, decay, warmup + stable + decay)

    simple: Strategy = st.one_of(
        st.builds(sch.constant_schedule, values),
        st.builds(sch.linear_schedule, values, values, lengths),
        st.builds(sch.cosine_decay_schedule, values, lengths, end=values),
        st.builds(cosine, values, lengths, lengths),
        st.builds(trapezoid, values, lengths, lengths, lengths),
        # Rates begin above 0: growth overflows at late steps, and zero times infinity is NaN, which is refused.
        st.builds(
            sch.exponential_decay,
            st.sampled_from((0.125, 0.5)),
            st.integers(1, 3),
            st.sampled_from((0.5, 2.0)),
        ),
    )
    pairs = st.lists(simple, min_size=2, max_size=2)
    boundaries = st.lists(st.integers(1, 3), min_size=1, max_size=1)
    return simple | st.builds(sch.join_schedules, pairs, boundaries)


def halve(updates: PyTree, params: PyTree) -> PyTree:
    """Return half of the updates. A module defines this function for `stateless`, so that it can be pickled."""
    return tree.map(lambda u: u / 2, updates)


def by_rank(params: PyTree) -> PyTree:
    """Return labels for `partition`, which are names of groups: "matrices" for leaves of two or more dims, else "rest".

    >>> by_rank({"b": torch.zeros(3), "w": torch.zeros(2, 3)})
    {'b': 'rest', 'w': 'matrices'}
    """

    def label(leaf: Tensor) -> str:
        if leaf.ndim >= 2:
            return "matrices"
        return "rest"

    return tree.map(label, params)


def by_role(params: PyTree) -> Mapping[str, str | None]:
    """Return the role of each parameter as its label, by name and shape."""
    return routing.default_labels_by_name(params, roles=True)


@transform(
    locality=lambda inner: inner.locality,
    combinator=Combinator(Locality.ELEMENT),
    reads_params=lambda inner: inner.reads_params,
)
def with_value(inner: Transform):
    """Wrap a transform that requires a loss, such as `reduce_on_plateau`: pass ``value=1.0`` to it at every update.

    Laws call `update` without extra arguments.
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING
    ):
        return inner.run(updates, state, params, donate=donate, value=1.0)

    return inner.functions.init, update


_SHARES = st.sampled_from((0.9, 0.0, 0.5, 0.99))
_SCALES = st.sampled_from((1.0, -0.5, 0.0, 3.0))
_POSITIVE = st.sampled_from((1.0, 0.01, 0.3, 10.0))
_TINY = st.sampled_from((1e-8, 1e-3))
_COUNTS = st.integers(1, 3)
_PINNED = st.sampled_from(("auto", torch.float32, None, torch.float64, torch.bfloat16))
# Blocks of a few elements, so that the small leaves of examples have several blocks, and an incomplete last block.
_COMPACT = st.builds(
    int8,
    st.sampled_from((4, 5, 2048)),
    code=st.sampled_from(("linear", "dynamic")),
    min_size=st.sampled_from((0, 4)),
    stochastic=st.booleans(),
) | st.builds(
    fp8,
    st.just(4),
    format=st.sampled_from(("e4m3", "e5m2")),
    min_size=st.just(0),
    stochastic=st.booleans(),
)
_STATE: Strategy = st.one_of(_PINNED, _PINNED, _COMPACT)
_RATES: Strategy = st.sampled_from((0.1, 0.0)) | schedules()
_COMPUTE = st.sampled_from(("auto", torch.float32, torch.float64))
_VIEWS = st.builds(
    tfs.MatrixView,
    st.sampled_from(
        (
            None,
            "... out in -> ... out in",
            "out in ... -> ... out in",
            "... in out -> ... out in",
            "(part=1 out) ... -> part out (...)",
            "... in (part=1 out) -> ... part out in",
        )
    ),
)
"""Several `MatrixView` values that fit every tensor of at least two dims."""

_BY_NAME: dict[str, Strategy] = {
    **dict.fromkeys(("learning_rate", "adamw_learning_rate"), _RATES),
    **dict.fromkeys(("b1", "b2", "decay", "neuron_decay", "decay_rate", "weight_decay"), _SHARES),
    **dict.fromkeys(("alpha", "outward", "inward", "weight_lr_power"), _SHARES),
    **dict.fromkeys(("max_norm", "limit", "threshold", "tau", "floor"), _POSITIVE),
    **dict.fromkeys(("every", "rank", "shrink", "refresh"), _COUNTS),
    **dict.fromkeys(("mu_dtype", "nu_dtype"), _STATE),
    "axis": st.sampled_from(("rows", "longer")),
    "coefficients": st.sampled_from(("polar_express_5", "keller", "cubic")),
    "damping": st.sampled_from((1e-4, 1e-2)),
    "dtype": _PINNED,
    "eps": _TINY,
    "eps_root": st.sampled_from((0.0, 1e-6)),
    "estim_lr0": st.sampled_from((1e-6, 1e-2)),
    "factor": _SCALES,
    "factors": st.sampled_from(("shampoo", "kl")),
    "heads": st.just(()),  # drawn trees have no attention modules
    "labels": st.just(routing.default_labels_by_name),
    "lookahead": _SHARES | schedules(),
    "lr_scaling": st.sampled_from(("match_rms_adamw", "original", "spectral", "fan_in")),
    "mask": st.sampled_from((None, routing.ndim(min=2))),
    "max_precondition_size": st.sampled_from((10_000, 3)),
    "metrics": st.sampled_from((("norm", "rms"), ("norm", "orthogonality_error"))),
    "min_dim_size_to_factor": st.sampled_from((1, 2, 128)),
    "orthogonalize": st.builds(tfs.orthogonalize, dtype=_COMPUTE),
    "rho": st.sampled_from((0.05, 0.0, 2.0)),
    "view": _VIEWS,
}
"""A dict from the name of an argument to its strategy, for arguments that mean the same in every factory."""


def _drawn(
    factory: Callable[..., Transform], **strategies: Strategy
) -> st.SearchStrategy[Transform]:
    """Return a hypothesis strategy that draws transforms of one factory, such as `momentum`, with random arguments.

    An argument is drawn by the given strategy for it, or else by the shared strategy for its name in `_BY_NAME`.
    Without either, a bool is drawn, and any other argument has its default.
    """
    # `momentum(decay, nesterov)` has a decay by its name in `_BY_NAME`, and a drawn True or False for `nesterov`.
    for name, parameter in inspect.signature(factory).parameters.items():
        if name in _BY_NAME:
            strategies.setdefault(name, _BY_NAME[name])
        elif isinstance(parameter.default, bool):
            strategies.setdefault(name, st.booleans())
    return st.builds(factory, **strategies)


_MOMENTA = st.one_of(
    _drawn(tfs.momentum, dtype=_STATE, heavy_ball=st.just(False)),
    _drawn(tfs.momentum, dtype=_STATE, debias=st.just(False)),
)
_WITHOUT_MOMENTUM: Strategy = st.one_of(
    st.builds(tfs.scale_by_adam, st.just(0.0), _SHARES),
    st.builds(tfs.clip_by_global_norm, _POSITIVE),
    st.builds(tfs.scale, _SCALES),
)
_ADAMS = _drawn(tfs.scale_by_adam)
_INNER: Strategy = st.one_of(_MOMENTA, _ADAMS, _WITHOUT_MOMENTUM)
_BY_NAME["inner"] = _INNER


def _is_negative_scale(tx: Transform) -> bool:
    if tx.name != "scale":
        return False
    factor = tx.arguments["factor"]
    return isinstance(factor, float) and factor < 0


_OWN: dict[Callable[..., Transform], dict[str, Strategy]] = {
    stateless: {
        "function": st.just(halve),
        "locality": st.sampled_from((Locality.ELEMENT, Locality.TREE)),
    },
    masked: {"mask": st.just(routing.ndim(min=2))},
    tfs.add_decayed_weights: {"weight_decay": _RATES},
    tfs.cautious: {"inner": _INNER.filter(lambda tx: not _is_negative_scale(tx))},
    tfs.ema_params: {"dtype": _STATE},
    tfs.master_params: {"dtype": st.sampled_from(("auto", torch.float32))},
    tfs.orthogonalize: {"steps": st.sampled_from((None, 3)), "dtype": _COMPUTE},
    tfs.subtract_decayed_weights: {
        "weight_decay": _SHARES | st.builds(sch.linear_schedule, _SHARES, _SHARES, _COUNTS)
    },
    contrib.schedule_free: {"inner": _WITHOUT_MOMENTUM, "b1": st.sampled_from((0.9, 1.0, 0.5))},
    recipes.muonclip: {"labels": _BY_NAME["labels"]},
}
"""Strategies for arguments that mean something else in one factory, or have other valid values there."""

_EXPORTED: dict[str, Any] = {
    name: getattr(module, name) for module in (tfs, contrib) for name in module.__all__
}
_FACTORIES: dict[str, Callable[..., Transform]] = {
    **{factory.__name__: factory for factory in (identity, set_to_zero, stateless, masked)},
    **{name: value for name, value in _EXPORTED.items() if hasattr(value, "definition")},
    "scion": contrib.scion,
    **{name: getattr(recipes, name) for name in recipes.__all__},
}

_ARGUMENTS: dict[str, Strategy] = {
    **{name: _drawn(factory, **_OWN.get(factory, {})) for name, factory in _FACTORIES.items()},
    "momentum": _MOMENTA,
    "scale_by_adam": _ADAMS,
    "chain": st.lists(_INNER, max_size=3).map(lambda members: chain(*members)),
    "partition": st.builds(
        lambda a, b: partition({"matrices": a, "rest": b}, by_rank), _INNER, _INNER
    ),
    "muon_with_adamw": _drawn(recipes.muon_with_adamw)
    | _drawn(
        recipes.muon_with_adamw,
        adamw_learning_rate=st.fixed_dictionaries(dict.fromkeys(ROLES[1:], _RATES)),
        labels=st.just(by_role),
    ),
    "add_updates": st.lists(_INNER, min_size=1, max_size=2).map(
        lambda members: add_updates(*members)
    ),
    "reduce_on_plateau": st.builds(
        contrib.reduce_on_plateau,
        st.sampled_from((0.5, 0.1)),
        st.integers(1, 2),
        st.just(1e-4),
        st.just(0.0),
        st.integers(0, 2),
    ).map(with_value),
}


def _takes_matrices_only(factory: Callable[..., Transform]) -> bool:
    arguments = inspect.signature(factory).parameters.keys()
    return not arguments.isdisjoint({"view", "orthogonalize"}) and "labels" not in arguments


MATRIX_ONLY = frozenset(
    name for name, factory in _FACTORIES.items() if _takes_matrices_only(factory)
)
"""The names of the factories whose transforms accept only leaves of two or more dims."""


def arguments() -> dict[str, Strategy]:
    """Return a dict from the name of each public factory or recipe to a hypothesis strategy for its transforms.

    >>> from hypothesis import find
    >>> find(arguments()["clip_by_value"], lambda tx: True)
    clip_by_value(limit=1.0)
    """
    return dict(_ARGUMENTS)


def transforms(
    names: Iterable[str] | None = None, *, matrices: bool = False
) -> st.SearchStrategy[Transform]:
    """Return a hypothesis strategy that draws a public transform with valid arguments.

    Args:
        names: names of the factories to draw from. None: all factories whose transforms accept any tree.
        matrices: with ``names=None``, also draw transforms that accept only matrices (`MATRIX_ONLY`).

    >>> from hypothesis import find
    >>> find(transforms(["momentum", "scale"]), lambda tx: tx.name == "scale")
    scale(factor=1.0)
    """
    if names is None:
        names = _names(matrices)
    strategies = [_ARGUMENTS[name] for name in names]
    return st.one_of(strategies)


def _names(matrices: bool) -> list[str]:
    """Return the names of all factories; without ``matrices``, of those whose transforms accept any tree."""
    if matrices:
        return list(_ARGUMENTS)
    return [name for name in _ARGUMENTS if name not in MATRIX_ONLY]


def chains(
    *, min_size: int = 0, max_size: int = 4, matrices: bool = False
) -> st.SearchStrategy[list[Transform]]:
    """Return a hypothesis strategy that draws a list of transforms which `chain` accepts without a warning.

    Args:
        min_size: the minimal number of transforms.
        max_size: the maximal number of transforms.
        matrices: also draw transforms that accept only matrices (`MATRIX_ONLY`).

    >>> from hypothesis import find
    >>> find(chains(), lambda drawn: len(drawn) == 1)
    [identity()]
    """
    names = _names(matrices)
    # It contains a whole chain, so it cannot be a member of another chain.
    names.remove("master_params")
    lists = st.lists(transforms(names), min_size=min_size, max_size=max_size)
    return lists.filter(_is_sensible)


def _is_sensible(members: list[Transform]) -> bool:
    """Return True if `chain` accepts the transforms without an error or a warning about their order."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning is raised as an error
        try:
            chain(*members)
        except (UserWarning, ValueError):
            return False
    return True
