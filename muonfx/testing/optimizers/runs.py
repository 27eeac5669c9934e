"""Short runs of an optimizer on a tiny model with given gradients, and their comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from muonfx import tree
from muonfx.testing.optimizers.law import Build
from muonfx.testing.violation import Breach, bits_equal

STEPS = 3
"""The number of steps before and after an interruption: enough for moments and counts to matter."""

Values = dict[str, Tensor]
"""Copies of the parameters of a model by name."""


class TinyModel(nn.Module):
    """A model with an embedding, two hidden layers, a norm and a head: 2-D and 1-D parameters of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits with shape [..., 16] for tokens below 16."""
        embedded = self.embedding(tokens)
        hidden = embedded + self.down(torch.relu(self.up(embedded)))
        return self.head(self.norm(hidden))


class ReversedModel(TinyModel):
    """A `TinyModel` whose layers are registered in the opposite order, so that its parameters have another order."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = dict(reversed(list(self._modules.items())))


class UnusualShapes(nn.Module):
    """Layers whose weights have the shapes [1, 6], [6, 1], [0, 4] and [3, 2, 3, 3]. They are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Linear(6, 1, bias=False)
        self.column = nn.Linear(1, 6, bias=False)
        self.empty = nn.Linear(4, 1, bias=False)
        self.empty.weight = nn.Parameter(torch.zeros(0, 4))
        self.kernel = nn.Conv2d(2, 3, 3, bias=False)
        self.usual = nn.Linear(6, 4, bias=False)


def seeded(model_class: Callable[[], nn.Module] = TinyModel) -> nn.Module:
    """Return a new model with the same values at each call, whatever the order of its layers is."""
    model = model_class()
    for name, param in model.named_parameters():
        # One for all would depend on the order.
        generator = torch.Generator().manual_seed(_seed_of(name, 0))
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    return model


def _seed_of(name: str, step: int) -> int:
    """Return a seed that depends on the name of a parameter and on the step, the same in every process."""
    return sum(ord(letter) * (index + 1) for index, letter in enumerate(name)) + 100_003 * step


def gradient(name: str, param: Tensor, step: int) -> Tensor:
    """Return the whole gradient of a parameter at a step: normal numbers that depend on its name and the step alone."""
    generator = torch.Generator().manual_seed(_seed_of(name, step + 1))
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def _as_sharded(grad: Tensor, param: Tensor) -> Tensor:
    """Return a gradient with the shards of its parameter, if that is a DTensor."""
    if isinstance(param, DTensor):
        return distribute_tensor(grad, param.device_mesh, param.placements)
    return grad


class Run:
    """A model, its optimizer, and the number of the next step. The parameters may be DTensors.

    Args:
        build: returns the optimizer of a model.
        model: the model. None: a new `TinyModel`, with the same values in every run.
    """

    def __init__(self, build: Build, model: nn.Module | None = None) -> None:
        self.model = seeded() if model is None else model
        self.optimizer: Optimizer = build(self.model)
        self.next_step = 0

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The parameters of the model by name, whether the optimizer has them or not."""
        return dict(self.model.named_parameters())

    @property
    def optimized(self) -> dict[str, nn.Parameter]:
        """The parameters of the model that the optimizer has in its groups, by name."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        identities = tree.ids(groups)  # groups have no names
        return {name: param for name, param in self.params.items() if id(param) in identities}

    def set_gradients(self, change: Callable[[str, Tensor], Tensor | None] | None = None) -> None:
        """Set every parameter's gradient for the next step.

        Args:
            change: a function of the name and the gradient of a parameter. It returns the gradient to use in its place,
                or None for a parameter without a gradient.
        """
        for name, param in self.params.items():
            param.grad = None
            grad: Tensor | None = gradient(name, param, self.next_step)  # the same in every run
            if change is not None:
                grad = change(name, grad)
            if grad is not None and param.requires_grad:
                param.grad = _as_sharded(grad, param)

    def step(self, change: Callable[[str, Tensor], Tensor | None] | None = None) -> None:
        """Set the gradients, and take one step."""
        self.set_gradients(change)
        self.optimizer.step()
        self.next_step += 1

    def steps(self, count: int) -> Run:
        """Take several steps, and return this run."""
        for _ in range(count):
            self.step()
        return self

    def values(self) -> Values:
        """Return copies of all parameters, whole also if they are sharded."""
        values: Values = {}
        for name, param in self.params.items():
            whole = param
            if isinstance(param, DTensor):
                whole = param.full_tensor()
            values[name] = whole.detach().clone()
        return values

    def set_rate(self, rate: float | Tensor) -> None:
        """Write a learning rate into every group."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def resumed_run(build: Build, stopped: Run, model: nn.Module | None = None) -> Run:
    """Return a new run with the weights and the step of a stopped one, and with a new optimizer."""
    if model is None:
        model = seeded()
    model.load_state_dict(stopped.model.state_dict())
    resumed = Run(build, model)
    resumed.next_step = stopped.next_step
    return resumed


