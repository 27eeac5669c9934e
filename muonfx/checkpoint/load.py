"""Load a checkpoint into the structure of another state, in one process or together with all ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from muonfx import tree
from muonfx.checkpoint.errors import (
    CheckpointError,
    LostRanksError,
    MismatchError,
    ReplacedError,
    mismatch,
)
from muonfx.checkpoint.files import no_collection
from muonfx.checkpoint.folder import (
    StrPath,
    folder_named,
    inspect_and_keep,
    replacement,
    retried,
    with_reader,
)
from muonfx.checkpoint.group_names import Group, new_params, renamed_groups
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.leaves import (
    GROUPS,
    PARAMS,
    SCHEDULER,
    StateSpec,
    is_optimizer,
    named_tensors,
    require_whole,
    spec_of_named,
)
from muonfx.checkpoint.match import Allow, Rules, SavedLeaf, match, patterns_of
from muonfx.checkpoint.reader import DataReader
from muonfx.checkpoint.save import wait_for_save
from muonfx.checkpoint.state_dicts import as_saved_optimizer
from muonfx.checkpoint.together import Together, require_same
from muonfx.core import Transform
from muonfx.core.chain_differences import differences_of_chains
from muonfx.core.checks import warn_caller
from muonfx.core.precision import product_dtypes
from muonfx.core.transform import require_transform
from muonfx.core.value import without_stand_ins
from muonfx.internal.renaming import Rename
from muonfx.sharding.transform import Sharded, from_global, is_global, to_global
from muonfx.tree import PyTree, Spec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def load(
    path: StrPath,
    like: PyTree | StateSpec,
    *,
    tx: Transform | None = None,
    params: PyTree = None,
    scheduler: Any = None,
    allow_missing: Allow = False,
    allow_extra: Allow = False,
    allow_other_chain: bool = False,
    cast: Mapping[str, torch.dtype] | None = None,
    rename: Rename | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
) -> PyTree:
    """Load a state from a checkpoint that `save` wrote under any layout and number of ranks.

    The result is a new state with the structure, dtypes, strides and devices of ``like``, such as ``tx.init(params)``.
    ``like`` also gives the names of the tensors to load, and is not modified. Values are restored bit for bit, also
    into a wider dtype. Nothing is unpickled, and the checksum of every byte that is read is verified.

    Leaves have names such as "momentum/trace/fc.weight". ``allow_missing``, ``allow_extra``, ``cast`` and ``rename``
    accept patterns: a name, the first levels of names ("momentum/trace"), or a glob. A pattern that matches no leaf is
    an error. Prefixes that wrappers such as ``torch.compile`` add to parameter names are ignored, so a state of a
    wrapped model can be loaded for the unwrapped model and vice versa.

    Args:
        path: the folder of the checkpoint.
        like: a state, or a `StateSpec` from `muonfx.spec` to load into host memory. If leaves
            are shards (`DTensor`, or `FlatShard`, an interval of a flattened tensor), each rank reads its own, and
            ``group`` is required. Or a `muonfx.Muon` or `muonfx.TransformOptimizer`, such as `save` has stored:
            its state is overwritten, and its groups get the numbers in the checkpoint; changed schedules come from the
            code.
            The checkpoint may also have the state dict of this optimizer, written by ``dcp.save`` with `Writer`. Then
            another chain is a warning, and the other values are ignored.
        tx: the transform that will use the state. Its fingerprint, a hash of its structure, is compared with the
            checkpoint's. A `StateSpec` from `muonfx.spec` contains the transform already. If `muonfx.sharding.sharded`
            made ``tx``, ``like`` and the result are this rank's local state, as ``tx.init`` returns it. Not given for
            an optimizer, which has its transform.
        params: with an optimizer, the parameters and buffers of the model to load too, ``model.state_dict()``, if
            `save` has stored them. They are overwritten. ``allow_extra`` and ``rename`` apply to them too, as in
            ``allow_extra=["params/head.weight"]``. For missing parameters or other dtypes, call `load_params`. None:
            they are not loaded.
        scheduler: a scheduler of torch for the optimizer ``like``, whose state `save` has stored, to load that too.
        allow_missing: patterns of leaves that may be missing in the checkpoint, or True for all leaves; the missing
            leaves are copied from ``like``.
            For an optimizer, "param_groups" and "scheduler" are names too: ``allow_missing=["param_groups"]`` keeps the
            groups if the checkpoint has none.
        allow_extra: patterns of leaves of the checkpoint that may be missing in ``like``, or True for all leaves.
            ``["param_groups"]`` keeps the groups of the optimizer, for example if it has other labels now.
        allow_other_chain: True to load a state that another transform wrote. The state of a parameter that moved as a
            whole, such as to a new label or into a chain, is found. A step count is copied to all labels that the state
            is divided into.
        cast: a dict from pattern to dtype; matching leaves, which have this dtype in ``like``, may be rounded to it.
        rename: a dict from names in the checkpoint to names in ``like``. A key is a name, the first
            levels of names, or a pattern. Each ``*`` in a pattern matches any text, which replaces the ``*`` at the
            same place in the value: ``{"*/encoder.*": "*/model.encoder.*"}``. If several entries match a name, the
            most specific one applies. It is an error if an entry matches no leaf, or if two leaves get the same name.
            A chain that differs only by these names, such as in its labels, is no other chain.
        device: the device of all leaves; None for the devices of the leaves of ``like``.
        group: a process group, whose ranks must all call this function; if one rank fails, all raise. None: this
            process reads alone, or, if ``tx`` is sharded and ``like`` is not a `StateSpec`, the group of its layout.

    Returns:
        A new state; for an optimizer, its own `transform_state`, with the new values.

    Raises:
        TypeError: an argument has another type, does not go with an optimizer, or requires one.
        NotFoundError: there is no checkpoint at the path.
        MismatchError: leaves are missing or unexpected, have another shape, or would be rounded to a narrower dtype; or
            another transform wrote the state; or groups or the scheduler of an optimizer are missing, unexpected or of
            another kind. The message lists every mismatch and how to allow it. Nothing was loaded.
        CorruptError: the checkpoint is damaged; the message names the file and the leaf.
        FormatError: it was written by a newer version of muonfx.

    Warns:
        UserWarning: the transform's matrix products were computed in another dtype than they are now; its numbers
            differ from those of the saved transform (those of ``tx`` are used; of an optimizer, those of the groups in
            the checkpoint, and the changed schedules of the optimizer); or
            ``allow_other_chain`` has found moved states, which the message lists.

    Example:
        >>> import tempfile
        >>> import muonfx as mfx
        >>> params = {"w": torch.ones(2, 3)}
        >>> path = mfx.checkpoint.save(tempfile.mkdtemp(), mfx.momentum().init(params))
        >>> half = mfx.spec(mfx.momentum(dtype=torch.bfloat16), params)
        >>> mfx.checkpoint.load(path, like=half)
        Traceback (most recent call last):
        muonfx.checkpoint.errors.MismatchError: ... does not fit, nothing was loaded:
          narrowing: 'trace/w' is torch.float32 in the checkpoint, expected torch.bfloat16
        what to do:
          to round: cast={'trace': torch.bfloat16} ...
        >>> mfx.checkpoint.load(path, like=half, cast={"trace": torch.bfloat16}).trace["w"].dtype
        torch.bfloat16
    """
    rules = {
        "allow_missing": allow_missing,
        "allow_extra": allow_extra,
        "allow_other_chain": allow_other_chain,
        "cast": cast,
        "rename": rename,
    }
    if is_optimizer(like):
        require_no_arguments(tx, device)
        return _load_optimizer(path, like, params, scheduler, rules, group)
    _require_no_parts_of_optimizer(params, scheduler)
    return load_checkpoint(path, LoadRequest(like, tx, rules, device=device), group).tree


def _load_optimizer(
    path: StrPath,
    optimizer: Any,
    params: PyTree,
    scheduler: Any,
    rules: Mapping[str, Any],
    group: ProcessGroup | None,
) -> PyTree:
    """Load a checkpoint into an optimizer and, if they are given, parameters and a scheduler; return its new state.

    ``rules`` are the arguments of `Rules`, such as ``{"allow_extra": ["scheduler"], ...}``.
    """
    # The values that are no tensors: ``allow_extra=["param_groups"]`` loads all but the groups.
    objects = {GROUPS}
    if scheduler is not None:
        objects.add(SCHEDULER)
    objects.difference_update(patterns_of("allow_extra", rules["allow_extra"]))
    optimizer.follow_model()  # it may have been sharded since the last step
    tx = optimizer.transform
    # 1. Read everything before anything is changed.
    request = LoadRequest(
        optimizer.transform_state, tx, rules, objects=objects, scheduler=scheduler
    )
    loaded = load_checkpoint(path, request, group)
    index = loaded.index
    loaded_params: PyTree = None
    if params is not None:
        # An entry of ``allow_missing`` or ``cast`` for the state would match no parameter, which is an error.
        rules_of_params = {
            "allow_other_chain": True,
            "allow_extra": rules["allow_extra"],
            "rename": rules["rename"],
        }
        params_request = LoadRequest(params, tx, rules_of_params, section=PARAMS)
        loaded_params = _params_of_save(index.save_id, path, params_request, group)
    # 2. Change the optimizer, which refuses groups of other parameters, and then the rest.
    groups: list[Group] | None = None  # the optimizer keeps its own
    if GROUPS in objects:
        groups = _groups_of(index, optimizer, rules["rename"])
    try:
        optimizer.load_transform_state(loaded.tree, groups)
    except ValueError as error:
        advice = f"to keep the groups of this optimizer: allow_extra=[{GROUPS!r}]"
        raise MismatchError(f"{path} does not fit: {error}; {advice}", [str(error)]) from error
    if scheduler is not None and SCHEDULER in index.objects:
        scheduler.load_state_dict(index.objects[SCHEDULER]["state"])
    if params is not None:
        with torch.no_grad():
            tree.map(lambda param, value: param.copy_(value), params, loaded_params)
    return optimizer.transform_state


def _groups_of(index: Index, optimizer: Any, rename: Rename | None) -> list[Group] | None:
    """Return the param groups in a checkpoint, with the names that its parameters have now; None if it has no groups.

    ``rename`` is the argument of `load`.
    """
    groups = index.objects.get(GROUPS)
    if groups is None or not rename:
        return groups
    return renamed_groups(groups, index.leaves, rename, optimizer.saved_groups())


def _params_of_save(
    save_id: str, path: StrPath, request: LoadRequest, group: ProcessGroup | None
) -> PyTree:
    """Read the parameters of a checkpoint whose state was read before. Raise if a save has replaced it since.

    ``save_id`` is the id of the save that wrote the state; each save has another one.
    """
    try:
        loaded = load_checkpoint(path, request, group)
    except MismatchError as error:
        advice = (
            "for other differences: load the optimizer without params=, and the parameters by "
            "load_params(path, params, ...), which has allow_missing= and cast= too"
        )
        raise MismatchError(f"{error}\n  {advice}", error.problems) from None
    if loaded.index.save_id != save_id:
        raise ReplacedError(
            f"{path} was replaced while it was read, and nothing was loaded: load it again"
        )
    return loaded.tree


def _require_no_parts_of_optimizer(params: object, scheduler: object) -> None:
    """Raise if ``params=`` or ``scheduler=`` was passed without an optimizer, with which they are loaded."""
    if scheduler is not None:
        raise TypeError("scheduler: it is loaded with an optimizer: pass the optimizer as like")
    if params is not None:
        raise TypeError(
            "params: they are loaded with an optimizer: pass it as like, or call load_params"
        )


def require_no_arguments(tx: object, device: object) -> None:
    """Raise if ``tx=`` or ``device=`` was passed with an optimizer, which has its own transform and devices."""
    if tx is not None:
        raise TypeError("tx: an optimizer is loaded with its transform: leave tx out")
    if device is not None:
        raise TypeError("device: the state of an optimizer stays on its devices: leave device out")


def load_params(
    path: StrPath,
    like: PyTree,
    *,
    tx: Transform | None = None,
    allow_missing: Allow = False,
    allow_extra: Allow = False,
    cast: Mapping[str, torch.dtype] | None = None,
    rename: Rename | None = None,
    device: torch.device | str | None = None,
    group: ProcessGroup | None = None,
) -> PyTree:
    """Read the parameters that ``save(params=...)`` stored in a checkpoint, in the structure of ``like``.

    Args:
        path: the folder of the checkpoint.
        like: a tree of tensors, which is not modified; use meta tensors to load into host memory.
        tx: needed only if ``like`` has this rank's shards: the transform from `muonfx.sharding.sharded`, which
            defines the shards.
        allow_missing: patterns of parameters that may be missing in the checkpoint, or True for all; see `load`.
        allow_extra: patterns of parameters in the checkpoint that may be missing in ``like``, or True for all.
        cast: a dict from pattern to dtype; matching parameters may be rounded to this dtype; see `load`.
        rename: a dict from names in the checkpoint to names in ``like``, as in `load`; both begin with "params/".
        device: the device of all parameters; None for the devices in ``like``.
        group: a process group, whose ranks must all call this function. None: this process reads alone, or, if ``tx``
            is sharded, the group of its layout.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        MismatchError: the parameters differ from ``like``; the message lists all differences.
        CorruptError: the checkpoint is damaged.
        FormatError: it was written by a newer version of muonfx.

    Example:
        >>> import tempfile
        >>> path = mfx.checkpoint.save(tempfile.mkdtemp(), None, params={"w": torch.ones(2)})
        >>> mfx.checkpoint.load_params(path, like={"w": torch.zeros(2)})
        {'w': tensor([1., 1.])}
    """
    # A chain has no meaning for parameters.
    rules = {
        "allow_missing": allow_missing,
        "allow_extra": allow_extra,
        "allow_other_chain": True,
        "cast": cast,
        "rename": rename,
    }
    return load_checkpoint(
        path, LoadRequest(like, tx, rules, section=PARAMS, device=device), group
    ).tree


def read(path: StrPath) -> dict[str, Tensor]:
    """Read a whole checkpoint, verify all checksums, and return a dict from leaf name to tensor in host memory.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        CorruptError: it is damaged.
        FormatError: it was written by a newer version of muonfx.

    >>> import tempfile
    >>> mfx.checkpoint.read(
    ...     mfx.checkpoint.save(tempfile.mkdtemp(), {"trace": {"w": torch.ones(2)}})
    ... )
    {'trace/w': tensor([1., 1.])}
    """
    return with_reader(folder_named(path), _read_all)


def _read_all(reader: DataReader) -> dict[str, Tensor]:
    """Allocate all leaves of an opened checkpoint in host memory, and read their values."""
    leaves: dict[str, Tensor] = {}
    for name, leaf in reader.index.leaves.items():
        leaves[name] = torch.empty(leaf.spec.shape, dtype=leaf.spec.dtype)
    reader.read(reader.transfers_to(leaves))
    return leaves


def verify(path: StrPath) -> Index:
    """Read every byte of a checkpoint, and raise unless all checksums match.

    Returns:
        The index of the checkpoint, as `inspect` returns it.

    Raises:
        NotFoundError: there is no checkpoint at the path.
        CorruptError: it is damaged; the message names the file and the leaf.
        FormatError: it was written by a newer version of muonfx.

    >>> import tempfile
    >>> mfx.checkpoint.verify(mfx.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)})).nbytes
    8
    """
    return with_reader(folder_named(path), DataReader.verify)


# ------------------------------------------------------------------------------------------------- the steps of a load


@dataclass(frozen=True)
class Loaded:
    """The result of `load_checkpoint`."""

    tree: Any
    """The tree with the values of the checkpoint."""
    index: Index
    """The description of the checkpoint."""
    target: Target
    """The tree of the caller, with the rules of the load."""


def load_checkpoint(path: StrPath, request: LoadRequest, group: ProcessGroup | None) -> Loaded:
    """Load a checkpoint into a new tree.

    `load`, `load_params` and `load_changed` call this. With a group of processes, every rank calls it, and an error on
    one rank is raised on all.
    """
    # The state of a sharded transform is divided among the ranks of its layout, so these ranks load it together. A
    # `StateSpec` describes whole tensors, which one process can load.
    if (
        group is None
        and isinstance(request.tx, Sharded)
        and not isinstance(request.like, StateSpec)
    ):
        group = request.tx.layout.group
    try:
        ranks = Together(group, path, f"the load of {path}")  # without a group, one process
        if group is not None:
            wait_for_save()  # a save in the background may use the same group
        # A rank that does not call `load` is an error here, not an endless wait later.
        ranks.meet("checkpoint.load")
        # Attempts 0, 1, 2, ...: a save may replace the checkpoint while it is read.
        return retried(path, lambda attempt: _load_once(path, request, ranks, attempt))
    except LostRanksError as error:
        raise CheckpointError(f"{path} was not loaded: {error}") from error


def _load_once(path: StrPath, request: LoadRequest, ranks: Together, attempt: int) -> Loaded:
    """Load a checkpoint in attempt number ``attempt``; raise `ReplacedError` if a save has replaced it meanwhile.

    Every rank calls this. In attempt 0, each rank reads the index itself, which saves a communication. If a save
    replaced the checkpoint at that moment, the ranks may have read two different ones, and attempt 1 follows.
    """
    with ExitStack() as open_files, ExitStack() as index_lock:
        index: Index | None = None
        if attempt > 0 and ranks.size > 1:
            index = _index_of_first_rank(path, ranks, index_lock)
        # 1. Check the arguments, allocate tensors and open the data files. From here until `index_lock` is closed,
        # saves do not remove these files.
        with ranks.errors_on_all_ranks(), no_collection():
            folder = folder_named(path)
            target = request.target_class.of(request, str(folder), is_alone=ranks.group is None)
            if index is None:
                index = index_lock.enter_context(inspect_and_keep(folder))
            index = target.translated(index)
            leaves, destinations = target.allocate(index)  # raises if the checkpoint does not fit
            # A file is missing if a save has replaced the checkpoint.
            with replacement(folder, index):
                reader = open_files.enter_context(DataReader(folder, index))
                transfers = reader.transfers_to(destinations)
                reader.check_files({transfer.chunk.file for transfer in transfers})
        _require_same_checkpoint(
            path, ranks, index.save_id, {"path": str(folder), **target.rules.arguments()}
        )
        # 2. All ranks have opened their files, which stay readable if a save removes them now.
        index_lock.close()
        # 3. Read the values that this rank needs. If there are more files than can be held open, some are opened again,
        # and may be gone: they were replaced.
        with ranks.errors_on_all_ranks(), replacement(folder, index):
            reader.read(transfers)
            reader.close()
        return Loaded(target.filled(leaves), index, target)


def _index_of_first_rank(path: StrPath, ranks: Together, index_lock: ExitStack) -> Index | None:
    """Let rank 0 read and lock the index, and return it on all ranks, so that all of them read the same checkpoint.

    If each rank read it, a save could replace the checkpoint between two of these reads. Saves do not remove the data
    files until rank 0 closes ``index_lock``.
    """

    def index_on_first_rank() -> Index | None:
        if ranks.rank == 0:
            return index_lock.enter_context(inspect_and_keep(folder_named(path)))
        return None

    # All ranks call the first function. Rank 0 then calls the second with all results, and each rank gets one item.
    return ranks.step(index_on_first_rank, lambda indexes: [indexes[0]] * ranks.size)


def _require_same_checkpoint(
    path: StrPath, ranks: Together, save_id: str, arguments: dict[str, str]
) -> None:
    """Raise on all ranks unless they have called `load` with equal arguments, and have opened the same checkpoint.

    ``save_id`` is the id of the save that wrote the checkpoint. Each save has another one: two ids mean that a save has
    replaced the checkpoint between two ranks. ``arguments`` are texts, such as ``{"path": "/runs/a", ...}``.
    """

    def require_same_on_first_rank(values_of_rank: list[tuple[str, dict[str, str]]]) -> list[None]:
        require_same([arguments for _, arguments in values_of_rank], "load", "nothing was loaded")
        save_ids = {save_id for save_id, _ in values_of_rank}
        if len(save_ids) > 1:  # `retried` catches this error, and all ranks read again
            raise ReplacedError(f"{path} was replaced while the ranks began to read it")
        return [None] * ranks.size

    ranks.step(lambda: (save_id, arguments), require_same_on_first_rank)


# ------------------------------------------------------------------------------------------------- the target of a load


@dataclass
class Target:
    """The tree that one `load` fills, and the differences from the checkpoint that its caller allows."""

    like: Mapping[str, Any]
    """The leaves of the caller's tree by name: tensors, shards of tensors, or `Spec`s."""
    expected: StateSpec
    rules: Rules
    where: str
    """The path of the checkpoint, for messages."""
    request: LoadRequest
    """The arguments of the load."""
    local_tx: Sharded | None = None
    """The sharded transform of the caller's tree, if that has local tensors of this rank, as the result must have."""

    @classmethod
    def of(cls, request: LoadRequest, where: str, *, is_alone: bool) -> Self:
        """Check the arguments of a `load`, and return the tree to fill, with its leaves by name.

        For ``like={"trace": {"w": tensor}}``, the result has ``like={"trace/w": tensor}``, and ``expected`` has the
        shape and dtype of "trace/w".

        Args:
            request: the arguments.
            where: the path of the checkpoint, for messages.
            is_alone: True if no other ranks take part: then ``like`` has no shards (parts of tensors on this rank).
        """
        rules = Rules(**request.rules)
        like = request.like
        tx = request.tx
        if tx is not None:
            require_transform("tx", tx)
        if isinstance(like, StateSpec):  # it has no tensors to convert, and no shards to refuse
            expected = like
            if tx is not None:
                expected = like.of_chain(tx)
            return cls(like.leaves, expected, rules, where, request)
        # Plain tensors that are parts of larger ones get their positions; `filled` converts the result back.
        local_tx = request.local_tx()
        if local_tx is not None:
            like = _as_global(local_tx, like, request.section)
        named = named_tensors(like, request.section)
        chain = None if request.section == PARAMS else tx  # parameters do not depend on the chain
        expected = spec_of_named(named, like, chain)
        leaves = {name: leaf for name, leaf in named.items() if leaf is not None}
        # Without a group, nothing makes sure that the other ranks read the same checkpoint.
        if is_alone:
            for name, leaf in leaves.items():
                require_whole(
                    name, leaf, "pass group=, such as group=torch.distributed.group.WORLD"
                )
        return cls(leaves, expected, rules, where, request, local_tx)

    def translated(self, index: Index) -> Index:
        """Return the description of a checkpoint with the names that `save` would have given the leaves.

        They have other names if ``dcp.save`` wrote the state dict of an optimizer:
        "optimizer/state/fc.weight/muon.trace" becomes "muon/trace/fc.weight". Also, if only names in ``rename=`` differ
        between the chain in the checkpoint and the one that will use the state, the two get one fingerprint.
        """
        if self.request.objects is not None:  # `like` is an optimizer
            index = as_saved_optimizer(index, self.like, self.where)
        if self.rules.rename and _differs_only_by_names(index, self.expected, self.rules.rename):
            return replace(index, fingerprint=self.expected.fingerprint)
        return index

    def match(self, index: Index) -> dict[str, SavedLeaf]:
        """Compare a checkpoint with the requested tree: return the leaves of the checkpoint by their names in the tree.

        "trace/w" is the leaf "trace/_orig_mod.w" of the checkpoint if "w" was saved with a wrapper such as
        ``torch.compile``. Missing leaves are left out. Raise for differences that the caller does not allow. Warn of
        those that may be meant, such as another momentum.
        """
        # Raises one error with all leaves that do not fit.
        saved = match(
            index,
            self.expected,
            self.rules,
            section=self.request.section,
            where=self.where,
            objects=self.request.objects,
        )
        self._require_same_scheduler(index)
        self._warn_of_products(index)
        # An optimizer gets its learning rate and other numbers from the saved groups, or the caller left these out on
        # purpose. In all other cases the numbers of the code are used.
        if self.request.objects is None or GROUPS not in index.objects:
            self._warn_of_numbers(index)
        return saved

    def allocate(self, index: Index) -> tuple[dict[str, Any], dict[str, Any]]:
        """Allocate the tensors of the tree to load, after a check that the checkpoint fits.

        Return all tensors by leaf name, and those to read by their names in the checkpoint. If "new/a" is stored as
        "a", and "b" is missing, these are ``{"new/a": a, "b": b}`` and ``{"a": a}`` with one tensor ``a``, so that a
        read into the second dict fills the first.
        """
        is_optimizer = self.request.objects is not None
        saved = self.match(index)  # raises if it does not fit
        leaves: dict[str, Any] = {}
        destinations: dict[str, Any] = {}
        for name, leaf in self.like.items():
            if name not in saved:  # missing, and the caller allows it
                # An optimizer keeps its tensor, which the first step initializes again if weights are loaded later.
                leaves[name] = leaf
                if not is_optimizer:  # a change of the result must not change the caller's tree
                    leaves[name] = self._copy(name, leaf)
                continue
            stored_name, _, spec = saved[name]
            # A parameter of a changed run may have more rows now.
            if tuple(leaf.shape) != spec.shape:
                leaves[name] = self._copy(name, leaf)
                destinations[stored_name] = leaves[name][: spec.shape[0]]
                continue
            # A step count may be read once for several leaves: a state that is divided into two labels has two counts.
            if stored_name not in destinations:
                destinations[stored_name] = self._empty(leaf)
            leaves[name] = destinations[stored_name]
        return leaves, destinations

    def filled(self, leaves: Mapping[str, Any]) -> Any:
        """Put the leaves that were read into a tree of the caller's structure, which `load` returns.

        ``{"trace/w": tensor}`` becomes ``{"trace": {"w": tensor}}``.
        """
        # One saved step count may have been read for two leaves, which must not change together.
        result = self.expected.unflatten(_separated(leaves))
        # The caller has passed plain tensors, the parts on this rank, and gets such.
        if self.local_tx is not None:
            result = _as_local(self.local_tx, result, self.request.section)
        return result

    def _require_same_scheduler(self, index: Index) -> None:
        """Raise if the checkpoint has the state of a scheduler of another class, such as StepLR, not LambdaLR."""
        # A saved scheduler is {"class": "StepLR", "state": {...}}, for example.
        saved_scheduler = index.objects.get(SCHEDULER)
        if self.request.scheduler is None or saved_scheduler is None:
            return  # nothing to compare; `match` reports one that is missing
        class_name = type(self.request.scheduler).__name__
        saved_class_name = saved_scheduler["class"]
        if saved_class_name != class_name:
            raise mismatch(
                self.where,
                [
                    f"scheduler: found a {class_name}, expected a {saved_class_name}, as in the checkpoint"
                ],
                ["create this one, or load without scheduler= and with allow_extra=['scheduler']"],
            )

    def _warn_of_products(self, index: Index) -> None:
        """Warn if the transform now computes its matrix products in other dtypes than when the checkpoint was saved.

        The default dtype depends on the device: a run that moves to another device may compute other numbers. The index
        has the saved dtypes, such as ``{"muon": "bfloat16"}``.
        """
        tx = self.expected.transform
        if tx is None:  # the caller has not passed the transform that will use the state
            return
        # Without devices of the caller or of tensors, as for a `Spec`, this is the CPU.
        device = torch.device(self.request.device or self._device_of_like())
        for name, saved_dtype in index.products.items():
            dtype = _product_dtype(tx, name, saved_dtype, device)
            if dtype != saved_dtype:
                warn_caller(
                    f"{self.where}: the matrix products of {name!r} were computed in {saved_dtype} and are now in "
                    f"{dtype}, so the resumed run computes other numbers. To continue as before, give it "
                    f"dtype=torch.{saved_dtype}"
                )

    def _device_of_like(self) -> torch.device:
        """Return the device of the first tensor of ``like`` with values; the CPU if there is none.

        Meta tensors have no values, and `Spec`s and shards of other classes are no tensors; they are skipped.
        """
        for leaf in self.like.values():
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                return leaf.device
        return torch.device("cpu")

    def _warn_of_numbers(self, index: Index) -> None:
        """Warn if the transform has other numbers than the one that wrote the checkpoint, such as another momentum.

        For example, the checkpoint has "momentum(decay=0.9)", and the code "momentum(decay=0.95)".
        """
        numbers = _different_numbers(index, self.expected)
        if not numbers:
            return
        warn_caller(
            f"{self.where}: the checkpoint was saved with other numbers: {'; '.join(numbers[:10])}. The code's are "
            "used: a checkpoint has no param_groups. If a torch scheduler has set them, restore the scheduler and the "
            "groups before loading"
        )

    def _empty(self, leaf: Any) -> Any:
        """Allocate memory for a leaf of the result: a tensor or shard with the shape and dtype of the leaf of ``like``.

        For a meta tensor of shape (2, 3) in bfloat16, the result is a (2, 3) tensor in bfloat16 on the CPU.
        """
        # A part of a tensor on this rank, such as a `FlatShard`
        if not isinstance(leaf, Tensor | Spec):
            return leaf.empty_like()
        device = self.request.device
        if device is None:
            # A spec has no device, and a meta tensor no memory into which values could be read.
            device = "cpu"
            if isinstance(leaf, Tensor) and not leaf.is_meta:
                device = leaf.device
        if isinstance(leaf, Tensor):  # with its strides, also of a DTensor
            return torch.empty_like(leaf, device=device, requires_grad=False)
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)

    def _copy(self, name: str, leaf: Any) -> Any:
        """Return a copy of a leaf of ``like`` that is missing in the checkpoint, or has fewer rows there.

        The result gets this copy, not the leaf itself: a change of one then leaves the other as it is.
        """
        # A spec or a meta tensor has a shape, but no values that the result could keep.
        has_no_values = isinstance(leaf, Spec) or (
            isinstance(leaf, Tensor) and leaf.device.type == "meta"
        )
        if has_no_values:
            raise ValueError(
                f"like=: found a spec without values for {name!r}, which is missing in the checkpoint, expected a "
                "state with values to keep: pass like=tx.init(params)"
            )
        if isinstance(leaf, Tensor):
            leaf = leaf.detach()  # the copy is no step of a computation with gradients
        copied = self._empty(leaf)
        copied.copy_(leaf)
        return copied


