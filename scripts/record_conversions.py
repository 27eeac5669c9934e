"""Record eight steps of another optimizer, to check conversions where it cannot be installed.

With TORCHDYNAMO_DISABLE=1,

    python scripts/record_conversions.py keller PATH/TO/muon.py
    python scripts/record_conversions.py moonlight PATH/TO/examples/toy_train.py
    python scripts/record_conversions.py dion PATH/TO/dion
    python scripts/record_conversions.py deepspeed PATH/TO/deepspeed/runtime/zero/muon
    python scripts/record_conversions.py optax

runs the original's own code on the parameters and gradients below and writes its state after three steps, and its
parameters after three and after eight, into tests/checkpoint/convert/recorded/.
What else those files import is replaced by stubs,
and bf16 by fp32: to one rounding in two hundred, a wrong momentum can look right.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "checkpoint" / "convert" / "recorded"
SHAPES = {"up": (6, 4), "down": (4, 7), "bias": (5,)}
BEFORE, AFTER = 3, 5
NUMBERS = {"lr": 0.03, "weight_decay": 0.1, "adam_lr": 0.01}


def values(what: str) -> dict[str, list[float]]:
    """Normal numbers for every parameter, flat; a function of a name alone."""
    found = {}
    for name, shape in SHAPES.items():
        generator = random.Random(f"{what}/{name}")
        count = 1
        for side in shape:
            count *= side
        found[name] = [round(generator.gauss(0, 1), 6) for _ in range(count)]
    return found


def gradients(step: int) -> dict[str, list[float]]:
    """The gradients of a step."""
    return values(f"step {step}")


class _Steps:
    """Runs torch optimizers over named parameters."""

    def __init__(self, make: Any) -> None:
        import torch

        self.torch = torch
        torch.bfloat16 = torch.float32
        torch.Tensor.bfloat16 = torch.Tensor.float
        start = values("parameters")
        self.params = {
            name: torch.nn.Parameter(torch.tensor(start[name]).view(shape)) for name, shape in SHAPES.items()
        }
        self.optimizer = make(self.params)

    def run(self, steps: range) -> None:
        for step in steps:
            for name, flat in gradients(step).items():
                self.params[name].grad = self.torch.tensor(flat).view(SHAPES[name])
            self.optimizer.step()

    def weights(self) -> dict[str, list[float]]:
        return {name: param.detach().flatten().tolist() for name, param in self.params.items()}

    def record(self, source: str) -> dict[str, Any]:
        self.run(range(BEFORE))
        saved, middle = _plain(self.optimizer.state_dict()), self.weights()
        self.run(range(BEFORE, BEFORE + AFTER))
        return {
            "source": source,
            "torch": self.torch.__version__,
            "names": [name for group in self.optimizer.param_groups for name in self._names(group)],
            "state_dict": saved,
            "params": middle,
            "state_dict_after": _plain(self.optimizer.state_dict()),
            "params_after": self.weights(),
        }

    def _names(self, group: Any) -> list[str]:
        return [name for param in group["params"] for name, own in self.params.items() if own is param]


def _plain(value: Any) -> Any:
    """Tensors as lists, for JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _import(path: str, stubs: tuple[str, ...] = ()) -> Any:
    importlib.import_module("torch._dynamo")  # looks at what is imported, and does not know stubs
    for name in stubs:
        sys.modules.setdefault(name, MagicMock())
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def keller(path: str) -> dict[str, Any]:
    module = _import(path)
    matrix = {"use_muon": True, "lr": NUMBERS["lr"], "weight_decay": NUMBERS["weight_decay"]}
    rest = {"use_muon": False, "lr": NUMBERS["adam_lr"], "weight_decay": 0.05}

    def make(p: Any) -> Any:
        groups = [{"params": [p["bias"]], **rest}, {"params": [p["up"], p["down"]], **matrix}]
        return module.SingleDeviceMuonWithAuxAdam(groups)

    return _Steps(make).record("https://github.com/KellerJordan/Muon 857d1adc muon.py")


def moonlight(path: str) -> dict[str, Any]:
    module = _import(path, ("loguru", "datasets", "transformers", "tqdm"))

    def make(p: Any) -> Any:
        return module.Muon(lr=NUMBERS["lr"], wd=0.1, muon_params=[p["up"], p["down"]], adamw_params=[p["bias"]])

    return _Steps(make).record("https://github.com/MoonshotAI/Moonlight c2ad5b20 examples/toy_train.py")


