"""`Writer` and `Reader`: this package's checkpoints as a storage for ``torch.distributed.checkpoint`` (DCP).

DCP's planners decide which rank writes and reads which part of a tensor, and DCP sends plans, results and errors
between the ranks. `Writer` writes these parts to a `Draft`, as `muonfx.checkpoint.save` does, and `Reader` reads them.

DCP flattens a state dict: the value at ``state["model"]["fc.weight"]`` has the key "model.fc.weight". In a checkpoint
its name is "model/fc.weight", the name that it would have in `muonfx.checkpoint.save`. So there is one format, and the
keys follow from the names.

Replicas: DCP's planner lets one of the ranks that hold a value write it, and discards the plans of the others. Each
rank therefore keeps its plan, computes the checksums of the values that it does not write, and sends them with the
results of its write. The coordinator, rank 0, compares them before it writes the index.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from muonfx.checkpoint.errors import CheckpointError, ReplacedError
from muonfx.checkpoint.folder import (
    Result,
    StrPath,
    folder_named,
    inspect_and_keep,
    replacement,
    retried,
)
from muonfx.checkpoint.index import Chunk, Index, Leaf, data_name, from_json, save_id_of, to_json
from muonfx.checkpoint.leaves import StateSpec, name_of, path_of, plain_names, whole_box
from muonfx.checkpoint.match import Rules, match
from muonfx.checkpoint.reader import DataReader, Transfer
from muonfx.checkpoint.save import head_of, require_valid, require_writable
from muonfx.checkpoint.together import require_same
from muonfx.checkpoint.writer import (
    Draft,
    Entry,
    ProposedLeaf,
    SaveRequest,
    WrittenShards,
    block_checksums,
    entry_of,
    merged,
    plan_of,
)
from muonfx.sharding.shards.boxes import Box
from muonfx.tree import Spec

# ---------------------------------------------------------------------------------------------------------------- write


class _WrittenByRank(NamedTuple):
    """The result of a rank's write, which it sends to the coordinator."""

    shards: WrittenShards
    """The data file, and where the shards are in it."""
    leaves: dict[str, ProposedLeaf]
    """The tensors that this rank holds, also those that another rank has written, with checksums of their shards."""
    objects: dict[str, Any]
    """The values on this rank that are no tensors, as JSON."""


class _InFolder:
    """A storage of DCP whose checkpoints are folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether ``checkpoint_id`` can be the path of a folder."""
        try:
            folder_named(checkpoint_id)
        except (TypeError, ValueError):
            return False
        return True


