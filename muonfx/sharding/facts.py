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
from muonfx.sharding.binding import Binding, Progress, by_structure
from muonfx.sharding.communication.differences import Facts
from muonfx.sharding.digests import digest
from muonfx.sharding.shards.remembered import remembered
from muonfx.sharding.state import describe_state
from muonfx.tree import PyTree

# ----------------------------------------------------------------------------------------------------------- of a step

# The subjects of facts, as errors name them. Some have advice in parentheses.
_TRANSFORMS = "transforms and their arguments"
_NUMBERS = "numbers in their chains"
_ORDER = "sharded transforms or optimizers in this step (all ranks must step them in the same order)"
_COMPLETED = (
    "numbers of completed steps (a rank has gone on after an error inside its step, so its parameters and state are "
    "old: load one checkpoint on all ranks)"
)
_EXTRAS = "extra arguments, such as value=loss; reduce them first"
_AUTO_DTYPES = 'dtypes for "auto" (give each such transform a dtype, for example dtype=torch.float32)'
_LIBRARIES = 'libraries of symmetric products (polar.explain has the reason; give products="batched")'
_DTYPES = "dtypes of parameters (convert the model on all ranks, or on none)"
_HAS_PARAMS = "arguments: some give params, some do not"
_LOADS = "states (load on all ranks, or on none)"
_COUNTERS = "numbers in their states"


class _PreparedFacts(NamedTuple):
    """The values that `facts_of_step` needs in every step. They are computed in the first step of a transform only."""

    transforms: str
    """The digest of `facts_of_transforms`."""
    state_size: int
    """The number of leaves of the state."""
    counter_indices: dict[str, int]
    """The index in the state of each leaf without a parameter, such as a counter: ``{"2.scale_by_adam.count": 4}``."""


def facts_of_step(binding: Binding, progress: Progress, tx: Transform, call: Arguments) -> Facts:
    """Return the values that must be equal on all ranks in a step, by the subject that an error names.

    For example, "numbers in their chains" is ``{"muon.momentum": 0.95}``. The ranks compare one hash of all values. If
    rank 1 has another momentum, the error is "the ranks have different numbers in their chains: ...".

    Args:
        binding: runs transforms over the ranks.
        progress: counts the steps of the transform or optimizer that is stepped.
        tx: the transform with its current numbers.
        call: the arguments of the step, with local tensors.
    """
    prepared = _prepare_facts(binding, tx, call.like)  # computed once, for all steps
    counters = _leaves_without_parameter(prepared, call.state)
    step = _step_of(counters, progress)
    schedules = _values_of_schedules(tx, step)
    dtypes = [getattr(leaf, "dtype", None) for leaf in tree.leaves(call.params)]
    loaded = "loaded" if progress.has_loaded else "not loaded"
    return {
        # The transform, and how often it was stepped.
        _TRANSFORMS: prepared.transforms,
        _ORDER: f"number {progress.serial} of the group",
        _HAS_PARAMS: call.params is not None,
        _DTYPES: _digest_of_dtypes(binding, tuple(dtypes)),
        _LOADS: f"{loaded} since the last step",
        _COMPLETED: progress.completed,
        # The numbers with which it computes this step.
        _NUMBERS: {**_comparable_numbers(tx), **schedules},
        _EXTRAS: _comparable_extras(tx, call.extras),
        _COUNTERS: {name: comparable(counter) for name, counter in counters.items()},
    }


def _step_of(counters: Mapping[str, Any], progress: Progress) -> int:
    """Return the number of the step at which schedules are compared: the largest counter of the state.

    Without counters, it is the number of completed steps.
    """
    host_counters = filter(is_host_counter, counters.values())
    return max(map(int, host_counters), default=progress.completed)


def facts_as_texts(binding: Binding, tx: Transform, call: Arguments, facts: Facts) -> Facts:
    """Return `facts_of_step` for an error, with the texts of which it has digests. Called only if the ranks differ."""
    dtypes = {name: str(leaf.dtype) for name, leaf in tree.named_leaves(call.params) if leaf is not None}
    return {**facts_of_transforms(binding, tx, call.like), **facts, _DTYPES: dtypes}


