"""Record what muonfx 0.1 wrote, so that every later version is held to reading it.

    python scripts/record_0_1.py

was run once, on 0.1 as it stood at commit aadbd13, and wrote tests/checkpoint/recorded_0_1/. It refuses to run on any
later version: the point of the files is that they do not follow the code. For each chain of `cases.json` there is a
checkpoint after three steps, and what two more steps made of the state and the parameters. Gradients are Python's own
random numbers, which no version of torch can change.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from hypothesis import HealthCheck, Phase, given, seed, settings
from safetensors.torch import save_file
from torch.distributed.tensor import Shard, distribute_tensor

import muonfx as mfx
from muonfx.recorded import Recorded
from muonfx.testing.transforms import arguments, by_rank, chains, halve

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "checkpoint" / "recorded_0_1"
SHAPES = {
    "mixed": {"embed.weight": (8, 4), "blocks.0.up.weight": (6, 4), "blocks.0.up.bias": (6,), "scale": ()},
    "matrices": {"blocks.0.qkv.weight": (6, 4), "blocks.0.experts": (2, 4, 3)},
    # as torch.compile, activation checkpointing and DistributedDataParallel name them
    "compiled": {
        "_orig_mod.embed.weight": (8, 4),
        "_orig_mod.blocks.0._checkpoint_wrapped_module.up.weight": (6, 4),
        "_orig_mod.blocks.0._checkpoint_wrapped_module.up.bias": (6,),
    },
    "parallel": {"module.embed.weight": (8, 4), "module.blocks.0.up.weight": (6, 4), "module.blocks.0.up.bias": (6,)},
}
BEFORE, AFTER = 3, 2

# name -> (parameters, code of the chain)
CHAINS = {
    "muon": ("matrices", "muon(0.1, dtype=torch.float32)"),
    "muon_plain": ("matrices", "muon(0.1, nesterov=False, rule='original', weight_decay=0.1, dtype=torch.float32)"),
    "muon_scheduled": ("matrices", "muon(warmup_cosine(0.1, 2, 8), dtype=torch.float32)"),
    "normuon": ("matrices", "normuon(0.1, dtype=torch.float32)"),
    "adamw": ("mixed", "adamw(0.1)"),
    "adamw_scheduled": ("mixed", "adamw(warmup_stable_decay(0.1, 1, 2, 9), mask=select.ndim(min=2))"),
    "lion": ("mixed", "lion(0.1)"),
    "muon_with_adamw": ("mixed", "muon_with_adamw(0.1, 0.01, dtype=torch.float32)"),
    "muon_with_adamw_scheduled": (
        "mixed",
        "muon_with_adamw(cosine(0.1, 9), linear(0.1, 0.01, 9), dtype=torch.float32)",
    ),
    "partition": (
        "mixed",
        "chain(clip_by_global_norm(1.0), partition({'muon': chain(momentum(), orthogonalize(dtype=torch.float32), "
        "scale_by_shape()), 'adamw': scale_by_adam(0.9, 0.95)}, default_labels), add_decayed_weights(0.1), "
        "scale_by_learning_rate(0.1))",
    ),
    "partition_by_name": (
        "mixed",
        "partition({'a': scale_by_adam(), 'b': momentum()}, {'embed.weight': 'a', 'blocks.0.up.weight': 'b', "
        "'blocks.0.up.bias': 'a', 'scale': None})",
    ),
    "masked": ("mixed", "chain(masked(momentum(), select.ndim(min=2)), cautious(scale_by_lion()), scale(-0.1))"),
    "injected": ("mixed", "inject_hyperparams(chain(momentum(0.8), scale_by_learning_rate(0.1)))"),
    "accumulate": ("mixed", "accumulate(chain(scale_by_adam(), scale(-0.1)), 2)"),
    "wrapped": ("mixed", "skip_nonfinite(master_params(chain(momentum(), scale(-0.1)), torch.float64))"),
    "averaged": ("mixed", "chain(scale_by_adam(mu_dtype=torch.bfloat16), scale(-0.1), ema_params(0.9))"),
    "int8": ("mixed", "chain(momentum(dtype=int8(4, min_size=0)), scale(-0.1))"),
    "int8_stochastic": (
        "mixed",
        "chain(scale_by_adam(mu_dtype=int8(4, code='dynamic', min_size=0, stochastic=True, seed=3), nu_dtype=int8(5, "
        "min_size=6)), scale(-0.1))",
    ),
    "fp8": ("mixed", "chain(momentum(dtype=fp8(4, format='e5m2', min_size=0)), scale(-0.1))"),
    "named": (
        "mixed",
        "chain(('first', momentum(heavy_ball=True)), ('second', chain(momentum(debias=True), momentum(dtype=None), "
        "momentum(0.5))), clip_by_value(1.0), clip_by_block_rms(1.0), monitor('seen'), scale(-0.1))",
    ),
    "neurons": (
        "matrices",
        "chain(normalize_neurons(0.9), scale_by_schedule(join([constant(-0.1), linear(-0.1, 0.0, 4)], [2])))",
    ),
    "blocks": (
        "matrices",
        "chain(momentum(), orthogonalize(coefficients='keller', steps=5, blocks={'*.qkv.*': 3}, dtype=torch.float32), "
        "scale(-0.1))",
    ),
    "compiled": ("compiled", "muon_with_adamw(0.1, 0.01, dtype=torch.float32)"),
    "parallel": ("parallel", "muon_with_adamw(0.1, 0.01, dtype=torch.float32)"),
    "nothing": ("mixed", "chain(identity(), set_to_zero(), stateless(halve))"),
}
OPTIMIZERS = (
    "muon",
    "muon_with_adamw",
    "muon_with_adamw_scheduled",
    "partition_by_name",
    "injected",
    "int8",
    "wrapped",
    "compiled",
    "parallel",
)
SHARDED = ("partition", "adamw", "named")

NAMES: dict[str, Any] = {**vars(mfx), "torch": torch, "halve": halve, "by_rank": by_rank}


def values(what: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Normal numbers, a function of the text alone."""
    draw = random.Random(what)
    return torch.tensor([draw.gauss(0, 1) for _ in range(prod(shape))], dtype=torch.float32).reshape(shape)


