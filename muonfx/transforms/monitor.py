"""Measuring of updates inside a chain: `monitor` stores scalars in its state, and `metrics` returns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, extras, transform
from muonfx.core.donation import NOTHING
from muonfx.internal.wrappers import unwrapped_optimizer
from muonfx.transforms.clip import Sum, norm_over_leaves
from muonfx.tree import PyTree, device_of
from muonfx.tree import elementwise as ew


class MonitorState(NamedTuple):
    """State of the transform `monitor`: the latest measured values."""

    values: dict[str, Tensor]
    """The latest value of each metric, 0-d fp32, by the key "name/metric", or "name/leaf/metric" with ``by_leaf``."""


def _size(u: Tensor) -> Tensor:
    """Return the number of elements as a tensor, which can be added up over ranks."""
    return torch.full((), float(u.numel()), dtype=torch.float32, device=u.device)


def _rms(updates: PyTree, total: Sum) -> Tensor:
    """Return the root mean square of all elements: their 2-norm, divided by the root of their number."""
    number = total(tree.map(_size, updates))
    return norm_over_leaves(updates, total) / number.clamp(min=1.0).sqrt()


def _orthogonality_error(updates: PyTree, total: Sum) -> Tensor:
    """Return the mean relative distance of the leaves, flattened to matrices, from orthonormal matrices."""
    device = device_of(updates)
    errors: list[Tensor] = []
    for u in tree.tensors(updates):
        if u.ndim >= 2 and u.numel() > 0:
            errors.append(_distance_from_orthonormal(u).to(device))
    if not errors:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(errors).mean()


def _distance_from_orthonormal(u: Tensor) -> Tensor:
    """Return ``|U U^T - I| / sqrt(r)`` for a leaf as a matrix U whose r rows are its shorter side."""
    # A product rounds by the strides and the alignment of its factors, which copies have in common.
    copy = u.reshape(u.shape[0], -1).clone(memory_format=torch.contiguous_format)
    matrix = copy.to(ew.wide_dtype(u.dtype))
    if matrix.shape[0] > matrix.shape[1]:
        matrix = matrix.mT
    gram = matrix @ matrix.mT
    r = len(gram)
    identity = torch.eye(r, dtype=gram.dtype, device=gram.device)
    distance = torch.linalg.vector_norm(gram - identity)
    return distance / r**0.5


Metric = Literal["norm", "rms", "orthogonality_error"]
"""The name of a metric of `monitor`."""

METRICS: dict[str, Callable[[PyTree, Sum], Tensor]] = {
    "norm": norm_over_leaves,
    "rms": _rms,
    "orthogonality_error": _orthogonality_error,
}
"""The metrics of `monitor` by name: functions of a tree of updates and of ``sum_over_leaves``, a sum over all ranks."""

_SUMS = {"norm", "rms"}


@transform(locality=Locality.TREE, position="observer")
def monitor(name: str = "updates", metrics: tuple[Metric, ...] = ("norm", "rms"), *, by_leaf: bool = False):
    r"""Measure the updates, store the values in the state, and return the updates unchanged.

    It measures the updates at its place in the chain. Put it first for the gradient norm, after `orthogonalize` for
    the orthogonality error, and last for the size of the steps. `metrics` returns the values from the chain's state.

    Args:
        name: prefix of the keys of the values; it must differ between the monitors of a chain.
        metrics: any of "norm" (2-norm of the whole tree), "rms" (root mean square of all elements), and
            "orthogonality_error" (mean over matrices U of $\|UU^T - I\|_F / \sqrt{r}$, where r is the length of U's
            shorter side; U is transposed if it has more rows than columns).
        by_leaf: measure each leaf separately, with the key "name/leaf/metric". `muonfx.plot.plot_update_rms` plots the
            values. If parameters are sharded, all updates are gathered at every step.

    Raises:
        ValueError: a metric is unknown, or ``metrics`` is empty; the message lists the known metrics.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.monitor("grad", ("norm",)), mfx.scale(2.0))
        >>> _, state = tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init({"w": torch.zeros(2)}))
        >>> mfx.metrics(state)
        {'grad/norm': tensor(5.)}
        >>> each = mfx.monitor("grad", ("rms",), by_leaf=True)
        >>> _, state = each.update({"w": torch.tensor([3.0, 4.0])}, each.init({"w": torch.zeros(2)}))
        >>> mfx.metrics(state)
        {'grad/w/rms': tensor(3.5355)}
    """
    if not metrics or not METRICS.keys() >= set(metrics):
        raise ValueError(f"monitor: found the metrics {metrics!r}, expected some of {', '.join(map(repr, METRICS))}")

    unique_metrics = list(dict.fromkeys(metrics))  # a metric that is given twice is measured once

    def trees(values: PyTree) -> dict[str, PyTree]:
        """Return the trees to measure: the whole tree by ``name``, or each leaf by "name/leaf"."""
        if not by_leaf:
            return {name: values}
        return {f"{name}/{leaf_name}": leaf for leaf_name, leaf in tree.named_leaves(values)}

    def init(params: PyTree) -> MonitorState:
        zero = torch.zeros((), dtype=torch.float32, device=device_of(params))
        values: dict[str, Tensor] = {}
        for prefix in trees(params):
            for metric in unique_metrics:
                values[f"{prefix}/{metric}"] = zero.clone()
        return MonitorState(values)

    def update_on_shards(
        updates: PyTree, state: MonitorState, params: PyTree = None, *, sum_over_leaves: Sum, donate: Donation = NOTHING
    ):
        """Measure the updates, which are this rank's shards if ``sum_over_leaves`` adds up over ranks."""
        values: dict[str, Tensor] = {}
        for prefix, measured_tree in trees(updates).items():
            for metric in unique_metrics:
                key = f"{prefix}/{metric}"
                value = METRICS[metric](measured_tree, sum_over_leaves)
                values[key] = value.to(state.values[key])  # on the device of the state
        return updates, MonitorState(values)

    def update(updates: PyTree, state: MonitorState, params: PyTree = None, *, donate: Donation = NOTHING):
        return update_on_shards(updates, state, sum_over_leaves=extras.sum_over_leaves)

    # The sharding layer passes shards to an ``update`` with the argument ``sum_over_leaves``, and whole leaves to any
    # other. The metrics of the whole tree in `_SUMS` are sums, which can be added up over ranks.
    if not by_leaf and _SUMS.issuperset(metrics):
        return init, update_on_shards
    return init, update


def metrics(state: PyTree) -> dict[str, Tensor]:
    """Return the latest values of all `monitor` transforms in a state, as a dict from "name/metric" to a 0-d tensor.

    Args:
        state: the state of a chain, or of any transform that contains monitors; or a `TransformOptimizer`, for its
            state.

    Raises:
        ValueError: two monitors have the same name.

    >>> import muonfx as mfx
    >>> list(metrics(mfx.chain(mfx.monitor("grad")).init({"w": torch.zeros(2)})))
    ['grad/norm', 'grad/rms']
    """
    if isinstance(state, torch.optim.Optimizer):
        state = cast("Any", unwrapped_optimizer(state)).transform_state
    values: dict[str, Tensor] = {}
    for monitor_state in tree.get_all(state, MonitorState).values():
        shared_keys = values.keys() & monitor_state.values.keys()
        if shared_keys:
            raise ValueError(
                f"metrics: found {min(shared_keys)!r} in two monitors, expected one: give each monitor its own name"
            )
        values.update(monitor_state.values)
    return values
