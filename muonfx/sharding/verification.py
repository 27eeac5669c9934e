"""Comparison of the ranks when a chain is bound to a group: chains, parameters, layouts, versions, replicas."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch

from muonfx import tree
from muonfx.core import Transform, checks
from muonfx.core.precision import product_dtypes
from muonfx.polar import compute_dtype
from muonfx.polar.hardware import cpu_has_bf16
from muonfx.sharding.binding import Binding
from muonfx.sharding.consensus import (
    DTYPES,
    Facts,
    check_pieces,
    compare,
    find_difference,
    listed,
    number_of,
    warn_together,
)
from muonfx.sharding.description import captured_by, chain_text, functions_of
from muonfx.sharding.dtensors import local_of
from muonfx.sharding.layout import Layout
from muonfx.sharding.messages import ShardingError
from muonfx.sharding.replicas import verify_params
from muonfx.tree import PyTree

__all__ = ["PROBLEMS", "verify_ranks"]

PROBLEMS = (TypeError, ValueError, AttributeError, KeyError, OSError, ShardingError, Warning)
"""The errors that a caller's arguments may cause on one rank; a warning is raised under ``python -W error``."""


def verify_ranks(binding: Binding, tx: Transform, params: PyTree, problem: Exception | None = None) -> None:
    """Raise on all ranks unless they have the same chain, parameters, layout, versions and product dtypes."""
    layout = binding.layout
    try:
        checks.check_params(params)
        check_pieces(layout, params)
    except PROBLEMS as error:
        problem = problem or error
    if layout.size > 1 and layout.group is None:
        raise ShardingError(f"{layout!r} has no process group: it is only to look at and to plan with")
    local = tree.map(local_of, params)
    device = binding.store.device(tree.device_of(local))
    fastest = compute_dtype(torch.float32, device)
    if layout.group is not None and layout.size > 1:
        fastest = _compared(binding, tx, local, device, fastest, problem)
    elif problem is not None:
        raise problem
    binding.compute.setdefault(device.type, fastest)  # plans and states exist for the dtype agreed on first
    binding.likes[tx.treedef] = tree.map(lambda leaf: torch.empty_like(leaf, device="meta"), local)
    binding.compared.add(tx.treedef)


def _compared(
    binding: Binding,
    tx: Transform,
    local: PyTree,
    device: torch.device,
    fastest: torch.dtype,
    problem: Exception | None,
) -> torch.dtype:
    """Compare with the other ranks, and return the common dtype of "auto" in plans."""
    layout = binding.layout
    assert layout.group is not None
    names = zip(tree.names(local), tree.leaves(local), strict=True)
    # Computations that every rank repeats may differ in the last bit on other hardware.
    machine: Facts = {"": f"torch {torch.__version__}, {_machine(device)}"}
    captured: Facts = {"values": captured_by(tx)}
    own = compare(
        {
            "versions": {"muonfx": _version(), "Python": ".".join(platform.python_version_tuple()[:2])},
            "chains": chain_text(tx),
            "functions in their chains": functions_of(tx),
            "parameters": {name: f"{spec.shape} {spec.dtype}" for name, spec in layout.specs.items()},
            "parameters that are None": {name: "None" for name, leaf in names if leaf is None},
            "trees": str(tree.flatten(local)[1]),
            "layouts": f"{layout!r} ({layout.digest})",
            "ranks in their groups": str(torch.distributed.get_process_group_ranks(layout.group)),
            "kinds of device to compute on": device.type,
            "settings": repr(binding.settings),
            "settings of torch": _settings_of_torch(),
            # Machines may resolve "auto" differently; an explicit dtype is the same everywhere.
            'dtypes for "auto" (give each such transform a dtype, for example dtype=torch.float32)': product_dtypes(
                tx, [leaf.dtype for leaf in tree.leaves(local) if leaf is not None], device
            ),
        },
        layout.group,
        problem,
        {"dtype": DTYPES.index(fastest), "machine": number_of(machine), "captured": number_of(captured)},
    )
    if own["dtype"][0] != own["dtype"][1]:  # no transform has "auto" here, so only plans depend on it
        fastest = torch.float32
    if own["machine"][0] != own["machine"][1] and any(cut.copies for cut in layout.pieces.values()):
        odd, here, there = _told(machine, layout)
        warn_together(
            f"what each rank computes for itself may differ in the last bit: rank 0 has {here}; {odd}: {there}. "
            "The copies that ranks hold may drift apart; sharded(..., verify_every=k) compares them",
            layout.group,
        )
    if own["captured"][0] != own["captured"][1]:
        odd, here, there = _told(captured, layout)
        name = next(name for name in here if here[name] != there.get(name))
        warn_together(
            f"the function {name!r} has captured {here[name]} on rank 0 and {there.get(name)} on {odd}: if what it "
            "returns depends on that, the ranks drift apart",
            layout.group,
        )
    verify_params(layout, local)
    return fastest


def _told(facts: Facts, layout: Layout) -> tuple[str, Any, Any]:
    """Return the odd ranks of an existing difference, the value of rank 0, and the value of the odd ranks."""
    assert layout.group is not None
    found = find_difference(facts, layout.group)
    assert found is not None
    return listed(found[1]), found[2], found[3]


def _version() -> str:
    roof = sys.modules[__name__.partition(".")[0]]  # modules inside the package must not import it
    return str(getattr(roof, "__version__", "unknown"))


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        bf16 = "with" if cpu_has_bf16() else "without"
        return f"CPU with {torch.backends.cpu.get_cpu_capability()}, {bf16} bf16, {torch.get_num_threads()} threads"
    return device.type


def _settings_of_torch() -> dict[str, str]:
    return {
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "autocast": str(any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))),
    }