@by_structure  # remembers the result for the next steps
def _prepare_facts(binding: Binding, tx: Transform, params: PyTree) -> _PreparedFacts:
    """Return the values that `facts_of_step` needs in every step: a digest of transforms, and the indices of counters.

    The digest is a short hash, which ranks compare in place of long texts. The values of counters change in each step,
    but not where they are in the state.
    """
    placements = describe_state(binding, tx, params)  # for each leaf of the state, the parameter to which it belongs
    counter_indices: dict[str, int] = {}
    for index, placement in enumerate(placements):
        if placement is not None and placement.name is None:  # the leaf belongs to no parameter
            counter_indices[placement.path] = index
    transforms = digest(facts_of_transforms(binding, tx, params))
    return _PreparedFacts(transforms, len(placements), counter_indices)


@remembered
def _digest_of_dtypes(binding: Binding, dtypes: tuple[torch.dtype | None, ...]) -> str:
    """Return a digest of the dtypes of this rank's parameters. The binding remembers it for the next steps."""
    return digest(dtypes)


def _leaves_without_parameter(prepared: _PreparedFacts, state: PyTree) -> dict[str, Any]:
    """Return the leaves of a state that belong to no parameter, such as ``{"2.scale_by_adam.count": tensor(7)}``.

    A wrong state, with another number of leaves than `init` returns, is no error here: it may be on this rank only. If
    so, the ranks differ in the text "5 leaves", which is compared in place of the counters, and all of them raise.
    """
    leaves = tree.leaves(state)
    is_of_another_transform = len(leaves) != prepared.state_size
    if is_of_another_transform:
        return {"": f"{len(leaves)} leaves"}
    return {name: leaves[index] for name, index in prepared.counter_indices.items()}


def _values_of_schedules(tx: Transform, step: int) -> dict[str, float]:
    """Return the value of each schedule in the arguments of a transform, at a step.

    For example, ``{"3.scale_by_learning_rate.learning_rate": 0.02}``.
    """
    if "schedules" not in tx.derived:  # a dict that is kept for the next steps
        tx.derived["schedules"] = _find_schedules(tx)
    schedules = tx.derived["schedules"]
    count = torch.tensor(float(step), dtype=torch.float64)
    return {name: float(schedule(count)) for name, schedule in schedules.items()}


def _find_schedules(tx: Transform) -> dict[str, Callable[[Tensor], Any]]:
    """Return the schedules among the arguments of a transform and of those that it calls, by their names.

    A name is the number of the transform, its name and the argument: "3.scale_by_learning_rate.learning_rate".
    """
    schedules: dict[str, Callable[[Tensor], Any]] = {}
    for index, inner in enumerate(within(tx)):
        types_of = inner.factory.definition.accepted_types  # by argument, its types, such as {"float", "Schedule"}
        for name, value in inner.arguments.items():
            # A function is a schedule if its argument may be one: ``learning_rate=lambda step: 0.1 / (1 + step)``.
            is_function_as_schedule = callable(value) and "Schedule" in types_of[name]
            if isinstance(value, Schedule) or is_function_as_schedule:
                full_name = f"{index}.{inner.name}.{name}"
                schedules[full_name] = value
    return schedules


def is_host_counter(leaf: object) -> bool:
    """Return True for a 0-d int64 tensor on the CPU, which can be read without waiting for a device."""
    return isinstance(leaf, Tensor) and leaf.dtype == torch.int64 and not leaf.ndim and leaf.device.type == "cpu"


# ------------------------------------------------------------------------------------------------------ of a transform


def facts_of_binding(binding: Binding, tx: Transform, local: PyTree) -> Facts:
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
        _NUMBERS: _comparable_numbers(tx),
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
        "transforms of a parameter": {name: ", ".join(titles) for name, titles in titles_of.items()},
        "chains": chains,
    }