def _differs_only_by_names(index: Index, expected: StateSpec, rename: Rename) -> bool:
    """Return True if the chain of a checkpoint differs from the one that will use the state by renamed parameters only.

    The labels of a chain have the names of parameters: ``{"fc.weight": "muon"}`` in the checkpoint may be
    ``{"net.fc.weight": "muon"}`` here, with ``rename={"*/fc.*": "*/net.fc.*"}``.
    """
    # Saved or loaded without a transform.
    if index.fingerprint is None or expected.transform is None:
        return False
    if index.fingerprint == expected.fingerprint:
        return False
    old_name_of = {new: old for old, new in new_params(index.leaves, rename).items()}
    return expected.transform.fingerprint_with_names(old_name_of) == index.fingerprint


def _different_numbers(index: Index, expected: StateSpec) -> list[str]:
    """Return a text for each number that differs between the saved transform and the one that will use the state.

    The result is empty if the transforms differ in more than numbers: then their fingerprints, hashes of their
    structure without the numbers, are not equal. A text is "decay: 0.9 in the checkpoint, 0.95 here".
    """
    is_same_structure = index.fingerprint is not None and index.fingerprint == expected.fingerprint
    # Usually the code is equal. It may then have no numbers that can be compared, as a lambda has none.
    if not is_same_structure or index.chain == expected.chain:
        return []
    return differences_of_chains(str(index.chain), str(expected.chain)).numbers


