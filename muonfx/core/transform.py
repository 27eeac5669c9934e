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
import inspect
import math
import operator
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import NoneType
from typing import (
    Any,
    Literal,
    NamedTuple,
    ParamSpec,
    cast,
    get_args,
    overload,
)

import torch

from muonfx import tree
from muonfx.core import checks
from muonfx.core.donation import NOTHING, Donation, unshared
from muonfx.core.extras import (
    Extras,
    Functions,
    InitAndUpdate,
    check_extras_within,
    check_functions,
    extras_of,
    forwarding,
    require_arguments,
    sum_over_leaves,
)
from muonfx.core.hyperparams import check_numbers
from muonfx.core.outline import outline
from muonfx.core.patterns import NamePatterns, warn_of_unmatched
from muonfx.core.schedules import Schedule, follow
from muonfx.core.value import Lazy, LazyOfStructure, Recorded, make_factory
from muonfx.internal.arguments import bind, short_repr
from muonfx.internal.display import Report
from muonfx.internal.tracing import autocast_is_on, outside_autocast, uncompiled
from muonfx.tree import PyTree, Structure

Position = Literal[
    "learning_rate",
    "turns",
    "either_sign",
    "before_learning_rate",
    "sets_size",
    "after_learning_rate",
    "last",
    "observer",
    "last_observer",
]
"""The place of a transform in a chain relative to the learning rate; `muonfx.transform` describes each value."""

ShortNames = Mapping[str, str | tuple[str, ...]]
"""Arguments by the short names that an author gives to them: ``{"eps": "eps", "betas": ("b1", "b2")}``."""

LeafCost = Callable[[str, tuple[int, ...], torch.dtype], float]
"""A function ``(name, shape, dtype) -> operations`` for one leaf of the updates; a multiply-add is two operations."""


class Locality(IntEnum):
    """How much of the tree a transform reads to compute one element of its output: from one element to all leaves.

    The sharding layer relies on it: an ELEMENT transform runs on shards, and a MATRIX transform receives whole
    matrices. The values are ordered, so the locality of a chain is the maximum over its members.

    >>> max(Locality.ELEMENT, Locality.MATRIX).name
    'MATRIX'
    """

    ELEMENT = 0
    """Reads the same element of the updates, the state and the parameters, and scalars such as a step count."""
    MATRIX = 1
    """Reads the matrix that contains the element: the last two dims of its leaf. Leading dims are batch dims."""
    LEAF = 2
    """Reads the whole leaf (the tensor of one parameter) that contains the element."""
    TREE = 3
    """Reads all leaves of the tree, as clipping by the global norm does."""


@dataclass(frozen=True)
class Combinator:
    """Describes how a wrapper calls the transforms that it receives as arguments; an option of `transform`.

    >>> Combinator(Locality.ELEMENT)
    Combinator(own_locality=<Locality.ELEMENT: 0>, in_sequence=False, varies_numbers=False, skips_steps=False)
    """

    own_locality: Locality | None = None
    """The locality of the wrapper's own computation, without the transforms that it calls. Declare it if each called
    transform receives a tree with some or all of the leaves. On sharded parameters, the called transforms then run by
    their own localities. None: unknown, so the wrapper and the called transforms run together."""
    in_sequence: bool = False
    """True if the wrapper does nothing but call its transforms in sequence, as `chain` does. Each receives the updates
    of the previous one and all extra arguments. The state is a dict from their names to their states."""
    varies_numbers: bool = False
    """True if the called transforms differ in numeric arguments only, so that one of them describes how all run."""
    leaves_out: Callable[[Any, Any], set[str]] | None = field(default=None, repr=False)
    """A function of the wrapper and the parameters that returns the names of parameters that it does not update. None:
    each called transform receives all parameters."""
    skips_steps: bool = False
    """True if the called transforms run at some updates only, as those of `accumulate` do. At the others, the wrapper
    returns updates of zero."""


@dataclass(frozen=True)
class MatrixWork:
    """Describes how a transform works on matrices, to save work between ranks; an option of `transform`.

    The default of each field is always correct.

    >>> MatrixWork()
    MatrixWork(rounds_to=None, on_stacks=None, cost=None)
    """

    rounds_to: Callable[[Any, torch.dtype, torch.device], torch.dtype] | None = None
    """``(transform, dtype, device) -> dtype``. Returns the dtype to which updates are rounded before all other work.
    They may then be sent between ranks in this dtype. It has at most the precision of ``dtype``."""
    on_stacks: (
        Callable[[Any, Mapping[str, tuple[int, ...]]], tuple[Any, dict[str, tuple[int, int]]]]
        | None
    ) = None
    """``(transform, shapes) -> (transform, matrices)``. ``shapes`` maps names to shapes. ``matrices`` maps the name of
    each leaf that is a contiguous stack of independent matrices to the shape of one matrix. The returned transform
    takes these leaves as ``(number, rows, columns)``. None: for a MATRIX transform, every leaf with more than two dims
    is a stack."""
    cost: Callable[[Any, str, torch.dtype], LeafCost] | None = None
    """``(transform, device, dtype) -> function``. The returned function maps the name, shape and dtype of a leaf to the
    number of operations of its update. Matrices are assigned to ranks by these numbers, which must be the same on all
    ranks. ``device`` is a device type, and ``dtype`` the dtype in which matrix products with the option "auto" are
    computed."""


