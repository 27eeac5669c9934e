"""One compiled optimizer step on paper: the kernels and bytes that torch.compile needs on a CUDA device.

`benchmarks.operations` counts a step that Python runs. Here the step of a functional chain, or of torch's optimizers,
is traced with the same fake tensors, and inductor lowers the graph and decides which operations share a kernel, as for
a real device. No code is generated, so no GPU is needed; Triton must be installed, since inductor imports it. Each node
of inductor's schedule is one operation, whose bytes are the sizes of the buffers that it reads and writes.

Inductor's patterns for attention and similar subgraphs are left out: they need a device, and no step contains one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._inductor.compile_fx as inductor
from torch import Tensor
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ForeachKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim._muon import muon
from torch.optim.adamw import adamw

import muonfx as mfx
from benchmarks import operations
from benchmarks.operations import (
    CAPABILITY,
    MODELS,
    OURS,
    OURS_WITH_KERNELS,
    TORCHS,
    Counter,
    Totals,
)

DEVICE = SimpleNamespace(
    name="H100",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=80 << 30,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
"""The properties of the device that inductor reads."""

SYMMETRIC = "symmetric_matmul"
"""The name of the operator of `muonfx.polar.quack` in a compiled graph."""


class Step(NamedTuple):
    """A step as a function of tensors, to be traced."""

    function: Callable[..., Any]
    inputs: list[Tensor]


class Kernel(NamedTuple):
    """A node of inductor's schedule."""

    flops: float
    nbytes: float
    is_product: bool


# ------------------------------------------------------------------------------------------------------------ the steps


def step_of_ours(params: dict[str, Tensor], grads: dict[str, Tensor], labels: Any) -> Step:
    """Return the step of the chain of `mfx.Muon`: gradients, state and parameters to new state and parameters."""
    tx = mfx.muon_with_adamw(1e-3, 4e-3, labels=labels, orthogonalize=mfx.orthogonalize())
    inputs, structure = mfx.tree.flatten((grads, tx.init(params), params))

    def step(*inputs: Tensor) -> list[Any]:
        grads, state, params = mfx.tree.unflatten(structure, inputs)
        updates, state = tx.update(grads, state, params)
        return mfx.tree.leaves((state, mfx.apply_updates(params, updates)))

    return Step(step, inputs)


def step_of_torch(params: dict[str, Tensor], grads: dict[str, Tensor], labels: Any) -> Step:
    """Return the step of torch.optim's Muon for the hidden matrices and AdamW for the others, both in place."""
    hidden = [name for name in params if labels[name] == "muon"]
    others = [name for name in params if labels[name] != "muon"]
    momenta = [torch.zeros_like(params[name]) for name in hidden]
    first_moments = [torch.zeros_like(params[name]) for name in others]
    second_moments = [torch.zeros_like(params[name]) for name in others]
    counts = [torch.ones((), device="cuda") for _ in others]
    lists = [
        [params[name] for name in hidden],
        [grads[name] for name in hidden],
        momenta,
        [params[name] for name in others],
        [grads[name] for name in others],
        first_moments,
        second_moments,
        counts,
    ]

    def step(*inputs: Tensor) -> list[Any]:
        remaining = iter([x.clone() for x in inputs])  # inductor drops the copies
        muon_lists = [[next(remaining) for _ in values] for values in lists[:3]]
        adamw_lists = [[next(remaining) for _ in values] for values in lists[3:]]
        muon(*muon_lists, **MUON_ARGUMENTS)
        adamw(*adamw_lists[:4], [], adamw_lists[4], **ADAMW_ARGUMENTS)
        hidden, _, momenta = muon_lists
        others, _, *moments_and_counts = adamw_lists
        return [
            *hidden,
            *momenta,
            *others,
            *[tensor for tensors in moments_and_counts for tensor in tensors],
        ]

    return Step(step, [tensor for values in lists for tensor in values])


MUON_ARGUMENTS: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.775, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": None,
    "has_complex": False,
}
ADAMW_ARGUMENTS: dict[str, Any] = {
    "foreach": True,
    "capturable": True,
    "amsgrad": False,
    "beta1": 0.9,
    "beta2": 0.999,
    "lr": 1e-3,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "maximize": False,
}

STEPS: dict[str, Callable[..., Step]] = {
    OURS: step_of_ours,
    OURS_WITH_KERNELS: step_of_ours,
    TORCHS: step_of_torch,
}


# --------------------------------------------------------------------------------------------------------- the schedule


@contextmanager
def without_device() -> Iterator[None]:
    """Let inductor lower graphs of a CUDA device that this machine lacks."""
    random_state = torch.zeros(8, dtype=torch.uint8)
    replacements: dict[str, Any] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_capability": lambda *_: CAPABILITY,
        "torch.cuda.get_device_properties": lambda *_: DEVICE,
        "torch.cuda.synchronize": lambda *_: None,
        "torch.cuda.get_rng_state": lambda *_: random_state,
        "torch.cuda.set_rng_state": lambda *_: None,
        "torch.cuda._lazy_init": lambda: None,
        # It remembers that an earlier call found no device.
        "torch._inductor.scheduler.has_triton": lambda: True,
        "torch._inductor.compile_fx._recursive_joint_graph_passes": lambda graph, *_, **__: graph,
        "torch._inductor.fx_passes.post_grad.lazy_init": lambda *_, **__: None,
    }
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch(name, replacement))
        # A build of torch for CPUs lacks this function, so that there is nothing to restore.
        stack.enter_context(
            mock.patch("torch.cuda._get_device_properties", return_value=DEVICE, create=True)
        )
        yield


