"""Save and load optimizer states and parameters, independently of how they are sharded.

`save` writes a tree of tensors atomically. `load` reads it into the structure, dtypes and devices of another tree, or
raises one error that lists every mismatch. A checkpoint is a folder with a JSON index and safetensors files. It stores
whole tensors, not shards, so any number of processes can load it. Nothing is unpickled. `Writer` and `Reader` let
``torch.distributed.checkpoint`` write and read the same files.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from muonfx.checkpoint import convert
from muonfx.checkpoint.changed import Continuation, load_changed
from muonfx.checkpoint.errors import (
    CheckpointError,
    CorruptError,
    FormatError,
    MismatchError,
    NotFoundError,
    WriteError,
)
from muonfx.checkpoint.folder import checkpoints, clean, inspect, latest, prune, step_path
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.leaves import StateSpec, spec
from muonfx.checkpoint.load import load, load_params, read, verify
from muonfx.checkpoint.save import Saving, save, save_async
from muonfx.sharding.shards.flat_shard import FlatShard

if TYPE_CHECKING:
    from muonfx.checkpoint.storage import Reader, Writer

# fmt: off
__all__ = [
    "save", "load", "load_params", "read", "save_async", "Saving",
    "load_changed", "Continuation",
    "Writer", "Reader",  # for torch.distributed.checkpoint
    "inspect", "verify", "Index", "spec", "StateSpec", "FlatShard",
    "step_path", "checkpoints", "latest", "prune", "clean",  # a folder of checkpoints
    "convert",  # from and to other optimizers
    "CheckpointError", "CorruptError", "FormatError", "MismatchError", "NotFoundError", "WriteError",
]
# fmt: on


if not TYPE_CHECKING:  # a type checker would accept any misspelt name

    def __getattr__(name: str) -> Any:
        # torch.distributed.checkpoint takes as long to import as torch's optimizers, and few runs need it.
        if name in ("Writer", "Reader"):
            return getattr(import_module("muonfx.checkpoint.storage"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
