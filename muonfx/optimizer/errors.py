"""The texts of errors, most of parameters that were replaced, moved, frozen, removed or flattened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

CAUSES = (
    "was the model sharded, loaded or converted after the optimizer was created (fully_shard, load_state_dict(assign="
    "True), to_empty() of meta parameters, parametrizations)? Create the optimizer after that"
)
FSDP1 = (
    "FullyShardedDataParallel (FSDP1) has flattened and split its matrices. Shard the model with fully_shard (FSDP2; "
    "in accelerate fsdp_version=2) instead"
)


def flattened(name: str, param: Tensor) -> ValueError:
    """Return an error for a parameter that FSDP1 has flattened."""
    return ValueError(
        f"{name!r} has shape {tuple(param.shape)}: {FSDP1}, or give these shards by layout=muonfx.sharding.flat(...)"
    )


def on_meta(names: Sequence[str], count: int) -> ValueError:
    """Return an error for parameters on the meta device, of ``count`` parameters in total."""
    return ValueError(
        f"{names[0]!r} is on the meta device, as are {len(names)} of {count} parameters: allocate and load them "
        "first (model.to_empty(device=...), then load_state_dict). An optimizer that was given the model finds the "
        "new tensors; otherwise create the optimizer after that"
    )


def other_shape(name: str, param: Tensor, expected: torch.Size) -> ValueError:
    """Return an error for a parameter that has another shape than at construction."""
    cause = FSDP1 if getattr(param, "_fsdp_flattened", False) else CAUSES
    return ValueError(
        f"{name!r} has shape {tuple(param.shape)}, expected {tuple(expected)}, as at construction: {cause}"
    )


def replaced_after_backward(name: str) -> ValueError:
    """Return an error for a parameter that was replaced after its gradient was computed."""
    return ValueError(
        f"{name!r} of the model was replaced between backward() and step(), and its gradient "
        "belongs to the former tensor: replace parameters before the backward pass"
    )


def unknown_tensor(index: int, param: Tensor, count: int, expected_count: int) -> ValueError:
    """Return an error for a tensor in a param group that replaces no parameter."""
    return ValueError(
        f"param_groups[{index}]: found a new tensor of shape {tuple(param.shape)} and {count} params, "
        f"expected {expected_count}, one for each of param_names: keep a replaced parameter at its position, "
        "and add others with add_param_group. Under DeepSpeed's ZeRO use muonfx.engines.deepspeed.Muon"
    )


def listed_twice(name: str, times: int) -> ValueError:
    """Return an error for a parameter that is in the param groups more than once."""
    return ValueError(
        f"param_groups: {name!r} is listed {times} times and would be updated as often: list it "
        "once; a new tensor takes the name of its place in param_names"
    )


def removed(names: Sequence[str], count: int) -> ValueError:
    """Return an error for parameters that were removed from the param groups, of ``count`` parameters in total."""
    return ValueError(
        f"param_groups: {len(names)} of {count} parameters were removed, such as {names[0]!r}: "
        "put them back; to stop training a parameter, set requires_grad_(False) and .grad = None"
    )


def frozen_is_trained(name: str) -> ValueError:
    """Return an error for a parameter in no group that has a gradient."""
    return ValueError(
        f"{name!r} has a gradient, but it was frozen when the optimizer was created, and is in no group: "
        "call optimizer.add_param_group({'params': [...]}) with it. If another optimizer trains it, give "
        "it the label None, or leave it out of this optimizer's parameters"
    )


def gradients_elsewhere(name: str, param: Tensor, count: int) -> ValueError:
    """Return an error for gradients that only parameters outside of the optimizer, which has ``count``, have."""
    cause = FSDP1 if getattr(param, "_is_flat_param", False) else CAUSES
    return ValueError(
        f"none of the {count} parameters has a gradient, but {name!r} of the model has one and is not among them: "
        f"{cause}"
    )


def without_hyperparams(labels: Mapping[str, str | None]) -> ValueError:
    """Return an error for two parameters in one group, with their labels, that different transforms update."""
    (first, first_label), (other, other_label) = labels.items()
    return ValueError(
        f"param_groups: {first!r} (label {first_label!r}) and {other!r} (label {other_label!r}) are in "
        "one group, but different transforms update them, and the group lacks hyperparameters of one: recreate the "
        "optimizer to change a label, or add_param_group to add parameters"
    )


def other_labels(name: str) -> ValueError:
    """Return an error for a parameter whose labels changed when it was replaced."""
    return ValueError(f"{name!r} has other labels now than when the optimizer was created: recreate the optimizer")


def emptied_over_ranks(name: str) -> ValueError:
    """Return an error for an emptied state over ranks: they create a state together, and one may have emptied alone."""
    return ValueError(
        f"optimizer.state: the state of {name!r} was emptied, which an optimizer over ranks cannot "
        "start again: write into its tensors instead, as in optimizer.state[param]['momentum.trace'].zero_()"
    )


def label_is_none(name: str) -> ValueError:
    """Return an error for a parameter that is added to the optimizer, but has the label None."""
    return ValueError(
        f"{name!r} has the label None, so that it is not trained: recreate the optimizer with another label for it"
    )


def listed_without_label(name: str) -> ValueError:
    """Return an error for a parameter that somebody has put into the groups, but that has the label None."""
    return ValueError(
        f"param_groups: {name!r} was added, but its label is None, so that it is not "
        "trained: remove it from the groups, or recreate the optimizer with other labels"
    )


def first_lines(lines: Sequence[str], limit: int) -> str:
    """Join the first lines of a message, with a count of the others: "a; b; and 3 more" for a limit of 2."""
    shown = list(lines[:limit])
    if len(lines) > limit:
        shown.append(f"and {len(lines) - limit} more")
    return "; ".join(shown)
