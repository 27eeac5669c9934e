"""A run: what it measures, how it is shown, and how it is kept on disk.

A checkpoint (`muonfx.checkpoint`) holds parameters and optimizer state under their names, and everything else as JSON;
the newest two of a run are kept. The other files are written beside their names and then moved there, so that a run
that is killed while it writes leaves the old ones whole.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from processes import of_first, rank
from text import Corpus
from tqdm import tqdm

import muonfx as mfx
from muonfx import checkpoint

CHECKPOINTS = "checkpoints"
KEPT = 2
TRAINING = ("forward and backward", "optimizer")


@dataclass
class Run:
    """What a run has measured so far."""

    config: Any
    corpus: Corpus
    parameters: int
    train_losses: list[float] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*TRAINING, "validation", "wall"), 0.0))
    _seen: float = field(default_factory=time.perf_counter)

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.train_losses)

    @property
    def training_seconds(self) -> float:
        """Seconds spent in training steps."""
        return sum(self.seconds[part] for part in TRAINING)

    @property
    def tokens_per_second(self) -> float:
        """Bytes trained on, by second of training step."""
        return self.step * self.config.batch * self.config.context / (self.training_seconds or 1.0)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        started = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - started

    def add_validation(self, loss: float) -> None:
        """Note a validation loss, and the step and the training seconds at which it was measured."""
        self.validation.append({"step": self.step, "loss": loss, "seconds": round(self.training_seconds, 3)})

    def metrics(self) -> dict[str, Any]:
        """All that there is to tell, for a JSON file."""
        now = time.perf_counter()
        self.seconds["wall"] += now - self._seen
        self._seen = now
        shares = self.training_seconds or 1.0
        return {
            "config": dataclasses.asdict(self.config),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "muonfx": mfx.__version__},
            "text": {
                "digest": self.corpus.digest,
                "train_bytes": len(self.corpus.train),
                "train_files": len(self.corpus.train_files),
                "validation_bytes": len(self.corpus.validation),
                "validation_files": len(self.corpus.validation_files),
            },
            "parameters": self.parameters,
            "steps_done": self.step,
            "final_train_loss": self.train_losses[-1] if self.train_losses else None,
            "final_validation_loss": self.validation[-1]["loss"] if self.validation else None,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "optimizer_share_of_step": round(self.seconds["optimizer"] / shares, 4),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "validation": self.validation,
            "train_losses": self.train_losses,
        }

    def save(self, folder: Path, tx: Any, params: Any, state: Any) -> None:
        """Write a checkpoint of the step that is done; all processes together, each its pieces."""
        checkpoint.save(
            checkpoint.step_path(folder, self.step),
            state,
            tx=tx if isinstance(tx, mfx.Transform) else None,
            params=params,
            step=self.step,
            # As text: a diverged run has losses that JSON cannot hold. Of one process: all must save the same.
            extra={"metrics": of_first(json.dumps(self.metrics()))},
            keep=KEPT,
        )

    def load(self, folder: Path, tx: Any, params: Any, state: Any) -> None:
        """Fill fresh parameters and a fresh state from the newest checkpoint, and take over its history.

        However the run was shared out that wrote it, it is read as this one is.

        Raises:
            CheckpointError: the checkpoint has other tensors, belongs to another chain, or is damaged.
            ValueError: it was trained on another text. Nothing has been filled then.
        """
        path = newest(folder)
        past = read_metrics(path)
        if past["text"]["digest"] != self.corpus.digest:
            raise ValueError(f"{path} was trained on another text than is here now (another Python version?)")
        fill(path, tx, params, state)
        self.train_losses, self.validation, self.seconds = past["train_losses"], past["validation"], past["seconds"]


def fill(path: Path, tx: Any, params: Any, state: Any) -> None:
    """Overwrite parameters and state with those of a checkpoint."""
    own = tx if isinstance(tx, mfx.Transform) else None
    saved = (checkpoint.load_params(path, like=params, tx=own), checkpoint.load(path, like=state, tx=own))
    mfx.tree.map(lambda fresh, old: fresh if fresh is None else fresh.copy_(old), (params, state), saved)


def newest(folder: Path) -> Path:
    """The newest good checkpoint in a folder.

    Raises:
        NotFoundError: there is none.
    """
    path = checkpoint.latest(folder)
    if path is None:
        raise checkpoint.NotFoundError(f"there is no checkpoint in {folder}")
    return path


def read_metrics(path: Path) -> dict[str, Any]:
    """Read the metrics in a checkpoint, and none of its tensors."""
    return json.loads(checkpoint.inspect(path).extra["metrics"])


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all; a list of numbers takes one line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a question to ask between steps, so that no step is left half done; the second ends at once.

    Not under torchrun, which passes on to its processes what they have got from the terminal already.
    """
    pressed: list[int] = []

    def handle(number: int, frame: Any) -> None:
        pressed.append(number)
        if "RANK" not in os.environ:
            signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress_bar(run: Run) -> Iterator[Callable[[float], None]]:
    """Show a bar; what it yields takes the learning rate of the step that is done."""
    name = f"{run.config.optimizer:<10}"
    with tqdm(
        total=run.config.steps, initial=run.step, desc=name, unit="step", dynamic_ncols=True, disable=rank() > 0
    ) as bar:

        def show(lr: float) -> None:
            parts = [f"loss {run.train_losses[-1]:.3f}", f"lr {lr:.1e}", f"{run.tokens_per_second / 1e3:.1f}k tok/s"]
            parts += [f"val {run.validation[-1]['loss']:.3f}"] if run.validation else []
            bar.set_postfix_str(", ".join(parts), refresh=False)
            bar.update()

        yield show


def cores(most: int = 4) -> int:
    """How many threads to use: what OMP_NUM_THREADS says, else the cores that this process may use, up to ``most``."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:  # a container's share of the machine; threads beyond it only wait for each other
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        usable = min(usable, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return min(usable, most)
