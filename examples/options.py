"""The configuration of a run, and the command line that sets it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import sharded
import torch
from gpt import HEAD
from runs import CHECKPOINTS, cores, newest, read_metrics
from sharded import STRATEGIES
from text import Corpus, NoText, read_corpus

import muonfx as mfx
from muonfx import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Dtypes of momentum and of AdamW's two moments. AdamW divides small first moments by small roots, so the first moment
# needs quantization levels near zero. Second moments change slowly, so they are rounded stochastically.
STATE_DTYPES = {
    "fp32": (torch.float32,) * 3,
    "bf16": (torch.bfloat16,) * 3,
    "int8": (mfx.int8(), mfx.int8(code="dynamic"), mfx.int8(stochastic=True)),
    "fp8": (mfx.fp8(), mfx.fp8(), mfx.fp8(stochastic=True)),
}

# Peak learning rates of the hidden matrices and of all other parameters, from a grid search (see README.md).
TUNED = {"muon": (0.01, 0.06), "adamw": (0.005, 0.06), "normuon": (0.01, 0.06), "torch-muon": (0.01, 0.06)}
RANK = int(os.environ.get("RANK", "0"))  # set by torchrun
COMPARED = ("muon", "adamw")  # the default of --optimizer


@dataclass(frozen=True)
class Config:
    """All settings that the result of a run depends on. Checkpoints store it, and ``--resume`` reads it from there."""

    optimizer: str = "muon"
    lr: float = TUNED["muon"][0]
    rest_lr: float = TUNED["muon"][1]
    weight_decay: float = 0.1
    max_norm: float = 1.0
    steps: int = 120
    batch: int = 16
    context: int = 256
    width: int = 128
    depth: int = 4
    dtype: str = "fp32"
    state_dtype: str = "fp32"
    seed: int = 0
    validate_every: int = 10
    validation_batches: int = 4
    threads: int = 2
    text: str = ""  # "": the standard library


DEFAULT = Config()
QUICK = {"steps": 40, "batch": 8, "context": 64, "width": 64, "depth": 2, "validate_every": 10, "validation_batches": 4}


def tuned(config: Config, optimizer: str) -> Config:
    """Return the same configuration for another optimizer, with the learning rates tuned for that optimizer."""
    lr, rest_lr = TUNED[optimizer]
    return dataclasses.replace(config, optimizer=optimizer, lr=lr, rest_lr=rest_lr)


def parse(arguments: list[str] | None) -> tuple[Config, Corpus, Path, Path, argparse.Namespace]:
    """Parse the command line and read the text, or exit with code 2 and an error of one line.

    No files are written. In the last result, ``optimizer`` is the list of optimizers to train with.
    """
    parser = _parser()
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    given = {name: value for name, value in vars(options).items() if name in DEFAULT.__dataclass_fields__}
    names = list(dict.fromkeys(given.pop("optimizer", ("muon",) if options.shard or options.offload else COMPARED)))
    if "state_dtype" in given and "torch-muon" in names:
        parser.error("--state-dtype: torch-muon always uses the dtype of the parameters: leave out --state-dtype")
    _check_shard(parser, options, names, words)
    if options.offload and (len(names) > 1 or "torch-muon" in names):
        parser.error("--offload requires exactly one optimizer of muonfx: choose --optimizer muon, adamw or normuon")
    if given.get("width", HEAD) % HEAD:
        parser.error(f"--width: found {given['width']}, expected a multiple of {HEAD}, the width of an attention head")

    name = f"{'quick' if options.quick else 'gpt'}-{options.shard or '-'.join(names)}"
    out = getattr(options, "out", Path("runs") / name)
    kept = getattr(options, "checkpoint", out / CHECKPOINTS)
    if options.resume and not any(checkpoint.checkpoints(kept / name) for name in names):
        config = _resumed(parser, kept, given | ({"optimizer": " ".join(names)} if "optimizer" in options else {}))
        names = [config.optimizer]
    else:
        if len(names) > 1 and (clash := sorted(given.keys() & {"lr", "rest_lr"})):
            found = " and ".join(map(_flag, clash))
            parser.error(f"{found}: found {len(names)} optimizers, expected one: choose it, as with --optimizer muon")
        changes: dict[str, Any] = (QUICK if options.quick else {}) | given
        config = dataclasses.replace(tuned(DEFAULT, names[0]), threads=cores(), **changes)
    options.optimizer = names
    try:
        corpus = read_corpus(Path(config.text) if config.text else None)
        check_sizes(config, corpus, int(os.environ.get("WORLD_SIZE", "1")), options.shard)
    except (NoText, ValueError) as problem:
        parser.error(str(problem))
    return config, corpus, out, kept, options


def prepare(out: Path, kept: Path, *, resume: bool) -> None:
    """Create the folder of a run. Unless the run is resumed, remove the checkpoints of an older run.

    Raises:
        ValueError: the folder cannot be created.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ValueError(f"--out {out}: {problem.strerror}") from None
    if not resume and RANK == 0:
        for folder in [kept, *(kept / name for name in TUNED)]:
            for stale in checkpoint.checkpoints(folder):
                shutil.rmtree(stale)  # a later --resume must find the checkpoints of this run only


