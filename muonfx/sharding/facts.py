"""Facts that must be equal on all ranks: at `init`, once for each transform, and at every step.

A fact has a subject, which an error names, and a value, or values by name. The facts of a step are plain values, of
which the ranks compare one digest. They are gathered, and made into texts, only for an error.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Transform
from muonfx.core.argument_texts import text_of
from muonfx.core.precision import product_dtypes, product_libraries
from muonfx.core.schedules import Schedule
from muonfx.core.transform import within
from muonfx.core.value import Recorded, parts_of
from muonfx.placement.arguments import Arguments
from muonfx.placement.placed import execution_of
from muonfx.placement.store import IN_MEMORY
from muonfx.sharding.binding import Binding, Progress
from muonfx.sharding.communication.differences import Facts
from muonfx.sharding.digests import digest
from muonfx.sharding.state import describe_state
from muonfx.tree import PyTree

# ----------------------------------------------------------------------------------------------------------- of a step

_NUMBERS = "numbers in their chains"
_DTYPES = "dtypes of parameters (convert the model on all ranks, or on none)"


class _Fixed(NamedTuple):
    """The results that all steps of a transform share: they follow from its structure and the names of the leaves."""

    transforms: str
    """The digest of `facts_of_transforms`."""
    state_size: int
    """The number of leaves of the state."""
    shared_state: dict[str, int]
    """The leaves of the state that belong to no parameter, such as counters: from name to index."""


def facts_of_step(binding: Binding, progress: Progress, tx: Transform, call: Arguments) -> Facts:
    """Return what must be equal on all ranks in a step, by subject. `call` has local tensors."""
    key = "facts", tx.treedef, tuple(tree.names(call.like))
    fixed = binding.once(key, lambda: _find_fixed(binding, tx, call))
    leaves = tree.leaves(call.state)
    shared: dict[str, object] = {"": f"{len(leaves)} leaves"}
    step = progress.completed
    if len(leaves) == fixed.state_size:
        shared = {name: _comparable(leaves[index]) for name, index in fixed.shared_state.items()}
        counters = [int(leaves[index]) for index in fixed.shared_state.values() if _is_host_counter(leaves[index])]
        step = max(counters, default=step)
    return {
        "transforms and their arguments": fixed.transforms,
        "sharded transforms or optimizers in this step (all ranks must step them in the same order)": (
            f"number {progress.serial} of the group"
        ),
        "arguments: some give params, some do not": call.params is not None,
        _DTYPES: _digest_of_dtypes(binding, call.params),
        "states (load on all ranks, or on none)": (
            "loaded since the last step" if progress.has_loaded else "not loaded since the last step"
        ),
        "numbers of completed steps (a rank has gone on after an error inside its step, so its parameters and state "
        "are old: load one checkpoint on all ranks)": progress.completed,
        _NUMBERS: {**_comparable_numbers(tx), **_values_of_schedules(tx, step)},
        "extra arguments, such as value=loss; reduce them first": {
            name: _comparable_extra(call.extras[name]) for name in sorted(call.extras)
        },
        "numbers in their states": shared,
    }


def _find_fixed(binding: Binding, tx: Transform, call: Arguments) -> _Fixed:
    """Compute the facts that are the same in each step. A leaf of the state without a parameter is a shared one."""
    described = describe_state(binding, tx, call.like)
    names = tree.names(binding.init(tx, binding.local_like(call.like)))
    shared = [index for index, placed in enumerate(described) if placed is not None and placed.name is None]
    return _Fixed(
        digest(facts_of_transforms(binding, tx, call.like)),
        len(described),
        {names[index]: index for index in shared},
    )


def _digest_of_dtypes(binding: Binding, params: PyTree) -> str:
    """Return a digest of the dtypes of this rank's parameters, computed once for each combination of dtypes."""
    dtypes = tuple([None if leaf is None else leaf.dtype for leaf in tree.leaves(params)])
    return binding.once(("dtypes", dtypes), lambda: digest(dtypes))