def scheduled(step: Step) -> list[Kernel]:
    """Return the kernels of a step's compiled graph, in the order in which they run."""
    kernels: list[Kernel] = []

    def lower(graph_module: Any, fake_inputs: Sequence[Any], **_: Any) -> Callable[..., list[Any]]:
        inductor.record_original_output_strides(graph_module)
        inductor.view_to_reshape(graph_module)
        post_grad.post_grad_passes(graph_module, is_inference=True)
        graph = GraphLowering(graph_module, is_inference=True)
        with (
            V.set_graph_handler(graph),
            V.set_real_inputs(fake_inputs),
            V.set_debug_handler(DebugContext()),
        ):
            graph.run(*fake_inputs)
            graph._update_scheduler()
            for node in graph.scheduler.nodes:
                # The result of the node before it, which has no kernel.
                if not isinstance(node.node, MultiOutput):
                    kernels.append(kernel_of(node))
        return lambda *_: [None] * len(graph.graph_outputs)

    with mock.patch("torch.compiler.is_compiling", return_value=True):
        graph_module = make_fx(step.function)(*step.inputs)
    with without_device():
        inductor.compile_fx(graph_module, step.inputs, inner_compile=lower)(*step.inputs)
    return kernels


def kernel_of(node: Any) -> Kernel:
    """Return the FLOPs and bytes of a node of inductor's schedule."""
    nbytes = node.get_read_write_buffers_sizes() - bytes_in_registers(node)
    return Kernel(flops_of(node.node), float(nbytes), is_product(node.node))


def bytes_in_registers(node: Any) -> int:
    """Return the bytes of the values that a foreach kernel computes and uses itself, which inductor counts too."""
    if not isinstance(node, ForeachKernelSchedulerNode):
        return 0
    members = set(node.get_nodes())
    total = 0
    for member in members:
        for output in member.get_outputs():
            users = {user.node for user in output.users}
            if users <= members:
                total += (
                    math.prod(map(int, output.node.get_size())) * output.node.get_dtype().itemsize
                )
    return total


def is_product(operation: Any) -> bool:
    """Return True if an operation of inductor multiplies matrices; nodes that were fused have None."""
    return name_of(operation) in operations.PRODUCTS or name_of(operation) == SYMMETRIC


def name_of(operation: Any) -> str:
    """Return the name of an operation that inductor does not generate itself, such as "bmm"; "" for others."""
    overload = getattr(operation, "op_overload", None)
    return overload._schema.name.split("::")[1] if overload is not None else ""


def flops_of(operation: Any) -> float:
    """Return the floating-point operations of a matrix product, two for a multiply-add; 0 for other operations."""
    if not is_product(operation):
        return 0.0
    if name_of(operation) == SYMMETRIC:  # one half of p p^T
        p = operation.inputs[0]
        return float(math.prod(map(int, p.get_size())) * int(p.get_size()[-2]))
    left = operation.inputs[operations.PRODUCTS[name_of(operation)]]
    columns = int(operation.get_size()[-1])
    return 2.0 * math.prod(map(int, left.get_size())) * columns


def count(model_name: str, candidate: str) -> Totals:
    """Return the totals of a compiled step of a candidate."""
    with operations.paper_device(Counter(), symmetric_kernels=candidate == OURS_WITH_KERNELS):
        model = operations.on_paper(model_name)
        params = {name: param.detach() for name, param in model.named_parameters()}
        grads = {name: torch.empty_like(param) for name, param in params.items()}
        step = STEPS[candidate](params, grads, mfx.default_labels(model))
        return totals_of(scheduled(step))


def totals_of(kernels: Sequence[Kernel]) -> Totals:
    """Return the sums over the kernels of a step, with the time that `benchmarks.operations` estimates for each."""
    totals = Counter()
    for kernel in kernels:
        totals.add(kernel.flops, kernel.nbytes, kernel.is_product)
    return totals.totals


def counts() -> list[dict[str, Any]]:
    """Return a row for each model and candidate."""
    if find_spec("triton") is None:
        raise RuntimeError(
            "inductor lowers graphs of a CUDA device only with Triton: pip install triton"
        )
    rows: list[dict[str, Any]] = []
    for model_name in MODELS:
        for candidate in STEPS:
            totals = count(model_name, candidate)
            rows.append(
                {"model": model_name, "candidate": f"{candidate}, compiled", **totals._asdict()}
            )
            rows[-1]["least bytes"] = operations.least_bytes(model_name)
            print(rows[-1], flush=True)
    return rows
