"""Strategies for transforms: every public transform with drawn arguments, and chains of transforms."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from muonfx import contrib, recipes, select, tree
from muonfx import transforms as tfs
from muonfx.compact import fp8, int8
from muonfx.contrib import recipes as variants
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
from muonfx.core.contract import NOTHING
from muonfx.select.partition import masked, partition
from muonfx.tree import PyTree

__all__ = ["MATRIX_ONLY", "arguments", "chains", "schedules", "transforms"]


def schedules() -> st.SearchStrategy[sch.Schedule]:
    """Draw a schedule: any public one, with small valid arguments.

    >>> from hypothesis import find
    >>> find(schedules(), lambda drawn: drawn(0) != drawn(1))
    linear(start=0.0, end=0.125, steps=1)
    """
    values = st.sampled_from((0.0, 0.125, 0.5, 1.0))
    lengths = st.integers(0, 4)
    ways = st.sampled_from(("linear", "cosine"))
    scales = st.sampled_from(({}, {1: 0.5}, {2: 0.5, 3: 2.0}))

    def trapezoid(peak: float, up: int, down: int, flat: int) -> sch.Schedule:
        return sch.warmup_stable_decay(peak, up, down, up + flat + down)

    simple: st.SearchStrategy[Any] = st.one_of(
        st.builds(sch.constant, values),
        st.builds(sch.linear, values, values, lengths),
        st.builds(sch.cosine, values, lengths, values),
        st.builds(lambda peak, up, more: sch.warmup_cosine(peak, up, up + more), values, lengths, lengths),
        st.builds(trapezoid, values, lengths, lengths, lengths),
        st.builds(sch.polynomial, values, values, lengths, st.sampled_from((1.0, 2.0)), st.integers(0, 1)),
        # Not from 0: growth overflows at late steps, and zero times infinity is NaN, which is refused.
        st.builds(
            sch.exponential,
            st.sampled_from((0.125, 0.5, 1.0)),
            st.integers(1, 3),
            st.sampled_from((0.5, 2.0)),
            staircase=st.booleans(),
        ),
        st.builds(sch.piecewise_constant, values, scales),
        st.builds(sch.piecewise_interpolate, values, scales, ways),
        st.builds(sch.one_cycle, values, st.integers(1, 4), ways),
        st.builds(sch.sgdr, values, st.integers(1, 3), st.integers(1, 3), growth=st.integers(1, 2)),
    )
    joined = st.builds(lambda a, b, at: sch.join([a, b], [at]), simple, simple, st.integers(1, 3))
    return simple | joined


def halve(updates: PyTree, params: PyTree) -> PyTree:
    """Halve the updates: a function for `stateless` that pickles, because a module defines it."""
    return tree.map(lambda u: u / 2, updates)


def by_rank(params: PyTree) -> PyTree:
    """Return labels for `partition` that fit every tree: "matrices" and "rest"."""
    return tree.map(lambda leaf: "matrices" if leaf.ndim >= 2 else "rest", params)


def every_other(count: Tensor) -> Tensor:
    """Return True at every other step: a condition for `conditionally_transform` that pickles."""
    return count % 2 == 0


@transform(
    locality=lambda inner: inner.locality,
    combinator=Combinator(Locality.ELEMENT),
    reads_params=lambda inner: inner.reads_params,
)
def with_value(inner: Transform):
    """Pass a transform the named extra ``value``, which laws do not pass: a loss that does not improve."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING):
        return inner.run(updates, state, params, donate=donate, value=1.0)

    return inner.functions.init, update


_SHARES = st.sampled_from((0.9, 0.0, 0.5, 0.99))
_SCALES = st.sampled_from((1.0, -0.5, 0.0, 3.0))
_POSITIVE = st.sampled_from((1.0, 0.01, 0.3, 10.0))
_TINY = st.sampled_from((1e-8, 1e-3))
_PINNED = st.sampled_from(("auto", torch.float32, None, torch.float64, torch.bfloat16))
# Blocks of a few elements, so that the small leaves of examples have several, with a tail.
_COMPACT = st.builds(
    int8,
    st.sampled_from((4, 5, 2048)),
    code=st.sampled_from(("linear", "dynamic")),
    min_size=st.sampled_from((0, 4)),
    stochastic=st.booleans(),
) | st.builds(fp8, st.just(4), format=st.sampled_from(("e4m3", "e5m2")), min_size=st.just(0), stochastic=st.booleans())
_STATE: st.SearchStrategy[Any] = st.one_of(_PINNED, _PINNED, _COMPACT)
_RATES: st.SearchStrategy[Any] = st.sampled_from((0.1, 0.0)) | schedules()
_DIMS = st.sampled_from((None, ((-2,), (-1,)), ((0,), (1,))))
_NAMES = st.sampled_from(("polar_express_5", "keller", "cubic"))
_COMPUTE = st.sampled_from(("auto", torch.float32, torch.float64))
_VIEWS = st.builds(select.MatrixView, _DIMS)
_BLOCK_VIEWS = st.builds(select.MatrixView, _DIMS, st.just(1), st.sampled_from((-2, -1)))
_ORTHOGONAL = st.builds(tfs.orthogonalize, dtype=_COMPUTE)
_RULES = st.sampled_from(("match_rms_adamw", "original", "spectral", "fan_in"))
_MASKS = st.sampled_from((None, select.ndim(min=2)))


