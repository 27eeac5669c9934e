"""The default labels: "muon" for hidden matrices, "adamw" for all other parameters, with a reason for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from muonfx.core.checks import warn_caller
from muonfx.select.params import ParamInfo, Params, read_params
from muonfx.select.roles import reasons_against_muon
from muonfx.select.rules import Label, Labels, Rule, apply_rules, make_labels
from muonfx.select.views import is_convolution
from muonfx.tree.display import format_list

__all__ = ["default_labels", "default_labels_by_name"]


def default_labels(
    model_or_params: Params, rules: Sequence[Rule] = (), *, muon: Label = "muon", other: Label = "adamw"
) -> Labels:
    """Label each parameter for Muon or AdamW: hidden matrices "muon", other parameters "adamw", frozen ones None.

    `partition` then applies one transform to the parameters of each label. A parameter that is None instead of a
    tensor gets the label None. The first rule that matches a parameter decides:

    1. your own rules, in their order;
    2. frozen (``requires_grad=False``): None, so no transform updates it;
    3. a weight of an embedding module, or tied to one, as an output head often is: ``other``;
    4. a parameter of a norm module: ``other``;
    5. a factor of an adapter by name (``lora_A``, ``hada_w1_a``, ...) or a part of a parametrization (weight norm):
       ``other``, because the weight is the product of its factors;
    6. fewer than two dimensions, or a bias by name: ``other``;
    7. by name an embedding, a token or position table, an output head, a MoE router, a gain, a norm, the convolution
       of raw input, or the rates of a state-space layer and the maps to them (``x_proj``, ``dt_proj``): ``other``;
    8. a shape without a matrix to orthogonalize: a side is 1 after flattening to (first dim, rest); a depthwise
       convolution; a convolution with at most 3 input or output channels, as for images; or a matrix whose short side
       is at most 4 and whose long side is at least 32 times as long: ``other``;
    9. every other parameter: ``muon``. It is a hidden matrix, a stack of matrices, a fused matrix, or a convolution.

    The result also has a view (a `MatrixView`: how a tensor divides into matrices) for each stack of experts, and for
    each transposed or fused matrix. ``Muon`` and ``muon_with_adamw`` use these views by default. For other chains,
    pass ``view=labels.view()`` to the transforms.

    Module types are known if a model is given. For named tensors, as when ``partition`` calls this function, names and
    shapes decide, and a warning lists the supposed hidden matrices; `default_labels_by_name` does not warn. The name
    component ``gate`` is a router, unless it is inside an expert or next to an ``up`` or ``down`` matrix with as many
    dims, as in a gated MLP.

    Args:
        model_or_params: an ``nn.Module``; a mapping or iterable of names and tensors; or any pytree of tensors.
        rules: your own (predicate, label) pairs, such as ``(path("*.gate.*"), "adamw")``; they take precedence over
            the default rules.
        muon: the label of hidden matrices.
        other: the label of all other trained parameters.

    Returns:
        `Labels`, a mapping from parameter name to label, in the order of the parameters.

    Raises:
        TypeError: a rule is not a (Predicate, label) pair, or a parameter is not a tensor.
        ValueError: a name occurs twice, or a parameter has no shape yet.

    Warns:
        UserWarning: one of ``rules`` matches no parameter; named tensors without a model were labelled as hidden
            matrices; or it is unknown why a hidden parameter has three or more dims, which would be flattened.

    Follows Keller Jordan's Muon (hidden layers; not the embedding, the head, the first convolution, gains and biases)
    and Moonlight, arXiv 2502.16982. To train routers with Muon, add the rule ``(path("*.gate.weight"), "muon")``.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 32))
    >>> default_labels(model)["2.weight"], default_labels(model).reason("0.weight")
    ('muon', 'embedding (module type Embedding)')
    >>> from muonfx.select import path
    >>> default_labels(model, [(path("2.*"), None)])["2.weight"] is None
    True
    """
    found, infos = _labels(model_or_params, rules, muon, other)
    if torch.compiler.is_compiling():
        return found
    hidden = [info for info in infos if found.reason(info.name).startswith(_HIDDEN)]
    said = ""
    if hidden and not isinstance(model_or_params, nn.Module):
        said += (
            " saw names and shapes, without module types, and labelled these as hidden matrices: "
            f"{format_list([info.name for info in hidden])}. An embedding or a head with an unusual name would be "
            "among them. Pass the model, default_labels(model), or use default_labels_by_name if the names are reliable"
        )
    views = found.views
    unknown = [info for info in hidden if info.ndim > 2 and info.name not in views and not is_convolution(info)]
    if unknown:
        said += (
            ": these have more than two dims for an unknown reason, and all dims after the first are flattened: "
            f"{format_list([f'{info.name!r} {info.shape}' for info in unknown], str)}. Give Muon's orthogonalize, or "
            "each transform that takes a view, view=muonfx.MatrixView({'*.name': '... out in -> ... out in'}) for a "
            "stack of matrices (out, in), '... in out -> ... out in' if each is (in, out), 'out a b -> out (a b)' for "
            "one matrix whose columns are two dims"
        )
    if said:
        warn_caller(f"default_labels{said}")
    return found


def default_labels_by_name(
    params: Params, rules: Sequence[Rule] = (), *, muon: Label = "muon", other: Label = "adamw"
) -> Labels:
    """Label named tensors "muon" or "adamw" as `default_labels` does, without its warning about unknown module types.

    Use this function if there is no model and the names are reliable. Without module types, an embedding named
    ``lookup`` looks like a hidden matrix, and a stack of matrices like a convolution. Arguments and errors are as
    in `default_labels`.

    >>> import torch
    >>> default_labels_by_name({"wte.weight": torch.zeros(8, 4), "h.fc.weight": torch.zeros(4, 4)})
    Labels({'wte.weight': 'adamw', 'h.fc.weight': 'muon'})
    """
    return _labels(params, rules, muon, other)[0]


_HIDDEN = "hidden matrix"


def _labels(
    model_or_params: Params, rules: Sequence[Rule], muon: Label, other: Label
) -> tuple[Labels, tuple[ParamInfo, ...]]:
    infos, absent = read_params(model_or_params)
    decided = apply_rules(infos, rules, "user rule")
    reasons = reasons_against_muon(infos)
    for info in infos:
        if info.name in decided:
            continue
        if not info.requires_grad:
            decided[info.name] = (None, "frozen")
        elif reason := reasons.get(info.name):
            decided[info.name] = (other, reason)
        else:
            decided[info.name] = (muon, f"{_HIDDEN} ({info.ndim}-D)")
    return make_labels(model_or_params, infos, decided, absent, other), infos
