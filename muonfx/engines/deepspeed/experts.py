"""Read which experts of DeepSpeed's ``MoE`` layers this rank holds."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def expert_group_name(param: Tensor) -> str | None:
    """Return DeepSpeed's name of the group of an expert's parameter, such as "ep_size_2"; None for other parameters."""
    if getattr(param, "allreduce", True):
        return None
    return getattr(param, "group_name", None)


def global_names(model: nn.Module) -> dict[str, str]:
    """Return a dict from parameter name to the name with the expert's index among all experts, where they differ.

    Each rank numbers its own experts from 0. With 2 experts on each rank, the parameter
    ``"moe.deepspeed_moe.experts.deepspeed_experts.0.weight"`` of rank 1 gets the name of expert 2.
    """
    new_name_of: dict[str, str] = {}
    for layer_name, layer in model.named_modules():
        experts: Any = getattr(getattr(layer, "experts", None), "deepspeed_experts", None)
        expert_group: Any = getattr(layer, "ep_group", None)
        if experts is None or expert_group is None:
            continue
        first_expert = dist.get_rank(expert_group) * len(experts)
        if dist.get_world_size(expert_group) == 1:
            continue
        prefix = f"{layer_name}.experts.deepspeed_experts"
        for local_index, expert in enumerate(experts):
            for name, _ in expert.named_parameters():
                new_name_of[f"{prefix}.{local_index}.{name}"] = f"{prefix}.{first_expert + local_index}.{name}"
    return new_name_of
