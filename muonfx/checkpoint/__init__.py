"""Save and load optimizer states and parameters, independently of how they are sharded.

`save` writes a tree of tensors atomically. `load` reads it into the structure, dtypes and devices of another tree, or
raises one error that lists every mismatch. A checkpoint is a folder with a JSON index and safetensors files. It stores
whole tensors, not shards, so any number of processes can load it. Nothing is unpickled.
"""

from muonfx.checkpoint import convert
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

# fmt: off
__all__ = [
    "save", "load", "load_params", "read", "save_async", "Saving",
    "inspect", "verify", "Index", "spec", "StateSpec", "FlatShard",
    "step_path", "checkpoints", "latest", "prune", "clean",  # a folder of checkpoints
    "convert",  # from and to other optimizers
    "CheckpointError", "CorruptError", "FormatError", "MismatchError", "NotFoundError", "WriteError",
]
# fmt: on


def __dir__() -> list[str]:
    return sorted(__all__)
