"""Other writers to the same path, and how to tell a caller of them."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from muonfx.checkpoint.catalog import checkpoints, read_index, step_of
from muonfx.checkpoint.coordination import claims
from muonfx.checkpoint.errors import CheckpointError

__all__ = ["note_rank", "warn_of_later_steps", "warn_of_other_writers"]

_ONE_JOB = "if these are the ranks of one job, say group= on all of them, or save on one only"


def note_rank(save_id: str) -> None:
    """Note which rank saves, for itself, in the store by which the ranks of a job have found each other.

    That takes no turn of any other rank: rank 0 may save alone, and each rank to a path of its own.
    """
    if (store := _store()) is not None:
        with suppress(RuntimeError):  # its process has ended, and with it the job
            store.set(_key(save_id), str(dist.get_rank()))


def warn_of_other_writers(path: Path, save_id: str) -> None:
    """Tell when another process is writing to a path, or another rank of this job has written there for itself.

    Args:
        path: claimed by this save.
        save_id: of this save, noted before it was claimed: of two ranks at least the later sees the other.

    Warns:
        UserWarning: there is one. This save will replace what it has written, or the other way round; both are whole.
    """
    live = {other: claimed for _, other, claimed, is_live in claims(path) if is_live and other != save_id}
    if ranks := _ranks(path, live.keys() - {save_id}):
        warnings.warn(
            f"{path}: rank {min(ranks)} saves there and now rank {dist.get_rank()} too, each for itself: the last one "
            f"stands, and it is assumed that all ranks have the same; {_ONE_JOB}",
            stacklevel=2,
        )
    elif live:
        who = next((str(claimed) for claimed in live.values() if claimed is not None), "another process")
        warnings.warn(
            f"{path}: {who} is writing there at the same time: the last one to be done stands; {_ONE_JOB}", stacklevel=2
        )


def _ranks(path: Path, save_ids: set[str]) -> set[int]:
    """The other ranks of this job that have made these saves, or the one that is at the path."""
    store = _store()
    if store is None:
        return set()
    with suppress(CheckpointError):
        save_ids = save_ids | {read_index(path).save_id}
    try:
        keys = [_key(save_id) for save_id in save_ids]
        return {int(store.get(key)) for key in keys if store.check([key])} - {dist.get_rank()}
    except RuntimeError:
        return set()


def _store() -> dist.Store | None:
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.distributed_c10d._get_default_store() if several else None


def _key(save_id: str) -> str:
    return f"muonfx save {save_id}"


def warn_of_later_steps(path: Path) -> None:
    """Tell when a run has gone back: what it writes is not what `latest` finds.

    Warns:
        UserWarning: beside the checkpoint lie others of later steps.
    """
    step = step_of(path)
    if step is not None:
        later = [other for other in checkpoints(path.parent) if (step_of(other) or 0) > step]
        if later:
            warnings.warn(
                f"{path.name} was written beside checkpoints of later steps, up to {later[-1].name}, which latest() "
                "finds before it: if the run went back on purpose, move them away",
                stacklevel=2,
            )
