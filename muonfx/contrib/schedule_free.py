"""Schedule-Free learning: averaging of the iterates instead of momentum and a decaying learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Combinator, Donation, Locality, Transform, checks, transform
from muonfx.core.checks import warn_caller
from muonfx.core.donation import NOTHING
from muonfx.core.schedules import Scalar, Schedule, constant_schedule
from muonfx.core.transform import require_transform, within
from muonfx.core.value import checked_by
from muonfx.transforms.formulas import divide_unless
from muonfx.transforms.leafwise import WideStateDtype, copies, params_for, read_wide, write
from muonfx.tree import Present, PyTree, device_of
from muonfx.tree import elementwise as ew

T = TypeVar("T")

# The function in the union makes `transform` pass a schedule as it is: it is read at the count after the update.
Rate = Scalar | Schedule | Callable[[Tensor], Tensor]


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free`: the iterate, the weights for its average, and the state of the inner transform."""

    count: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
    """The number of updates so far, 0-d int64."""
    b1: Tensor
    """The weight of the average in the current parameters, 0-d; the weight of ``z`` is 1 minus this."""
    max_lr: Tensor
    """The largest learning rate so far, 0-d."""
    weight_sum: Tensor
    """The sum of the weights of all iterates in the average, 0-d."""
    z: PyTree
    """The iterate, to which the inner transform's updates are added: a tree like the parameters."""
    inner: PyTree
    """The state of the inner transform."""


def _warn_of_inner(tx: Transform) -> None:
    """Warn if the inner transform of a `schedule_free` has another learning rate than it, or a momentum."""
    inner = tx.arguments["inner"]
    if tx.arguments["weight_lr_power"] != 0.0:  # else the weights do not depend on the rate
        _warn_of_another_rate(inner, tx.arguments["learning_rate"])
    _warn_of_momentum(inner)


