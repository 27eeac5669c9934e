"""The default labels: "muon" and "adamw", or the role of each parameter, with a reason for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from glob import escape
from typing import NamedTuple

import torch
from torch import nn

from muonfx.core.checks import warn_caller
from muonfx.internal.display import format_list
from muonfx.routing.params import ParamInfo, Params, module_path, plain_name, read_params
from muonfx.routing.predicates import path
from muonfx.routing.roles import ROLES, Decision, Role, roles_of
from muonfx.routing.route import Label
from muonfx.routing.rules import Labels, Rule, apply_rules, make_labels
from muonfx.routing.structure import Structure, structure_of


def default_labels(
    model_or_params: Params,
    rules: Sequence[Rule] = (),
    *,
    muon: Label = "muon",
    other: Label = "adamw",
    roles: bool = False,
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
    7. a name that suggests an embedding, a token or position table, an output head, a MoE router, a gain, a norm, the
       convolution of raw input, or state-space rates and the maps to them (``x_proj``, ``dt_proj``): ``other``. A layer
       in a block is no head if another layer of the block reads its outputs, as for ``q_head``, or inside a
       ``diffusion_head``;
    8. a shape without a matrix to orthogonalize: ``other``. The parameter has a side of 1 after flattening to (first
       dim, rest), or is a depthwise convolution, or a convolution with at most 3 input or output channels; outside all
       blocks, with at most 4. Or it is a matrix whose short side is at most 4 and whose long side is at least 32 times
       as long;
    9. the structure of the model: ``other``. The parameter is a table, which is a 2-D ``nn.Parameter`` that is not the
       weight of a layer, unless it has the name of a matrix, such as ``c_fc`` or ``w1``. Outside all blocks, ``proj``
       and ``text_projection`` of CLIP are no hidden matrices, either. Or the parameter belongs to a layer of
       raw input, which is outside all blocks and reads features that no earlier layer returns. Or it belongs to a head,
       which is outside all blocks and returns features that no other layer reads. A layer before the blocks does not
       count as a head if it returns a small multiple of the width that it reads;
    10. every other parameter: ``muon``. It is a hidden matrix, a stack of matrices, a fused matrix, or a convolution.

    With ``roles=True``, the label is the role, the function of the parameter in the model. `muon_with_adamw` accepts a
    learning rate for each role. The rules are the same:

    - "hidden": hidden matrices, by rule 10.
    - "embedding": token and position tables, and a head that is tied to one.
    - "head": the matrices of an output head that is not tied.
    - "vector": biases, gains, norms, depthwise convolutions, tables of state-space rates, and all else that has fewer
      than two dims or a side of 1.
    - "other": the other matrices, such as routers, convolutions and patch embeddings of raw input, maps to state-space
      rates, factors of adapters, parts of a parametrization, and maps from or to a few features.

    For each stack of experts, and each transposed or fused matrix, the result also has a `MatrixView`. It describes how
    the tensor divides into matrices. ``Muon`` and ``muon_with_adamw`` use these views by default. For other chains,
    pass ``view=labels.view()`` to the transforms. In your own code, a parameter of three dims is a stack of experts if
    its name has the word ``expert``, ``experts`` or ``moe``, or the class of its module ends in ``Experts``. It is
    (E, out, in), or (E, in, out) if the width of a router next to it shows it; `describe` shows which.

    Module types are known if a model is given. For named tensors, as when ``partition`` calls this function, names and
    shapes decide, and a warning lists the supposed hidden matrices; `default_labels_by_name` does not warn.

    A module that holds several networks, such as a generator and a discriminator, is read as one network: the output
    layer of one is hidden if another reads as many features. Give its head a rule, or label each network alone.

    A layer called ``gate``, ``moe_gate`` or ``expert_gate`` may be a router or a part of a gated MLP. It is taken for a
    router, unless it is inside an expert, or next to an ``up`` or ``down`` matrix with the same number of dims.

    Args:
        model_or_params: an ``nn.Module``; a mapping or iterable of names and tensors; or any pytree of tensors.
        rules: your own (predicate, label) pairs, such as ``(path("*.gate.*"), "adamw")``; they take precedence over
            the default rules.
        muon: the label of hidden matrices.
        other: the label of all other trained parameters.
        roles: whether to use the roles above as labels, instead of ``muon`` and ``other``.

    Returns:
        `Labels`, a mapping from parameter name to label, in the order of the parameters.

    Raises:
        TypeError: a rule is not a (Predicate, label) pair, or a parameter is not a tensor.
        ValueError: a name occurs twice, a parameter has no shape yet, or ``roles`` is given with ``muon`` or ``other``.

    Warns:
        UserWarning: one of ``rules`` matches no parameter; named tensors without a model were labelled as hidden
            matrices; or the model has no recognized head, and layers that may be heads were labelled as hidden
            matrices. `partition` and `Muon` warn of hidden parameters that may hold several matrices, such as those
            that have three or more dims for an unknown reason, unless a view of yours divides them.

    Follows Keller Jordan's Muon (hidden layers; not the embedding, the head, the first convolution, gains and biases)
    and Moonlight, arXiv 2502.16982. To train routers with Muon, add the rule ``(path("*.gate.weight"), "muon")``.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 32))
    >>> default_labels(model)["2.weight"], default_labels(model).reason("0.weight")
    ('muon', 'embedding (module type Embedding)')
    >>> list(default_labels(model, roles=True).values())
    ['embedding', 'vector', 'vector', 'hidden', 'vector']
    >>> from muonfx.routing import path
    >>> default_labels(model, [(path("2.*"), None)])["2.weight"] is None
    True
    """
    label_of_role = _labels_of_roles("default_labels", muon, other, roles)
    decisions = _decide(model_or_params, rules)
    labels = _labels(model_or_params, decisions, label_of_role)
    if torch.compiler.is_compiling():
        return labels
    hidden = _hidden(decisions)
    if hidden and not isinstance(model_or_params, nn.Module):
        _warn_of_unknown_module_types(hidden)
    if not _has_head(decisions, label_of_role["hidden"]):
        possible_heads = [
            info for info in hidden if module_path(info.name) in decisions.structure.possible_heads
        ]
        if possible_heads:
            _warn_of_no_head(possible_heads, label_of_role)
    return labels


