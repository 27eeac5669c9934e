"""The contract of a transform of updates.

A `Transform` consists of two pure functions and a declaration:

- ``init(params) -> state`` builds the state for a tree of parameters;
- ``update(updates, state, params=None) -> (updates, state)`` maps gradients, or another transform's output, to new
  updates;
- ``locality`` declares how much of the tree one output element depends on, which is all that a sharding layer needs.

Neither function modifies its inputs, keeps hidden state, or branches on values. States are nests of dict, tuple,
NamedTuple and tensors, so optree, ``torch.utils._pytree`` and ``torch.func`` see the same tree. A leaf of ``None`` is
absent: it gets no update and its state does not change. Updates keep their dtype.
"""

from __future__ import annotations

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

V = TypeVar("V")


class EmptyState(NamedTuple):
    """The state of a transform that keeps none."""


class Transform(Recorded):
    """A pure gradient transform; made by a factory that `transform` decorates.

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
        """The name of the factory. In a chain, it is the key of this transform's state."""
        factory = self.factory
        declared = factory.definition.name
        return factory.__name__ if declared is None else declared.rpartition(".")[2]

    @of_structure
    def declaration(self) -> Declaration:
        """The options that the author passed to the `transform` decorator."""
        return cast("Declaration", self.factory.definition.declaration)

    @Lazy
    def children(self) -> tuple[Transform, ...]:
        """The transforms among the arguments, which this transform calls."""
        return tuple([part for part in self.parts if isinstance(part, Transform)])

    def tree(self) -> Report:
        """Show the transform and the transforms that it calls as a table of localities and arguments.

        The table prints as text, and as HTML in a notebook. `muonfx.program.lower` shows how the transform runs on
        given parameters.

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
        """Return the dotted names of the parts in one argument; in ``*transforms``, as `chain` names them."""
        given = self.factory.definition.parameters[argument]
        if given.kind is given.VAR_POSITIONAL:
            return list(entries_of(self.arguments[argument], self.factory.__name__))
        return super().names_of_parts(argument)

    def with_children(self, function: Callable[[Transform], Transform]) -> Transform:
        """Return the same transform with a function applied to each of its children."""
        return self._from(
            self.new_structure(), [function(part) if isinstance(part, Transform) else part for part in self.parts]
        )

    @property
    def stays_outermost(self) -> bool:
        """True if a wrapper of this transform must wrap its argument ``tx`` instead, so that it stays outermost."""
        return False

    @Lazy
    def schedules(self) -> dict[str, Schedule]:
        """The schedules among the arguments for which the constructor takes numbers, by argument."""
        if not [part for part in self.parts if isinstance(part, Schedule)]:
            return {}
        kinds = self.factory.definition.plain
        return {
            name: value
            for name, value in self.arguments.items()
            if isinstance(value, Schedule) and "float" in kinds[name] and "Schedule" not in kinds[name]
        }

    def arguments_at(self, count: int) -> dict[str, Any]:
        """Return the arguments, with the number of one step in place of each schedule."""
        return {**self.arguments, **{name: schedule(count) for name, schedule in self.schedules.items()}}

    def build(self) -> Any:
        """Call the constructor; if numbers follow schedules, ``update`` calls it with the numbers of each step."""
        schedules = self.schedules
        if not schedules:
            return super().build()
        return follow(schedules, lambda numbers: self._build_for({**self.arguments, **numbers}))

    def _check_schedules(self) -> None:
        """Call the constructor with the numbers of early and late steps, to find invalid ones at once."""
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
        """How much of the tree the transform reads to compute one output element (see `Locality`)."""
        declared = self.declaration.locality
        found = declared if isinstance(declared, Locality) else self._call(declared, self.arguments_at(0))
        if not isinstance(found, Locality):
            raise TypeError(f"{self.name}: its declared locality must be a Locality, found {found!r}")
        return found

    @property
    def reads_params(self) -> bool:
        """True if `init` or the update reads the values of the parameters."""
        declared = self.declaration.reads_params
        return declared if isinstance(declared, bool) else self._call(declared, self.arguments_at(0))

    @property
    def position(self) -> Position | None:
        """The declared place of the transform in a chain, relative to the learning rate. None means any place."""
        declared = self.declaration.position
        return self._call(declared, self.arguments) if callable(declared) else declared

    def resolve(self, params: PyTree) -> Transform:
        """Return the transform with arguments that depend on names and shapes evaluated for these parameters.

        For example, a predicate becomes a mask. The transforms that it calls are not resolved.
        """
        declared = self.declaration.resolve
        return self if declared is None else cast("Transform", declared(self, params))

    def on_stacks(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Transform, dict[str, tuple[int, int]]]:
        """Return an equal transform that takes leaves as stacks of matrices of shape ``(number, rows, columns)``.

        `shapes` are the shapes of some leaves by name. The second result has the shape of one matrix for each leaf
        that is a stack.
        """
        declared = self.declaration.on_stacks
        if declared is not None:
            return cast("tuple[Transform, dict[str, tuple[int, int]]]", declared(self, shapes))
        of_matrices = self.locality is Locality.MATRIX
        return self, {n: (s[-2], s[-1]) for n, s in shapes.items() if of_matrices and len(s) > 2}

    @of_structure
    def name_patterns(self) -> tuple[NamePatterns, ...]:
        """The parameter name globs in the arguments of this transform and of transforms within it."""
        declared = self.declaration.name_patterns
        found = list(declared(self)) if declared is not None else []
        for part in self.children:
            found += part.name_patterns
        return tuple(dict.fromkeys(found))

    @Lazy
    def functions(self) -> definition.Functions:
        """The functions that the constructor returned for the arguments."""
        return definition.Functions(*self.built)

    @of_structure
    def extras(self) -> Extras:
        """The named extras in the signature of the update function, and in those of the transforms that it calls."""
        calls_none = not (self.children or self.declaration.combinator.in_sequence)
        return definition.extras_of(
            self.functions.update, [part.extras for part in self.children], calls_none=calls_none
        )

    def check_extras(self, extras: Mapping[str, Any]) -> None:
        """Raise if a required extra is missing, or if no transform reads a given extra.

        Raises:
            TypeError: an extra is missing, or no transform within reads it; the message lists the extras that are read.
        """
        if extras or self.extras.required:
            definition.check_extras(list(within(self)), extras)

    @property
    def works_on_pieces(self) -> bool:
        """True if its update takes an extra such as ``sum_over_leaves``, so it can run on shards of leaves."""
        return not definition.ON_PIECES.isdisjoint(self.extras.named)

    @of_structure
    def keeps_donation_promise(self) -> bool:
        """True if this transform and all within it take ``donate``, and so keep the promise of `Donation`."""
        return "donate" in self.extras.named and all(part.keeps_donation_promise for part in self.children)

    def prepare(self) -> None:
        """Call the constructor now, and cache the attributes that a traced update reads."""
        if not torch.compiler.is_compiling():
            self._check_schedules()
        super().prepare()
        # The tests of this package check the signatures of its own functions.
        if not (self.factory.definition.is_ours or torch.compiler.is_compiling()):
            definition.check_functions(self.factory.__name__, self.built)
        _ = self.locality, self.extras, self.keeps_donation_promise

    def init(self, params: PyTree) -> PyTree:
        """Build the state for a tree of parameters.

        Args:
            params: any nest of dict, tuple, list and NamedTuple with floating tensors (or ``None``) as leaves; usually
                ``{name: param.detach() for name, param in model.named_parameters()}``: parameters that require grad
                would record every step. Meta tensors give a state of meta tensors.

        Returns:
            A tree of tensors, whose dtypes, shapes and devices never change.

        Raises:
            TypeError: a leaf is not a dense tensor of a floating dtype of 16 bits or more; the message names it, and
                advises on sparse, complex, nested, quantized and eight-bit tensors.
            ValueError: two leaves have the same name.

        Warns:
            UserWarning: a pattern over names in an argument matches no parameter; the message lists close names.
        """
        if not torch.compiler.is_compiling():
            checks.check_params(params)
            warn_of_unmatched(self.name_patterns, params)
        return self.functions.init(params)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree = None, *, donate: bool | Donation = False, **extras: Any
    ) -> tuple[PyTree, PyTree]:
        """Map updates to new updates and the state to the next state.

        Args:
            updates: gradients, or another transform's updates; a tree like the parameters; ``None`` leaves are absent.
            state: what `init` or the previous `update` returned.
            params: the parameters, for the transforms that need them.
            donate: ``True`` promises that updates and state are not used again; their storage may be overwritten.
            **extras: named values for the transforms whose signatures name them, such as ``value=loss``.

        Returns:
            The new updates, in structure, shape and dtype like the incoming ones, and the next state.

        Raises:
            TypeError: a leaf of the updates is not a floating-point tensor, or differs in kind from its parameter; an
                extra is missing, or no transform within reads it (the message lists the extras that are read).
            ValueError: the trees differ in structure or shape, or the state belongs to another transform or other
                parameters. Each message names the leaf. Nothing has been changed when an error is raised.

        Warns:
            UserWarning: only the parameters carry the graph of earlier steps, outside of ``torch.func``: they were
                not detached, so that the graphs of all steps are kept.
        """
        if not torch.compiler.is_compiling():
            leaves, treedef, specs = checks.check_update(updates, params)
            expected = self._expected_state(leaves, treedef, specs)
            if expected is not None:
                checks.check_state_like(self.name, state, expected, with_dtypes=params is not None)
            if params is not None:
                checks.warn_of_growing_graphs("update", params, leaves, (updates, state, self.tensors))
        elif params is not None:  # traced leaves are matched by position, and their values cannot be checked
            checks.check_structure("updates", updates, "params", params)
        self.check_extras(extras)
        given = NOTHING if donate is False else Donation.of(donate)
        if given != NOTHING:
            given, updates, state = unshared(given, updates, state, params)
        out, new_state = self.run(updates, state, params, donate=given, **extras)
        if given.state or torch.compiler.is_compiling():
            return out, new_state
        return out, tree.copy_shared(new_state, state)

    def _expected_state(
        self, leaves: list[Any], treedef: Structure, specs: list[checks.LeafSpec]
    ) -> checks.ExpectedState | None:
        """Return the state that `init` returns on the meta device, once for each shape, for leaves with these specs.

        None: unknown. If gradients replace the parameters, a None leaf may still have a parameter and a state.
        """
        # The state may hold the numbers, so their shapes matter.
        numbers = tuple([part.shape for part in self.tensors]) if self.tensors else ()
        if any(numbers):
            check_numbers(self)
        key = treedef, tuple(specs), numbers
        known: dict[Any, checks.ExpectedState] = self.structure.derived.setdefault("expected_states", {})
        found = known.get(key)
        if found is None:
            if None in specs:
                return None
            on_meta = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves]
            meta = tree.unflatten(treedef, on_meta)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # init has already issued these warnings
                found = known[key] = checks.ExpectedState.of(self.functions.init(meta))
        return found

    def run(self, updates: PyTree, state: PyTree, params: PyTree, *, donate: Donation = NOTHING, **extras: Any) -> Any:
        """Call the update function without checking the trees, with the extras that its signature names."""
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
        found = update(updates, state, params, **given)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"{self.name}: its update must return (updates, state), found {type(found).__name__}")
        if not (self.structure.factory.definition.is_ours or torch.compiler.is_compiling()):
            # Without this, a missing leaf would raise in the next transform or leave a parameter without an update.
            for what, own, old in (("updates", found[0], updates), ("state", found[1], state)):
                checks.check_structure(f"{self.name}: the {what} that it returns", own, f"the {what} given to it", old)
        return found


def within(tx: Transform) -> Iterator[Transform]:
    """Yield a transform and all transforms that it calls, directly or indirectly."""
    yield tx
    for part in tx.children:
        yield from within(part)


def entries_of(transforms: tuple[Transform | tuple[str, Transform], ...], of: str = "chain") -> dict[str, Transform]:
    """Name each transform: its explicit name, or its own name with a suffix if that name repeats."""
    entries: dict[str, Transform] = {}
    for place, entry in enumerate(transforms):
        explicit, tx = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(tx, Transform) or not isinstance(explicit, str | None):
            raise TypeError(
                f"{of}: argument {place} must be a Transform or a pair (name, Transform), found {entry!r}"
                + ("; call the factory to get a transform" if callable(entry) else "")
                + (f"; give them one by one: {of}(*transforms)" if isinstance(entry, list) else "")
            )
        name = explicit or tx.name
        if explicit is not None and (explicit in entries or not explicit or "." in explicit or "/" in explicit):
            raise ValueError(f"{of}: the name {explicit!r} is empty, has a '.' or '/', or is taken; names must differ")
        count = 1
        while name in entries:
            count += 1
            name = f"{tx.name}_{count}"
        entries[name] = tx
    return entries


def require_transform(name: str, value: object) -> None:
    """Require a `Transform` as an argument; the error advises on uncalled factories and on models."""
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
    raise TypeError(f"{name} must be a muonfx.Transform, found {found}")
