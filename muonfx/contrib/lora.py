"""Labels for LoRA, with which Muon updates the factor B of each adapter and Adam the factor A."""

from __future__ import annotations

from itertools import pairwise
from math import prod

from torch import nn

from muonfx.core.checks import warn_caller
from muonfx.internal.display import format_list
from muonfx.routing import Labels, ParamInfo, default_labels_by_name
from muonfx.routing.params import Params, read_params


def lora_labels(model_or_params: Params) -> Labels:
    """Label the factor B of each LoRA adapter "muon", and all other parameters as `muonfx.default_labels` does.

    B is found by a component of its name: ``lora_B`` (peft), ``lora_b`` (torchtune), ``lora_up`` or ``lora.up``
    (diffusers). A factor of rank 1 is a vector and remains with AdamW. So do ``lora_A`` and peft's factors for an
    embedding, ``lora_embedding_A`` and ``lora_embedding_B``, of which A starts at zero. Frozen parameters of a model
    have the label None.

    LoRA adds the product B A to a frozen weight, and the update of the product is dB A + B dA. B (out, r) starts at
    zero and A (r, in) is random, so at first A has no gradient and the update is dB A. The few long rows of A are
    nearly orthogonal, so orthogonalizing dB gives the product an update with nearly equal singular values, as Muon
    does for a whole weight. This does not hold for A: the singular values of B dA depend on B, which are small and
    unequal.

    Args:
        model_or_params: a model, named tensors, or any pytree of tensors, as for `muonfx.default_labels`.

    Returns:
        `Labels`, a mapping from parameter name to "muon", "adamw" or None.

    Raises:
        TypeError: a parameter is not a tensor.
        ValueError: a name occurs twice, or a parameter has no shape yet.

    Warns:
        UserWarning: tensors were given without a model, so it is unknown which are frozen, and a weight that is not a
            factor has the label "muon".

    Follows a proposal for OneTrainer (https://github.com/Nerogar/OneTrainer/pull/1314), which was closed; it reports
    noise with Muon on A, without measurements. In ``examples/lora.py``, a small model, these labels do not help: the
    final loss is 1.790, with AdamW 1.782 and with Muon on both factors 1.780. Related methods that are not implemented
    here: LoRA-Muon (arXiv 2606.12921), which orthogonalizes both factors after whitening by the other factor, and
    orthonormal columns of B (arXiv 2508.17901).

    >>> import muonfx as mfx
    >>> params = {"q.lora_A.weight": torch.zeros(2, 8), "q.lora_B.weight": torch.zeros(8, 2)}
    >>> lora_labels(params)
    Labels({'q.lora_A.weight': 'adamw', 'q.lora_B.weight': 'muon'})
    >>> tx = mfx.muon_with_adamw(
    ...     1e-2, weight_decay=0.0, adamw_weight_decay=0.0, labels=lora_labels(params)
    ... )
    >>> {label: list(state)[0] for label, state in tx.init(params).items()}
    {'adamw': 'scale_by_adam', 'muon': 'momentum'}
    """
    routes = dict(default_labels_by_name(model_or_params).routes)
    other_matrices: list[str] = []
    infos, _ = read_params(model_or_params)
    for info in infos:
        route = routes[info.name]
        if route.label is not None and _is_b(info):
            routes[info.name] = route._replace(label="muon", reason="factor B of LoRA")
        elif route.label == "muon":
            other_matrices.append(info.name)
    if other_matrices and not isinstance(model_or_params, nn.Module):
        warn_caller(
            f"lora_labels saw tensors without a model, and labelled these as matrices that Muon trains: "
            f"{format_list(other_matrices)}. If they are frozen, pass the model: labels=lora_labels(model)"
        )
    return Labels(routes)


def _is_b(info: ParamInfo) -> bool:
    """Return True for the factor B of LoRA's product B A, such as ``q.lora_B.weight``, if its rank is 2 or more."""
    # ["q", "lora_b", "weight"] or ["q", "lora", "up", "weight"]
    components = info.name.lower().split(".")
    has_name = (
        "lora_b" in components or "lora_up" in components or ("lora", "up") in pairwise(components)
    )
    if not has_name or info.ndim < 2:
        return False
    rows = info.shape[0]
    columns = prod(info.shape[1:])
    rank = min(rows, columns)
    return rank > 1  # a factor of rank 1 is a vector
