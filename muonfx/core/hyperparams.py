"""Functions that list, replace, batch or convert the numeric arguments (hyperparameters) of a transform.

A transform is a pytree whose leaves are its numeric arguments. `hyperparams` lists the leaves by name and
`with_hyperparams` replaces some. `stack` batches the leaves of several transforms for ``torch.func.vmap``. `as_tensors`
converts the leaves to tensors for ``torch.func.grad``, and for compiled steps with numbers that change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.value import Recorded, named_numbers, walk, with_numbers
from muonfx.internal.arguments import check_plain, did_you_mean, float_of

R = TypeVar("R", bound=Recorded)


def hyperparams(tx: Recorded) -> dict[str, float | Tensor]:
    """Return the numeric arguments of a transform, and of all transforms that it calls, by dotted name.

    Args:
        tx: a transform or a schedule. For a muonfx optimizer, pass ``optimizer.tx``.

    Returns:
        A dict from names such as "momentum.decay" to floats or 0-d tensors.

    Raises:
        TypeError: ``tx`` is not a transform or a schedule.

    >>> import muonfx as mfx
    >>> hyperparams(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1)))
    {'momentum.decay': 0.9, 'scale.factor': -0.1}
    """
    _check_recorded("hyperparams", tx)
    return named_numbers(tx)


def _check_recorded(owner: str, tx: object) -> None:
    """Raise unless ``tx`` is a transform or schedule. ``owner`` is the name of the public function, for the error.

    Common mistakes are an optimizer, and a factory without a call: ``momentum`` in place of ``momentum()``.
    """
    if isinstance(tx, Recorded):
        return
    # A factory that was not called has a name, for example.
    name = getattr(tx, "__name__", type(tx).__name__)
    raise TypeError(
        f"{owner}: expected a transform, found {name}; call the factory, or for an optimizer use {owner}(optimizer.tx)"
    )


def with_hyperparams(tx: R, changes: Mapping[str, Any]) -> R:
    """Return a copy of a transform with some numeric arguments replaced.

    Args:
        tx: a transform.
        changes: a dict from names, as `hyperparams` returns them, to new numbers. The range of the numbers is not
            checked, so they may be traced tensors.

    Raises:
        KeyError: the transform has no numeric argument of a name. The message lists the names.
        TypeError: ``tx`` is not a transform, or a new value is not a number.

    >>> import muonfx as mfx
    >>> with_hyperparams(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1)), {"scale.factor": -0.2})
    chain(momentum(decay=0.9), scale(factor=-0.2))
    """
    _check_recorded("with_hyperparams", tx)
    numbers = named_numbers(tx)
    unknown = sorted(changes.keys() - numbers.keys())
    if unknown:
        advice = did_you_mean(unknown[0], numbers)
        raise KeyError(
            f"no hyperparameter {', '.join(unknown)}{advice}; there are {', '.join(numbers) or 'none'}"
        )
    for name, number in changes.items():  # `numbers` keeps its order, which `with_numbers` requires
        if number is not numbers[name]:
            numbers[name] = _checked_number(name, number)
    return with_numbers(tx, iter(numbers.values()))


def _checked_number(name: str, number: Any) -> Any:
    """Return a new value of a numeric argument, as a call with this argument stores it: an int as a float.

    >>> _checked_number("scale.factor", "1e-3")
    Traceback (most recent call last):
    TypeError: with_hyperparams: scale.factor must be a number or a 0-d tensor, found '1e-3': convert the text ...
    """
    # The usual case; numbers of a trace have no values.
    if type(number) is float or torch.compiler.is_compiling():
        return number
    number = check_plain("with_hyperparams", name, number, frozenset({"float"}))
    if isinstance(number, int):
        return float_of(f"with_hyperparams: {name}", number)
    return number


def stack(transforms: Sequence[R]) -> R:
    """Stack several transforms into one transform, to run all of them at once with ``torch.func.vmap``.

    Args:
        transforms: transforms that differ only in their numeric arguments, for example in the learning rate.

    Returns:
        A transform in which each numeric argument is a tensor of shape ``(len(transforms),)``. Floats become float64.

    Raises:
        TypeError: one of them is not a transform.
        ValueError: no transform was given, or the transforms differ in more than their numeric arguments.

    Example:
        >>> import muonfx as mfx
        >>> sweep = stack([mfx.scale(-rate) for rate in (0.1, 0.2)])
        >>> grads = {"w": torch.ones(1)}
        >>> torch.func.vmap(lambda tx: tx.update(grads, mfx.core.EmptyState())[0])(sweep)
        {'w': tensor([[-0.1000],
                [-0.2000]])}
    """
    transforms = list(transforms)
    if not transforms:
        raise ValueError("stack: expected at least one transform, found none")
    for index, tx in enumerate(transforms):
        _check_recorded("stack", tx)
        if not tree.same_structure(tx, transforms[0]):
            raise ValueError(
                f"stack: transform {index} is {tx!r}, expected one that differs from transform 0, {transforms[0]!r}, "
                "in numeric arguments only"
            )
    return tree.map(lambda *numbers: torch.stack(list(map(_tensor, numbers))), *transforms)


def as_tensors(
    tx: R, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None
) -> R:
    """Return a copy of a transform whose numeric arguments are tensors, as ``torch.func.grad`` requires.

    Args:
        tx: a transform.
        dtype: the dtype of the tensors.
        device: the device of the tensors. None: a tensor keeps its device, and a float gets the default device.

    Example:
        >>> import muonfx as mfx
        >>> def loss(tx):
        ...     updates, _ = tx.update({"w": torch.ones(3)}, mfx.core.EmptyState())
        ...     return updates["w"].sum()
        >>> torch.func.grad(loss)(as_tensors(mfx.scale(2.0)))
        scale(factor=torch.tensor(3.0, dtype=torch.float64))
    """
    return tree.map(lambda leaf: _tensor(leaf).to(dtype=dtype, device=device), tx)


def _tensor(number: object) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def check_numbers(value: Recorded) -> None:
    """Raise ValueError if a numeric argument of a transform, or of an inner transform, is a tensor with dims.

    Such a number, as in ``scale(torch.tensor([0.1, 0.2]))``, would be broadcast over the elements of a parameter.
    """
    for _, inner in walk(value):
        for name, number in sorted(inner.arguments.items()):
            if not inner.factory.definition.is_number(name):  # by its annotation
                continue
            if isinstance(number, Tensor) and number.ndim > 0:
                raise ValueError(
                    f"{inner.factory.__name__}: {name} must be a number or a 0-d tensor, found a tensor of shape "
                    f"{tuple(number.shape)}; to run several values at once, use torch.func.vmap over a muonfx.stack"
                )
