"""Many processes: torch.distributed.checkpoint plans and carries, our files hold the bytes.

torch asks every rank what it has (the local plan), lets one rank decide who writes what (the global plan: a replicated
tensor is written once), and carries errors from any rank to all. What it does not have is a storage without pickle: its
file system writer pickles the metadata, and its safetensors writer keeps neither dtypes of leaves nor checksums. So the
storage here is ours: each rank writes one data file, and rank 0 the index, when all have written.

Everything that can be wrong is looked at within torch's steps, and raised there: an error on one rank reaches all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
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

from muonfx.checkpoint.catalog import TRIES, before, folder_named, inspect, reading, replaced_often
from muonfx.checkpoint.coordination import Ticket, warn_of_other_writers
from muonfx.checkpoint.data import Part, write_data
from muonfx.checkpoint.errors import CheckpointError, CorruptError, MismatchError, ReplacedError, WriteError
from muonfx.checkpoint.index import Chunk, DataFile, Leaf, shortened
from muonfx.checkpoint.reading import Reader
from muonfx.checkpoint.rules import Rules
from muonfx.checkpoint.spec import described
from muonfx.checkpoint.target import Target
from muonfx.checkpoint.writing import Draft, Job
from muonfx.sharding.boxes import Box, cover
from muonfx.sharding.consensus import listed
from muonfx.sharding.shards import FlatPiece
from muonfx.tree import PyTree, Spec

__all__ = ["load_together", "save_together"]


@contextmanager
def _sendable() -> Generator[None]:
    """Turn an error that cannot be sent to the other ranks, which would wait for it, into one that says the same."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointError) or type(error).__module__ == "builtins":
            raise
        # Classes of others may be local, or not be made again from what they were made of.
        raise CheckpointError(f"{type(error).__name__}: {error}") from error


class _SavePlanner(DefaultSavePlanner):
    """Plans as torch does, for the leaves of a job."""

    def __init__(self, job: Job, ranks: int) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.job, self.ranks = job, ranks

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        with _sendable():
            super().set_up_planner(self.job.checked_leaves(), storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Require the same arguments on all ranks, and one leaf for each name; then decide who writes what."""
        if len(all_plans) != self.ranks:  # torch saves alone, and says so, if the group is gone by now
            raise CheckpointError(f"{self.job.path} was not written: the process group was destroyed before")
        _require_same([plan.storage_data for plan in all_plans], "save", "nothing was written")
        seen: dict[str, tuple[Spec, int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                spec = Spec(tuple(item.tensor_data.size), item.tensor_data.properties.dtype)
                first, other = seen.setdefault(item.index.fqn, (spec, rank))
                if spec != first:
                    raise ValueError(
                        f"the leaf {item.index.fqn!r} is {described(first)} on rank {other} and {described(spec)} on "
                        f"rank {rank}: its global shape and dtype must be the same on all"
                    )
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of a box; torch itself asks tensors only."""
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, FlatPiece) else super().lookup_object(index)


