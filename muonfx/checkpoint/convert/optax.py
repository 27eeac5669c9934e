"""Convert ``optax.contrib.muon`` from and to trees of numpy arrays, without JAX or Optax installed.

``jax.tree.map(numpy.asarray, opt_state)`` makes such a tree. For a parameter with another label, Optax's partitions
contain a placeholder, a NamedTuple without fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from muonfx import polar
from muonfx.checkpoint.convert._leaves import Leaf, filled, flat, gathered
from muonfx.checkpoint.convert._sources import Options, composed, muon_chain
from muonfx.core import Transform, chain
from muonfx.transforms import add_decayed_weights, scale_by_adam, scale_by_learning_rate
from muonfx.tree import PyTree

__all__ = ["read", "recipe", "write"]

_MUON, _ADAM = ("count", "mu", "ns_coeffs"), ("count", "mu", "nu")


def _walk(node: Any, visit: Callable[[Any], Any]) -> Any:
    """Rebuild an Optax state, with ``visit`` applied to the Muon and Adam states in it."""
    fields = getattr(node, "_fields", None)
    if fields in (_MUON, _ADAM):
        return visit(node)
    if fields is not None:
        return type(node)(*(_walk(item, visit) for item in node))
    if isinstance(node, dict):
        return {key: _walk(item, visit) for key, item in node.items()}
    if isinstance(node, tuple | list):
        return type(node)(_walk(item, visit) for item in node)
    return node


def _arrays(node: Any, path: str = "") -> dict[str, Any]:
    """Return the arrays of a tree by dotted name, without placeholders."""
    if getattr(node, "_fields", None) == () or node is None:
        return {}
    if isinstance(node, Mapping):
        pairs = node.items()
    elif isinstance(node, tuple | list):
        pairs = zip(getattr(node, "_fields", range(len(node))), node, strict=True)
    else:
        return {path: node}
    return {name: leaf for key, item in pairs for name, leaf in _arrays(item, f"{path}.{key}".lstrip(".")).items()}


def _tensor(array: Any, transpose: bool) -> Tensor:
    found = torch.as_tensor(array).clone()
    return found.mT.contiguous() if transpose and found.ndim == 2 else found


def read(opt_state: Any, tx: Transform, params: PyTree, transpose: bool, names: Mapping[str, str]) -> PyTree:
    """Make the state of a transform from a state that contains states of ``optax.contrib.muon``."""
    leaves: dict[str, Leaf] = {}

    def visit(node: Any) -> Any:
        count, first = int(node.count), _arrays(node.mu)
        second = _arrays(node.nu) if node._fields == _ADAM else {}
        for theirs, array in first.items():
            name = names.get(theirs, theirs)
            other = _tensor(second[theirs], transpose) if second else None
            leaves[name] = Leaf("adamw" if second else "muon", _tensor(array, transpose), other, count)
        return node

    _walk(opt_state, visit)
    if not leaves:
        raise ValueError("found no state of optax.contrib.muon: no NamedTuple with the fields count, mu and ns_coeffs")
    return filled(tx, params, leaves, heavy_ball=False, step=None)


def write(state: PyTree, opt_state: Any, transpose: bool, names: Mapping[str, str]) -> Any:
    """Copy an Optax state with the values of a muonfx state, cast to the dtypes of the Optax state."""
    found = gathered(state)

    def visit(node: Any) -> Any:
        kind = "adamw" if node._fields == _ADAM else "muon"
        counts: list[int] = []

        def replaced(array: Any, theirs: str, second: bool) -> Any:
            name = names.get(theirs, theirs)
            leaf = found.get(name)
            if leaf is None or leaf.kind != kind or leaf.step is None:
                raise ValueError(
                    f"Optax has a {kind} state with a count for {theirs!r}, the muonfx state none for {name!r}"
                )
            counts.append(leaf.step)
            value = leaf.second if second else leaf.first
            assert value is not None
            return _tensor(value, transpose).double().cpu().numpy().astype(array.dtype)

        changes = {"mu": _renewed(node.mu, "", lambda array, name: replaced(array, name, False))}
        if kind == "adamw":
            changes["nu"] = _renewed(node.nu, "", lambda array, name: replaced(array, name, True))
        if counts:
            changes["count"] = node.count * 0 + counts[0]
        return node._replace(**changes)

    return _walk(opt_state, visit)


def _renewed(node: Any, path: str, make: Callable[[Any, str], Any]) -> Any:
    """Rebuild a tree with ``make(array, name)`` in place of each array."""
    if getattr(node, "_fields", None) == () or node is None:
        return node
    if isinstance(node, Mapping):
        return {key: _renewed(item, f"{path}.{key}".lstrip("."), make) for key, item in node.items()}
    if isinstance(node, tuple | list):
        keys = getattr(node, "_fields", range(len(node)))
        items = [_renewed(item, f"{path}.{key}".lstrip("."), make) for key, item in zip(keys, node, strict=True)]
        return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
    return make(node, path)


def recipe(arguments: Mapping[str, Any], params: PyTree, options: Options) -> Transform:
    """Return the chain of ``optax.contrib.muon(**arguments)``: Muon for matrices, Adam for the rest."""
    return _recipe(params, options, **arguments)


def _recipe(
    params: PyTree,
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
) -> Transform:
    if consistent_rms not in (None, 0.2):
        raise ValueError(f"consistent_rms must be None or 0.2, found {consistent_rms}")
    muon = muon_chain(
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
    return composed(
        {name: ("muon", muon) if leaf.ndim == 2 else ("adamw", adam) for name, leaf in flat(params).items()}
    )


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
