"""The config of a run, and the command line that makes one."""

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
from sharded import WAYS
from text import Corpus, NoText, read_corpus

import muonfx as mfx
from muonfx import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# Of momentum and of AdamW's two moments. AdamW divides small first moments by small roots, so these need levels near
# zero; second moments change by little at a time and are rounded stochastically.
STATE_DTYPES = {
    "fp32": (torch.float32,) * 3,
    "bf16": (torch.bfloat16,) * 3,
    "int8": (mfx.int8(), mfx.int8(code="dynamic"), mfx.int8(stochastic=True)),
    "fp8": (mfx.fp8(), mfx.fp8(), mfx.fp8(stochastic=True)),
}

# Peak learning rates of the hidden matrices and of all the rest: each optimizer's best on one grid (see README.md).
TUNED = {"muon": (0.01, 0.06), "adamw": (0.005, 0.06), "normuon": (0.01, 0.06), "torch-muon": (0.01, 0.06)}
RANK = int(os.environ.get("RANK", "0"))  # torchrun's
COMPARED = ("muon", "adamw")  # what a run trains unless told otherwise, one after another


@dataclass(frozen=True)
class Config:
    """What a run computes follows from this alone. A checkpoint stores it, and ``--resume`` takes it from there."""

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
    """The same config for another optimizer, with that one's learning rates."""
    lr, rest_lr = TUNED[optimizer]
    return dataclasses.replace(config, optimizer=optimizer, lr=lr, rest_lr=rest_lr)


