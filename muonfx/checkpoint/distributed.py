"""Many processes: torch.distributed.checkpoint plans and carries, our files hold the bytes.

torch asks every rank what it has (the local plan), lets one rank decide who writes what (the global plan: a replicated
tensor is written once), and carries errors from any rank to all. What it does not have is a storage without pickle: its
file system writer pickles the metadata, and its safetensors writer keeps neither dtypes of leaves nor checksums. So the
storage here is ours: each rank writes one data file, and rank 0 the index, when all have written.

Everything that can be wrong is looked at within torch's steps, and raised there: an error on one rank reaches all.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future as Background
from contextlib import suppress
from dataclasses import dataclass, field, replace
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
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from muonfx.boxes import Box, cover
from muonfx.checkpoint.data import Part, Progress, write_data
from muonfx.checkpoint.errors import CheckpointError, CorruptError, MismatchError, WriteError
from muonfx.checkpoint.flat import FlatPiece
from muonfx.checkpoint.index import Chunk, DataFile, Index, Leaf
from muonfx.checkpoint.keep import before, read_index
from muonfx.checkpoint.loading import kept, rebuilt, targets_like
from muonfx.checkpoint.reading import Reader
from muonfx.checkpoint.rules import Rules, match
from muonfx.checkpoint.spec import described
from muonfx.checkpoint.writing import Request, commit, data_name, discard, writing
from muonfx.core import Transform
from muonfx.tree import PyTree, Spec

__all__ = ["load_together", "save_together", "save_together_in_background"]


@dataclass
class _Job:
    """One save on one rank: what was asked for, and the leaves, once they have been checked."""

    path: Path
    request: Request
    progress: Progress | None
    leaves: dict[str, Any] | None = None
    problem: Exception | None = None
    save_id: str = ""
    written: list[str] = field(default_factory=list)
    made: bool = False

    def checked(self) -> dict[str, Any]:
        """The leaves; raises what is wrong with them, also if that was found out before."""
        if self.problem is not None:
            raise self.problem
        if self.leaves is None:
            self.leaves = self.request.leaves(whole=False)
        return self.leaves


class _SavePlanner(DefaultSavePlanner):
    """Plans as torch does, for the leaves of a job."""

    def __init__(self, job: _Job) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.job = job

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(self.job.checked(), storage_meta, is_coordinator)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Require that the ranks mean one and the same leaf by a name; then decide who writes what."""
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

    def __init__(self, job: _Job) -> None:
        self.job = job

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a writer is made for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do before the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Agree on the names of the data files."""
        save_id = secrets.token_hex(8)
        names = [data_name(save_id, rank, len(plans)) for rank in range(len(plans))]
        return [replace(plan, storage_data=(save_id, name)) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes."""
        self.job.save_id, name = plan.storage_data

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
            self.job.made = not self.job.path.exists()
            self.job.written.append(name)
            with writing(self.job.path, name):
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
        path = self.job.path
        # The coordinator may be a rank that has nothing to write.
        with writing(path, self.job.written[0] if self.job.written else data_name(self.job.save_id, 0, len(results))):
            for file in files:
                if not (path / file.name).exists():
                    raise FileNotFoundError(f"{file.name} is not to be seen from rank 0: do all see one file system?")
            commit(path, self.job.request.about().to_index(self.job.save_id, files, leaves), self.job.request.keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def save_together(path: Path, request: Request, progress: Progress | None, group: dist.ProcessGroup) -> None:
    """Save, on all ranks of a group together."""
    job = _Job(path, request, progress)
    try:
        dcp.save({}, storage_writer=_Writer(job), planner=_SavePlanner(job), process_group=group)
    except CheckpointException as error:
        for name in job.written:  # some rank has failed, so nobody will name what this one has written
            discard(path, name, made=job.made)
        _raise(error, str(path))


class _Stager(AsyncStager):
    """Copies the leaves into host memory, where training does not change them."""

    def __init__(self, job: _Job) -> None:
        self.job = job

    def stage(self, state_dict: Any) -> Any:
        """Copy; an error is kept for the step that carries it to all ranks."""
        try:
            self.job.leaves = {name: _copied(leaf) for name, leaf in self.job.checked().items()}
        except Exception as error:
            self.job.problem = error
        return state_dict

    def synchronize_staging(self) -> None:
        """Copies are finished when `stage` returns."""

    def close(self) -> None:
        """Nothing is held."""


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, FlatPiece):
        return leaf.empty_like("cpu").copy_(leaf)
    if isinstance(leaf, DTensor):
        stager = DefaultStager(StagingOptions(False, False, False, False))
        staged: Any = stager.stage({"leaf": leaf.detach()})
        stager.close()
        return staged["leaf"]
    return leaf.detach().to("cpu", copy=True)


