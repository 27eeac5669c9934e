"""``python -m muonfx.checkpoint convert``: another optimizer's checkpoint to one of ours."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from muonfx.checkpoint.convert import deepspeed, dion, keller, moonlight, torch_optim
from muonfx.checkpoint.convert._files import read_json, read_plain, read_safetensors
from muonfx.checkpoint.errors import CheckpointError
from muonfx.checkpoint.writing import save
from muonfx.core import Transform
from muonfx.tree import PyTree

__all__ = ["main"]

_SOURCES = {
    "torch": (torch_optim.from_torch_optimizer, torch_optim.torch_recipe),
    "keller": (keller.from_keller, keller.keller_recipe),
    "moonlight": (moonlight.from_moonlight, moonlight.moonlight_recipe),
    "dion": (dion.from_dion, dion.dion_recipe),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m muonfx.checkpoint convert", description=__doc__)
    parser.add_argument("kind", choices=[*_SOURCES, "deepspeed"], help="whose checkpoint it is")
    parser.add_argument("input", type=Path, help="a file of torch.save, or DeepSpeed's universal folder")
    parser.add_argument("output", type=Path, help="where to write")
    parser.add_argument("--params", type=Path, required=True, help="the model's weights: .safetensors, or a state dict")
    parser.add_argument("--key", default="", help="where in the file the optimizer's state dict is, as in 'optimizer'")
    parser.add_argument("--names", type=Path, help="a JSON list: the parameters' names in the optimizer's order")
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


def _convert(options: argparse.Namespace) -> tuple[Transform, PyTree, dict[str, Any]]:
    params = _load_params(options.params)
    if options.kind == "deepspeed":
        source = deepspeed.read_deepspeed(options.input)
        params = {name: leaf for name, leaf in params.items() if name in source}
        if options.config is None:
            raise ValueError("DeepSpeed's checkpoint does not hold the learning rates: give its config with --config")
        config = read_json(options.config)
        optimizer = config.get("optimizer") if isinstance(config, dict) else None
        if not isinstance(optimizer, dict) or "params" not in optimizer:
            raise ValueError(f"{options.config}: expected a config with 'optimizer' and its 'params'")
        tx = deepspeed.deepspeed_recipe(source, params, optimizer["params"])
        return tx, deepspeed.from_deepspeed(source, tx, params, step=options.step), params
    source = _load(options.input)
    for key in filter(None, options.key.split(".")):
        if not isinstance(source, dict) or key not in source:
            found = ", ".join(map(str, source)) if isinstance(source, dict) else type(source).__name__
            raise ValueError(f"--key {options.key}: no {key!r} in {options.input}; there is {found}")
        source = source[key]
    names = _load_names(options.names) if options.names else None
    read, recipe = _SOURCES[options.kind]
    known = names or [name for group in source.get("param_groups", []) for name in group.get("param_names", [])]
    params = {name: leaf for name, leaf in params.items() if name in known} if known else params
    tx = recipe(source, params, names=names)
    return tx, read(source, tx, params, names=names, step=options.step), params


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, write a checkpoint with `muonfx.checkpoint.save`, and print the chain that goes on from it.

    Args:
        argv: the arguments; None: those of the process.

    Returns:
        The exit status: 0, or 2 with a sentence on stderr.

    >>> main(["torch", "nowhere.pt", "out", "--params", "nowhere.safetensors"])
    2
    """
    options = _parser().parse_args(argv)
    try:
        tx, state, _ = _convert(options)
        save(options.output, state, tx=tx, step=options.step)
    except (OSError, ValueError, TypeError, SafetensorError, CheckpointError) as problem:
        print(f"convert: error: {problem}", file=sys.stderr)
        return 2
    print(tx)
    return 0