class Writer(_InFolder, StorageWriter):
    """A storage for ``torch.distributed.checkpoint.save`` and ``async_save`` that writes a checkpoint of muonfx.

    The state dict may be of any model and optimizer. The checkpoint is complete or not there: if a process is killed
    at any moment, the checkpoint that was at the path stays. Every byte has a checksum, and nothing is pickled. Tensors
    are in safetensors files. Other values, such as the numbers of param groups, are JSON in the index.

    The leaf at ``state["model"]["fc.weight"]`` has the name "model/fc.weight". `muonfx.checkpoint.load` finds it under
    this name, for example with ``like={"model": {"fc.weight": tensor}}``. DCP turns the keys of dicts into strings.

    ``async_save`` saves in a thread. Give it a gloo group that nothing else uses, as ``process_group``: with torch's
    default group, the save and the steps of a muonfx optimizer may wait for each other's messages.

    Args:
        path: the folder of the checkpoint, equal on all ranks, which must share a file system. An existing checkpoint
            is replaced.
        step: the number of steps taken, for `muonfx.checkpoint.inspect`.
        extra: JSON values, as in `muonfx.checkpoint.save`.
        keep: how many checkpoints to keep in the parent folder, as in `muonfx.checkpoint.save`.

    Raises:
        TypeError: ``extra`` is not JSON. ``dcp.save`` raises its ``CheckpointException``, with one of the following
            errors as a cause, on all ranks; the checkpoint at the path is then unchanged.
        TypeError: a value of the state dict can be neither a tensor of a file nor JSON; the message has its name.
        CheckpointError: ranks hold different values under one key, or pass different arguments; the message has the
            name and the ranks.
        WriteError: writing failed, as in `muonfx.checkpoint.save`.
        ValueError: ``use_collectives=False``, or a planner with ``enable_plan_caching=True``: both keep the ranks from
            comparing what they hold.

    Example:
        >>> import tempfile, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> import muonfx as mfx
        >>> path = tempfile.mkdtemp()
        >>> state = {"model": {"w": torch.ones(2)}, "steps": 7}
        >>> with warnings.catch_warnings(action="ignore"):  # DCP warns that there is one process
        ...     _ = dcp.save(state, storage_writer=mfx.checkpoint.Writer(path))
        >>> mfx.checkpoint.read(path), mfx.checkpoint.inspect(path).objects
        ({'model/w': tensor([1., 1.])}, {'steps': 7})
    """

    _draft: Draft | None = None
    """The files of the save in progress, or of one that has failed on another rank; None on ranks other than 0."""

    def __init__(
        self,
        path: StrPath,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
    ) -> None:
        """Check the arguments. Nothing is written before ``dcp.save`` calls the other methods."""
        folder = folder_named(path)
        require_valid(folder, step, keep)
        head = head_of(step, extra)
        self._request = SaveRequest(folder, head, keep=keep)
        self._held_items: list[WriteItem] = []
        """The values that this rank holds, before the planner divides them among the ranks."""

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        """On rank 0, remove the files that all ranks have written in a save that has failed."""
        if self._draft is not None:
            self._draft.abandon()
            self._draft = None

    @contextmanager
    def _abandoning_after_error(self) -> Generator[None]:
        """Remove the files of the save, on rank 0, if the ``with`` block raises an error or is interrupted."""
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin a save to the folder ``checkpoint_id``, or to the same folder as before if it is None.

        DCP (``torch.distributed.checkpoint``) calls this first in each save.
        """
        self._abandon()  # remove the files of an earlier save, if that has failed
        if checkpoint_id is not None:
            folder = folder_named(checkpoint_id)
            require_valid(folder, self._request.head.step, self._request.keep)
            self._request = replace(self._request, path=folder)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save on this rank."""
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives=False lets each rank write a checkpoint of its own: leave it out, since a checkpoint "
                "holds the values of all ranks"
            )
        self._abandon()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keep the list of the values on this rank, and send the arguments of this writer to the coordinator."""
        _require_no_plan_caching(not plan.usable)
        self._held_items = plan.items
        return replace(plan, storage_data=self._request.arguments())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, create the folder, lock the save, and give each rank the name of its data file.

        The coordinator is rank 0. ``plans`` has the plan of each rank, from `prepare_local_plan`. DCP sends each result
        to its rank.
        """
        # In these plans, `storage_data` has the arguments of each rank's writer, such as its step.
        require_same([plan.storage_data for plan in plans], "save", "nothing was written")
        draft = Draft(self._request.path)
        self._draft = draft
        with self._abandoning_after_error(), draft.write_errors():
            draft.begin()
        # In the results, `storage_data` has the file of each rank.
        plans_with_files: list[SavePlan] = []
        for rank, plan in enumerate(plans):
            file = draft.path / data_name(draft.save_id, rank, len(plans))
            draft.files.append(file)  # a rank may not learn of an error
            plans_with_files.append(replace(plan, storage_data=file))
        return plans_with_files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the values of a plan to the data file of this rank, and compute checksums of the others it holds.

        DCP sends the result, a `WriteResult` with a `_WrittenByRank`, to `finish` on the coordinator.
        """
        with self._abandoning_after_error():
            _require_no_plan_caching(getattr(planner, "_enable_plan_caching", False))
            written = self._write(plan, planner)
        nbytes = 0
        if written.shards.file is not None:
            nbytes = written.shards.file.nbytes
        # DCP sends results to the coordinator unread, so one is enough, and its index may be empty.
        return _done([WriteResult(MetadataIndex(""), nbytes, written)])

    def _write(self, plan: SavePlan, planner: SavePlanner) -> _WrittenByRank:
        """Write the values of a plan, and compute checksums of all values on this rank.

        Args:
            plan: the values that DCP has assigned to this rank. ``self._held_items`` has all values on this rank; other
                ranks write some of them, of which only the checksums are computed. Rank 0 compares replicas by them.
            planner: returns the value of each item. One that a checkpoint cannot hold is an error before the write.
        """
        # An item describes a value. Its index has the key "model.fc.weight", and the offsets of a part of a tensor.
        items_to_write = {item.index: item for item in plan.items}
        held_items = {item.index: item for item in self._held_items} | items_to_write
        objects = _json_of_objects(held_items.values(), plan, planner)
        leaves: dict[str, ProposedLeaf] = {}
        entries_to_write: list[Entry] = []
        for index, item in held_items.items():
            if not _has_tensor_values(item):
                continue
            spec, entry = _shard_of(item, planner, _name_of_key(index.fqn, plan.planner_data))
            leaf = leaves.setdefault(entry.name, ProposedLeaf(spec, False, {}))
            if index in items_to_write:  # the write below computes its checksums
                entries_to_write.append(entry)
            else:
                leaf.checksums[entry.box] = " ".join(block_checksums(entry.values))
        written = self._write_entries(plan.storage_data, entries_to_write)
        for name, chunk in written.chunks:
            leaves[name].checksums[chunk.box] = " ".join(chunk.crc32)
        return _WrittenByRank(written, leaves, objects)

    def _write_entries(self, file: Path, entries: Sequence[Entry]) -> WrittenShards:
        """Write entries (shards of tensors) to the data file that rank 0 has assigned to this rank, if any.

        The name of the file contains the id of the save.
        """
        if not entries:
            return WrittenShards(None, [])
        draft = self._draft
        if draft is None:  # on ranks other than the coordinator
            draft = Draft(file.parent, save_id_of(file.name))
        with draft.write_errors():
            return draft.write(file, entries)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, compare replicas and write the index, which completes the checkpoint.

        Raise if ranks hold different values under one name, or if the shards (parts on a rank) do not fill a tensor.
        ``results`` has for each rank the list that `write_data` has returned. Rank 0 is the coordinator.
        """
        draft = self._draft
        assert draft is not None  # `prepare_global_plan` has created it
        # `write_data` has returned one result on each rank.
        written_by_rank = [results_of_rank[0].storage_data for results_of_rank in results]
        with self._abandoning_after_error():
            plan = plan_of([written.leaves for written in written_by_rank])
            files, leaves = merged([written.shards for written in written_by_rank], plan)
            objects = _merged_objects([written.objects for written in written_by_rank])
            _require_one_kind(leaves, objects)
            head = self._request.head  # has the step and the other arguments of this writer
            index = replace(
                head, save_id=draft.save_id, files=files, leaves=leaves, objects=objects
            )
            with draft.write_errors():
                draft.commit(index)
        # The checkpoint is complete: its files must not be removed, whatever fails from here on.
        self._draft = None
        draft.tidy(self._request.keep)


