"""The rates of the Hugging Face page end no worse than AdamW's, on a tiny Llama from scratch and in fine-tuning."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.rates import FINETUNE, RULES
from muonfx.engines import huggingface
from tests.engines.processes import real

pytestmark = [
    *real("transformers", "accelerate", timeout=1800),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]
PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
BATCH, LENGTH, STEPS, TUNING_STEPS = 8, 64, 80, 30
CODE = (Path(re.__file__).parent / "_parser.py").read_bytes()
PROSE = "".join(topics[name] for name in sorted(topics)).encode()


def sequences(text: bytes, count: int, seed: int) -> Tensor:
    """Return random windows (count, LENGTH) of a text."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(
        len(tokens) - LENGTH, (count,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([tokens[start : start + LENGTH] for start in starts])


def tiny_llama() -> Any:
    """Return a Llama of 0.15 M parameters with its usual initialization."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    return transformers.LlamaForCausalLM(config)


def trained(
    folder: Path, model: Any, text: bytes, steps: int, rate: float, adamw_lr: float | None
) -> float:
    """Train with the Trainer, with Muon if `adamw_lr` is given, else AdamW; return the loss of other windows."""
    import transformers

    args = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=rate,
        weight_decay=0.1,
        adam_beta2=0.95,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    optimizer = None
    if adamw_lr is not None:
        optimizer = huggingface.muon(args, adamw_lr=adamw_lr, orthogonalize={"dtype": "float32"})
    data = [{"input_ids": row, "labels": row} for row in sequences(text, steps * BATCH, seed=1)]
    trainer = transformers.Trainer(
        model, args, train_dataset=data, optimizer_cls_and_kwargs=optimizer
    )
    trainer.train()
    validation = sequences(text, 64, seed=2)
    with torch.no_grad():
        return float(model.eval()(input_ids=validation, labels=validation).loss)


def rates_of_page() -> tuple[float, float]:
    """Return the first ``learning_rate`` and the first ``adamw_lr`` of the page."""
    text = PAGE.read_text(encoding="utf-8")
    rate = re.search(r"learning_rate=([0-9.e-]+)", text)
    adamw_rate = re.search(r"adamw_lr=([0-9.e-]+)", text)
    assert rate is not None
    assert adamw_rate is not None
    return float(rate[1]), float(adamw_rate[1])


def test_the_rates_of_the_page_end_no_worse_than_adamw_from_scratch(tmp_path: Path):
    rate, adamw_rate = rates_of_page()
    muon = trained(tmp_path, tiny_llama(), CODE, STEPS, rate, adamw_rate)
    assert muon <= trained(tmp_path, tiny_llama(), CODE, STEPS, rate, None)


def test_the_rule_ends_no_worse_than_the_best_rate_of_adamw_from_scratch(tmp_path: Path):
    losses = {
        rate: trained(tmp_path, tiny_llama(), CODE, STEPS, rate, None)
        for rate in (1e-3, 3e-3, 1e-2)
    }
    best = min(losses, key=lambda rate: losses[rate])
    assert trained(tmp_path, tiny_llama(), CODE, STEPS, best, 4 * best) <= losses[best]


def test_the_rule_ends_no_worse_than_the_best_rate_of_adamw_in_fine_tuning(tmp_path: Path):
    pretrained = tiny_llama()
    trained(tmp_path, pretrained, CODE, STEPS, 3e-3, None)
    losses: dict[float, float] = {}
    for rate in (3e-4, 1e-3, 3e-3):
        losses[rate] = trained(tmp_path, copy.deepcopy(pretrained), PROSE, TUNING_STEPS, rate, None)
    best = min(losses, key=lambda rate: losses[rate])
    matrices, rest = RULES[FINETUNE]
    muon = trained(
        tmp_path, copy.deepcopy(pretrained), PROSE, TUNING_STEPS, matrices * best, rest * best
    )
    assert muon <= losses[best]
