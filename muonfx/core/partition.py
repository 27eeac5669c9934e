"""Different transforms for different parameters: `partition` and `masked`.

Each inner transform receives only the parameters chosen for it, as a flat dict from dotted name to tensor, whatever
the structure of the whole tree. Its state, such as ``state["muon"]["momentum"].trace["blocks.0.attn.q.weight"]``,
contains no placeholders for other parameters, because ``torch.func.vmap`` would not accept them.

Labels and masks are plain values by name. `muonfx.routing` adds labels that have reasons (`RoutedLabels`) and
conditions on names and shapes (`Condition`), both through the base classes in this file.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch

from muonfx import tree
from muonfx.core.chain import widest
from muonfx.core.checks import specs_of, warn_caller
from muonfx.core.donation import NOTHING, Donation
from muonfx.core.patterns import NamePatterns
from muonfx.core.transform import (
    Combinator,
    Locality,
    Transform,
    left_out,
    require_transform,
    transform,
)
from muonfx.core.value import Memory, with_memory
from muonfx.internal.arguments import short_repr
from muonfx.internal.display import format_list
from muonfx.internal.wrappers import unwrapped
from muonfx.tree import PyTree


class RoutedLabels(Mapping[str, str | None], ABC):
    """Labels by parameter name that also record why they were chosen: the base class of `muonfx.routing.Labels`."""

    @abstractmethod
    def for_names(self, key_of: Mapping[str, str]) -> Self:
        """Return labels for the names in ``key_of``, a dict from the new name of a parameter to its name in these."""

    @abstractmethod
    def without_shapes(self) -> Self:
        """Return the same labels for parameters that may be shards, whose shapes differ from the recorded ones."""

    @abstractmethod
    def check_shapes(self, transforms: Mapping[str, Transform], params: PyTree) -> None:
        """Raise if a tensor has more dims than when its label was chosen, so that its transform would flatten them."""

    @abstractmethod
    def warn_of_views(self, transforms: Mapping[str, Transform]) -> None:
        """Warn of parameters that hold several matrices, but are updated as one by the transform of their label."""

    @abstractmethod
    def reasons(self) -> list[str]:
        """Return a sentence for each parameter whose label was chosen by a rule: ``"'wte' is 'adamw': embedding"``."""


class Condition(ABC):
    """A condition on a parameter's name and shape: the base class of `muonfx.routing.Predicate`."""

    @abstractmethod
    def select(self, params: PyTree) -> dict[str, bool]:
        """Return a dict from the name of each parameter to True if the condition holds for it."""

    @abstractmethod
    def globs(self) -> tuple[tuple[str, ...], ...]:
        """Return the globs over names in the condition, in groups; in each, at least one glob must match a name."""

    @abstractmethod
    def needs_modules(self) -> bool:
        """Return True if the condition depends on module types, which named tensors do not have."""


class _Choice(NamedTuple):
    """The choice of labels or of a mask for each parameter."""

    value_of: dict[str, Any]
    """A dict from parameter name to its label, or to True if it is selected: ``{"w": "muon"}`` or ``{"w": True}``."""
    routed_labels: RoutedLabels | None = None
    """The same labels with their reasons, if `muonfx.routing` made them."""