def _warn_of_unknown_module_types(hidden: Sequence[ParamInfo]) -> None:
    names = format_list([info.name for info in hidden])
    warn_caller(
        f"default_labels saw names and shapes, without module types, and labelled these as hidden matrices: {names}. "
        "An embedding or a head with an unusual name would be among them, and a stack of matrices would be flattened. "
        "Pass the model, default_labels(model), or use default_labels_by_name if the names are reliable"
    )


def _name_and_shape(info: ParamInfo) -> str:
    """Return the name and the shape of a parameter as text, for a list in a warning.

    >>> _name_and_shape(ParamInfo("fc.weight", (64, 16)))
    "'fc.weight' (64, 16)"
    """
    return f"{info.name!r} {info.shape}"


def _warn_of_no_head(
    possible_heads: Sequence[ParamInfo], label_of_role: Mapping[Role, Label]
) -> None:
    """Warn that layers that may be output heads were labelled as hidden matrices, with code that labels them as heads.

    The code is a rule, such as ``(muonfx.routing.path('fc.weight'), 'adamw')``. ``label_of_role`` has the label of each
    role: ``{"hidden": "muon", "head": "adamw", ...}``.
    """
    hidden_label = label_of_role["hidden"]
    head_label = label_of_role["head"]
    rule = _code_of_rule(possible_heads, head_label)
    warn_caller(
        "default_labels: found no output head, and labelled the weights of the layers that may be one, "
        f"{format_list(possible_heads, _name_and_shape)}, as hidden matrices, {hidden_label!r}. If the model returns "
        f"their outputs, label them {head_label!r} by this rule, in an argument of Muon, after other rules of yours:\n"
        f"  labels=lambda model: muonfx.default_labels(model, [{rule}])\n"
        f"For a hidden layer, write {hidden_label!r} instead of {head_label!r}, which keeps the label without a warning"
    )


def _code_of_rule(infos: Sequence[ParamInfo], label: Label) -> str:
    """Return the code of a rule that gives a label to these parameters.

    The names are those without the components of wrappers, with which the rule applies with and without the wrapper.

    >>> _code_of_rule([ParamInfo("_orig_mod.fc.weight", (10, 64))], "adamw")
    "(muonfx.routing.path('fc.weight'), 'adamw')"
    """
    globs = [escape(plain_name(info.name)) for info in infos]
    code_of_predicate = path(*globs).code_in("muonfx.routing.")
    return f"({code_of_predicate}, {label!r})"


def default_labels_by_name(
    params: Params,
    rules: Sequence[Rule] = (),
    *,
    muon: Label = "muon",
    other: Label = "adamw",
    roles: bool = False,
) -> Labels:
    """Label named tensors as `default_labels` does, without its warning about unknown module types.

    Use this function if there is no model and the names are reliable. Without module types, an embedding named
    ``lookup`` looks like a hidden matrix, and a stack of matrices like a convolution. Arguments and errors are as
    in `default_labels`.

    >>> import torch
    >>> default_labels_by_name({"wte.weight": torch.zeros(8, 4), "h.fc.weight": torch.zeros(4, 4)})
    Labels({'wte.weight': 'adamw', 'h.fc.weight': 'muon'})
    """
    label_of_role = _labels_of_roles("default_labels_by_name", muon, other, roles)
    return _labels(params, _decide(params, rules), label_of_role)