def _done(result: Result) -> Future[Result]:
    """Return a future that has its result. DCP expects futures, since a storage may work in the background."""
    future: Future[Result] = Future()
    future.set_result(result)
    return future


def _require_no_plan_caching(is_cached: bool) -> None:
    """Raise if the planner sends a plan only when it has changed, so that the ranks' plans cannot be compared."""
    if is_cached:
        raise ValueError(
            "the planner has enable_plan_caching=True, which keeps the ranks from comparing what they hold: pass "
            "planner=DefaultSavePlanner()"
        )


def _name_of_key(key: str, planner_data: object) -> str:
    """Return the name in a checkpoint of a key of DCP: "model/fc.weight" for "model.fc.weight".

    ``planner_data`` is a dict from key to path, ``{"model.fc.weight": ("model", "fc.weight")}``, if the planner has
    flattened the state dict. Otherwise the key is the name.
    """
    if isinstance(planner_data, Mapping) and isinstance(planner_data.get(key), tuple):
        return name_of(planner_data[key])
    return name_of((key,))


def _json_of_objects(
    items: Iterable[WriteItem], plan: SavePlan, planner: SavePlanner
) -> dict[str, Any]:
    """Return the values that are no tensors as JSON, by name: ``{"steps": 7}``. Raise for one that JSON cannot hold."""
    objects: dict[str, Any] = {}
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            name = _name_of_key(item.index.fqn, plan.planner_data)
            objects[name] = to_json(_object_of(item, planner, name), name)
    return objects


def _object_of(item: WriteItem, planner: SavePlanner, name: str) -> object:
    """Return a value of the state dict that is no tensor, such as 7, not the pickled bytes of 7.

    The planner, the object of ``torch.distributed.checkpoint`` that has the state dict, returns bytes by its public
    methods. Its usual class, `DefaultSavePlanner`, also has ``lookup_object``, which returns the value itself. ``name``
    is the name of the value, for the error.
    """
    lookup: Callable[[MetadataIndex], object] | None = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise TypeError(
            f"{name!r} is no tensor, and {type(planner).__name__} can only return its bytes, expected a planner with "
            "lookup_object(index): derive it from torch.distributed.checkpoint.DefaultSavePlanner"
        )
    return lookup(item.index)


