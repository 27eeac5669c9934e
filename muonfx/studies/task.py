"""The task of a study: initial parameters, batches and a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

Params = dict[str, Tensor]
Batch = Any
"""A tree of tensors, for example a pair of inputs and targets."""


class Task(NamedTuple):
    """The task of a study, as three functions and a batch. `Task.of_module` makes one from a module.

    The functions depend on their arguments only, so that every optimizer is trained from the same parameters on the
    same batches, and an interrupted study can be continued with the same bits. A loss may draw from the random state of
    torch, as dropout does, which a study sets before each step.

    >>> task = Task(
    ...     init=lambda seed: {"w": torch.full((2,), float(seed))},
    ...     batch=lambda seed, step: torch.ones(2),
    ...     loss=lambda params, batch: (params["w"] - batch).square().sum(),
    ... )
    >>> task.loss(task.init(3), task.batch(3, 0))
    tensor(8.)
    """

    init: Callable[[int], Params]
    """Function of a seed that returns the initial parameters, a dict from name to tensor."""

    batch: Callable[[int, int], Batch]
    """Function of a seed and a step, counted from 0, that returns a tree of tensors. All batches have equal shapes."""

    loss: Callable[[Params, Batch], Tensor]
    """Function of parameters and a batch that returns a 0-d tensor."""

    validation: Batch | None = None
    """A batch for the validation loss of each report; None: a report has the training loss only."""

    validation_loss: Callable[[Params, Batch], Tensor] | None = None
    """The loss on ``validation``, such as ``loss`` without dropout; None: ``loss``."""

    @classmethod
    def of_module(
        cls,
        make_model: Callable[[], nn.Module],
        batch: Callable[[int, int], Batch],
        loss: Callable[[nn.Module, Batch], Tensor],
        validation: Batch | None = None,
    ) -> Task:
        """Return the task to train a module.

        Parameters without ``requires_grad`` are not trained. They and the buffers are constants of the task, with the
        values after ``torch.manual_seed(0)``.

        Args:
            make_model: function without arguments that returns a new module. It is called once for each seed, after
                ``torch.manual_seed(seed)``; the random state of the caller is restored.
            batch: function of a seed and a step that returns a batch, as in `Task`.
            loss: function of the module and a batch that returns a 0-d tensor. It calls the module, and may read its
                parameters, for example for a penalty. The forward pass must not change buffers.
            validation: a batch for the validation loss, as in `Task`. The validation loss is measured in eval mode, and
                the training loss in the mode in which ``make_model`` returns the module.

        Raises:
            ValueError: a module of the model has running statistics, as batch normalization has, or no parameter has
                ``requires_grad``.

        >>> task = Task.of_module(
        ...     lambda: nn.Linear(2, 1),
        ...     batch=lambda seed, step: torch.ones(4, 2),
        ...     loss=lambda model, inputs: (
        ...         model(inputs).square().mean() + model.weight.square().sum()
        ...     ),
        ... )
        >>> {name: tuple(param.shape) for name, param in task.init(0).items()}
        {'weight': (1, 2), 'bias': (1,)}
        >>> bool(task.loss(task.init(0), task.batch(0, 0)) > 0)
        True
        """
        module = _make_seeded(make_model, 0)
        _require_no_running_statistics(module)
        if not _trained_params(module):
            raise ValueError(
                "make_model: found no parameter with requires_grad, expected at least one to train"
            )
        training_loss = _LossOfModule(module, loss)
        validation_loss = _LossOfModule(copy.deepcopy(module).eval(), loss)

        def initial_params(seed: int) -> Params:
            return _trained_params(_make_seeded(make_model, seed))

        return cls(initial_params, batch, training_loss.at, validation, validation_loss.at)


class _LossOfModule(nn.Module):
    """The loss of a module on a batch, as a module that contains the module.

    `torch.func.functional_call` then replaces the parameters of the module while the loss is computed, also for a loss
    that reads ``module.parameters()`` or calls a method of the module.

    Args:
        module: the module, in training or eval mode.
        loss: function of the module and a batch.
    """

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(self.module, batch)

    def at(self, params: Params, batch: Batch) -> Tensor:
        """Return the loss with other values for some parameters of the module, a dict such as ``{"weight": ...}``."""
        params_of_self = {f"module.{name}": param for name, param in params.items()}
        return functional_call(self, params_of_self, (batch,))


def _make_seeded(make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the module that ``make_model`` makes after ``torch.manual_seed(seed)``; restore the random state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make_model()


def _trained_params(module: nn.Module) -> Params:
    """Return the parameters with ``requires_grad`` by name, as tensors without it."""
    return {
        name: param.detach() for name, param in module.named_parameters() if param.requires_grad
    }


def _require_no_running_statistics(model: nn.Module) -> None:
    """Raise ValueError for batch normalization: its averages over batches are buffers, and a study has parameters."""
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise ValueError(
                f"make_model: {name!r} is a {type(module).__name__} with running statistics, which a study does not "
                "keep: create it with track_running_stats=False, or use GroupNorm or LayerNorm"
            )
