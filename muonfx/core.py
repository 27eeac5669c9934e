"""Transforms of updates and how they are put together; long, as the contract is read with what rests on it.

A `Transform` is two pure functions and a declaration:

- ``init(params) -> state`` builds a state for a tree of parameters;
- ``update(updates, state, params=None) -> (updates, state)`` maps gradients, or another transform's output, to new
  updates;
- ``locality`` says how much of the tree one output element depends on, which is all that a sharding layer must know.

Neither function writes to its inputs, remembers anything, or looks at values to decide what to do. States are nests
of dict, tuple, NamedTuple and tensors, so optree, ``torch.utils._pytree`` and ``torch.func`` see one and the same
tree. A leaf of ``None`` is absent: it gets no update and its state does not change. Updates come back in the dtype
they came in.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from muonfx import tree
from muonfx.checks import (
    NamePatterns,
    check_params,
    check_structure,
    check_update,
    check_updates_fit,
    did_you_mean,
    warn_of_unmatched,
)
from muonfx.recorded import Recorded, make_factory
from muonfx.tracing import functorch_is_active
from muonfx.tree import PyTree

__all__ = [
    "Donation",
    "EmptyState",
    "Locality",
    "Transform",
    "apply_updates",
    "chain",
    "identity",
    "set_to_zero",
    "stateless",
    "transform",
]


class Locality(IntEnum):
    """What a transform must see to compute one element of its output; ordered from least to most.

    >>> max(Locality.ELEMENT, Locality.MATRIX).name
    'MATRIX'
    """

    ELEMENT = 0
    """That element of the updates, the state and the parameters, and scalars."""
    MATRIX = 1
    """The whole matrix that holds it (the last two dims of its leaf); batch dims are independent."""
    LEAF = 2
    """The whole leaf that holds it."""
    TREE = 3
    """The whole tree."""


class Donation(NamedTuple):
    """What the caller of ``update`` promises not to use again, so that its storage may be overwritten.

    ``update(..., donate=True)`` donates both, as does ``Donation(updates=True, state=True)``. A transform that names
    ``donate`` in its ``update`` signature receives this value, and promises in turn: its updates never share storage
    with its new state, nor with the incoming updates unless these were donated or it returns the very same tensor.

    >>> Donation.of(True)
    Donation(updates=True, state=True)
    """

    updates: bool = False
    state: bool = False

    @classmethod
    def of(cls, donate: bool | Donation) -> Donation:
        """Resolve what ``update`` was given.

        Raises:
            TypeError: it is neither a bool nor a `Donation` of bools: "no" must not count as a promise.
        """
        given = donate if isinstance(donate, Donation) else cls(donate, donate)
        if type(given.updates) is not bool or type(given.state) is not bool:
            raise TypeError(f"donate must be True, False or a muonfx.Donation of these, found {donate!r}")
        return given


NOTHING = Donation()


class Extras(NamedTuple):
    """The named extras that an update function takes."""

    named: frozenset[str]
    takes_all: bool
    """True if it takes all others too, for those that it calls."""
    required: frozenset[str]
    """Without which it, or one that it calls, cannot run."""


class Functions(NamedTuple):
    """The two functions that a constructor returns, which check nothing."""

    init: Callable[..., Any]
    update: Callable[..., Any]


class InStore(NamedTuple):
    """The way in which a transform that calls others does its own work where the state is offloaded: by buckets.

    Both functions get the executor, whose `init_in_store`, `update_in_store` and `kept_state` do so, and the transform
    with those it calls in a form that the executor carries out.
    """

    init: Callable[..., PyTree]
    """``(executor, transform, params) -> state``."""
    update: Callable[..., tuple[PyTree, PyTree]]
    """``(executor, transform, updates, state, params, donate, extras) -> (updates, state)``."""


@dataclass(frozen=True)
class Declaration:
    """The declarations of a transform's author; each field is explained at `transform`."""

    locality: Locality | Callable[..., Locality] = Locality.TREE
    own_locality: Locality | None = None
    reads_params: bool | Callable[..., bool] = True
    resolve: Callable[[Any, PyTree], Transform] | None = None
    rounds_to: Callable[[Any, torch.dtype, torch.device], torch.dtype] | None = None
    with_compute_dtype: Callable[[Any, torch.dtype], Transform] | None = None
    on_stacks: Callable[[Any, Mapping[str, tuple[int, ...]]], tuple[Transform, dict[str, tuple[int, int]]]] | None = (
        None
    )
    name_patterns: Callable[[Any], Iterable[NamePatterns]] | None = None
    turns_downhill: bool | Callable[..., bool] = False
    wants_uphill: bool = False
    many_of_one: bool = False
    in_store: InStore | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.locality, Locality) or callable(self.locality)):
            raise TypeError(
                "transform: locality must be a Locality, such as Locality.MATRIX, or a function of the arguments that "
                f"returns one, found {self.locality!r}"
            )
        if not (self.own_locality is None or isinstance(self.own_locality, Locality)):
            raise TypeError(f"transform: own_locality must be a Locality or None, found {self.own_locality!r}")
        if not (isinstance(self.reads_params, bool) or callable(self.reads_params)):
            raise TypeError(
                f"transform: reads_params must be True, False or a function of the arguments that returns one, "
                f"found {self.reads_params!r}"
            )
        for option in ("resolve", "rounds_to", "with_compute_dtype", "on_stacks", "name_patterns"):
            function = getattr(self, option)
            if function is not None and not callable(function):
                raise TypeError(f"transform: {option} must be a function or None, found {function!r}")


