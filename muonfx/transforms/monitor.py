"""Measuring of updates inside a chain: `monitor` stores scalars in its state, and `metrics` returns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, extras, transform
from muonfx.core.donation import NOTHING
from muonfx.core.extras import InitAndUpdate
from muonfx.internal.wrappers import unwrapped_optimizer
from muonfx.transforms.clip import Sum, norm_of_sum, squares_of_leaves
from muonfx.tree import PyTree, device_of
from muonfx.tree import elementwise as ew


class MonitorState(NamedTuple):
    """State of the transform `monitor`: the latest measured values."""

    values: dict[str, Tensor]
    """The latest value of each metric, 0-d fp32, by the key "name/metric"."""


class LeafMonitorState(NamedTuple):
    """State of the transform `monitor` with ``by_leaf``: the latest measured values of each leaf."""

    values: dict[str, dict[str, Tensor]]
    """For each metric, by the key "name/metric", a dict from the leaf to its latest value, 0-d fp32."""

    # This is no field. The sharding layer reads it, which would otherwise shard the value of a 0-d leaf.
    is_equal_on_all_ranks = True


Metric = Literal["norm", "rms", "orthogonality_error"]
"""The name of a metric of `monitor`."""

_METRICS = get_args(Metric)


@transform(locality=Locality.TREE, position="observer")
def monitor(
    name: str = "updates", metrics: tuple[Metric, ...] = ("norm", "rms"), *, by_leaf: bool = False
):
    r"""Measure the updates, store the values in the state, and return the updates unchanged.

    It measures the updates at its place in the chain. Put it first for the gradient norm, after `orthogonalize` for
    the orthogonality error, and last for the size of the steps. `metrics` returns the values from the chain's state.

    Args:
        name: prefix of the keys of the values; it must differ between the monitors of a chain.
        metrics: any of "norm" (2-norm of the whole tree), "rms" (root mean square of all elements), and
            "orthogonality_error" (mean over matrices U of $\|UU^T - I\|_F / \sqrt{r}$, where r is the length of U's
            shorter side; U is transposed if it has more rows than columns).
        by_leaf: measure each leaf separately, with the key "name/leaf/metric". `muonfx.plot.plot_update_rms` plots the
            values. A leaf whose gradient is None keeps its former values.

    On sharded parameters, "norm" and "rms" need one all-reduce of a few numbers for each leaf. Their last bits may
    differ from the values of one process, since the squares are added in another order. "orthogonality_error" needs
    whole matrices: every rank gathers all updates at every step, so on a large model call `muonfx.diagnose` now and
    then instead.

    Raises:
        ValueError: a metric is unknown, or ``metrics`` is empty; the message lists the known metrics.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.monitor("grad", ("norm",)), mfx.scale(2.0))
        >>> _, state = tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init({"w": torch.zeros(2)}))
        >>> mfx.metrics(state)
        {'grad/norm': tensor(5.)}
        >>> each = mfx.monitor("grad", ("rms",), by_leaf=True)
        >>> _, state = each.update(
        ...     {"w": torch.tensor([3.0, 4.0])}, each.init({"w": torch.zeros(2)})
        ... )
        >>> mfx.metrics(state)
        {'grad/w/rms': tensor(3.5355)}
    """
    if not metrics or not set(_METRICS).issuperset(metrics):
        raise ValueError(
            f"monitor: found the metrics {metrics!r}, expected some of {', '.join(map(repr, _METRICS))}"
        )

    unique_metrics = list(dict.fromkeys(metrics))  # a metric that is given twice is measured once

    if by_leaf:
        init, update = _monitor_of_leaves(name, unique_metrics)
    else:
        init, update = _monitor_of_tree(name, unique_metrics)
    if "orthogonality_error" in unique_metrics:
        return init, _on_whole_leaves(update)
    return init, update


def _on_whole_leaves(
    update: Callable[..., tuple[PyTree, PyTree]],
) -> Callable[..., tuple[PyTree, PyTree]]:
    """Return a function like ``update`` of a monitor that always receives whole leaves, also on sharded parameters.

    The orthogonality error needs whole matrices. An ``update`` with an argument such as ``sum_over_leaves`` receives
    the shards of one rank, and any other whole leaves. So the new function has no such argument.
    """

    def update_whole_leaves(
        updates: PyTree, state: PyTree, params: PyTree = None, *, donate: Donation = NOTHING
    ):
        # The leaves are whole, so the sums equal the sums of one process.
        return update(updates, state)

    return update_whole_leaves


def _monitor_of_tree(name: str, metrics: list[Metric]) -> InitAndUpdate:
    """Return ``init`` and ``update`` of a `monitor` that measures all leaves together.

    >>> init, update = _monitor_of_tree("grad", ["norm"])
    >>> grads = {"w": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    >>> update(grads, init(grads))[1].values
    {'grad/norm': tensor(5.)}
    """

    def init(params: PyTree) -> MonitorState:
        # The value is zero until the first measurement.
        zero = torch.zeros((), dtype=torch.float32, device=device_of(params))
        return MonitorState({f"{name}/{metric}": zero.clone() for metric in metrics})

    def update(
        updates: PyTree,
        state: MonitorState,
        params: PyTree = None,
        *,
        sum_over_leaves: Sum = extras.sum_over_leaves,
        donate: Donation = NOTHING,
    ):
        """Measure the updates, which are this rank's shards if ``sum_over_leaves`` adds up over ranks."""
        # Squares and sizes are added first, over all leaves and ranks: a norm is computed from the sum of squares.
        sums = sum_over_leaves(_sums_of_leaves(updates))
        values: dict[str, Tensor] = {}
        for metric in metrics:
            key = f"{name}/{metric}"
            value = _measured(metric, updates, sums)
            values[key] = value.to(state.values[key])  # on the device of the state
        return updates, MonitorState(values)

    return init, update


def _monitor_of_leaves(name: str, metrics: list[Metric]) -> InitAndUpdate:
    """Return ``init`` and ``update`` of a `monitor` that measures each leaf separately.

    >>> init, update = _monitor_of_leaves("grad", ["norm"])
    >>> grads = {"w": torch.tensor([3.0, 4.0])}
    >>> update(grads, init(grads))[1].values
    {'grad/norm': {'w': tensor(5.)}}
    """

    def init(params: PyTree) -> LeafMonitorState:
        """Return a zero for each metric and each leaf."""
        zero = torch.zeros((), dtype=torch.float32, device=device_of(params))
        leaf_names = tree.names(params)
        values: dict[str, dict[str, Tensor]] = {}
        for metric in metrics:
            # The keys are the names of parameters and nothing else, so each value belongs to its parameter.
            key = f"{name}/{metric}"
            values[key] = {leaf_name: zero.clone() for leaf_name in leaf_names}
        return LeafMonitorState(values)

    def update(
        updates: PyTree,
        state: LeafMonitorState,
        params: PyTree = None,
        *,
        sum_over_shards: Callable[[PyTree], PyTree] = extras.unchanged,
        donate: Donation = NOTHING,
    ):
        """Measure the updates, which are this rank's shards if ``sum_over_shards`` adds up over ranks."""
        # The sums of each leaf over its shards on all ranks: squares and sizes, from which its metrics follow.
        sums = sum_over_shards(_sums_of_leaves(updates))
        sums_of = dict(tree.named_leaves(sums))
        leaves = {
            leaf_name: leaf for leaf_name, leaf in tree.named_leaves(updates) if leaf is not None
        }
        values: dict[str, dict[str, Tensor]] = {}
        for metric in metrics:
            key = f"{name}/{metric}"  # "grad/norm"
            # `value_of` has a value by the name of each leaf. A leaf without a gradient keeps it.
            value_of = dict(state.values[key])
            for leaf_name, leaf in leaves.items():
                value = _measured(metric, leaf, sums_of[leaf_name])
                value_of[leaf_name] = value.to(value_of[leaf_name])  # on the device of the state
            values[key] = value_of
        return updates, LeafMonitorState(values)

    return init, update


def _sums_of_leaves(updates: PyTree) -> PyTree:
    """Return for each leaf the three numbers from which its metrics follow, also if they are added over several leaves.

    They are its two `squares_of_leaves` (for the norm) and its number of elements (for the root mean square).

    >>> _sums_of_leaves({"w": torch.tensor([3.0, 4.0])})["w"][[0, 2]]
    tensor([25.,  2.], dtype=torch.float64)
    """

    def with_size(u: Tensor, squares: Tensor) -> Tensor:
        size = squares.new_full((1,), float(u.numel()))
        return torch.cat([squares, size])

    squares = squares_of_leaves(updates)
    return tree.map(with_size, updates, squares)


def _measured(metric: Metric, updates: PyTree, sums: Tensor) -> Tensor:
    """Return a metric of a tree or of one leaf: "norm", "rms" or "orthogonality_error".

    ``sums`` is the sum of its `_sums_of_leaves` over all ranks: two sums of squares, and the number of elements.

    >>> leaf = torch.tensor([3.0, 4.0])
    >>> sums = _sums_of_leaves({"w": leaf})["w"]
    >>> _measured("norm", leaf, sums), _measured("rms", leaf, sums)
    (tensor(5., dtype=torch.float64), tensor(3.5355, dtype=torch.float64))
    """
    if metric == "orthogonality_error":
        return _orthogonality_error(updates)
    if sums.ndim == 0:  # the sum over no leaves, which is 0
        return sums
    norm = norm_of_sum(sums[:2])
    if metric == "norm":
        return norm
    number_of_elements = sums[2].float()
    divisor = number_of_elements.clamp(min=1.0)  # so that an empty leaf gives 0, not NaN
    return norm / divisor.sqrt()


def _orthogonality_error(updates: PyTree) -> Tensor:
    """Return how far the leaves are from orthonormal matrices, on average: 0 if all of them are orthonormal.

    Each leaf is flattened to a matrix. Vectors, scalars and empty leaves are left out.
    """
    device = device_of(updates)
    errors: list[Tensor] = []
    for u in tree.tensors(updates):
        if u.ndim >= 2 and u.numel() > 0:
            errors.append(_distance_from_orthonormal(u).to(device))
    if not errors:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(errors).mean()


def _distance_from_orthonormal(u: Tensor) -> Tensor:
    """Return ``|U U^T - I| / sqrt(r)`` for a leaf as a matrix U whose r rows are its shorter side.

    It measures how far the rows are from orthonormal: 0 for an identity matrix I, and 3 for 2 I.
    """
    # Copy: a product rounds in another way for other strides and addresses of its factors, and those of copies agree.
    matrix = u.reshape(u.shape[0], -1).clone(memory_format=torch.contiguous_format)
    matrix = matrix.to(ew.wide_dtype(u.dtype))
    rows, columns = matrix.shape
    if rows > columns:
        matrix = matrix.mT
    gram = matrix @ matrix.mT  # the products of all pairs of rows
    r = len(gram)
    identity = torch.eye(r, dtype=gram.dtype, device=gram.device)
    distance = torch.linalg.vector_norm(gram - identity)
    return distance / r**0.5


def metrics(state: PyTree) -> dict[str, Tensor]:
    """Return the latest values of all `monitor` transforms in a state, as a dict from "name/metric" to a 0-d tensor.

    Monitors with ``by_leaf`` have the keys "name/leaf/metric", and follow the values of all other monitors.

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
    for values_of_monitor in _values_by_monitor(state):
        shared_keys = values.keys() & values_of_monitor.keys()
        if shared_keys:
            raise ValueError(
                f"metrics: found {min(shared_keys)!r} in two monitors, expected one: give each monitor its own name"
            )
        values.update(values_of_monitor)
    return values


def _values_by_monitor(state: PyTree) -> list[dict[str, Tensor]]:
    """Return for each monitor in a state a dict of its latest values, such as ``{"grad/norm": ..., "grad/rms": ...}``.

    The key of a value is "name/metric". For a monitor of single leaves, it is "name/leaf/metric".
    """
    values: list[dict[str, Tensor]] = []
    for tree_monitor in tree.get_all(state, MonitorState).values():
        values.append(tree_monitor.values)
    for leaf_monitor in tree.get_all(state, LeafMonitorState).values():
        values.append(_by_leaf(leaf_monitor))
    return values


def _by_leaf(monitor_state: LeafMonitorState) -> dict[str, Tensor]:
    """Return the values of a monitor of single leaves in one dict: {"grad/w/rms": 1.0} for {"grad/rms": {"w": 1.0}}."""
    values: dict[str, Tensor] = {}
    for key, value_of in monitor_state.values.items():
        # Divide the key at the last slash, because the name of a monitor may contain one.
        name, _, metric = key.rpartition("/")
        for leaf_name, value in value_of.items():
            values[f"{name}/{leaf_name}/{metric}"] = value
    return values