def parse(arguments: list[str] | None) -> tuple[Config, Corpus, Path, Path, argparse.Namespace]:
    """Resolve the command line and read the text, or exit with code 2 and a line that says what is wrong.

    Writes nothing. In the last result, ``optimizer`` is the list of optimizers to train with.
    """
    parser = _parser()
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    given = {name: value for name, value in vars(options).items() if name in DEFAULT.__dataclass_fields__}
    names = list(dict.fromkeys(given.pop("optimizer", ("muon",) if options.shard or options.offload else COMPARED)))
    if "state_dtype" in given and "torch-muon" in names:
        parser.error("torch.optim.Muon has no choice of its state's dtype: leave out --state-dtype")
    _check_shard(parser, options, names, words)
    if options.offload and (len(names) > 1 or "torch-muon" in names):
        parser.error("--offload is for one optimizer of muonfx: choose --optimizer muon, adamw or normuon")
    if given.get("width", HEAD) % HEAD:
        parser.error(f"--width must be a multiple of {HEAD}, the size of an attention head, found {given['width']}")

    name = f"{'quick' if options.quick else 'gpt'}-{options.shard or '-'.join(names)}"
    out = getattr(options, "out", Path("runs") / name)
    kept = getattr(options, "checkpoint", out / CHECKPOINTS)
    if options.resume and not any(checkpoint.checkpoints(kept / name) for name in names):
        config = _resumed(parser, kept, given | ({"optimizer": " ".join(names)} if "optimizer" in options else {}))
        names = [config.optimizer]
    else:
        if len(names) > 1 and (clash := sorted(given.keys() & {"lr", "rest_lr"})):
            found = " and ".join(map(_flag, clash))
            parser.error(f"{found}: found {len(names)} optimizers, expected one: choose for example --optimizer muon")
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
    """Make the folder of a run, and remove an older run's checkpoints unless it goes on from them.

    Raises:
        ValueError: the folder cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ValueError(f"--out {out}: {problem.strerror}") from None
    if not resume and RANK == 0:
        for folder in [kept, *(kept / name for name in TUNED)]:
            for stale in checkpoint.checkpoints(folder):
                shutil.rmtree(stale)  # a new run begins here: what --resume finds later is to be this one's


def check_sizes(config: Config, corpus: Corpus, processes: int, shard: str | None) -> None:
    """Refuse what cannot be trained, before anything is written or computed.

    Raises:
        ValueError: the context is longer than the text, the model does not fit into the memory of this machine, or the
            sizes cannot be shared out among the processes.
    """
    most = min(len(corpus.train), len(corpus.validation)) - 2
    if config.context > most:
        raise ValueError(f"--context: found {config.context}, expected at most {most}, the bytes of the shorter text")
    if shard is not None:
        heads = config.width // HEAD
        sharded.check_processes(shard, processes, heads=heads, batch=config.batch, context=config.context)
    need, have = bytes_needed(config), machine_memory()
    if need > have:
        raise ValueError(
            f"this run needs at least {need / 2**30:,.0f} GiB of memory and this machine has {have / 2**30:,.0f}: "
            f"make --batch {config.batch}, --context {config.context}, --width {config.width} "
            f"or --depth {config.depth} smaller"
        )


def bytes_needed(config: Config) -> int:
    """A lower bound of the memory that a step takes: weights and what the optimizer keeps, and activations.

    Beside each weight there are its gradient, its momentum and its update. The backward pass keeps at least 16 numbers
    of each block for each byte of text and feature, and two of the head for each byte and logit.
    """
    weights = 512 * config.width + 12 * config.depth * config.width**2
    activations = config.batch * config.context * (16 * config.depth * config.width + 2 * 256)
    return 4 * 4 * weights + DTYPES[config.dtype].itemsize * activations


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's share."""
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**62
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit: "max"
        have = min(have, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return have


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with code 2."""
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
        help=f"one or several of {', '.join(TUNED)}, on one picture; default: {' '.join(COMPARED)}",
    )
    switch("--quick", "a tiny model and a few seconds, to see that everything works")
    tune = {"type": _positive(float), "metavar": "RATE"}
    parser.add_argument("--lr", help="peak learning rate of the hidden matrices; default: tuned", **tune)
    parser.add_argument("--rest-lr", help="peak learning rate of all other parameters; default: tuned", **tune)
    parser.add_argument(
        "--shard", choices=list(WAYS), default=None, help="share it out among the processes that torchrun starts"
    )
    parser.add_argument(
        "--offload", choices=["cpu", "disk"], default=None, help="keep the optimizer's state in host memory or in files"
    )
    add("--dtype", str, "of the parameters; bf16 keeps an fp32 master of them", choices=list(DTYPES))
    add("--state-dtype", str, "of momentum and moments, for muonfx's optimizers", choices=list(STATE_DTYPES))
    add("--steps", _positive(int), "training steps")
    add("--batch", _positive(int), "sequences a step")
    add("--context", _positive(int), "bytes a sequence")
    add("--width", _positive(int), f"of the model, a multiple of {HEAD}")
    add("--depth", _positive(int), "blocks of the model")
    add("--seed", _seed, "of weights, batches and sample")
    add("--text", str, "train on the .py, .txt and .md files of a folder instead", metavar="FOLDER")
    add("--out", Path, "where to write; default: runs/gpt-<optimizers>", metavar="FOLDER")
    add(
        "--checkpoint",
        Path,
        "where to keep checkpoints, instead of those of an older run; default: in --out",
        metavar="FOLDER",
    )
    parser.add_argument(
        "--save-every", type=_positive(int), default=100, metavar="STEPS", help="checkpoint; default: %(default)s"
    )
    switch("--resume", "go on from the newest checkpoint in the folder, bit for bit as if never stopped")
    return parser


def _resumed(parser: argparse.ArgumentParser, kept: Path, given: dict[str, Any]) -> Config:
    """The config of the run whose checkpoints are in a folder, which the options given must not contradict."""

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
            fail(f"the run in {kept} has {_flag(name)} {getattr(config, name)}, found {value}; leave it out")
    return config


def _check_shard(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: list[str], words: list[str]
) -> None:
    if options.shard is None:
        if "RANK" in os.environ:
            parser.error("torchrun has started several processes, which would all do the same: choose a --shard")
        return
    if "RANK" not in os.environ:
        parser.error(f"--shard needs several processes, for example {command_line(words, processes=2)}")
    if len(names) > 1 or "torch-muon" in names:
        parser.error("--shard is for one optimizer of muonfx: choose --optimizer muon, adamw or normuon")


def _positive(kind: type[int] | type[float]) -> Any:
    """Parse a finite number above zero."""

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
    """Parse what torch takes for a seed."""
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1, found {text!r}")
    return int(text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def command_line(words: Sequence[str], *, processes: int = 1) -> str:
    """The command that starts this program with other options, for the shell and the folder that it was started in.

    It names this Python, which is not always the one that ``python`` is. Started by ``make train`` (which says so in
    ``TRAIN_GPT_MAKE``), the program is started by it again.
    """
    if processes == 1 and (make := os.environ.get("TRAIN_GPT_MAKE")) and "\n" not in "".join(words):
        arguments = shlex.join(words).replace("$", "$$")  # make expands what the shell is to see
        return f"{make} {shlex.quote('ARGS=' + arguments)}"
    found = shutil.which("python")
    # The folders, not what links lead to: the python of a virtual environment is a link to another one's.
    same = found and Path(found).parent == Path(sys.executable).parent and os.path.samefile(found, sys.executable)
    python = "python" if same else _shown(sys.executable)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)] if processes > 1 else []
    return shlex.join([python, *launcher, sys.argv[0], *words])


def _shown(path: str) -> str:
    """A path relative to the current folder where it lies in it."""
    try:
        return os.fspath(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
