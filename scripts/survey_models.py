"""Route random models of the installed transformers, and report what differs from the record of an earlier survey.

    python scripts/survey_models.py           # the 150 models of the record; prints what differs from it
    python scripts/survey_models.py --write   # replaces what the record has of them
    python scripts/survey_models.py --seed 1 --print   # 150 other models; prints the roles of all matrices

The models have the default configurations with two layers, on the meta device: no weights are created or downloaded.
The record, ``scripts/survey_models.json``, has the role of each matrix by model and name. Its names are patterns, in
which ``#`` is the number of a layer. A difference is either an error of a new rule, or a correction to be recorded.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

import muonfx as mfx

RECORD = Path(__file__).with_suffix(".json")
LAYER_COUNTS = frozenset(
    {
        "num_hidden_layers",
        "num_layers",
        "n_layer",
        "n_layers",
        "encoder_layers",
        "decoder_layers",
        "depth",
    }
    | {"num_encoder_layers", "num_decoder_layers", "encoder_num_layers", "decoder_num_layers"}
)
LAYERS = 2
LAYER_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
Roles = dict[str, str]


def class_names() -> list[str]:
    """Return the names of all model classes that transformers' auto classes know, sorted."""
    names: set[str] = set()
    for mapping_name in dir(modeling_auto):
        mapping = getattr(modeling_auto, mapping_name)
        if not (mapping_name.startswith("MODEL_") and mapping_name.endswith("_MAPPING")):
            continue
        for class_name in mapping._model_mapping.values():
            names.update([class_name] if isinstance(class_name, str) else class_name)
    return sorted(names)


def shrink(config: Any) -> None:
    """Set the numbers of layers in a configuration, and in the configurations inside it, to two."""
    for key, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value)
        elif key in LAYER_COUNTS and isinstance(value, int) and value > LAYERS:
            setattr(config, key, LAYERS)
    layers = getattr(config, "num_hidden_layers", None)
    for key in LAYER_KINDS:
        kinds = vars(config).get(key)
        if isinstance(kinds, list) and isinstance(layers, int) and len(kinds) > layers:
            setattr(config, key, kinds[:layers])


def build(class_name: str) -> nn.Module:
    """Return a model with two layers, or with all layers if its configuration does not permit two."""
    model_class = getattr(transformers, class_name)
    config = model_class.config_class()
    shrink(config)
    with torch.device("meta"):
        try:
            return model_class(config)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, RuntimeError):
            return model_class(model_class.config_class())


def roles_of(model: nn.Module) -> Roles:
    """Return the role of each trained matrix by the pattern of its name."""
    roles: Roles = {}
    labels = mfx.default_labels(model, roles=True)
    for name, param in model.named_parameters():
        if param.ndim > 1 and labels[name] is not None:
            roles.setdefault(re.sub(r"\.\d+(?=\.|$)", ".#", name), str(labels[name]))
    return roles


def survey(names: list[str], count: int) -> Iterator[tuple[str, Roles]]:
    """Yield the class names and the roles of the first ``count`` models that can be built."""
    built = 0
    for name in names:
        if built == count:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                roles = roles_of(build(name))
        except Exception as error:  # a default configuration may be incomplete in any way
            print(
                f"{name}: not built: {type(error).__name__}: {str(error).splitlines()[:1]}",
                file=sys.stderr,
            )
            continue
        built += 1
        yield name, roles


def differences(name: str, recorded: Roles | None, roles: Roles) -> list[str]:
    """Return a line for each matrix of a model whose role is not the recorded one; none without a record."""
    if recorded is None:
        return []
    lines: list[str] = []
    for pattern in sorted({*recorded, *roles}):
        before, after = recorded.get(pattern, "absent"), roles.get(pattern, "absent")
        if before != after:
            lines.append(f"{name}: {pattern}: {before} -> {after}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=int, default=150, help="the number of random models (default: 150)"
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses the models (default: 0)")
    parser.add_argument("--print", action="store_true", help="print the role of every matrix")
    parser.add_argument("--write", action="store_true", help="write the roles to the record")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    names = class_names()
    random.Random(arguments.seed).shuffle(names)
    record = (
        json.loads(RECORD.read_text()) if RECORD.exists() else {"transformers": None, "models": {}}
    )
    surveyed = dict(survey(names, arguments.models))
    changed: list[str] = []
    for name, roles in sorted(surveyed.items()):
        changed += differences(name, record["models"].get(name), roles)
        if arguments.print:
            print(*(f"{name}: {pattern}: {role}" for pattern, role in roles.items()), sep="\n")
    print(*changed, sep="\n")
    names_count = sum(len(roles) for roles in surveyed.values())
    new_count = len(surveyed.keys() - record["models"].keys())
    print(
        f"{len(surveyed)} models of transformers {transformers.__version__}, {names_count} matrices: {new_count} "
        f"models are not in the record of transformers {record['transformers']}, {len(changed)} names differ from it"
    )
    if arguments.write:
        record["models"].update(surveyed)
        record["transformers"] = transformers.__version__
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        return 0
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
