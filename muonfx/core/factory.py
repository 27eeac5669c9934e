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
    """Make a factory of transforms from a function that returns ``init`` and ``update``.

    The numeric arguments of a call (floats, tensors, nested transforms) become the leaves of the transform's pytree
    view. Validate arguments in the body with the functions of `muonfx.core.checks`, which skip tensors: the body runs
    at the call, and again with traced values whenever ``torch.func`` has rebuilt the transform. An argument that is
    annotated ``float`` or `ScalarOrSchedule` also accepts a schedule: the body then runs at every update with the
    number of that step, and the state is a `ScheduledState`.

    Only ``locality`` deserves thought. The other options let the sharding layer save work; their defaults are always
    correct.

    Args:
        constructor: the function; its name becomes the transform's name unless one is declared. Its ``update`` takes
            ``(updates, state, params)`` and, keyword-only, the extras that it reads. A TREE transform that names the
            extra ``sum_over_leaves``, ``max_over_ranks`` or ``shard`` receives a rank's shards of leaves and these
            functions over ranks; any other TREE transform receives the gathered tree.
        **options: the other options, each described below.
        name: a public name that stays if the function moves or is renamed, such as "acme.my_momentum". Fingerprints
            in checkpoints contain it, and its last part is the key of the state in a chain. None: the function's
            module and name, so that moving the function changes the fingerprint.
        locality: a `Locality`, or a function of the constructor's arguments that returns one. The default TREE is
            always correct.
        combinator: how the transform runs the transforms that it calls. A wrapper usually declares its
            ``own_locality`` here.
        reads_params: whether ``init`` or ``update`` reads the values of the parameters: a bool, or a function of the
            arguments. If False, a sharded run sends no parameters: ``init`` receives NaN, and ``update`` None.
        resolve: ``(transform, params) -> transform``: the same transform with everything decided that depends on the
            names and shapes of the parameters, so that it also works on shards. The state does not change.
        rounds_to: ``(transform, dtype, device) -> dtype``: the dtype to which updates of a dtype are rounded before
            any other work. The result has no higher precision.
        on_stacks: ``(transform, shapes) -> (transform, matrices)``: given some leaves by name, the leaves that are
            stacks of independent matrices, contiguous in memory, with the shape of one matrix; and the same transform
            for these leaves in the shape ``(number, rows, columns)``. None: the leading dims of a MATRIX transform.
        name_patterns: ``(transform) -> patterns``: the globs over parameter names in its arguments. `init` warns of
            a glob that matches nothing.
        check_extras: ``(transform, extras)``: raises if the value of a named extra is wrong. It runs before a step, on
            all ranks, with the transform as given and, under an optimizer or over ranks, as resolved.
        position: the place in a chain relative to the learning rate, or a function of the arguments that returns it.
            A `chain` raises if the order gives wrong numbers, and warns if it is probably a mistake. None: anywhere.

            - "learning_rate": it reverses updates, from the direction of the gradient to the direction that is added
              to the parameters. At most one may act on a parameter.
            - "before_learning_rate": it requires updates in the direction of the gradient.
            - "sets_size": the size of its input does not matter, so that a learning rate before it has no effect.
            - "after_learning_rate": it requires updates as they are added to the parameters.
            - "last": as "after_learning_rate", and only observers may follow it.
            - "observer": it returns its updates unchanged. "last_observer" combines "last" and "observer".
            - "turns": it reverses the direction without being a learning rate, as a negative scale does.
            - "either_sign": the direction of its updates is unknown.
        cost: ``(transform, device, dtype) -> cost``: the operations of the update as a function of a leaf's name,
            shape and dtype, by which a sharded run assigns matrices to ranks. `device` is a kind of device, and `dtype`
            the dtype in which "auto" computes. All ranks must find the same cost, so it must not depend on the machine.
        short_names: the numeric argument for a key of a torch optimizer's groups, or a tuple of several:
            ``{"betas": ("b1", "b2"), "eps": "eps"}``. Without it, the key is the dotted name.

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
    bind("transform", inspect.signature(Declaration), (), options)
    options["short_names"] = options.get("short_names") or {}
    declaration = Declaration(**options)

    def decorate(constructor: Callable[..., InitAndUpdate]) -> Callable[..., Transform]:
        return make_factory(Transform, constructor, declaration, name=name)

    return decorate if constructor is None else decorate(constructor)


def with_memory(constructor: Callable[Concatenate[Memory, P], InitAndUpdate]) -> Callable[P, InitAndUpdate]:
    """Give a constructor under `transform` a dict as its first argument, which is not an argument of the factory.

    The dict lives as long as the transform's structure, also if ``torch.func`` or `with_hyperparams` rebuilds the
    transform at every step. It is for results that names, shapes and dtypes decide.
    """
    _, *rest = inspect.signature(constructor).parameters.values()
    marked: Any = constructor
    marked.__signature__ = inspect.Signature(rest)
    marked.takes_memory = True
    return cast("Callable[P, InitAndUpdate]", constructor)
