"""One rank of a run under LLaMA-Factory's v1 trainer, which runs every case and writes its results as JSON."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from llamafactory.v1.config import TrainingArguments
from llamafactory.v1.core.utils.batching import BatchGenerator
from llamafactory.v1.core.utils.rendering import Renderer
from llamafactory.v1.plugins.trainer_plugins.distributed.hub import DistributedPlugin
from llamafactory.v1.plugins.trainer_plugins.lr_scheduler import LRSchedulerPlugin
from llamafactory.v1.trainers.sft_trainer import SFTTrainer
from llamafactory.v1.utils.helper import pad_and_truncate
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import default_collate

import muonfx as mfx
from muonfx.engines import llamafactory as ours
from tests.engines.processes import Rank, same, serve, small_llama, trained_alone, values_of, worst

STEPS, SAVED_AFTER, BATCH, CLIP = 5, 3, 4, 0.5
WORDS = [*"abcdefghijkl", "user", "assistant", "<", "|", "im_start", "im_end", "?"]
OPTIM = {"name": "muonfx", "lr": 0.02, "adamw_lr": 0.004, "orthogonalize": {"dtype": "float32"}}


@LRSchedulerPlugin("halving").register()
def halving(optimizer: torch.optim.Optimizer, *_: Any) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def renderer_for() -> Renderer:
    words = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="?")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return Renderer(
        "chatml", transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    )


def samples() -> list[dict[str, Any]]:
    def turn(role: str, *letters: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "value": " ".join(letters)}]}

    places = torch.randint(
        12, (STEPS * BATCH, 3), generator=torch.Generator().manual_seed(1)
    ).tolist()
    return [
        {
            "messages": [
                turn("user", *(WORDS[k] for k in row)),
                turn("assistant", *(WORDS[11 - k] for k in row)),
            ]
        }
        for row in places
    ]


def trainer_for(here: Rank, folder: Path, **more: Any) -> SFTTrainer:
    args = TrainingArguments(
        output_dir=str(folder),
        micro_batch_size=BATCH // here.size,
        max_steps=STEPS,
        max_grad_norm=CLIP,
        bf16=False,
        batching_workers=0,
        optim_config=dict(OPTIM),
        lr_scheduler_config={"name": "halving"},
        save_steps=SAVED_AFTER,
        **more,
    )
    return SFTTrainer(
        args, small_llama(len(WORDS), attn_implementation="eager"), renderer_for(), samples()
    )


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(
        **{key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
    ).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())


def in_one_process(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    model = small_llama(len(WORDS), attn_implementation="eager")
    optimizer = mfx.Muon(
        model, lr=0.02, adamw_lr=0.004, orthogonalize=mfx.orthogonalize(dtype=torch.float32)
    )
    return trained_alone(model, optimizer, halving(optimizer), batches, loss_of, CLIP)


def launched_with(*args: str) -> str:
    said = io.StringIO()
    sys.argv = ["launcher", *args]
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_module("muonfx.engines.llamafactory", run_name="__main__")
    return said.getvalue()


def alone(here: Rank) -> dict[str, Any]:
    del os.environ["RANK"]  # LLaMA-Factory would assume several processes
    said = launched_with("sft", "-h")
    whole = trainer_for(here, here.folder / "whole")
    whole.fit()
    saved = str(here.folder / "whole" / f"checkpoint-{SAVED_AFTER}")
    again = trainer_for(here, here.folder / "again", resume_from_checkpoint=saved)
    again.fit()
    loader = BatchGenerator(samples(), renderer_for(), micro_batch_size=BATCH, pin_memory=False)
    return {
        "said": said,
        "worst": worst(values_of(whole.model), in_one_process([batch for (batch,) in loader])),
        "resumed": same(values_of(again.model), values_of(whole.model)),
        "logged": [entry["learning_rate"] for entry in whole.state.log_history],
        "logged again": [entry["learning_rate"] for entry in again.state.log_history],
    }


def batches_of(size: int, rank: int) -> list[dict[str, Tensor]]:
    renderer = renderer_for()
    mine = [
        samples()[begin + rank : begin + BATCH : size] for begin in range(0, STEPS * BATCH, BATCH)
    ]
    return [default_collate(pad_and_truncate(renderer.process_samples(part), 100)) for part in mine]


def train(trainer: SFTTrainer, batches: list[dict[str, Tensor]]) -> None:
    """Take the steps of ``fit``, which synchronizes an accelerator and so cannot run on several CPU ranks itself."""
    for batch in batches:
        trainer.compute_loss(batch).backward()
        nn.utils.clip_grad_norm_(trainer.model.parameters(), CLIP)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()


def over_ranks(here: Rank) -> dict[str, Any]:
    ours.register()
    batches = batches_of(here.size, here.rank)
    dist_config = {"name": "fsdp2"}
    whole = trainer_for(here, here.folder / "whole", dist_config=dist_config)
    train(whole, batches[:SAVED_AFTER])
    saved = str(here.folder / "saved")
    DistributedPlugin("fsdp2").save_checkpoint(whole.model, whole.optimizer, saved)
    schedule = whole.lr_scheduler.state_dict()
    train(whole, batches[SAVED_AFTER:])
    again = trainer_for(here, here.folder / "again", dist_config=dist_config)
    DistributedPlugin("fsdp2").load_checkpoint(again.model, again.optimizer, saved)
    rates = [group["lr"] for group in again.optimizer.param_groups]
    again.lr_scheduler.load_state_dict(schedule)
    train(again, batches[SAVED_AFTER:])
    return {
        "worst": worst(values_of(whole.model), in_one_process(batches_of(1, 0))),
        "resumed": same(values_of(again.model), values_of(whole.model)),
        "rates": rates,
    }


def carried_out(_name: str, case: Any, here: Rank) -> dict[str, Any]:
    return case(here)


if __name__ == "__main__":
    serve({"alone": alone, "fsdp2": over_ranks}, carried_out)