@dataclass(frozen=True)
class Declaration:
    """The options of the decorator `transform` as one value. The docstring of `transform` describes each field."""

    locality: Locality | Callable[..., Locality] = Locality.TREE
    combinator: Combinator = Combinator()
    reads_params: bool | Callable[..., bool] = True
    resolve: Callable[[Any, PyTree], Any] | None = None
    matrices: MatrixWork = MatrixWork()
    name_patterns: Callable[[Any], Iterable[NamePatterns]] | None = None
    check_extras: Callable[[Any, Mapping[str, Any]], None] | None = None
    position: Position | Callable[..., Position | None] | None = None
    short_names: ShortNames = field(default_factory=dict[str, str | tuple[str, ...]])

    def __post_init__(self) -> None:
        """Raise TypeError for an option of a wrong type, and ValueError for an unknown position.

        For example, ``locality="MATRIX"`` raises: it must be ``Locality.MATRIX`` or a function that returns one.
        """
        # Each entry is, for example, "combinator": (Combinator, "a Combinator"); the text is used in the error.
        for option, (types, expected) in _TYPES_OF_OPTIONS.items():
            value = getattr(self, option)
            if not isinstance(value, types):
                raise TypeError(f"transform: {option} must be {expected}, found {value!r}")
        # None and functions pass here: only a string can be checked before a transform is created.
        if isinstance(self.position, str) and self.position not in get_args(Position):
            raise ValueError(f"transform: position must be {_POSITIONS}, found {self.position!r}")


_POSITIONS = (
    f"one of {', '.join(map(repr, get_args(Position)))}, None or a function of the arguments"
)
_TYPES_OF_OPTIONS: dict[str, tuple[Any, str]] = {
    "locality": ((Locality, Callable), "a Locality, such as Locality.MATRIX, or a function"),
    "combinator": (Combinator, "a Combinator"),
    "matrices": (MatrixWork, "a MatrixWork"),
    "reads_params": ((bool, Callable), "True, False or a function of the arguments"),
    "position": ((str, NoneType, Callable), _POSITIONS),
}
"""For each option of `Declaration` that is not only a function, the types of its values and words for them."""


# ------------------------------------------------------------------------------------ the signatures of init and update


_shape_of = operator.attrgetter("shape")