def _momenta() -> st.SearchStrategy[Any]:
    return st.builds(
        lambda decay, nesterov, debias, heavy, dtype: tfs.momentum(
            decay, nesterov=nesterov, debias=debias and not heavy, heavy_ball=heavy, dtype=dtype
        ),
        _SHARES,
        st.booleans(),
        st.booleans(),
        st.booleans(),
        _STATE,
    )


def _adams() -> st.SearchStrategy[Any]:
    return st.builds(
        tfs.scale_by_adam,
        _SHARES,
        _SHARES,
        _TINY,
        eps_root=st.sampled_from((0.0, 1e-6)),
        mu_dtype=_STATE,
        nu_dtype=_STATE,
    )


_WITHOUT_MOMENTUM: st.SearchStrategy[Any] = st.one_of(
    st.builds(tfs.scale_by_adam, st.just(0.0), _SHARES),
    st.builds(tfs.clip_by_global_norm, _POSITIVE),
    st.builds(tfs.scale, _SCALES),
)
_INNER: st.SearchStrategy[Any] = st.one_of(_momenta(), _adams(), _WITHOUT_MOMENTUM)


def _is_negative_scale(tx: Transform) -> bool:
    factor = tx.arguments["factor"] if tx.name == "scale" else 1.0
    return isinstance(factor, float) and factor < 0


_ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "identity": st.builds(identity),
    "set_to_zero": st.builds(set_to_zero),
    "stateless": st.builds(stateless, st.just(halve), st.sampled_from((Locality.ELEMENT, Locality.TREE))),
    "chain": st.lists(_INNER, max_size=3).map(lambda members: chain(*members)),
    "partition": st.builds(lambda a, b: partition({"matrices": a, "rest": b}, by_rank), _INNER, _INNER),
    "masked": st.builds(masked, _INNER, st.just(select.ndim(min=2))),
    "accumulate": st.builds(tfs.accumulate, _INNER, st.integers(1, 3), mean=st.booleans(), dtype=_PINNED),
    "add_decayed_weights": st.builds(tfs.add_decayed_weights, _RATES, _MASKS, cautious=st.booleans()),
    "subtract_decayed_weights": st.builds(tfs.subtract_decayed_weights, _RATES, _MASKS, cautious=st.booleans()),
    "conditionally_mask": st.builds(contrib.conditionally_mask, _INNER, st.just(every_other)),
    "conditionally_transform": st.builds(contrib.conditionally_transform, _INNER, st.just(every_other)),
    "lookahead": st.builds(
        contrib.lookahead, _INNER, st.integers(1, 3), st.sampled_from((0.5, 0.0, 1.0)), dtype=_PINNED
    ),
    "reduce_on_plateau": st.builds(
        lambda *given: with_value(contrib.reduce_on_plateau(*given)),
        st.sampled_from((0.5, 0.1)),
        st.integers(1, 2),
        st.just(1e-4),
        st.just(0.0),
        st.integers(0, 2),
        st.integers(1, 2),
    ),
    "sam": st.builds(contrib.sam, st.sampled_from((0.05, 0.0, 2.0)), adaptive=st.booleans()),
    "scale_by_ademamix": st.builds(
        contrib.scale_by_ademamix,
        _SHARES,
        _SHARES,
        _SHARES | st.builds(sch.linear, _SHARES, _SHARES, st.integers(0, 4)),
        _RATES,
        _TINY,
        mu_dtype=_STATE,
        nu_dtype=_STATE,
    ),
    "scale_by_dog": st.builds(contrib.scale_by_dog, _POSITIVE, _TINY),
    "scale_by_dowg": st.builds(contrib.scale_by_dowg, st.sampled_from((None, 0.1)), _TINY),
    "scale_by_prodigy": st.builds(
        contrib.scale_by_prodigy,
        _RATES,
        _SHARES,
        _SHARES,
        _TINY,
        estim_lr0=st.sampled_from((1e-6, 1e-2)),
        weight_decay=_SHARES,
        safeguard_warmup=st.booleans(),
        dtype=_PINNED,
    ),
    "schedule_free": st.builds(
        contrib.schedule_free,
        _WITHOUT_MOMENTUM,
        _RATES,
        st.sampled_from((0.9, 1.0, 0.5)),
        weight_lr_power=_SHARES,
        dtype=_PINNED,
    ),
    "cautious": st.builds(tfs.cautious, _INNER.filter(lambda tx: not _is_negative_scale(tx))),
    "add_updates": st.lists(_INNER, min_size=1, max_size=2).map(lambda members: add_updates(*members)),
    "clip_singular_values": st.builds(contrib.clip_singular_values, _POSITIVE, view=_VIEWS),
    "keep_weight_norms": st.builds(tfs.keep_weight_norms, dtype=_PINNED, view=_VIEWS),
    "match_weight_norms": st.builds(tfs.match_weight_norms, view=_VIEWS),
    "sampled_momentum": st.builds(contrib.sampled_momentum, st.integers(1, 3), _SHARES, dtype=_PINNED),
    "scale_by_dion": st.builds(contrib.scale_by_dion, st.integers(1, 3), _SHARES, dtype=_PINNED, view=_VIEWS),
    "scale_by_dual_norm": st.builds(contrib.scale_by_dual_norm, _INNER, view=_VIEWS),
    "scale_by_namo": st.builds(contrib.scale_by_namo, _INNER, _SHARES, _SHARES, _TINY, dtype=_PINNED, view=_VIEWS),
    "adaptive_grad_clip": st.builds(tfs.adaptive_grad_clip, _POSITIVE, _POSITIVE),
    "add_noise": st.builds(contrib.add_noise, _SHARES, _SHARES, st.integers(0, 3)),
    "centralize": st.builds(tfs.centralize),
    "clip_by_block_rms": st.builds(tfs.clip_by_block_rms, _POSITIVE),
    "clip_by_global_norm": st.builds(tfs.clip_by_global_norm, _POSITIVE),
    "clip_by_value": st.builds(tfs.clip_by_value, _POSITIVE),
    "ema_params": st.builds(tfs.ema_params, _SHARES, dtype=_STATE),
    "master_params": st.builds(tfs.master_params, _INNER, st.sampled_from(("auto", torch.float32))),
    "momentum": _momenta(),
    "monitor": st.builds(
        tfs.monitor,
        st.just("seen"),
        st.sampled_from((("norm", "rms"), ("norm", "orthogonality_error", "spectral_norm"))),
        by_leaf=st.booleans(),
    ),
    "normalize_columns": st.builds(tfs.normalize_columns, view=_BLOCK_VIEWS),
    "normalize_leaves": st.builds(tfs.normalize_leaves),
    "normalize_matrices": st.builds(tfs.normalize_matrices, view=_VIEWS),
    "normalize_rows": st.builds(tfs.normalize_rows, view=_VIEWS),
    "normalize_by_update_norm": st.builds(tfs.normalize_by_update_norm, _SCALES, _TINY),
    "normalize_neurons": st.builds(
        tfs.normalize_neurons,
        _SHARES,
        _TINY,
        keep_norm=st.booleans(),
        axis=st.sampled_from(("rows", "longer")),
        dtype=_PINNED,
        view=_VIEWS,
    ),
    "orthogonalize": st.builds(
        tfs.orthogonalize,
        coefficients=_NAMES,
        steps=st.sampled_from((None, 3)),
        dtype=_COMPUTE,
        view=_VIEWS | _BLOCK_VIEWS,
    ),
    "scale": st.builds(tfs.scale, _SCALES),
    "scale_by_adam": _adams(),
    "scale_by_factored_rms": st.builds(
        tfs.scale_by_factored_rms,
        factored=st.booleans(),
        decay_rate=_SHARES,
        min_dim_size_to_factor=st.sampled_from((1, 2, 128)),
        dtype=_PINNED,
    ),
    "scale_by_learning_rate": st.builds(tfs.scale_by_learning_rate, _RATES, flip_sign=st.booleans()),
    "scale_by_lion": st.builds(tfs.scale_by_lion, _SHARES, _SHARES, mu_dtype=_STATE),
    "scale_by_rms": st.builds(
        tfs.scale_by_rms,
        _SHARES,
        _TINY,
        st.sampled_from((0.0, 1.0)),
        eps_in_sqrt=st.booleans(),
        debias=st.booleans(),
        nu_dtype=_STATE,
    ),
    "scale_by_shape": st.builds(tfs.scale_by_shape, _RULES, view=_VIEWS),
    "scale_by_sign": st.builds(tfs.scale_by_sign),
    "scale_by_trust_ratio": st.builds(tfs.scale_by_trust_ratio, st.sampled_from((0.0, 1e-3)), _SHARES, _TINY),
    "skip_nonfinite": st.builds(tfs.skip_nonfinite, _INNER),
    "adamw": st.builds(recipes.adamw, _RATES, b1=_SHARES, b2=_SHARES, mask=_MASKS),
    "lion": st.builds(recipes.lion, _RATES, b1=_SHARES, b2=_SHARES),
    "muon": st.builds(
        recipes.muon, _RATES, decay=_SHARES, nesterov=st.booleans(), orthogonalize=_ORTHOGONAL, rule=_RULES
    ),
    "normuon": st.builds(recipes.normuon, _RATES, decay=_SHARES, neuron_decay=_SHARES, orthogonalize=_ORTHOGONAL),
    "adamuon": st.builds(variants.adamuon, _RATES, decay=_SHARES, second_decay=_SHARES, nesterov=st.booleans()),
    "dion2": st.builds(variants.dion2, _RATES, one_in=st.integers(1, 3), decay=_SHARES, rule=_RULES),
    "dion": st.builds(variants.dion, _RATES, rank=st.integers(1, 3), decay=_SHARES),
    "muon_hyperball": st.builds(variants.muon_hyperball, _RATES, decay=_SHARES),
    "musgd": st.builds(variants.musgd, _RATES, decay=_SHARES, weight_decay=_SHARES),
    "namo": st.builds(variants.namo, _RATES, b1=_SHARES, b2=_SHARES, rule=_RULES),
    "polargrad": st.builds(variants.polargrad, _RATES, decay=_SHARES),
    "scion": st.builds(
        variants.scion, _RATES, decay=_SHARES, constrained=st.booleans(), labels=st.just(select.default_labels_by_name)
    ),
    "prodigy": st.builds(variants.prodigy, _RATES, b1=_SHARES, b2=_SHARES, weight_decay=_SHARES),
    "muon_with_adamw": st.builds(
        recipes.muon_with_adamw,
        _RATES,
        _RATES,
        weight_decay=_SHARES,
        labels=st.just(select.default_labels_by_name),
    ),
    # Without heads, since drawn trees have no attention modules.
    "qk_clip": st.builds(tfs.qk_clip, st.just(()), _POSITIVE, _SHARES),
    "muonclip": st.builds(recipes.muonclip, st.just(()), _RATES, labels=st.just(select.default_labels_by_name)),
}

