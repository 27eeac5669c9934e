"""Where other optimizers keep their state: in a torch optimizer, in DeepSpeed's universal checkpoint, in Optax's tree.

Each of them yields entries. An `Entry` is the state of one parameter and its hyperparameters, under the optimizer's own
keys. Files are read without executing their content.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.checkpoint.convert.states import Leaf
from muonfx.checkpoint.files import open_regular
from muonfx.tree.display import format_list

__all__ = [
    "Arguments",
    "Entry",
    "Group",
    "Values",
    "by_config",
    "by_size",
    "in_folder",
    "in_optax",
    "in_optimizers",
    "into_optax",
    "into_optimizer",
    "read_folder",
]

Group = Mapping[str, Any]
"""The hyperparameters of some parameters, under the optimizer's own names."""
Values = Mapping[str, Any]
"""The optimizer's state of one parameter, under its own keys."""
KindOf = Callable[[Group, Values], str]
"""Returns "muon", "adamw" or "lion"."""
Params = Mapping[str, Tensor]


class Entry(NamedTuple):
    """One parameter of another optimizer; ``kind`` is "muon", "adamw" or "lion"."""

    name: str
    kind: str
    group: Group
    values: Values


class Arguments(NamedTuple):
    """The arguments of a conversion that only some formats take; see `muonfx.checkpoint.convert.read`."""

    names: Sequence[str] | Mapping[str, str] | None = None
    transpose: bool | None = None
    config: Group | None = None


# -------------------------------------------------------------------------------------------- optimizers of torch.optim


def in_optimizers(title: str, kind_of: KindOf, source: Any, params: Params, given: Arguments) -> list[Entry]:
    """Return the entries of an optimizer, of its ``state_dict()``, or of several of these."""
    found: list[Entry] = []
    for one in source if isinstance(source, Sequence) else [source]:
        saved, of_names = _named(one, params, given.names, title)
        for group, names in zip(saved["param_groups"], of_names, strict=True):
            for index, name in zip(group["params"], names, strict=True):
                values = saved["state"].get(index, {})
                found.append(Entry(name, kind_of(group, values), group, values))
    seen = [entry.name for entry in found]
    if twice := sorted({name for name in seen if seen.count(name) > 1}):
        raise ValueError(f"{title}: {twice[0]!r} is in two optimizers or groups")
    return found


def into_optimizer(
    title: str,
    kind_of: KindOf,
    values_of: Callable[[Leaf], dict[str, Any]],
    leaves: Mapping[str, Leaf],
    target: Any,
    params: Params,
    given: Arguments,
) -> dict[str, Any]:
    """Return the ``state_dict()`` of an optimizer with its own groups and new values."""
    saved, of_names = _named(target, params, given.names, title)
    entries: dict[int, dict[str, Any]] = {}
    for group, names in zip(saved["param_groups"], of_names, strict=True):
        for index, name in zip(group["params"], names, strict=True):
            old = saved["state"].get(index, {})
            kind, leaf = kind_of(group, old), leaves.get(name)
            if leaf is None or leaf.kind != kind:
                has = "nothing" if leaf is None else f"a {leaf.kind} state"
                raise ValueError(f"{name!r} has a {kind} state in {title}; the muonfx state has {has} for it")
            entries[index] = {**old, **values_of(leaf)}
    return {**saved, "state": entries}