class _Chooser:
    """Chooses a value for each parameter: a label by `partition`, or True or False by `masked`.

    Args:
        argument: the name of the argument, for errors.
        source: a tree of values, a mapping by name, a `Condition`, or a function of the parameters that returns a tree
            or mapping and depends on names, shapes and dtypes only.
        memory: stores the results by the names (and shapes) of parameters, for a transform that is rebuilt at every
            step.
    """

    expected: ClassVar[str]
    """The words for a value, for errors."""
    kinds: ClassVar[tuple[type, ...]]
    """The types of the values."""
    value_of_none: ClassVar[object]
    """The value that replaces None for a parameter that is None, if a function chooses the values."""

    def __init__(self, argument: str, source: object, memory: Memory | None = None) -> None:
        """Store the source of the values, such as ``{"w": "muon"}``. The docstring of the class describes arguments.

        Raise if the source is a whole model, or a condition on module types, which named tensors do not have.
        """
        if isinstance(source, Condition) and source.needs_modules():
            raise _condition_on_modules(argument, source)
        if isinstance(source, torch.nn.Module):
            raise _whole_model(argument, source)
        self.argument = argument
        self.source = source
        self._cache: dict[Any, _Choice] = {} if memory is None else memory
        """A dict from the `_cache_key` of some parameters to the choice for them."""

    def __call__(self, params: PyTree, *, quiet: bool = False) -> _Choice:
        """Return the value of each parameter, such as ``{"w": "muon", "b": "adamw"}``.

        It is read from a cache if parameters of these names were seen before, as at every step after the first. With
        ``quiet``, warnings that the source issues are suppressed.
        """
        names = tree.names(params)
        key = self._cache_key(params, names)
        if key in self._cache:
            return self._cache[key]
        if torch.compiler.is_compiling():  # a trace may not change the cache
            return self._choose(params, names)
        with warnings.catch_warnings():
            if quiet:
                warnings.simplefilter("ignore")
            choice = self._choose(params, names)
        self._cache[key] = choice
        return choice

    def _cache_key(self, params: PyTree, names: list[str]) -> object:
        """Return all that the values depend on: names and, if a function chooses the values, shapes and dtypes.

        For a dict of labels, the key is ``("b", "w")``. A function may look at shapes, as in ``p.ndim > 1``. The
        structure of the tree would do, but it cannot be hashed under compilation.
        """
        if not callable(self.source):
            return tuple(names)
        return tuple(zip(names, specs_of(tree.leaves(params)), strict=True))

    def for_step(self, updates: PyTree, params: PyTree) -> dict[str, Any]:
        """Return a dict from parameter name to value, such as ``{"w": "muon"}``, for a step. It issues no warnings.

        ``params`` may be None. The updates then give the names, shapes and dtypes.
        """
        if params is None:
            self._require_shapes(updates)
            params = updates
        return self(params, quiet=True).value_of

    def _require_shapes(self, updates: PyTree) -> None:
        """Raise if shapes are needed that updates do not have, because one of them is None.

        A function such as ``lambda params: ...`` that chooses values may read the shape of any parameter. If a step has
        no parameters, it receives the updates in their place.
        """
        if not callable(self.source):
            return
        for name, leaf in tree.named_leaves(updates):
            if leaf is None:
                raise ValueError(
                    f"{self.argument}: found no parameters, and no gradient for {name!r}, so the function that "
                    "chooses values cannot read its shape; expected parameters: call update(updates, state, params)"
                )

    def _choose(self, params: PyTree, names: list[str]) -> _Choice:
        """Return the value of each parameter, without the cache. Raise if one has no value or a wrong one.

        >>> chooser = _LabelChooser("labels", lambda params: {"w": "muon"})
        >>> chooser._choose({"w": torch.zeros(2)}, ["w"])
        _Choice(value_of={'w': 'muon'}, routed_labels=None)
        """
        chosen = self._evaluated(params)  # the result of the function, if the source is one
        values = self._by_name(chosen, names)
        # The key in `values` of each parameter. It is another name if a wrapper, such as DDP, has renamed parameters.
        key_of = _keys_of(names, values)
        missing = [name for name in names if name not in key_of]
        if missing:
            raise self._missing_values(missing)
        value_of: dict[str, Any] = {}
        for name, param in tree.named_leaves(params):
            value = values[key_of[name]]
            # A function that calls `muonfx.tree.map`, for example, returns None for a parameter that is None.
            if value is None and param is None and callable(self.source):
                value = self.value_of_none
            if not isinstance(value, self.kinds):
                raise TypeError(
                    f"{self.argument}: the value for {name!r} is {value!r}, expected {self.expected}"
                )
            value_of[name] = value
        if isinstance(chosen, RoutedLabels):  # labels with reasons, which are kept
            return _Choice(value_of, chosen.for_names(key_of))
        return _Choice(value_of)

    def _missing_values(self, names: list[str]) -> ValueError:
        """Return the error for parameters without a value, with a pattern in it that the user may write instead.

        >>> _MaskChooser("masked: mask", {})._missing_values(["w"])
        ValueError("masked: mask: found no value for 'w', expected True or False for each parameter: ...")
        """
        # A mask; labels are made from pairs of a pattern and a label.
        pattern = "muonfx.routing.path('head.*')"
        if bool not in self.kinds:
            pattern = f"muonfx.routing.labels(params, [({pattern}, 'adamw'), ...])"
        return ValueError(
            f"{self.argument}: found no value for {format_list(names)}, expected {self.expected} for each parameter: "
            f"add them, or select a whole subtree with a pattern, as in {pattern}"
        )

    def _by_name(self, chosen: object, names: list[str]) -> dict[str, Any]:
        """Return values as a dict by dotted name. They are a dict, flat or nested, or a tree like the parameters.

        A dict may have more values than there are parameters.

        >>> chooser = _LabelChooser("labels", None)
        >>> (
        ...     chooser._by_name({"mlp": {"up": "muon"}}, ["mlp.up"]),
        ...     chooser._by_name(["muon", "adamw"], ["0", "1"]),
        ... )
        ({'mlp.up': 'muon'}, {'0': 'muon', '1': 'adamw'})
        """
        if isinstance(chosen, RoutedLabels):  # by dotted name already
            return dict(chosen)
        if isinstance(chosen, Mapping):
            return dict(tree.named_leaves(dict(chosen)))
        # Any other tree, such as a list, must have the names of the parameters.
        values = dict(tree.named_leaves(chosen))
        if values.keys() != set(names):
            raise self._wrong_form(chosen, names)
        return values

    def _evaluated(self, params: PyTree) -> Any:
        """Return the argument of the user, with a condition or a function of the parameters replaced by its result."""
        source = self.source
        if isinstance(source, Condition):
            return source.select(params)
        if callable(source) and not isinstance(source, Mapping):  # a mapping may be callable too
            return self._call(source, params)
        return source

    def _wrong_form(self, chosen: object, names: list[str]) -> ValueError:
        """Return the error for a value, such as a string or a list, that is no dict and no tree like the parameters."""
        subject = short_repr(chosen)
        if callable(self.source):
            subject = f"a function that returns {subject}"
        return ValueError(
            f"{self.argument}: found {subject}, expected a dict from the name of each parameter to {self.expected}, or "
            f"a tree with the structure of the parameters, whose names are {format_list(names)}"
        )

    def _call(self, function: Callable[[PyTree], Any], params: PyTree) -> Any:
        """Return ``function(params)``. A note on an error says what the function received."""
        if torch.compiler.is_compiling():
            return function(params)
        try:
            return function(params)
        except (AttributeError, TypeError) as error:
            # A common mistake is lambda name, param: param.ndim > 1.
            error.add_note(
                f"{self.argument}: the function is called once, with the tree of all parameters. For a condition on "
                "each parameter: muonfx.routing.where(lambda info: info.ndim > 1)"
            )
            raise