def _has_tensor_values(item: WriteItem) -> bool:
    """Return whether an item of a plan is a tensor or a shard of one, but not an empty shard of a tensor with elements.

    If 3 rows are divided among 4 ranks, the last rank has such a shard.
    """
    data = item.tensor_data
    if data is None:  # a value that is no tensor
        return False
    has_elements = 0 not in data.chunk.sizes
    is_empty_tensor = 0 in data.size
    return has_elements or is_empty_tensor


def _shard_of(item: WriteItem, planner: SavePlanner, name: str) -> tuple[Spec, Entry]:
    """Return the shape and dtype of the whole tensor of which an item is a part, and this part, with its values.

    An item of ``torch.distributed.checkpoint`` describes a tensor to write, or the part of one on this rank; the
    planner has its values. For the rows 4 to 7 of an 8 x 2 tensor, the first result has the shape (8, 2), and the
    second the offsets (4, 0) and the sizes (4, 2).
    """
    values: Any = planner.resolve_data(item)
    require_writable(name, values)
    data = item.tensor_data
    assert data is not None  # each item of a tensor has it
    spec = Spec(tuple(data.size), values.dtype)
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if 0 in spec.shape:  # a tensor without elements is one shard, on whatever ranks it is
        box = whole_box(spec.shape)
    return spec, entry_of(name, box, spec.shape, values.detach().reshape(box.sizes))


