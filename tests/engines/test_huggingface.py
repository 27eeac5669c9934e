"""`muonfx.engines.huggingface` under the real Trainer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx.engines import huggingface

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(
        find_spec("transformers") is None or find_spec("accelerate") is None,
        reason="needs transformers and accelerate: make engines",
    ),
    # what transformers and accelerate themselves warn of
    pytest.mark.filterwarnings("ignore::UserWarning:accelerate", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]
STEPS, SAVED_AFTER = 6, 4


def model_for() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def trainer_for(folder: Path, model: nn.Module, steps: int = STEPS, **more: Any) -> Any:
    import transformers

    words = torch.randint(17, (2 * STEPS, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in words]
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=0.02,
        weight_decay=0.1,
        adam_beta2=0.95,
        lr_scheduler_type="linear",
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=SAVED_AFTER,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    chosen = more or {"optimizer_cls_and_kwargs": huggingface.muon(args, adamw_lr=0.004, dtype=torch.float32)}
    return transformers.Trainer(model, args, train_dataset=data, **chosen)


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.slow
def test_one_line_trains_as_the_optimizer_made_by_hand_and_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = model_for()
    trainer = trainer_for(tmp_path / "a", whole)
    trainer.train()
    groups = trainer.optimizer.param_groups
    assert [group["label"] for group in groups] == ["muon", "adamw"]
    assert [group["initial_lr"] for group in groups] == [0.02, 0.004]
    assert groups[1]["betas"] == (0.9, 0.95)
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert logged[0] == pytest.approx(0.02)
    assert sorted(logged, reverse=True) == logged

    by_hand = model_for()
    optimizer = mfx.Muon(by_hand, lr=0.02, weight_decay=0.1, adamw_lr=0.004, dtype=torch.float32)
    trainer_for(tmp_path / "b", by_hand, optimizers=(optimizer, None)).train()
    wanted = params_of(whole)
    assert all(torch.equal(param, wanted[name]) for name, param in params_of(by_hand).items())

    resumed = model_for()
    again = trainer_for(tmp_path / "a", resumed)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{SAVED_AFTER}"))
    assert all(torch.equal(param, wanted[name]) for name, param in params_of(resumed).items())


def test_under_deepspeed_it_is_deepspeeds_client_optimizer() -> None:
    import transformers

    args = transformers.TrainingArguments("unused", use_cpu=True)
    factory, options = huggingface.muon(args)
    made = factory()(model_for(), **{**options, "zero": True, "momentum": 0.9})
    assert type(made).__name__ == "ZeroOptimizer"
    assert made.param_groups[0]["momentum"] == 0.9
    assert made.param_groups[1]["betas"] == (args.adam_beta1, args.adam_beta2)