_OUR_EXTRAS = frozenset({"donate", "sum_over_leaves"})
"""Named in signatures, and given by those who call transforms, not by training loops."""


class EmptyState(NamedTuple):
    """The state of a transform that keeps none."""


def sum_over_leaves(scalars: PyTree) -> Tensor:
    """Add up a tree of 0-d tensors: what the extra ``sum_over_leaves`` is within one process."""
    found = list(tree.tensors(scalars))
    if not found:
        return torch.zeros(())
    return torch.stack([scalar.to(found[0].device) for scalar in found]).sum()


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

    @property
    def name(self) -> str:
        """The factory's name: the key of this transform's state in a chain."""
        declared = self.factory.definition.name
        return self.factory.__name__ if declared is None else declared.rpartition(".")[2]

    @property
    def declaration(self) -> Declaration:
        """The declarations of its author."""
        return cast("Declaration", self.factory.definition.declaration)

    @property
    def children(self) -> tuple[Transform, ...]:
        """The transforms among its parts, which it calls."""
        return tuple(part for part in self.parts if isinstance(part, Transform))

    def with_children(self, function: Callable[[Transform], Transform]) -> Transform:
        """The same with each of its children replaced by what a function makes of it."""
        return self.with_parts([function(part) if isinstance(part, Transform) else part for part in self.parts])

    @property
    def stays_outermost(self) -> bool:
        """True if what is put around it goes inside instead, as around its argument ``tx``."""
        return False

    @property
    def locality(self) -> Locality:
        """What the transform must see to compute one element of its output."""
        return self._derived("locality", self._find_locality)

    def _find_locality(self) -> Locality:
        declared = self.declaration.locality
        found = declared if isinstance(declared, Locality) else self._call(declared, self._arguments)
        if not isinstance(found, Locality):
            raise TypeError(f"{self.name}: its declared locality must be a Locality, found {found!r}")
        return found

    @property
    def reads_params(self) -> bool:
        """True if `init` or the update looks at the values of the parameters."""
        declared = self.declaration.reads_params
        return declared if isinstance(declared, bool) else self._call(declared, self._arguments)

    @property
    def turns_downhill(self) -> bool:
        """True if a learning rate in it turns some updates from the gradient's direction to the parameters'.

        >>> import muonfx as mfx
        >>> mfx.adamw(0.1).turns_downhill, mfx.momentum().turns_downhill
        (True, False)
        """
        declared = self.declaration.turns_downhill
        own = declared if isinstance(declared, bool) else self._call(declared, self._arguments)
        return own or any(part.turns_downhill for part in self.children)

    @property
    def wants_uphill(self) -> tuple[str, ...]:
        """The names of those in it whose updates must have the gradient's direction still when they come to it."""
        if self.declaration.wants_uphill:
            return (self.name,)
        entries = chain_entries(self)
        within = self.children if entries is None else entries.values()
        found: list[str] = []
        for part in within:
            found += part.wants_uphill
            if entries is not None and part.turns_downhill:
                break  # behind its own learning rate it has been warned of where that chain was made
        return tuple(found)

    def resolve(self, params: PyTree) -> Transform:
        """The same for parameters of just these names and shapes, with all decided that these decide.

        Only of this transform itself, not of those within it.

        >>> import muonfx as mfx
        >>> tx = mfx.masked(mfx.scale(2.0), mfx.select.ndim(min=2))
        >>> tx.resolve({"w": torch.zeros(2, 2), "b": torch.zeros(2)})
        masked(scale(factor=2.0), {'b': False, 'w': True})
        """
        declared = self.declaration.resolve
        return self if declared is None else declared(self, params)

    def on_stacks(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Transform, dict[str, tuple[int, int]]]:
        """The same for those leaves that are stacks of matrices, as such: ``(how many, rows, columns)``.

        Args:
            shapes: of some leaves, by name.

        Returns:
            The transform, and the shape of one matrix of each leaf that is a stack.

        >>> import muonfx as mfx
        >>> mfx.orthogonalize(blocks={"*.qkv": 3}).on_stacks({"attn.qkv": (6, 4), "out": (4, 4)})[1]
        {'attn.qkv': (2, 4)}
        """
        declared = self.declaration.on_stacks
        if declared is not None:
            return declared(self, shapes)
        of_matrices = self.locality is Locality.MATRIX
        return self, {n: (s[-2], s[-1]) for n, s in shapes.items() if of_matrices and len(s) > 2}

    @property
    def name_patterns(self) -> tuple[NamePatterns, ...]:
        """The globs over names among the arguments of this transform and of those within it; each once.

        >>> import muonfx as mfx
        >>> mfx.muon(blocks={"*.qkv.weight": 3}).name_patterns
        (NamePatterns(argument='blocks', groups=(('*.qkv.weight',),), first_counts=True),)
        """
        return self._derived("name_patterns", self._find_name_patterns)

    def _find_name_patterns(self) -> tuple[NamePatterns, ...]:
        declared = self.declaration.name_patterns
        found = list(declared(self)) if declared is not None else []
        for part in self.children:
            found += part.name_patterns
        return tuple(dict.fromkeys(found))

    @property
    def functions(self) -> Functions:
        """The functions that the constructor returned for the arguments."""
        return Functions(*self.built)

    @property
    def extras(self) -> Extras:
        """The named extras in the signature of the update function."""
        return self._derived("extras", self._find_extras)

    def _find_extras(self) -> Extras:
        parameters = inspect.signature(self.functions.update).parameters.values()
        named = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        required = {parameter.name for parameter in named if parameter.default is parameter.empty}
        for part in self.children if takes_all else ():
            required |= part.extras.required
        names = frozenset(parameter.name for parameter in named)
        return Extras(names, takes_all, frozenset(required - {"sum_over_leaves"}))

    @property
    def understood_extras(self) -> frozenset[str] | None:
        """The named extras that this transform or one within it reads; None: any, as only its own code knows.

        A transform that takes ``**extras`` passes them on to those within it, and names what it reads itself. Where
        it has none within, its ``**extras`` are for itself.

        >>> import muonfx as mfx
        >>> sorted(mfx.chain(mfx.accumulate(mfx.momentum(), 2), mfx.scale(-0.1)).understood_extras)
        ['boundary']
        """
        return self._derived("understood", self._find_understood)

    def _find_understood(self) -> frozenset[str] | None:
        named, takes_all, _ = self.extras
        # Of an empty chain it is known that it reads none.
        if takes_all and self.factory is not chain and not self.children:
            return None
        found = set(named - _OUR_EXTRAS)
        for part in self.children if takes_all else ():
            inner = part.understood_extras
            if inner is None:
                return None
            found |= inner
        return frozenset(found)

    def check_extras(self, extras: Mapping[str, Any]) -> None:
        """Require the named extras without which some transform within cannot run, and no others than it knows.

        Raises:
            TypeError: one is missing, or no transform within reads it; the message names it and those that are read.
        """
        missing = sorted(self.extras.required - extras.keys())
        if missing:
            name = missing[0]
            raise TypeError(f"{self.name} needs the named extra {name}: update(..., {name}=...)")
        understood = self.understood_extras
        if understood is None:
            return
        unknown = sorted(extras.keys() - understood - _OUR_EXTRAS)
        if unknown:
            there = ", ".join(sorted(understood)) or "none"
            raise TypeError(
                f"{self.name}: nothing in it reads the named extra {unknown[0]}{did_you_mean(unknown[0], understood)}; "
                f"it reads {there}. A transform reads the extras that its update's signature names"
            )

    @property
    def keeps_donation_promise(self) -> bool:
        """True if this transform and all within it name ``donate`` and so promise what `Donation` says."""
        return self._derived("promise", self._find_promise)

    def _find_promise(self) -> bool:
        return "donate" in self.extras.named and all(part.keeps_donation_promise for part in self.children)

    def _derived(self, what: str, find: Callable[[], Any]) -> Any:
        """Look up what follows from the structure alone, so that traced code finds the answer ready."""
        derived = self.structure.derived
        if what not in derived:
            derived[what] = find()
        return derived[what]

    def prepare(self) -> None:
        """Build now and derive what tracing needs."""
        super().prepare()
        _ = self.locality, self.extras, self.understood_extras, self.keeps_donation_promise

    def init(self, params: PyTree) -> PyTree:
        """Build the state for a tree of parameters.

        Args:
            params: any nest of dict, tuple, list and NamedTuple with floating tensors (or ``None``) as leaves; usually
                ``{name: param.detach() for name, param in model.named_parameters()}``: parameters that require grad
                would record every step. Meta tensors give a state of meta tensors.

        Returns:
            A tree of tensors; dtypes, shapes and devices are fixed here and stay.

        Raises:
            TypeError: a leaf is not a dense tensor of a floating dtype of 16 bits or more; the message names it, and
                says what to do with what is sparse, complex, nested, quantized or of eight bits.
            ValueError: two leaves have one name.

        Warns:
            UserWarning: a pattern over names in some argument matches no parameter; the message lists close names.
        """
        if not torch.compiler.is_compiling():
            check_params(params)
            warn_of_unmatched(self, params, stacklevel=2)
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
                extra that no transform within reads (the message lists those read), or one that is missing.
            ValueError: the trees differ in structure or shape, or the state belongs to another transform or other
                parameters. Each message names the leaf. Nothing has been changed when an error is raised.

        Warns:
            UserWarning: the parameters carry the graph of earlier steps and nothing else does, outside of
                ``torch.func``: a loop over parameters that were not detached, which keeps the graphs of all steps.
        """
        if not torch.compiler.is_compiling():
            check_update(self, updates, state, params)
            if _carries_a_graph(params) and not _carries_a_graph(None, (updates, state, tree.leaves(self))):
                _warn_of_growing_graphs("update", params)
        elif params is not None:  # what is in another place would be taken for what it is not; values cannot be seen
            check_structure("updates", updates, "params", params)
        self.check_extras(extras)
        given = Donation.of(donate)
        if given.updates and any(_overlaps(update) for update in tree.tensors(updates)):
            given = given._replace(updates=False)  # an expanded gradient has no storage of its own to reuse
        out, new_state = self.run(updates, state, params, donate=given, **extras)
        if given.state or torch.compiler.is_compiling():
            return out, new_state
        return out, _apart(new_state, state)

    def run(self, updates: PyTree, state: PyTree, params: PyTree, *, donate: Donation = NOTHING, **extras: Any) -> Any:
        """Call the update function without checking the trees, with the extras that its signature names."""
        given = {**extras, "donate": donate}
        names, takes_all, _ = self.extras
        if not takes_all:
            given = {name: value for name, value in given.items() if name in names}
        if "sum_over_leaves" in names:
            given.setdefault("sum_over_leaves", sum_over_leaves)
        return self.functions.update(updates, state, params, **given)


def _carries_a_graph(params: PyTree, others: PyTree = None) -> bool:
    """Tell whether a parameter is the result of recorded operations, or another tensor takes part in any."""
    if not torch.is_grad_enabled() or functorch_is_active():
        return False
    return any(leaf.grad_fn is not None for leaf in tree.tensors(params)) or any(
        leaf.requires_grad for leaf in tree.tensors(others)
    )


def _warn_of_growing_graphs(what: str, params: PyTree) -> None:
    named = zip(tree.names(params), tree.leaves(params), strict=True)
    name = next(name for name, leaf in named if leaf is not None and leaf.grad_fn is not None)
    warnings.warn(
        f"{what}: the parameters, such as {name!r}, carry the graph of the steps before, and the gradients carry none: "
        "it grows with every step and takes memory. If nothing is differentiated through the steps, detach the "
        "parameters once, params = {n: p.detach() for n, p in model.named_parameters()}, or step under torch.no_grad()",
        UserWarning,
        stacklevel=3,
    )


def _overlaps(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def _apart(new: PyTree, old: PyTree) -> PyTree:
    """Copy what a new state has kept of the old one, lest a later donation of the new one write into the old."""
    leaves, before = tree.leaves(new), tree.leaves(old)
    kept = [mine is theirs and isinstance(mine, Tensor) for mine, theirs in zip(leaves, before, strict=True)]
    if not any(kept):
        return new
    copied = [leaf.clone() if same else leaf for leaf, same in zip(leaves, kept, strict=True)]
    return tree.unflatten(tree.flatten(new)[1], copied)


Constructor = Callable[..., tuple[Callable[..., Any], Callable[..., Any]]]


def transform(
    constructor: Constructor | None = None,
    *,
    name: str | None = None,
    locality: Locality | Callable[..., Locality] = Locality.TREE,
    own_locality: Locality | None = None,
    reads_params: bool | Callable[..., bool] = True,
    resolve: Callable[[Any, PyTree], Transform] | None = None,
    rounds_to: Callable[[Any, torch.dtype, torch.device], torch.dtype] | None = None,
    with_compute_dtype: Callable[[Any, torch.dtype], Transform] | None = None,
    on_stacks: Callable[[Any, Mapping[str, tuple[int, ...]]], tuple[Transform, dict[str, tuple[int, int]]]]
    | None = None,
    name_patterns: Callable[[Any], Iterable[NamePatterns]] | None = None,
    turns_downhill: bool | Callable[..., bool] = False,
    wants_uphill: bool = False,
    former_defaults: Mapping[str, Any] | None = None,
    remembers: bool = False,
    part_names: Callable[[Any], Sequence[str]] | None = None,
    many_of_one: bool = False,
    transparent: bool = False,
    in_store: InStore | None = None,
) -> Any:
    """Make a factory of transforms from a function that returns ``init`` and ``update``.

    The numeric arguments of a call (floats, tensors, nested transforms) become the leaves of the transform's pytree
    view. Validate arguments in the body with the functions of `muonfx.checks`, which pass tensors by: the body runs
    at the call, and again with traced values wherever ``torch.func`` has rebuilt the transform.

    Only ``locality`` must be thought of; the rest tells the sharding layer where it can save work, and leaving it out
    is always correct.

    Args:
        constructor: the function; its name becomes the transform's name unless one is declared. Its ``update`` takes
            ``(updates, state, params)`` and, keyword-only, the extras that it wants to receive.
        name: a public name that stays when the function moves or is renamed, such as "acme.my_momentum": fingerprints
            in checkpoints know the transform by it, and its last part is the key of the state in a chain. None: the
            function's module and name, so that its checkpoints are of another chain once it lies elsewhere.
        locality: a `Locality`, or a function of the constructor's arguments that returns one. Undeclared means TREE,
            which is always correct.
        own_locality: for a transform that calls others, the locality of its own work apart from theirs, where it hands
            them trees of some of the very leaves that it was given. The others may then be replaced by sharded ones.
        reads_params: whether ``init`` or ``update`` looks at the values of the parameters; a bool or a function of the
            arguments. Where it does not, a sharded run sends none: `init` finds NaN, and ``update`` gets None.
        resolve: ``(transform, params) -> transform``: the same for parameters of just these names and shapes, with all
            decided that names and shapes decide, so that it can be used on pieces of them. The state stays as it is.
        rounds_to: ``(transform, dtype, device) -> dtype``: what updates of a dtype are rounded to before anything else
            is done with them; the result has no more digits than that either.
        with_compute_dtype: ``(transform, dtype) -> transform``: the same with its dtype of "auto", if it has one,
            decided: float64 stays float64, all else is computed in this dtype. Ranks decide together, since on CPUs
            "auto" is a measurement. Its numbers stay as they are.
        on_stacks: ``(transform, shapes) -> (transform, matrices)``: of some leaves, by name, those that are independent
            matrices one behind another in memory, with the shape of one, and the same transform for these leaves as
            stacks ``(how many, rows, columns)``. None: the leading dims of locality MATRIX, no others.
        name_patterns: ``(transform) -> patterns``: the globs over names that its arguments hold, so that `init` can
            warn of one that matches nothing.
        turns_downhill: whether it is a learning rate, which turns updates from the gradient's direction to that in
            which parameters go; a bool or a function of the arguments.
        wants_uphill: whether its incoming updates must still have the gradient's direction. A `chain` warns where they
            have not.
        former_defaults: by argument, the default that it had in an earlier version. Fingerprints leave it out as they
            leave out that of today, so that checkpoints of both are of one chain. Only where the state has one meaning
            with both, as with a dtype; else give the argument another name.
        remembers: whether the constructor takes a keyword ``_memory`` beside its arguments: a dict that lives as long
            as the transform's structure, also where ``torch.func`` or `inject_hyperparams` rebuild the transform at
            every step. For what names, shapes and dtypes decide; nothing else may depend on it.
        many_of_one: whether it is the same transform for all leaves but for numbers, so that costs are those of the
            first of those it calls.
        in_store: how a transform that calls others, and keeps state like the parameters of its own, does its own work
            by buckets where the state is offloaded. None: all of that state is brought in at once.
        transparent: whether it stands for the one transform that it calls, and does not show in names.
        part_names: ``(transform) -> names``: of its numeric arguments and of those it calls, in order, where the names
            of the arguments will not do.

    Returns:
        A factory with the constructor's name, signature and docstring.

    Raises:
        ValueError: ``name`` is not made of identifiers and dots, or ``former_defaults`` has what is no argument with a
            default.

    Example:
        >>> import muonfx as mfx
        >>> @mfx.transform(locality=mfx.Locality.ELEMENT)
        ... def sign_descent(rate: float = 0.1):
        ...     def init(params):
        ...         return mfx.EmptyState()
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
    declaration = Declaration(
        locality=locality,
        own_locality=own_locality,
        reads_params=reads_params,
        resolve=resolve,
        rounds_to=rounds_to,
        with_compute_dtype=with_compute_dtype,
        on_stacks=on_stacks,
        name_patterns=name_patterns,
        turns_downhill=turns_downhill,
        wants_uphill=wants_uphill,
        many_of_one=many_of_one,
        in_store=in_store,
    )

    def decorate(constructor: Constructor) -> Callable[..., Transform]:
        return make_factory(
            Transform,
            constructor,
            declaration,
            name=name,
            former_defaults=former_defaults,
            remembers=remembers,
            part_names=part_names,
            transparent=transparent,
        )

    return decorate if constructor is None else decorate(constructor)