def _product_dtype(tx: Transform, name: str, saved_dtype: str, device: torch.device) -> str:
    """Return the dtype in which a transform computes matrix products on a device, such as "bfloat16".

    ``name`` is the part of the transform that computes them, such as "muon". If the transform has no such part, return
    ``saved_dtype``, the dtype in which they were computed when the checkpoint was saved.
    """
    # Float64 parameters have products in float64, and all other parameters have products of one other dtype. A state
    # does not have the dtype of its parameters, but the saved dtype of the products shows which of the two cases it is.
    param_dtype = torch.float32
    if saved_dtype == "float64":
        param_dtype = torch.float64
    dtype_of_part = product_dtypes(without_stand_ins(tx), [param_dtype], device)
    return dtype_of_part.get(name, saved_dtype)


def _separated(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict of tensors with a copy of each tensor that an earlier name has too.

    ``{"a/count": count, "b/count": count}`` becomes ``{"a/count": count, "b/count": count.clone()}``: a step count may
    be read once for several leaves, and an optimizer changes each in place.
    """
    separate_leaves: dict[str, Any] = {}
    used_ids: set[int] = set()  # equal ids show that it is one tensor
    for name, leaf in leaves.items():
        separate_leaves[name] = leaf
        if id(leaf) in used_ids:
            separate_leaves[name] = leaf.clone()
        used_ids.add(id(leaf))
    return separate_leaves


def _as_global(tx: Sharded, like: PyTree, section: str) -> PyTree:
    """Give this rank's tensors their positions in the whole tensors, because a checkpoint stores whole tensors.

    Under a sharded transform, "w" may be a plain tensor with 4 of 8 rows. It becomes a shard that has the global shape
    and the position of these rows.
    """
    # The layout of the transform defines which part of a parameter each rank holds.
    if section == PARAMS:
        return tx.layout.to_global(like)
    return to_global(tx, like)


def _as_local(tx: Sharded, loaded: PyTree, section: str) -> PyTree:
    """Return this rank's tensors without their positions; the inverse of `_as_global`."""
    if section == PARAMS:
        return tx.layout.from_global(loaded)
    return from_global(tx, loaded)


@dataclass(frozen=True)
class LoadRequest:
    """The arguments of one load on this rank. `Target.of` checks them, so that an error is raised on all ranks."""

    like: PyTree | StateSpec
    """The tree of the caller."""
    tx: Transform | None
    """The transform that will use the state."""
    rules: Mapping[str, Any]
    """The arguments of `Rules`, such as ``{"allow_missing": ["adamw/mu"]}``."""
    section: str = ""
    """The first level of the leaf names: "params" for parameters, "" (none) for a state."""
    device: torch.device | str | None = None
    """The device of all tensors of the result; None for the devices of ``like``."""
    objects: set[str] | None = None
    """The names of values that are no tensors, and that an optimizer loads; None if ``like`` is no optimizer."""
    scheduler: Any = None
    """The scheduler to load."""
    target_class: type[Target] = Target
    """The tree to fill: a `Target`, or a subclass that takes what fits."""

    def local_tx(self) -> Sharded | None:
        """Return the sharded transform if ``like`` has plain tensors, which are parts on this rank; else None."""
        if not isinstance(self.tx, Sharded):
            return None
        has_parts = self.section == PARAMS or not is_global(self.like)
        return self.tx if has_parts else None