def _named(given: Any, params: Params, names: Any, title: str) -> tuple[dict[str, Any], list[list[str]]]:
    """Return a state dict, and the names of the parameters in each of its groups."""
    if isinstance(given, torch.optim.Optimizer):
        known = {id(param): name for name, param in params.items()}
        members = [param for group in given.param_groups for param in group["params"]]
        if all(id(param) in known for param in members):
            names = [known[id(param)] for param in members]
        given = given.state_dict()
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise TypeError(f"{title}: expected an optimizer or its state_dict(), found {type(given).__name__}")
    saved = dict(given)
    groups: list[Group] = list(saved["param_groups"])
    if names is None and all("param_names" in group for group in groups):
        found = [list(group["param_names"]) for group in groups]
    else:
        count = sum(len(group["params"]) for group in groups)
        if names is None or len(names) != count:
            have = "none" if names is None else str(len(names))
            raise ValueError(
                f"{title}: its {count} parameters have no names; give names=, their names in the optimizer's order "
                f"(found {have}), or the optimizer itself with the parameters that it holds"
            )
        rest = iter(names)
        found = [[next(rest) for _ in group["params"]] for group in groups]
    if unknown := sorted({name for group in found for name in group} - params.keys()):
        raise ValueError(f"{title}: no parameter is called {format_list(unknown)}")
    return saved, found


# ------------------------------------------------------------------------------------ DeepSpeed's universal checkpoint


def in_folder(source: Any, params: Params, given: Arguments) -> list[Entry]:
    """Return the entries of DeepSpeed's ``MuonWithAuxAdam``; ``source`` is a folder, or what `read_folder` returns."""
    found = read_folder(source) if isinstance(source, str | Path) else source
    if unknown := sorted(found.keys() - params.keys()):
        raise ValueError(f"no parameter is called {format_list(unknown)}")
    return [
        Entry(
            name,
            "muon" if "momentum_buffer" in values else "adamw",
            {},
            {key: _shaped(value, params[name].shape) for key, value in values.items()},
        )
        for name, values in found.items()
    ]


def by_config(source: Any, params: Params, given: Arguments) -> list[Entry]:
    """Return the entries of a universal checkpoint with groups that have DeepSpeed's defaults and the given numbers."""
    # Its iteration is Keller Jordan's polynomial, in its Gram form and in fp16 if the device supports it.
    config = given.config or {}
    defaults = {"weight_decay": 0.0, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-10}
    group = {key: config.get(key, default) for key, default in defaults.items()}
    rates = {
        "muon": config.get("muon_lr", config.get("lr", 0.02)),
        "adamw": config.get("adam_lr", config.get("lr", 3e-4)),
    }
    entries = in_folder(source, params, given)
    return [entry._replace(group={**group, "lr": rates[entry.kind]}) for entry in entries]