def no_state(params: PyTree) -> EmptyState:
    return EmptyState()


@transform(locality=Locality.ELEMENT)
def identity():
    """Pass updates on unchanged.

    >>> identity().update({"w": torch.ones(2)}, EmptyState())
    ({'w': tensor([1., 1.])}, EmptyState())
    """

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return updates, state

    return no_state, update


@transform(locality=Locality.ELEMENT)
def set_to_zero():
    """Replace all updates by zeros: what freezes a group in a `partition`.

    >>> set_to_zero().update({"w": torch.ones(2)}, EmptyState())[0]
    {'w': tensor([0., 0.])}
    """

    def update(updates: PyTree, state: EmptyState, params: PyTree = None, *, donate: Donation = NOTHING):
        return tree.map(torch.zeros_like, updates), state

    return no_state, update


@transform(locality=lambda function, locality=Locality.TREE: locality)
def stateless(function: Callable[[PyTree, PyTree], PyTree], locality: Locality = Locality.TREE):
    """Make a transform from a function ``(updates, params) -> updates``.

    Args:
        function: pure; a named function of a module if the transform is to be pickled.
        locality: what the function must see; TREE unless said otherwise.

    >>> halve = stateless(lambda updates, params: tree.map(lambda u: u / 2, updates))
    >>> halve.update({"w": torch.ones(2)}, EmptyState())[0]
    {'w': tensor([0.5000, 0.5000])}
    """

    def update(updates: PyTree, state: EmptyState, params: PyTree = None):
        return function(updates, params), state

    return no_state, update