def facts_of_dtypes(params: PyTree) -> Facts:
    """Return the dtype of each of this rank's parameters by name, for the error if their digests differ."""
    dtype_of: dict[str, str] = {}
    for name, leaf in zip(tree.names(params), tree.leaves(params), strict=True):
        if leaf is not None:
            dtype_of[name] = str(leaf.dtype)
    return {_DTYPES: dtype_of}


def _values_of_schedules(tx: Transform, step: int) -> dict[str, float]:
    """Return the value of each schedule at a step, by a name such as "3.scale_by_learning_rate.learning_rate"."""
    if "schedules" not in tx.derived:
        tx.derived["schedules"] = _find_schedules(tx)
    count = torch.tensor(float(step), dtype=torch.float64)
    return {name: float(schedule(count)) for name, schedule in tx.derived["schedules"].items()}


def _find_schedules(tx: Transform) -> dict[str, Callable[[Tensor], Any]]:
    """Return the schedules among the arguments of a transform and of those that it calls, by their names.

    A name is the number of the transform, its name and the argument: "3.scale_by_learning_rate.learning_rate".
    """
    schedules: dict[str, Callable[[Tensor], Any]] = {}
    for index, inner in enumerate(within(tx)):
        kinds = inner.factory.definition.plain
        for name, value in inner.arguments.items():
            # A plain function is a schedule if the annotation of its argument includes the type `Schedule`.
            is_function_as_schedule = callable(value) and "Schedule" in kinds[name]
            if isinstance(value, Schedule) or is_function_as_schedule:
                schedules[f"{index}.{inner.name}.{name}"] = value
    return schedules


def _is_host_counter(leaf: object) -> bool:
    """Return True for a 0-d int64 tensor on the CPU, which can be read without waiting for a device."""
    return isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and not leaf.ndim and leaf.device.type == "cpu"


# ------------------------------------------------------------------------------------------------------ of a transform


def facts_of_binding(binding: Binding, tx: Transform, local: PyTree) -> Facts:
    """Return what must be equal on all ranks before the first step, by subject, in the order to report.

    A subject is the start of a sentence in an error, and may have advice in parentheses. A value is a text or number,
    or a dict of them, such as ``{"w": "(4, 4) torch.float32"}`` for "parameters". `local` has this rank's parameters.
    """
    layout = binding.layout
    device = tree.device_of(local)
    leaf_of = dict(zip(tree.names(local), tree.leaves(local), strict=True))
    dtypes = [leaf.dtype for leaf in leaf_of.values() if leaf is not None]
    return {
        "versions": _versions(),
        "parameters": {name: f"{spec.shape} {spec.dtype}" for name, spec in layout.specs.items()},
        "parameters that are None": {name: "None" for name, leaf in leaf_of.items() if leaf is None},
        "trees": str(tree.flatten(local)[1]),
        "layouts": f"{layout!r} ({layout.digest})",
        "ranks in their groups": str(torch.distributed.get_process_group_ranks(layout.group)),
        "kinds of device to compute on": device.type,
        **facts_of_transforms(binding, tx, local),
        _NUMBERS: _comparable_numbers(tx),
        "settings": repr(binding.settings),
        "stores of the state": _text_of_store(binding),
        "settings of torch": _settings_of_torch(),
        # Machines may resolve "auto" differently; an explicit dtype or choice of products is the same everywhere.
        'dtypes for "auto" (give each such transform a dtype, for example dtype=torch.float32)': product_dtypes(
            tx, dtypes, device
        ),
        'libraries of symmetric products (polar.explain has the reason; give products="batched")': (
            product_libraries(tx, dtypes, device)
        ),
        "states": _texts_of_state(binding, tx, local),
    }