def load_by_dcp(resumed: Run, stopped: Run, folder: str, *, no_dist: bool = False) -> None:
    """Save the optimizer state of a stopped run by torch.distributed.checkpoint, and load it into a resumed one.

    ``no_dist`` is True for one process without a process group.
    """
    # The state dict has names of parameters as its keys, so that the other run finds its parameters in it.
    saved = {"optimizer": get_optimizer_state_dict(stopped.model, stopped.optimizer)}
    dcp.save(saved, checkpoint_id=folder, no_dist=no_dist)
    # A load writes into the tensors of a state dict of the same form, which is then set as the state.
    loaded = {"optimizer": get_optimizer_state_dict(resumed.model, resumed.optimizer)}
    dcp.load(loaded, checkpoint_id=folder, no_dist=no_dist)
    set_optimizer_state_dict(resumed.model, resumed.optimizer, loaded["optimizer"])


def require_same_end(resumed: Run, continued: Run) -> None:
    """Take the remaining steps of both runs, and compare their ends bitwise.

    One run has loaded the saved state of the other, which has not been stopped.
    """
    continued.steps(STEPS)
    resumed.steps(STEPS)
    require_equal(resumed.values(), continued.values(), "the resumed run")


def state_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state dict by dotted name, such as ``"3.exp_avg"``."""
    named = tree.named_leaves(optimizer.state_dict()["state"])
    return {name: leaf for name, leaf in named if isinstance(leaf, Tensor)}


def require_equal(values: Values, expected: Values, what: str) -> None:
    """Raise `Breach` unless all parameters have the same bits. ``what`` names the comparison."""
    for name, expected_value in expected.items():
        if not bits_equal(values[name], expected_value):
            difference = float((values[name].double() - expected_value.double()).norm())
            raise Breach(what, f"{name} differs by {difference:.1e} in norm, expected equal bits")


def require_close(
    values: Values, expected: Values, start: Values, tolerance: float, what: str
) -> None:
    """Raise `Breach` unless all parameters have moved from ``start`` to nearly the values in ``expected``.

    The difference of two updates may be at most ``tolerance`` times the norm of the expected update. ``what`` names the
    comparison in the message, such as "the resumed run".
    """
    for name, expected_value in expected.items():
        expected_update = (expected_value - start[name]).double()
        update = (values[name] - start[name]).double()
        size = float(expected_update.norm())
        difference = float((update - expected_update).norm())
        # Each step rounds the parameter, which may be large compared with its update. Such differences do not count.
        rounding = 4 * torch.finfo(expected_value.dtype).eps * float(expected_value.double().norm())
        is_close = difference <= tolerance * size + rounding
        # If the expected update is infinite, all others are close.
        if not is_close or not math.isfinite(difference):
            text = f"the update of {name} differs by {difference:.1e}, expected at most {tolerance:.0e} of its norm"
            raise Breach(what, f"{text}, {size:.1e}")


def require_finite(values: Values, what: str) -> None:
    """Raise `Breach` if a parameter has an element that is not finite."""
    for name, value in values.items():
        if not bool(value.isfinite().all()):
            raise Breach(what, f"{name} is not finite")


def require_moved(before: Values, after: Values, names: Iterable[str], what: str) -> None:
    """Raise `Breach` unless each of the named parameters has changed."""
    for name in names:
        if torch.equal(before[name], after[name]):
            raise Breach(what, f"{name} did not change")


def require_unmoved(before: Values, after: Values, names: Iterable[str], what: str) -> None:
    """Raise `Breach` if one of the named parameters has changed."""
    for name in names:
        if not torch.equal(before[name], after[name]):
            raise Breach(what, f"{name} changed")