_LATER_STEPS = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
"""The steps after 0 at which the values of a schedule are checked when a transform is created."""


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

    _number_types = (Schedule,)

    @property
    def name(self) -> str:
        """The name of the function that created this transform, such as "momentum". A chain's state has it as key."""
        public_name = self.factory.definition.name
        if public_name is None:
            return self.factory.__name__
        return public_name.rpartition(".")[2]

    @LazyOfStructure
    def declaration(self) -> Declaration:
        """The options that the author of this transform passed to the decorator `transform`."""
        return cast("Declaration", self.factory.definition.declaration)

    @Lazy
    def children(self) -> tuple[Transform, ...]:
        """The transforms among the arguments of this transform, in order: for a chain, its members."""
        return tuple([value for value in self.parts if isinstance(value, Transform)])

    def tree(self) -> Report:
        """Return a table of this transform and all transforms that it calls, with their arguments.

        The locality is how much of the tree one element of an update depends on. The table prints as text, and as HTML
        in a notebook. To see how the transform runs on given parameters, print the result of `muonfx.placement.placed`.

        >>> import muonfx as mfx
        >>> mfx.chain(
        ...     mfx.momentum(0.9, nesterov=True), mfx.orthogonalize(), mfx.scale(-0.02)
        ... ).tree()
        transform        locality  arguments
        chain            LEAF
          momentum       ELEMENT   decay=0.9
          orthogonalize  LEAF
          scale          ELEMENT   factor=-0.02
        """
        return outline(self)

    def _repr_html_(self) -> str:
        return self.tree().to_html()

    def _names_of_parts(self, argument: str) -> Iterable[str]:
        """Return the names of the numbers and transforms within one argument, such as the members of a chain.

        For the argument ``*transforms`` of ``chain(scale(0.5), scale(2.0))``, they are ``["scale", "scale_2"]``.
        """
        parameter = self.factory.definition.parameters[argument]
        if parameter.kind is parameter.VAR_POSITIONAL:
            return list(entries_of(self.arguments[argument], self.factory.__name__))
        return super()._names_of_parts(argument)

    def with_children(self, children: Sequence[Transform]) -> Transform:
        """Return a copy that calls other transforms, given in the order of `children`; its numbers are unchanged.

        With ``[scale(2.0)]``, ``chain(momentum())`` becomes ``chain(scale(2.0))``.
        """
        # The parts of a call are its numbers, schedules and transforms in order. Only the transforms are replaced.
        parts = list(self.parts)
        child_indices = [index for index, part in enumerate(parts) if isinstance(part, Transform)]
        for index, child in zip(child_indices, children, strict=True):
            parts[index] = child
        return self.with_parts(parts)

    @Lazy
    def _schedules(self) -> dict[str, Schedule]:
        """The schedules (functions of the step) that were passed in place of numbers, by the name of the argument.

        For ``scale_by_learning_rate(linear_schedule(1.0, 0.0, 4))``, it is ``{"learning_rate": linear_schedule(...)}``.
        """
        schedule_parts = [part for part in self.parts if isinstance(part, Schedule)]
        if not schedule_parts:
            return {}
        schedules: dict[str, Schedule] = {}
        arguments = self.arguments
        for name in self.factory.definition.number_parameters:  # such as "learning_rate"
            if isinstance(arguments[name], Schedule):
                schedules[name] = arguments[name]
        return schedules

    def _check_schedules(self) -> None:
        """Raise now if a schedule, such as a decaying learning rate, would have an invalid value later in a run.

        A compiled step cannot raise, and a long run should not fail late. Only the steps 0, 1, 10, ..., 1,000,000 are
        checked. The real run may be shorter, so it is no error if a schedule has no value, or an infinite one, at a
        later step than 0.
        """
        if not self._schedules:
            return
        self._check_step(0, arguments_at(self, 0))
        for step in _LATER_STEPS:
            try:
                arguments = arguments_at(self, step)
            except Exception:
                # The schedule may be a table of values that ends. If a run is longer, its step raises this error.
                return
            # Under `torch.func`, a number is a tensor, whose value cannot be read.
            numbers = [arguments[name] for name in self._schedules]
            floats = [number for number in numbers if isinstance(number, float)]
            # A rate that grows until a run ends, as in a search for the best one.
            if any(map(math.isinf, floats)):
                return
            self._check_step(step, arguments)

    def _check_step(self, step: int, arguments: Mapping[str, Any]) -> None:
        """Call the constructor, which checks its arguments, with the arguments of a step. An error names the step."""
        try:
            self._build(arguments)
        except ValueError as error:
            raise ValueError(f"{self.name}: at step {step}, {error}") from error

    @LazyOfStructure
    def locality(self) -> Locality:
        """How much of the tree one element of an update depends on: the element, its matrix, its leaf or all leaves."""
        return self._option(self.declaration.locality)

    @property
    def reads_params(self) -> bool:
        """True if ``init`` or ``update`` reads the values of the parameters, and not only their names and shapes."""
        return self._option(self.declaration.reads_params)

    def _option(self, declared: Any) -> Any:
        """Return a declared option. A function of the arguments is called with the numbers of step 0."""
        if not callable(declared):
            return declared
        return self._call(declared, arguments_at(self, 0))

    @property
    def position(self) -> Position | None:
        """The place in a chain that the transform requires, such as "before_learning_rate". None: any place."""
        declared = self.declaration.position
        if callable(declared):
            return self._call(declared, self.arguments)
        return declared

    def resolve(self, params: PyTree) -> Transform:
        """Return an equal transform that does not need the full shapes of the parameters, so that it can run on shards.

        For example, a predicate that selects parameters is replaced by a mask, computed for ``params`` with full
        shapes. The transforms among the arguments stay as they are.
        """
        declared = self.declaration.resolve
        if declared is None:
            return self
        return cast("Transform", declared(self, params))

    @Lazy
    def functions(self) -> Functions:
        """The functions ``(init, update)`` of this transform, which do not check their inputs.

        The decorated function, such as ``def scale(factor): ...``, returns them when it is called with the arguments.
        For a schedule, as in ``scale(linear_schedule(1.0, 0.0, 4))``, it is called at every update, with the number of
        that step: 1.0, 0.75, and so on.
        """
        if self._schedules:
            # `follow` calls the lambda with the numbers of a step, such as {"factor": 0.75}, in place of the schedules.
            init, update = follow(
                self._schedules, lambda numbers: self._build({**self.arguments, **numbers})
            )
        else:
            init, update = self._build(self.arguments)
        return Functions(functools.partial(outside_autocast, init), update)

    def _build(self, arguments: Mapping[str, Any]) -> InitAndUpdate:
        """Call the decorated function, and return its result, ``(init, update)``. Raise TypeError if it is none."""
        init_and_update = super()._build(arguments)
        # A user's function may return something else. The tests of this package check its own functions.
        is_ours = self.factory.definition.is_ours
        if not is_ours and not torch.compiler.is_compiling():
            check_functions(self.factory.__name__, init_and_update)
        return init_and_update

    @LazyOfStructure
    def extras(self) -> Extras:
        """The extra arguments, such as ``value=loss``, that ``update`` of this or an inner transform accepts.

        They follow from the signature of ``update``. With ``*, value`` in it, only "value" is accepted. With
        ``**extras``, as for a chain, these go to each inner transform, so all that one of them accepts are accepted.
        """
        update = self.functions.update
        if not self.factory.definition.is_ours:  # the functions of this package are right
            require_arguments(
                f"{self.factory.__name__}: update", update, ("updates", "state", "params")
            )
        extras = extras_of(update)
        if not extras.takes_all:  # no ``**extras``
            return extras
        # An empty chain has nothing to forward to, and so accepts none.
        is_chain = self.declaration.combinator.in_sequence
        forwards = self.children or is_chain
        if not forwards:  # the function reads ``**extras`` itself
            return extras
        return forwarding(extras, [child.extras for child in self.children])

    @LazyOfStructure
    def _keeps_donation_promise(self) -> bool:
        """True if ``update`` of this and all inner transforms has the argument ``donate``, so inputs can be donated."""
        for child in self.children:
            if not child._keeps_donation_promise:
                return False
        return "donate" in self.extras.named

    def _prepare(self) -> None:
        """Create and cache the functions of this transform now, so that bad arguments raise before the first use."""
        if not torch.compiler.is_compiling():  # a trace has no values of numbers to check
            self._check_schedules()
        # Read each once: the result is cached, and an error in a function that the author declared is raised now.
        _ = self.functions, self.locality, self.extras, self._keeps_donation_promise

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
            warn_of_unmatched(patterns_in(self), params)
        return self.functions.init(params)

    def update(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree = None,
        *,
        donate: bool | Donation = False,
        **extras: Any,
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
            # torch's compiler is loaded, and must not compile the checks
            if "torch._dynamo" in sys.modules:
                self._check_inputs_uncompiled(updates, state, params)
            else:
                self._check_inputs(updates, state, params)
        elif params is not None:
            # Traced leaves are matched by position, and their values cannot be checked.
            checks.check_structure("updates", updates, "params", params)
        check_extras(self, extras)
        donation, updates, state = unshared(Donation.of(donate), updates, state, params)
        try:
            new_updates, new_state = self.run(updates, state, params, donate=donation, **extras)
        except RuntimeError as error:
            problem = checks.mixed_devices(error, updates=updates, params=params, state=state)
            if problem is None:
                problem = checks.kept_at_init(error, updates=updates, params=params, state=state)
            if problem is None:
                raise
            raise ValueError(f"{self.name}: {problem}") from error
        if donation.state or torch.compiler.is_compiling():
            return new_updates, new_state
        return new_updates, tree.copy_shared(new_state, state)

    @uncompiled
    def _check_inputs_uncompiled(self, updates: PyTree, state: PyTree, params: PyTree) -> None:
        """Run `_check_inputs` in a process that has loaded the compiler of torch.

        After a graph break, torch compiles each function that an uncompiled `update` calls. In these, structures of
        trees have another type, and would not fit those that uncompiled calls have put into the cache.
        """
        self._check_inputs(updates, state, params)

    def _check_inputs(self, updates: PyTree, state: PyTree, params: PyTree) -> None:
        """Raise unless updates, state and parameters fit together: the same names, and the same shapes by name.

        Warn if the parameters were not detached, so that autograd's graph of them grows with every step.

        >>> tx, w = mfx.scale(2.0), torch.zeros(2)
        >>> tx._check_inputs({"w": torch.zeros(3)}, tx.init({"w": w}), {"w": w})
        Traceback (most recent call last):
        ValueError: updates: 'w' has shape (3,), its parameter has (2,)
        """
        # The leaves, structure and shapes of the parameters, or of the updates if no parameters were passed.
        leaves, treedef, specs = checks.check_update(updates, params)
        expected = self._expected_state(leaves, treedef, specs)
        # Without the parameters, it may be None, and the state is not checked.
        if expected is not None:
            # Without parameters, dtypes were read from the updates, whose dtypes may differ. Only shapes are compared.
            checks.check_state_like(self.name, state, expected, with_dtypes=params is not None)
        if params is not None:
            checks.warn_of_growing_graphs("update", params, leaves, updates, self.tensors)

    def _expected_state(
        self, leaves: list[Any], treedef: Structure, specs: list[checks.LeafSpec]
    ) -> checks.ExpectedState | None:
        """Return the structure, shapes and dtypes that a state of this transform must have, to check a given state.

        For a momentum and a parameter "w" of shape (2,), it is one tensor "w" of shape (2,). The arguments describe the
        parameters, as `muonfx.core.checks.check_update` returns them. If one of ``specs`` is None, a parameter is
        unknown, and the result is None. The state is computed once for a set of shapes and dtypes.
        """
        # A state may contain copies of numeric arguments, so its shapes depend on theirs.
        number_shapes = tuple(map(_shape_of, self.tensors))
        # A number with dims may be an error, which must be raised before `init` uses it.
        if any(number_shapes):
            check_numbers(self)
        cache: dict[Any, checks.ExpectedState] = self.structure.derived.setdefault(
            "expected_states", {}
        )
        key = (treedef, tuple(specs), number_shapes)
        if key not in cache:
            if None in specs:
                return None
            meta_leaves = [
                torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves
            ]
            cache[key] = checks.ExpectedState.of(
                self._quiet_init(tree.unflatten(treedef, meta_leaves))
            )
        return cache[key]

    def _quiet_init(self, params: PyTree) -> PyTree:
        """Return the initial state for parameters, without the warnings that an `init` has already issued."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.functions.init(params)

    def run(
        self,
        updates: PyTree,
        state: PyTree,
        params: PyTree,
        *,
        donate: Donation = NOTHING,
        **extras: Any,
    ) -> Any:
        """Call the ``update`` function without checking the arguments. Return its pair (updates, state).

        Transforms that call others, such as chains, use this: the outermost `update` has checked the arguments. The
        function receives only the ``extras`` that it accepts.

        >>> mfx.scale(2.0).run(
        ...     {"w": torch.tensor(3.0)}, EmptyState(), None, value=0.1
        ... )  # an extra that it lacks
        ({'w': tensor(6.)}, EmptyState())
        """
        keywords = self._accepted_keywords(extras, donate)
        update = self.functions.update
        if autocast_is_on():  # tested here, to save a call for each transform of a step
            result = outside_autocast(update, updates, state, params, **keywords)
        else:
            result = update(updates, state, params, **keywords)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"{self.name}: its update must return (updates, state), found {type(result).__name__}"
            )
        # The tests of this package check the results of its own functions.
        is_ours = self.structure.factory.definition.is_ours
        if not is_ours and not torch.compiler.is_compiling():
            self._check_result(result, updates, state)
        return result

    def _accepted_keywords(self, extras: dict[str, Any], donate: Donation) -> dict[str, Any]:
        """Return the keyword arguments for one call of the ``update`` function: only those that it accepts.

        The dict ``extras`` belongs to `run`, so entries may be added to it.

        >>> mfx.momentum()._accepted_keywords({"value": 0.1}, NOTHING)  # it has no argument value
        {'donate': Donation(updates=False, state=False)}
        """
        names = self.extras.named
        keywords = extras
        # A name for another transform of the chain would be a TypeError.
        if not self.extras.takes_all:
            keywords = {name: extra for name, extra in extras.items() if name in names}
        # ``**extras`` alone does not suffice: a function that does not name `donate` may read its inputs after a call.
        if "donate" in names:
            keywords["donate"] = donate
        # Under `sharded`, the caller has passed a sum over ranks. Without it, all leaves are here.
        if "sum_over_leaves" in names:
            keywords.setdefault("sum_over_leaves", sum_over_leaves)
        return keywords

    def _check_result(self, result: tuple[PyTree, PyTree], updates: PyTree, state: PyTree) -> None:
        """Raise if an ``update`` function has returned other names or containers than it received.

        For example, it received ``{"w": ..., "b": ...}`` and returned ``{"w": ...}``. The leaf "b" would then be
        missing in the next transform, or not be updated.
        """
        new_updates, new_state = result
        checks.check_structure(
            f"{self.name}: the updates that it returns",
            new_updates,
            "the updates given to it",
            updates,
        )
        checks.check_structure(
            f"{self.name}: the state that it returns", new_state, "the state given to it", state
        )


class Arguments(NamedTuple):
    """The arguments of one call of a transform's ``update``."""

    updates: PyTree
    """The gradients or incoming updates on this rank. A None leaf gets no update."""
    state: PyTree
    params: PyTree
    """The parameters on this rank, or None if they were not given."""
    donate: Donation
    extras: Mapping[str, Any]
    """The extra arguments for the transforms, such as ``value=loss``."""

    @property
    def like(self) -> PyTree:
        """The parameters if they were given, else the updates: the tree that gives names and shapes."""
        return self.updates if self.params is None else self.params


class Outermost(Transform):
    """A transform that must be the outermost one: ``wrapper(sharded(tx))`` is converted to ``sharded(wrapper(tx))``."""


def arguments_at(tx: Transform, count: int) -> dict[str, Any]:
    """Return a dict of a transform's arguments, with each schedule replaced by its value at step ``count``.

    >>> import muonfx as mfx
    >>> arguments_at(mfx.scale_by_learning_rate(mfx.linear_schedule(1.0, 0.0, 4)), 1)
    {'learning_rate': 0.75}
    """
    arguments = tx.arguments  # a new dict at each read, so it may be changed
    for name, schedule in tx._schedules.items():
        arguments[name] = schedule(count)
    return arguments


def patterns_in(tx: Transform) -> list[NamePatterns]:
    """Return the globs, such as ``*.bias``, by which a transform or an inner transform selects parameters by name.

    They are used to warn of a glob that matches no parameter. A transform declares them by ``name_patterns``.
    """
    patterns: list[NamePatterns] = []
    for inner in within(tx):
        declared = inner.declaration.name_patterns
        if declared is not None:
            patterns += declared(inner)
    # Each once, also if two inner transforms have the same globs.
    return list(dict.fromkeys(patterns))


def check_extras(tx: Transform, extras: Mapping[str, Any]) -> None:
    """Check that ``update`` of a transform accepts extra arguments, such as ``value=loss``, and that none is missing.

    Raises:
        TypeError: a required extra argument is missing, or no transform accepts one. The message lists the accepted
            extras.
    """
    if extras or tx.extras.required:
        check_extras_within(within(tx), extras)


def left_out(tx: Transform, params: PyTree) -> set[str]:
    """Return the names of the parameters that a transform does not update, because of the label None.

    A `partition` gives each parameter a label, which selects its transform, or None for no update.

    For ``partition({"a": scale(1.0)}, {"w": "a", "b": None})``, the result is ``{"b"}``.
    """
    declared = tx.declaration.combinator.leaves_out
    if declared is not None:
        return declared(tx, params)
    # Any other transform, such as a chain, leaves out the parameters that a transform within it leaves out.
    names: set[str] = set()
    for child in tx.children:
        names |= left_out(child, params)
    return names


def without_left_out(tx: Transform, params: PyTree) -> PyTree:
    """Return parameters with None in place of tensors that cannot be updated and need not be, such as int8 weights.

    A weight of integers is an error later, because no transform can update it. It is accepted, and replaced by None, in
    two cases. It is frozen (``requires_grad_(False)``), or a `partition` gives it the label None, which means no
    update. Then ``{"codes": int8 tensor, "w": tensor}`` becomes ``{"codes": None, "w": tensor}``.
    """
    leaves, treedef = tree.flatten(params)
    if checks.all_usable(leaves):  # all are floating-point tensors
        return params
    names_left_out = left_out(tx, params)  # with the label None
    for index, name in enumerate(tree.names(params)):
        if checks.is_usable(leaves[index]):
            continue
        # Any other unusable leaf stays, so that a later check reports it.
        if name in names_left_out or checks.is_frozen(leaves[index]):
            leaves[index] = None
    return tree.unflatten(treedef, leaves)


def stacked(
    tx: Transform, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Transform, dict[str, tuple[int, int]]]:
    """Return an equal transform that takes each stack of matrices as a tensor of shape (number, rows, columns).

    With it a rank can update some matrices of a parameter without the others. Return also a dict with (rows, columns)
    for each leaf that is a stack. ``shapes`` maps the names of leaves to shapes.

    In the first example, the view splits 8 rows into two matrices of 4 rows, so the returned transform takes (2, 4, 3).
    In the second, a tensor is a stack already, and the transform is returned as it is.

    >>> import muonfx as mfx
    >>> tx = mfx.orthogonalize(view=mfx.MatrixView("(part=2 out) in -> part out in"))
    >>> stacked(tx, {"qk": (8, 3)})[1]
    {'qk': (4, 3)}
    >>> tx = mfx.stateless(lambda updates, params: updates, locality=Locality.MATRIX)
    >>> stacked(tx, {"experts": (12, 64, 32)})[1]
    {'experts': (64, 32)}
    """
    on_stacks = tx.declaration.matrices.on_stacks
    if on_stacks is not None:  # the author of the transform has declared which leaves are stacks
        return on_stacks(tx, shapes)
    # Without a declaration, the locality shows whether matrices are independent: MATRIX, and not LEAF or TREE.
    if tx.locality is not Locality.MATRIX:
        return tx, {}
    matrices: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        if len(shape) > 2:  # (12, 64, 32) is already a stack of 12 matrices of shape (64, 32)
            matrices[name] = (shape[-2], shape[-1])
    return tx, matrices


def within(tx: Transform) -> list[Transform]:
    """Return a list of a transform and then of all transforms that it calls, directly or indirectly."""
    transforms = [tx]
    for child in tx.children:
        transforms += within(child)
    return transforms


def entries_of(
    transforms: tuple[Transform | tuple[str, Transform], ...], of: str = "chain"
) -> dict[str, Transform]:
    """Give each transform among the arguments of `chain` a name, and return a dict from name to transform.

    An argument is a transform, which has the name of its function, or a pair ``(name, transform)``. A repeated name
    gets a suffix: "scale_2". Names are keys of the chain's state. ``of`` is the name of the function in errors.

    >>> import muonfx as mfx
    >>> entries_of((mfx.scale(0.5), mfx.scale(2.0), ("rate", mfx.scale(-0.1))))
    {'scale': scale(factor=0.5), 'scale_2': scale(factor=2.0), 'rate': scale(factor=-0.1)}
    """
    entries: dict[str, Transform] = {}
    for index, entry in enumerate(transforms):
        name: Any = None
        tx: Any = entry
        if isinstance(entry, tuple) and len(entry) == 2:
            name, tx = entry
        if not isinstance(tx, Transform) or not isinstance(name, str | None):
            raise TypeError(
                f"{of}: argument {index} must be a Transform or a pair (name, Transform), found {_described(entry)}"
            )
        if name is None:
            name = unused_name(tx.name, entries)
        # "." and "/" separate the levels of dotted names, as in "scale.factor", and of paths in checkpoints.
        elif name in entries or not name or "." in name or "/" in name:
            expected = "expected a nonempty name without '.' or '/' that no other transform of the chain has"
            raise ValueError(f"{of}: found the name {name!r}, {expected}: choose another")
        entries[name] = tx
    return entries


def unused_name(name: str, names: Container[str]) -> str:
    """Return a name, with a suffix such as "_2" if it is one of ``names`` already.

    >>> unused_name("scale", ["scale", "scale_2"])
    'scale_3'
    """
    candidate = name
    count = 1  # the first of a name has no number, the second has "_2"
    while candidate in names:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def require_transform(name: str, value: object) -> None:
    """Raise TypeError unless an argument is a `Transform`. The message has advice for a model or a factory."""
    if not isinstance(value, Transform):
        raise TypeError(f"{name} must be a muonfx.Transform, found {_described(value)}")


def _described(value: object) -> str:
    """Describe a value that was passed in place of a transform, with advice on the likely mistake, for an error.

    The function ``muon``, passed without a call, gives "the function muon; call it to get a transform: muon(...)".
    """
    if isinstance(value, torch.nn.Module):
        return f"the model {type(value).__name__}; the model comes first, then the transform"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}; call it to get a transform: {value.__name__}(...)"
    if isinstance(value, list):
        return "a list; unpack it: *transforms"
    return short_repr(value)