class _LabelChooser(_Chooser):
    expected = "a label (a string, or None for no update)"
    kinds = (str, type(None))
    value_of_none = None


class _MaskChooser(_Chooser):
    expected = "True or False"
    kinds = (bool,)
    value_of_none = False


def _condition_on_modules(argument: str, condition: Condition) -> ValueError:
    """Return the error for a condition on module types, such as "in an embedding", in the labels of a transform.

    A transform receives tensors by name and not the model, so it cannot evaluate such a condition.
    """
    return ValueError(
        f"{argument}: found {condition!r}, expected a condition on names and shapes, because a transform receives "
        "named tensors without module types. Evaluate it on the model: {name: label == 'yes' for name, label "
        "in muonfx.labels(model, [(predicate, 'yes')], 'no').items()}"
    )


def _whole_model(argument: str, model: torch.nn.Module) -> TypeError:
    """Return the error for a model in place of labels or a mask."""
    return TypeError(
        f"{argument}: found the model {type(model).__name__}, expected a dict by parameter name: for partition, "
        "muonfx.default_labels(model)"
    )


def _keys_of(names: list[str], source: Mapping[str, Any]) -> dict[str, str]:
    """Find the entry of each parameter in the user's mapping: return a dict from parameter name to key.

    Usually, both are equal. They differ if a wrapper such as DDP added a prefix to the names of parameters, or to the
    keys. A parameter without a key is left out.

    >>> (
    ...     _keys_of(["module.fc.weight"], {"fc.weight": "muon"}),
    ...     _keys_of(["fc.weight"], {"module.fc.weight": "muon"}),
    ... )
    ({'module.fc.weight': 'fc.weight'}, {'fc.weight': 'module.fc.weight'})
    """
    exact_keys = {name: name for name in names if name in source}
    if len(exact_keys) == len(names):  # every name is a key: the usual case
        return exact_keys
    # Compare names without the prefixes of wrappers, on both sides: "fc.weight" for "module.fc.weight".
    key_of_plain_name = {plain_name: key for key, plain_name in unwrapped(source).items()}
    # Two keys have one plain name, so plain names are ambiguous.
    if len(key_of_plain_name) < len(source):
        return exact_keys
    key_of: dict[str, str] = {}
    for name, plain_name in unwrapped(names).items():
        if name in source:
            key_of[name] = name
        elif plain_name in key_of_plain_name:
            key_of[name] = key_of_plain_name[plain_name]
    return key_of


