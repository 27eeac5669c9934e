"""The class `Transform`: two pure functions and a declaration.

- ``init(params) -> state`` builds the state for a tree of parameters.
- ``update(updates, state, params=None) -> (updates, state)`` maps gradients, or another transform's output, to new
  updates.
- ``locality`` is the part of the tree that an output element depends on. The sharding layer needs nothing else.

Neither function modifies its inputs, keeps hidden state, or branches on values of tensors. States consist of dicts,
tuples, NamedTuples and tensors, so optree, ``torch.utils._pytree`` and ``torch.func`` see the same tree. If a gradient
is ``None``, its parameter gets no update and the state of the parameter does not change. Updates keep their dtype.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import torch

from muonfx import tree
from muonfx.core import checks, definition
from muonfx.core.definition import Declaration, Extras, Lazy, Locality, Position, of_structure, sum_over_leaves
from muonfx.core.donation import NOTHING, Donation, unshared
from muonfx.core.hyperparams import check_numbers
from muonfx.core.outline import outline
from muonfx.core.patterns import NamePatterns, warn_of_unmatched
from muonfx.core.recorded import Recorded
from muonfx.core.schedules import Schedule, follow
from muonfx.tree import PyTree, Structure
from muonfx.tree.display import Report
from muonfx.tree.tracing import autocast_is_on, outside_autocast

V = TypeVar("V")


class EmptyState(NamedTuple):
    """The state of a transform that has no state, such as `scale`."""


class Transform(Recorded):
    """A pure gradient transform, as returned by a factory such as `momentum` or `chain`.

    Its state is passed in and out explicitly, as in Optax. To write a transform, use the decorator `transform`.

    >>> import muonfx as mfx
    >>> tx = mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1))
    >>> tx
    chain(momentum(decay=0.9), scale(factor=-0.1))
    >>> params = {"w": torch.zeros(2)}
    >>> updates, state = tx.update({"w": torch.ones(2)}, tx.init(params), params)
    >>> updates["w"]
    tensor([-0.0190, -0.0190])
    """

    number_types = (Schedule,)

    @property
    def name(self) -> str:
        """The name of the function that created this transform, such as "momentum". A chain's state has it as key."""
        factory = self.factory
        declared = factory.definition.name
        return factory.__name__ if declared is None else declared.rpartition(".")[2]

    @of_structure
    def declaration(self) -> Declaration:
        """The options that the author of this transform passed to the decorator `transform`."""
        return cast("Declaration", self.factory.definition.declaration)

    @Lazy
    def children(self) -> tuple[Transform, ...]:
        """The transforms among the arguments of this transform, in order: for a chain, its members."""
        return tuple([part for part in self.parts if isinstance(part, Transform)])

    def tree(self) -> Report:
        """Return a table of this transform and all transforms that it calls, with their arguments.

        The locality is how much of the tree one element of an update depends on. The table prints as text, and as HTML
        in a notebook. To see how the transform runs on given parameters, print the result of `muonfx.placement.placed`.

        >>> import muonfx as mfx
        >>> mfx.chain(mfx.momentum(0.9, nesterov=True), mfx.orthogonalize(), mfx.scale(-0.02)).tree()
        transform        locality  arguments
        chain            LEAF
          momentum       ELEMENT   decay=0.9
          orthogonalize  LEAF
          scale          ELEMENT   factor=-0.02
        """
        return outline(self)

    def _repr_html_(self) -> str:
        return self.tree().to_html()

    def names_of_parts(self, argument: str) -> Iterable[str]:
        """Return the names of the numbers and transforms within one argument, such as the members of a chain."""
        given = self.factory.definition.parameters[argument]
        if given.kind is given.VAR_POSITIONAL:
            return list(entries_of(self.arguments[argument], self.factory.__name__))
        return super().names_of_parts(argument)

    def with_children(self, function: Callable[[Transform], Transform]) -> Transform:
        """Return a copy in which each transform ``t`` among the arguments is replaced by ``function(t)``."""
        return self._from(
            self.new_structure(), [function(part) if isinstance(part, Transform) else part for part in self.parts]
        )

    @property
    def stays_outermost(self) -> bool:
        """True if wrappers are moved inside: ``wrapper(sharded(tx))`` is converted to ``sharded(wrapper(tx))``."""
        return False

    @Lazy
    def schedules(self) -> dict[str, Schedule]:
        """A dict from argument name to `Schedule`, for arguments with a schedule in place of a number."""
        if not [part for part in self.parts if isinstance(part, Schedule)]:
            return {}
        kinds = self.factory.definition.plain
        return {
            name: value
            for name, value in self.arguments.items()
            if isinstance(value, Schedule) and "float" in kinds[name] and "Schedule" not in kinds[name]
        }

    def arguments_at(self, count: int) -> dict[str, Any]:
        """Return a dict of the arguments, with each schedule replaced by its value at step ``count``."""
        return {**self.arguments, **{name: schedule(count) for name, schedule in self.schedules.items()}}

    def build(self) -> Any:
        """Call the decorated function and return its ``(init, update)``; with schedules, at every update again."""
        schedules = self.schedules
        if not schedules:
            return super().build()
        return follow(schedules, lambda numbers: self._build_for({**self.arguments, **numbers}))

    def _check_schedules(self) -> None:
        """Raise if a schedule has an invalid value at one of the steps 0, 1, 10, ..., 1,000,000."""
        for count in (0, *(10**power for power in range(7))) if self.schedules else ():
            arguments = self.arguments_at(count)
            if count and any(math.isinf(arguments[name]) for name in self.schedules):
                return  # a rate that grows until a run ends, as in a search for the best one, overflows if continued
            try:
                self._build_for(arguments)
            except ValueError as error:
                raise ValueError(f"{self.name}: at step {count}, {error}") from error

    @of_structure
    def locality(self) -> Locality:
        """How much of the tree one element of an update depends on: the element, its matrix, its leaf or all leaves."""
        declared = self.declaration.locality
        found = declared if isinstance(declared, Locality) else self._call(declared, self.arguments_at(0))
        if not isinstance(found, Locality):
            raise TypeError(f"{self.name}: the declared locality must be a Locality, found {found!r}")
        return found

    @property
    def reads_params(self) -> bool:
        """True if ``init`` or ``update`` reads the values of the parameters, and not only their names and shapes."""
        declared = self.declaration.reads_params
        return declared if isinstance(declared, bool) else self._call(declared, self.arguments_at(0))

    @property
    def position(self) -> Position | None:
        """The place in a chain that the transform requires, such as "before_learning_rate". None: any place."""
        declared = self.declaration.position
        return self._call(declared, self.arguments) if callable(declared) else declared

    def resolve(self, params: PyTree) -> Transform:
        """Return an equal transform that does not need the full shapes of the parameters, so that it can run on shards.

        For example, a predicate that selects parameters is replaced by a mask, computed for ``params`` with full
        shapes. The transforms among the arguments stay as they are.
        """
        declared = self.declaration.resolve
        return self if declared is None else cast("Transform", declared(self, params))

    def on_stacks(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Transform, dict[str, tuple[int, int]]]:
        """Return an equal transform for stacked matrices, and a dict from each stack's name to (rows, columns).

        ``shapes`` maps the names of leaves to shapes. The returned transform takes each leaf that is a stack of
        matrices with the shape ``(number, rows, columns)``.
        """
        declared = self.declaration.on_stacks
        if declared is not None:
            return cast("tuple[Transform, dict[str, tuple[int, int]]]", declared(self, shapes))
        of_matrices = self.locality is Locality.MATRIX
        return self, {n: (s[-2], s[-1]) for n, s in shapes.items() if of_matrices and len(s) > 2}

    @of_structure
    def name_patterns(self) -> tuple[NamePatterns, ...]:
        """The globs, such as ``*.bias``, by which this transform or an inner transform selects parameters by name."""
        declared = self.declaration.name_patterns
        found = list(declared(self)) if declared is not None else []
        for part in self.children:
            found += part.name_patterns
        return tuple(dict.fromkeys(found))

    @Lazy
    def functions(self) -> definition.Functions:
        """The functions ``(init, update)`` of this transform, which do not check their inputs."""
        init, update = self.built
        return definition.Functions(functools.partial(outside_autocast, init), update)

    @of_structure
    def extras(self) -> Extras:
        """The extra arguments, such as ``value=loss``, that ``update`` of this or an inner transform accepts."""
        calls_none = not (self.children or self.declaration.combinator.in_sequence)
        return definition.extras_of(
            self.functions.update, [part.extras for part in self.children], calls_none=calls_none
        )

    def check_extras(self, extras: Mapping[str, Any]) -> None:
        """Check that ``update`` accepts these extra arguments, such as ``value=loss``, and that none is missing.

        Raises:
            TypeError: a required extra argument is missing, or no transform accepts one. The message lists the
                accepted extras.
        """
        if extras or self.extras.required:
            definition.check_extras(list(within(self)), extras)

    @property
    def works_on_pieces(self) -> bool:
        """True if ``update`` can run on shards, by an extra argument such as ``sum_over_leaves``."""
        return not definition.ON_PIECES.isdisjoint(self.extras.named)

    @of_structure
    def keeps_donation_promise(self) -> bool:
        """True if ``update`` of this and all inner transforms has the argument ``donate``, so inputs can be donated."""
        return "donate" in self.extras.named and all(part.keeps_donation_promise for part in self.children)

    def prepare(self) -> None:
        """Create and cache the functions of this transform now, so that bad arguments raise before the first use."""
        if not torch.compiler.is_compiling():
            self._check_schedules()
        super().prepare()
        # The tests of this package check the signatures of its own functions.
        if not (self.factory.definition.is_ours or torch.compiler.is_compiling()):
            definition.check_functions(self.factory.__name__, self.built)
        _ = self.locality, self.extras, self.keeps_donation_promise

    def init(self, params: PyTree) -> PyTree:
        """Return the initial state for a tree of parameters.

        Args:
            params: a tree of dicts, tuples, lists and NamedTuples whose leaves are floating-point tensors or ``None``;
                usually ``{name: param.detach() for name, param in model.named_parameters()}``. Without ``detach()``,
                autograd would record every step. Meta tensors give a state of meta tensors.

        Returns:
            A tree of tensors. No update changes their shapes, dtypes and devices. Copies of the parameters in it have
            derivatives by them under ``torch.func``, or if the parameters were computed from other tensors. Copies of a
            leaf of autograd, such as a model's parameter, are detached.

        Raises:
            TypeError: a leaf is not a dense real floating-point tensor of 16 bits or more. The message names it. A
                leaf of another kind is accepted if a partition gives it the label None, or if it is a frozen parameter.
            ValueError: two leaves have the same dotted name.

        Warns:
            UserWarning: a pattern over parameter names in an argument matches no parameter.
        """
        if not torch.compiler.is_compiling():
            params = without_left_out(self, params)
            checks.check_params(params)
            warn_of_unmatched(self.name_patterns, params)
        return self.functions.init(params)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, *, donate: bool | Donation = False, **extras: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the new updates and the next state. No input is modified, unless it is donated.

        Args:
            updates: gradients, or the updates of another transform: a tree with the structure of the parameters. If a
                leaf is ``None``, its parameter gets no update.
            state: the result of `init`, or the state that the previous `update` returned.
            params: the parameters. Transforms such as weight decay need them.
            donate: ``True`` is the promise not to use ``updates`` and ``state`` again, so their storage may be
                overwritten. A `Donation` promises this for one of them. The returned values are the same.
            **extras: extra arguments, such as ``value=loss``. Each transform receives the arguments that it accepts.

        Returns:
            The new updates, with the structure, shapes and dtypes of ``updates``, and the next state.

        Raises:
            TypeError: a leaf is not a floating-point tensor; a required extra argument is missing, or no transform
                accepts one.
            ValueError: the trees differ in structure or shape, or the state belongs to another transform or other
                parameters. The message names the leaf. No input has been changed when an error is raised.

        Warns:
            UserWarning: the parameters, but not the updates, have an autograd graph of earlier steps: they were not
                detached, so the graph grows with every step. Also if both have one that records 10 updates.
        """
        if not torch.compiler.is_compiling():
            params = without_left_out(self, params)
            leaves, treedef, specs = checks.check_update(updates, params)
            expected = self._expected_state(leaves, treedef, specs)
            if expected is not None:
                checks.check_state_like(self.name, state, expected, with_dtypes=params is not None)
            if params is not None:
                checks.warn_of_growing_graphs("update", params, leaves, updates, self.tensors)
        elif params is not None:  # traced leaves are matched by position, and their values cannot be checked
            checks.check_structure("updates", updates, "params", params)
        self.check_extras(extras)
        given = NOTHING if donate is False else Donation.of(donate)
        if given != NOTHING:
            given, updates, state = unshared(given, updates, state, params)
        try:
            out, new_state = self.run(updates, state, params, donate=given, **extras)
        except RuntimeError as error:
            if problem := checks.mixed_devices(updates=updates, params=params, state=state):
                raise ValueError(f"{self.name}: {problem}") from error
            raise
        if given.state or torch.compiler.is_compiling():
            return out, new_state
        return out, tree.copy_shared(new_state, state)

    def _expected_state(
        self, leaves: list[Any], treedef: Structure, specs: list[checks.LeafSpec]
    ) -> checks.ExpectedState | None:
        """Return the structure, shapes and dtypes that the state must have; None if one of ``specs`` is None."""
        # A state may contain copies of numeric arguments, so their shapes matter.
        numbers = tuple([part.shape for part in self.tensors]) if self.tensors else ()
        if any(numbers):
            check_numbers(self)
        key = treedef, tuple(specs), numbers
        known: dict[Any, checks.ExpectedState] = self.structure.derived.setdefault("expected_states", {})
        found = known.get(key)
        if found is None:
            if None in specs:  # without params, a leaf with a None gradient may still have a parameter and a state
                return None
            on_meta = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves]
            meta = tree.unflatten(treedef, on_meta)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # init has already issued these warnings
                found = known[key] = checks.ExpectedState.of(self.functions.init(meta))
        return found

    def run(self, updates: PyTree, state: PyTree, params: PyTree, *, donate: Donation = NOTHING, **extras: Any) -> Any:
        """Call the ``update`` function without checks, with only the extra arguments that it accepts."""
        names, takes_all, *_ = self.extras
        given = extras
        if extras and not takes_all:
            given = {}
            for name in extras:  # no comprehension, which is a call: this runs for each transform of a step
                if name in names:
                    given[name] = extras[name]
        if takes_all or "donate" in names:
            given["donate"] = donate
        if "sum_over_leaves" in names:
            given.setdefault("sum_over_leaves", sum_over_leaves)
        _, update = self.built
        if autocast_is_on():
            found = outside_autocast(update, updates, state, params, **given)
        else:
            found = update(updates, state, params, **given)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"{self.name}: its update must return (updates, state), found {type(found).__name__}")
        if not (self.structure.factory.definition.is_ours or torch.compiler.is_compiling()):
            # Without this, a missing leaf would raise in the next transform or leave a parameter without an update.
            for what, own, old in (("updates", found[0], updates), ("state", found[1], state)):
                checks.check_structure(f"{self.name}: the {what} that it returns", own, f"the {what} given to it", old)
        return found


def left_out(tx: Transform, params: PyTree) -> set[str]:
    """Return the names of the parameters to which a `partition` gives the label None, so that they are not updated."""
    declared = tx.declaration.combinator.leaves_out
    if declared is not None:
        return declared(tx, params)
    return set[str]().union(*[left_out(part, params) for part in tx.children])


def without_left_out(tx: Transform, params: PyTree) -> PyTree:
    """Return parameters with None for each leaf that no transform can update and none has to: quantized weights.

    Such a leaf is not a floating-point tensor, and it is a frozen parameter or has the label None.
    """
    leaves, treedef = tree.flatten(params)
    if checks.all_usable(leaves):
        return params
    not_updated = left_out(tx, params)
    trained: list[Any] = []
    for name, leaf in zip(tree.names(params), leaves, strict=True):
        is_skipped = not checks.is_usable(leaf) and (name in not_updated or checks.is_frozen(leaf))
        trained.append(None if is_skipped else leaf)
    return tree.unflatten(treedef, trained)


def within(tx: Transform) -> Iterator[Transform]:
    """Yield a transform, then every transform that it calls, directly or indirectly."""
    yield tx
    for part in tx.children:
        yield from within(part)


def entries_of(transforms: tuple[Transform | tuple[str, Transform], ...], of: str = "chain") -> dict[str, Transform]:
    """Return a dict from name to transform for the arguments of `chain`. A repeated name gets a suffix: "scale_2"."""
    entries: dict[str, Transform] = {}
    for place, entry in enumerate(transforms):
        explicit, tx = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(tx, Transform) or not isinstance(explicit, str | None):
            called = getattr(entry, "__name__", None) if callable(entry) else None
            raise TypeError(
                f"{of}: argument {place} is {entry!r}, expected a Transform or a pair (name, Transform)"
                + (f": call it, as in {called}()" if called else "")
                + (f": unpack the list, {of}(*transforms)" if isinstance(entry, list) else "")
            )
        name = explicit or tx.name
        if explicit is not None and (explicit in entries or not explicit or "." in explicit or "/" in explicit):
            expected = "expected a nonempty name without '.' or '/' that no other transform of the chain has"
            raise ValueError(f"{of}: found the name {explicit!r}, {expected}: choose another")
        count = 1
        while name in entries:
            count += 1
            name = f"{tx.name}_{count}"
        entries[name] = tx
    return entries


def require_transform(name: str, value: object) -> None:
    """Raise TypeError unless an argument is a `Transform`. The message has advice for a model or a factory."""
    if isinstance(value, Transform):
        return
    kind = type(value).__name__
    found = repr(value) if len(repr(value)) < 80 else kind
    if isinstance(value, torch.nn.Module):
        found = f"the model {kind}; the model comes first, then the transform"
    elif isinstance(value, type):
        found = f"the class {value.__name__}"
    elif callable(value) and hasattr(value, "__name__"):
        found = f"the function {value.__name__}; call it to get a transform: {value.__name__}(...)"
    elif isinstance(value, str):
        found += "; call the function of this name, or pass the option to it, as in muonfx.orthogonalize(...)"
    raise TypeError(f"{name} must be a muonfx.Transform, found {found}")