def _merged_objects(objects_by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the values of all ranks that are no tensors; raise if ranks have different values of one name.

    ``objects_by_rank`` has a dict from name to JSON for each rank, such as ``{"steps": 7}``.
    """
    # The first rank that has a value of this name, and its value.
    first_holder: dict[str, tuple[int, Any]] = {}
    for rank, objects in enumerate(objects_by_rank):
        for name, value in objects.items():
            first_rank, first_value = first_holder.setdefault(name, (rank, value))
            if repr(value) != repr(first_value):  # repr, since 1 and True are equal
                raise CheckpointError(
                    f"nothing was written: {name!r} is {value!r:.200} on rank {rank} and {first_value!r:.200} on rank "
                    f"{first_rank}, expected equal values: {_advice_on_different_values(name)}"
                )
    return {name: from_json(value) for name, (_, value) in first_holder.items()}


def _require_one_kind(leaves: Mapping[str, Leaf], objects: Mapping[str, Any]) -> None:
    """Raise if a name has a tensor on some ranks, and another value, such as a learning rate, on others."""
    names_of_both_kinds = objects.keys() & leaves.keys()
    if names_of_both_kinds:
        raise CheckpointError(
            f"nothing was written: {min(names_of_both_kinds)!r} is a tensor on some ranks and another value on others, "
            "expected the same on all ranks"
        )


def _advice_on_different_values(name: str) -> str:
    """Return what to do about a value that differs between ranks: "optimizer/param_groups/0/lr", or another."""
    if "param_groups" not in path_of(name):
        return "use different keys for values of one rank"
    return (
        "if the ranks have different optimizers, as the stages of a pipeline have, call get_optimizer_state_dict with "
        "options=StateDictOptions(flatten_optimizer_state_dict=True), whose keys are the names of parameters"
    )


# ----------------------------------------------------------------------------------------------------------------- read


class Reader(_InFolder, StorageReader):
    """A storage for ``torch.distributed.checkpoint.load`` that reads a checkpoint of muonfx.

    `Writer` or `muonfx.checkpoint.save` have written it, on any number of ranks and under any layout. The checksum of
    every byte that is read is verified, and nothing from the file is unpickled. A rank copies values into its state
    dict after all that it needs were read, so an error of a rank leaves its tensors as they were. The values that a
    rank reads are in host memory twice for this time. After an error, the tensors of other ranks may have new values.

    Args:
        path: the folder of the checkpoint.
        cast: a dict from pattern to dtype, as in `muonfx.checkpoint.load`: matching leaves, whose tensors in the state
            dict have this dtype, may be rounded to it. A pattern is a name such as "model/fc.weight", the first levels
            of names, or a glob. Without it, a narrower dtype in the state dict is an error; a wider one is not.

    Raises:
        TypeError: ``cast`` is not a dict. ``dcp.load`` raises its ``CheckpointException``, with one of the following
            errors as a cause, on all ranks.
        NotFoundError: there is no checkpoint at the path.
        MismatchError: values would be rounded, or a pattern of ``cast`` matches no leaf.
        CorruptError: the checkpoint is damaged; the message names the file and the leaf.
        FormatError: it was written by a newer version of muonfx.
        ReplacedError: a save replaced the checkpoint while it was read: load again.

    Example:
        >>> import tempfile, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> import muonfx as mfx
        >>> path = mfx.checkpoint.save(tempfile.mkdtemp(), {"model": {"w": torch.ones(2)}})
        >>> state = {"model": {"w": torch.zeros(2)}}
        >>> with warnings.catch_warnings(action="ignore"):  # DCP warns that there is one process
        ...     dcp.load(state, storage_reader=mfx.checkpoint.Reader(path))
        >>> state
        {'model': {'w': tensor([1., 1.])}}
    """

    def __init__(self, path: StrPath, *, cast: Mapping[str, torch.dtype] | None = None) -> None:
        self._stack = ExitStack()
        """Closes the index and the data files."""
        self._path = folder_named(path)
        # A state dict may have a part of the leaves.
        self._rules = Rules(allow_extra=True, allow_other_chain=True, cast=cast)
        self._name_of_key: dict[str, str] = {}
        """The name of each value in the checkpoint by its key in DCP: "model/fc.weight" for "model.fc.weight"."""

    def __del__(self) -> None:
        if hasattr(self, "_stack"):
            self._stack.close()

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin another load; ``checkpoint_id`` is the path of its folder, or None for the path as before."""
        self._stack.close()
        if checkpoint_id is not None:
            self._path = folder_named(checkpoint_id)

    # From a parameter **kwargs, DCP would conclude that each rank may have metadata of its own.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Read the index, and return it as the metadata of ``torch.distributed.checkpoint``.

        The index stays locked until the data files are open: until then, a save that replaces the checkpoint does not
        remove them. If the index cannot be read, `set_up_storage_reader`, which is called next, raises the error.
        """
        self._stack.close()  # of an earlier load that has not ended
        try:
            # The index stays open, and so locked, until `read_data` closes all files.
            self._index = retried(
                self._path, lambda attempt: self._stack.enter_context(inspect_and_keep(self._path))
            )
            self._name_of_key = _names_of_keys([*self._index.leaves, *self._index.objects])
        except CheckpointError as error:
            self._stack.close()
            # DCP would replace an error that is raised here by one without its reason.
            return _Unreadable(error)
        return _metadata_of(self._index, self._name_of_key)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raise the error with which the index could not be read, if it was not."""
        if isinstance(metadata, _Unreadable):
            raise metadata.error

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Open the data files that this rank needs; they stay readable when the checkpoint is replaced."""
        numbers = {
            self._chunk_of(item).file for item in plan.items if item.type == LoadItemType.TENSOR
        }
        with replacement(self._path, self._index):
            self._data = self._stack.enter_context(DataReader(self._path, self._index))
            self._data.check_files(numbers)
        return replace(plan, storage_data=self._index.save_id)

    def _chunk_of(self, item: ReadItem) -> Chunk:
        """Return the chunk of a stored tensor from which an item of a plan reads; DCP identifies it by its offsets."""
        leaf = self._index.leaves[self._name_of_key[item.storage_index.fqn]]
        offsets = tuple(item.storage_index.offset or ())
        return next(chunk for chunk in leaf.chunks if chunk.box.offsets == offsets)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise if the ranks have opened different checkpoints, because a save replaced one meanwhile."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise ReplacedError(
                f"{self._path} was replaced while the ranks began to read it: load again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the values that this rank needs, and copy them into the state dict once all are read.

        An error of the read therefore leaves the state dict as it was. The plan has an item for each value, or part of
        a tensor, to read, and ``planner`` has the state dict. Both are of ``torch.distributed.checkpoint``.
        """
        tensor_items = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        # 1. Read into new memory.
        with self._stack:  # closes all files at the end
            destinations = [planner.resolve_tensor(item).detach() for item in tensor_items]
            self._require_no_rounding(tensor_items, destinations)
            transfers = [self._transfer_of(item) for item in tensor_items]
            with replacement(self._path, self._index):
                self._data.read(transfer for transfer in transfers if transfer.destination.numel())
        # 2. All values are read and verified: copy them to the tensors of the state dict.
        for item, destination, transfer in zip(tensor_items, destinations, transfers, strict=True):
            destination.copy_(transfer.destination)
            # Required after each change of a tensor from the planner.
            planner.commit_tensor(item, destination)
        # 3. The values that are no tensors, from the index.
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes_of(item))
        return _done(None)

    def _transfer_of(self, item: ReadItem) -> Transfer:
        """Return the `Transfer` that reads an item of a plan, a part of a tensor, into new memory.

        An item counts offsets from the begin of a chunk, the part of the tensor in a file, and a `Transfer` from the
        begin of the tensor: row 1 of a chunk that begins with row 4 is row 5.
        """
        name = self._name_of_key[item.storage_index.fqn]
        dtype = self._index.leaves[name].spec.dtype
        chunk = self._chunk_of(item)
        starts = zip(chunk.box.offsets, item.storage_offsets, strict=True)
        offsets = [chunk_offset + item_offset for chunk_offset, item_offset in starts]
        box = Box(tuple(offsets), tuple(item.lengths))
        return Transfer(name, chunk, box, torch.empty(box.sizes, dtype=dtype))

    def _require_no_rounding(
        self, items: Sequence[ReadItem], destinations: Sequence[Tensor]
    ) -> None:
        """Raise one error with all tensors to which stored values would be rounded, such as fp32 to bf16.

        ``destinations`` has the tensor of each item. The planner of ``torch.distributed.checkpoint`` has compared names
        and shapes, so only dtypes can differ. ``cast=`` of this reader allows rounding.
        """
        # `match` compares names without "_orig_mod." of wrappers
        plain_name_of = plain_names(self._index.leaves)
        specs: dict[str, Spec] = {}  # the requested tensors
        for item, destination in zip(items, destinations, strict=True):
            # "model/fc.weight" for the key "model.fc.weight"
            name = self._name_of_key[item.storage_index.fqn]
            shape = self._index.leaves[name].spec.shape
            specs[plain_name_of[name]] = Spec(shape, destination.dtype)
        # `match` raises the error. The leaves that it returns are known here.
        match(self._index, StateSpec(specs), self._rules, section=None, where=str(self._path))

    def _bytes_of(self, item: ReadItem) -> io.BytesIO:
        """Return the value of an item that is no tensor, such as a learning rate, pickled, as planners of torch expect.

        The planner unpickles these bytes, which are made here. Nothing that comes from a file is unpickled.
        """
        name = self._name_of_key[item.storage_index.fqn]
        buffer = io.BytesIO()
        torch.save(self._index.objects[name], buffer)
        buffer.seek(0)  # planners read from the position
        return buffer


