"""Worker that takes steps with one version of muonfx; started by `benchmarks.versions` for each version.

It runs as a script with the checkout of its version on the path. Each line of JSON on standard input is a request, and
is answered by a line of JSON. This file may only use names that are public in both versions, and nothing else of
`benchmarks`.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

import muonfx as mfx

RATE = 0.02


class Case(NamedTuple):
    """A case: interface, model, layout and state of the measured step."""

    face: str
    """"optimizer": `muonfx.Muon` or, if offloaded, `muonfx.TransformOptimizer`. "function": `Transform.update`."""
    model: str
    """"small": many small leaves. "large": few large matrices."""
    layout: str = "one process"
    """"one process", or on two ranks "FSDP2", "replicated" or "zero flat"."""
    state: str = ""
    """Empty, or the store of an offloaded state, "cpu" or "disk"."""
    change: str = ""
    """"new rate": another learning rate at each step. "two groups": two parameter groups with different rates."""

    @property
    def name(self) -> str:
        """The name in tables, which ``--cases`` selects by."""
        away = {"": "", "cpu": "offloaded to host memory", "disk": "offloaded to disk"}[self.state]
        return ", ".join(
            filter(None, (self.layout, self.face, f"{self.model} leaves", away, self.change))
        )

    @property
    def ranks(self) -> int:
        """The number of processes that take the step together."""
        return 1 if self.layout == "one process" else 2

    @property
    def steps(self) -> int:
        """The number of timed steps per round."""
        return 3 if self.model == "small" else 1


class Sizes(NamedTuple):
    """Sizes of the models, and of the buckets of an offloaded state."""

    layers: int = 150
    """Layers of the small model, each with a square matrix and a vector."""
    width: int = 16
    squares: int = 8
    wides: int = 2
    """Number of matrices that are four times as wide as tall."""
    side: int = 512
    buckets: int = 6
    """Approximate number of buckets."""

    def model(self, name: str) -> nn.Module:
        """Return a model with the same parameters each time, without gradients."""
        torch.manual_seed(0)
        if name == "small":
            return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.layers)))
        matrices = [nn.Linear(self.side, self.side, bias=False) for _ in range(self.squares)]
        matrices += [nn.Linear(self.side, 4 * self.side, bias=False) for _ in range(self.wides)]
        return nn.Sequential(*matrices, nn.LayerNorm(self.side))


class Stepper(NamedTuple):
    """A prepared case."""

    step: Callable[[], object]
    params: Callable[[], Iterable[Tensor]]
    """Returns this rank's shards of the parameters."""


def prepare(case: Case, sizes: Sizes, folder: Path) -> Stepper:
    """Create the parameters, gradients and state of a case."""
    model = sizes.model(case.model)
    labels = {
        name: "muon" if param.ndim == 2 else "adamw" for name, param in model.named_parameters()
    }
    grads: Mapping[str, Tensor] = {
        name: torch.randn_like(param) for name, param in model.named_parameters()
    }
    if case.layout == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        placed = {
            name: param for name, param in model.named_parameters() if isinstance(param, DTensor)
        }
        grads = {
            name: distribute_tensor(grad, mesh, placed[name].placements)
            for name, grad in grads.items()
        }
    tx = mfx.muon_with_adamw(RATE, labels=labels)
    if case.state:
        bytes_of_state = sum(param.nbytes for param in model.parameters())
        tx = mfx.sharding.offload(
            tx,
            str(folder) if case.state == "disk" else "cpu",
            bucket_bytes=bytes_of_state // sizes.buckets,
        )
    if case.face == "optimizer":
        return _optimizer(case, model, grads, labels, tx)
    return _function(case, model, grads, tx)


def _optimizer(
    case: Case, model: nn.Module, grads: Mapping[str, Tensor], labels: Any, tx: mfx.Transform
) -> Stepper:
    params = dict(model.named_parameters())
    for name, param in params.items():
        param.grad = grads[name]
    given: Any = params.items()
    if case.change == "two groups":
        pairs = list(params.items())
        half = len(pairs) // 2
        given = [{"params": pairs[:half]}, {"params": pairs[half:], "lr": RATE / 2}]
    optimizer = (
        mfx.TransformOptimizer(given, tx) if case.state else mfx.Muon(given, lr=RATE, labels=labels)
    )

    def step() -> None:
        if case.change == "new rate":
            for group in optimizer.param_groups:
                group["lr"] *= 0.999
        optimizer.step()

    return Stepper(step, params.values)


def _function(
    case: Case, model: nn.Module, grads: Mapping[str, Tensor], tx: mfx.Transform
) -> Stepper:
    held: Any = {name: param.detach() for name, param in model.named_parameters()}
    if case.layout == "replicated":
        of_params = (
            "params" in inspect.signature(mfx.sharding.replicated).parameters
        )  # older versions take no params here
        tx = mfx.sharding.sharded(tx, mfx.sharding.replicated(*([held] if of_params else [])))
    elif case.layout == "zero flat":
        layout = mfx.sharding.zero(held, partition="flat", tx=tx)
        tx = mfx.sharding.sharded(tx, layout)
        held, grads = layout.shard(held), layout.shard(grads)
    elif case.layout == "FSDP2":
        tx = mfx.sharding.sharded(tx, mfx.sharding.from_dtensors(held))
    state = tx.init(held)
    rates = {name: RATE for name in mfx.hyperparams(tx) if name.endswith("learning_rate")}
    turn = 0

    def step() -> None:
        nonlocal held, state, turn
        now = tx
        if case.change == "new rate":
            turn += 1
            now = mfx.with_hyperparams(
                tx, {name: rate * 0.999**turn for name, rate in rates.items()}
            )
        updates, state = now.update(grads, state, held, donate=mfx.Donation(state=True))
        held = mfx.apply_updates(held, updates, donate=True)

    return Stepper(step, lambda: mfx.tree.leaves(held))


def digest(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of the bits of some float32 tensors in their order."""
    found = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        bits = local.detach().flatten().view(torch.int32).long()
        found = 31 * found + int((bits * torch.arange(1, 1 + len(bits))).sum())
    return found % (1 << 61)


def times(stepper: Stepper, steps: int) -> list[float]:
    """Return the seconds of some steps, after one that is not timed and fills the caches of the processor."""
    found: list[float] = []
    for _ in range(1 + steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        stepper.step()
        found.append(time.perf_counter() - start)
    return found[1:]


def serve(rank: int, ranks: int, folder: Path, checkout: Path, threads: int) -> None:
    """Answer requests until the end of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not be read as an answer
    found = Path(mfx.__file__).resolve()
    if not found.is_relative_to(checkout.resolve()):
        raise RuntimeError(f"found muonfx in {found}, expected it in {checkout}")
    torch.set_num_threads(threads)
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
        )
    stepper = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any = None
        if "prepare" in asked:
            stepper = None  # free the memory of the previous case first
            stepper = prepare(Case(*asked["prepare"]), Sizes(*asked["sizes"]), folder)
        elif stepper is None:
            raise RuntimeError(
                f"found the request {line!r}, expected a request to prepare a case first"
            )
        elif "steps" in asked:
            answer = times(stepper, asked["steps"])
        else:
            answer = digest(stepper.params())
        print(json.dumps(answer), file=answers, flush=True)
    if ranks > 1:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort while the interpreter exits


if __name__ == "__main__":
    serve(
        int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5])
    )
