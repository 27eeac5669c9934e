"""Complete optimizers as short chains of transforms, to use as they are or to copy and change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from muonfx.core import Transform, chain
from muonfx.core.checks import at_least, in_unit_interval
from muonfx.core.partition import partition
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.core.transform import require_transform, within
from muonfx.internal.arguments import accepted_types, check_plain, close_names, plain_arguments
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
from muonfx.transforms.matrices import MatrixView
from muonfx.transforms.scale import ShapeRule

__all__ = ["adamw", "lion", "muon", "muon_with_adamw", "muonclip", "normuon"]

ByRole: TypeAlias = ScalarOrSchedule | Mapping[str, ScalarOrSchedule]
"""A number or schedule for all parameters, or one for each role, which is the label of the parameters."""


def view_of(orthogonalize: Transform) -> MatrixView:
    """Return the first `MatrixView` among the arguments of a transform and of its inner transforms, or a default."""
    require_transform("orthogonalize", orthogonalize)
    for tx in within(orthogonalize):
        view = tx.arguments.get("view")
        if isinstance(view, MatrixView):
            return view
    return MatrixView()


def check_not_negative(argument: str, value: object) -> None:
    """Raise ValueError, with the name of the argument, if a number is negative, or one in a dict of numbers by role.

    The transforms check their numbers too, but under their own names: ``adamw_lr`` is "learning_rate" there.
    """
    if isinstance(value, Mapping):
        for role, number in value.items():
            check_not_negative(f"{argument}[{role!r}]", number)
    elif isinstance(value, int | float):
        at_least(argument, value, 0.0)


def check_decay(argument: str, value: object) -> None:
    """Raise ValueError, with the name of the argument, if the decay of a moving average is not in [0, 1)."""
    if isinstance(value, int | float):
        in_unit_interval(argument, value)


def with_views(tx: Transform, labels: Labels) -> Transform:
    """Return the transform, with the views in ``labels`` added to each inner transform that has a ``view`` argument.

    A view (a `MatrixView`) divides parameters into matrices. Patterns of the transform's own view take precedence.
    """
    if not labels.views:
        return tx
    tx = tx.with_children([with_views(part, labels) for part in tx.children])
    view = tx.arguments.get("view")
    if not isinstance(view, MatrixView):
        return tx
    return tx.replace(view=labels.view(view))


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

    Follows NorMuon (arXiv 2510.05491).

    >>> list(normuon(0.001).init({"w": torch.zeros(4, 4)}))[:3]
    ['momentum', 'orthogonalize', 'normalize_neurons']
    """
    check_decay("neuron_decay", neuron_decay)
    view = view_of(orthogonalize)
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
    return chain(scale_by_lion(b1, b2), add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))


def check_roles(
    owner: str, numbers: Mapping[str, object], labels: object, number: object = ScalarOrSchedule
) -> list[str] | None:
    """Check numbers that AdamW may have for each role, and return the roles; None if no number depends on a role.

    Args:
        owner: the function that received the arguments, for errors.
        numbers: the arguments of that function, by name. Each is a number, or a dict from role to number.
        labels: the labels of the parameters. A dict or `Labels` is checked here; `partition` checks a function or tree.
        number: the type of the numbers.

    Raises:
        TypeError: a number in a dict has another type.
        ValueError: two dicts have different roles, a role is "hidden", a label has no number, or no parameter has the
            label of a number.
    """
    numbers_by_role: dict[str, Mapping[str, object]] = {}
    for argument, value in numbers.items():
        if isinstance(value, Mapping):
            numbers_by_role[argument] = cast("Mapping[str, object]", value)
    labels_by_name = _labels_by_name(labels)
    if not numbers_by_role:
        if labels_by_name is not None:
            _require_known_labels(owner, list(numbers), None, labels_by_name)
        return None
    roles = _common_roles(owner, numbers_by_role, number)
    arguments = list(numbers_by_role)
    first_argument = arguments[0]  # errors name it; all arguments have the same roles
    if labels is default_labels or labels is default_labels_by_name:  # these return "muon" and "adamw"
        raise _labels_without_roles(owner, first_argument, labels)
    if labels_by_name is not None:
        _require_known_labels(owner, arguments, roles, labels_by_name)
        _require_used_roles(owner, first_argument, roles, labels_by_name)
    return roles


