"""EMA-Nesterov: gradients at a point ahead of the iterates, in the direction of their average motion."""

from __future__ import annotations

from typing import NamedTuple

from muonfx.core import checks
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms.leafwise import Leaf, Number, Slot, WideStateDtype, leafwise
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew


class EmaNesterovState(NamedTuple):
    """State of the transform `ema_nesterov`: the look-ahead factor and the average motion of the parameters."""

    lookahead: PyTree
    """The factor $\\beta$ with which the current parameters contain the average motion, a 0-d tensor."""
    average: PyTree
    """The average motion $m$ of the iterates: a tree like the parameters."""


@leafwise(position="last")
def ema_nesterov(
    decay: ScalarOrSchedule = 0.99,
    lookahead: ScalarOrSchedule = 0.5,
    *,
    dtype: WideStateDtype = "auto",
):
    r"""Move the parameters ahead in the direction of their average motion; the next gradient is computed there.

    The parameters of the training loop are $y_t = \theta_t + \beta_t m_t$, with the iterate $\theta_t$ and the average
    motion $m_t$. Let $u_t$ be the update that the transforms before this one return for the gradient at $y_t$. The next
    iterate is $\theta_{t+1} = y_t + u_t$, and the average motion is
    $m_{t+1} = \gamma m_t + (1 - \gamma) (\theta_{t+1} - \theta_t)$. Put it at the end of the chain.

    Args:
        decay: $\gamma$, in [0, 1).
        lookahead: $\beta$, not negative. The authors use a schedule that is zero in the first and in the last steps. At
            zero, the parameters are the iterates. A schedule assumes that every parameter has a gradient at every step.
        dtype: storage dtype of the average motion. "auto" is float32, or float64 for float64 parameters; None is the
            dtype of each parameter.

    Raises:
        ValueError: a number is out of range, or ``dtype`` is a string other than "auto".

    Follows EMA-Nesterov (Yau et al., arXiv 2605.25395).

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.scale_by_learning_rate(1.0), mfx.contrib.ema_nesterov(0.5, 0.5))
        >>> grads = {"w": torch.ones(1)}
        >>> first, state = tx.update(grads, tx.init(grads))
        >>> second, state = tx.update(grads, state)
        >>> first["w"], second["w"]
        (tensor([-1.2500]), tensor([-1.4375]))
    """
    decay = checks.in_unit_interval("decay", decay)
    lookahead = checks.at_least("lookahead", lookahead, 0.0)
    checks.state_dtype("dtype", dtype)

    def step(u: Leaf, s: EmaNesterovState):
        """Return the step of the parameters ``y = theta + beta m``, and the new m and beta.

        Here theta is the iterate, m its average motion (``average``), and beta the factor ``lookahead``, which may
        change with the step. The new iterate is ``y + u``.
        """
        # motion = new theta - theta = y + u - theta = u + beta m
        motion = u.add(s.average, alpha=s.lookahead)
        # new m = decay m + (1 - decay) motion
        average = s.average.lerp(motion, 1.0 - decay)
        # new y - y = (y + u + new beta * new m) - y = u + new beta * new m
        new_lookahead = ew.new_number(lookahead, s.lookahead.device)
        step_of_y = u.add(average, alpha=new_lookahead)
        new_state = EmaNesterovState(lookahead=new_lookahead, average=average)
        return step_of_y, new_state

    state = EmaNesterovState(lookahead=Number(), average=Slot(dtype))
    return state, step