def read_folder(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read the optimizer states of a universal checkpoint by parameter name, without the weights in "fp32".

    ``ds_to_universal.py`` writes a folder ``zero`` with a folder for each parameter, which contains a file for each of
    its states. Converters before DeepSpeed's pull request 8609 support the states of Adam only and fail on Muon's.
    """
    root = Path(path)
    root = root / "zero" if (root / "zero").is_dir() else root
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.name == "zero" else []
    if not folders:
        raise FileNotFoundError(
            f"{path}: expected a universal checkpoint, a folder with a folder 'zero' of one folder for each parameter; "
            "make one with DeepSpeed's ds_to_universal.py"
        )
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        files = {file.stem: _read_plain(file) for file in sorted(folder.glob("*.pt")) if file.stem != "fp32"}
        found[folder.name] = {
            key: value["param"] if isinstance(value, Mapping) and "param" in value else value
            for key, value in files.items()
        }
    return found


def _read_plain(path: Path) -> Any:
    """Read a file of ``torch.save`` that holds tensors and plain values only; errors name the file."""
    open_regular(path).close()  # refuses a pipe, on which torch would block
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about some files before it refuses them
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as problem:  # on damaged files torch raises KeyError, struct.error and many others
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise ValueError(f"{path}: expected tensors and plain values, found something else: {reason}") from None


def _shaped(value: Any, shape: torch.Size) -> Any:
    flat = isinstance(value, Tensor) and value.ndim == 1 and value.numel() == shape.numel()
    return value.reshape(shape) if flat else value


# ------------------------------------------------------------------------------------------------------- Optax's trees

_MUON, _ADAM = ("count", "mu", "ns_coeffs"), ("count", "mu", "nu")
"""The fields of the states in ``jax.tree.map(numpy.asarray, opt_state)``; neither JAX nor Optax need be installed."""


def in_optax(source: Any, params: Params, given: Arguments) -> list[Entry]:
    """Return the entries of the states of ``optax.contrib.muon`` in a tree of numpy arrays."""
    names, transpose = _names(given), bool(given.transpose)
    found: list[Entry] = []

    def visit(node: Any) -> Any:
        trees = {key: _arrays(getattr(node, key)) for key in ("mu", "nu") if key in node._fields}
        for theirs in trees["mu"]:
            values = {key: _tensor(arrays[theirs], transpose) for key, arrays in trees.items()}
            kind = "adamw" if "nu" in trees else "muon"
            found.append(Entry(names.get(theirs, theirs), kind, {}, {**values, "count": int(node.count)}))
        return node

    _walk(source, visit)
    if not found:
        raise ValueError("found no state of optax.contrib.muon: no NamedTuple with the fields count, mu and ns_coeffs")
    return found


def by_size(source: Any, params: Params, given: Arguments) -> list[Entry]:
    """Return entries with the arguments of ``optax.contrib.muon``, Muon for matrices and Adam for all others."""
    return [Entry(name, "muon" if param.ndim == 2 else "adamw", source, {}) for name, param in params.items()]


def into_optax(leaves: Mapping[str, Leaf], target: Any, given: Arguments) -> Any:
    """Copy an Optax state with new values, cast to the dtypes of the Optax state."""
    names, transpose = _names(given), bool(given.transpose)

    def visit(node: Any) -> Any:
        kind = "adamw" if node._fields == _ADAM else "muon"
        counts: list[int] = []

        def replaced(array: Any, theirs: str, field: str) -> Any:
            name = names.get(theirs, theirs)
            leaf = leaves.get(name)
            if leaf is None or leaf.kind != kind or leaf.step is None:
                raise ValueError(
                    f"Optax has a {kind} state with a count for {theirs!r}, the muonfx state none for {name!r}"
                )
            counts.append(leaf.step)
            value = leaf.first if field == "mu" else leaf.second
            assert value is not None
            return _tensor(value, transpose).double().cpu().numpy().astype(array.dtype)

        fields = [field for field in ("mu", "nu") if field in node._fields]
        changes = {
            field: _renewed(getattr(node, field), lambda array, name, field=field: replaced(array, name, field))
            for field in fields
        }
        return node._replace(**changes, **({"count": node.count * 0 + counts[0]} if counts else {}))

    return _walk(target, visit)


def _names(given: Arguments) -> Mapping[str, str]:
    assert isinstance(given.names, Mapping | None)
    return given.names or {}


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


def _renewed(node: object, make: Callable[[Any, str], Any], path: str = "") -> Any:
    """Rebuild a tree of arrays with ``make(array, dotted name)`` in place of each array."""
    # A NamedTuple without fields is the placeholder of a parameter that another part of the state holds.
    if getattr(node, "_fields", None) == () or node is None:
        return node
    if isinstance(node, Mapping):
        return {key: _renewed(item, make, f"{path}.{key}".lstrip(".")) for key, item in node.items()}
    if isinstance(node, tuple | list):
        keys = getattr(node, "_fields", range(len(node)))
        items = [_renewed(item, make, f"{path}.{key}".lstrip(".")) for key, item in zip(keys, node, strict=True)]
        return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
    return make(node, path)


def _arrays(node: object) -> dict[str, Any]:
    """Return the arrays of a tree by dotted name."""
    found: dict[str, Any] = {}
    _renewed(node, lambda array, name: found.setdefault(name, array))
    return found


def _tensor(array: object, transpose: bool) -> Tensor:
    found = torch.as_tensor(array).clone()
    return found.mT.contiguous() if transpose and found.ndim == 2 else found
