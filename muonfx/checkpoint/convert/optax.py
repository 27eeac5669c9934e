"""``optax.contrib.muon``, from and to trees of numpy arrays: neither JAX nor Optax need be there.

``jax.tree.map(numpy.asarray, opt_state)`` makes such a tree. Optax's partitions keep a placeholder, a NamedTuple
without fields, where a parameter belongs to another label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from muonfx import polar
from muonfx.checkpoint.convert._leaves import Leaf, filled, flat, gathered
from muonfx.checkpoint.convert._sources import composed, muon_chain
from muonfx.core import Transform, chain
from muonfx.transforms import add_decayed_weights, scale_by_adam, scale_by_learning_rate
from muonfx.tree import PyTree

__all__ = ["from_optax", "optax_recipe", "to_optax"]

_MUON, _ADAM = ("count", "mu", "ns_coeffs"), ("count", "mu", "nu")


def _walk(node: Any, visit: Callable[[Any], Any]) -> Any:
    """Rebuild an Optax state, with what ``visit`` makes of the states of Muon and Adam in it."""
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
    """The arrays of a tree by dotted name, without placeholders."""
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


def from_optax(
    opt_state: Any, tx: Transform, params: PyTree, *, transpose: bool, names: Mapping[str, str] | None = None
) -> PyTree:
    """Make a transform's state from that of ``optax.contrib.muon``.

    Args:
        opt_state: the state of ``optax.contrib.muon``, alone or within chains, with numpy arrays as leaves.
        tx: the transform; `optax_recipe` makes the one that goes on as Optax would.
        params: the parameters.
        transpose: whether two-dimensional arrays are the transposes of the parameters here: the kernels of Flax are
            (inputs, outputs), the weights of PyTorch (outputs, inputs).
        names: Optax's dotted name to the parameter's, where they differ.

    Raises:
        ValueError: there is no such state, or it does not fit the transform; the message lists every difference.

    Example:
        >>> from typing import NamedTuple
        >>> import muonfx as mfx
        >>> import numpy
        >>> class MuonState(NamedTuple):
        ...     count: object
        ...     mu: object
        ...     ns_coeffs: object
        >>> theirs = MuonState(3, {"up": {"kernel": numpy.array([[1.0, 2.0, 3.0]], "float32")}}, None)
        >>> params = {"up.weight": torch.zeros(3, 1)}
        >>> tx = mfx.momentum(debias=True)
        >>> from_optax(theirs, tx, params, transpose=True, names={"up.kernel": "up.weight"}).trace["up.weight"].mT
        tensor([[1., 2., 3.]])
    """
    leaves: dict[str, Leaf] = {}

    def visit(node: Any) -> Any:
        count, first = int(node.count), _arrays(node.mu)
        second = _arrays(node.nu) if node._fields == _ADAM else {}
        for theirs, array in first.items():
            name = (names or {}).get(theirs, theirs)
            other = _tensor(second[theirs], transpose) if second else None
            leaves[name] = Leaf("adamw" if second else "muon", _tensor(array, transpose), other, count)
        return node

    _walk(opt_state, visit)
    if not leaves:
        raise ValueError("found no state of optax.contrib.muon: no NamedTuple with the fields count, mu and ns_coeffs")
    return filled(tx, params, leaves, heavy_ball=False, step=None)


def to_optax(state: PyTree, opt_state: Any, *, transpose: bool, names: Mapping[str, str] | None = None) -> Any:
    """Put a transform's state into a state of ``optax.contrib.muon``.

    Args:
        state: of a chain with ``momentum(debias=True)``, and Adam.
        opt_state: what Optax's ``init`` made, with numpy arrays as leaves; it is copied.
        transpose: as in `from_optax`.
        names: as in `from_optax`.

    Returns:
        The same tree with numpy arrays of the new values, in the old dtypes. (It imports numpy.)

    Raises:
        ValueError: something in Optax's state has no counterpart.

    Example:
        >>> from typing import NamedTuple
        >>> import muonfx as mfx
        >>> import numpy
        >>> class MuonState(NamedTuple):
        ...     count: object
        ...     mu: object
        ...     ns_coeffs: object
        >>> fresh = MuonState(numpy.zeros((), "int32"), {"w": numpy.zeros((1, 3), "float32")}, None)
        >>> params = {"w": torch.zeros(3, 1)}
        >>> tx = mfx.momentum(debias=True)
        >>> _, state = tx.update({"w": torch.ones(3, 1)}, tx.init(params))
        >>> to_optax(state, fresh, transpose=True).mu["w"].shape
        (1, 3)
    """
    found = gathered(state)

    def visit(node: Any) -> Any:
        kind = "adamw" if node._fields == _ADAM else "muon"
        counts: list[int] = []

        def replaced(array: Any, theirs: str, second: bool) -> Any:
            name = (names or {}).get(theirs, theirs)
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
    """A tree with other arrays at the places of its own."""
    if getattr(node, "_fields", None) == () or node is None:
        return node
    if isinstance(node, Mapping):
        return {key: _renewed(item, f"{path}.{key}".lstrip("."), make) for key, item in node.items()}
    if isinstance(node, tuple | list):
        keys = getattr(node, "_fields", range(len(node)))
        items = [_renewed(item, f"{path}.{key}".lstrip("."), make) for key, item in zip(keys, node, strict=True)]
        return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
    return make(node, path)


def optax_recipe(
    params: PyTree,
    learning_rate: float,
    *,
    ns_coeffs: str | tuple[float, float, float] | tuple[tuple[float, float, float], ...] = "muon",
    ns_steps: int = 5,
    beta: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    nesterov: bool = True,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_eps_root: float = 0.0,
    adam_weight_decay: float = 0.0,
    adam_learning_rate: float | None = None,
    consistent_rms: float | None = None,
    dtype: torch.dtype | str = torch.float32,
) -> Transform:
    """Make the chain that ``optax.contrib.muon`` computes for the same arguments, which its state does not hold.

    Args:
        params: the parameters: Muon takes those of two dims, Adam the rest, as in Optax.
        learning_rate: as in Optax; a number.
        ns_coeffs: as in Optax, "muon" or "dion" or the numbers.
        ns_steps: as in Optax.
        beta: as in Optax.
        eps: as in Optax; of Adam (in the iteration it is far below the rounding).
        weight_decay: as in Optax.
        nesterov: as in Optax: also for Adam.
        adam_b1: as in Optax.
        adam_b2: as in Optax.
        adam_eps_root: as in Optax.
        adam_weight_decay: as in Optax.
        adam_learning_rate: as in Optax.
        consistent_rms: as in Optax; None or 0.2, which are the rules "original" and "match_rms_adamw".
        dtype: of the iteration; Optax has that of the gradients.

    Raises:
        ValueError: ``consistent_rms`` is another number.

    Example:
        >>> optax_recipe({"w": torch.zeros(3, 2)}, 0.02, dtype="auto")  # doctest: +NORMALIZE_WHITESPACE
        chain(momentum(debias=True), orthogonalize(coefficients='keller'), scale_by_shape(rule='original'),
              add_decayed_weights(), scale_by_learning_rate(learning_rate=0.02))
    """
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
        options={"dtype": dtype},
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
