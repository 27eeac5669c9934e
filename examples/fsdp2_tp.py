"""FSDP2 with tensor parallelism: train with Muon, save, and resume on another number of processes.

Run the first command, then the second; the second continues where the first has stopped, on half as many processes::

    torchrun --nproc-per-node 4 examples/fsdp2_tp.py --steps 20
    torchrun --nproc-per-node 2 examples/fsdp2_tp.py --steps 40

The mesh has two dims: the processes of one ``tp`` group divide each matrix of a block among them, and FSDP2 divides
what is left over the ``dp`` dim. Muon needs no argument for this: it computes each update on the whole matrix, once, so
the losses are those of one process up to rounding. A step has two micro-batches, clips the gradients by their norm, and
is skipped if the norm is NaN or infinite. The example runs on CPUs (gloo) and on GPUs (nccl).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import muonfx as mfx

WIDTH = 64
SYMBOLS = 32
BATCH = 32
MICRO_BATCHES = 2
LOG_EVERY = 5
SAVE_EVERY = 10


class Block(nn.Module):
    """A multilayer perceptron with a residual connection. ``up`` is divided by rows, ``down`` by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width) to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predict the symbol that follows a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, SYMBOLS, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map symbols (batch) int64 to logits (batch, symbols)."""
        x = self.embed(symbols)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Divide the blocks over the ``tp`` dim of the mesh, then everything over its ``dp`` dim."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def optimizer_of(model: Model) -> mfx.TransformOptimizer:
    """Return Muon and AdamW, with clipping, a monitor of the norm before it, and steps skipped if the norm is NaN.

    The chain clips, because torch's ``clip_grad_norm_`` requires all parameters on one mesh.
    """
    tx = mfx.chain(
        mfx.monitor("grad", ("norm",)),
        mfx.clip_by_global_norm(1.0),
        mfx.Muon.transform_for(model, 0.003, adamw_lr=0.012),
    )
    return mfx.TransformOptimizer(model, mfx.skip_nonfinite(tx))


def micro_batches_of(step: int, part: int, parts: int) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches in one part of the batch of a step: symbols, and the symbol that follows each."""
    generator = torch.Generator().manual_seed(step)
    symbols = torch.randint(SYMBOLS, (BATCH,), generator=generator).chunk(parts)[part]
    return [(micro_batch, (5 * micro_batch + 3) % SYMBOLS) for micro_batch in symbols.chunk(MICRO_BATCHES)]


def backward(model: Model, micro_batches: list[tuple[Tensor, Tensor]], device: str) -> Tensor:
    """Add up the gradients of the mean loss of some micro-batches. Return this loss."""
    loss_of_step = torch.zeros((), device=device)
    for index, (symbols, targets) in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        model.set_requires_gradient_sync(is_last)  # the processes exchange gradients once in a step
        loss = F.cross_entropy(model(symbols.to(device)), targets.to(device)) / len(micro_batches)
        loss.backward()
        loss_of_step += loss.detach()
    return loss_of_step


def means_over(group: dist.ProcessGroup, losses: list[Tensor]) -> list[float]:
    """Return the mean of each loss over the processes of a group. On a GPU, this waits for the steps."""
    if not losses:
        return []
    totals = torch.stack(losses)
    dist.all_reduce(totals, group=group)
    return (totals / group.size()).tolist()


def print_step(optimizer: mfx.TransformOptimizer, done: int, loss: float) -> None:
    """Print a line of the log, on the first process."""
    if dist.get_rank() == 0:
        norm = float(mfx.metrics(optimizer)["grad/norm"])
        rate = optimizer.param_groups[0]["lr"]
        skipped = int(optimizer.transform_state.in_a_row)
        print(f"step {done}: loss {loss:.4f}, norm {norm:.3f}, rate {rate:.4f}, skipped in a row {skipped}", flush=True)


def train(folder: Path, steps: int) -> list[float]:
    """Train until ``steps`` steps are done, from the latest checkpoint in ``folder`` if there is one.

    Returns:
        The loss of each step that this call has taken.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    processes = dist.get_world_size()
    tensor_parallel = 2 if processes % 2 == 0 else 1
    mesh = init_device_mesh(device, (processes // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)  # all processes begin with the same weights
    model = Model().to(device)
    shard(model, mesh)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)

    params = dict(model.named_parameters())
    first_step = 0
    latest = mfx.checkpoint.latest(folder)
    if latest is not None:
        mfx.checkpoint.load(latest, optimizer, params=params, scheduler=scheduler)
        first_step = mfx.checkpoint.inspect(latest).step or 0

    losses: list[Tensor] = []
    data_parallel = mesh["dp"].get_group()
    for step in range(first_step, steps):
        micro_batches = micro_batches_of(step, data_parallel.rank(), data_parallel.size())
        losses.append(backward(model, micro_batches, device))
        optimizer.step()
        done = step + 1
        if done % LOG_EVERY == 0:
            [loss] = means_over(data_parallel, losses[-1:])
            print_step(optimizer, done, loss)
        scheduler.step()
        optimizer.zero_grad()
        if done % SAVE_EVERY == 0 or done == steps:
            path = mfx.checkpoint.step_path(folder, done)
            mfx.checkpoint.save(path, optimizer, params=params, scheduler=scheduler, step=done, keep=2)
    return means_over(data_parallel, losses)


def main() -> None:
    """Read the command line, and train on the processes that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of the whole run (default: 20)")
    parser.add_argument("--folder", type=Path, default=Path("runs/fsdp2-tp"), help="folder of the checkpoints")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")  # with gloo, the host does not wait for the GPU in a step
    else:
        dist.init_process_group("gloo")
    train(arguments.folder, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
