"""Muon for a whole model, as a torch optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from muonfx import polar
from muonfx.core import Transform
from muonfx.optimizer.adapter import TransformOptimizer
from muonfx.optimizer.groups import NamedParameters, listed, named_pairs, names_in, resolve_groups
from muonfx.optimizer.values import scalar
from muonfx.recipes import muon_with_adamw
from muonfx.select import Labels, Predicate, Route, default_labels
from muonfx.sharding.layout import Layout
from muonfx.transforms._matrices import Blocks, Dims, MatrixView
from muonfx.transforms.scale import ShapeRule
from muonfx.tree.arguments import plain_arguments
from muonfx.tree.display import format_list

__all__ = ["Muon"]


class Muon(TransformOptimizer):
    """Muon for the hidden matrices of a model and AdamW for everything else, as one optimizer.

    Args:
        params: a model (best: parameters are then routed by module type), named parameters, or groups of these; tensors
            without names where ``model`` gives them.
        lr: the learning rate of Muon, scaled by ``rule``.
        weight_decay: decoupled, of Muon.
        momentum: decay of Muon's average.
        adamw_lr: the learning rate of AdamW; None: ``lr``, which suits where the rule is "match_rms_adamw".
        adamw_weight_decay: decoupled, of AdamW; None: ``weight_decay``.
        betas: AdamW's.
        rule: as in `muonfx.scale_by_shape`.
        coefficients: of the Newton-Schulz iteration, as in `muonfx.orthogonalize`.
        method: "standard", "gram" or "auto", as in `muonfx.orthogonalize`.
        dtype: of the iteration, as in `muonfx.orthogonalize`.
        newton_schulz: the iteration as one value, in place of the three arguments above.
        dims: ``{"*.stack": ((-2,), (-1,))}`` for a stack of matrices, which would otherwise be flattened as a
            convolution is; `muonfx.MatrixView` says it in full. For parameters that this does not name, those of the
            routing: stacks of experts and transposed matrices of known layers (`Labels.views`).
        blocks: ``{"*.qkv.weight": 3}`` for fused matrices; by default as ``dims``, for fused layers whose parts are
            known. 1 splits nothing.
        view: which matrices a parameter consists of, as one value, in place of the two arguments above.
        rules: (predicate, label) pairs that come before the default routing; labels are "muon", "adamw" and None.
        labels: "muon", "adamw" or None by name, or a function of the named parameters that returns these, instead of
            the default routing and rules: ``default_labels(model)`` where groups are given and not the model,
            ``muonfx.select.default_labels_by_name`` where there is none.
        donate_grads: as in `TransformOptimizer`.
        bucket_bytes: as in `TransformOptimizer`.
        layout: as in `TransformOptimizer`.
        model: as in `TransformOptimizer`; parameters are then routed by its modules' types, however they are given.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
        >>> optimizer = Muon(model, lr=0.01, weight_decay=0.1)
        >>> scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        >>> model(torch.arange(8)).square().sum().backward()
        >>> optimizer.step()
        >>> scheduler.step()
    """

    @plain_arguments
    def __init__(
        self,
        params: NamedParameters,
        lr: float = 2e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        rule: ShapeRule = "match_rms_adamw",
        coefficients: polar.CoefficientsLike = "polar_express_5",
        method: polar.MethodLike = "auto",
        dtype: polar.DTypeLike = "auto",
        newton_schulz: polar.NewtonSchulz = polar.NewtonSchulz(),
        dims: Dims | Mapping[str, Dims] | None = None,
        blocks: Blocks | Mapping[str, Blocks] | None = None,
        view: MatrixView = MatrixView(),
        rules: Iterable[tuple[Predicate, str | None]] = (),
        labels: Mapping[str, str | None] | Callable[[object], Mapping[str, str | None]] | None = None,
        donate_grads: bool = False,
        bucket_bytes: int | None = None,
        layout: Layout | Callable[[Mapping[str, Tensor]], Layout] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        if not isinstance(betas, tuple | list):
            raise TypeError(f"Muon: betas must be a tuple of AdamW's two decays, such as (0.9, 0.95), found {betas!r}")
        if len(betas) != 2:
            raise ValueError(f"Muon: betas must be AdamW's two decays, such as (0.9, 0.95), found {betas!r}")
        if not isinstance(params, nn.Module | Mapping):
            params = cast("list[tuple[str, torch.Tensor]]", list(params))
        known = {} if model is None else names_in([model])
        named: nn.Module | dict[str, torch.Tensor]
        if isinstance(params, nn.Module):
            named = params
        else:
            named = {name: param for group in resolve_groups(params, known) for name, param in group["params"]}
        self._rules = list(rules)
        self._labels = labels
        if labels is not None and self._rules:
            raise ValueError("rules come before the default routing, and labels stand in its place: give one of them")
        tx = muon_with_adamw(
            lr,
            adamw_lr,
            weight_decay=weight_decay,
            adamw_weight_decay=weight_decay if adamw_weight_decay is None else adamw_weight_decay,
            decay=momentum,
            b1=scalar("betas", betas[0]),
            b2=scalar("betas", betas[1]),
            rule=rule,
            newton_schulz=newton_schulz,
            view=view,
            labels=self._route(named, model),
        )
        if model is None:  # with a known model, the caller may pass only some parameters
            _warn_of_no_matrices(tx.arguments["labels"], dict(named_pairs(named)))
        with _either_part_may_be_empty():
            super().__init__(
                params, tx, donate_grads=donate_grads, bucket_bytes=bucket_bytes, layout=layout, model=model
            )

    def _route(self, params: nn.Module | Mapping[str, torch.Tensor], model: nn.Module | None) -> Labels:
        names = [name for name, _ in named_pairs(params)]
        if self._labels is None:
            if model is None or params is model:
                return default_labels(params, self._rules)
            return default_labels(model, self._rules).restrict(names)
        found = self._labels if isinstance(self._labels, Mapping) else self._labels(params)
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"labels: none for {format_list(missing)}; every parameter needs one")
        return (found if isinstance(found, Labels) else Labels(found)).restrict(names)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, routed as at construction; see `TransformOptimizer.add_param_group`."""
        before = self.tx
        param_group = listed(param_group)
        if self._ready:
            if self._take_back(param_group):
                return
            self._rebind()
            params = param_group["params"]
            if not isinstance(params, nn.Module | Mapping):
                params = named_pairs(params, self._known_names())
            param_group = {**param_group, "params": params}
            given = dict(named_pairs(params))
            model = next((model for model in self._attachment.models if _has_all(model, given)), None)
            with warnings.catch_warnings():  # a rule that matches no new parameter has matched earlier ones
                warnings.filterwarnings("ignore", message="user rule")
                new = self._route(given, model)
            old = self.tx.arguments["labels"]
            # Views of the new parameters only: construction has warned of the others.
            warned = {name: Route(own.label, own.reason, shape=own.shape) for name, own in old.routes.items()}
            labels = Labels({**warned, **new.routes})
            self.tx = _with_views(self.tx.replace(labels=labels), new)
        try:
            with _either_part_may_be_empty():
                super().add_param_group(param_group)
        except Exception:
            self.tx = before
            raise