@checked_by(_warn_of_inner)
@transform(
    locality=lambda inner, *_, **__: inner.locality,
    combinator=Combinator(Locality.ELEMENT),
    position="last",
)
def schedule_free(
    inner: Transform,
    learning_rate: Rate,
    b1: Scalar = 0.9,
    *,
    weight_lr_power: Scalar = 2.0,
    dtype: WideStateDtype = "auto",
):
    r"""Replace momentum and a decaying learning rate by averaging the iterates of a transform.

    There are three versions of the parameters: the iterate $z$, to which updates are added, the average $x$ of all
    iterates, and the parameters of the training loop, $y_t = (1 - \beta_1) z_t + \beta_1 x_t$. Let $u_t$ be the inner
    transform's update for the gradient at $y_t$. Then $z_{t+1} = z_t + u_t$, and
    $x_{t+1} = (1 - c_{t+1}) x_t + c_{t+1} z_{t+1}$. The average is weighted: the weight of an iterate is $r^p$, where
    $r$ is the largest learning rate so far and $p$ is ``weight_lr_power``, and $c_{t+1}$ is the weight of $z_{t+1}$
    divided by the sum of all weights so far. Gradients at $y_t$ replace momentum, so switch off the momentum of the
    inner transform. The learning rate need not decay. Evaluate the model with $x$, which `schedule_free_eval_params`
    returns.

    Args:
        inner: the whole chain, with the learning rate and without momentum, such as ``scale_by_adam(b1=0.0)``.
        learning_rate: the learning rate of the inner chain, a number or a schedule; here, it only sets the weights of
            the average. A schedule is called with 1 for the first update, as in Optax, because a warmup may return
            zero at step 0. Do not use a scheduler of ``torch.optim``, which changes only the inner chain's rate (``lr``
            of a group). Give the inner chain and this argument the same schedule of `muonfx.core.schedules`.
        b1: the weight $\beta_1$ of the average in the parameters, in (0, 1].
        weight_lr_power: the power of the learning rate that weights the average, 0 or more.
        dtype: storage dtype of $z$. "auto" is float32, or float64 for float64 parameters; None is the dtype of each
            parameter.

    The average is not stored but computed from the parameters and $z$. With bf16 parameters it would be rounded to
    bf16, so put `master_params` around this transform.

    Raises:
        ValueError: a number is out of range, or ``dtype`` is a string other than "auto"; at `update`, ``params`` is
            missing.

    Warns:
        UserWarning: ``learning_rate`` is not a learning rate of the inner chain, or the inner chain has a momentum.

    Follows Defazio et al. (arXiv 2405.15682) and Optax's ``contrib.schedule_free``.

    Example:
        >>> import muonfx as mfx
        >>> rate = mfx.linear_schedule(0.0, 0.1, 10)
        >>> tx = mfx.contrib.schedule_free(
        ...     mfx.chain(mfx.scale_by_adam(b1=0.0), mfx.scale_by_learning_rate(rate)), rate
        ... )
        >>> params = {"w": torch.ones(1)}
        >>> state = tx.init(params)
        >>> for _ in range(20):
        ...     updates, state = tx.update(params, state, params)  # the gradient of half the square
        ...     params = mfx.apply_updates(params, updates)
        >>> params, mfx.contrib.schedule_free_eval_params(state, params)
        ({'w': tensor([0.3200])}, {'w': tensor([0.3595])})
    """
    require_transform("schedule_free: inner", inner)
    if not callable(learning_rate):
        checks.at_least("learning_rate", learning_rate, 0.0)
    b1 = checks.finite("b1", b1)
    if not isinstance(b1, Tensor) and not 0.0 < b1 <= 1.0:
        raise ValueError(f"b1 must be in (0, 1], found {b1!r}")
    weight_lr_power = checks.at_least("weight_lr_power", weight_lr_power, 0.0)
    checks.state_dtype("dtype", dtype)

    def init(params: PyTree) -> ScheduleFreeState:
        """Return a state with a copy z of the parameters, and the initial state of the inner transform."""
        device = device_of(params)
        return ScheduleFreeState(
            count=ew.new_count(device),
            b1=ew.new_number(b1, device),
            max_lr=ew.new_number(0.0, device),
            weight_sum=ew.new_number(0.0, device),
            z=copies(params, dtype),
            inner=inner.functions.init(params),
        )

    def update(
        updates: PyTree,
        state: ScheduleFreeState,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: object,
    ):
        """Move the iterate z by the inner update, average it into x, and return the step of the parameters y.

        y is between both, y = (1 - b1) z + b1 x, so that x is computed from y and z and is not stored. z, x, y and the
        inner update u are lists with a tensor for each leaf that the inner transform updates.
        """
        params = params_for("schedule_free", params)

        # The weight of the new iterate is r^p for the largest learning rate r so far; c is its share of all weights.
        count = state.count + 1
        rate = learning_rate
        if callable(rate):
            rate = rate(count)
        r = torch.maximum(state.max_lr, ew.new_number(rate, state.max_lr.device))
        weight = r**weight_lr_power
        weight_sum = state.weight_sum + weight
        is_undefined = ~(weight_sum > 0)
        c = divide_unless(is_undefined, weight, weight_sum, otherwise=0.0)

        inner_updates, inner_state = inner.run(
            updates, state.inner, params, donate=donate, **extras
        )
        present = Present(inner_updates)  # the leaves that the inner transform updates
        u, z, y = read_wide(present, inner_updates, state.z, params)
        x = ew.lerp(z, y, 1.0 / state.b1)  # x = z + (y - z) / b1, as y = z + b1 (x - z)

        # z = z + u,  x = (1 - c) x + c z,  y = (1 - b1) z + b1 x. With `reuse`, a result overwrites the first list.
        new_z = ew.add(z, u)
        new_x = ew.lerp(x, new_z, c, reuse=True)
        new_b1 = ew.new_number(b1, r.device)
        new_y = ew.lerp(new_z, new_x, new_b1)
        step_of_y = ew.add(new_y, y, -1.0, reuse=True)

        new_state = ScheduleFreeState(
            count=count,
            b1=new_b1,
            max_lr=r,
            weight_sum=weight_sum,
            z=write(present, new_z, state.z, reuse=donate.state),
            inner=inner_state,
        )
        return write(present, step_of_y, inner_updates), new_state

    return init, update


