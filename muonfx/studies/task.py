"""The task of a study: initial parameters, batches and a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
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
        loss: Callable[[Callable[..., Any], Batch], Tensor],
        validation: Batch | None = None,
    ) -> Task:
        """Return the task to train a module.

        Args:
            make_model: function without arguments that returns a new module. It is called once for each seed, after
                ``torch.manual_seed(seed)``; the random state of the caller is restored.
            batch: function of a seed and a step that returns a batch, as in `Task`.
            loss: function of the model and a batch that returns a 0-d tensor. It calls the model as a module is called.
                The forward pass must not change buffers.
            validation: a batch for the validation loss, as in `Task`. The validation loss is measured in eval mode, and
                the training loss in the mode in which ``make_model`` returns the module.

        Raises:
            ValueError: a module of the model has running statistics, as batch normalization has.

        >>> task = Task.of_module(
        ...     lambda: nn.Linear(2, 1),
        ...     batch=lambda seed, step: torch.ones(4, 2),
        ...     loss=lambda model, inputs: model(inputs).square().mean(),
        ... )
        >>> {name: tuple(param.shape) for name, param in task.init(0).items()}
        {'weight': (1, 2), 'bias': (1,)}
        >>> bool(task.loss(task.init(0), task.batch(0, 0)) > 0)
        True
        """
        with torch.random.fork_rng():
            module = make_model()
        _require_no_running_statistics(module)
        module_in_eval_mode = copy.deepcopy(module).eval()  # a second call of make_model may draw other buffers

        def initial_params(seed: int) -> Params:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                return {name: param.detach() for name, param in make_model().named_parameters()}

        def loss_of_params(params: Params, batch: Batch) -> Tensor:
            return loss(partial(functional_call, module, params), batch)

        def validation_loss(params: Params, batch: Batch) -> Tensor:
            return loss(partial(functional_call, module_in_eval_mode, params), batch)

        return cls(initial_params, batch, loss_of_params, validation, validation_loss)


def _require_no_running_statistics(model: nn.Module) -> None:
    """Raise ValueError for batch normalization: its averages over batches are buffers, and a study has parameters."""
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise ValueError(
                f"make_model: {name!r} is a {type(module).__name__} with running statistics, which a study does not "
                "keep: create it with track_running_stats=False, or use GroupNorm or LayerNorm"
            )