def _labels_without_roles(owner: str, argument: str, labels: object) -> ValueError:
    """Return the error of numbers by role together with a function that labels parameters "muon" and "adamw"."""
    return ValueError(
        f"{owner}: {argument} has numbers by role, found labels 'muon' and 'adamw' of {labels!r}, "
        "expected roles: give labels=muonfx.default_labels(model, roles=True)"
    )


def _common_roles(owner: str, numbers_by_role: Mapping[str, Mapping[str, object]], kind: object) -> list[str]:
    """Return the roles of several arguments, which must be the same, and check their numbers.

    ``numbers_by_role`` is a dict from argument to a dict from role to number, such as
    ``{"adamw_learning_rate": {"embedding": 0.3, "head": 0.01}}``. ``kind`` is the type of the numbers.
    """
    first_argument = next(iter(numbers_by_role))
    roles = list(numbers_by_role[first_argument])
    for argument, number_of_role in numbers_by_role.items():
        for role, value in number_of_role.items():
            check_plain(owner, f"{argument}[{role!r}]", value, accepted_types(kind, {}))
        if "hidden" in number_of_role:
            raise ValueError(
                f"{owner}: {argument} has a number for 'hidden', the role of Muon's parameters, expected roles of "
                "AdamW's: remove it, and use the argument for Muon"
            )
        if set(number_of_role) != set(roles):
            raise ValueError(
                f"{owner}: {first_argument} has numbers for {format_list(roles)} and {argument} for "
                f"{format_list(list(number_of_role))}, expected the same roles: add the missing ones, or give one "
                "number for all"
            )
    return roles


def _labels_by_name(labels: object) -> Mapping[str, str | None] | None:
    """Return labels if they are a mapping from name to label; None for a function or a tree."""
    if not isinstance(labels, Mapping):
        return None
    if not all(label is None or isinstance(label, str) for label in labels.values()):
        return None
    return cast("Mapping[str, str | None]", labels)


def _require_known_labels(
    owner: str, arguments: list[str], roles: list[str] | None, labels: Mapping[str, str | None]
) -> None:
    """Raise ValueError if a parameter has a label without a number.

    ``roles`` are the keys of ``arguments``, such as ``["embedding", "head"]``; None if these are single numbers.
    """
    expected = ["muon", "adamw"]
    if roles is not None:
        expected = ["hidden", *roles]
    for name, label in labels.items():
        if label is None or label in expected:
            continue
        advice = f"give {arguments[0]} as a dict"
        if roles is not None:
            advice = _advice_on_label(label, arguments, set(roles).difference(labels.values()))
        raise ValueError(
            f"{owner}: parameter {name!r} has the label {label!r}, expected None or one of "
            f"{format_list(expected)}: {advice}, or change the label"
        )


def _advice_on_label(label: str, arguments: list[str], unused_roles: set[str]) -> str:
    """Return how to give a number for a label: correct a role that is the label of no parameter, or add the label."""
    misspelt = close_names(label, unused_roles)
    if misspelt:
        return f"write {label!r} instead of {misspelt[0]!r}"
    return f"add {label!r} to {' and '.join(arguments)}"


def _require_used_roles(owner: str, argument: str, roles: list[str], labels: Mapping[str, str | None]) -> None:
    """Raise ValueError if no parameter has the label of a role."""
    used_labels = {label for label in labels.values() if label}
    unused_roles = [role for role in roles if role not in used_labels]
    if unused_roles:
        raise ValueError(
            f"{owner}: {argument} has a number for {format_list(unused_roles)}, which is the label of no parameter; "
            f"the labels are {format_list(sorted(used_labels))}: remove or correct it"
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
    >>> tx = muon_with_adamw(0.001, {"embedding": 0.3}, labels=default_labels_by_name(params, roles=True))
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
    roles = check_roles("muon_with_adamw", numbers, labels)
    if isinstance(labels, Labels):
        matrices = with_views(matrices, labels)
    if roles is None:
        transforms = {"muon": matrices}
        adamw_labels = ["adamw"]
    else:
        transforms = {"hidden": matrices}
        adamw_labels = roles
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
    return chain(muon_with_adamw(learning_rate, adamw_learning_rate, **options), qk_clip(heads, tau, alpha))