def _leaves_by_label(
    label_of: Mapping[str, Any], labels: Iterable[Any], values: PyTree
) -> dict[Any, Any]:
    """Divide the leaves of a tree by their labels: return a dict from each of ``labels`` to its leaves by name.

    A mask is given as the labels True and False. If there is no tree (None), each label has None.

    Args:
        label_of: the label of each leaf by name, in the order of the leaves.
        labels: the labels that the result has. Leaves with another label are left out.
        values: a tree, such as the parameters or their updates.

    >>> _leaves_by_label({"b": "adamw", "w": "muon"}, ["muon", "adamw"], {"b": 1, "w": 2})
    {'muon': {'w': 2}, 'adamw': {'b': 1}}
    """
    if values is None:
        return dict.fromkeys(labels)
    # A label without leaves keeps {}.
    leaves_of: dict[Any, dict[str, Any]] = {label: {} for label in labels}
    for (name, label), leaf in zip(label_of.items(), tree.leaves(values), strict=True):
        if label in leaves_of:
            leaves_of[label][name] = leaf
    return leaves_of


def _selected(is_selected: Mapping[str, bool], values: PyTree) -> Any:
    """Return the leaves of a tree for which a mask is True, as a dict by name; None if there is no tree.

    >>> _selected({"b": False, "w": True}, {"b": 1, "w": 2})
    {'w': 2}
    """
    return _leaves_by_label(is_selected, [True], values)[True]


def _require_transforms(transforms: object) -> None:
    """Raise TypeError unless the argument ``transforms`` of `partition` is a dict of transforms.

    Such a dict is ``{"muon": muon(), "adamw": adamw()}``, with a transform for each label.
    """
    if not isinstance(transforms, dict):
        raise TypeError(
            f"partition: transforms must be a dict with a Transform for each label, found {transforms!r}; write "
            'partition({"muon": muon(...), "adamw": adamw(...)}, labels)'
        )
    for label, tx in transforms.items():
        require_transform(f"partition: transforms[{label!r}]", tx)


