"""Muon for a whole model, as a torch optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn

from muonfx.core import Transform
from muonfx.core.checks import is_frozen, is_usable, warn_caller
from muonfx.core.schedules import Scalar
from muonfx.internal.arguments import bind, plain_arguments
from muonfx.internal.display import format_list
from muonfx.optimizer.constructing import constructed_together
from muonfx.optimizer.group_numbers import scalar
from muonfx.optimizer.named_parameters import (
    NamedParameters,
    NamedTensors,
    named_pairs,
    resolve_groups,
)
from muonfx.optimizer.transform_optimizer import TransformOptimizer
from muonfx.recipes import (
    check_decay,
    check_not_negative,
    check_roles,
    check_types_by_role,
    muon_with_adamw,
    with_views,
)
from muonfx.routing import Labels, Route, default_labels
from muonfx.sharding.layout import Layout
from muonfx.transforms import orthogonalize, scale_by_adam
from muonfx.transforms.scale import ShapeRule

LabelsLike = Mapping[str, str | None] | Callable[[Any], Mapping[str, str | None]] | None


class Muon(TransformOptimizer):
    """Muon for the hidden matrices of a model and AdamW for all other parameters, in one ``torch.optim.Optimizer``.

    By default, the weights of hidden linear and convolution layers have the label "muon". Embeddings, output heads,
    biases and norms have the label "adamw". `muonfx.default_labels` describes the rules. They use the types of modules,
    so pass the model if possible. ``param_groups`` has a group for each label. Frozen parameters are in no group, and
    may have any dtype.

    Args:
        params: a model (recommended), its ``named_parameters()``, a dict from names to tensors, or groups of these.
            Tensors need no names if ``model`` is given.
        lr: the learning rate of Muon. It is multiplied by a factor for the shape of each matrix (``lr_scaling``). If
            the best rate of AdamW alone is ``a``, try ``lr=a, adamw_lr=4 * a`` first from scratch, and
            ``lr=4 * a, adamw_lr=2 * a`` for fine-tuning.
        weight_decay: the decoupled weight decay of Muon's parameters.
        momentum: the decay of Muon's moving average of gradients (Nesterov momentum).
        orthogonalize: the transform that orthogonalizes this average. It sets the options of the iteration and the view
            of each parameter (how its tensor divides into matrices). For a fused projection:
            ``muonfx.orthogonalize(coefficients="keller", view=muonfx.MatrixView("(qkv=3 out) in -> qkv out in"))``.
            Parameters that this view does not match have a view by module type: stacked experts, fused projections and
            transposed weights of known layers are divided. To treat one of them as a single matrix, give it the pattern
            "out in -> out in".
        lr_scaling: the factor for the shape of each matrix, as in `muonfx.scale_by_shape`. The default
            "match_rms_adamw" gives updates of the size of AdamW's, so rates of that size are suitable.
        adamw_lr: the learning rate of AdamW, or a dict with a rate for each kind of parameter, such as
            ``{"embedding": 0.3, "head": 0.004, "vector": 0.01}``. With a dict, the labels are these kinds, called
            roles in ``muonfx.default_labels(model, roles=True)``. ``param_groups`` then has a group for each role, and
            Muon's parameters have the label "hidden". None: ``lr``.
        adamw_weight_decay: the decoupled weight decay of AdamW's parameters, or a dict with a number for each role.
            None: ``weight_decay``.
        betas: AdamW's decays of the first and the second moment.
        labels: a dict from each parameter name to "muon", "adamw" or None (not trained), or a function from the model
            to such a dict. Without a model, the function receives the named parameters. None: `muonfx.default_labels`,
            with ``roles=True`` if a rate or a weight decay is given by role.
            To apply your own rules first: ``labels=lambda model: muonfx.default_labels(model, rules)``. To
            choose by names only: ``labels=muonfx.routing.default_labels_by_name``.
        layout: the shards of plain tensors in a distributed run, as in `TransformOptimizer`. DTensors need none.
        model: the model that has ``params``, if ``params`` is not the model itself. The labels then use its modules.
        donate_grads: if True, a step may overwrite the gradients to save memory, as in `TransformOptimizer`.
        bucket_bytes: the approximate bytes of parameters that are updated at a time, as in `TransformOptimizer`.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8)
        ... )
        >>> optimizer = Muon(model, lr=0.001, adamw_lr=0.004, weight_decay=0.1)
        >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        >>> model(torch.arange(8)).square().sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
    """

    @constructed_together
    @plain_arguments
    def __init__(
        self,
        params: NamedParameters,
        lr: Scalar = 2e-3,
        *,
        weight_decay: Scalar = 0.1,
        momentum: Scalar = 0.95,
        orthogonalize: Transform = orthogonalize(),
        lr_scaling: ShapeRule = "match_rms_adamw",
        adamw_lr: Scalar | Mapping[str, float] | None = None,
        adamw_weight_decay: Scalar | Mapping[str, float] | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        labels: LabelsLike = None,
        layout: Layout | Callable[[Mapping[str, Tensor]], Layout] | None = None,
        model: nn.Module | None = None,
        donate_grads: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self._labels = labels  # `_labels_of_new` labels parameters that are added later
        # 1. The transform, which labels each parameter for Muon or AdamW.
        params_or_model = _named_unless_model(params, model)
        tx = _transform(
            params_or_model,
            lr,
            weight_decay=weight_decay,
            momentum=momentum,
            orthogonalize=orthogonalize,
            lr_scaling=lr_scaling,
            adamw_lr=adamw_lr,
            adamw_weight_decay=adamw_weight_decay,
            betas=betas,
            labels=labels,
            model=model,
        )
        if model is None:  # with a known model, the caller may pass only some parameters
            _warn_of_no_matrices(tx.arguments["labels"], dict(named_pairs(params_or_model)))
        # 2. The optimizer that applies it. A model without AdamW's parameters is no mistake.
        with _without_warning(_UNUSED_LABEL):
            super().__init__(
                params,
                tx,
                donate_grads=donate_grads,
                bucket_bytes=bucket_bytes,
                layout=layout,
                model=model,
            )

    @staticmethod
    def transform_for(
        params: nn.Module | Mapping[str, Tensor], lr: Scalar = 2e-3, **options: Any
    ) -> Transform:
        """Return the transform that ``Muon(params, lr, **options)`` would use, without creating the optimizer.

        Use it with ``init`` and ``update``, or to read its labels.

        Args:
            params: a model, or a dict from names to tensors.
            lr: the learning rate of Muon.
            **options: the arguments of `Muon` except ``layout``, ``donate_grads`` and ``bucket_bytes``.

        >>> Muon.transform_for(
        ...     torch.nn.Linear(4, 4), 0.01, labels={"weight": "muon", "bias": "adamw"}
        ... ).name
        'partition'
        """
        # This raises for an unknown option.
        bound = bind("Muon", _signature_of_transform(), (params, lr), options)
        bound.apply_defaults()  # the defaults of `Muon`
        return _transform(**bound.arguments)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle, as `TransformOptimizer` does."""
        return {**super().__getstate__(), "_labels": self._labels}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train, and label them as at construction. See `TransformOptimizer.add_param_group`."""
        with _without_warning(_UNUSED_LABEL):
            super().add_param_group(param_group)

    def _transform_for(self, new: NamedTensors) -> Transform:
        """Return the transform with labels for the ``new`` parameters too; earlier parameters keep their labels."""
        new_labels = self._labels_of_new(new)
        # A route is the label of a parameter, with its reason, and with its view: how it divides into matrices.
        routes: dict[str, Route] = {}
        for name, route in self.tx.arguments["labels"].routes.items():
            # The transform has the views of earlier parameters. Labels with views would warn again of unused ones.
            routes[name] = Route(route.label, route.reason, shape=route.shape)
        routes.update(new_labels.routes)
        tx = self.tx.replace(labels=Labels(routes))
        return with_views(tx, new_labels)

    def _labels_of_new(self, new: NamedTensors) -> Labels:
        """Return labels for parameters that are added after construction, chosen as at construction.

        For example, ``{"layer.weight": "muon", "layer.bias": "adamw"}``, each with its reason.
        """
        model = self._model_with(new)
        # `_as_trained`: a frozen parameter would get the label None, but Lightning adds one before it unfreezes it.
        # `_without_warning`: rules of the user for earlier parameters match none of the new ones, which is no mistake.
        with _without_warning(_UNMATCHED_RULE), _as_trained(new.values()):
            return labels_for(self._labels, new, model, roles=self._has_roles)

    @property
    def _has_roles(self) -> bool:
        """True if labels are roles, such as "hidden" and "embedding", because `adamw_lr` or the decay was a dict."""
        return "hidden" in self.tx.arguments["transforms"]  # else "muon" and "adamw"

    def _model_with(self, new: NamedTensors) -> nn.Module | None:
        """Return the first known model that has all of these parameters under their names, or None.

        The labels follow from the types of its modules, such as ``nn.Embedding``.
        """
        for model in self._parameters.models:
            params = dict(model.named_parameters())
            if all(params.get(name) is param for name, param in new.items()):
                return model
        return None


def _signature_of_transform() -> inspect.Signature:
    """Return the signature of `Muon` without the arguments that do not change its transform, such as ``layout``."""
    signature = inspect.signature(Muon)
    parameters = dict(signature.parameters)
    for name in ("layout", "donate_grads", "bucket_bytes"):
        del parameters[name]
    return signature.replace(parameters=list(parameters.values()))


def _transform(
    params: nn.Module | NamedTensors,
    lr: Scalar,
    *,
    weight_decay: Scalar,
    momentum: Scalar,
    orthogonalize: Transform,
    lr_scaling: ShapeRule,
    adamw_lr: Scalar | Mapping[str, float] | None,
    adamw_weight_decay: Scalar | Mapping[str, float] | None,
    betas: tuple[float, float],
    labels: LabelsLike,
    model: nn.Module | None,
) -> Transform:
    """Check the arguments of `Muon`, and return its transform: a partition by labels such as "muon".

    ``params`` are a model, or parameters by name. `Muon` describes the other arguments.
    """
    # Labels are "muon" and "adamw", or roles if AdamW has a dict with a number for each role, such as
    # adamw_lr={"embedding": 1e-3, "head": 3e-4}. Muon's parameters then have the role "hidden".
    has_roles = isinstance(adamw_lr, Mapping) or isinstance(adamw_weight_decay, Mapping)
    adamw_numbers = {"adamw_lr": adamw_lr, "adamw_weight_decay": adamw_weight_decay}
    # Check the numbers here, so that an error has the name of an argument of `Muon`, not of a transform.
    for name, number in {"lr": lr, "weight_decay": weight_decay, **adamw_numbers}.items():
        check_not_negative(name, number)
    check_decay("momentum", momentum)
    adam = _adam(betas)
    label_of = labels_for(labels, params, model, roles=has_roles)
    check_roles("Muon", adamw_numbers, label_of)
    check_types_by_role("Muon", adamw_numbers, frozenset({"float"}))
    if adamw_weight_decay is None:
        adamw_weight_decay = weight_decay
    return muon_with_adamw(
        lr,
        adamw_lr,
        decay=momentum,
        orthogonalize=orthogonalize,
        lr_scaling=lr_scaling,
        weight_decay=weight_decay,
        adam=adam,
        adamw_weight_decay=adamw_weight_decay,
        labels=label_of,
    )


def _named_unless_model(
    params: NamedParameters, model: nn.Module | None
) -> nn.Module | NamedTensors:
    """Return the argument ``params`` of `Muon` if it is a model, else a dict from names to tensors.

    ``model`` provides the names of tensors without names.
    """
    if isinstance(params, nn.Module):
        return params
    named: dict[str, Tensor] = {}
    for group in resolve_groups(params, model):
        named.update(group["params"])
    return named


def _adam(betas: Any) -> Transform:
    """Return the transform of AdamW's moments for the argument ``betas``, such as ``(0.9, 0.95)``, or raise.

    Each of the two decays is a number, or a tensor of one element.
    """
    is_sequence = isinstance(betas, tuple | list)
    if not is_sequence or len(betas) != 2:
        error = ValueError if is_sequence else TypeError
        raise error(
            f"Muon: betas must be a tuple of AdamW's two decays, such as (0.9, 0.95), found {betas!r}"
        )
    for index, beta in enumerate(betas):
        check_decay(f"betas[{index}]", beta)
    return scale_by_adam(scalar("betas", betas[0]), scalar("betas", betas[1]))


def labels_for(
    labels: LabelsLike, params: nn.Module | NamedTensors, model: nn.Module | None, *, roles: bool
) -> Labels:
    """Return the label of each parameter in ``params``, as a `Labels`: a dict that also has the reason of each label.

    >>> params = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    >>> labels = labels_for(
    ...     {"weight": "muon", "bias": "adamw", "unused": None}, params, None, roles=False
    ... )
    >>> dict(labels)
    {'weight': 'muon', 'bias': 'adamw'}

    Args:
        labels: the argument of `Muon`: a dict of labels, a function that returns one, or None for the default labels.
        params: a model, or parameters by name.
        model: the model that has ``params``, which gives better default labels; None if it is unknown.
        roles: True for default labels such as "hidden" and "embedding"; False for "muon" and "adamw".
    """
    params_or_model = params if model is None else model
    # 1. Find the labels, in one of three ways.
    label_of: object = labels
    if labels is None:
        label_of = default_labels(params_or_model, roles=roles)
    elif callable(labels) and not isinstance(labels, Mapping):
        label_of = labels(params_or_model)
    if not isinstance(label_of, Mapping):
        raise _no_labels(labels, label_of)
    label_of = cast("Mapping[str, str | None]", label_of)
    # 2. Each parameter must have one.
    names = [name for name, _ in named_pairs(params)]
    missing = [name for name in names if name not in label_of]
    if missing:
        raise ValueError(
            f"labels: found none for {format_list(missing)}, expected a label for every parameter"
        )
    if not isinstance(label_of, Labels):
        label_of = Labels(label_of)
    return label_of.restrict(names)  # a model may have other parameters, which also have labels


def _no_labels(labels: object, result: object) -> TypeError:
    """Return an error for the argument ``labels`` of `Muon`, or for its ``result`` if it is a function."""
    found = repr(labels)
    if callable(labels):
        found = f"a function that returns {result!r}"
    return TypeError(
        "Muon: labels must be a mapping from names to labels, or a function of the model that returns one, such as "
        f"labels=lambda model: muonfx.default_labels(model, rules); found {found}"
    )


@contextmanager
def _as_trained(params: Iterable[Tensor]) -> Generator[None]:
    """Return a context manager in which frozen parameters require gradients: rules give frozen ones the label None."""
    # Integer tensors are left out, because they cannot require a gradient.
    frozen = [param for param in params if is_frozen(param) and is_usable(param)]
    for param in frozen:
        param.requires_grad = True
    try:
        yield
    finally:  # also after an error in the block
        for param in frozen:
            param.requires_grad = False


_UNUSED_LABEL = "partition: no parameter has the label '(adamw|muon|hidden)'"
"""A warning that is not given: a model may have no parameter of AdamW, and `Muon` itself warns if none is Muon's."""