def _text_of_argument(value: object) -> str:
    """Return a text for an argument of a transform, such as "momentum(decay=0.0, nesterov=True, ...)".

    All functions share the text "a function". Their code cannot be compared, but ranks compare their results.
    """
    if isinstance(value, Recorded):  # a transform, or another value that has recorded its arguments
        arguments = [f"{name}={_text_of_argument(argument)}" for name, argument in value.arguments.items()]
        return f"{value.factory.__name__}({', '.join(arguments)})"
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return "a function"
    return text_of(value, _text_of_argument)  # of a list or dict, it calls this function for each item


def _texts_of_state(binding: Binding, tx: Transform, local: PyTree) -> dict[str, str]:
    """Return the shape, dtype and owners of each tensor of the state: ``"(4, 4) torch.float32, owners [0]"``."""
    texts: dict[str, str] = {}
    for placement in describe_state(binding, tx, local):
        if placement is not None:
            owners = [shard.owner for shard in placement.shards]
            texts[placement.path] = f"{placement.shape} {placement.dtype}, owners {owners}"
    return texts


def _versions() -> dict[str, str]:
    package = sys.modules[__name__.partition(".")[0]]  # modules inside the package must not import it
    return {"muonfx": str(getattr(package, "__version__", "unknown")), "torch": str(torch.__version__)}


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


# -------------------------------------------------------------------------------------------------------------- values

SMALL = 64
"""Values of a CPU tensor are compared at every step if it has at most this number of elements."""


def comparable(value: object) -> object:
    """Return a value for ranks to compare: a number or text, or a description. It never syncs with a GPU.

    >>> comparable(0.5), comparable(torch.tensor(3)), comparable(torch.zeros(100))
    (0.5, '3 of torch.int64', 'a tensor (100,) of torch.float32')
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, Tensor):
        return type(value).__qualname__
    # To read values on another device would wait for it. They are compared when replicas are verified.
    is_on_cpu = value.device.type == "cpu"
    if is_on_cpu and value.numel() <= SMALL:
        return f"{value.tolist()} of {value.dtype}"
    return f"a tensor {tuple(value.shape)} of {value.dtype}"


def _comparable_numbers(tx: Transform) -> dict[str, object]:
    """Return the current hyperparameters of a transform by dotted name, such as "muon.momentum"."""
    cache = tx.derived
    if "numbers" not in cache:
        cache["numbers"] = dict(parts_of(tx))
    if not tx.tensors:
        return cache["numbers"]
    return {name: comparable(number) for name, number in cache["numbers"].items()}


def _comparable_extras(tx: Transform, extras: Mapping[str, Any]) -> dict[str, object]:
    """Return a value for ranks to compare for each leaf of the extra arguments, by its name.

    For ``value=0.5`` and ``hessian={"w": tensor}`` it is ``{"hessian.w": "a tensor (100,) of torch.float32",
    "value": 0.5}``. Where the values may differ between ranks, the ranks compare shapes and dtypes only.
    """
    equal_leaves = equal_leaves_of_extras(tx, extras)
    texts: dict[str, object] = {}
    for name, leaf in tree.named_leaves(dict(extras)):  # sorted: ranks may pass them in different orders
        if name in equal_leaves:
            texts[name] = comparable(leaf)
        else:
            texts[name] = _kind_of_leaf(leaf)
    return texts


def equal_leaves_of_extras(tx: Transform, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of the extra arguments that must be equal on all ranks, by a name such as "hessian.w".

    A transform that takes ``max_over_ranks``, such as `qk_clip`, reduces its other arguments over ranks. They may
    differ, unless another transform reads them without reducing them.
    """
    if not extras:  # as in most steps
        return {}
    reduced: set[str] = set()
    not_reduced: set[str] = set()
    for inner in within(tx):
        reduces_over_ranks = "max_over_ranks" in inner.extras.named
        if reduces_over_ranks:
            reduced |= inner.extras.named
        else:
            not_reduced |= inner.extras.named
    may_differ = reduced - not_reduced
    equal_extras = {name: value for name, value in extras.items() if name not in may_differ}
    return dict(tree.named_leaves(equal_extras))


def _kind_of_leaf(leaf: object) -> object:
    """Return the shape and dtype of a tensor as one tuple, or the name of the type of another value."""
    if isinstance(leaf, Tensor):
        return *leaf.shape, leaf.dtype
    return type(leaf).__qualname__