def check_sizes(config: Config, corpus: Corpus, processes: int, shard: str | None) -> None:
    """Check the sizes of a run before anything is written or computed.

    Raises:
        ValueError: the context is longer than the text, the model does not fit into the memory of this machine, or the
            sizes are not divisible by the number of processes.
    """
    most = min(len(corpus.train), len(corpus.validation)) - 2
    if config.context > most:
        raise ValueError(f"--context: found {config.context}, expected at most {most}, the length of the shorter text")
    if shard is not None:
        heads = config.width // HEAD
        sharded.check_processes(shard, processes, heads=heads, batch=config.batch, context=config.context)
    need, have = bytes_needed(config), machine_memory()
    if need > have:
        raise ValueError(
            f"this machine has {have / 2**30:,.0f} GiB of memory, and this run needs at least {need / 2**30:,.0f}: "
            f"reduce --batch {config.batch}, --context {config.context}, --width {config.width} "
            f"or --depth {config.depth}"
        )


def bytes_needed(config: Config) -> int:
    """Return a lower bound on the memory of a step: weights, optimizer state and activations.

    Each weight has a gradient, a momentum and an update. For each token, the backward pass keeps at least 16 numbers
    per block and feature, and two per logit.
    """
    weights = 512 * config.width + 12 * config.depth * config.width**2
    activations = config.batch * config.context * (16 * config.depth * config.width + 2 * 256)
    return 4 * 4 * weights + DTYPES[config.dtype].itemsize * activations


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or the limit of this container."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**62
    with contextlib.suppress(OSError, ValueError):  # no container, or a container without a limit ("max")
        have = min(have, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return have


class Parser(argparse.ArgumentParser):
    """A parser that prints errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def _parser() -> argparse.ArgumentParser:
    about = "Train a small byte-level GPT with Muon on the source of Python's standard library."
    parser = Parser(prog=Path(sys.argv[0]).name, description=about, argument_default=argparse.SUPPRESS)

    def add(name: str, kind: Any, what: str, **more: Any) -> None:
        default = getattr(DEFAULT, name.strip("-").replace("-", "_"), None)
        parser.add_argument(
            name, type=kind, help=what + ("" if default in (None, "") else f"; default: {default}"), **more
        )

    def switch(name: str, what: str) -> None:
        parser.add_argument(name, action="store_true", default=False, help=what)

    parser.add_argument(
        "--optimizer",
        nargs="+",
        choices=list(TUNED),
        metavar="NAME",
        help=f"one or more of {', '.join(TUNED)}, compared in one plot; default: {' '.join(COMPARED)}",
    )
    switch("--quick", "train a tiny model for a few seconds, to check the installation")
    tune = {"type": _positive(float), "metavar": "RATE"}
    parser.add_argument("--lr", help="peak learning rate of the hidden matrices; default: tuned", **tune)
    parser.add_argument("--rest-lr", help="peak learning rate of all other parameters; default: tuned", **tune)
    parser.add_argument(
        "--shard", choices=list(STRATEGIES), default=None, help="sharding strategy for the processes of torchrun"
    )
    parser.add_argument(
        "--offload", choices=["cpu", "disk"], default=None, help="keep the optimizer state in host memory or on disk"
    )
    add("--dtype", str, "dtype of the parameters; bf16 keeps fp32 master weights", choices=list(DTYPES))
    add("--state-dtype", str, "dtype of momentum and moments, not for torch-muon", choices=list(STATE_DTYPES))
    add("--steps", _positive(int), "number of training steps")
    add("--batch", _positive(int), "sequences per step")
    add("--context", _positive(int), "bytes per sequence")
    add("--width", _positive(int), f"width of the model, a multiple of {HEAD}")
    add("--depth", _positive(int), "number of blocks")
    add("--seed", _seed, "seed of the weights, the batches and the sample")
    add("--text", str, "train on the .py, .txt and .md files of this folder instead", metavar="FOLDER")
    add("--out", Path, "output folder; default: runs/gpt-<optimizers>", metavar="FOLDER")
    add(
        "--checkpoint",
        Path,
        "folder of the checkpoints; replaces those of an older run; default: in --out",
        metavar="FOLDER",
    )
    parser.add_argument(
        "--save-every",
        type=_positive(int),
        default=100,
        metavar="STEPS",
        help="save every N steps; default: %(default)s",
    )
    switch("--resume", "continue from the newest checkpoint; the result is bitwise that of a run without a stop")
    return parser


def _resumed(parser: argparse.ArgumentParser, kept: Path, given: dict[str, Any]) -> Config:
    """Return the configuration stored in a folder's newest checkpoint; fail if the command line contradicts it."""

    def fail(what: str) -> NoReturn:
        parser.error(f"--resume: {what}")

    try:
        config = Config(**read_metrics(newest(kept))["config"])
    except checkpoint.NotFoundError as problem:
        fail(f"{problem}; name the run's folder with --out or --checkpoint, or leave out --resume")
    except checkpoint.CheckpointError as problem:
        fail(str(problem))
    for name, value in given.items():
        if value != getattr(config, name):
            flag = _flag(name)
            fail(f"found {flag} {value}, expected {getattr(config, name)} as in {kept}: leave out {flag}")
    return config


def _check_shard(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: list[str], words: list[str]
) -> None:
    if options.shard is None:
        if "RANK" in os.environ:
            parser.error("without --shard, all processes of torchrun would train the same model: choose a --shard")
        return
    if "RANK" not in os.environ:
        parser.error(f"--shard needs several processes, for example {command_line(words, processes=2)}")
    if len(names) > 1 or "torch-muon" in names:
        parser.error("--shard requires exactly one optimizer of muonfx: choose --optimizer muon, adamw or normuon")


def _positive(kind: type[int] | type[float]) -> Any:
    """Return a parser of finite numbers above zero."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected {what} above 0, found {text!r}")
        return value

    what = "a whole number" if kind is int else "a number"
    return number


def _seed(text: str) -> int:
    """Parse a seed in the range that torch accepts."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1, found {text!r}")
    return int(text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def command_line(words: Sequence[str], *, processes: int = 1) -> str:
    """Return a shell command that starts this program with other options from the current folder.

    The command names the running Python if ``python`` is another one. If ``make train`` started this program (it then
    sets ``TRAIN_GPT_MAKE``), the command uses ``make train`` again.
    """
    if processes == 1 and (make := os.environ.get("TRAIN_GPT_MAKE")) and "\n" not in "".join(words):
        arguments = shlex.join(words).replace("$", "$$")  # make turns $$ into $
        return f"{make} {shlex.quote('ARGS=' + arguments)}"
    found = shutil.which("python")
    # Compare the folders, not the targets of links: a virtual environment's python links to the base interpreter.
    same = found and Path(found).parent == Path(sys.executable).parent and os.path.samefile(found, sys.executable)
    python = "python" if same else _shown(sys.executable)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    return shlex.join([python, *launcher, sys.argv[0], *words])


def _shown(path: str) -> str:
    """Return a path relative to the current folder if it is inside that folder, else unchanged."""
    try:
        return os.fspath(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