def save_together_in_background(
    path: Path, request: Request, progress: Progress | None, group: dist.ProcessGroup
) -> Background[Any]:
    """Copy the leaves now and save them in a thread, on all ranks of a group together."""
    with suppress(TypeError, ValueError):  # what is wrong with it is said later, on all ranks alike
        request = request._replace(extra=request.about().extra)
    job = _Job(path, request, progress)
    saving: Any = dcp.async_save(
        {}, storage_writer=_Writer(job), planner=_SavePlanner(job), process_group=group, async_stager=_Stager(job)
    )
    done: Background[Any] = Background()

    def finish(saved: Background[Any]) -> None:
        error = saved.exception()
        if isinstance(error, CheckpointException):
            for name in job.written:
                discard(path, name, made=job.made)
            try:
                _raise(error, str(path))
            except CheckpointError as ours:
                error = ours
        if error is None:
            done.set_result(path)
        else:
            done.set_exception(error)

    saving.add_done_callback(finish)
    return done


# ------------------------------------------------------------------------------------------------------------- loading


class _LoadPlanner(DefaultLoadPlanner):
    """Plans as torch does, for the leaves that the rules find; torch sees them under the checkpoint's names."""

    def __init__(self, prepare: Callable[[Index], Mapping[str, Any]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.prepare = prepare

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        if isinstance(metadata.planner_data, Exception):
            raise metadata.planner_data
        # Not torch's own set-up, which takes apart what is a dataclass and makes room for meta tensors.
        self.state_dict = self.original_state_dict = dict(self.prepare(metadata.planner_data))
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The room for a box; torch itself asks tensors only."""
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, FlatPiece) else super().lookup_tensor(index)


class _Reader(StorageReader):
    """Reads boxes of chunks; every byte that it reads is checked."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to forget: a reader is made for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's words; an error is handed on, since torch would take it for missing metadata."""
        try:
            self.index = index = read_index(self.path)
        except CheckpointError as error:
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
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs."""
        leaves = self.index.leaves
        with Reader(self.path, self.index) as reader:
            for item in plan.items:
                name, at = item.storage_index.fqn, tuple(item.storage_index.offset or ())
                chunk = next(c for c in leaves[name].chunks if c.offsets == at and c.box.numel)
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                room = planner.resolve_tensor(item).detach()
                reader.read_box(name, leaves[name], chunk, box, room)
                planner.commit_tensor(item, room)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def load_together(
    path: Path,
    like: Any,
    tx: Transform | None,
    rules: Rules,
    device: Any,
    group: dist.ProcessGroup,
    *,
    section: str,
) -> PyTree:
    """Load, on all ranks of a group together."""
    loaded: dict[str, Any] = {}

    def prepare(index: Index) -> dict[str, Any]:
        want, targets = targets_like(like, tx, device, section)
        found = match(index, want, rules, section=section, where=str(path))
        into: dict[str, Any] = {}
        for name, (old, fresh) in targets.items():
            source = found[name]
            loaded[name] = kept(name, old, fresh) if source is None else fresh()
            if source is not None:
                into[source] = loaded[name]
        return into

    try:
        dcp.load({}, storage_reader=_Reader(path), planner=_LoadPlanner(prepare), process_group=group)
    except CheckpointException as error:
        _raise(error, str(path))
    return rebuilt(like, loaded, section)


def _raise(error: CheckpointException, path: str) -> NoReturn:
    """Raise what has gone wrong on the ranks as one error of ours, the same on all ranks."""
    said: dict[str, list[int]] = {}
    for rank, (problem, _) in sorted(error.failures.items()):
        text = problem.bare if isinstance(problem, CorruptError) else str(problem)
        said.setdefault(text if isinstance(problem, CheckpointError) else f"{path}: {text}", []).append(rank)
    lines = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items()]
    message = "\n".join(lines)
    first: BaseException = error.failures[min(error.failures)][0]
    if isinstance(first, CorruptError):
        raise CorruptError(message, before(Path(path))) from first
    if isinstance(first, MismatchError):
        raise MismatchError(message, first.problems) from first
    if isinstance(first, OSError):
        raise WriteError(message) from first
    raise (type(first) if isinstance(first, CheckpointError) else CheckpointError)(message) from first
