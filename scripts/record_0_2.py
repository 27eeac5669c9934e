"""Record what muonfx wrote before one executor carried out its chains, so that it is held to going on from there.

    python scripts/record_0_2.py

was run once, at commit 50332ad, and wrote tests/checkpoint/recorded_0_2/. It refuses to run where there is an executor.
Chains, parameters and gradients are those of `record_0_1`; for each there is a checkpoint after three steps, and what
two more steps made of the state and the parameters.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
from pathlib import Path

import record_0_1 as recording
import torch

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "checkpoint" / "recorded_0_2"
CHAINS = ("muon", "normuon", "adamw_scheduled", "muon_with_adamw", "wrapped", "partition_by_name")


def main() -> None:
    if importlib.util.find_spec("muonfx.program") is not None:
        raise SystemExit("this records muonfx as it was before muonfx.program")
    recording.FOLDER = FOLDER
    recording.CHAINS = {name: recording.CHAINS[name] for name in CHAINS}
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    recording.record_checkpoints()
    cases = {
        "torch": torch.__version__,
        "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
        "steps": [recording.BEFORE, recording.AFTER],
        "shapes": recording.SHAPES,
        "chains": recording.CHAINS,
    }
    (FOLDER / "cases.json").write_text(json.dumps(cases, indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
