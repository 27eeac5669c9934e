"""Complete optimizers as short chains of transforms, to use as they are or to copy and change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from muonfx.core import Transform, chain
from muonfx.core.checks import at_least, in_unit_interval
from muonfx.core.partition import partition
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.core.transform import require_transform
from muonfx.internal.arguments import check_plain, did_you_mean, plain_arguments
from muonfx.internal.display import format_list
from muonfx.routing import Labels, default_labels, default_labels_by_name
from muonfx.transforms import (
    AttentionHeads,
    add_decayed_weights,
    momentum,
    normalize_neurons,
    orthogonalize,
    qk_clip,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    scale_by_shape,
)
from muonfx.transforms.decay import Mask
from muonfx.transforms.matrices import MatrixView, first_view
from muonfx.transforms.scale import ShapeRule

__all__ = ["adamw", "lion", "muon", "muon_with_adamw", "muonclip", "normuon"]

ByRole: TypeAlias = ScalarOrSchedule | Mapping[str, ScalarOrSchedule]
"""A number or schedule for all parameters, or one for each role, which is the label of the parameters."""


def view_of(orthogonalize: Transform) -> MatrixView:
    """Return the view (how parameters divide into matrices) of the argument ``orthogonalize`` of a recipe."""
    require_transform("orthogonalize", orthogonalize)
    return first_view(orthogonalize)


def check_not_negative(argument: str, value: object) -> None:
    """Raise ValueError, with the name of the argument, if a number is negative, or one in a dict of numbers by role.

    The transforms check their numbers too, but under their own names: ``adamw_lr`` is "learning_rate" there.
    """
    # {"embedding": 0.3}: the name in an error is "adamw_lr['embedding']"
    if isinstance(value, Mapping):
        for role, number in value.items():
            check_not_negative(f"{argument}[{role!r}]", number)
    elif isinstance(value, int | float):  # schedules and tensors are left to the transforms
        at_least(argument, value, 0.0)


def check_decay(argument: str, value: object) -> None:
    """Raise ValueError, with the name of the argument, if the decay of a moving average is not in [0, 1)."""
    if isinstance(value, int | float):
        in_unit_interval(argument, value)


def with_views(tx: Transform, labels: Labels) -> Transform:
    """Pass the views that ``labels`` have found for parameters to each part of a transform that takes a view.

    A view (a `MatrixView`) divides parameters into matrices. Take labels with the view ``"(qkv=3 out) in -> qkv out
    in"`` for "attn.qkv". The `orthogonalize` in a chain then divides this parameter too. A pattern that it has already
    for a parameter stays.
    """
    if not labels.views:  # every parameter is one matrix, stored as (out, in)
        return tx
    # The members of a chain.
    tx = tx.with_children([with_views(part, labels) for part in tx.children])
    view = tx.arguments.get("view")
    if not isinstance(view, MatrixView):  # it takes none
        return tx
    return tx.replace(view=labels.view(view))  # its own view, extended by the views of the labels


@plain_arguments
def muon(
    learning_rate: ScalarOrSchedule = 2e-3,
    *,
    decay: ScalarOrSchedule = 0.95,
    nesterov: bool = True,
    orthogonalize: Transform = orthogonalize(),
    lr_scaling: ShapeRule = "match_rms_adamw",
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> Transform:
    """Muon: orthogonalized momentum with decoupled weight decay. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule. With ``lr_scaling="match_rms_adamw"``, start from the best rate of AdamW:
            the same from scratch, four times as much for fine-tuning. With "original", 0.02 is usual.
        decay: decay rate of the momentum, a number or a schedule.
        nesterov: use Nesterov momentum.
        orthogonalize: the transform that orthogonalizes the momentum, such as ``orthogonalize(coefficients="keller")``.
            Its view (a `MatrixView`, which divides parameters into matrices) is also used for ``lr_scaling``.
        lr_scaling: how the update of a matrix is scaled by its shape, as in `scale_by_shape`.
        weight_decay: decoupled weight decay: each step multiplies parameters by ``1 - learning_rate * weight_decay``.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows Keller Jordan's Muon and Moonlight (arXiv 2502.16982). ``torch.optim.Muon(lr, weight_decay)`` is
    ``muon(lr, weight_decay=weight_decay, orthogonalize=orthogonalize(coefficients="keller"), lr_scaling="original")``.

    >>> muon(0.001)  # doctest: +NORMALIZE_WHITESPACE
    chain(momentum(), orthogonalize(), scale_by_shape(), add_decayed_weights(),
          scale_by_learning_rate(learning_rate=0.001))
    """
    return chain(
        momentum(decay, nesterov=nesterov),
        orthogonalize,
        scale_by_shape(lr_scaling, view=view_of(orthogonalize)),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def normuon(
    learning_rate: ScalarOrSchedule = 2e-3,
    *,
    decay: ScalarOrSchedule = 0.95,
    neuron_decay: ScalarOrSchedule = 0.95,
    orthogonalize: Transform = orthogonalize(),
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> Transform:
    """NorMuon: Muon with each row divided by its running root mean square. All parameters must be matrices.

    Args:
        learning_rate: a number or a schedule.
        decay: decay rate of the momentum.
        neuron_decay: decay rate of each row's running mean square.
        orthogonalize: the transform that orthogonalizes, as in `muon`. If its `MatrixView` divides a parameter into
            several matrices, each of them is normalized separately.
        weight_decay: decoupled weight decay, as in `muon`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows NorMuon (arXiv 2510.05491), with two differences: the momentum is Nesterov's, and updates keep the norm that
    ``orthogonalize`` returns, where the paper scales each update to a root mean square of 0.2. The exact formula is
    ``paper_normuon`` in *Variants of Muon*.

    >>> list(normuon(0.001).init({"w": torch.zeros(4, 4)}))[:3]
    ['momentum', 'orthogonalize', 'normalize_neurons']
    """
    check_decay("neuron_decay", neuron_decay)
    view = view_of(orthogonalize)  # the same matrices in all transforms
    return chain(
        momentum(decay),
        orthogonalize,
        normalize_neurons(neuron_decay, view=view),
        scale_by_shape(view=view),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def adamw(
    learning_rate: ScalarOrSchedule = 1e-3,
    *,
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.999,
    eps: ScalarOrSchedule = 1e-8,
    nesterov: bool = False,
    weight_decay: ScalarOrSchedule = 1e-2,
    mask: Mask = None,
) -> Transform:
    """AdamW: Adam with decoupled weight decay, equal to ``torch.optim.AdamW``.

    Args:
        learning_rate: a number or a schedule.
        b1: decay rate of the first moment.
        b2: decay rate of the second moment.
        eps: added to the root of the second moment.
        nesterov: whether to use Nesterov momentum, as in `scale_by_adam`.
        weight_decay: decoupled weight decay, as in `muon`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    >>> adamw(1e-3)
    chain(scale_by_adam(), add_decayed_weights(weight_decay=0.01), scale_by_learning_rate(learning_rate=0.001))
    """
    return chain(
        scale_by_adam(b1, b2, eps, nesterov=nesterov),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


@plain_arguments
def lion(
    learning_rate: ScalarOrSchedule = 1e-4,
    *,
    b1: ScalarOrSchedule = 0.9,
    b2: ScalarOrSchedule = 0.99,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Mask = None,
) -> Transform:
    """Lion: steps by the sign of a mean of momentum and gradient, with decoupled weight decay.

    Args:
        learning_rate: a number or a schedule. Usual values are a tenth to a third of AdamW's learning rate.
        b1: weight of the momentum in the update; the gradient has weight ``1 - b1``.
        b2: decay rate of the momentum.
        weight_decay: decoupled weight decay, as in `muon`.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Follows Chen et al. (arXiv 2302.06675).

    >>> lion(1e-4)
    chain(scale_by_lion(), add_decayed_weights(), scale_by_learning_rate(learning_rate=0.0001))
    """
    return chain(
        scale_by_lion(b1, b2),
        add_decayed_weights(weight_decay, mask),
        scale_by_learning_rate(learning_rate),
    )


def check_roles(owner: str, numbers: Mapping[str, object], labels: object) -> None:
    """Check the roles in numbers that AdamW may have for each role, such as ``{"embedding": 0.3, "head": 0.002}``.

    A role is a label of some of AdamW's parameters, here "embedding" and "head". AdamW trains the parameters with all
    labels but "hidden", which is the label of Muon's.

    Args:
        owner: the function that received the arguments, for errors.
        numbers: the arguments of that function, by name. Each is a number, or a dict from role to number.
        labels: the labels of the parameters. A dict or `Labels` is checked here; `partition` checks a function or tree.

    Raises:
        ValueError: the keys of a dict are not the labels of AdamW's parameters, or one of them is "muon"; or there is
            no dict, and a label is neither "muon" nor "adamw".
    """
    used_labels = _used_labels(labels)
    numbers_by_role = _numbers_by_role(numbers)
    if not numbers_by_role:  # one number for all parameters of AdamW
        first_argument, *_ = numbers
        _require_muon_and_adamw(owner, used_labels, first_argument)
        return
    first_argument, *_ = numbers_by_role
    expected_roles = used_labels
    if not used_labels:  # they are not known yet: all dicts must have the same roles
        expected_roles = set(numbers_by_role[first_argument])
    if "muon" in expected_roles:  # AdamW would train these parameters
        raise _muon_is_no_role(owner, first_argument)
    expected_roles = expected_roles - {"hidden"}
    for argument, number_of_role in numbers_by_role.items():
        if set(number_of_role) != expected_roles:
            raise _wrong_roles(owner, argument, list(number_of_role), expected_roles)


def check_types_by_role(
    owner: str, numbers: Mapping[str, object], type_names: frozenset[str]
) -> None:
    """Raise TypeError if a number in a dict by role has another type than ``type_names``, such as ``{"float"}``.

    ``owner`` and ``numbers`` are as in `check_roles`. The types of other arguments are checked by their annotations.
    """
    for argument, number_of_role in _numbers_by_role(numbers).items():
        for role, number in number_of_role.items():
            check_plain(owner, f"{argument}[{role!r}]", number, type_names)


def _numbers_by_role(numbers: Mapping[str, Any]) -> dict[str, Mapping[str, object]]:
    """Return the arguments that are dicts, such as ``{"adamw_lr": {"embedding": 0.3, "head": 0.002}}``."""
    return {argument: value for argument, value in numbers.items() if isinstance(value, Mapping)}


def _used_labels(labels: object) -> set[str]:
    """Return the set of labels that parameters have, such as ``{"muon", "adamw"}``; empty if it is not known yet.

    It is unknown for a function of the parameters and for a tree of labels, which need the parameters.

    >>> sorted(_used_labels({"fc.weight": "muon", "fc.bias": "adamw", "frozen": None}))
    ['adamw', 'muon']
    >>> _used_labels(lambda params: "muon")
    set()
    """
    if labels is default_labels or labels is default_labels_by_name:
        return {"muon", "adamw"}
    if not isinstance(labels, Mapping):  # a function, or a tree that is no dict
        return set()
    # A parameter with the label None is not updated.
    used_labels = [label for label in labels.values() if label is not None]
    if not all(isinstance(label, str) for label in used_labels):  # a tree of labels
        return set()
    return set(used_labels)


def _require_muon_and_adamw(owner: str, used_labels: set[str], argument: str) -> None:
    """Raise ValueError if a parameter has another label. ``argument`` may have numbers for other labels."""
    other_labels = sorted(used_labels - {"muon", "adamw"})
    if other_labels:
        raise ValueError(
            f"{owner}: parameters have the labels {format_list(other_labels)}, expected 'muon', 'adamw' or None: "
            f"change the labels, or give {argument} as a dict with a number for each label"
        )


def _muon_is_no_role(owner: str, argument: str) -> ValueError:
    """Return the error for a dict of numbers by role if the labels, or the roles in the dict, include "muon"."""
    return ValueError(
        f"{owner}: {argument} has numbers by role, and 'muon' is no role, expected 'hidden' as the label of Muon's "
        "parameters: give labels=muonfx.default_labels(model, roles=True), and a number for each of its other labels"
    )


def _wrong_roles(
    owner: str, argument: str, roles: list[str], expected_roles: set[str]
) -> ValueError:
    """Return the error for a dict with other roles than expected, such as ``{"embeding": 0.3, "head": 0.002}``.

    The error suggests "embedding" for a misspelled role. It has a hint if no parameter has the role "head", because a
    head may share the parameter of the embedding.
    """
    missing_roles = expected_roles.difference(roles)
    hints = [did_you_mean(role, missing_roles) for role in roles if role not in expected_roles]
    note = ""
    if "head" in roles and "head" not in expected_roles and "embedding" in expected_roles:
        note = ". A head that is tied to the embedding has the label 'embedding'"
    return ValueError(
        f"{owner}: {argument} has numbers for {format_list(roles)}, expected one for each label of AdamW's "
        f"parameters (all but 'hidden'), {format_list(sorted(expected_roles))}: correct the dict{''.join(hints)}, or "
        f"the labels, such as labels=muonfx.default_labels(model, roles=True){note}"
    )


@plain_arguments
def muon_with_adamw(
    learning_rate: ScalarOrSchedule = 2e-3,
    adamw_learning_rate: ByRole | None = None,
    *,
    decay: ScalarOrSchedule = 0.95,
    orthogonalize: Transform = orthogonalize(),
    lr_scaling: ShapeRule = "match_rms_adamw",
    weight_decay: ScalarOrSchedule = 0.1,
    adam: Transform = scale_by_adam(0.9, 0.95),
    adamw_weight_decay: ByRole = 0.1,
    labels: Any = default_labels,
    mask: Mask = None,
) -> Transform:
    """Muon for hidden matrices and AdamW for the rest, each with its own learning rate and weight decay.

    The role of a parameter is its function in the model, such as "embedding" or "head". AdamW may have a learning rate
    and a weight decay for each role. Then the labels are the roles, and Muon's label is "hidden" instead of "muon".

    Args:
        learning_rate: Muon's learning rate, a number or a schedule. The default is twice the usual default of AdamW,
            which was the best multiple for one rate that serves all parameters.
        adamw_learning_rate: AdamW's learning rate, a number or a schedule, or a dict from role to either. None uses
            Muon's learning rate. Two rates are better: if the best rate of AdamW alone is ``a``, try ``a`` and
            ``4 * a`` first from scratch, and ``4 * a`` and ``2 * a`` for fine-tuning.
        decay: decay rate of Muon's momentum.
        orthogonalize: the transform that orthogonalizes, as in `muon`. Its view (a `MatrixView`) divides parameters
            into matrices. For all parameters that it does not mention, the views in ``labels`` are used, if ``labels``
            are `Labels`; ``Labels(labels)`` has no views.
        lr_scaling: how Muon's updates are scaled by the shape of a matrix, as in `scale_by_shape`.
        weight_decay: decoupled weight decay of the Muon parameters.
        adam: the transform that computes AdamW's updates before weight decay and learning rate. Muon always uses
            Nesterov momentum here; for Nesterov momentum in AdamW too, give
            ``scale_by_adam(0.9, 0.95, nesterov=True)``.
        adamw_weight_decay: decoupled weight decay of the AdamW parameters, a number or a schedule, or a dict from role
            to either.
        labels: "muon", "adamw" or None for each parameter, as in `partition`. To label by module type, give
            ``default_labels(model)``. The default labels by name and shape, with a warning;
            ``muonfx.routing.default_labels_by_name`` returns the same labels without a warning. With numbers by role,
            give ``default_labels(model, roles=True)``.
        mask: the parameters that decay, as in `add_decayed_weights`. Default: all.

    Raises:
        ValueError: a label has no learning rate or weight decay; or a dict has a role that is the label of no
            parameter. If ``labels`` is a function, `partition` raises the first error at ``init``, and warns of the
            second.

    >>> from muonfx.routing import default_labels_by_name
    >>> tx = muon_with_adamw(0.001, 0.004, labels=default_labels_by_name)
    >>> params = {"h.0.fc.weight": torch.zeros(4, 4), "wte.weight": torch.zeros(8, 4)}
    >>> list(tx.init(params))
    ['adamw', 'muon']
    >>> tx = muon_with_adamw(
    ...     0.001, {"embedding": 0.3}, labels=default_labels_by_name(params, roles=True)
    ... )
    >>> list(tx.init(params))
    ['embedding', 'hidden']
    """
    matrices = muon(
        learning_rate,
        decay=decay,
        orthogonalize=orthogonalize,
        lr_scaling=lr_scaling,
        weight_decay=weight_decay,
        mask=mask,
    )
    require_transform("adam", adam)
    if adamw_learning_rate is None:
        adamw_learning_rate = learning_rate
    numbers = {"adamw_learning_rate": adamw_learning_rate, "adamw_weight_decay": adamw_weight_decay}
    for argument, number in numbers.items():
        check_not_negative(argument, number)
    check_roles("muon_with_adamw", numbers, labels)
    check_types_by_role("muon_with_adamw", numbers, frozenset({"float", "Schedule"}))
    if isinstance(labels, Labels):
        matrices = with_views(matrices, labels)
    muon_label = "muon"
    adamw_labels = ["adamw"]
    numbers_by_role = _numbers_by_role(numbers)
    if numbers_by_role:
        muon_label = "hidden"
        first_numbers, *_ = numbers_by_role.values()  # {"embedding": 0.3, "head": 0.002}
        adamw_labels = list(first_numbers)
    transforms = {muon_label: matrices}
    for label in adamw_labels:
        transforms[label] = chain(
            adam,
            add_decayed_weights(_number_for(label, adamw_weight_decay), mask),
            scale_by_learning_rate(_number_for(label, adamw_learning_rate)),
        )
    return partition(transforms, labels)


def _number_for(role: str, number: ByRole) -> ScalarOrSchedule:
    """Return the number for a role, from a dict from role to number or from one number for all."""
    if isinstance(number, Mapping):
        return number[role]
    return number


@plain_arguments
def muonclip(
    heads: AttentionHeads | tuple[AttentionHeads, ...],
    learning_rate: ScalarOrSchedule = 2e-3,
    adamw_learning_rate: ByRole | None = None,
    *,
    tau: ScalarOrSchedule = 100.0,
    alpha: ScalarOrSchedule = 0.5,
    **options: Any,
) -> Transform:
    """MuonClip: `muon_with_adamw` followed by `qk_clip`, which keeps attention logits small.

    Each step requires the largest attention logits of its forward pass as an argument: ``update(..., max_logits=...)``
    or ``optimizer.step(max_logits=...)``. `muonfx.attention.collect_max_logits` collects them.

    Args:
        heads: the parameters that hold queries and keys, as in `qk_clip`.
        learning_rate: Muon's learning rate, as in `muon_with_adamw`.
        adamw_learning_rate: AdamW's learning rate, as in `muon_with_adamw`.
        tau: the bound of the logits. If a head has larger logits, its queries and keys are scaled down such that their
            products are multiplied by one factor.
        alpha: queries are multiplied by the power ``alpha`` of a head's factor, keys by the power ``1 - alpha``.
        options: further arguments of `muon_with_adamw`.

    Follows Kimi K2 (arXiv 2507.20534), whose Muon is Moonlight's (arXiv 2502.16982).

    >>> from muonfx.routing import default_labels_by_name
    >>> heads = AttentionHeads("*.attn", heads=2)
    >>> tx = muonclip(heads, 0.001, 0.004, labels=default_labels_by_name)
    >>> names = "h.0.attn.q_proj.weight", "h.0.attn.k_proj.weight", "wte.weight"
    >>> list(tx.init({name: torch.zeros(4, 4) for name in names}))
    ['partition', 'qk_clip']
    """
    return chain(
        muon_with_adamw(learning_rate, adamw_learning_rate, **options), qk_clip(heads, tau, alpha)
    )