def facts_of_transforms(binding: Binding, tx: Transform, params: PyTree) -> Facts:
    """Return, as texts by subject, the transforms that are applied to each parameter, and their arguments."""
    chains: dict[str, str] = {}
    titles_of: dict[str, list[str]] = {}
    for index, visited in enumerate(binding.visits(tx, params)):
        without_numbers = tree.map(lambda _: 0.0, visited.tx)
        chains[f"{index} {visited.title}"] = f"{execution_of(visited)} {_text_of_argument(without_numbers)}"
        for name in visited.names:
            titles_of.setdefault(name, []).append(visited.title)
    return {
        "transforms of a parameter": {name: ", ".join(titles) for name, titles in titles_of.items()},
        "chains": chains,
    }


def _text_of_argument(value: object) -> str:
    """Return a text for an argument of a transform. All functions share one text: ranks compare their results."""
    if isinstance(value, Recorded):
        arguments = [f"{name}={_text_of_argument(argument)}" for name, argument in value.arguments.items()]
        return f"{value.factory.__name__}({', '.join(arguments)})"
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return "a function"
    return text_of(value, _text_of_argument)


def _texts_of_state(binding: Binding, tx: Transform, local: PyTree) -> dict[str, str]:
    """Return the shape, dtype and owners of each leaf of the state: ``"(4, 4) torch.float32, owners [0]"``."""
    names = tree.names(binding.init(tx, binding.local_like(local)))
    texts = dict.fromkeys(names, "None")
    for name, placed in zip(names, describe_state(binding, tx, local), strict=True):
        if placed is not None:
            owners = [shard.owner for shard in placed.shards]
            texts[name] = f"{placed.shape} {placed.dtype}, owners {owners}"
    return texts


def _versions() -> dict[str, str]:
    package = sys.modules[__name__.partition(".")[0]]  # modules inside the package must not import it
    return {"muonfx": str(getattr(package, "__version__", "unknown")), "torch": str(torch.__version__)}


def _text_of_store(binding: Binding) -> str:
    """Return where the state is between steps, such as "in memory with the parameters"."""
    store = binding.store
    if store == IN_MEMORY:
        return "in memory with the parameters"
    medium = "on disk" if store.on_disk else "in host memory"
    return f"offloaded, {medium}, in buckets of {store.bucket_bytes} bytes"


def _settings_of_torch() -> dict[str, str]:
    """Return the global settings of torch that change results, as texts by name."""
    is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return {
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "autocast": str(is_autocast),
    }


# -------------------------------------------------------------------------------------------------------------- values

SMALL = 64
"""Values of a CPU tensor are compared at every step if it has at most this number of elements."""


class _Text(str):
    """A description of a tensor, whose ``repr`` has no quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _comparable(value: object) -> object:
    """Return a value for ranks to compare: a number, or a description of a tensor. It never syncs with a GPU."""
    if not isinstance(value, Tensor):
        return value
    # Values on a device are compared when replicas are verified.
    if value.device.type != "cpu" or value.numel() > SMALL:
        return _Text(f"a tensor {tuple(value.shape)} of {value.dtype}")
    return _Text(f"{value.tolist()} of {value.dtype}")


def _comparable_numbers(tx: Transform) -> dict[str, object]:
    """Return the current hyperparameters of a transform by dotted name, such as "muon.momentum"."""
    cache = tx.derived
    if "numbers" not in cache:
        cache["numbers"] = dict(parts_of(tx))
    if not tx.tensors:
        return cache["numbers"]
    return {name: _comparable(number) for name, number in cache["numbers"].items()}


def _comparable_extra(value: Any) -> object:
    """Return a value for ranks to compare, for an extra argument: a number, a description, or one for each leaf."""
    # A transform that takes a mapping, such as `qk_clip`, reduces its values over ranks: they may differ.
    if isinstance(value, Mapping):
        leaves = zip(tree.names(value), tree.leaves(value), strict=True)
        return {name: _kind_of_leaf(leaf) for name, leaf in leaves}
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return _comparable(value)
    return _Text(type(value).__qualname__)


def _kind_of_leaf(leaf: object) -> object:
    """Return the shape and dtype of a tensor as one tuple, or the name of the type of another value."""
    if isinstance(leaf, Tensor):
        return *leaf.shape, leaf.dtype
    return type(leaf).__qualname__
