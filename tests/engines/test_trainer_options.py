"""Options of `muonfx.engines.huggingface` without transformers: the second rate, wrong names, ignored settings."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from muonfx.engines import huggingface


def arguments(**more: Any) -> Any:
    """Return training arguments of transformers with the fields that `muon` reads."""
    adamw = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-8}
    return SimpleNamespace(
        learning_rate=1e-3, weight_decay=0.1, **adamw, deepspeed_plugin=None, **more
    )


def test_a_factor_makes_the_second_rate_follow_the_first():
    args = arguments()
    factory, options = huggingface.muon(args, adamw_lr_factor=4)
    for rate in (1e-3, 2e-3):
        args.learning_rate = rate  # as a search for hyperparameters does
        optimizer = factory()(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), **options)
        assert [group["lr"] for group in optimizer.param_groups] == [rate, 4 * rate]
    with pytest.raises(TypeError, match="both adamw_lr and adamw_lr_factor"):
        huggingface.muon(args, adamw_lr=1e-3, adamw_lr_factor=4)


def test_a_wrong_argument_is_refused_before_the_trainer_loads_the_model():
    with pytest.raises(TypeError, match=r"there is no argument 'adam_lr'.*'adamw_lr'"):
        huggingface.muon(arguments(), adam_lr=1e-3)
    model: Any = nn.Linear(4, 4)
    with pytest.raises(
        TypeError, match=r"args is a model, expected transformers\.TrainingArguments"
    ):
        huggingface.muon(model)


def test_another_optimizer_in_the_training_arguments_is_warned_of():
    huggingface.muon(arguments(optim=SimpleNamespace(value="adamw_torch_fused"), optim_args=None))
    with pytest.warns(UserWarning, match="optim='adafactor' of the training arguments is not used"):
        huggingface.muon(arguments(optim=SimpleNamespace(value="adafactor")))
    with pytest.warns(UserWarning, match="optim_args='a=1' is not used"):
        huggingface.muon(arguments(optim_args="a=1"))


class Trainer:
    """Stands for ``transformers.Trainer``."""

    def __init__(self, optimizer: Any = None, optimizer_cls_and_kwargs: Any = None) -> None:
        self.args = arguments()
        self.optimizer = optimizer
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs

    def create_optimizer(self) -> Any:
        return self.optimizer


class MuonTrainer(huggingface.MuonMixin, Trainer):  # type: ignore[misc]
    muon_options: ClassVar[dict[str, Any]] = {"adamw_lr": 4e-3}


def test_a_mixin_warns_of_another_optimizer_that_the_trainer_was_given():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="Muon is not used, .* given SGD: leave optimizers= out"):
        MuonTrainer(torch.optim.SGD(model.parameters(), 0.1)).create_optimizer()
    with pytest.warns(
        UserWarning, match="Muon is not used, .* given SGD: leave optimizer_cls_and_kwargs= out"
    ):
        MuonTrainer(optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1})).create_optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = MuonTrainer()
        trainer.create_optimizer()
        trainer.create_optimizer()  # as after a batch that was too large
