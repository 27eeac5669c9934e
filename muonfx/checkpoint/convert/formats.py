"""`FORMATS`: how each optimizer that can be converted stores its state, and the chain that computes the same update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from muonfx import polar
from muonfx.checkpoint.convert import sources
from muonfx.checkpoint.convert.sources import Arguments, Entry, Group, Values
from muonfx.checkpoint.convert.states import Leaf, filled, flat, gathered
from muonfx.core import Transform, chain
from muonfx.recipes import adamw, lion
from muonfx.select import MatrixView
from muonfx.select.partition import partition
from muonfx.transforms import (
    add_decayed_weights,
    momentum,
    orthogonalize,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_shape,
)
from muonfx.transforms.scale import ShapeRule
from muonfx.tree import PyTree

__all__ = ["FORMATS", "Format"]

Options = Mapping[str, Any]
"""Arguments for `orthogonalize` from the caller of a recipe."""
ReadEntries = Callable[[Any, Mapping[str, torch.Tensor], Arguments], list[Entry]]


@dataclass(frozen=True)
class Keys:
    """The keys of the tensors in an entry of one kind; ``step`` is None if the optimizer does not count steps."""

    first: str
    second: str | None = None
    step: str | None = None


@dataclass(frozen=True)
class Format:
    """How one optimizer stores its state, and how its numbers become a chain."""

    title: str
    keys: Mapping[str, Keys]  # by kind
    chain_of: Callable[[Group, str, torch.Size, Options], Transform]
    heavy_ball: bool = False  # True if momenta are sums, False if they are averages
    kind_of: sources.KindOf | None = None  # for the forms of torch.optim
    entries: ReadEntries | None = None  # None for the forms of torch.optim
    recipe_entries: ReadEntries | None = None  # if a recipe has another source than the state
    write_to: Callable[[Mapping[str, Leaf], Any, Arguments], Any] | None = None  # None for the forms of torch.optim
    make_step: Callable[[int], object] = int  # converts a number of steps to the type in the entry

    def read(self, source: Any, tx: Transform, params: PyTree, given: Arguments, step: int | None) -> PyTree:
        """Make the state of a transform from the optimizer's state."""
        entries = self._entries(source, params, given)
        leaves = {entry.name: self._leaf(entry) for entry in entries}
        return filled(tx, params, leaves, heavy_ball=self.heavy_ball, step=step)

    def recipe(self, source: Any, params: PyTree, given: Arguments, options: Options) -> Transform:
        """Return the chain that computes the same update as the optimizer."""
        shapes = {name: param.shape for name, param in flat(params).items()}
        entries = self.recipe_entries or self._entries
        found: dict[str, tuple[str, Transform]] = {}
        for name, kind, group, _ in entries(source, flat(params), given):
            try:
                found[name] = kind, self.chain_of(group, kind, shapes[name], options)
            except KeyError as missing:
                raise ValueError(
                    f"{name!r}: its group in {self.title} has no {missing}, only {sorted(group)}"
                ) from None
            except ValueError as problem:
                raise ValueError(f"{name!r}: {problem}") from None
        return _composed(found)

    def write(self, state: PyTree, target: Any, params: PyTree, given: Arguments) -> Any:
        """Return the state that the optimizer loads, with its own groups and a transform's state."""
        if self.write_to is not None:
            return self.write_to(gathered(state), target, given)
        if self.kind_of is None:
            raise ValueError(f"format: {self.title} can be read only; let it write its own checkpoint after a load")
        return sources.into_optimizer(
            self.title, self.kind_of, self._values, gathered(state), target, flat(params), given
        )

    def _entries(self, source: object, params: PyTree, given: Arguments) -> list[Entry]:
        if self.entries is not None:
            return self.entries(source, flat(params), given)
        assert self.kind_of is not None
        return sources.in_optimizers(self.title, self.kind_of, source, flat(params), given)

    def _leaf(self, entry: Entry) -> Leaf:
        keys, values = self.keys[entry.kind], entry.values
        counted = None if keys.step is None else values.get(keys.step, entry.group.get(keys.step))
        second = None if keys.second is None else values.get(keys.second)
        return Leaf(entry.kind, values.get(keys.first), second, None if counted is None else int(counted))

    def _values(self, leaf: Leaf) -> dict[str, Any]:
        keys = self.keys[leaf.kind]
        assert leaf.first is not None
        values: dict[str, Any] = {keys.first: leaf.first.clone()}
        if keys.second is not None and leaf.second is not None:
            values[keys.second] = leaf.second.clone()
        if keys.step is not None and leaf.step is not None:
            values[keys.step] = self.make_step(leaf.step)
        return values


# ------------------------------------------------------------------------------------------- parts of several formats

_STACKED = ((-2,), (-1,))
"""The dims of a leaf whose leading dims index independent matrices."""


def _adamw(group: Group, betas: Any, eps: Any, weight_decay: Any) -> Transform:
    b1, b2 = map(float, betas)
    return adamw(float(group["lr"]), b1=b1, b2=b2, eps=float(eps), weight_decay=float(weight_decay))


