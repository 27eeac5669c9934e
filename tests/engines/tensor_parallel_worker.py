"""One rank of a loop on a model that transformers has partitioned by `DistributedConfig`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import muonfx as mfx
from tests.engines.processes import Rank, same, serve, small_llama, values_of, worst

STEPS, SAVED_AFTER, WORDS = 5, 3, 18
CASES: dict[str, dict[str, int]] = {"tensor parallel": {"tp_size": 2}, "fsdp": {"fsdp_size": 2}}


def whole_model() -> Any:
    """Return a Llama whose heads two ranks can divide."""
    return small_llama(WORDS, num_attention_heads=4, num_key_value_heads=2, hidden_size=16)


def optimizer_for(model: Any) -> mfx.TransformOptimizer:
    """Return Muon behind a clip, which `torch.nn.utils.clip_grad_norm_` cannot do on DTensors and plain tensors."""
    muon = mfx.muon_with_adamw(
        0.02,
        0.08,
        labels=mfx.default_labels(model),
        orthogonalize=mfx.orthogonalize(dtype=torch.float32),
    )
    return mfx.TransformOptimizer(model, mfx.chain(mfx.clip_by_global_norm(0.5), muon))


def train(model: Any, optimizer: Any, steps: range) -> dict[str, Tensor]:
    """Take some of the steps, and return the parameters."""
    words = torch.randint(WORDS, (STEPS, 4, 6), generator=torch.Generator().manual_seed(1))
    for step in steps:
        optimizer.zero_grad()
        model(input_ids=words[step], labels=words[step]).loss.backward()
        optimizer.step()
    return values_of(model)


def carried_out(name: str, case: dict[str, int], here: Rank) -> dict[str, Any]:
    """Return the distance from one process, and whether the resumed run has the same bits."""
    import transformers
    from transformers.distributed import DistributedConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    source, saved = here.folder / "model", here.folder / name.replace(" ", "_")
    if here.rank == 0:
        whole_model().save_pretrained(source)
    dist.barrier()

    def partitioned() -> Any:
        return transformers.LlamaForCausalLM.from_pretrained(
            source, distributed_config=DistributedConfig(**case)
        )

    alone = whole_model()
    expected = train(alone, optimizer_for(alone), range(STEPS))

    model = partitioned()
    optimizer = optimizer_for(model)
    train(model, optimizer, range(SAVED_AFTER))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, storage_writer=mfx.checkpoint.Writer(saved))
    found = train(model, optimizer, range(SAVED_AFTER, STEPS))

    model = partitioned()
    optimizer = optimizer_for(model)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, storage_reader=mfx.checkpoint.Reader(saved))
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    resumed = train(model, optimizer, range(SAVED_AFTER, STEPS))
    return {"worst": worst(found, expected), "resumed": same(resumed, found)}


if __name__ == "__main__":
    serve(CASES, carried_out)
