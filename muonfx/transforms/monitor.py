"""Scalars that measure updates, stored in the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, Locality, transform
from muonfx.core.contract import NOTHING, sum_over_leaves
from muonfx.transforms.clip import Sum, norm_over_leaves
from muonfx.tree import PyTree, device_of
from muonfx.tree import elementwise as ew

__all__ = ["METRICS", "Metric", "MonitorState", "metrics", "monitor"]


class MonitorState(NamedTuple):
    """State of `monitor`."""

    values: dict[str, Tensor]
    """The latest value of each metric as "name/metric", or "name/leaf/metric" by leaf: 0-d, fp32."""


def _rms(updates: PyTree, total: Sum) -> Tensor:
    elements = total(
        tree.map(lambda u: torch.full((), float(u.numel()), dtype=torch.float32, device=u.device), updates)
    )
    return norm_over_leaves(updates, total) / elements.clamp(min=1.0).sqrt()


def _orthogonality_error(updates: PyTree, total: Sum) -> Tensor:
    """Return the mean error of leaves of two or more dims, as matrices with rows <= columns in at least fp32."""
    device = device_of(updates)
    errors: list[Tensor] = []
    for u in tree.tensors(updates):
        if u.ndim >= 2 and u.numel():
            m = u.reshape(u.shape[0], -1).to(ew.wide_dtype(u.dtype))
            m = m.mT if m.shape[0] > m.shape[1] else m
            gram = m @ m.mT
            distance = torch.linalg.vector_norm(gram - torch.eye(len(gram), dtype=m.dtype, device=m.device))
            errors.append((distance / len(gram) ** 0.5).to(device))
    return torch.stack(errors).mean() if errors else torch.zeros((), device=device)


Metric = Literal["norm", "rms", "orthogonality_error"]
"""The names of the metrics of `monitor`."""

METRICS: dict[str, Callable[[PyTree, Sum], Tensor]] = {
    "norm": norm_over_leaves,
    "rms": _rms,
    "orthogonality_error": _orthogonality_error,
}
"""The metrics of `monitor`."""

_SUMS = {"norm", "rms"}


@transform(locality=Locality.TREE, position="observer")
def monitor(name: str = "updates", metrics: tuple[Metric, ...] = ("norm", "rms"), *, by_leaf: bool = False):
    r"""Measure the updates and return them unchanged.

    It measures the updates at its position in the chain. Put it first for the gradient norm, after `orthogonalize` for
    the orthogonality error, and last for the size of the steps. `metrics` collects the values from a state.

    Args:
        name: prefix of the names of the values; it must differ between the monitors of a chain.
        metrics: any of "norm" (2-norm of the whole tree), "rms" (root mean square of all elements),
            "orthogonality_error" (mean over matrices of $\|UU^T - I\|_F / \sqrt{r}$, on the smaller side r).
        by_leaf: measure each leaf, as "name/leaf/metric"; `muonfx.plot.plot_update_rms` plots the values. Under a
            sharded layout this gathers all updates at every step.

    Raises:
        ValueError: unknown metrics; the message lists the known ones.

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
    unknown = [metric for metric in metrics if metric not in METRICS]
    if unknown or not metrics:
        raise ValueError(f"monitor: unknown metrics {unknown}; there are {', '.join(map(repr, METRICS))}")

    def parts(values: PyTree) -> dict[str, tuple[Metric, PyTree]]:
        """Return the metric and the tree of each measured value: all leaves, or one."""
        trees = {f"{name}/{leaf}": x for leaf, x in tree.named_leaves(values)} if by_leaf else {name: values}
        return {f"{key}/{metric}": (metric, part) for key, part in trees.items() for metric in metrics}

    def measured(updates: PyTree, state: MonitorState, total: Sum) -> MonitorState:
        found = {key: METRICS[metric](part, total) for key, (metric, part) in parts(updates).items()}
        # The updates may all be None, so the state decides the device.
        return MonitorState({key: value.to(state.values[key]) for key, value in found.items()})

    def init(params: PyTree) -> MonitorState:
        zero = torch.zeros((), dtype=torch.float32, device=device_of(params))
        return MonitorState({key: zero.clone() for key in parts(params)})

    def update_by_sums(
        updates: PyTree, state: MonitorState, params: PyTree = None, *, sum_over_leaves: Sum, donate: Donation = NOTHING
    ):
        return updates, measured(updates, state, sum_over_leaves)

    def update(updates: PyTree, state: MonitorState, params: PyTree = None, *, donate: Donation = NOTHING):
        return updates, measured(updates, state, sum_over_leaves)

    return init, update_by_sums if set(metrics) <= _SUMS and not by_leaf else update


def metrics(state: PyTree) -> dict[str, Tensor]:
    """Return the values that all monitors in a state measured: a dict from "name/metric" to a 0-d tensor.

    Raises:
        ValueError: two monitors have the same name.

    >>> import muonfx as mfx
    >>> list(metrics(mfx.chain(mfx.monitor("grad")).init({"w": torch.zeros(2)})))
    ['grad/norm', 'grad/rms']
    """
    found: dict[str, Tensor] = {}

    def visit(node: PyTree) -> None:
        if isinstance(node, MonitorState):
            if twice := found.keys() & node.values.keys():
                raise ValueError(
                    f"metrics: two monitors measure {sorted(twice)[0]!r}; give each monitor of a chain its own name"
                )
            found.update(node.values)
        elif isinstance(node, dict):
            for item in node.values():
                visit(item)
        elif isinstance(node, tuple | list):
            for item in node:
                visit(item)

    visit(state)
    return found
