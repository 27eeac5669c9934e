"""Facts that must be equal on all ranks before the first step, such as the parameters, the layout and the transform.

A fact has a subject, which an error names, and a value, or values by name. The ranks compare one digest of all facts.
Those of every step, also of the first, are in `muonfx.sharding.transform`.
"""

from __future__ import annotations

import functools
import inspect
import sys

import torch

from muonfx import tree
from muonfx.core import Transform, checks
from muonfx.core.argument_texts import text_of
from muonfx.core.precision import product_dtypes, product_libraries
from muonfx.core.value import Recorded
from muonfx.placement.devices import meta_like
from muonfx.placement.placed import execution_of
from muonfx.placement.store import IN_MEMORY
from muonfx.sharding.binding import Binding
from muonfx.sharding.communication.agree import (
    agree,
    comparable_numbers,
    errors_on_all_ranks,
    require_group,
)
from muonfx.sharding.communication.differences import Facts
from muonfx.sharding.shards.dtensors import local_tree, require_shards
from muonfx.sharding.state import describe_state
from muonfx.tree import PyTree

# The subjects of some facts, as errors name them. Some have advice in parentheses.
NUMBERS = "numbers in their chains"
_AUTO_DTYPES = (
    'dtypes for "auto" (give each such transform a dtype, for example dtype=torch.float32)'
)
_LIBRARIES = (
    'libraries of symmetric products (polar.explain has the reason; give products="batched")'
)


def verify_ranks(binding: Binding, tx: Transform, params: PyTree) -> None:
    """Raise on all ranks unless all have the same transform, parameters, layout, settings and package versions.

    All ranks call this together, in `init` or in the first step without `init`, after all of them have arrived there.
    """
    layout = binding.layout
    if layout.size == 1:
        _checked_parameters(binding, tx, params)
        return
    group = require_group(layout)
    with errors_on_all_ranks(group):
        local = _checked_parameters(binding, tx, params)
        facts = _facts_of_binding(binding, tx, local)
    agree("binding a transform to a layout", group, same=facts)


def _checked_parameters(binding: Binding, tx: Transform, params: PyTree) -> PyTree:
    """Raise unless the parameters are this rank's shards. Return them as local tensors."""
    checks.check_params(params)
    require_shards(binding.layout, params)
    local = local_tree(params)
    binding.likes[tx.treedef] = meta_like(local)
    return local


def _facts_of_binding(binding: Binding, tx: Transform, local: PyTree) -> Facts:
    """Return what must be equal on all ranks before the first step, by subject, in the order to report.

    A subject is the start of a sentence in an error, "the ranks have different parameters", and may have advice in
    parentheses. A value is a text or number, or a dict of them, such as ``{"w": "(4, 4) torch.float32"}`` for
    "parameters". `local` has this rank's parameters.
    """
    layout = binding.layout
    store = binding.store
    device = tree.device_of(local)
    dtypes = [tensor.dtype for tensor in tree.tensors(local)]
    names_of_none = [name for name, leaf in tree.named_leaves(local) if leaf is None]
    return {
        # The packages, the model, and how it is divided over the ranks.
        "versions": _versions(),
        "parameters": {name: f"{spec.shape} {spec.dtype}" for name, spec in layout.specs.items()},
        "parameters that are None": dict.fromkeys(names_of_none, "None"),
        "trees": str(tree.flatten(local)[1]),
        "layouts": f"{layout!r} ({layout.digest})",
        "ranks in their groups": str(torch.distributed.get_process_group_ranks(layout.group)),
        "kinds of device to compute on": device.type,
        # The transform, and the options with which it runs. Ranks may have folders with different names.
        **facts_of_transforms(binding, tx, local),
        NUMBERS: comparable_numbers(tx),
        "settings": repr(binding.settings),
        "stores of the state": {
            "offloaded": store != IN_MEMORY,
            "on disk": store.on_disk,
            "bucket_bytes": store.bucket_bytes,
        },
        "settings of torch": _settings_of_torch(),
        # Machines may resolve "auto" differently; an explicit dtype or choice of products is the same everywhere.
        _AUTO_DTYPES: product_dtypes(tx, dtypes, device),
        _LIBRARIES: product_libraries(tx, dtypes, device),
        "states": _texts_of_state(binding, tx, local),
    }


def facts_of_transforms(binding: Binding, tx: Transform, params: PyTree) -> Facts:
    """Describe a transform as texts, so that an error can show in which of them the ranks differ.

    The result has two dicts. "transforms of a parameter" is such as ``{"w": "chain, momentum, orthogonalize"}``, and
    "chains" is such as ``{"1 momentum": "elementwise momentum(decay=0.0, ...)"}``.
    """
    chains: dict[str, str] = {}
    titles_of: dict[str, list[str]] = {}  # by parameter name: the transforms that are applied to it
    # A visit is one transform, `tx` itself or one that it calls, with its name in `tx` and its parameters.
    for index, visited in enumerate(binding.visits(tx, params)):
        # Numbers such as a learning rate are compared at each step: here all of them are 0.0.
        with_zeros = tree.map(lambda _: 0.0, visited.tx)
        execution = execution_of(visited)  # how it runs on shards, such as "elementwise"
        chains[f"{index} {visited.title}"] = f"{execution} {_text_of_argument(with_zeros)}"
        for name in visited.param_names:
            titles_of.setdefault(name, []).append(visited.title)
    return {
        "transforms of a parameter": {
            name: ", ".join(titles) for name, titles in titles_of.items()
        },
        "chains": chains,
    }


def _text_of_argument(value: object) -> str:
    """Return a text for an argument of a transform, such as "momentum(decay=0.0, nesterov=True, ...)".

    All functions share the text "a function". Their code cannot be compared, but ranks compare their results.
    """
    if isinstance(value, Recorded):  # a transform, or another value that has recorded its arguments
        arguments = [
            f"{name}={_text_of_argument(argument)}" for name, argument in value.arguments.items()
        ]
        return f"{value.factory.__name__}({', '.join(arguments)})"
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return "a function"
    # `text_of` calls this function for each item of a list or dict.
    return text_of(value, _text_of_argument)


def _texts_of_state(binding: Binding, tx: Transform, local: PyTree) -> dict[str, str]:
    """Return the shape, dtype and owners of each tensor of the state: ``"(4, 4) torch.float32, owners [0]"``."""
    texts: dict[str, str] = {}
    for placement in describe_state(binding, tx, local):
        if placement is not None:
            owners = [shard.owner for shard in placement.shards]
            texts[placement.path] = f"{placement.shape} {placement.dtype}, owners {owners}"
    return texts


def _versions() -> dict[str, str]:
    # Modules inside the package must not import it.
    package = sys.modules[__name__.partition(".")[0]]
    return {
        "muonfx": str(getattr(package, "__version__", "unknown")),
        "torch": str(torch.__version__),
    }


def _settings_of_torch() -> dict[str, str]:
    """Return the global settings of torch that change results, as texts by name.

    An example is ``{"default dtype": "torch.float32"}``. Ranks with different settings would compute different updates
    of their replicas. Autocast is none of them, because every transform runs outside it.
    """
    return {
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