class _Unreadable(Metadata):
    """The metadata of a checkpoint that cannot be read: an access to its `state_dict_metadata` raises the reason."""

    def __init__(self, error: CheckpointError) -> None:
        self.error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self.error


def _names_of_keys(names: Sequence[str]) -> dict[str, str]:
    """Return a dict from the key in DCP to the name in the checkpoint: ``{"model.fc.weight": "model/fc.weight"}``.

    Raise if two names have one key, as "model/fc.weight" and "model.fc/weight".
    """
    name_of_key: dict[str, str] = {}
    for name in names:
        key = ".".join(map(str, path_of(name)))
        if key in name_of_key:
            raise CheckpointError(
                f"both {name_of_key[key]!r} and {name!r} have the key {key!r} in torch.distributed.checkpoint: read "
                "the checkpoint with muonfx.checkpoint.load"
            )
        name_of_key[key] = name
    return name_of_key


def _metadata_of(index: Index, name_of_key: Mapping[str, str]) -> Metadata:
    """Return an index in the form of DCP: a description of each value by its key.

    ``name_of_key`` has the name of each value by its key: ``{"model.fc.weight": "model/fc.weight"}``.
    """
    described: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for key, name in name_of_key.items():
        paths[key] = path_of(name)
        if name in index.leaves:
            described[key] = _tensor_metadata(index.leaves[name])
        else:  # a value that is no tensor
            described[key] = BytesStorageMetadata()
    return Metadata(described, planner_data=paths)


def _tensor_metadata(leaf: Leaf) -> TensorStorageMetadata:
    """Return the shape, dtype and chunks of a leaf in the form of DCP."""
    chunks: list[ChunkStorageMetadata] = []
    for chunk in leaf.chunks:
        chunks.append(
            ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes))
        )
    return TensorStorageMetadata(
        TensorProperties(leaf.spec.dtype), torch.Size(leaf.spec.shape), chunks
    )