@contextmanager
def _either_part_may_be_empty() -> Generator[None]:
    """Ignore the warning of a label without parameters: a model may have no matrices, or nothing else."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="partition: no parameter has the label '(adamw|muon)'")
        yield


def _has_all(model: nn.Module, given: Mapping[str, Tensor]) -> bool:
    """Return True if the given tensors are parameters of a model, under the model's names."""
    named = dict(model.named_parameters())
    return all(named.get(name) is param for name, param in given.items())


def _warn_of_no_matrices(labels: Labels, named: Mapping[str, Tensor]) -> None:
    if not named or "muon" in labels.values():
        return
    flat = all(param.ndim < 2 for param in named.values())
    trained_first = sorted(labels.items(), key=lambda pair: pair[1] is None)
    why = (
        "all have fewer than two dims, as has what is left of matrices that were flattened and cut: give the model "
        "as it is, or under fully_shard (FSDP2)"
        if flat
        else "; ".join(f"{name!r} is {label!r}: {labels.reason(name)}" for name, label in trained_first[:5])
    )
    warnings.warn(
        f"Muon: no parameter has the label 'muon', so nothing is orthogonalized, and of {len(named)} parameters AdamW "
        f"trains {sum(label is not None for label in labels.values())}: {why}. Say with rules or labels which are "
        "Muon's; where none is meant to be, take TransformOptimizer(params, muonfx.adamw())",
        stacklevel=4,
    )


def _with_views(tx: Transform, labels: Labels) -> Transform:
    """Add the labels' views of parameters to a transform that has none for them."""
    if not labels.views:
        return tx
    if "dims" in tx.arguments:
        return tx.replace(**labels.view(MatrixView.take("view", tx.arguments)).arguments)
    return tx.with_children(lambda part: _with_views(part, labels))