def _composed(found: Mapping[str, tuple[str, Transform]]) -> Transform:
    """Combine one transform per parameter: a single transform if all are equal, else a partition by kind."""
    labels: dict[str, str] = {}
    made: dict[str, Transform] = {}
    for name, (kind, tx) in found.items():
        label = next((label for label, known in made.items() if known == tx), None)
        if label is None:
            number = sum(1 for known in made if known.partition("_")[0] == kind)
            label = f"{kind}_{number + 1}" if number else kind
            made[label] = tx
        labels[name] = label
    return next(iter(made.values())) if len(made) == 1 else partition(made, labels)


def _muon_chain(
    decay: Any,
    *,
    nesterov: bool,
    heavy_ball: bool,
    rule: ShapeRule | None,
    lr: Any,
    weight_decay: Any,
    options: Options,
    debias: bool = False,
    **more: Any,
) -> Transform:
    """Return the chain of Muon; ``more`` is passed to `orthogonalize`, and its view also to `scale_by_shape`."""
    orthogonal = orthogonalize(**{**more, **options})
    # float(), since some optimizers hold these numbers in tensors.
    kept = momentum(float(decay), nesterov=nesterov, heavy_ball=heavy_ball, debias=debias)
    return chain(
        kept,
        orthogonal,
        *([scale_by_shape(rule, view=orthogonal.arguments["view"])] if rule is not None else []),
        add_decayed_weights(float(weight_decay)),
        scale_by_learning_rate(float(lr)),
    )


# ------------------------------------------------------------------------------------------------------- torch.optim

_KELLER = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def _torch_kind(group: Group, values: Values) -> str:
    if "ns_coefficients" in group:
        return "muon"
    if "amsgrad" in group:
        return "adamw"
    raise ValueError(
        f"expected a group of torch.optim.Muon or torch.optim.AdamW, found one with the keys {sorted(group)}"
    )


def _torch_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    if kind == "adamw":
        refused = [key for key in ("amsgrad", "maximize") if group.get(key)]
        if not group.get("decoupled_weight_decay", True) and float(group["weight_decay"]):
            refused.append("weight_decay of torch.optim.Adam, which is not decoupled,")
        if refused:
            raise ValueError(f"there is no chain for {' and '.join(refused)}")
        return _adamw(group, group["betas"], group["eps"], group["weight_decay"])
    if float(group["eps"]) != _EPS:
        raise ValueError(f"there is no chain for eps={group['eps']}: muonfx divides by the norm alone; expected {_EPS}")
    steps = (tuple(group["ns_coefficients"]),) * group["ns_steps"]
    return _muon_chain(
        group["momentum"],
        nesterov=group["nesterov"],
        heavy_ball=False,
        rule=group["adjust_lr_fn"] or "original",
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        options=options,
        coefficients="keller" if steps == (_KELLER,) * 5 else steps,
    )


# ------------------------------------------------------------------------------------------------------ Keller Jordan


def _keller_kind(group: Group, values: Values) -> str:
    return "muon" if group.get("use_muon", "momentum" in group) else "adamw"


def _keller_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    """Return the chain of a group of Keller Jordan's Muon for a parameter of the given shape."""
    if kind == "adamw":
        return _adamw(group, group["betas"], group["eps"], group["weight_decay"])
    if len(shape) > 3:
        raise ValueError(
            f"shape {tuple(shape)}: its updates are scaled by the sides of the kernel, muonfx's by those of the "
            "flattened matrix, so no chain continues in the same way; the state itself can be converted"
        )
    steps: dict[str, Any] = {"steps": group["ns_steps"]} if group.get("ns_steps", 5) != 5 else {}  # in older releases
    return _muon_chain(
        group["momentum"],
        nesterov=group.get("nesterov", True),
        heavy_ball=False,
        rule="original",
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        options=options,
        coefficients="keller",
        **steps,
        view=MatrixView(_STACKED if len(shape) == 3 else None),
    )


# ---------------------------------------------------------------------------------------------------------- Moonlight


def _moonlight_kind(group: Group, values: Values) -> str:
    if "use_muon" not in values:
        raise ValueError("expected Moonlight's Muon, which keeps 'use_muon' for each parameter; found none")
    return "muon" if values["use_muon"] else "adamw"


def _moonlight_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    if kind == "adamw":
        return _adamw(group, group["adamw_betas"], group["adamw_eps"], group["wd"])
    return _muon_chain(
        group["momentum"],
        nesterov=group["nesterov"],
        heavy_ball=True,
        rule="match_rms_adamw",
        lr=group["lr"],
        weight_decay=group["wd"],
        options=options,
        coefficients="keller",
        steps=group["ns_steps"],
    )


# --------------------------------------------------------------------------------------------------------------- Dion

_RULES: dict[str | None, ShapeRule | None] = {"spectral_norm": "spectral", "rms_norm": "match_rms_adamw", None: None}