MATRIX_ONLY = frozenset(
    {
        "adamuon",
        "clip_singular_values",
        "keep_weight_norms",
        "match_weight_norms",
        "dion",
        "dion2",
        "muon",
        "muon_hyperball",
        "musgd",
        "namo",
        "normalize_columns",
        "normalize_matrices",
        "normalize_neurons",
        "normalize_rows",
        "normuon",
        "orthogonalize",
        "polargrad",
        "sampled_momentum",
        "scale_by_dion",
        "scale_by_dual_norm",
        "scale_by_namo",
        "scale_by_shape",
    }
)
"""The factories whose transforms take leaves of two dims and more only."""


def arguments() -> dict[str, st.SearchStrategy[Any]]:
    """For the name of every public factory and recipe, a strategy of the transforms that it makes.

    >>> from hypothesis import find
    >>> find(arguments()["clip_by_value"], lambda tx: True)
    clip_by_value(limit=1.0)
    """
    return dict(_ARGUMENTS)


def transforms(names: Iterable[str] | None = None, *, matrices: bool = False) -> st.SearchStrategy[Transform]:
    """Draw a public transform with valid arguments.

    Args:
        names: of the factories to draw from; None: all that take any tree.
        matrices: also those that take leaves of two dims and more only, where ``names`` is None.

    >>> from hypothesis import find
    >>> find(transforms(["momentum", "scale"]), lambda tx: tx.name == "scale")
    scale(factor=1.0)
    """
    if names is None:
        names = [name for name in _ARGUMENTS if matrices or name not in MATRIX_ONLY]
    return st.one_of([_ARGUMENTS[name] for name in names])


def chains(*, min_size: int = 0, max_size: int = 4, matrices: bool = False) -> st.SearchStrategy[list[Transform]]:
    """Draw a list of transforms, to be put into a `chain`.

    Args:
        min_size: least number.
        max_size: largest number.
        matrices: as in `transforms`.

    >>> from hypothesis import find
    >>> find(chains(), lambda drawn: len(drawn) == 1)
    [identity()]
    """
    # master_params keeps the parameters of a whole chain, so it cannot be a member of another chain.
    names = [name for name in _ARGUMENTS if name != "master_params" and (matrices or name not in MATRIX_ONLY)]
    return st.lists(transforms(names), min_size=min_size, max_size=max_size).filter(_is_sensible)


def _is_sensible(members: list[Transform]) -> bool:
    """Return True if the members make a chain without a warning: one learning rate, and all in valid positions."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            chain(*members)
        except (UserWarning, ValueError):
            return False
    return True
