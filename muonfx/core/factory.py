"""The decorator `transform`, which turns a function into a factory of transforms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, cast, overload

import torch

from muonfx.core.contract import Transform
from muonfx.core.definition import (
    Combinator,
    Declaration,
    InitAndUpdate,
    LeafCost,
    Locality,
    Memory,
    Position,
    make_factory,
)
from muonfx.core.patterns import NamePatterns
from muonfx.tree import PyTree
from muonfx.tree.arguments import bind

P = ParamSpec("P")


@overload
def transform(constructor: Callable[P, InitAndUpdate], /) -> Callable[P, Transform]: ...


@overload
def transform(
    *,
    name: str | None = None,
    locality: Locality | Callable[..., Locality] = Locality.TREE,
    combinator: Combinator = ...,
    reads_params: bool | Callable[..., bool] = True,
    resolve: Callable[[Any, PyTree], Transform] | None = None,
    rounds_to: Callable[[Any, torch.dtype, torch.device], torch.dtype] | None = None,
    on_stacks: Callable[[Any, Mapping[str, tuple[int, ...]]], tuple[Transform, dict[str, tuple[int, int]]]]
    | None = None,
    name_patterns: Callable[[Any], Iterable[NamePatterns]] | None = None,
    check_extras: Callable[[Any, Mapping[str, Any]], None] | None = None,
    position: Position | Callable[..., Position | None] | None = None,
    cost: Callable[[Any, str, torch.dtype], LeafCost] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Callable[[Callable[P, InitAndUpdate]], Callable[P, Transform]]: ...


def transform(
    constructor: Callable[..., InitAndUpdate] | None = None, *, name: str | None = None, **options: Any
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
            arguments, the extra arguments that it reads, such as ``value=loss``. Three of them are supplied
            automatically: ``sum_over_leaves``, ``max_over_ranks`` and ``shard``. On sharded parameters, a
            transform of locality TREE that names one of them receives this rank's shards. Any other TREE transform
            receives the gathered tensors.
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
        rounds_to: ``(transform, dtype, device) -> dtype``. Returns the dtype to which updates are rounded before all
            other work. They may then be sent between ranks in this dtype. It has at most the precision of ``dtype``.
        on_stacks: ``(transform, shapes) -> (transform, matrices)``. ``shapes`` maps names to shapes. ``matrices`` maps
            the name of each leaf that is a contiguous stack of independent matrices to the shape of one matrix. The
            returned transform takes these leaves as ``(number, rows, columns)``. None: for a MATRIX transform, every
            leaf with more than two dims is a stack.
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
        cost: ``(transform, device, dtype) -> function``. The returned function maps the name, shape and dtype of a leaf
            to the number of operations of its update. Matrices are assigned to ranks by these numbers, which must be
            the same on all ranks. ``device`` is a device type, and ``dtype`` the dtype in which matrix products with
            the option "auto" are computed.
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
    bind("transform", inspect.signature(Declaration), (), options)
    options["short_names"] = options.get("short_names") or {}
    declaration = Declaration(**options)

    def decorate(constructor: Callable[..., InitAndUpdate]) -> Callable[..., Transform]:
        return make_factory(Transform, constructor, declaration, name=name)

    return decorate if constructor is None else decorate(constructor)


def with_memory(constructor: Callable[Concatenate[Memory, P], InitAndUpdate]) -> Callable[P, InitAndUpdate]:
    """Decorate a constructor so that it receives a cache (a dict) as its first argument.

    Callers of the factory do not pass the cache. It holds results that depend on names, shapes and dtypes only. All
    transforms that differ only in numbers share it, also if ``torch.func`` or `with_hyperparams` rebuilds them.
    """
    _, *rest = inspect.signature(constructor).parameters.values()
    marked: Any = constructor
    marked.__signature__ = inspect.Signature(rest)
    marked.takes_memory = True
    return cast("Callable[P, InitAndUpdate]", constructor)