def _entries(transforms: tuple[Transform | tuple[str, Transform], ...]) -> dict[str, Transform]:
    """Name the transforms of a chain: an explicit name, or the transform's own with a suffix where it repeats."""
    entries: dict[str, Transform] = {}
    for place, entry in enumerate(transforms):
        explicit, tx = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(tx, Transform) or not isinstance(explicit, str | None):
            raise TypeError(
                f"chain: argument {place} must be a Transform or a pair (name, Transform), found {entry!r}"
                + ("; call the factory to get a transform" if callable(entry) else "")
            )
        name = explicit or tx.name
        if explicit is not None and (explicit in entries or not explicit or "." in explicit or "/" in explicit):
            raise ValueError(f"chain: the name {explicit!r} is empty, has a '.' or '/', or is taken; names must differ")
        count = 1
        while name in entries:
            count += 1
            name = f"{tx.name}_{count}"
        entries[name] = tx
    return entries


def chain_entries(tx: Transform) -> dict[str, Transform] | None:
    """The transforms of a chain by name; None for any other transform."""
    return _entries(tx.arguments["transforms"]) if tx.factory is chain else None


def _part_names_of_chain(value: Recorded) -> list[str]:
    return list(_entries(value.arguments["transforms"]))


def widest(transforms: Any) -> Locality:
    """The locality of transforms that run one after another or side by side: the widest of theirs."""
    return max((tx.locality for tx in transforms), default=Locality.ELEMENT)