def _warn_of_another_rate(inner: Transform, learning_rate: Rate) -> None:
    """Warn if the inner transform has learning rates, and none of them equals ``learning_rate``.

    For ``chain(scale_by_adam(), scale_by_learning_rate(0.1))`` and ``learning_rate=0.2``, there is a warning. Two
    functions of the user cannot be compared, so there is none unless all rates are numbers or schedules of muonfx.
    """
    inner_rates: list[object] = []
    for tx in within(inner):  # the inner transform itself and all transforms that it contains
        if tx.position == "learning_rate":
            inner_rate = tx.arguments.get("learning_rate")
            inner_rates.append(_number_if_constant(inner_rate))
    rate = _number_if_constant(learning_rate)
    for value in (*inner_rates, rate):
        if not isinstance(value, float | Schedule):  # such as a function
            return
    if inner_rates and rate not in inner_rates:
        warn_caller(
            f"schedule_free: found learning_rate={learning_rate!r}, expected the rate of the inner transform, "
            f"{inner_rates[0]!r}, because it weights the average: give both the same"
        )


def _warn_of_momentum(inner: Transform) -> None:
    """Warn if the inner transform has a momentum, as ``scale_by_adam(b1=0.9)`` has: `schedule_free` replaces it.

    Only the first transform whose momentum is not switched off is named.
    """
    for tx in within(inner):
        argument = _momentum_argument(tx)  # such as "b1"
        if argument is None:
            continue
        value = tx.arguments.get(argument, 0.0)
        momentum = _number_if_constant(value)
        if isinstance(momentum, float | Schedule) and momentum != 0.0:
            warn_caller(
                f"schedule_free: {tx.name} in the inner transform has a momentum, {argument}={momentum!r}, which the "
                f"interpolation b1 replaces. Switch it off: {argument}=0.0"
            )
            return


def _momentum_argument(tx: Transform) -> str | None:
    """Return the name of the argument that is the momentum of a transform, such as "b1" of `scale_by_adam`; or None.

    A transform declares which of its arguments have the usual names of torch: ``{"momentum": "decay"}`` for one, or
    ``{"betas": ("b1", "b2")}`` for a pair, of which the first is the momentum.
    """
    short_names = tx.declaration.short_names
    arguments = short_names.get("momentum", short_names.get("betas"))
    if isinstance(arguments, tuple):
        return arguments[0]
    return arguments


def _number_if_constant(value: object) -> object:
    """Return the number that a constant schedule returns at every step. Return any other object unchanged."""
    if not isinstance(value, Schedule):
        return value
    first_value = value(0)
    if value == constant_schedule(first_value):
        return first_value
    return value


def schedule_free_eval_params(state: PyTree, params: T) -> T:
    """Return the parameters for evaluating a model trained with `schedule_free`: the average of the iterates.

    Args:
        state: the state of `schedule_free`, or of a chain that contains it.
        params: the parameters of the training loop after the same step; if sharded, this rank's shards.

    Returns:
        A tree like the parameters, in their dtypes. Parameters that `schedule_free` does not update are unchanged.

    Raises:
        ValueError: the state contains no state of `schedule_free`.

    >>> import muonfx as mfx
    >>> params = {"w": torch.ones(1)}
    >>> state = mfx.contrib.schedule_free(mfx.scale(-0.1), 0.1).init(params)
    >>> schedule_free_eval_params(state, params)
    {'w': tensor([1.])}
    """
    states = list(tree.get_all(state, ScheduleFreeState).values())
    if not states:
        raise ValueError(
            f"schedule_free_eval_params: found no ScheduleFreeState in a {type(state).__name__}; give the state that "
            "the update of schedule_free, or of a transform around it, returned"
        )
    # x from y and z, by name of the parameter. Parameters without z are not averaged.
    y_of = dict(tree.named_leaves(params))
    x_of = y_of.copy()
    for averaging in states:
        for name, z in tree.named_leaves(averaging.z):
            y = y_of.get(name)
            if z is None or y is None:
                continue
            (wide_z,), (wide_y,) = ew.widest([z], [y])
            # x = z + (y - z) / b1 as in `update`, computed from y as `torch.lerp` does for a weight above 0.5. It is
            # not called: the foreach functions of torch 2.10 accept no DTensor, and `lerp` under vmap no fp64 number.
            x = wide_y + (wide_y - wide_z) * (1.0 / averaging.b1 - 1.0)
            x_of[name] = x.to(y.dtype)
    treedef = tree.flatten(params)[1]
    # In the order of the leaves, as `named_leaves` returns them.
    return tree.unflatten(treedef, x_of.values())