def params_of(kind: str) -> dict[str, torch.Tensor]:
    return {name: values(f"params/{name}", shape) for name, shape in SHAPES[kind].items()}


def grads_of(kind: str, step: int) -> dict[str, torch.Tensor]:
    return {name: values(f"grads/{step}/{name}", shape) for name, shape in SHAPES[kind].items()}


def steps(tx: Any, kind: str, params: Any, state: Any, which: range) -> tuple[Any, Any]:
    for step in which:
        updates, state = tx.update(grads_of(kind, step), state, params)
        params = mfx.apply_updates(params, updates)
    return params, state


def named(state: Any, params: Any) -> dict[str, torch.Tensor]:
    """Leaves by their names in a checkpoint, from a checkpoint: the one code that knows."""
    with tempfile.TemporaryDirectory() as folder:
        return mfx.checkpoint.read(mfx.checkpoint.save(folder, state, params=params))


def record_checkpoints() -> None:
    for name, (kind, code) in CHAINS.items():
        tx = eval(code, dict(NAMES))
        params = params_of(kind)
        params, state = steps(tx, kind, params, tx.init(params), range(BEFORE))
        mfx.checkpoint.save(
            FOLDER / "checkpoints" / name, state, tx=tx, params=params, step=BEFORE, extra={"lr": 0.1, "seeds": [1, 2]}
        )
        params, state = steps(tx, kind, params, state, range(BEFORE, BEFORE + AFTER))
        save_file(named(state, params), FOLDER / "checkpoints" / name / "after")


def record_optimizer(name: str) -> None:
    kind, code = CHAINS[name]
    params = {key: torch.nn.Parameter(value) for key, value in params_of(kind).items()}
    optimizer = mfx.TransformOptimizer(params, eval(code, dict(NAMES)))

    def run(which: range) -> None:
        for step in which:
            for key, grad in grads_of(kind, step).items():
                # what the labels leave out has no gradient
                params[key].grad = None if (name, key) == ("partition_by_name", "scale") else grad
            optimizer.step()

    run(range(BEFORE))
    model = {key: param.detach().clone() for key, param in params.items()}
    torch.save({"optimizer": optimizer.state_dict(), "model": model}, FOLDER / "optimizers" / f"{name}.pt")
    run(range(BEFORE, BEFORE + AFTER))
    after = {"model/" + key: param.detach().clone() for key, param in params.items()}
    for index, held in optimizer.state_dict()["state"].items():
        after |= {f"state/{index}/{key}": leaf.clone() for key, leaf in held.items()}
    save_file(after, FOLDER / "optimizers" / f"{name}.after")