def _warn_of_order(entries: Mapping[str, Transform]) -> None:
    """Warn of what a chain has behind a learning rate and would silently do the wrong way round."""
    turned: str | None = None
    for name, tx in entries.items():
        if turned is not None and tx.wants_uphill:
            warnings.warn(
                f"chain: {tx.wants_uphill[0]} comes behind the learning rate in {turned!r}, where updates are what is "
                "added to the parameters: its decay would let them grow, and not by the learning rate. Put it in front",
                UserWarning,
                stacklevel=_STACKLEVEL,
            )
        if turned is not None and tx.turns_downhill:
            warnings.warn(
                f"chain: the learning rates in {turned!r} and {name!r} both turn updates downhill, and so the sum goes "
                "uphill; give one of them flip_sign=False, or take it out",
                UserWarning,
                stacklevel=_STACKLEVEL,
            )
        if tx.turns_downhill:
            turned = name


_STACKLEVEL = 9
"""From the warning to the call of the factory: by way of the constructor, its recording and its building."""


def is_new(new: PyTree, old: PyTree) -> bool:
    """True if no leaf of the new tree is a leaf of the old one."""
    given = {id(leaf) for leaf in tree.leaves(old) if leaf is not None}
    return not any(id(leaf) in given for leaf in tree.leaves(new))


