"""Muon for the Trainer of Hugging Face, by its argument for optimizers that need the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn

from muonfx.engines import deepspeed
from muonfx.engines.deepspeed.making import require_own_step
from muonfx.engines.parts import with_parts
from muonfx.optimizer.muon import Muon

__all__ = ["MuonFactory", "MuonMixin", "TrainingArguments", "muon"]


class TrainingArguments(Protocol):
    """The fields of ``transformers.TrainingArguments`` that are read.

    >>> from types import SimpleNamespace
    >>> args: TrainingArguments = SimpleNamespace(
    ...     learning_rate=0.01,
    ...     weight_decay=0.1,
    ...     adam_beta1=0.9,
    ...     adam_beta2=0.95,
    ...     adam_epsilon=1e-8,
    ...     deepspeed_plugin=None,
    ... )
    """

    learning_rate: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    deepspeed_plugin: Any


class MuonFactory:
    """Makes the optimizer of a model, as the Trainer calls it: first without arguments, then with the model.

    >>> optimizer = MuonFactory()(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), lr=0.01)
    >>> [(group["label"], group["lr"]) for group in optimizer.param_groups]
    [('muon', 0.01), ('adamw', 0.01)]
    """

    def __call__(
        self, model: nn.Module, *, zero: bool = False, eps: float | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Make the optimizer.

        Args:
            model: with all its modules, so that parameters are routed by their types.
            zero: whether DeepSpeed will hold the parameters.
            eps: AdamW's; None: the default of `muonfx.adamw`.
            options: of `muonfx.Muon`, with parts as mappings if they come from a file (`muonfx.engines.parts`).
        """
        made: torch.optim.Optimizer = deepspeed.Muon(model, **options) if zero else Muon(model, **with_parts(options))
        for group in made.param_groups:
            if eps is not None and "eps" in group:
                group["eps"] = eps
        return made


def muon(args: TrainingArguments, **options: Any) -> tuple[type[MuonFactory], dict[str, Any]]:
    """Muon for a Trainer: ``Trainer(model, args, optimizer_cls_and_kwargs=muon(args))``.

    The learning rate, the weight decay and AdamW's betas and epsilon come from the training arguments, and the
    Trainer's scheduler drives both rates. The logged learning rate is the rate of the first group, Muon's. Under
    DeepSpeed (``args.deepspeed``, or ``accelerate launch``) the optimizer is `muonfx.engines.deepspeed.Muon`.

    Args:
        args: ``transformers.TrainingArguments``.
        options: further arguments of `muonfx.Muon`, or under DeepSpeed of `muonfx.engines.deepspeed.Muon`, which take
            precedence over ``args``: ``adamw_lr``, ``labels``.

    Returns:
        A factory, and its arguments other than the model.

    Raises:
        ValueError: under DeepSpeed, a configuration with an optimizer of its own, or one that replaces ours when the
            optimizer is offloaded; the message has the entry to write.

    >>> from types import SimpleNamespace
    >>> adamw = dict(adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)
    >>> args = SimpleNamespace(learning_rate=0.01, weight_decay=0.1, **adamw, deepspeed_plugin=None)
    >>> muon(args, adamw_lr=1e-3)[1]
    {'lr': 0.01, 'weight_decay': 0.1, 'betas': (0.9, 0.95), 'eps': 1e-08, 'zero': False, 'adamw_lr': 0.001}
    """
    if args.deepspeed_plugin is not None:
        require_own_step(args.deepspeed_plugin.deepspeed_config)
    said = {
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "zero": args.deepspeed_plugin is not None,  # the plugin is set also if ``accelerate launch`` selects DeepSpeed
    }
    return MuonFactory, {**said, **options}


class MuonMixin:
    """A base class to add to a Trainer that another script constructs: ``class MuonTrainer(MuonMixin, Trainer)``.

    Its optimizer is built by `muon`, unless an optimizer is given to the Trainer.

    Example:
        >>> from types import SimpleNamespace
        >>> class Trainer:  # that of transformers
        ...     def __init__(self, args):
        ...         self.args, self.optimizer_cls_and_kwargs = args, None
        ...
        ...     def create_optimizer(self):
        ...         return self.optimizer_cls_and_kwargs
        >>> class MuonTrainer(MuonMixin, Trainer):
        ...     muon_options = {"adamw_lr": 1e-3}
        >>> adamw = dict(adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)
        >>> args = SimpleNamespace(learning_rate=0.01, weight_decay=0.1, **adamw, deepspeed_plugin=None)
        >>> MuonTrainer(args).create_optimizer()[1]["adamw_lr"]
        0.001
    """

    muon_options: ClassVar[Mapping[str, Any]] = {}
    """Further arguments of `muon`."""
    args: TrainingArguments
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None

    def create_optimizer(self, *given: Any, **more: Any) -> torch.optim.Optimizer:
        """Make the optimizer as the Trainer does."""
        if self.optimizer_cls_and_kwargs is None:
            self.optimizer_cls_and_kwargs = muon(self.args, **self.muon_options)
        return cast("Any", super()).create_optimizer(*given, **more)
