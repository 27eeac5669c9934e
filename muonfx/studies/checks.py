"""Checks of the task and the optimizers of a study, before it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.func import grad

from muonfx import tree
from muonfx.core.checks import warn_caller
from muonfx.core.order import signs
from muonfx.core.transform import Transform
from muonfx.internal.display import shown_name
from muonfx.studies.task import Batch, Params, Task

SAME_LOSS = 1e-5
"""Losses with a smaller relative difference are of the same task, since another machine rounds otherwise."""


def check_task(task: Task, seed: int) -> None:
    """Raise an error if the functions of a task return other types or differ between two calls.

    All optimizers are compared on the same batches, which the functions of the task must return at each call. Only the
    parameters, the first batch and the first loss of one seed are tested. Warn if the gradient of this loss is zero.
    """
    params = task.init(seed)
    batch = task.batch(seed, 0)
    _require_tensors("init", params)
    _require_tensors("batch", batch)
    _require_same_bits(f"init: two calls with seed {seed} differ", params, task.init(seed))
    _require_same_bits(
        f"batch: two calls with seed {seed} and step 0 differ", batch, task.batch(seed, 0)
    )
    _require_repeatable_loss(task, params, batch)
    if task.validation is not None:
        _require_tensors("validation", task.validation)
    if task.validation is not None and task.validation_loss is not None:
        _loss_from_zero("validation_loss", task.validation_loss, params, task.validation)
    _warn_of_zero_gradient(task, params, batch)


def _require_tensors(argument: str, values: tree.PyTree) -> None:
    """Raise TypeError if a leaf of the parameters or of a batch is not a tensor."""
    for name, leaf in tree.named_leaves(values):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{argument}: found {leaf!r} at {shown_name(name)}, expected a tree of tensors: use a number in the "
                "loss itself, or return torch.tensor(...)"
            )


def _require_same_bits(problem: str, first: tree.PyTree, second: tree.PyTree) -> None:
    """Raise an error that begins with ``problem`` if two trees of tensors differ. NaN is equal to NaN."""
    for leaf, other in zip(tree.leaves(first), tree.leaves(second), strict=True):
        # `allclose` without tolerances is equality, except that it can accept two NaN.
        if leaf.shape != other.shape or not torch.allclose(
            leaf, other, rtol=0, atol=0, equal_nan=True
        ):
            raise ValueError(
                f"{problem}; draw from torch.Generator().manual_seed(...) of the arguments alone"
            )


def _require_repeatable_loss(task: Task, params: Params, batch: Batch) -> None:
    """Raise ValueError if the loss draws from another random state than torch's, which a study sets."""
    first_loss = _loss_from_zero("loss", task.loss, params, batch)
    second_loss = _loss_from_zero("loss", task.loss, params, batch)
    if not are_same_losses([first_loss], [second_loss]):
        raise ValueError(
            f"loss: two calls from the same random state of torch gave {first_loss} and {second_loss}; draw from "
            "that state alone, as torch.nn.Dropout does"
        )


def _loss_from_zero(
    argument: str, loss: Callable[[Params, Batch], Tensor], params: Params, batch: Batch
) -> float:
    """Return a loss after ``torch.manual_seed(0)``. Raise TypeError if it is not a 0-d tensor."""
    torch.manual_seed(0)
    with torch.no_grad():
        value = loss(params, batch)
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{argument}: found a result of type {type(value).__name__}, expected a 0-d tensor"
        )
    if value.ndim > 0:
        raise TypeError(
            f"{argument}: found a result of shape {tuple(value.shape)}, expected a 0-d tensor: return its mean()"
        )
    return value.item()


def _warn_of_zero_gradient(task: Task, params: Params, batch: Batch) -> None:
    """Warn if a loss has no gradient, because it is detached or computed with other tensors than the parameters."""
    gradients = grad(task.loss)(params, batch)
    if not any(map(torch.any, tree.leaves(gradients))):
        warn_caller(
            "loss: its gradient in the first step is zero for all parameters: compute it from the parameters that it "
            "receives, without detach() or item()"
        )


def are_same_losses(first: list[float], second: list[float]) -> bool:
    """Return True if two lists of losses are equal up to rounding, as 2.3 and 2.300001 are. NaN is equal to NaN."""
    return len(first) == len(second) and torch.allclose(
        torch.tensor(first), torch.tensor(second), rtol=SAME_LOSS, atol=0, equal_nan=True
    )


def draws_random_numbers(task: Task, seed: int) -> bool:
    """Return True if the loss draws from the random state of torch, as dropout does."""
    params = task.init(seed)
    batch = task.batch(seed, 0)
    states_before = _random_states()
    with torch.no_grad():
        task.loss(params, batch)
    states_after = _random_states()
    return not all(map(torch.equal, states_before, states_after))


def _random_states() -> list[Tensor]:
    """Return the state of the random generator of the CPU, and of each CUDA device if there are any."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return states


def require_optimizers(optimizers: object) -> None:
    """Raise an error if ``optimizers`` of a study is not a dict of functions.

    An example is ``{"adamw": adamw(0.1)}`` instead of a function of the rate.
    """
    if not isinstance(optimizers, Mapping):
        raise TypeError(
            f"optimizers: found a {type(optimizers).__name__}, expected a dict from name to a function of a rate, such "
            'as {"adamw": muonfx.adamw}'
        )
    if not optimizers:
        raise ValueError(
            "optimizers: found none, expected a dict from name to a function of a rate"
        )
    for name, make_transform in optimizers.items():
        if isinstance(make_transform, Transform):
            raise TypeError(
                f"optimizers[{name!r}]: found a transform, expected a function of a rate that returns one, such as "
                "lambda rate: muonfx.adamw(rate)"
            )


def transforms_by_rate(
    name: str, make_transform: Callable[[float], Transform], rates: Sequence[float]
) -> dict[float, Transform]:
    """Return the transform of an optimizer for each rate. Raise TypeError if a result is not a transform.

    Warn if the updates of the optimizer have the sign of the gradient, or if its transforms do not depend on the rate.
    """
    transform_at: dict[float, Transform] = {}
    for rate in rates:
        tx = make_transform(rate)
        if not isinstance(tx, Transform):
            raise TypeError(
                f"optimizers[{name!r}]: found a function that returns {tx!r}, expected one that returns a transform of "
                "muonfx, such as muonfx.adamw(rate)"
            )
        transform_at[rate] = tx
    if 1 in signs(transform_at[rates[0]]):  # the sign of the gradient
        warn_caller(
            f"optimizers[{name!r}]: each step would increase the loss, since updates have the sign of the gradient. "
            "Put scale_by_learning_rate(rate) at the end of the chain; a transform that reverses the sign declares "
            'position="learning_rate"'
        )
    _warn_of_unused_rate(name, transform_at)
    return transform_at


def _warn_of_unused_rate(name: str, transform_at: Mapping[float, Transform]) -> None:
    """Warn if the transforms of two neighboring rates are equal."""
    for (rate, tx), (next_rate, next_tx) in pairwise(transform_at.items()):
        if tx == next_tx:
            warn_caller(
                f"optimizers[{name!r}]: the transforms for the rates {rate:g} and {next_rate:g} are equal; use the "
                "argument of the function as the learning rate"
            )
            return