def _require_known_labels(
    labels: Mapping[str, str | None], transforms: Mapping[str, Transform]
) -> None:
    """Raise if a parameter has a label without a transform, such as "adam" if the transforms have only "adamw".

    The label None needs no transform, because its parameters are not updated.
    """
    for name, label in labels.items():
        if label is not None and label not in transforms:
            raise ValueError(
                f"partition: {name!r} has the label {label!r}, expected a label that has a transform, "
                f"{format_list(list(transforms))}: change the label, or add a transform for {label!r}"
            )


def _check_labels(choice: _Choice, transforms: Mapping[str, Transform], params: PyTree) -> None:
    """Raise if labels do not fit the transforms and the parameters; warn of labels that are probably a mistake.

    It is an error if a label has no transform, and a warning if no parameter has the label of a transform.
    """
    _require_known_labels(choice.value_of, transforms)
    if choice.routed_labels is not None:  # labels that record for which shapes they were chosen
        choice.routed_labels.check_shapes(transforms, params)
        choice.routed_labels.warn_of_views(transforms)
    for label in transforms:
        if label not in choice.value_of.values():
            _warn_of_unused_label(label, choice)


def _warn_of_unused_label(label: str, choice: _Choice) -> None:
    """Warn that a transform does nothing, because no parameter has its label.

    The warning counts the labels in use, such as "'adamw' for 12". If they were chosen by rules, it has the reasons of
    some of them.
    """
    count_of = Counter(choice.value_of.values())  # the number of parameters with each label
    counts = ", ".join([f"{used_label!r} for {count}" for used_label, count in count_of.items()])
    message = (
        f"partition: no parameter has the label {label!r}; its transform does nothing. The labels of the "
        f"{len(choice.value_of)} parameters are {counts or 'none'}"
    )
    reasons: list[str] = []
    if choice.routed_labels is not None:
        reasons = choice.routed_labels.reasons()
    if reasons:
        message += f". {format_list(reasons, str)}"
    warn_caller(message)


def mask_patterns(tx: Transform) -> list[NamePatterns]:
    """Return the globs over parameter names in the ``mask`` of a transform, to report globs that match no name."""
    mask = tx.arguments["mask"]
    if isinstance(mask, Condition) and mask.globs():
        return [NamePatterns("mask", mask.globs())]
    return []


def _resolve_partition(tx: Transform, params: PyTree) -> Transform:
    """Return an equal `partition` whose labels are a plain mapping by name, so that it also works on shards.

    For example, the labels are a function ``lambda params: ...`` that looks at shapes. It is called here with the full
    shapes, and its result replaces it: ``{"w": "muon", "b": "adamw"}``.
    """
    choice = _LabelChooser("partition: labels", tx.arguments["labels"])(params)
    # Made by `muonfx.routing`, which records the shapes of parameters.
    labels_with_shapes = choice.routed_labels
    if labels_with_shapes is None:
        return tx.replace(labels=choice.value_of)
    labels_with_shapes.check_shapes(tx.arguments["transforms"], params)
    # The resolved transform may run on shards, whose dims differ: a 0-d parameter is 1-d in a flat buffer.
    return tx.replace(labels=labels_with_shapes.without_shapes())


def _left_out_by_labels(tx: Transform, params: PyTree) -> set[str]:
    """Return the names that a `partition` does not update: the label is None, or its transform leaves them out.

    >>> tx = mfx.partition({"muon": mfx.momentum()}, {"w": "muon", "b": None})
    >>> _left_out_by_labels(tx, {"w": torch.zeros(2), "b": torch.zeros(3)})
    {'b'}
    """
    # The labels that `init` will choose, which has not run yet. It will also issue their warnings.
    choose_labels = _LabelChooser("partition: labels", tx.arguments["labels"])
    labels = choose_labels(params, quiet=True).value_of
    transforms = tx.arguments["transforms"]
    names = {name for name, label in labels.items() if label is None}
    # A transform in the partition may be, or contain, another partition with the label None.
    for label, params_of_label in _leaves_by_label(labels, transforms, params).items():
        names |= left_out(transforms[label], params_of_label)
    return names


