"""`ParamInfo`: the name, shape and module types of a parameter, read from a model or from named tensors."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from muonfx import tree
from muonfx.internal.wrappers import WRAPPERS

Params: TypeAlias = (
    nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | object
)
"""A model; named tensors, as a mapping or as (name, tensor) pairs; or any pytree of tensors."""

PLAIN_LEAVES = frozenset({"weight", "kernel", "w", "weight_orig"})
"""The last component of the name of a weight that belongs to a layer: it does not show what the weight is."""


@dataclass(frozen=True)
class ParamInfo:
    """The name, shape, dtype and module types of one parameter, for use in rules.

    Each `Predicate` is a function of a `ParamInfo`. A `ParamInfo` holds no tensor or module, so it can be stored,
    compared and pickled, and rules cannot depend on the values of a parameter.

    Attributes:
        name: the dotted name, as the model or the caller gives it.
        shape: the global shape, also if the tensor is a shard.
        dtype: the tensor's dtype.
        requires_grad: False for a frozen ``nn.Parameter``. It is True for every plain tensor, because functional code
            trains tensors that do not require grad.
        module: the type of the module that owns the parameter; None if no model was given.
        tied: the other names of the same tensor.
        tied_modules: the types of the modules that own the tensor under the names in ``tied``, in the same order;
            empty if no model was given.

    >>> ParamInfo("blocks.0.attn.weight", (8, 4)).numel
    32
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True
    module: type | None = None
    tied: tuple[str, ...] = ()
    tied_modules: tuple[type, ...] = ()

    @property
    def ndim(self) -> int:
        """The number of dimensions of the parameter."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements of the parameter."""
        return prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the tensor: `name` and `tied`, each with and without wrapper components like "_orig_mod"."""
        full_names = (self.name, *self.tied)
        plain_names = map(plain_name, full_names)
        return tuple(dict.fromkeys((*full_names, *plain_names)))

    @property
    def modules(self) -> tuple[type, ...]:
        """The types of all modules that own the tensor; empty if no model was given."""
        if self.module is None:
            return ()
        return (self.module, *self.tied_modules)


def plain_name(name: str) -> str:
    """Return a parameter name without the components that parametrizations and wrappers ("_orig_mod") add.

    >>> plain_name("_orig_mod.fc.weight"), plain_name("fc.parametrizations.weight.original")
    ('fc.weight', 'fc.weight')
    """
    components = [component for component in name.split(".") if component not in WRAPPERS]
    if "parametrizations" in components[:-2]:
        # The name of the parametrized tensor follows, and then the name of a tensor of the parametrization.
        index = components.index("parametrizations")
        components = [*components[:index], components[index + 1]]
    return ".".join(components) or name


def module_path(name: str) -> str:
    """Return the path of the module that owns a parameter, "fc" for ``fc.weight`` and also if it is parametrized.

    >>> module_path("fc.parametrizations.weight.original"), module_path("scale")
    ('fc', '')
    """
    # The tensors of a parametrized weight are in a list below the module that owns the weight.
    holder, _, _ = f".{name}".rpartition(".")
    owner, _, _ = holder.partition(".parametrizations.")
    return owner.removeprefix(".")


def joined(path: str, name: str) -> str:
    """Return "blocks.fc" for the path "blocks" and the name "fc", and "fc" for the path "" of the model itself."""
    return f"{path}.{name}" if path else name


def read_params(params: Params) -> tuple[tuple[ParamInfo, ...], tuple[str, ...]]:
    """Return a `ParamInfo` for each parameter of a model or of named tensors, and the names of those that are None.

    Both are tuples in the order of the parameters. A tensor with several names is listed once for a model, and under
    each name for named tensors.

    >>> infos, absent_names = read_params({"fc": torch.zeros(4, 2), "head": None})
    >>> [info.name for info in infos], absent_names
    (['fc'], ('head',))
    """
    if isinstance(params, nn.Module):
        return _read_model(params), ()
    values: dict[str, object] = {}
    # A tied tensor has several names by its id.
    names_of_tensor: dict[int, list[str]] = {}
    for name, value in _named_values(params):
        if name in values:
            raise ValueError(
                f"parameter {name!r} is given more than once; expected distinct names: rename one, or pass the model"
            )
        values[name] = value
        names_of_tensor.setdefault(id(value), []).append(name)
    infos: list[ParamInfo] = []
    absent_names: list[str] = []
    for name, value in values.items():
        if value is None:  # the parameter is left out of this tree
            absent_names.append(name)
            continue
        other_names = [
            other_name for other_name in names_of_tensor[id(value)] if other_name != name
        ]
        infos.append(_info(name, value, tied=tuple(other_names)))
    return tuple(infos), tuple(absent_names)


def _read_model(model: nn.Module) -> tuple[ParamInfo, ...]:
    """Return a `ParamInfo` for each distinct parameter of a model, in the order of the model's modules.

    A tied parameter has several names, such as "wte.weight" and "head.weight", and a module for each. The first name
    becomes `ParamInfo.name`, and the others `ParamInfo.tied`.
    """
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(tensor, []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    infos: list[ParamInfo] = []
    for tensor, names in names_of.items():
        # For each name, the class of the module, such as nn.Embedding and nn.Linear.
        module_types: list[type] = []
        for name in names:
            module = modules[module_path(name)]  # of a parametrized weight, the module around it
            module_types.append(written_type(module))
        first_name, *tied_names = names
        first_type, *tied_types = module_types
        infos.append(_info(first_name, tensor, tuple(tied_names), first_type, tuple(tied_types)))
    return tuple(infos)


def written_type(module: nn.Module) -> type:
    """Return the class of a module in its source code, not the subclass that parametrize or FSDP2 generates.

    For example, it is ``Linear`` for the class ``FSDPLinear`` with the bases ``(FSDPModule, Linear)``.
    """
    module_class: type = parametrize.type_before_parametrizations(module)
    bases = module_class.__bases__
    is_generated_by_fsdp2 = len(bases) == 2 and bases[0].__name__ == "FSDPModule"
    if is_generated_by_fsdp2:
        return bases[1]
    return module_class


@functools.lru_cache(maxsize=1024)
def class_name_fits(module: type, pattern: str) -> bool:
    """Return True if a regular expression is found in the name of a class or of one of its bases."""
    return any(re.search(pattern, base.__name__) for base in module.__mro__)


def _named_values(params: object) -> Iterable[tuple[str, object]]:
    """Return the (name, value) pairs of named tensors, in each form in which a user may pass them.

    - ``model.named_parameters()``, an iterator, and ``[("w", tensor)]`` have the pairs.
    - ``{"w": tensor}`` has them as items.
    - Another pytree, such as ``{"fc": {"w": tensor}}``, has paths as names: ``[("fc.w", tensor)]``.
    """
    if isinstance(params, Iterator):
        pairs = list(cast("Iterator[object]", params))
        if not _is_pairs(pairs):
            raise TypeError(
                "an iterator must yield (name, tensor) pairs: use model.named_parameters(), not model.parameters()"
            )
        return pairs
    if isinstance(params, Mapping):
        value_of = dict(cast("Mapping[object, object]", params))
        has_tensors = all(
            value is None or isinstance(value, torch.Tensor) for value in value_of.values()
        )
        pairs = list(value_of.items())
        if has_tensors and _is_pairs(pairs):  # a flat dict with strings as keys
            return pairs  # in the order of the dict; the names of a pytree would be sorted
        return tree.named_leaves(value_of)
    if _is_pairs(params):
        return params
    return tree.named_leaves(params)


def _is_pairs(params: object) -> TypeGuard[Sequence[tuple[str, object]]]:
    """Return True for a list or tuple of (name, value) pairs."""
    if not isinstance(params, list | tuple):
        return False
    for pair in cast("Sequence[Any]", params):
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            return False
    return True


def _info(
    name: str,
    tensor: object,
    tied: tuple[str, ...],
    module: type | None = None,
    tied_modules: tuple[type, ...] = (),
) -> ParamInfo:
    """Return the `ParamInfo` of one tensor.

    Args:
        name: the name of the tensor.
        tensor: the tensor, which may be a shard.
        tied: its other names in the model.
        module: the type of the module that owns it; None without a model.
        tied_modules: the types of the modules that own it under the other names.
    """
    tensor = _tensor_with_shape(name, tensor)
    # ZeRO-3 of DeepSpeed keeps an empty placeholder between uses, with the shape of the whole parameter in `ds_shape`.
    shape = cast("Iterable[int]", getattr(tensor, "ds_shape", tensor.shape))
    # Only an nn.Parameter can be frozen: functional code trains plain tensors, which do not require grad.
    is_trained = tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    return ParamInfo(
        name=name,
        shape=tuple(map(int, shape)),
        dtype=tensor.dtype,
        requires_grad=is_trained,
        module=module,
        tied=tied,
        tied_modules=tied_modules,
    )


def _tensor_with_shape(name: str, value: object) -> torch.Tensor:
    """Return the value of a parameter. Raise if it is no tensor, or a lazy parameter without a shape."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"parameter {name!r} is a {type(value).__name__}; expected a torch.Tensor: "
            "pass a model, a dict of name to tensor, (name, tensor) pairs, or a pytree of tensors"
        )
    if isinstance(value, nn.UninitializedParameter):
        raise ValueError(
            f"parameter {name!r} has no shape yet (lazy module): run one forward pass before choosing labels"
        )
    return value
