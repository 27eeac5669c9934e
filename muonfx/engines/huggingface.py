"""Muon for the Trainer of Hugging Face, through its argument ``optimizer_cls_and_kwargs``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn

from muonfx.core.checks import warn_caller
from muonfx.engines import deepspeed
from muonfx.engines.deepspeed.making import require_own_step
from muonfx.engines.deepspeed.rates import require_rates_by_group
from muonfx.engines.parts import with_parts
from muonfx.internal.arguments import bind
from muonfx.optimizer.muon import Muon

__all__ = ["MuonFactory", "MuonMixin", "TrainingArguments", "muon"]


class TrainingArguments(Protocol):
    """The fields of ``transformers.TrainingArguments`` that `muon` reads.

    >>> from types import SimpleNamespace
    >>> args: TrainingArguments = SimpleNamespace(
    ...     learning_rate=0.001,
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
    """Makes the Muon optimizer for a Trainer, which calls ``MuonFactory()(model, args=args, **options)``.

    >>> from types import SimpleNamespace
    >>> adamw = dict(adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)
    >>> args = SimpleNamespace(
    ...     learning_rate=0.001, weight_decay=0.1, **adamw, deepspeed_plugin=None
    ... )
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> optimizer = MuonFactory()(model, args=args, adamw_lr=0.004)
    >>> [(group["label"], group["lr"]) for group in optimizer.param_groups]
    [('muon', 0.001), ('adamw', 0.004)]
    """

    def __call__(
        self, model: nn.Module, *, args: TrainingArguments, **options: Any
    ) -> torch.optim.Optimizer:
        """Return the Muon optimizer for a model.

        Args:
            model: the model; the types of its modules decide which parameters Muon trains.
            args: the training arguments. They are read now: a search for hyperparameters changes them between runs.
            options: arguments of `muonfx.Muon`, whose values may come from a JSON file; see `muonfx.engines.parts`.
                They take precedence over ``args``, also ``eps``, the epsilon of AdamW. ``adamw_lr_factor`` is
                ``adamw_lr`` divided by the learning rate.
        """
        # 1. The arguments of the optimizer. It has none for the epsilon, which is set in its groups.
        settings: dict[str, Any] = {
            "lr": args.learning_rate,
            "weight_decay": args.weight_decay,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            **options,
        }
        eps = settings.pop("eps")
        factor = settings.pop("adamw_lr_factor", None)
        if factor is not None:
            settings["adamw_lr"] = factor * settings["lr"]
        # 2. The optimizer. DeepSpeed steps on flat tensors, and requires its own.
        deepspeed_config = _deepspeed_config(args)
        optimizer: torch.optim.Optimizer
        if deepspeed_config is None:
            optimizer = Muon(model, **with_parts(settings))
        else:
            optimizer = deepspeed.Muon(model, **settings)  # converts the options itself
            require_rates_by_group(deepspeed_config, optimizer.param_groups)
        for group in optimizer.param_groups:
            if "eps" in group:  # the group of AdamW
                group["eps"] = eps
        return optimizer


def _deepspeed_config(args: TrainingArguments) -> Mapping[str, Any] | None:
    """Return the configuration of DeepSpeed if it will shard the parameters, else None.

    Raise ValueError if the configuration replaces the optimizer, for example by ``{"optimizer": {"type": "Adam"}}``.
    """
    if args.deepspeed_plugin is None:  # it is also set if ``accelerate launch`` selects DeepSpeed
        return None
    config = args.deepspeed_plugin.deepspeed_config
    require_own_step(config)
    return config


def muon(args: TrainingArguments, **options: Any) -> tuple[type[MuonFactory], dict[str, Any]]:
    """Return Muon as the argument of a Trainer: ``Trainer(model, args, optimizer_cls_and_kwargs=muon(args))``.

    The learning rate, the weight decay, and the betas and epsilon of AdamW come from the training arguments, as these
    are when the Trainer creates the optimizer. The Trainer's scheduler changes the rates of Muon and AdamW; the log
    shows the rate of the first group, which is Muon's. Under DeepSpeed (``args.deepspeed``, or ``accelerate launch``)
    the optimizer is `muonfx.engines.deepspeed.Muon`.

    Args:
        args: ``transformers.TrainingArguments``.
        options: further arguments of `muonfx.Muon`, such as ``adamw_lr`` and ``labels``, or, under DeepSpeed, of
            `muonfx.engines.deepspeed.Muon`. They take precedence over ``args``. ``adamw_lr_factor=4`` in place of
            ``adamw_lr`` makes AdamW's rate 4 times the learning rate, also in a search that changes this.

    Returns:
        The class of the optimizer factory, and the arguments that the Trainer passes to the factory after the model.

    Raises:
        ValueError: the configuration of DeepSpeed has an optimizer, or replaces Muon by DeepSpeed's CPU Adam because
            the optimizer is offloaded; the message contains the entry to change.
        TypeError: ``args`` is a model, an option is unknown, or both ``adamw_lr`` and ``adamw_lr_factor`` are given.

    Warns:
        UserWarning: ``args`` chooses another optimizer by ``optim`` or ``optim_args``, which is not used.

    >>> from types import SimpleNamespace
    >>> adamw = dict(adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)
    >>> args = SimpleNamespace(
    ...     learning_rate=0.001, weight_decay=0.1, **adamw, deepspeed_plugin=None
    ... )
    >>> factory, options = muon(args, adamw_lr=4e-3)
    >>> args.learning_rate = 0.002
    >>> [
    ...     group["lr"]
    ...     for group in factory()(
    ...         nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options
    ...     ).param_groups
    ... ]
    [0.002, 0.004]
    """
    # Raise now, before the Trainer loads the model.
    if isinstance(args, nn.Module):
        raise TypeError(
            "muon: args is a model, expected transformers.TrainingArguments; the Trainer passes the model later"
        )
    _check_options(options)
    _warn_of_other_optimizer(args)
    _deepspeed_config(args)
    return MuonFactory, {"args": args, **options}


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError if `muon` has an option that `muonfx.Muon` does not have, or two options for AdamW's rate.

    >>> _check_options({"adamw_lr": 1e-3, "adamw_lr_factor": 4})
    Traceback (most recent call last):
    TypeError: muon: found both adamw_lr and adamw_lr_factor, expected one of them
    """
    bind("muon", _signature_of_options(), (), options)
    if "adamw_lr" in options and "adamw_lr_factor" in options:
        raise TypeError("muon: found both adamw_lr and adamw_lr_factor, expected one of them")


def _signature_of_options() -> inspect.Signature:
    """Return the options of `muon` as a signature: the arguments of `muonfx.Muon`, and two options of `muon` alone.

    The model is left out, since the Trainer passes it later.
    """
    signature = inspect.signature(Muon)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "params"]
    for name in ("eps", "adamw_lr_factor"):
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=parameters)


_ADAMW = ("adamw_torch", "adamw_torch_fused")
"""The values of ``TrainingArguments.optim`` by default: the Trainer's own AdamW."""


def _warn_of_other_optimizer(args: TrainingArguments) -> None:
    """Warn if training arguments choose another optimizer, which Muon replaces."""
    optim = getattr(args, "optim", None)
    chosen = getattr(optim, "value", optim)  # an enum of transformers
    if chosen is not None and chosen not in _ADAMW:
        warn_caller(
            f"muon: optim={chosen!r} of the training arguments is not used, because Muon is: leave it out"
        )
    optim_args = getattr(args, "optim_args", None)
    if optim_args:
        warn_caller(
            f"muon: optim_args={optim_args!r} is not used: pass the options to muon, or in muon_options"
        )


class MuonMixin:
    """A mixin that makes a Trainer use Muon: ``class MuonTrainer(MuonMixin, Trainer)``.

    It is for scripts that construct the Trainer themselves, without the argument ``optimizer_cls_and_kwargs``. The
    Trainer then uses `muon` with its training arguments. If it has that argument, the argument is used instead.

    Raises:
        TypeError: at the definition of the subclass, a Trainer precedes the mixin, and would use its own optimizer.

    Example:
        >>> from types import SimpleNamespace
        >>> class Trainer:  # in place of transformers.Trainer
        ...     def __init__(self, args):
        ...         self.args, self.optimizer_cls_and_kwargs = args, None
        ...
        ...     def create_optimizer(self):
        ...         return self.optimizer_cls_and_kwargs
        >>> class MuonTrainer(MuonMixin, Trainer):
        ...     muon_options = {"adamw_lr": 4e-3}
        >>> adamw = dict(adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)
        >>> args = SimpleNamespace(
        ...     learning_rate=0.001, weight_decay=0.1, **adamw, deepspeed_plugin=None
        ... )
        >>> _, options = MuonTrainer(args).create_optimizer()
        >>> options["adamw_lr"]
        0.004
    """

    muon_options: ClassVar[Mapping[str, Any]] = {}
    """Arguments for `muon` in addition to the training arguments; set them in the subclass."""
    args: TrainingArguments
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError if a base class before the mixin creates the optimizer.

        In ``class MuonTrainer(Trainer, MuonMixin)``, the Trainer precedes the mixin, and Python would call its
        ``create_optimizer`` instead of the mixin's.
        """
        super().__init_subclass__(**options)
        # The classes in the order in which Python looks for a method, without the new class itself.
        bases = cls.__mro__[1:]
        bases_before_mixin = bases[: bases.index(MuonMixin)]
        for base in bases_before_mixin:
            if "create_optimizer" in vars(base) and not issubclass(base, MuonMixin):
                raise TypeError(
                    f"{cls.__name__}: {base.__name__} precedes MuonMixin and would create its own optimizer, expected "
                    f"MuonMixin first: class {cls.__name__}(MuonMixin, {base.__name__})"
                )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the Trainer's optimizer: Muon if ``optimizer_cls_and_kwargs`` is None, else the one given there.

        Warn if the Trainer was given an optimizer, so that Muon is not used.
        """
        self._warn_of_given_optimizer()
        if self.optimizer_cls_and_kwargs is None:
            self.optimizer_cls_and_kwargs = muon(self.args, **self.muon_options)
        return cast("Any", super()).create_optimizer(*args, **kwargs)

    def _warn_of_given_optimizer(self) -> None:
        """Warn if the Trainer got an optimizer of another package by ``optimizers`` or ``optimizer_cls_and_kwargs``."""
        if self.optimizer_cls_and_kwargs is not None:
            optimizer_class = self.optimizer_cls_and_kwargs[0]
            argument = "optimizer_cls_and_kwargs"
        else:
            # A later call has the optimizer of the first.
            optimizer_class = type(getattr(self, "optimizer", None))
            argument = "optimizers"
        # The caller has given no optimizer, or Muon explicitly.
        if optimizer_class is type(None) or optimizer_class.__module__.startswith("muonfx."):
            return
        warn_caller(
            f"MuonMixin: Muon is not used, because the Trainer was given {optimizer_class.__name__}: leave "
            f"{argument}= out"
        )
