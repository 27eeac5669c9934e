"""Twelve chains, one model, and ten steps of each: in one process, offloaded, under FSDP2 and under ZeRO.

The values of each run were recorded once. `python -m tests.trajectories.test_trajectories` records them again, which is
right only for a change that is meant to change the bits. With `--add`, it adds the digests of this kind of machine to
the recorded ones; run that on the commit before a change.
"""

import hashlib
import json
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import muonfx as mfx
from muonfx import sharding
from tests.processes import Here, World

FOLDER = Path(__file__).parent
STEPS, RANKS = 10, 2
FLOAT32 = torch.float32

# Distinct shapes: matrices of one shape are multiplied in one batch, which may change the last bit.
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (10, 6),
    "attn.qkv.weight": (18, 6),
    "mlp.up.weight": (14, 8),
    "mlp.down.weight": (8, 12),
    "mlp.up.bias": (14,),
    "norm.weight": (6,),
}
LABELS = {
    name: "muon" if len(shape) == 2 and "embed" not in name else "adamw"
    for name, shape in SHAPES.items()
}
MATRICES = {name: label == "muon" for name, label in LABELS.items()}
FUSED = mfx.MatrixView({"*.qkv.weight": "(part=3 out) in -> part out in"})


def on_matrices(matrices: mfx.Transform, rest: mfx.Transform | None = None) -> mfx.Transform:
    """A transform for the hidden matrices, and another one, Adam by default, for all other parameters."""
    return mfx.partition({"muon": matrices, "adamw": rest or mfx.scale_by_adam(0.9, 0.95)}, LABELS)


def downhill(*transforms: mfx.Transform, rate: Any = 0.05) -> mfx.Transform:
    return mfx.chain(*transforms, mfx.scale_by_learning_rate(rate))


def muon(**options: Any) -> mfx.Transform:
    return mfx.muon(
        0.05, weight_decay=0.1, orthogonalize=mfx.orthogonalize(dtype=FLOAT32, **options)
    )


# Made when called: each entry is independent of the others' names and arguments.
CHAINS: dict[str, Callable[[], mfx.Transform]] = {
    "muon_with_adamw": lambda: mfx.muon_with_adamw(
        0.05, 0.01, labels=LABELS, orthogonalize=mfx.orthogonalize(dtype=FLOAT32)
    ),
    "muon_in_blocks": lambda: on_matrices(muon(view=FUSED), mfx.adamw(0.01)),
    "muon_in_bfloat16": lambda: on_matrices(
        mfx.muon(0.05, orthogonalize=mfx.orthogonalize(dtype=torch.bfloat16)), mfx.adamw(0.01)
    ),
    "normuon": lambda: on_matrices(
        mfx.normuon(0.05, orthogonalize=mfx.orthogonalize(dtype=FLOAT32)), mfx.adamw(0.01)
    ),
    "adamw_scheduled": lambda: mfx.adamw(
        mfx.warmup_cosine_decay_schedule(0.05, 3, 10), mask=mfx.routing.ndim(min=2)
    ),
    "clipped_lion": lambda: mfx.chain(
        mfx.clip_by_global_norm(1.0), mfx.lion(0.01, weight_decay=0.1)
    ),
    "gram": lambda: downhill(
        on_matrices(mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(method="gram", dtype=FLOAT32))),
    ),
    "factored_rms": lambda: downhill(
        mfx.contrib.scale_by_factored_rms(), mfx.clip_by_block_rms(1.0), mfx.momentum(0.9)
    ),
    "adam_in_eight_bits": lambda: downhill(
        mfx.scale_by_adam(mu_dtype=mfx.int8(), nu_dtype=mfx.int8())
    ),
    "accumulated": lambda: mfx.accumulate(
        mfx.muon_with_adamw(0.05, labels=LABELS, orthogonalize=mfx.orthogonalize(dtype=FLOAT32)), 2
    ),
    "injected_and_averaged": lambda: mfx.chain(
        mfx.skip_nonfinite(
            mfx.as_tensors(
                mfx.muon_with_adamw(
                    0.05, labels=LABELS, orthogonalize=mfx.orthogonalize(dtype=FLOAT32)
                )
            )
        ),
        mfx.ema_params(0.9),
    ),
    "momentum_on_a_schedule": lambda: downhill(
        on_matrices(
            mfx.chain(
                mfx.momentum(mfx.linear_schedule(0.5, 0.95, 6)), mfx.orthogonalize(dtype=FLOAT32)
            )
        ),
        mfx.add_decayed_weights(0.1, MATRICES),
        rate=mfx.linear_schedule(0.1, 0.0, 10),
    ),
}


def drawn(turn: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 + turn)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor | None]:
    """Random gradients; one parameter has none in step 4."""
    return {
        name: None if step == 4 and name == "mlp.up.weight" else grad
        for name, grad in drawn(1 + step).items()
    }