_UNMATCHED_RULE = "user rule"
"""The beginning of a warning that is not given for added parameters: a rule may match only earlier ones."""


@contextmanager
def _without_warning(message: str) -> Generator[None]:
    """Return a context manager that suppresses a warning. ``message`` is a regular expression for its beginning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=message)
        yield


def _warn_of_no_matrices(labels: Labels, named: NamedTensors) -> None:
    """Warn if AdamW trains all parameters, because none has the label "muon", or "hidden" where labels are roles."""
    if not named or "muon" in labels.values() or "hidden" in labels.values():  # Muon trains some
        return
    trained = [name for name, label in labels.items() if label is not None]
    warn_caller(
        "Muon: found no parameter with the label 'muon' or 'hidden', expected at least one; AdamW trains "
        f"{len(trained)} of {len(named)} parameters, and none is orthogonalized. "
        f"{_advice_without_matrices(trained, named)}. The labels: {_reason_of_labels(labels, named)}"
    )


def _reason_of_labels(labels: Labels, named: NamedTensors) -> str:
    """Return why no parameter has the label of Muon: the labels of five parameters with their reasons.

    For example, "'wte' is 'adamw': embedding; 'bias' is 'adamw': 1-D". If there is no matrix, this is the reason.
    """
    if all(param.ndim < 2 for param in named.values()):
        return "all have fewer than two dims: if they were flattened, give the model, or use fully_shard (FSDP2)"
    trained_first = sorted(labels, key=lambda name: labels[name] is None)
    sentences: list[str] = []
    for name in trained_first[:5]:
        sentences.append(f"{name!r} is {labels[name]!r}: {labels.reason(name)}")
    return "; ".join(sentences)


def _advice_without_matrices(trained: Sequence[str], named: NamedTensors) -> str:
    """Return what to use in place of `Muon` if it would train no matrix, by the likely cause: LoRA, or frozen matrices.

    ``trained`` are the names of the parameters that AdamW would train, and ``named`` are all parameters.
    """
    if any("lora_" in name for name in trained):
        return "To train only factors of LoRA, use torch.optim.AdamW with its own rate"
    frozen_matrices = [
        name for name, param in named.items() if is_frozen(param) and param.ndim >= 2
    ]
    if frozen_matrices:
        return (
            f"{len(frozen_matrices)} parameters with two or more dims are frozen, such as {frozen_matrices[0]!r}: "
            "if add_param_group adds them later, as Lightning's BackboneFinetuning does, this is right. Else use "
            "torch.optim.AdamW"
        )
    return "Give labels=, or use TransformOptimizer(params, muonfx.adamw())"
