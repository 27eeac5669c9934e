"""Save and load on several ranks: torch.distributed.checkpoint (DCP) plans, and this module reads and writes.

DCP collects the leaves of every rank (the local plans), decides on one rank which rank writes each box (the global
plan, in which a replicated tensor is written once), and sends an error on one rank to all ranks. Its storage is not
used: its file system writer pickles the metadata, and its safetensors writer keeps neither dtypes nor checksums. Here
each rank writes one data file, and then rank 0 writes the index. All checks run inside the steps of DCP, so that an
error on one rank is raised on all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from muonfx.checkpoint.background import wait_for_saves
from muonfx.checkpoint.data import Part, Reader
from muonfx.checkpoint.draft import Draft, Job
from muonfx.checkpoint.errors import CheckpointError, MismatchError, ReplacedError, WriteError
from muonfx.checkpoint.folder import TRIES, folder_named, inspect, reading, replaced_often
from muonfx.checkpoint.index import Chunk, DataFile, Leaf
from muonfx.checkpoint.match import Rules, Target
from muonfx.checkpoint.plan import RankSummary, box_of, checksum_of_part, is_held_once, require_consistent
from muonfx.core.identity import without_addresses
from muonfx.sharding.boxes import Box
from muonfx.sharding.consensus import listed, wait_for_all
from muonfx.sharding.messages import ShardingError
from muonfx.sharding.shards import FlatPiece
from muonfx.tree import PyTree, Spec

__all__ = ["load_together", "save_together"]


@contextmanager
def _sendable() -> Generator[None]:
    """Convert errors of the ``with`` block to `CheckpointError` if pickle may be unable to send them to other ranks."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointError) or type(error).__module__ == "builtins":
            raise
        # Such a class may be local, or its instances may not be restorable from their arguments.
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