@transform(locality=lambda *transforms: widest(_entries(transforms).values()), part_names=_part_names_of_chain)
def chain(*transforms: Transform | tuple[str, Transform]):
    """Apply transforms one after another.

    The state is a dict with the state of each transform under its name; a name that repeats gets a suffix (``scale``,
    ``scale_2``). A pair ``(name, transform)`` sets the name. Follows Optax's ``chain`` and ``named_chain``.

    Raises:
        TypeError: an argument is not a transform.
        ValueError: two explicit names are alike.

    Warns:
        UserWarning: weight decay comes behind a learning rate that has turned the updates downhill, so that parameters
            would grow; or two learning rates turn them, so that they point uphill.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.chain(mfx.momentum(), ("rate", mfx.scale(-0.1)))
        >>> list(tx.init({"w": torch.zeros(2)}))
        ['momentum', 'rate']
    """
    entries = _entries(transforms)
    if not torch.compiler.is_compiling():
        _warn_of_order(entries)

    def init(params: PyTree) -> dict[str, PyTree]:
        return {name: tx.functions.init(params) for name, tx in entries.items()}

    def update(
        updates: PyTree, state: dict[str, PyTree], params: PyTree = None, *, donate: Donation = NOTHING, **extras: Any
    ):
        new_state: dict[str, PyTree] = {}
        may_write = donate.updates
        for name, tx in entries.items():
            out, new_state[name] = tx.run(
                updates, state[name], params, donate=Donation(may_write, donate.state), **extras
            )
            # What a transform that keeps the promise has made anew belongs to this chain alone.
            may_write = donate.state and tx.keeps_donation_promise and (may_write or is_new(out, updates))
            updates = out
        return updates, new_state

    return init, update


