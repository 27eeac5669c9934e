"""The decorator `transform`, which turns a function into a factory of transforms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, cast, overload

import torch

from muonfx.core.checks import NamePatterns
from muonfx.core.contract import Combinator, Declaration, Locality, Position, Transform
from muonfx.core.recorded import make_factory
from muonfx.tree import PyTree

__all__ = ["InitAndUpdate", "transform", "with_memory"]

P = ParamSpec("P")

InitAndUpdate = tuple[Callable[[PyTree], PyTree], Callable[..., tuple[PyTree, PyTree]]]
"""The pair of functions ``init, update`` that a function under `transform` returns."""


@overload
def transform(constructor: Callable[P, InitAndUpdate], /) -> Callable[P, Transform]: ...


@overload
def transform(
    *,
    name: str | None = None,
    locality: Locality | Callable[..., Locality] = Locality.TREE,
    combinator: Combinator | None = None,
    reads_params: bool | Callable[..., bool] = True,
    resolve: Callable[[Any, PyTree], Transform] | None = None,
    rounds_to: Callable[[Any, torch.dtype, torch.device], torch.dtype] | None = None,
    on_stacks: Callable[[Any, Mapping[str, tuple[int, ...]]], tuple[Transform, dict[str, tuple[int, int]]]]
    | None = None,
    name_patterns: Callable[[Any], Iterable[NamePatterns]] | None = None,
    check_extras: Callable[[Any, Mapping[str, Any]], None] | None = None,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Callable[[Callable[P, InitAndUpdate]], Callable[P, Transform]]: ...


def transform(
    constructor: Callable[..., InitAndUpdate] | None = None,
    *,
    name: str | None = None,
    locality: Locality | Callable[..., Locality] = Locality.TREE,
    combinator: Combinator | None = None,
    reads_params: bool | Callable[..., bool] = True,
    resolve: Callable[[Any, PyTree], Transform] | None = None,
    rounds_to: Callable[[Any, torch.dtype, torch.device], torch.dtype] | None = None,
    on_stacks: Callable[[Any, Mapping[str, tuple[int, ...]]], tuple[Transform, dict[str, tuple[int, int]]]]
    | None = None,
    name_patterns: Callable[[Any], Iterable[NamePatterns]] | None = None,
    check_extras: Callable[[Any, Mapping[str, Any]], None] | None = None,
    position: Position | Callable[..., Position | None] | None = None,
    short_names: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Any:
    """Make a factory of transforms from a function that returns ``init`` and ``update``.

    The numeric arguments of a call (floats, tensors, nested transforms) become the leaves of the transform's pytree
    view. Validate arguments in the body with the functions of `muonfx.core.checks`, which skip tensors: the body runs
    at the call, and again with traced values wherever ``torch.func`` has rebuilt the transform. An argument that is
    annotated `ScalarOrSchedule`, or ``float`` without ``Schedule``, takes a schedule too: the body then runs at every
    update, with the number of that step, and the state is a `ScheduledHyperparamsState`.

    Only ``locality`` must be thought of; the rest tells the sharding layer where it can save work, and leaving it out
    is always correct.

    Args:
        constructor: the function; its name becomes the transform's name unless one is declared. Its ``update`` takes
            ``(updates, state, params)`` and, keyword-only, the extras that it wants to receive. A TREE transform that
            names ``sum_over_leaves``, ``max_over_ranks`` or ``shard`` gets a rank's pieces of leaves and these
            functions over ranks; one that names none gets the gathered tree.
        name: a public name that stays when the function moves or is renamed, such as "acme.my_momentum": fingerprints
            in checkpoints know the transform by it, and its last part is the key of the state in a chain. None: the
            function's module and name, so that its checkpoints are of another chain once it lies elsewhere.
        locality: a `Locality`, or a function of the constructor's arguments that returns one. Undeclared means TREE,
            which is always correct.
        combinator: how it runs the transforms that it calls; a wrapper usually declares its ``own_locality`` here.
        reads_params: whether ``init`` or ``update`` looks at the values of the parameters; a bool or a function of the
            arguments. Where it does not, a sharded run sends none: `init` finds NaN, and ``update`` gets None.
        resolve: ``(transform, params) -> transform``: the same for parameters of just these names and shapes, with all
            decided that names and shapes decide, so that it can be used on pieces of them. The state stays as it is.
        rounds_to: ``(transform, dtype, device) -> dtype``: what updates of a dtype are rounded to before anything else
            is done with them; the result has no more digits than that either.
        on_stacks: ``(transform, shapes) -> (transform, matrices)``: of some leaves, by name, those that are independent
            matrices one behind another in memory, with the shape of one, and the same transform for these leaves as
            stacks ``(how many, rows, columns)``. None: the leading dims of locality MATRIX, no others.
        name_patterns: ``(transform) -> patterns``: the globs over names that its arguments hold, so that `init` can
            warn of one that matches nothing.
        check_extras: ``(transform, extras)``: raises if the value of a named extra is wrong. It runs before a step, on
            all ranks, with the transform as it was given and, under an optimizer or ranks, as it is resolved.
        position: its place in a chain, relative to the learning rate, or a function of the arguments that returns one.
            A `chain` raises where an order gives wrong numbers and warns where it is hardly meant. None: anywhere.

            - "learning_rate": it reverses updates, from the direction of the gradient to what is added to the
              parameters. At most one may act on a parameter.
            - "before_learning_rate": it requires updates in the direction of the gradient.
            - "sets_size": the size of its input does not matter, so that a learning rate before it has no effect.
            - "after_learning_rate": it requires updates as they are added to the parameters.
            - "last": as "after_learning_rate", and nothing but observers may follow it.
            - "observer": it returns its updates unchanged. "last_observer" is both of these two.
            - "turns": it reverses the direction without being a learning rate, as a negative scale does.
            - "either_sign": the direction of its updates is unknown.
        short_names: by the key that groups of a torch optimizer have for it, a numeric argument, or several for a tuple
            of them: ``{"betas": ("b1", "b2"), "eps": "eps"}``. Without, the key is the dotted name.

    Returns:
        A factory with the constructor's name, signature and docstring.

    Raises:
        ValueError: ``name`` is not made of identifiers and dots.

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
    declaration = Declaration(
        locality=locality,
        combinator=combinator or Combinator(),
        reads_params=reads_params,
        resolve=resolve,
        rounds_to=rounds_to,
        on_stacks=on_stacks,
        name_patterns=name_patterns,
        check_extras=check_extras,
        position=position,
        short_names=short_names or {},
    )

    def decorate(constructor: Callable[..., InitAndUpdate]) -> Callable[..., Transform]:
        return make_factory(Transform, constructor, declaration, name=name)

    return decorate if constructor is None else decorate(constructor)


def with_memory(constructor: Callable[Concatenate[dict[Any, Any], P], InitAndUpdate]) -> Callable[P, InitAndUpdate]:
    """Give a constructor under `transform` a dict as its first argument, which is not an argument of the factory.

    The dict lives as long as the transform's structure, also if ``torch.func`` or `inject_hyperparams` rebuild the
    transform at every step. It is for results that names, shapes and dtypes decide.
    """
    _, *rest = inspect.signature(constructor).parameters.values()
    marked: Any = constructor
    marked.__signature__ = inspect.Signature(rest)
    marked.takes_memory = True
    return cast("Callable[P, InitAndUpdate]", constructor)