def dion(path: str) -> dict[str, Any]:
    sys.path.insert(0, str(Path(path).parent))
    module = importlib.import_module("dion.muon")

    def make(p: Any) -> Any:
        scalars = {"params": [p["bias"]], "algorithm": "adamw", "lr": NUMBERS["adam_lr"]}
        return module.Muon(
            [{"params": [p["up"], p["down"]]}, scalars], lr=NUMBERS["lr"], nesterov=True, weight_decay=0.1
        )

    return _Steps(make).record("https://github.com/microsoft/dion 0a059a45 dion/muon.py")


def deepspeed(path: str) -> dict[str, Any]:
    """Its ZeRO stages call muon_update on whole matrices and give the result to the optimizer as the gradient."""
    import torch

    accelerator, compiler = MagicMock(), MagicMock()
    accelerator.get_accelerator().is_bf16_supported = accelerator.get_accelerator().is_fp16_supported = lambda: False
    compiler.compile = lambda *_, **__: lambda function: function
    runtime = MagicMock(compiler=compiler)
    names = {"deepspeed": MagicMock(), "deepspeed.comm": MagicMock(), "deepspeed.runtime": runtime}
    sys.modules.update({**names, "deepspeed.accelerator": accelerator, "deepspeed.runtime.compiler": compiler})
    for part in ("deepspeed.runtime.zero", "deepspeed.runtime.zero.muon"):
        sys.modules[part] = MagicMock()
    original = _import(f"{path}/original_muon.py")
    sys.modules["deepspeed.runtime.zero.muon.original_muon"] = original
    module = _import(f"{path}/muon_optimizer.py")

    class Zero:
        """One rank of ZeRO: a momentum for each matrix, as the engine keeps it."""

        def __init__(self, p: Any) -> None:
            groups = [
                {"params": [p["up"], p["down"]], "use_muon": True, "lr": NUMBERS["lr"], "weight_decay": 0.1},
                {"params": [p["bias"]], "use_muon": False, "lr": NUMBERS["adam_lr"], "weight_decay": 0.1},
            ]
            self.inner = module.MuonWithAuxAdam(groups)
            self.param_groups = self.inner.param_groups
            self.momenta = {name: torch.zeros_like(p[name]) for name in ("up", "down")}
            self.params = p

        def step(self) -> None:
            for name, buffer in self.momenta.items():
                self.params[name].grad = original.muon_update(self.params[name].grad, buffer.detach(), 0.95)
            self.inner.step()

        def state_dict(self) -> dict[str, Any]:
            found = {name: {"momentum_buffer": buffer.flatten()} for name, buffer in self.momenta.items()}
            return {**found, "bias": dict(self.inner.state[self.params["bias"]])}

    return _Steps(Zero).record("https://github.com/deepspeedai/DeepSpeed edaa7221 deepspeed/runtime/zero/muon")


def optax(_: str = "") -> dict[str, Any]:
    """Kernels are stored as Flax does, transposed; jax and optax must be installed, torch need not."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax as library

    def arrays(flat: dict[str, list[float]]) -> Any:
        shaped = {name: np.asarray(flat[name], np.float32).reshape(SHAPES[name]) for name in SHAPES}
        return {name: jnp.asarray(leaf.T if leaf.ndim == 2 else leaf) for name, leaf in shaped.items()}

    tx = library.contrib.muon(NUMBERS["lr"], weight_decay=0.1, adam_weight_decay=0.05)
    params = arrays(values("parameters"))
    state = tx.init(params)
    found: dict[str, Any] = {"source": f"optax {library.__version__} optax.contrib.muon", "jax": jax.__version__}
    for step in range(BEFORE + AFTER):
        updates, state = tx.update(arrays(gradients(step)), state, params)
        params = library.apply_updates(params, updates)
        if step + 1 in (BEFORE, BEFORE + AFTER):
            suffix = "" if step + 1 == BEFORE else "_after"
            inner = state.inner_states
            muon, adam = inner["muon"].inner_state[0], inner["adam"].inner_state[0]
            found[f"muon{suffix}"] = {
                "count": int(muon.count),
                "mu": {name: np.asarray(muon.mu[name]).tolist() for name in ("up", "down")},
                "ns_coeffs": np.asarray(muon.ns_coeffs).tolist(),
            }
            found[f"adam{suffix}"] = {
                "count": int(adam.count),
                **{key: {"bias": np.asarray(getattr(adam, key)["bias"]).tolist()} for key in ("mu", "nu")},
            }
            found[f"params{suffix}"] = {name: np.asarray(leaf.T).flatten().tolist() for name, leaf in params.items()}
    return found


def main() -> None:
    kind, *path = sys.argv[1:]
    makers = {"keller": keller, "moonlight": moonlight, "dion": dion, "deepspeed": deepspeed, "optax": optax}
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in makers[kind](*path).items()]
    (FOLDER / f"{kind}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
