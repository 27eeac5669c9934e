"""Record eight steps of another optimizer, to test checkpoint conversions without installing it.

Set TORCHDYNAMO_DISABLE=1 and run one of

    python scripts/record_conversions.py keller PATH/TO/muon.py
    python scripts/record_conversions.py moonlight PATH/TO/examples/toy_train.py
    python scripts/record_conversions.py dion PATH/TO/dion

This runs the original code on the parameters and gradients below. It writes the state after three steps, and the
parameters after three and after eight steps, to tests/checkpoint/convert/recorded/. Stubs replace other imports of the
original files. fp32 replaces bf16, because bf16's relative error of about 1/200 could hide a wrong momentum.
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
    """Return flat lists of normal numbers for every parameter, which depend on the name ``what`` alone."""
    found = {}
    for name, shape in SHAPES.items():
        generator = random.Random(f"{what}/{name}")
        count = 1
        for side in shape:
            count *= side
        found[name] = [round(generator.gauss(0, 1), 6) for _ in range(count)]
    return found


def gradients(step: int) -> dict[str, list[float]]:
    """Return the gradients of a step."""
    return values(f"step {step}")


class _Recorder:
    """A torch optimizer on named parameters, with a record of its steps."""

    def __init__(self, make: Any) -> None:
        import torch

        self.torch = torch
        torch.bfloat16 = torch.float32
        torch.Tensor.bfloat16 = torch.Tensor.float
        start = values("parameters")
        self.params = {
            name: torch.nn.Parameter(torch.tensor(start[name]).view(shape))
            for name, shape in SHAPES.items()
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
        return [
            name for param in group["params"] for name, own in self.params.items() if own is param
        ]


def _plain(value: Any) -> Any:
    """Replace tensors by lists, for JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _import(path: str, stubs: tuple[str, ...] = ()) -> Any:
    # It inspects imported modules and fails on stubs, so it comes first.
    importlib.import_module("torch._dynamo")
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

    return _Recorder(make).record("https://github.com/KellerJordan/Muon 857d1adc muon.py")


def moonlight(path: str) -> dict[str, Any]:
    module = _import(path, ("loguru", "datasets", "transformers", "tqdm"))

    def make(p: Any) -> Any:
        return module.Muon(
            lr=NUMBERS["lr"], wd=0.1, muon_params=[p["up"], p["down"]], adamw_params=[p["bias"]]
        )

    return _Recorder(make).record(
        "https://github.com/MoonshotAI/Moonlight c2ad5b20 examples/toy_train.py"
    )


def dion(path: str) -> dict[str, Any]:
    sys.path.insert(0, str(Path(path).parent))
    module = importlib.import_module("dion.muon")

    def make(p: Any) -> Any:
        scalars = {"params": [p["bias"]], "algorithm": "adamw", "lr": NUMBERS["adam_lr"]}
        return module.Muon(
            [{"params": [p["up"], p["down"]]}, scalars],
            lr=NUMBERS["lr"],
            nesterov=True,
            weight_decay=0.1,
        )

    return _Recorder(make).record("https://github.com/microsoft/dion 0a059a45 dion/muon.py")


def main() -> None:
    kind, *path = sys.argv[1:]
    makers = {"keller": keller, "moonlight": moonlight, "dion": dion}
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{json.dumps(key)}: {json.dumps(value)}" for key, value in makers[kind](*path).items()
    ]
    (FOLDER / f"{kind}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
