"""The numeric arguments of a transform as data: listed, replaced, batched or differentiated.

A transform is a pytree whose leaves are its numeric arguments. `hyperparams` lists the leaves by name and
`with_hyperparams` replaces some. `stack` batches the leaves of several transforms for ``torch.func.vmap``. `as_tensors`
converts the leaves to tensors for ``torch.func.grad`` and for compiled steps whose numbers change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core.recorded import Recorded, parts_of, with_numbers
from muonfx.tree.arguments import did_you_mean

R = TypeVar("R", bound=Recorded)


def hyperparams(tx: Recorded) -> dict[str, float | Tensor]:
    """Return the numeric arguments of a transform and of the transforms within it, by dotted name.

    Raises:
        TypeError: `tx` is not a transform. For a muonfx optimizer, pass `optimizer.tx`.

    >>> import muonfx as mfx
    >>> hyperparams(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1)))
    {'momentum.decay': 0.9, 'scale.factor': -0.1}
    """
    _check_recorded("hyperparams", tx)
    return dict(parts_of(tx))


def _check_recorded(owner: str, tx: object) -> None:
    if isinstance(tx, Recorded):
        return
    advice = ""
    if isinstance(tx, torch.optim.Optimizer):
        advice = f"; of a muonfx optimizer, {owner}(optimizer.tx); the numbers of each group are in its param_groups"
    elif hasattr(tx, "definition"):
        advice = "; call the factory to get a transform"
    raise TypeError(f"{owner}: expected a transform, found {getattr(tx, '__name__', type(tx).__name__)}{advice}")


def with_hyperparams(tx: R, changes: Mapping[str, Any]) -> R:
    """Return a copy of a transform with some numeric arguments replaced, by their names in `hyperparams`.

    The new values are not validated, so they may be traced tensors.

    Raises:
        KeyError: the transform has no such name; the message lists its names.

    >>> import muonfx as mfx
    >>> with_hyperparams(mfx.chain(mfx.momentum(0.9), mfx.scale(-0.1)), {"scale.factor": -0.2})
    chain(momentum(decay=0.9), scale(factor=-0.2))
    """
    _check_recorded("with_hyperparams", tx)
    known = dict(parts_of(tx))
    if unknown := sorted(changes.keys() - known.keys()):
        close = did_you_mean(unknown[0], known)
        raise KeyError(f"no hyperparameter {', '.join(unknown)}{close}; there are {', '.join(known) or 'none'}")
    return with_numbers(tx, iter({**known, **changes}.values()))


def stack(transforms: Sequence[R]) -> R:
    """Stack the numeric arguments of several transforms into one transform, for ``torch.func.vmap``.

    Args:
        transforms: transforms that differ in numeric arguments only.

    Returns:
        A transform whose leaves are float64 tensors of shape (number of transforms, ...).

    Raises:
        ValueError: there are none, or they differ in more than numbers.

    Example:
        >>> import muonfx as mfx
        >>> sweep = stack([mfx.scale(-rate) for rate in (0.1, 0.2)])
        >>> grads = {"w": torch.ones(1)}
        >>> torch.func.vmap(lambda tx: tx.update(grads, mfx.core.EmptyState())[0])(sweep)
        {'w': tensor([[-0.1000],
                [-0.2000]])}
    """
    flattened = [tree.flatten(tx) for tx in transforms]
    if not flattened:
        raise ValueError("stack: expected at least one transform, found none")
    for place, (_, treedef) in enumerate(flattened):
        if treedef != flattened[0][1]:
            raise ValueError(
                f"stack: transforms must differ in numeric arguments only, but number {place}, {transforms[place]!r}, "
                f"has another structure than {transforms[0]!r}"
            )
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    return tree.unflatten(flattened[0][1], [torch.stack([_tensor(x) for x in column]) for column in columns])


def as_tensors(tx: R, *, dtype: torch.dtype = torch.float64, device: torch.device | str | None = None) -> R:
    """Convert the numeric arguments of a transform to 0-d tensors, so that ``torch.func.grad`` can differentiate them.

    Example:
        >>> import muonfx as mfx
        >>> def loss(tx):
        ...     updates, _ = tx.update({"w": torch.ones(3)}, mfx.core.EmptyState())
        ...     return updates["w"].sum()
        >>> torch.func.grad(loss)(as_tensors(mfx.scale(2.0)))
        scale(factor=torch.tensor(3.0, dtype=torch.float64))
    """
    return tree.map(lambda leaf: _tensor(leaf).to(dtype=dtype, device=device), tx)


def _tensor(value: object) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)


def check_numbers(value: Recorded) -> None:
    """Require that each number of a transform and of its parts is a Python number or a 0-d tensor."""
    for name, kinds in sorted(value.factory.definition.plain.items()):
        number = value.arguments[name] if "float" in kinds else None
        if isinstance(number, Tensor) and number.ndim:
            raise ValueError(
                f"{value.factory.__name__}: {name} must be a number or a 0-d tensor, found a tensor of shape "
                f"{tuple(number.shape)}; several at once: torch.func.vmap over a muonfx.stack"
            )
    for part in value.parts:
        if isinstance(part, Recorded):
            check_numbers(part)