def _dion_kind(group: Group, values: Values) -> str:
    if group.get("algorithm") not in ("muon", "adamw", "lion"):
        raise ValueError(f"expected a group of dion.Muon, found the algorithm {group.get('algorithm')!r}")
    return group["algorithm"]


def _dion_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    if group.get("cautious_wd"):
        raise ValueError("there is no chain for cautious_wd")
    betas = [float(group[key]) for key in ("beta1", "beta2")]
    if kind == "adamw":
        return _adamw(group, betas, group["epsilon"], group["weight_decay"])
    if kind == "lion":
        return lion(float(group["lr"]), b1=betas[0], b2=betas[1], weight_decay=float(group["weight_decay"]))
    heads, sizes = group.get("num_heads"), group.get("split_sizes")
    blocks = tuple(sizes) if sizes is not None else heads if heads is not None and heads > 1 else None
    return _muon_chain(
        group["mu"],
        nesterov=group["nesterov"],
        heavy_ball=True,
        rule=_RULES[group["adjust_lr"]],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        options=options,
        view=MatrixView(_STACKED if len(shape) > 2 and not group["flatten"] else None, blocks),
    )


# ---------------------------------------------------------------------------------------------------------------- Optax


def _optax_chain(group: Group, kind: str, shape: torch.Size, options: Options) -> Transform:
    return _optax_chains(options, **group)[kind]


def _optax_chains(
    options: Options,
    *,
    learning_rate: float,
    ns_coeffs: str | tuple[float, float, float] | tuple[tuple[float, float, float], ...] = "muon",
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,  # used for Adam only: in the iteration it is far below the rounding error
    weight_decay: float = 0.0,
    nesterov: bool = True,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: float | None = None,
    consistent_rms: float | None = None,
) -> dict[str, Transform]:
    """Return the chains of ``optax.contrib.muon`` with the given arguments, by kind."""
    if consistent_rms not in (None, 0.2):
        raise ValueError(f"consistent_rms must be None or 0.2, found {consistent_rms}")
    muon = _muon_chain(
        beta,
        nesterov=nesterov,
        heavy_ball=False,
        debias=True,
        rule="original" if consistent_rms is None else "match_rms_adamw",
        lr=learning_rate,
        weight_decay=weight_decay,
        options={"dtype": torch.float32, **options},
        coefficients=_coefficients(ns_coeffs, ns_steps),
    )
    adam = chain(
        scale_by_adam(float(adam_b1), float(adam_b2), eps, eps_root=adam_eps_root, nesterov=nesterov),
        add_decayed_weights(float(adam_weight_decay)),
        scale_by_learning_rate(float(learning_rate if adam_learning_rate is None else adam_learning_rate)),
    )
    return {"muon": muon, "adamw": adam}


def _coefficients(given: Any, steps: int) -> Any:
    if isinstance(given, str):
        known: dict[str, polar.CoefficientSet] = {"muon": "keller", "dion": "quintic"}
        if given not in known:
            raise ValueError(f"ns_coeffs must be 'muon', 'dion' or numbers, found {given!r}")
        given = polar.coefficients(known[given]).steps if steps != 5 else known[given]
    if isinstance(given, str):
        return given
    several = tuple(given) if isinstance(given[0], tuple | list) else (tuple(given),) * steps
    return several[-steps:]


# ------------------------------------------------------------------------------------------------------------ the table

_ADAMW = Keys("exp_avg", "exp_avg_sq", "step")
_KELLER_KEYS = {"muon": Keys("momentum_buffer"), "adamw": _ADAMW}


def _float_step(step: int) -> torch.Tensor:
    return torch.tensor(float(step))


FORMATS: dict[str, Format] = {
    "torch": Format("torch.optim", _KELLER_KEYS, _torch_chain, kind_of=_torch_kind, make_step=_float_step),
    "keller": Format("Keller Jordan's Muon", _KELLER_KEYS, _keller_chain, kind_of=_keller_kind),
    "moonlight": Format(
        "Moonlight's Muon",
        {"muon": Keys("momentum_buffer"), "adamw": Keys("moment1", "moment2", "step")},
        _moonlight_chain,
        heavy_ball=True,
        kind_of=_moonlight_kind,
    ),
    "dion": Format(
        "Dion's Muon",
        {"muon": Keys("momentum"), "adamw": Keys("momentum", "variance", "step_dev"), "lion": Keys("momentum")},
        _dion_chain,
        heavy_ball=True,
        kind_of=_dion_kind,
        make_step=_float_step,
    ),
    "deepspeed": Format(
        "'deepspeed'",
        _KELLER_KEYS,
        _keller_chain,
        entries=sources.in_folder,
        recipe_entries=sources.by_config,
    ),
    "optax": Format(
        "optax.contrib.muon",
        {"muon": Keys("mu", step="count"), "adamw": Keys("mu", "nu", "count")},
        _optax_chain,
        entries=sources.in_optax,
        recipe_entries=sources.by_size,
        write_to=sources.into_optax,
    ),
}
"""The formats by name."""