P = ParamSpec("P")


@overload
def transform(constructor: Callable[P, InitAndUpdate], /) -> Callable[P, Transform]: ...


@overload
def transform(
    *,
    name: str | None = None,  # a permanent public name, such as "acme.my_momentum"
    # The part of the tree that an element depends on.
    locality: Locality | Callable[..., Locality] = Locality.TREE,
    # All further options save work or improve errors; the docstring below describes them.
    combinator: Combinator = ...,  # how it calls the transforms among its arguments
    reads_params: bool | Callable[..., bool] = True,  # False: values of parameters are not used
    # (transform, params) -> transform that runs on shards
    resolve: Callable[[Any, PyTree], Transform] | None = None,
    matrices: MatrixWork = ...,  # which matrices are independent, and what they cost
    # Globs in its arguments, such as "*.bias".
    name_patterns: Callable[[Any], Iterable[NamePatterns]] | None = None,
    # Raises for a wrong value of an extra.
    check_extras: Callable[[Any, Mapping[str, Any]], None] | None = None,
    # In a chain, relative to the learning rate.
    position: Position | Callable[..., Position | None] | None = None,
    short_names: ShortNames | None = None,  # keys in param groups, such as {"lr": "learning_rate"}
) -> Callable[[Callable[P, InitAndUpdate]], Callable[P, Transform]]: ...