class _Writer(StorageWriter):
    """Writes a data file on each rank, and the index on one."""

    def __init__(self, job: Job, *, commits: bool) -> None:
        self.job, self.commits = job, commits
        self.draft: Draft | None = None
        """From when this rank has begun to write."""

    def abandon(self) -> bool | None:
        """Give up, when nothing more is heard of the other ranks; whether the checkpoint is there, if that is known."""
        if self.draft is None:
            return False if self.commits else None
        written = self.draft.stands() if self.commits else self.draft.is_there()
        if self.commits and written is False:
            self.draft.discard()
        # The rank that commits may be about to: what it will name must stay.
        return written if self.commits or written else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a writer is made for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do before the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add the arguments that must be the same on all ranks."""
        job = self.job
        chain = None if job.tx is None else job.tx.fingerprint
        said = {"path": str(job.path), "step": job.step, "extra": job.extra, "keep": job.keep, "tx": chain}
        return replace(plan, storage_data={name: repr(value) for name, value in said.items()})

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Claim the folder, and agree on the names of the data files."""
        draft = self.draft = Draft(self.job.path)
        with draft.whole_or_not():
            draft.begin()
            warn_of_other_writers(draft.path, draft.save_id)
        return [
            replace(plan, storage_data=(draft.save_id, draft.data_name(rank, len(plans))))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes."""
        save_id, name = plan.storage_data
        draft = self.draft = self.draft or Draft(self.job.path, save_id)

        def part(item: Any) -> Part:
            data = item.tensor_data
            box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            whole = box == Box((0,) * len(data.size), tuple(data.size))

            def tensor() -> Tensor:
                found = planner.resolve_data(item)
                assert isinstance(found, Tensor)
                return found

            return Part(item.index.fqn, data.properties.dtype, box, whole, tensor)

        results: list[WriteResult] = []
        if plan.items:
            with _sendable(), draft.whole_or_not():
                draft.begin(claiming=False)
                file, chunks = write_data(self.job.path / name, [part(item) for item in plan.items], self.job.progress)
            results = [
                WriteResult(item.index, file.nbytes, (file, chunk))
                for item, chunk in zip(plan.items, chunks, strict=True)
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index: all ranks have written."""
        files: dict[DataFile, int] = {}
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        for result in (result for rank in results for result in rank):
            file, chunk = result.storage_data
            chunks[result.index.fqn].append(replace(chunk, file=files.setdefault(file, len(files))))
        leaves: dict[str, Leaf] = {}
        for name, described_by_torch in metadata.state_dict_metadata.items():
            assert isinstance(described_by_torch, TensorStorageMetadata)
            spec = Spec(tuple(described_by_torch.size), described_by_torch.properties.dtype)
            if problem := cover(spec.shape, [chunk.box for chunk in chunks[name]]):
                raise ValueError(f"the pieces of {name!r} that the ranks have {problem}, of {described(spec)}")
            leaves[name] = Leaf(spec, tuple(sorted(chunks[name], key=lambda chunk: chunk.offsets)))
        draft = self.draft
        assert draft is not None
        try:
            with draft.whole_or_not():
                draft.commit(self.job.to_index(draft.save_id, files, leaves))
            draft.tidy(self.job.keep)
        except BaseException as error:
            if draft.stands() is False or isinstance(error, WriteError):
                raise
            # The other ranks must know that their files are not to be taken back.
            raise WriteError(f"{draft.path} was written, but what follows failed: {error!r}", written=True) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def save_together(job: Job) -> None:
    """Save, on all ranks of the job's group together."""
    group = check_group(job.group, f"the save to {job.path}")
    writer = _Writer(job, commits=dist.get_rank(group) == 0)
    planner = _SavePlanner(job, dist.get_world_size(group))
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        # Some rank has failed, so nobody will name what this one has written, unless the index was renamed before.
        if writer.draft is not None and _written(error) is False:
            writer.draft.discard()
        _raise(error, str(job.path))
    except BaseException as error:
        written = writer.abandon()
        if not isinstance(error, _FROM_TORCH):
            raise
        state = {True: "was written, whole, but", False: "was not written:", None: "may have been written or not:"}
        raise WriteError(f"{job.path} {state[written]} {_ended(error)}", written) from error


# ------------------------------------------------------------------------------------------------------------- loading


class _LoadPlanner(DefaultLoadPlanner):
    """Plans as torch does, for the leaves that the rules find; torch sees them under the checkpoint's names."""

    def __init__(self, make_target: Callable[[], Target], where: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.make_target, self.where = make_target, where

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        if isinstance(metadata.planner_data, Exception):
            raise metadata.planner_data
        # Not torch's own set-up, which takes apart what is a dataclass and makes room for meta tensors.
        with _sendable():
            self.target = self.make_target()
            self.leaves, rooms = self.target.make_room(metadata.planner_data, self.where)
            self.state_dict = self.original_state_dict = rooms
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The room for a box; torch itself asks tensors only."""
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, FlatPiece) else super().lookup_tensor(index)


class _Reader(StorageReader):
    """Reads boxes of chunks; every byte that it reads is checked."""

    def __init__(self, path: Any, stack: ExitStack, rules: Rules) -> None:
        self.path, self.stack, self.rules = path, stack, rules

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a reader is made for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's words; an error is handed on, since torch would take it for missing metadata."""
        try:
            self.path = folder_named(self.path)
            self.index = index = inspect(self.path)
        except Exception as error:
            return Metadata({}, planner_data=error)
        found: dict[str, Any] = {}
        for name, leaf in index.leaves.items():
            boxes = [chunk.box for chunk in leaf.chunks if chunk.box.numel]
            found[name] = TensorStorageMetadata(
                TensorProperties(leaf.spec.dtype),
                torch.Size(leaf.spec.shape),
                [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes],
            )
        return Metadata(found, planner_data=index)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Open what this rank needs, so that it stays when the checkpoint is replaced; say which one it has seen."""
        with reading(self.path, self.index):
            self.reader = self.stack.enter_context(Reader(self.path, self.index))
            self.reader.check_files({self.chunk(item).file for item in plan.items})
        return replace(plan, storage_data=(self.index.save_id, str(self.path), self.rules.described()))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Require that all ranks read the same checkpoint, by the same rules."""
        seen = [plan.storage_data for plan in plans]
        if len({save_id for save_id, _, _ in seen}) > 1:
            _require_same([{"path": repr(path)} for _, path, _ in seen], "load", "nothing was loaded")
            raise ReplacedError(f"{self.path} was replaced while the ranks began to read it")
        _require_same([rules for _, _, rules in seen], "load", "nothing was loaded")
        return plans

    def chunk(self, item: ReadItem) -> Chunk:
        """The chunk that an item lies in."""
        at = tuple(item.storage_index.offset or ())
        chunks = self.index.leaves[item.storage_index.fqn].chunks
        return next(chunk for chunk in chunks if chunk.offsets == at and chunk.box.numel)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs."""
        with reading(self.path, self.index):
            for item in plan.items:
                name = item.storage_index.fqn
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                room = planner.resolve_tensor(item).detach()
                self.reader.read_box(name, self.index.leaves[name], self.chunk(item), box, room)
                planner.commit_tensor(item, room)
            self.reader.close()  # here, where an error reaches all ranks
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def load_together(
    path: str | os.PathLike[str], make_target: Callable[[], Target], rules: Rules, group: dist.ProcessGroup
) -> PyTree:
    """Load, on all ranks of a group together; the target is made where what that raises reaches all of them."""
    check_group(group, f"the load of {path}")

    def attempt() -> PyTree:
        planner = _LoadPlanner(make_target, str(path))
        with ExitStack() as stack:
            dcp.load({}, storage_reader=_Reader(path, stack, rules), planner=planner, process_group=group)
        return planner.target.rebuild(planner.leaves)

    with Ticket(id(group)):
        for attempts in range(TRIES):
            try:
                return attempt()
            except CheckpointException as error:
                # All ranks have the same failures before them, and so go the same way.
                if not any(isinstance(problem, ReplacedError) for problem, _ in error.failures.values()):
                    _raise(error, str(path), _different_paths(path, group))
            except _FROM_TORCH as error:
                raise CheckpointError(f"{path} was not loaded: {_ended(error)}") from error
            time.sleep(min(0.5, 0.001 * 2**attempts))
    raise ReplacedError(replaced_often(Path(path)))


# ----------------------------------------------------------------------------------------------------------- both ways


def _require_same(said: list[dict[str, str]], what: str, state: str) -> None:
    """Require that arguments, given for each rank by name, are the same on all ranks.

    Raises:
        CheckpointError: the first argument that differs, with its value on each rank.
    """
    for name in said[0]:
        if difference := _difference([of_rank[name] for of_rank in said]):
            raise CheckpointError(f"{state}: the ranks {what} with different {name}= ({difference}): give all the same")


def _difference(values: list[str]) -> str:
    """The ranks that have each value; empty if all have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return (
        "; ".join(f"{listed(own)}: {shortened(value, 200)}" for value, own in ranks.items()) if len(ranks) > 1 else ""
    )


def _different_paths(path: object, group: dist.ProcessGroup) -> str:
    """A line for an error that all ranks have met, if they have given different paths."""
    said: list[Any] = [None] * dist.get_world_size(group)
    with suppress(RuntimeError):  # a rank has ended since, and there is an error to raise already
        dist.all_gather_object(said, repr(str(path)), group=group)
        if difference := _difference(said):
            return f"\nthe ranks load different paths: {difference}"
    return ""


_FROM_TORCH = (RuntimeError, ValueError, AssertionError, OSError)
"""Errors that torch.distributed raises beside those that it carries from rank to rank."""


def check_group(group: Any, what: str) -> dist.ProcessGroup:
    """Require a group of processes that this one is a rank of.

    Raises:
        CheckpointError: it is none.
    """
    try:
        found = dist.get_rank(group) if dist.is_initialized() else None
    except (ValueError, RuntimeError, TypeError, AttributeError):
        found = None
    if found is None or found < 0:
        why = "it was destroyed, or this process is no rank of it"
        raise CheckpointError(f"{what}: group={group!r} is not a process group that can be used: {why}")
    return group


def _ended(error: BaseException) -> str:
    if isinstance(error, ValueError):  # which torch raises for a group that it does not know
        return f"the process group was destroyed in the midst of it: {error}"
    return f"another rank has ended, or did not come within the group's timeout: {error}"


def _raise(error: CheckpointException, path: str, also: str = "") -> NoReturn:
    """Raise what has gone wrong on the ranks as one error of ours, the same on all ranks."""
    said: dict[str, list[int]] = {}
    for rank, (problem, _) in sorted(error.failures.items()):
        text = problem.detail if isinstance(problem, CorruptError) else str(problem)
        said.setdefault(text if isinstance(problem, CheckpointError) else f"{path}: {text}", []).append(rank)
    lines = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items()]
    message = "\n".join(lines) + also
    first: BaseException = error.failures[min(error.failures)][0]
    if isinstance(first, CorruptError):
        raise CorruptError(message, before(Path(path))) from first
    if isinstance(first, MismatchError):
        raise MismatchError(message, first.problems) from first
    if isinstance(first, WriteError):
        raise WriteError(message, _written(error)) from first
    raise (type(first) if isinstance(first, CheckpointError) else CheckpointError)(message) from first


def _written(error: CheckpointException) -> bool | None:
    """Tell whether a failed save stands at the path; only the rank that writes the index can find that it does."""
    said = [getattr(problem, "written", False) for problem, _ in error.failures.values()]
    return next((written for written in said if written is not False), False)