class _SavePlanner(DefaultSavePlanner):
    """DCP's default save planner for the tensors of one save, with checks that all ranks agree."""

    def __init__(self, job: Job, ranks: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.job, self.ranks = job, ranks

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        with _sendable():
            if self.job.problem is not None:
                raise self.job.problem
            super().set_up_planner(self.job.leaves, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Let DCP list the parts that this rank holds, and add a checksum of each part that other ranks may hold."""
        with _sendable():
            plan = super().create_local_plan()
            checksums: list[str | None] = []
            for item in plan.items:
                leaf = self.state_dict[item.index.fqn]
                is_compared = not is_held_once(leaf, self.ranks)
                checksums.append(checksum_of_part(self.lookup_object(item.index)) if is_compared else None)
            return replace(plan, planner_data=RankSummary(checksums, [*self.state_dict]))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that all ranks save the same tensors with equal arguments; then let DCP assign each shard to a rank."""
        if len(all_plans) != self.ranks:  # torch saves on this rank alone, with a warning, if the group was destroyed
            raise CheckpointError(f"{self.job.path} was not written: the process group was destroyed before the save")
        _require_same([plan.storage_data for plan in all_plans], "save", "nothing was written")
        require_consistent(all_plans)
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor of one item to save. Flat shards (`FlatPiece`) are supported, too."""
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, FlatPiece) else super().lookup_object(index)


class _Writer(StorageWriter):
    """DCP storage that writes a data file on each rank, and ``index.json`` on the rank with ``commits=True``."""

    def __init__(self, job: Job, *, commits: bool) -> None:
        self.job, self.commits = job, commits
        self.draft: Draft | None = None
        """The files of this save; None until this rank begins to write."""

    def abandon(self) -> bool | None:
        """Clean up after a communication error; return whether the new checkpoint is complete, None if unknown."""
        if self.draft is None:
            return False if self.commits else None
        written = self.draft.is_committed() if self.commits else self.draft.is_at_path()
        if self.commits and written is False:
            self.draft.discard()
        self.draft.release_lock()
        # On other ranks the files must stay: rank 0 may still commit an index that names them.
        return written if self.commits or written else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing. DCP calls this method before it uses a writer again, but each save makes a new writer."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing. DCP requires this method; `prepare_global_plan` creates the folder of the checkpoint."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add this rank's arguments of `save` to its DCP plan; `_SavePlanner` compares them between ranks."""
        job, head = self.job, self.job.head
        arguments = {"path": str(job.path), "step": head.step, "extra": head.extra, "keep": job.keep}
        texts = {name: repr(value) for name, value in arguments.items()}
        # The chain's text has the numbers. The fingerprint has the code of functions, of which the text has the names.
        texts["tx"] = f"{without_addresses(head.chain or 'None')} (fingerprint {head.fingerprint})"
        return replace(plan, storage_data=texts)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder of the checkpoint, and assign a data file to each rank. DCP calls this on one rank."""
        draft = self.draft = Draft(self.job.path)
        with draft.discard_on_error():
            draft.begin()
        return [
            replace(plan, storage_data=(draft.save_id, draft.data_file(rank, len(plans))))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the shards in this rank's DCP plan to the rank's data file."""
        save_id, path = plan.storage_data
        draft = self.draft = self.draft or Draft(self.job.path, save_id)
        results: list[WriteResult] = []
        items: dict[str, Any] = {}

        def values(key: str) -> Any:
            return planner.resolve_data(items[key])

        def part(item: Any) -> Part:
            data, key = item.tensor_data, item.index.fqn
            box = box_of(item)
            if box.sizes != tuple(data.size):  # other parts of the leaf may be in the same file
                key += f"~[{','.join(f'{a}:{b}' for a, b in zip(box.offsets, box.ends, strict=True))}]"
            return Part(key, data.properties.dtype, box)

        if plan.items:
            with _sendable(), draft.discard_on_error():
                parts = [part(item) for item in plan.items]
                items |= {part.key: item for part, item in zip(parts, plan.items, strict=True)}
                file, chunks = draft.write(path, parts, values)
            results = [WriteResult(item.index, file.nbytes, (file, chunks[key])) for key, item in items.items()]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``index.json``, which completes the checkpoint. DCP calls this on one rank, after all ranks wrote."""
        files: dict[DataFile, int] = {}
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for rank in results for result in rank):
            file, chunk = result.storage_data
            chunks[result.index.fqn].append(chunk._replace(file=files.setdefault(file, len(files))))
        leaves: dict[str, Leaf] = {}
        for name, described_by_torch in metadata.state_dict_metadata.items():
            assert isinstance(described_by_torch, TensorStorageMetadata)
            spec = Spec(tuple(described_by_torch.size), described_by_torch.properties.dtype)
            leaves[name] = Leaf(spec, tuple(sorted(chunks[name], key=lambda chunk: chunk.box)))
        draft = self.draft
        assert draft is not None
        try:
            with draft.discard_on_error():
                draft.commit(replace(self.job.head, save_id=draft.save_id, files=tuple(files), leaves=leaves))
            draft.tidy(self.job.keep)
        except BaseException as error:
            if draft.is_committed() is False or isinstance(error, WriteError):
                raise
            # With written=True the other ranks keep their files.
            raise WriteError(f"{draft.path} was written, but a later operation failed: {error!r}", True) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def save_together(job: Job) -> None:
    """Save one checkpoint from all ranks of the process group ``job.group``; every rank must call this."""
    group = check_group(job.group, f"the save to {job.path}")
    try:
        wait_for_all(group, "checkpoint.save")
    except ShardingError as error:
        raise WriteError(f"{job.path} was not written: {error}") from error
    writer = _Writer(job, commits=dist.get_rank(group) == 0)
    planner = _SavePlanner(job, dist.get_world_size(group))
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        # A rank has failed, so no index will name this rank's files, unless the index was renamed before the failure.
        if writer.draft is not None and _written(error) is False:
            writer.draft.discard()
        _raise(error, str(job.path))
    except BaseException as error:
        written = writer.abandon()
        if not isinstance(error, _FROM_TORCH):
            raise
        state = {True: "was written completely, but", False: "was not written:", None: "may have been written or not:"}
        raise WriteError(f"{job.path} {state[written]} {_ended(error)}", written) from error


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's default load planner for the tensors that one load fills, under their names in the checkpoint."""

    def __init__(self, make_target: Callable[[], Target], where: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.make_target, self.where = make_target, where

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        if isinstance(metadata.planner_data, Exception):
            raise metadata.planner_data
        # torch's own set-up is not called: it flattens dataclasses and allocates meta tensors.
        with _sendable():
            self.target = self.make_target()
            self.leaves, destinations = self.target.allocate(metadata.planner_data, self.where)
            self.state_dict = self.original_state_dict = destinations
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to fill for one item to load. Flat shards (`FlatPiece`) are supported, too."""
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, FlatPiece) else super().lookup_tensor(index)


class _Reader(StorageReader):
    """DCP storage that reads parts of tensors from the data files, and verifies every byte that it reads."""

    def __init__(self, path: Any, stack: ExitStack, rules: Rules) -> None:
        self.path, self.stack, self.rules = path, stack, rules

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing. DCP calls this method before it uses a reader again, but each load makes a new reader."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``index.json`` and describe the stored tensors in the form that DCP expects."""
        try:
            self.path = folder_named(self.path)
            self.index = index = inspect(self.path)
        except Exception as error:
            # Passed on to the planner, since torch would take an error here for missing metadata.
            return Metadata({}, planner_data=error)
        found: dict[str, Any] = {}
        for name, leaf in index.leaves.items():
            boxes = [chunk.box for chunk in leaf.chunks if chunk.box.numel]
            chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]
            found[name] = TensorStorageMetadata(TensorProperties(leaf.spec.dtype), torch.Size(leaf.spec.shape), chunks)
        return Metadata(found, planner_data=index)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing. DCP requires this method; `prepare_local_plan` opens the data files."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Open the data files for this rank's items, and attach the arguments that must be equal on all ranks."""
        # Open files stay readable when the checkpoint is replaced.
        with reading(self.path, self.index):
            self.reader = self.stack.enter_context(Reader(self.path, self.index))
            self.reader.check_files({self.chunk(item).file for item in plan.items})
        return replace(plan, storage_data=(self.index.save_id, {"path": str(self.path), **self.rules.described()}))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks call `load` with equal arguments, and that no save replaced the checkpoint meanwhile."""
        _require_same([said for plan in plans for said in plan.storage_data[1:]], "load", "nothing was loaded")
        if len({plan.storage_data[0] for plan in plans}) > 1:
            raise ReplacedError(f"{self.path} was replaced while the ranks began to read it")
        return plans

    def chunk(self, item: ReadItem) -> Chunk:
        """Return the position, in the data files, of the stored rectangle that contains the values for an item."""
        at = tuple(item.storage_index.offset or ())
        chunks = self.index.leaves[item.storage_index.fqn].chunks
        return next(chunk for chunk in chunks if chunk.box.offsets == at and chunk.box.numel)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items from the data files into the tensors to fill."""
        with reading(self.path, self.index):
            for item in plan.items:
                name = item.storage_index.fqn
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                destination = planner.resolve_tensor(item).detach()
                self.reader.read_box(name, self.index.leaves[name], self.chunk(item), box, destination)
                planner.commit_tensor(item, destination)
            self.reader.close()  # here, so that an error is raised on all ranks
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def load_together(
    path: str | os.PathLike[str], make_target: Callable[[], Target], rules: Rules, group: dist.ProcessGroup
) -> PyTree:
    """Load one checkpoint; every rank of the group calls this. ``make_target()`` is the tree to fill at each try."""
    check_group(group, f"the load of {path}")
    wait_for_saves()  # a save in the background may use the same group
    try:
        wait_for_all(group, "checkpoint.load")
    except ShardingError as error:
        raise CheckpointError(f"{path} was not loaded: {error}") from error
    for attempts in range(TRIES):
        # The planner makes the target, so that its errors are raised on all ranks.
        planner = _LoadPlanner(make_target, str(path))
        try:
            with ExitStack() as stack:
                dcp.load({}, storage_reader=_Reader(path, stack, rules), planner=planner, process_group=group)
            return planner.target.filled(planner.leaves)
        except CheckpointException as error:
            # All ranks receive the same failures, so all of them raise or all of them retry.
            if not any(isinstance(problem, ReplacedError) for problem, _ in error.failures.values()):
                _raise(error, str(path))
        except _FROM_TORCH as error:
            raise CheckpointError(f"{path} was not loaded: {_ended(error)}") from error
        time.sleep(min(0.5, 0.001 * 2**attempts))
    raise ReplacedError(replaced_often(Path(path)))


def _require_same(arguments: list[dict[str, str]], action: str, outcome: str) -> None:
    """Raise if ranks passed different arguments; ``arguments[rank]`` maps argument names to their ``repr``."""
    for name in arguments[0]:
        ranks_of_text: dict[str, list[int]] = {}
        for rank, texts in enumerate(arguments):
            ranks_of_text.setdefault(texts[name], []).append(rank)
        if len(ranks_of_text) == 1:
            continue
        # Of long texts, such as a chain's, only the part around the first difference is shown.
        start = max(0, _common_length([*ranks_of_text]) - 100)
        shown = [f"{listed(ranks)}: {text[start : start + 200]}" for text, ranks in ranks_of_text.items()]
        raise CheckpointError(
            f"{outcome}: the ranks {action} with different {name}= ({'; '.join(shown)}): pass the same everywhere"
        )


def _common_length(texts: Sequence[str]) -> int:
    """Return the number of characters with which all texts begin."""
    for position, characters in enumerate(zip(*texts, strict=False)):
        if len(set(characters)) > 1:
            return position
    return min(map(len, texts))


_FROM_TORCH = (RuntimeError, ValueError, AssertionError, OSError)
"""Errors that torch.distributed raises when communication fails."""


def check_group(group: Any, action: str) -> dist.ProcessGroup:
    """Return ``group``; raise unless it is a process group with this rank. ``action`` begins the error message."""
    try:
        found = dist.get_rank(group) if dist.is_initialized() else None
    except (ValueError, RuntimeError, TypeError, AttributeError):
        found = None
    if found is None or found < 0:
        why = "it was destroyed, or this process is not one of its ranks"
        raise CheckpointError(f"{action}: group={group!r} is not a process group that can be used: {why}")
    return group


def _ended(error: BaseException) -> str:
    if isinstance(error, ValueError):  # torch raises it for an unknown group
        return f"the process group was destroyed during the call: {error}"
    return f"another rank has ended, or did not answer within the group's timeout: {error}"


def _raise(error: CheckpointException, path: str) -> NoReturn:
    """Raise one error, equal on every rank, whose message lists the errors of all ranks."""
    said: dict[str, list[int]] = {}
    for rank, (problem, _) in sorted(error.failures.items()):
        text = str(problem) if isinstance(problem, CheckpointError) else f"{path}: {problem}"
        said.setdefault(text, []).append(rank)
    message = "\n".join(f"{listed(ranks)}: {text}" for text, ranks in said.items())
    first: BaseException = error.failures[min(error.failures)][0]
    if isinstance(first, MismatchError):
        raise MismatchError(message, first.problems) from first
    if isinstance(first, WriteError):
        raise WriteError(message, _written(error)) from first
    raise (type(first) if isinstance(first, CheckpointError) else CheckpointError)(message) from first


def _written(error: CheckpointException) -> bool | None:
    said = [getattr(problem, "written", False) for problem, _ in error.failures.values()]
    return next((written for written in said if written is not False), False)
