"""A run: its measurements, its progress bar and its files.

A checkpoint (`muonfx.checkpoint`) holds parameters and optimizer state by name, and everything else as JSON. The newest
two of a run are kept. Other files are written under a temporary name and then renamed, so that a run that is killed
while it writes leaves the old files intact.
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
from processes import from_rank_0, rank
from text import Corpus
from tqdm import tqdm

import muonfx as mfx
from muonfx import checkpoint

CHECKPOINTS = "checkpoints"
KEPT = 2
TRAINING = ("forward and backward", "optimizer")


@dataclass
class Run:
    """The measurements of a run so far."""

    config: Any
    corpus: Corpus
    parameters: int
    train_losses: list[float] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*TRAINING, "validation", "wall"), 0.0))
    _seen: float = field(default_factory=time.perf_counter)

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return len(self.train_losses)

    @property
    def training_seconds(self) -> float:
        """Seconds spent in training steps."""
        return sum(self.seconds[part] for part in TRAINING)

    @property
    def tokens_per_second(self) -> float:
        """Bytes trained on per second of training steps."""
        return self.step * self.config.batch * self.config.context / (self.training_seconds or 1.0)

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Add the seconds of the ``with`` block to a category of ``seconds``."""
        started = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - started

    def add_validation(self, loss: float) -> None:
        """Record a validation loss with the current step and training seconds."""
        self.validation.append({"step": self.step, "loss": loss, "seconds": round(self.training_seconds, 3)})

    def metrics(self) -> dict[str, Any]:
        """Return all measurements, for metrics.json."""
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
        """Write a checkpoint of the completed step. All processes must call this; each writes its shards."""
        checkpoint.save(
            checkpoint.step_path(folder, self.step),
            state,
            tx=tx if isinstance(tx, mfx.Transform) else None,
            params=params,
            step=self.step,
            # As text, because the JSON of a checkpoint cannot hold the infinite losses of a diverged run.
            # From rank 0, because `extra` must be equal on all ranks.
            extra={"metrics": from_rank_0(json.dumps(self.metrics()))},
            keep=KEPT,
        )

    def load(self, folder: Path, tx: Any, params: Any, state: Any) -> None:
        """Load parameters, state and measurements from the newest checkpoint, written under any sharding strategy.

        Raises:
            CheckpointError: the checkpoint has other tensors, belongs to another chain, or is damaged.
            ValueError: the run was trained on another text. Nothing is changed in this case.
        """
        path = newest(folder)
        past = read_metrics(path)
        if past["text"]["digest"] != self.corpus.digest:
            raise ValueError(
                f"{path}: found another text than when this run began, expected the same: "
                "resume it with the same --text or Python version"
            )
        fill(path, tx, params, state)
        self.train_losses, self.validation, self.seconds = past["train_losses"], past["validation"], past["seconds"]


def fill(path: Path, tx: Any, params: Any, state: Any) -> None:
    """Overwrite parameters and state in place with the values of a checkpoint."""
    own = tx if isinstance(tx, mfx.Transform) else None
    saved = (checkpoint.load_params(path, like=params, tx=own), checkpoint.load(path, like=state, tx=own))
    mfx.tree.map(lambda fresh, old: fresh if fresh is None else fresh.copy_(old), (params, state), saved)


def newest(folder: Path) -> Path:
    """Return the newest complete checkpoint in a folder.

    Raises:
        NotFoundError: the folder has no checkpoint.
    """
    path = checkpoint.latest(folder)
    if path is None:
        raise checkpoint.NotFoundError(f"there is no checkpoint in {folder}")
    return path


def read_metrics(path: Path) -> dict[str, Any]:
    """Read the metrics of a checkpoint, without its tensors."""
    return json.loads(checkpoint.inspect(path).extra["metrics"])


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, with one line per top-level key."""
    lines = [f"  {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


@contextmanager
def ctrl_c() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after Ctrl-C, so that a run stops between two steps.

    The second Ctrl-C stops at once, except under torchrun, which forwards each Ctrl-C and so delivers it twice.
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
    """Show a progress bar. Yield a function that advances it by a step and takes the learning rate of that step."""
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
    """Return the number of threads: OMP_NUM_THREADS if set, else the available cores, at most ``most``."""
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:  # the CPU quota of a container; more threads would only wait for each other
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        usable = min(usable, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return min(usable, most)
