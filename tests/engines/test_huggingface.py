"""`muonfx.engines.huggingface` under the real Trainer: in one process, DDP, FSDP2 and, through it, DeepSpeed."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from muonfx.engines import huggingface
from tests.engines.huggingface_worker import (
    CASES,
    RATES,
    SAVED_AFTER,
    adapted,
    arguments_for,
    by_hand,
    converted,
    model_for,
    optimizer_for,
    params_of,
    rates_of,
    trainer_for,
)
from tests.engines.processes import launched, real, result_of, same, values_of, worst

pytestmark = [
    *real("transformers", "accelerate", "peft", "deepspeed", timeout=900),
    # warnings of transformers and accelerate themselves
    pytest.mark.filterwarnings(
        "ignore::UserWarning:accelerate", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]
FP32, BF16 = 2e-6, 0.05
"""The largest difference of parameters in five steps: in bf16, activations and gradients are rounded."""
CHECKPOINT = f"checkpoint-{SAVED_AFTER}"
RATES_FOUND = {
    "logged": [0.02, 0.016, 0.012, 0.008, 0.004],
    "groups": [["muon", 0.02], ["adamw", 0.004]],
}

ADAPTERS_RATES = {"logged": [0.004, 0.0032, 0.0024, 0.0016, 0.0008], "groups": [["adamw", 0.004]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    return tmp_path_factory.mktemp("trainers")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Any:
    """A Trainer in one process after its run, and its parameters."""
    trainer = trainer_for(arguments_for(folder / "one"), model_for())
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def found(folder: Path, alone: Any) -> list[dict[str, Any]]:
    """The results of all cases, of each rank."""
    converted(folder / "one" / CHECKPOINT, folder / "for FSDP2" / CHECKPOINT)
    return launched("huggingface_worker.py", 2, CASES, folder)


def test_in_one_process_it_trains_as_a_loop_by_hand_and_resumes_to_the_bit(
    alone: Any, folder: Path
) -> None:
    assert worst(params_of(alone), by_hand()) <= FP32
    assert rates_of(alone) == RATES_FOUND
    assert alone.optimizer.param_groups[1]["betas"] == (0.9, 0.95)
    assert alone.optimizer.param_groups[1]["eps"] == 1e-7
    again = trainer_for(arguments_for(folder / "again"), model_for())
    again.train(resume_from_checkpoint=str(folder / "one" / CHECKPOINT))
    assert same(params_of(again), params_of(alone))


def test_a_mixin_and_an_optimizer_made_by_hand_are_the_same(alone: Any, tmp_path: Path) -> None:
    import transformers

    class MuonTrainer(huggingface.MuonMixin, transformers.Trainer):
        muon_options: ClassVar = {**RATES, "orthogonalize": {"dtype": "float32"}}

    mixed = trainer_for(arguments_for(tmp_path), model_for(), MuonTrainer, optimizers=(None, None))
    model = model_for()
    given = trainer_for(
        arguments_for(tmp_path), model, MuonTrainer, optimizers=(optimizer_for(model), None)
    )
    for trainer in (mixed, given):
        trainer.train()
        assert same(params_of(trainer), params_of(alone))


@pytest.mark.parametrize("form", ["the argument", "the mixin"])
def test_a_search_for_hyperparameters_changes_the_rate_of_each_run(
    form: str, tmp_path: Path
) -> None:
    """As `Trainer.hyperparameter_search` does: one Trainer, whose arguments change between runs."""
    import transformers

    class MuonTrainer(huggingface.MuonMixin, transformers.Trainer):
        muon_options: ClassVar = {"adamw_lr": 0.004}

    args = arguments_for(tmp_path)
    if form == "the mixin":
        trainer = trainer_for(args, model_for(), MuonTrainer, optimizers=(None, None))
    else:
        trainer = trainer_for(
            args, model_for(), optimizer_cls_and_kwargs=huggingface.muon(args, adamw_lr=0.004)
        )
    for rate in (0.01, 0.03):
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.args.learning_rate = rate
        trainer.train()
        assert [group["initial_lr"] for group in trainer.optimizer.param_groups] == [rate, 0.004]


def test_a_cosine_to_a_min_lr_ends_at_it_for_muon_and_at_the_same_share_for_adamw() -> None:
    import transformers

    optimizer = optimizer_for(model_for())
    scheduler = transformers.get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        0,
        num_training_steps=2,
        scheduler_specific_kwargs={"min_lr": 0.001},
    )
    muon, adamw = [
        rate * factor(2)
        for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    assert muon == pytest.approx(0.001)
    assert adamw == pytest.approx(0.001 * RATES["adamw_lr"] / 0.02)


def test_a_mixin_after_the_trainer_is_refused() -> None:
    import transformers

    with pytest.raises(
        TypeError, match=r"expected MuonMixin first: class Late\(MuonMixin, Trainer\)"
    ):

        class Late(transformers.Trainer, huggingface.MuonMixin):
            pass


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_parameters_are_those_of_one_process_and_a_resumed_run_is_the_same_run(
    found: list[dict[str, Any]], name: str
) -> None:
    case = result_of(found, name)
    assert case["worst"] <= (BF16 if "bf16" in name else FP32)
    if name.startswith("from one process"):  # its checkpoint continues under another strategy
        assert case["groups"] == RATES_FOUND["groups"]
        return
    assert case["resumed"]
    trained = [group for group in case["groups"] if group[0] is not None]
    rates = {"logged": case["logged"], "groups": trained}
    assert rates == (ADAPTERS_RATES if "LoRA" in name else RATES_FOUND)
    strategies = {"DDP": "MULTI_CPU", "FSDP2": "FSDP", "ZeRO": "DEEPSPEED"}
    assert case["strategy"] == strategies[name.replace(",", "").split()[0]]
    optimizer = "Muon"
    if "ZeRO" in name:
        optimizer = "DeepSpeedZeroOptimizer"
    if "another chain" in name:
        optimizer = "TransformOptimizer"
    assert case["optimizer"].startswith(optimizer)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["DDP", "DDP, matrices shared out", "FSDP2"])
def test_a_checkpoint_of_another_strategy_continues_in_one_process(
    found: list[dict[str, Any]], folder: Path, tmp_path: Path, name: str
) -> None:
    result_of(found, name)
    saved = folder / name.replace(" ", "_").replace(",", "") / CHECKPOINT
    if name == "FSDP2":
        saved = converted(saved, tmp_path / CHECKPOINT)
    trainer = trainer_for(arguments_for(tmp_path), model_for())
    trainer.train(resume_from_checkpoint=str(saved))
    assert worst(params_of(trainer), by_hand()) <= FP32
    assert rates_of(trainer) == RATES_FOUND


def test_adapters_alone_are_trained_by_adamw(tmp_path: Path) -> None:
    model = adapted(model_for())
    before = values_of(model)
    trainer = trainer_for(arguments_for(tmp_path), model)
    with pytest.warns(UserWarning, match="found no parameter with the label 'muon'") as said:
        trainer.train()
    (ours,) = [str(one.message) for one in said if "Muon" in str(one.message)]
    assert "AdamW trains 8" in ours
    assert "lora_A.default.weight' is 'adamw': low-rank factor" in ours
    after = values_of(model)
    assert {n for n in after if not torch.equal(after[n], before[n])} == {
        n for n in after if "lora_" in n
    }
    assert [group["label"] for group in trainer.optimizer.param_groups] == ["adamw"]


@pytest.mark.parametrize("given", [SimpleNamespace(deepspeed_config={}), None])
def test_under_deepspeed_it_is_deepspeeds_client_optimizer(given: object, tmp_path: Path) -> None:
    args = arguments_for(tmp_path)
    args.deepspeed_plugin = SimpleNamespace(deepspeed_config={"optimizer": {"type": "AdamW"}})
    with pytest.raises(ValueError, match="\"optimizer\" of the type 'AdamW'"):
        huggingface.muon(args)
    args.deepspeed_plugin = given  # as arguments or `accelerate launch` have it
    factory, options = huggingface.muon(args, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = factory()(model_for(), **options)
    assert type(made).__name__ == ("Muon" if given is None else "ZeroOptimizer")
    assert made.param_groups[0]["momentum"] == 0.9
    assert made.param_groups[1]["betas"] == (args.adam_beta1, args.adam_beta2)
    assert made.param_groups[1]["eps"] == args.adam_epsilon