def save_sharded(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

    def flat(leaf: torch.Tensor) -> Any:
        if not leaf.ndim:
            return leaf
        bounds = [0, leaf.numel() // 2 + 1, leaf.numel()]
        return mfx.checkpoint.FlatPiece.cut(leaf, bounds[rank], bounds[rank + 1])

    def rows(leaf: torch.Tensor) -> Any:
        return distribute_tensor(leaf, mesh, [Shard(0)], src_data_rank=None) if leaf.ndim else leaf

    for name in SHARDED:
        kind, code = CHAINS[name]
        tx = eval(code, dict(NAMES))
        params = params_of(kind)
        params, state = steps(tx, kind, params, tx.init(params), range(BEFORE))
        for how, cut in (("flat", flat), ("rows", rows)):
            mfx.checkpoint.save(
                FOLDER / "sharded" / f"{name}-{how}",
                mfx.tree.map(cut, state),
                tx=tx,
                params=mfx.tree.map(cut, params),
                step=BEFORE,
                group=dist.group.WORLD,
            )
    dist.destroy_process_group()


def record_fingerprints(number: int = 400) -> None:
    found: dict[str, str] = {}

    def note(tx: Any) -> None:
        assert eval(repr(tx), {**vars(mfx.select), **vars(mfx.polar), **NAMES}) == tx, tx
        found[repr(tx)] = tx.fingerprint

    for _, code in CHAINS.values():
        note(eval(code, dict(NAMES)))
    for place, strategy in enumerate([*arguments().values(), chains(max_size=3, matrices=True)]):

        @seed(place)
        @settings(
            max_examples=number // 30, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        @given(strategy)
        def draw(drawn: Any) -> None:
            note(mfx.chain(*drawn) if isinstance(drawn, list) else drawn)

        draw()
    (FOLDER / "fingerprints.json").write_text(json.dumps(dict(sorted(found.items())), indent=0))


def record_signatures() -> None:
    """Where each factory lay, and its arguments with what their defaults were called in a fingerprint."""
    from muonfx.recorded import _HOLE, _structure

    found: dict[str, Any] = {}
    for module in [module for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == "muonfx"]:
        for factory in vars(module).values():
            if not hasattr(factory, "constructor") or factory.__module__ != module.__name__:
                continue
            called: dict[str, str | None] = {}
            for name, parameter in factory.parameters.items():
                default = parameter.default
                if parameter.kind is parameter.VAR_POSITIONAL:
                    default = ()
                if isinstance(default, float) or (type(default) is int and "float" in str(parameter.annotation)):
                    default = _HOLE
                called[name] = None if default is parameter.empty else _structure(default)
            found[f"{factory.__module__}.{factory.__qualname__}"] = called
    (FOLDER / "signatures.json").write_text(json.dumps(found, indent=1))


def main() -> None:
    if mfx.__version__ != "0.1.0" or mfx.momentum().fingerprint.startswith("2:"):
        raise SystemExit("this records muonfx 0.1, and what is installed here is a later version")
    assert issubclass(type(mfx.momentum()), Recorded)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    record_checkpoints()
    (FOLDER / "optimizers").mkdir()
    for name in OPTIMIZERS:
        record_optimizer(name)
    store = tempfile.mktemp()
    torch.multiprocessing.spawn(save_sharded, args=(store,), nprocs=2)
    record_fingerprints()
    record_signatures()
    cases = {
        "torch": torch.__version__,
        "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "steps": [BEFORE, AFTER],
        "shapes": SHAPES,
        "chains": CHAINS,
        "optimizers": OPTIMIZERS,
        "sharded": SHARDED,
    }
    (FOLDER / "cases.json").write_text(json.dumps(cases, indent=1))
    print(sum(os.path.getsize(path) for path in FOLDER.rglob("*") if path.is_file()), "bytes")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
