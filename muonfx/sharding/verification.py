"""Comparison of the ranks when a program is bound to a layout: everything that must be equal on all of them."""

from __future__ import annotations

import functools
import inspect
import sys

import torch

from muonfx import tree
from muonfx.core import Transform, checks
from muonfx.core.identity import text_of
from muonfx.core.precision import product_dtypes
from muonfx.core.recorded import Recorded, parts_of
from muonfx.program.nodes import Program
from muonfx.program.offload.store import OffloadStore
from muonfx.sharding.binding import Binding
from muonfx.sharding.consensus import Facts, agree, check_pieces
from muonfx.sharding.dtensors import local_of
from muonfx.sharding.messages import ShardingError, digest
from muonfx.sharding.state import describe_state
from muonfx.tree import PyTree

__all__ = ["numbers_of", "program_digest", "program_facts", "verify_ranks"]


def verify_ranks(binding: Binding, tx: Transform, params: PyTree, problem: Exception | None = None) -> None:
    """Raise on all ranks unless they have the same program, parameters, layout, settings and versions."""
    layout = binding.layout
    facts: Facts = {}
    if layout.size > 1 and layout.group is None:
        raise ShardingError(f"{layout!r} has no process group: it is only to look at and to plan with")
    try:
        checks.check_params(params)
        check_pieces(layout, params)
        local = tree.map(local_of, params)
        binding.likes[tx.treedef] = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), local)
        if layout.size > 1 and problem is None:
            facts = _facts(binding, tx, local)
    except Exception as error:  # perhaps on this rank only: raised on all ranks together
        problem = problem or error
    if layout.group is not None and layout.size > 1:
        same = {subject: digest(fact) for subject, fact in facts.items()}
        agree("binding a transform to a layout", layout.group, problem, same=same, explain=lambda: facts)
    elif problem is not None:
        raise problem


def _facts(binding: Binding, tx: Transform, local: PyTree) -> Facts:
    """Return all that must be equal on all ranks, in the order in which differences are reported."""
    layout, device = binding.layout, binding.store.device(tree.device_of(local))
    present = {name: leaf for name, leaf in zip(tree.names(local), tree.leaves(local), strict=True) if leaf is not None}
    described = describe_state(binding, tx, local)
    names_of_state = tree.names(binding.executor.init(tx, binding.local_like(local)))
    return {
        "versions": {"muonfx": _version(), "torch": str(torch.__version__)},
        "parameters": {name: f"{spec.shape} {spec.dtype}" for name, spec in layout.specs.items()},
        "parameters that are None": {name: "None" for name in tree.names(local) if name not in present},
        "trees": str(tree.flatten(local)[1]),
        "layouts": f"{layout!r} ({layout.digest})",
        "ranks in their groups": str(torch.distributed.get_process_group_ranks(layout.group)),
        "kinds of device to compute on": device.type,
        **program_facts(binding, tx, local),
        "numbers in their chains": numbers_of(tx),
        "settings": repr(binding.settings),
        "stores of the state": _store(binding),
        "settings of torch": _settings_of_torch(),
        # Machines may resolve "auto" differently; an explicit dtype is the same everywhere.
        'dtypes for "auto" (give each such transform a dtype, for example dtype=torch.float32)': product_dtypes(
            tx, [leaf.dtype for leaf in present.values()], device
        ),
        "states": {
            name: "None" if what is None else f"{what.shape} {what.dtype}, owners {[s.owner for s in what.shares]}"
            for name, what in zip(names_of_state, described, strict=True)
        },
    }


def program_facts(binding: Binding, tx: Transform, params: PyTree) -> Facts:
    """Describe the lowered program: the transforms of each parameter, and the transforms with masks as resolved."""
    transforms: dict[str, str] = {}
    of_each: dict[str, list[str]] = {}
    for place, node in enumerate(Program(binding.executor.program(tx, params)).transforms()):
        where = f"{place} {node.numbers or node.title}"
        transforms[where] = f"{node.kind} {_text(tree.map(lambda _: 0.0, node.tx))}"
        for name in node.names:
            of_each.setdefault(name, []).append(node.numbers or node.title)
    return {
        "transforms of a parameter": {name: ", ".join(titles) for name, titles in of_each.items()},
        "chains": transforms,
    }


def program_digest(binding: Binding, tx: Transform, params: PyTree) -> str:
    """Return a digest of `program_facts`, computed once for each structure and set of names."""
    key = ("program", tx.treedef, tuple(tree.names(params)))
    if key not in binding.derived:
        binding.derived[key] = digest(program_facts(binding, tx, params))
    return binding.derived[key]


def _text(value: object) -> str:
    """Describe a transform by its factory and arguments; functions count by their results, not by their code."""
    if isinstance(value, Recorded):
        return f"{value.factory.__name__}({', '.join(f'{k}={_text(v)}' for k, v in value.arguments.items())})"
    if inspect.isroutine(value) or isinstance(value, functools.partial):
        return "a function"
    return text_of(value, _text)


def numbers_of(tx: Transform) -> dict[str, str]:
    """Describe the current hyperparameters of a transform, by dotted name."""
    return {name: number_text(number) for name, number in parts_of(tx)}


SMALL = 64
"""The largest number of elements of a CPU tensor whose values are compared at every step."""


def number_text(value: object) -> str:
    """Describe a number by a text, without a device sync."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    # Values on a device are compared when replicas are verified.
    if value.device.type != "cpu" or value.numel() > SMALL:
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return f"{value.tolist()} of {value.dtype}"


def _store(binding: Binding) -> str:
    store = binding.store
    if not isinstance(store, OffloadStore):
        return "in memory with the parameters"
    place = "in host memory" if store.folder is None else "on disk"
    return f"offloaded, {place}, in buckets of {store.bucket_bytes} bytes"


def _version() -> str:
    roof = sys.modules[__name__.partition(".")[0]]  # modules inside the package must not import it
    return str(getattr(roof, "__version__", "unknown"))


def _settings_of_torch() -> dict[str, str]:
    return {
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "autocast": str(any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))),
    }