def transform(
    constructor: Callable[..., InitAndUpdate] | None = None,
    *,
    name: str | None = None,
    **options: Any,
) -> Any:
    """Decorate a function that returns ``(init, update)``, so that calling it creates a `Transform`.

    The decorated function is called the constructor. It runs once when a transform is created, so check arguments
    there, with the functions of `muonfx.core.checks`. It runs again if ``torch.func`` replaces numbers by traced
    tensors, which these checks accept. The numeric arguments become the leaves of the transform as a pytree.

    An argument annotated ``float`` or `ScalarOrSchedule` also accepts a schedule. The constructor then runs at every
    update with the number of that step, and the state is a `ScheduledState`.

    Most transforms need only ``locality``. The other options save work when parameters are sharded, or improve error
    messages. Their defaults are always correct.

    Args:
        constructor: the decorated function. Its ``update`` takes ``(updates, state, params)`` and, as keyword-only
            arguments, the extra arguments that it reads, such as ``value=loss``. Four of them are supplied
            automatically: ``sum_over_leaves``; and over ranks only, ``sum_over_shards``, ``max_over_ranks`` and
            ``shard``. On sharded parameters, a transform of locality TREE that names one of them receives this rank's
            shards. Any other TREE transform receives the gathered tensors.
        **options: the options described below.
        name: a permanent public name, such as "acme.my_momentum", which checkpoints use to identify the transform. Its
            last part is the key of the state in a chain. None: the module and the name of the function, so that
            checkpoints no longer match if the function is moved or renamed.
        locality: the part of the tree that an output element depends on: a `Locality`, or a function of the
            constructor's arguments that returns one. The default TREE is always correct.
        combinator: for a transform with other transforms as arguments, a `Combinator` that describes how it calls
            them. A wrapper usually declares ``own_locality``.
        reads_params: whether ``init`` or ``update`` reads the values of the parameters: a bool, or a function of the
            constructor's arguments. If False, sharded parameters are not gathered for it: ``init`` may receive NaN
            values, and ``update`` may receive ``params=None``.
        resolve: ``(transform, params) -> transform``. Returns an equal transform that also works on shards, without the
            full shapes of the parameters. For example, a mask replaces an argument that selects parameters by shape.
            The state must not change.
        matrices: for a transform of matrices, a `MatrixWork` that describes which matrices are independent, in which
            dtype they may be sent, and what they cost. `matrixwise` supplies it.
        name_patterns: ``(transform) -> patterns``. Returns the globs over parameter names in its arguments, as
            `muonfx.core.patterns.NamePatterns`. ``init`` warns of a glob that matches no parameter.
        check_extras: ``(transform, extras) -> None``. Raises if the value of an extra argument is invalid. It runs
            before each step that has extra arguments, on every rank.
        position: the place in a chain relative to the learning rate, or a function of the arguments that returns it.
            A `chain` raises if the order gives wrong updates, and warns if it is probably a mistake. None: any place.

            - "learning_rate": it changes updates from the direction of the gradient to the direction that is added to
              the parameters. At most one may act on a parameter.
            - "before_learning_rate": it requires updates in the direction of the gradient.
            - "sets_size": its output does not depend on the size of its input, so a learning rate before it has no
              effect.
            - "after_learning_rate": it requires the updates that are added to the parameters.
            - "last": as "after_learning_rate", and only observers may follow it.
            - "observer": it returns its updates unchanged. "last_observer" combines "last" and "observer".
            - "turns": it reverses the sign of updates without being a learning rate, as a negative scale does.
            - "either_sign": the sign of its updates is unknown.
        short_names: the keys of the numeric arguments in the param groups of `TransformOptimizer`:
            ``{"eps": "eps", "betas": ("b1", "b2")}``. A tuple combines several arguments. Arguments without a short
            name have their dotted name as key, as in `muonfx.hyperparams`.

    Returns:
        A factory: a function with the constructor's name, signature and docstring that returns a `Transform`.

    Raises:
        TypeError: an option has a wrong type.
        ValueError: ``name`` is not made of identifiers and dots, or ``position`` is unknown.

    Example:
        >>> import muonfx as mfx
        >>> @mfx.transform(locality=mfx.Locality.ELEMENT)
        ... def sign_descent(rate: float = 0.1):
        ...     def init(params):
        ...         return mfx.core.EmptyState()
        ...
        ...     def update(updates, state, params=None):
        ...         return mfx.tree.map(lambda u: -rate * u.sign(), updates), state
        ...
        ...     return init, update
        >>> sign_descent(rate=0.5)
        sign_descent(rate=0.5)
        >>> sign_descent().locality.name
        'ELEMENT'
    """
    # Raises a clear error for an unknown option.
    bind("transform", inspect.signature(Declaration), (), options)
    if options.get("short_names") is None:
        options["short_names"] = {}
    decorate = functools.partial(
        make_factory, Transform, declaration=Declaration(**options), name=name
    )
    if constructor is None:  # called with options: @transform(locality=...)
        return decorate
    return decorate(constructor)