# ----------------------------------------------------------------------------------------------- ten steps in each form


def in_one_process(tx: mfx.Transform, layout: Any = None) -> list[dict[str, Tensor]]:
    """The parameters after each step; with a layout, of which this rank holds its pieces."""
    enter, leave = (dict, dict) if layout is None else (layout.shard, layout.gather)
    params = enter(drawn(0))
    state, found = tx.init(params), []
    for step in range(STEPS):
        updates, state = tx.update(enter(gradients(step)), state, params)
        params = mfx.apply_updates(params, updates)
        found.append(leave(params))
    return found


def offloaded(tx: mfx.Transform) -> list[dict[str, Tensor]]:
    return in_one_process(sharding.offload(tx, bucket_bytes=1 << 9))


def under_zero(here: Here, name: str) -> list[dict[str, Tensor]]:
    layout = sharding.zero(drawn(0), here.group, partition="flat")
    return in_one_process(sharding.sharded(CHAINS[name](), layout), layout)


class Net(nn.Module):
    """The parameters, each under its dotted name."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in drawn(0).items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(value))


def under_fsdp2(here: Here, name: str) -> list[dict[str, Tensor]]:
    """The torch optimizer over a model that `fully_shard` has sharded."""
    net = Net()
    fully_shard(net, mesh=here.mesh)
    optimizer = mfx.TransformOptimizer(net, CHAINS[name]())
    found = []
    for step in range(STEPS):
        for path, param in net.named_parameters():
            assert isinstance(param, DTensor)
            grad = gradients(step)[path]
            param.grad = (
                None
                if grad is None
                else distribute_tensor(grad, here.mesh, param.placements, src_data_rank=None)
            )
        optimizer.step()
        found.append(
            {path: param.detach().full_tensor().clone() for path, param in net.named_parameters()}
        )
    return found


ON_RANKS: dict[str, Callable[..., Any]] = {"ZeRO": under_zero, "FSDP2": under_fsdp2}
ALONE: dict[str, Callable[..., Any]] = {"one process": in_one_process, "offloaded": offloaded}


def runs(world: World, name: str) -> dict[str, list[dict[str, Tensor]]]:
    """The parameters after each step, in each form."""
    found = {form: run(CHAINS[name]()) for form, run in ALONE.items()}
    return found | {form: world.check(RANKS, run, name=name)[0] for form, run in ON_RANKS.items()}


# ------------------------------------------------------------------------------------------------------------ recording


def machine() -> str:
    """Return the facts on which the last bits of a product depend, and a digest of a few products of torch.

    Virtual machines of one kind of CPU may still select other kernels, and only the products show it.
    """
    torch_version = torch.__version__.partition("+")[0]
    probe = hashlib.sha256()
    for value in drawn(0).values():
        if value.ndim == 2:
            for product in (
                value @ value.mT,
                value.mT @ value,
                (value.bfloat16() @ value.bfloat16().mT).float(),
            ):
                probe.update(product.contiguous().numpy().tobytes())
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{torch_version} {platform.machine()} {capability} {probe.hexdigest()[:16]}"


def digest(trajectory: list[dict[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for params in trajectory:
        for name in SHAPES:
            found.update(params[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def record(add: bool) -> None:
    world = World()
    digests: dict[str, str] = {}
    values: dict[str, Tensor] = {}
    for name in CHAINS:
        found = runs(world, name)
        # Every form gives the same bits.
        (digests[name],) = {digest(trajectory) for trajectory in found.values()}
        last = found["one process"][-1]
        values |= {f"{name}/{leaf}": value.detach().contiguous() for leaf, value in last.items()}
    world.close()
    file = FOLDER / "digests.json"
    recorded: dict[str, dict[str, str]] = json.loads(file.read_text()) if add else {}
    if not add:
        save_file(values, FOLDER / "last_parameters.safetensors")
    file.write_text(json.dumps(recorded | {machine(): digests}, indent=1) + "\n")


RECORDED = json.loads((FOLDER / "digests.json").read_text())
LAST = load_file(FOLDER / "last_parameters.safetensors")


@pytest.mark.dist
@pytest.mark.parametrize("name", CHAINS)
def test_a_recorded_trajectory_continues_bit_by_bit(world: World, name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = runs(world, name)
    for form, trajectory in found.items():
        for leaf, value in trajectory[-1].items():  # other machines round products differently
            wanted = LAST[f"{name}/{leaf}"]
            torch.testing.assert_close(
                value.detach(), wanted, rtol=5e-2, atol=5e-2, msg=lambda m, f=form: f"{f}: {m}"
            )
        # Every form gives the same bits; they are the recorded ones on a machine like a recording one.
        assert digest(trajectory) == RECORDED.get(machine(), {}).get(
            name, digest(found["one process"])
        ), form


if __name__ == "__main__":
    torch.set_num_threads(1)
    record(add="--add" in sys.argv)