def _labels_of_roles(caller: str, muon: Label, other: Label, roles: bool) -> dict[Role, Label]:
    """Return the label of each role, for the arguments ``muon``, ``other`` and ``roles`` of `default_labels`.

    ``caller`` is the name of the function that has these arguments, for errors.

    >>> _labels_of_roles("default_labels", "muon", "adamw", roles=False)
    {'hidden': 'muon', 'embedding': 'adamw', 'head': 'adamw', 'vector': 'adamw', 'other': 'adamw'}
    >>> _labels_of_roles("default_labels", "muon", "adamw", roles=True)["embedding"]
    'embedding'
    """
    if not roles:  # two labels: one for hidden matrices, and one for all other roles
        label_of_role: dict[Role, Label] = dict.fromkeys(ROLES, other)
        label_of_role["hidden"] = muon
        return label_of_role
    # With ``roles``, the labels are the names of the roles, so that ``muon`` and ``other`` must have their defaults.
    if (muon, other) != ("muon", "adamw"):
        raise ValueError(
            f"{caller}: found roles=True with muon={muon!r} and other={other!r}, expected one of the two: the labels "
            "are then the roles. To give a role another label, use a dict: "
            "Labels({name: mine.get(role, role) for name, role in labels.items()})"
        )
    return {role: role for role in ROLES}


class _Decisions(NamedTuple):
    """The rules of the user and the roles of the parameters of a model, which decide the labels."""

    infos: tuple[ParamInfo, ...]
    """The parameters."""
    absent: tuple[str, ...]
    """The names of parameters that are None."""
    label_by_rule: Mapping[str, tuple[Label, str]]
    """The label and the reason of each parameter that a rule of the user matches."""
    structure: Structure
    """The structure of the model; it is empty if only names and shapes are known."""
    roles: Mapping[str, Decision]
    """The role (the function in the model, such as "head") and the reason of each parameter, by name."""


def _hidden(decisions: _Decisions) -> list[ParamInfo]:
    """Return the parameters that are labelled as hidden matrices by their roles, and not by a rule of the user."""
    hidden: list[ParamInfo] = []
    for info in decisions.infos:
        has_rule = info.name in decisions.label_by_rule
        if info.requires_grad and not has_rule and decisions.roles[info.name].role == "hidden":
            hidden.append(info)
    return hidden


def _decide(model_or_params: Params, rules: Sequence[Rule]) -> _Decisions:
    """Apply the user's rules to the parameters, and find the role of each."""
    infos, absent = read_params(model_or_params)
    label_by_rule = apply_rules(infos, rules, "user rule")
    structure = structure_of(model_or_params)
    return _Decisions(infos, absent, label_by_rule, structure, roles_of(infos, structure))


def _labels(
    model_or_params: Params, decisions: _Decisions, label_of_role: Mapping[Role, Label]
) -> Labels:
    """Return the labels of the parameters, by the user's rules or else by their roles, with a reason for each.

    Args:
        model_or_params: the model, or named tensors.
        decisions: what decides the labels: the rules that match, and the role of each parameter, such as "head".
        label_of_role: the label of each role: {"hidden": "muon", "head": "adamw", ...}.
    """
    infos = decisions.infos
    labels_with_reasons: dict[str, tuple[Label, str]] = {}
    for info in infos:
        if info.name in decisions.label_by_rule:
            labels_with_reasons[info.name] = decisions.label_by_rule[info.name]
        elif not info.requires_grad:
            labels_with_reasons[info.name] = (None, "frozen")
        else:
            role, reason = decisions.roles[info.name]
            labels_with_reasons[info.name] = (label_of_role[role], reason)
    # Other roles are not trained as matrices, so that a fused weight of them need not be divided.
    whole_labels = {label_of_role[role] for role in ROLES if role != "hidden"}
    read_in_parts = decisions.structure.read_in_parts
    return make_labels(
        model_or_params, infos, labels_with_reasons, decisions.absent, read_in_parts, whole_labels
    )


def _has_head(decisions: _Decisions, hidden_label: Label) -> bool:
    """Return True if the output head of a model is known, so that no warning of a missing one is needed.

    The structure of the model shows it, or a role, or a rule of the user that gives a matrix another label than
    ``hidden_label``, such as "muon".
    """
    # Such a head may have another role: "vector" if it returns one number.
    if decisions.structure.heads:
        return True
    for info in decisions.infos:
        if _is_head(info, decisions.roles[info.name].role):
            return True
        if info.ndim < 2 or info.name not in decisions.label_by_rule:
            continue
        label, _ = decisions.label_by_rule[info.name]
        if label != hidden_label:  # the rule may be for the head
            return True
    return False


def _is_head(info: ParamInfo, role: Role) -> bool:
    """Return True for an output head, and for an embedding with a second name, which is usually also the output head.

    >>> _is_head(ParamInfo("wte.weight", (8, 4), tied=("lm_head.weight",)), "embedding")
    True
    """
    return role == "head" or (role == "embedding" and bool(info.tied))