def _left_out_by_mask(tx: Transform, params: PyTree) -> set[str]:
    """Return the names of the selected parameters that the inner transform of `masked` does not update."""
    is_selected = _MaskChooser("masked: mask", tx.arguments["mask"])(params, quiet=True).value_of
    return left_out(tx.arguments["inner"], _selected(is_selected, params))


def _resolve_masked(tx: Transform, params: PyTree) -> Transform:
    """Return an equal `masked` whose mask is a plain dict by name, so that it also works on shards."""
    return tx.replace(mask=_MaskChooser("masked: mask", tx.arguments["mask"])(params).value_of)


@transform(
    locality=lambda transforms, labels: widest(transforms.values()),
    combinator=Combinator(own_locality=Locality.ELEMENT, leaves_out=_left_out_by_labels),
    resolve=_resolve_partition,
)
@with_memory
def partition(
    _memory: Memory,  # a cache, supplied by `with_memory` and not by callers
    transforms: dict[str, Transform],
    labels: PyTree | Mapping[str, str | None] | Callable[[PyTree], PyTree],
):
    """Apply a different transform to each group of parameters; labels assign the parameters to groups.

    A label is the name of a group, such as "muon". The state is a dict from label to the state of the group's
    transform. Follows Optax's ``partition``.

    Args:
        transforms: a dict from label to transform.
        labels: a tree of labels with the structure of the parameters; a mapping from dotted name to label, as
            `default_labels` returns; or a function of the parameters that returns either. The function must depend on
            names, shapes and dtypes only. A parameter with the label None has no state, and its update is None.

    Raises:
        TypeError: a label is neither a string nor None, or a value of ``transforms`` is not a transform.
        ValueError: a parameter has no label, or its label has no transform; or a tensor has more dims than when its
            label was chosen, and its transform would flatten them. The message names the parameter.

    Warns:
        UserWarning: at ``init``, in three cases. No parameter has the label of a transform; the message lists labels
            and reasons. Or a parameter holds several matrices according to `Labels.views`, but the argument ``view``
            of its transform has no pattern for it. Or the name of a parameter suggests a fused matrix
            (``qkv``, ``c_attn``) that is not split; the message has the code that splits it.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.partition(
        ...     {"slow": mfx.scale(-0.1), "fast": mfx.scale(-1.0)}, {"w": "slow", "b": "fast"}
        ... )
        >>> params = {"w": torch.ones(1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'w': tensor([-0.1000]), 'b': tensor([-1.])}
    """
    _require_transforms(transforms)
    choose_labels = _LabelChooser("partition: labels", labels, _memory)

    def init(params: PyTree) -> dict[str, PyTree]:
        """Return the state of each group, by label. Check the labels, and warn of probable mistakes."""
        choice = choose_labels(params)
        _check_labels(choice, transforms, params)
        params_of = _leaves_by_label(choice.value_of, transforms, params)
        return {label: tx.functions.init(params_of[label]) for label, tx in transforms.items()}

    def update(
        updates: PyTree,
        state: dict[str, PyTree],
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Run each transform on the leaves of its group, which it receives as a flat dict by name.

        With the labels ``{"w": "muon", "b": "adamw"}``, the transform "muon" receives ``{"w": ...}`` only.
        """
        label_of = choose_labels.for_step(updates, params)  # by parameter name
        _require_known_labels(label_of, transforms)
        # {"muon": {"w": ...}, "adamw": {"b": ...}}
        updates_of = _leaves_by_label(label_of, transforms, updates)
        params_of = _leaves_by_label(label_of, transforms, params)
        # Parameters with the label None keep None.
        new_updates: dict[str, Any] = dict.fromkeys(label_of)
        new_state: dict[str, PyTree] = {}
        for label, tx in transforms.items():
            out, new_state[label] = tx.run(
                updates_of[label], state[label], params_of[label], donate=donate, **extras
            )
            new_updates.update(out)  # a flat dict by name, as the transform received
        # `new_updates` has kept the order of `label_of`, which is the order of the leaves of the tree.
        _, treedef = tree.flatten(updates)
        return tree.unflatten(treedef, new_updates.values()), new_state

    return init, update


@transform(
    locality=lambda inner, mask: inner.locality,
    combinator=Combinator(own_locality=Locality.ELEMENT, leaves_out=_left_out_by_mask),
    resolve=_resolve_masked,
    name_patterns=mask_patterns,
)
@with_memory
def masked(
    _memory: Memory,  # a cache, supplied by `with_memory` and not by callers
    inner: Transform,
    mask: PyTree | Mapping[str, bool] | Condition | Callable[[PyTree], PyTree],
):
    """Apply a transform to the parameters that a mask selects; the updates of others are returned unchanged.

    The inner transform receives the selected parameters as a flat dict from name to tensor, and its state is for this
    dict. Follows Optax's ``masked``.

    Args:
        inner: the transform for the selected parameters.
        mask: True for the parameters to select, in one of these forms: a tree of bools with the structure of the
            parameters; a mapping from dotted name to bool; a predicate, such as ``muonfx.routing.ndim(2)``; or a
            function of the parameters that returns a tree or mapping and depends on names, shapes and dtypes only.

    Raises:
        TypeError: a value of the mask is not a bool.
        ValueError: a parameter has no value in the mask (the message names it), or a predicate needs module types,
            which named tensors do not have.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.masked(mfx.scale(-1.0), mfx.routing.ndim(min=2))
        >>> params = {"w": torch.ones(1, 1), "b": torch.ones(1)}
        >>> tx.update(params, tx.init(params))[0]
        {'w': tensor([[-1.]]), 'b': tensor([1.])}
    """
    if isinstance(mask, Transform):
        raise TypeError(
            f"masked: found {short_repr(inner)} before the transform, expected the transform first"
        )
    require_transform("masked: inner", inner)
    choose = _MaskChooser("masked: mask", mask, _memory)

    def init(params: PyTree) -> PyTree:
        """Return the state of the inner transform for the selected parameters."""
        is_selected = choose(params).value_of
        return inner.functions.init(_selected(is_selected, params))

    def update(
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ):
        """Run the inner transform on the selected leaves. Return the other updates unchanged.

        With the mask ``{"w": True, "b": False}``, the inner transform receives ``{"w": ...}``, and "b" is returned as
        it is.
        """
        is_selected = choose.for_step(updates, params)  # by parameter name
        selected_updates = _selected(is_selected, updates)
        selected_params = _selected(is_selected, params)
        out, new_state = inner.run(
            selected_updates, state, selected_params, donate=donate, **extras
        )
        # All updates by name, with the results in place of the selected ones. The order of the leaves stays.
        leaves, treedef = tree.flatten(updates)
        update_of = dict(zip(is_selected, leaves, strict=True))
        update_of.update(out)
        return tree.unflatten(treedef, update_of.values()), new_state

    return init, update


def resolve_mask(
    argument: str, mask: object, memory: Memory | None = None
) -> Callable[[PyTree], list[bool]]:
    """Return a function from parameters to a list of bools: for each parameter, True if the mask selects it.

    ``mask`` has a form that `masked` accepts. ``argument`` names the mask in errors.

    >>> selection = resolve_mask("weight_decay: mask", {"w": True, "b": False})
    >>> selection({"w": torch.zeros(2), "b": torch.zeros(3)})  # in the order of leaves: "b", "w"
    [False, True]
    """
    choose = _MaskChooser(argument, mask, memory)
    return lambda params: list(choose(params).value_of.values())
