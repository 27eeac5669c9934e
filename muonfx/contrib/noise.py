"""Gaussian noise added to updates."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonfx.compact.noise import keys_of, normal
from muonfx.core import Donation, Locality, checks, transform
from muonfx.core.contract import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms._pinned import new_count, to_floating
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew

__all__ = ["AddNoiseState", "add_noise"]


class AddNoiseState(NamedTuple):
    """State of `add_noise`."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """Updates so far, int64."""
    keys: PyTree
    """For each parameter, the seed of its noise: 0-d int64, a hash of ``seed`` and the parameter's name."""


# LEAF although elements are independent: the noise of an element depends on its index in the whole leaf.
@transform(locality=Locality.LEAF, reads_params=False)
def add_noise(eta: ScalarOrSchedule, gamma: ScalarOrSchedule, seed: int = 0):
    r"""Add Gaussian noise to the updates, with the decreasing variance $\eta / t^\gamma$ at the t-th update.

    The noise is a pure function of the seed, the step, the name of the parameter and the index of the element. It does
    not depend on random generators, and is the same compiled, eager and under every sharding. Under
    ``torch.func.vmap``, all members of a batch get the same noise, unless their states have different ``keys``.

    Args:
        eta: the variance at the first update, not negative.
        gamma: the exponent with which the variance decreases, not negative.
        seed: the seed of the noise; use a different seed for each `add_noise` in a chain.

    Raises:
        ValueError: ``eta`` or ``gamma`` is negative or not finite.

    Follows Neelakantan et al. (arXiv 1511.06807) and Optax's transform of this name, with other random numbers.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.contrib.add_noise(1.0, 0.5)
        >>> params = {"w": torch.zeros(10_000)}
        >>> updates, state = tx.update(params, tx.init(params))
        >>> (
        ...     round(float(updates["w"].std()), 1),
        ...     bool((tx.update(params, tx.init(params))[0]["w"] == updates["w"]).all()),
        ... )
        (1.0, True)
    """
    eta = checks.at_least("eta", eta, 0.0)
    gamma = checks.at_least("gamma", gamma, 0.0)

    def init(params: PyTree) -> AddNoiseState:
        at = Present(params)
        keys = at.fill(keys_of(str(seed), at.names(), at.pick(params)))
        return AddNoiseState(new_count(device_of(params)), keys)

    def disturb(leaf: Tensor, key: Tensor, deviation: Tensor) -> Tensor:
        wide = leaf.to(ew.wide_dtype(leaf.dtype))
        noise = normal(key, leaf.numel()).reshape(leaf.shape).to(wide.dtype)
        return (wide + deviation.to(wide) * noise).to(leaf.dtype)

    def update(updates: PyTree, state: AddNoiseState, params: PyTree = None, *, donate: Donation = NOTHING):
        at, count = Present(updates), state.count + 1
        deviation = ew.safe_sqrt(eta * torch.pow(to_floating(count), -gamma))
        pairs = zip(at.pick(updates), at.pick(state.keys), strict=True)
        disturbed = [disturb(leaf, key + state.count, deviation) for leaf, key in pairs]
        return at.fill(disturbed), AddNoiseState(count, state.keys)

    return init, update
