"""``python -m muonfx.checkpoint convert``: convert another optimizer's checkpoint to a muonfx checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from muonfx.checkpoint.convert import read, recipe
from muonfx.checkpoint.convert.formats import FORMATS
from muonfx.checkpoint.convert.sources import read_folder, read_json, read_plain, read_safetensors
from muonfx.checkpoint.errors import CheckpointError, first_ones
from muonfx.checkpoint.saving import save
from muonfx.core import Transform
from muonfx.tree import PyTree
from muonfx.tree.renaming import new_names
from muonfx.tree.wrappers import unwrapped

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m muonfx.checkpoint convert", description=__doc__)
    parser.add_argument("kind", choices=[kind for kind in FORMATS if kind != "optax"], help="whose checkpoint it is")
    parser.add_argument("input", type=Path, help="a file of torch.save, or DeepSpeed's universal folder")
    parser.add_argument("output", type=Path, help="where to write")
    parser.add_argument("--params", type=Path, required=True, help="the model's weights: .safetensors, or a state dict")
    parser.add_argument("--key", default="", help="where in the file the optimizer's state dict is, as in 'optimizer'")
    parser.add_argument("--names", type=Path, help="a JSON list: the parameters' names in the optimizer's order")
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="of parameters, in all files: a name, the dotted levels it begins with, or a pattern with '*', which "
        "stands for the same text in both; may be given several times",
    )
    parser.add_argument("--step", type=int, help="how many steps were taken, where the optimizer does not count")
    parser.add_argument("--config", type=Path, help="DeepSpeed's config, a JSON file")
    return parser


def _load(path: Path) -> Any:
    return read_safetensors(path) if path.suffix == ".safetensors" else read_plain(path)


def _load_params(path: Path) -> dict[str, torch.Tensor]:
    found = _load(path)
    if not isinstance(found, dict) or not all(isinstance(leaf, torch.Tensor) for leaf in found.values()):
        raise ValueError(f"{path}: expected a state dict, names to tensors, found something else")
    return {name: leaf for name, leaf in found.items() if leaf.is_floating_point()}


def _load_names(path: Path) -> list[str]:
    found = read_json(path)
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"{path}: expected a JSON list of names, found something else")
    return found


def _entries_of(given: Sequence[str]) -> dict[str, str]:
    """Parse the arguments of ``--rename``."""
    if wrong := [text for text in given if not all(text.partition("="))]:
        raise ValueError(f"--rename {wrong[0]}: expected OLD=NEW")
    return {old: new for old, _, new in (text.partition("=") for text in given)}


def _new_names(rename: Mapping[str, str], *lists: Iterable[str]) -> dict[str, str]:
    """Map the parameter names in some files to names without wrappers, renamed; an unused entry is an error."""
    plain = {old: name for names in map(list, lists) for old, name in unwrapped(names).items()}
    found, wrong = new_names(plain, rename, level=".", what="parameter")
    for names in map(list, lists):
        for name, times in Counter(found[old] for old in names).items():
            if times > 1:
                wrong.append(f"{' and '.join(repr(old) for old in names if found[old] == name)} would be {name!r}")
    if wrong:
        raise ValueError("--rename: " + "; ".join(first_ones(wrong)))
    return found


def _convert(options: argparse.Namespace) -> tuple[Transform, PyTree]:
    params, rename = _load_params(options.params), _entries_of(options.rename)
    names = config = None
    if options.kind == "deepspeed":
        source = read_folder(options.input)
        known = list(source)
        new = _new_names(rename, params, known)
        source = {new[name]: values for name, values in source.items()}
        config = _load_config(options.config)
    else:
        source = _load_key(options.input, options.key)
        groups = source.get("param_groups", []) if isinstance(source, dict) else []
        known = [name for group in groups for name in group.get("param_names", [])]
        if options.names:
            known = _load_names(options.names)
        new = _new_names(rename, params, known)
        names = [new[name] for name in known] or None  # in the optimizer's order
    meant = {new[name] for name in known} or set(new.values())
    params = {new[name]: leaf for name, leaf in params.items() if new[name] in meant}
    tx = recipe(options.kind, source, params, names=names, config=config)
    return tx, read(options.kind, source, tx, params, names=names, step=options.step)


def _load_key(path: Path, key: str) -> Any:
    """Read a file and return the part of it at a dotted key."""
    source = _load(path)
    for entry in filter(None, key.split(".")):
        if not isinstance(source, dict) or entry not in source:
            found = ", ".join(map(str, source)) if isinstance(source, dict) else type(source).__name__
            raise ValueError(f"--key {key}: no {entry!r} in {path}; there is {found}")
        source = source[entry]
    return source


def _load_config(path: Path | None) -> Any:
    if path is None:
        raise ValueError("DeepSpeed's checkpoint does not hold the learning rates: give its config with --config")
    config = read_json(path)
    optimizer = config.get("optimizer") if isinstance(config, dict) else None
    if not isinstance(optimizer, dict) or "params" not in optimizer:
        raise ValueError(f"{path}: expected a config with 'optimizer' and its 'params'")
    return optimizer["params"]


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and save a checkpoint, print the chain that continues from it, and return the exit status, 0 or 2."""
    options = _parser().parse_args(argv)
    try:
        tx, state = _convert(options)
        save(options.output, state, tx=tx, step=options.step)
    except (OSError, ValueError, TypeError, SafetensorError, CheckpointError) as problem:
        print(f"convert: error: {problem}", file=sys.stderr)
        return 2
    print(tx)
    return 0
