"""Checkpoints: states and parameters on disk, whole or not at all, under names that outlive layouts.

`save` writes a tree of tensors, `load` reads one back into the structure, dtypes and devices of another, or says in
one error what does not fit. A checkpoint is a folder with an index (JSON) and safetensors files; it holds logical
tensors and no rank's private buffer, so any number of processes can load it. Nothing is ever unpickled.
"""

from muonfx.checkpoint import convert
from muonfx.checkpoint.catalog import checkpoints, inspect, latest, prune, step_path
from muonfx.checkpoint.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    MismatchError,
    NotFoundError,
    WriteError,
)
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.loading import load, load_params, read, verify
from muonfx.checkpoint.saving import Saving, save, save_async
from muonfx.checkpoint.spec import StateSpec, spec
from muonfx.sharding.shards import FlatPiece

__all__ = [
    # saving and loading
    "save",
    "load",
    "load_params",
    "read",
    # while training goes on
    "save_async",
    "Saving",
    # looking
    "inspect",
    "verify",
    "Index",
    "spec",
    "StateSpec",
    # pieces
    "FlatPiece",
    # a folder of them
    "step_path",
    "checkpoints",
    "latest",
    "prune",
    # from and to other optimizers
    "convert",
    # what can be wrong
    "CheckpointError",
    "CorruptError",
    "FormatError",
    "MismatchError",
    "NotFoundError",
    "WriteError",
]


def __dir__() -> list[str]:
    return sorted(__all__)