def apply_updates(params: PyTree, updates: PyTree, *, donate: bool = False) -> PyTree:
    """Add updates to parameters: ``params + updates``, rounded once to the parameter's dtype.

    Args:
        params: a tree of tensors.
        updates: a tree of the same structure; a parameter whose update is ``None`` is returned as it is.
        donate: the caller's promise not to use ``params`` again; they are then overwritten and returned.

    Raises:
        TypeError: ``donate`` is no bool.
        ValueError: an update has not the shape of its parameter, or the trees differ in structure; the leaf is named.

    Warns:
        UserWarning: the parameters carry the graph of earlier steps and the updates none, as in `Transform.update`.

    >>> apply_updates({"w": torch.ones(2), "b": torch.ones(1)}, {"w": torch.ones(2), "b": None})
    {'w': tensor([2., 2.]), 'b': tensor([1.])}
    """
    if type(donate) is not bool:
        raise TypeError(f"apply_updates: donate must be True or False, found {donate!r}")

    def add(param: Tensor | None, update: Tensor | None) -> Tensor | None:
        if param is None or update is None:
            return param
        if update.shape != param.shape:
            check_updates_fit(params, updates)
        if donate:
            return param.add_(update)
        return (param + update).to(param.dtype)

    if not torch.compiler.is_compiling() and _carries_a_graph(params) and not _carries_a_graph(None, updates):
        _warn_of_growing_graphs("apply_updates", params)
    try:
        return tree.map(add, params, updates)
    except ValueError:
        check_updates_fit(params, updates)
        raise
