"""Continue a run whose model, labels or chain have changed since the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonfx.checkpoint.errors import mismatch, narrowing, reshaped
from muonfx.checkpoint.folder import StrPath
from muonfx.checkpoint.group_names import Group, renamed_groups, without_removed_params
from muonfx.checkpoint.index import Index
from muonfx.checkpoint.leaves import GROUPS, StateSpec, in_section, is_optimizer, is_sharded
from muonfx.checkpoint.load import (
    Loaded,
    LoadRequest,
    Target,
    load_checkpoint,
    require_no_arguments,
)
from muonfx.checkpoint.match import ADVICE_ON_RENAMING, SavedLeaf, cast_of, saved_leaves
from muonfx.checkpoint.sources import Shapes, Sources, find_sources, states_by_parameter
from muonfx.checkpoint.state_dicts import paths_of_state_dicts
from muonfx.core import Transform
from muonfx.core.chain_differences import CHAINS
from muonfx.internal.display import Report, Shown, Table, format_list
from muonfx.internal.renaming import Rename
from muonfx.internal.wrappers import unwrapped
from muonfx.tree import PyTree
from muonfx.tree.dtypes import widens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Continuation(Shown):
    """The state of a changed run, and where each leaf of it comes from. It prints as a table.

    Attributes:
        state: the state for the changed run; of an optimizer, its `transform_state`.
        kept: names of the leaves that have the same name in the checkpoint.
        moved: a dict from the name of a leaf to its other name in the checkpoint.
        grown: a dict from the name of a leaf that is larger now to its name in the checkpoint: the saved values are at
            the lowest indices, and the rest is as ``init`` made it.
        new: names of the leaves that are not in the checkpoint, and are as ``init`` made them.
        dropped: names in the checkpoint of the leaves that are not used.
        groups: a sentence about the param groups of an optimizer; "" for the state of a transform.

    >>> import tempfile
    >>> import muonfx as mfx
    >>> path = mfx.checkpoint.save(tempfile.mkdtemp(), mfx.momentum().init({"w": torch.ones(2)}))
    >>> changed = mfx.chain(mfx.momentum(), mfx.scale(-0.1))
    >>> mfx.checkpoint.load_changed(
    ...     path, changed.init({"w": torch.ones(2), "b": torch.ones(2)})
    ... ).new
    ('momentum/trace/b',)
    """

    state: PyTree = field(repr=False)
    kept: tuple[str, ...]
    moved: Mapping[str, str]
    grown: Mapping[str, str]
    new: tuple[str, ...]
    dropped: tuple[str, ...]
    groups: str = ""

    def report(self) -> Report:
        """Return the printed form: the number of leaves that were kept, and a row for each other leaf.

        A row is such as "adamw/mu/out  new, as init made it", or "muon/trace/out  dropped".
        """
        rows: list[tuple[str, str]] = []
        for name, source in self.moved.items():
            rows.append((name, f"moved from {source}"))
        for name, source in self.grown.items():
            rows.append((name, f"grown from {source}, the rest as init made it"))
        for name in self.new:
            rows.append((name, "new, as init made it"))
        for name in self.dropped:
            rows.append((name, "dropped"))
        parts: list[str | Table] = [f"{len(self.kept)} leaves kept"]
        if rows:
            parts.append(Table(("leaf", "state"), rows))
        if self.groups:
            parts.append(self.groups)
        return Report(tuple(parts))


def load_changed(
    path: StrPath,
    like: PyTree,
    *,
    tx: Transform | None = None,
    rename: Rename | None = None,
    group: ProcessGroup | None = None,
) -> Continuation:
    """Load a checkpoint into a run that has changed since: other labels, parameters, sizes, or another chain.

    Where `load` raises an error for each difference, this function carries over the state of each parameter as far as
    it fits, and returns an account of all leaves. The state of a parameter in a transform, such as "mu" and "nu" of
    "wte.weight", is carried over as a whole: from the same name, or else from the one state of this parameter in the
    checkpoint with equal variables whose name has the most equal last levels; if two states could come from one, both
    are new. A parameter may have more rows than in the checkpoint, as after a vocabulary has grown: its first rows are
    carried over. A step count comes from the transforms that the parameters come from, and starts again if all of them
    are new. All other leaves stay as in ``like``. Parameters must have the same names, or get them by ``rename``.

    Args:
        path: the folder of the checkpoint.
        like: a new state of the changed chain for the changed parameters, ``tx.init(params)``; or a new
            `muonfx.Muon` or `muonfx.TransformOptimizer`, which then continues with the loaded state. Its checkpoint may
            also have a state dict, written by ``dcp.save`` with `Writer`, as for `load`. Create a scheduler of torch
            for it after this call, as the end of the account shows.
        tx: the transform of a sharded state, as in `load`. Not given for an optimizer.
        rename: a dict from names in the checkpoint to names in ``like``, as in `load`, for example after a layer was
            inserted before layer 1: ``{"*/layers.1.*": "*/layers.2.*"}``.
        group: a process group, as in `load`.

    Returns:
        The state and the account, which prints as a table.

    Raises:
        TypeError: ``like`` is a `StateSpec`, which has no values; or ``tx`` is given for an optimizer.
        NotFoundError, CorruptError, FormatError: as in `load`.
        MismatchError: ``rename`` has a mistake; or no parameter has the same name as in the checkpoint, or no leaf can
            be carried over; or a leaf has a narrower dtype than there, or is a shard of a parameter that has more rows
            now; or the step counts of the transforms that a transform comes from differ. Nothing was loaded.

    Example:
        >>> import tempfile
        >>> import muonfx as mfx
        >>> params = {"wte": torch.ones(4, 4), "up": torch.ones(4, 4), "out": torch.ones(4, 4)}
        >>> transforms = {"muon": mfx.momentum(), "adamw": mfx.scale_by_adam()}
        >>> before = mfx.partition(transforms, {"wte": "adamw", "up": "muon", "out": "muon"})
        >>> path = mfx.checkpoint.save(tempfile.mkdtemp(), before.init(params))
        >>> after = mfx.partition(transforms, {"wte": "adamw", "up": "muon", "out": "adamw"})
        >>> print(mfx.checkpoint.load_changed(path, after.init(params)))
        4 leaves kept
        <BLANKLINE>
        leaf            state
        adamw/mu/out    new, as init made it
        adamw/nu/out    new, as init made it
        muon/trace/out  dropped
    """
    if isinstance(like, StateSpec):
        raise TypeError(
            "like: found a StateSpec, expected a state with values, which new leaves keep: tx.init(params)"
        )
    rules = {"allow_other_chain": True, "rename": rename}
    if not is_optimizer(like):
        request = LoadRequest(like, tx, rules, target_class=ChangedTarget)
        return _account_of(load_checkpoint(path, request, group))
    require_no_arguments(tx, None)
    like.follow_model()  # it may have been sharded since the last step
    state = like.transform_state
    request = LoadRequest(
        state, like.transform, rules, objects={GROUPS}, target_class=ChangedTarget
    )
    loaded = load_checkpoint(path, request, group)
    return _continue_optimizer(like, _account_of(loaded), loaded.index, rename)


def _account_of(loaded: Loaded) -> Continuation:
    """Return a loaded state with the account of its leaves: kept, moved, grown, new, dropped.

    A leaf is *grown* if it has more rows now than in the checkpoint, and *dropped* if only the checkpoint has it. Raise
    if parameters with different step counts now have one count.
    """
    target = loaded.target
    assert isinstance(target, ChangedTarget)
    target.require_equal_counts()  # not before: the counts are known only after they were read
    kept: list[str] = []
    new: list[str] = []
    moved: dict[str, str] = {}
    grown: dict[str, str] = {}
    for name, leaf in target.like.items():
        source = target.sources.source_of.get(name)
        if source is None:  # as `init` made it
            new.append(name)
            continue
        saved_leaf = target.saved[source]
        saved_name = saved_leaf.plain_name  # before renaming
        if saved_leaf.spec.shape != tuple(leaf.shape):
            grown[name] = saved_name
        elif saved_name != name:
            moved[name] = saved_name
        else:
            kept.append(name)
    unused = target.saved.keys() - target.sources.source_of.values()
    dropped = sorted(target.saved[name].plain_name for name in unused)
    return Continuation(loaded.tree, tuple(kept), moved, grown, tuple(new), tuple(dropped))


def _continue_optimizer(
    optimizer: Any, continuation: Continuation, index: Index, rename: Rename | None
) -> Continuation:
    """Load a state into an optimizer, with the saved param groups (learning rates, ...) if it has the same groups.

    Return ``continuation``, the account of all leaves, with a sentence about the groups: "param_groups: loaded", or why
    the optimizer keeps its own. ``index`` is the description of the checkpoint, which has the saved groups, and
    ``rename`` has given other names to its leaves.
    """
    saved_groups: list[Group] | None = index.objects.get(GROUPS)
    if saved_groups is None:
        return _continue_with_own_groups(optimizer, continuation, index, "the checkpoint has none")
    # Since the save, parameters may have got other names, and some may have been removed.
    groups = optimizer.saved_groups()
    renamed = renamed_groups(saved_groups, index.leaves, rename, groups)
    remaining = without_removed_params(renamed, groups)
    converted, texts_of_new_keys = _with_keys_of(groups, remaining)
    try:
        optimizer.load_transform_state(continuation.state, converted)
    except ValueError as error:  # the optimizer has other groups, and nothing was loaded
        # The error begins with "nothing was loaded", which is not true here: the next call loads the state.
        reason = _moved_params(groups, remaining) or str(error).removeprefix("nothing was loaded: ")
        return _continue_with_own_groups(optimizer, continuation, index, reason)
    groups_text = "; ".join(["param_groups: loaded", *texts_of_new_keys])
    return replace(continuation, state=optimizer.transform_state, groups=groups_text)


def _continue_with_own_groups(
    optimizer: Any, continuation: Continuation, index: Index, reason: str
) -> Continuation:
    """Load a state into an optimizer that keeps its param groups, for the ``reason`` that the account then has.

    The account also shows how to create a scheduler for these groups, which continues at the step of the checkpoint.
    """
    optimizer.load_transform_state(continuation.state)
    groups_text = f"param_groups: this optimizer keeps its own, because {reason}. {_scheduler_text(index.step)}"
    return replace(continuation, state=optimizer.transform_state, groups=groups_text)


def _moved_params(groups: list[Group], saved_groups: list[Group]) -> str:
    """Explain that parameters have another label than in the saved groups; return "" if none has.

    >>> saved_groups = [{"label": "muon", "param_names": ["up", "out"]}]
    >>> groups = [
    ...     {"label": "muon", "param_names": ["up"]},
    ...     {"label": "adamw", "param_names": ["out"]},
    ... ]
    >>> _moved_params(groups, saved_groups)
    "'out' moved from group 'muon' to 'adamw'"
    """
    # A parameter that was not saved counts as one that kept its label: it is new, and has not moved.
    saved_label_of = _labels_of_params(saved_groups)
    moved: dict[str, list[str]] = {}  # the parameters by their two labels
    for name, label in _labels_of_params(groups).items():
        saved_label = saved_label_of.get(name, label)
        if saved_label != label:
            moved.setdefault(f"from group {saved_label!r} to {label!r}", []).append(name)
    return "; ".join([f"{format_list(names)} moved {labels}" for labels, names in moved.items()])


def _labels_of_params(groups: list[Group]) -> dict[str, Any]:
    """Return the label of the group of each parameter, by its name without the prefixes of wrappers.

    >>> _labels_of_params([{"label": "muon", "param_names": ["_orig_mod.up"]}])
    {'up': 'muon'}
    """
    label_of: dict[str, Any] = {}
    for name, group in _groups_by_param(groups).items():
        label_of[name] = group.get("label")
    return label_of


def _groups_by_param(groups: list[Group]) -> dict[str, Group]:
    """Return the group of each parameter, by its name without the prefixes of wrappers."""
    group_of: dict[str, Group] = {}
    for group in groups:
        group_of.update(dict.fromkeys(group["param_names"], group))
    # All names at once: "module." is the prefix of a wrapper only if all parameters of the model have it.
    plain_name_of = unwrapped(group_of)
    return {plain_name_of[name]: group for name, group in group_of.items()}


def _scheduler_text(step: int | None) -> str:
    """Return the advice to create a scheduler of torch that continues at the step of the checkpoint.

    For step 100, its code has ``last_epoch=99``, because a scheduler takes one step when it is created. A scheduler
    with ``last_epoch`` requires the entry "initial_lr" of each group, which the code sets.
    """
    if step is None:  # the caller must fill in the step
        at_step = "the step of the checkpoint, which was saved without step="
        last_epoch = "step - 1"
    else:
        at_step = f"step {step}"
        last_epoch = str(step - 1)
    return (
        f"The numbers of its groups come from the code. If it has a scheduler of torch, create it now, at {at_step}:\n"
        '    for group in optimizer.param_groups: group.setdefault("initial_lr", group["lr"])\n'
        f"    scheduler = LambdaLR(optimizer, f, last_epoch={last_epoch})"
    )


def _with_keys_of(groups: list[Group], saved_groups: list[Group]) -> tuple[list[Group], list[str]]:
    """Give the saved groups the keys that the optimizer's groups have now: the numbers of its chain, by transform.

    The number of a transform that was not saved, such as "scale.factor", is taken from the optimizer. Also return a
    text for each group with such numbers.

    >>> groups = [
    ...     {"label": "a", "inner.momentum.decay": 0.9, "scale.factor": 2.0, "param_names": ["w"]}
    ... ]
    >>> converted, texts = _with_keys_of(
    ...     groups, [{"label": "a", "momentum.decay": 0.95, "param_names": ["w"]}]
    ... )
    >>> converted
    [{'label': 'a', 'param_names': ['w'], 'inner.momentum.decay': 0.95, 'scale.factor': 2.0}]
    >>> texts
    ["of group 'a', 'scale.factor' stay as in this optimizer"]
    """
    converted_groups: list[Group] = []
    texts: list[str] = []
    group_of = _groups_by_param(groups)
    for saved_group in saved_groups:
        converted = dict(saved_group)
        # The code of the chain that was saved, which may be another one now.
        converted.pop(CHAINS, None)
        group = _group_with_params_of(saved_group, group_of)
        new_keys: list[str] = []
        for key, old_key in _old_keys(group, saved_group).items():
            if old_key is None:
                converted[key] = group[key]
                new_keys.append(key)
            else:
                converted[key] = saved_group[old_key]
                converted.pop(old_key, None)  # two numbers may have had one key
        converted_groups.append(converted)
        if new_keys:
            texts.append(
                f"of group {group.get('label')!r}, {format_list(new_keys)} stay as in this optimizer"
            )
    return converted_groups, texts


def _group_with_params_of(saved_group: Group, group_of: Mapping[str, Group]) -> Group:
    """Return the group of the optimizer that has a parameter of a saved group; an empty dict if it has none of them.

    If they are in several groups now, the optimizer refuses the saved groups, so that any of these will do.
    ``group_of`` has the group of each parameter of the optimizer.
    """
    for name in saved_group["param_names"]:
        if name in group_of:
            return group_of[name]
    return {}


def _old_keys(group: Group, saved_group: Group) -> dict[str, str | None]:
    """Return the keys of a group that a saved group lacks, with the key under which it has the number instead, or None.

    The chain that was saved may be inside another transform now: "momentum.decay" is then "inner.momentum.decay". The
    number of a new transform was not saved.

    >>> _old_keys(
    ...     {"lr": 0.1, "inner.momentum.decay": 0.9, "scale.factor": 2.0},
    ...     {"lr": 0.1, "momentum.decay": 0.95},
    ... )
    {'inner.momentum.decay': 'momentum.decay', 'scale.factor': None}
    """
    missing_keys = group.keys() - saved_group.keys() - _KEYS_WITHOUT_NUMBERS
    # "momentum.decay" may have been the key of "inner.momentum.decay", unless the group still has it for another one.
    free_keys = [saved_key for saved_key in saved_group if saved_key not in group]
    old_key_of: dict[str, str | None] = {}
    for key in sorted(missing_keys):
        old_keys = [free_key for free_key in free_keys if key.endswith(f".{free_key}")]
        # "momentum.decay" has more in common than "decay"
        old_key_of[key] = max(old_keys, key=len, default=None)
    return old_key_of


_KEYS_WITHOUT_NUMBERS = frozenset(
    ["label", "param_names", "numbers_in_code", "schedules", "schedules_in_code"]
)
"""Keys of a group that are no hyperparameters."""


# ----------------------------------------------------------------------------------------------------------- the target


class ChangedTarget(Target):
    """The tree that `load_changed` fills. It takes what fits from a checkpoint."""

    saved: Mapping[str, SavedLeaf]
    """The leaves in the checkpoint by their names after renaming. `match` sets this and ``sources``."""
    sources: Sources
    """The saved leaf from which each leaf of ``like`` comes."""
    compared_counts: dict[str, Tensor]
    """The step counts of the saved state of which several become one."""

    def match(self, index: Index) -> dict[str, SavedLeaf]:
        """Return the leaf of the checkpoint that each leaf of the tree continues, by its name in the tree.

        New leaves are left out. Raise if nothing can be carried over, or if the values do not fit.
        """
        # Search by names and shapes. Dtypes are checked afterwards, because an error about them names the leaf.
        saved, mistakes = saved_leaves(index, self.rules.rename, section="")
        if mistakes:
            raise mismatch(self.where, mistakes, [ADVICE_ON_RENAMING])
        self.saved = {name: leaf for name, leaf in saved.items() if in_section(name, "")}
        shapes = {name: tuple(leaf.shape) for name, leaf in self.like.items()}
        saved_shapes = {name: leaf.spec.shape for name, leaf in self.saved.items()}
        self.sources = find_sources(shapes, saved_shapes)
        self._require_common_params(shapes, saved_shapes)
        self._require_common_leaves(shapes, saved_shapes, index)
        self._require_fitting()
        return {name: self.saved[source] for name, source in self.sources.source_of.items()}

    def allocate(self, index: Index) -> tuple[dict[str, Any], dict[str, Any]]:
        """Allocate the tensors into which the checkpoint is read. A load calls this before it reads.

        Return all tensors of the tree by leaf name, and the tensors to read by their names in the checkpoint. The
        second dict also has step counts that are only compared: parameters with the saved counts "a/count" and
        "b/count" may now share "a/count". Then both are read, and must be equal, but the tree has only "a/count".
        """
        leaves, tensors_to_read = super().allocate(index)
        self.compared_counts = {}
        for count_names in self.sources.equal_counts.values():  # the saved counts that become one
            for name in count_names:
                stored_name, _, spec = self.saved[name]
                if stored_name not in tensors_to_read:  # the tree does not have it
                    tensors_to_read[stored_name] = torch.empty((), dtype=spec.dtype)
                self.compared_counts[name] = tensors_to_read[stored_name]
        return leaves, tensors_to_read

    def _require_common_params(self, shapes: Shapes, stored_shapes: Shapes) -> None:
        """Raise if no parameter has the same name as in the checkpoint, so that the whole state would be lost.

        ``shapes`` and ``stored_shapes`` have the leaves of ``like`` and of the checkpoint: the state "adam/mu/w" is of
        the parameter "w". If it is "model.w" in ``like``, the error suggests ``rename=``.
        """
        parameters = states_by_parameter(shapes).keys()
        stored_parameters = states_by_parameter(stored_shapes).keys()
        if not parameters or not stored_parameters:  # such as the state of a schedule
            return
        if not parameters.isdisjoint(stored_parameters):
            return
        problem = (
            f"no parameter of the checkpoint is in `like`: it has {format_list(sorted(stored_parameters))}, and `like` "
            f"has {format_list(sorted(parameters))}"
        )
        advice = "load_changed compares parameters by name: rename= gives them other names"
        raise mismatch(self.where, [problem], [advice])

    def _require_common_leaves(self, shapes: Shapes, stored_shapes: Shapes, index: Index) -> None:
        """Raise if no leaf can be carried over, so that the whole state would be lost.

        This is so if "trace/w" of a momentum was saved, and "mu/w" and "nu/w" of Adam are requested. ``shapes`` and
        ``stored_shapes`` have the shape of each leaf of ``like`` and of the checkpoint, by name.
        """
        # Nothing is requested, or something is carried over.
        if not shapes or self.sources.source_of:
            return
        texts = [f"{name!r} {shape}" for name, shape in shapes.items()]
        stored_texts = [f"{name!r} {shape}" for name, shape in stored_shapes.items()] or [
            "no state"
        ]
        problem = (
            "no leaf of the checkpoint fits `like`, whose whole state would start again: it has "
            f"{format_list(stored_texts, str)}, and `like` has {format_list(texts, str)}"
        )
        advice = self._advice_on_other_state(stored_shapes, index.objects)
        raise mismatch(self.where, [problem], [advice])

    def _advice_on_other_state(self, stored_names: Iterable[str], objects: Iterable[str]) -> str:
        """Return a sentence about the likely reason why no leaf of a checkpoint fits the requested state.

        Args:
            stored_names: the names of the tensors in the checkpoint. "exp_avg/w" is of `torch.optim.AdamW`.
            objects: the names of all other values. "optimizer/param_groups/0/lr" is of the state dict of an optimizer.
        """
        if paths_of_state_dicts(objects):
            return (
                "it has the state dict of an optimizer: pass an optimizer as `like`, not its state"
            )
        to_start_again = "to start the state again, do not call load_changed"
        has_moments_of_torch = any(name.startswith("exp_avg/") for name in stored_names)
        if not has_moments_of_torch:
            return to_start_again
        return (
            "it has the moments of torch.optim.AdamW, 'exp_avg' and 'exp_avg_sq': load it into an AdamW, convert that "
            "by muonfx.checkpoint.convert.recipe and read, save it, and call load_changed with that checkpoint; or, "
            f"{to_start_again}"
        )

    def _require_fitting(self) -> None:
        """Raise one error with all leaves that do not fit: they have a narrower dtype, or are shards with more rows.

        Values are never rounded here: an fp32 momentum is not loaded into a bf16 one. A shard is the part of a tensor
        on this rank.
        """
        problems: list[str] = []
        advice: list[str] = []
        narrowed_names: list[str] = []
        for name, source in self.sources.source_of.items():
            leaf = self.like[name]
            shape = tuple(leaf.shape)
            saved_spec = self.saved[source].spec
            if not widens(saved_spec.dtype, leaf.dtype):
                problems.append(narrowing(name, saved_spec.dtype, leaf.dtype))
                narrowed_names.append(name)
            # The saved rows are read into a larger tensor, but not into the part of one.
            is_grown_shard = is_sharded(leaf) and shape != saved_spec.shape
            if is_grown_shard:
                problems.append(reshaped(name, saved_spec.shape, shape))
                advice.append(
                    "shards cannot grow: load it in one process, save it again, and load that on all ranks; or copy "
                    'the rows of this parameter, as "A larger vocabulary over ranks" of docs/changing-a-run.md shows'
                )
        if narrowed_names:
            advice += self._advice_on_narrowing(narrowed_names)
        if problems:
            raise mismatch(self.where, problems, advice)

    def _advice_on_narrowing(self, names: list[str]) -> list[str]:
        """Return two sentences about leaves that would be rounded: how to keep their values, and how to round them.

        The second has a call such as "mfx.checkpoint.load(path, like, cast={'trace': torch.bfloat16})".
        """
        like = "like" if self.request.objects is None else "optimizer"
        cast = cast_of(names, self.expected.leaves)
        return [
            "to keep the values: use a chain with the state dtypes of the checkpoint",
            f"to round: mfx.checkpoint.load(path, {like}, cast={cast}), with the arguments that its error names for "
            "the other differences",
        ]

    def require_equal_counts(self) -> None:
        """Raise if parameters with different step counts now have one transform, and so one count.

        Two parameters were in the transforms "a" and "b", with the counts ``{"a/count": 100, "b/count": 7}``, and now
        both are in "a". No value of "a/count" is right for both.
        """
        # The count "a/count" of the tree, for example, comes from the saved counts ["a/count", "b/count"].
        for name, stored_names in self.sources.equal_counts.items():
            counts = {
                stored_name: self.compared_counts[stored_name].item()
                for stored_name in stored_names
            }
            if len(set(counts.values())) > 1:
                problem = f"{name!r} would be the step count of parameters with the counts {counts}"
                raise mismatch(
                    self.where, [problem], ["give these parameters a label of their own"]
                )
