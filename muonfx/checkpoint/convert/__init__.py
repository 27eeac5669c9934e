"""Convert optimizer states from and to other Muon and AdamW implementations, with ``read``, ``write`` and ``recipe``.

A format is the name of another optimizer: "torch" (``torch.optim.Muon`` and ``AdamW``), "keller" (Keller Jordan's
Muon), "moonlight", "dion" (``dion.Muon``), "deepspeed" (a universal checkpoint) or "optax" (``optax.contrib.muon``).
Only tensors and plain values are unpickled from files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from muonfx.checkpoint.convert.formats import FORMATS, Format
from muonfx.checkpoint.convert.sources import Arguments
from muonfx.core import Transform
from muonfx.tree import PyTree
from muonfx.tree.arguments import did_you_mean

__all__ = ["FormatName", "read", "recipe", "write"]

FormatName = Literal["torch", "keller", "moonlight", "dion", "deepspeed", "optax"]
"""The optimizers whose state can be converted."""


def __dir__() -> list[str]:
    return sorted(__all__)


def read(
    format: FormatName,
    source: Any,
    tx: Transform,
    params: PyTree,
    *,
    names: Sequence[str] | Mapping[str, str] | None = None,
    step: int | None = None,
    transpose: bool | None = None,
) -> PyTree:
    """Make a transform's state from the state of another optimizer.

    Args:
        format: the other optimizer.
        source: an optimizer, its ``state_dict()``, or a list of these that share the parameters of one model. For
            "deepspeed", the folder of a universal checkpoint; for "optax", the state as a tree of numpy arrays, such as
            ``jax.tree.map(numpy.asarray, opt_state)``.
        tx: the transform; `recipe` makes the one that continues as the other optimizer would.
        params: the parameters by name, such as ``dict(model.named_parameters())``. An optimizer that holds these
            tensors gets its names from here.
        names: the parameters' names in the optimizer's order, for a state dict without names. For "optax", a mapping
            from Optax's dotted names to names in ``params``, if they differ.
        step: the number of steps taken, if the transform counts steps and the source does not, or has several counts.
        transpose: for "optax", whether its two-dimensional arrays are transposed: Flax has (inputs, outputs), PyTorch
            (outputs, inputs).

    Returns:
        The state: copies, in the dtypes that the transform pins. The momenta of Keller Jordan's ``MuonWithAuxAdam`` are
        distributed over ranks and must be gathered first, DTensors replaced by ``full_tensor()``.

    Raises:
        ValueError: the format or the names are not known, or source and transform do not fit; the message lists every
            difference.

    Example:
        >>> model = torch.nn.Linear(4, 3, bias=False)
        >>> optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
        >>> model(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> params = dict(model.named_parameters())
        >>> state = read("torch", optimizer, recipe("torch", optimizer, params), params)
        >>> bool((state["momentum"].trace["weight"] == optimizer.state[model.weight]["momentum_buffer"]).all())
        True
    """
    form = _format(format, names, transpose)
    return form.read(source, tx, params, Arguments(names, transpose), step)


def write(
    format: FormatName,
    state: PyTree,
    target: Any,
    params: PyTree = None,
    *,
    names: Sequence[str] | Mapping[str, str] | None = None,
    transpose: bool | None = None,
) -> Any:
    """Make a state for another optimizer from a transform's state.

    Args:
        format: the other optimizer; "deepspeed" cannot be written.
        state: the state of a chain with momentum or Adam: heavy-ball momentum for "moonlight" and "dion",
            ``momentum(debias=True)`` for "optax".
        target: the optimizer or its ``state_dict()``, whose groups and hyperparameters are kept. For "optax", a state
            with numpy arrays.
        params: as in `read`; not needed for "optax".
        names: as in `read`.
        transpose: as in `read`.

    Returns:
        The argument of ``optimizer.load_state_dict``; for "optax", a copy of ``target`` with the new values.

    Raises:
        ValueError: a parameter of the target has no such state, or the format cannot be written.

    Example:
        >>> import muonfx as mfx
        >>> model = torch.nn.Linear(4, 3)
        >>> params = dict(model.named_parameters())
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> optimizer.load_state_dict(write("torch", mfx.adamw(1e-3).init(params), optimizer, params))
        >>> sorted(optimizer.state[model.bias])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    form = _format(format, names, transpose)
    return form.write(state, target, params, Arguments(names, transpose))


def recipe(
    format: FormatName,
    source: Any,
    params: PyTree,
    *,
    names: Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    **options: Any,
) -> Transform:
    """Make the chain that another optimizer computes.

    Numbers are read from its groups, as they are now. Moonlight's AdamW adds eps to a root before the bias correction,
    ours after it: relative to an update the difference is at most 3.5 eps over the corrected root, and fades.

    Args:
        format: the other optimizer.
        source: as in `read`. For "optax", whose state does not hold its arguments: the arguments of
            ``optax.contrib.muon`` as a mapping, ``{"learning_rate": 0.02, "weight_decay": 0.1}``.
        params: as in `read`.
        names: as in `read`.
        config: for "deepspeed", ``config["optimizer"]["params"]``: "lr", or "muon_lr" and "adam_lr"; "momentum",
            "betas", "eps" and "weight_decay".
        **options: for `muonfx.orthogonalize`: ``dtype=``, which is bf16 in most of the originals, and for "dion"
            ``coefficients="quintic"`` if it was made with ``use_polar_express=False``.

    Returns:
        A chain; if groups differ, a partition.

    Raises:
        ValueError: a setting has no chain, such as ``amsgrad``, ``cautious_wd`` or another eps; or as for `read`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3, 4))
        >>> recipe("torch", torch.optim.Muon([weight], lr=0.1), {"w": weight})  # doctest: +NORMALIZE_WHITESPACE
        chain(momentum(), orthogonalize(coefficients='keller'), scale_by_shape(rule='original'),
              add_decayed_weights(weight_decay=0.1), scale_by_learning_rate(learning_rate=0.1))
    """
    form = _format(format, names, transpose=format == "optax" or None)
    if (config is not None) != (format == "deepspeed"):
        raise ValueError('config: \'deepspeed\' needs config["optimizer"]["params"], other formats take no config')
    return form.recipe(source, params, Arguments(names, config=config), options)


def _format(format: str, names: Sequence[str] | Mapping[str, str] | None, transpose: bool | None) -> Format:
    """Return the format with a name; check the arguments that only some formats take."""
    if format not in FORMATS:
        raise ValueError(f"format: found {format!r}, expected one of {[*FORMATS]}{did_you_mean(format, list(FORMATS))}")
    if (transpose is not None) != (format == "optax"):
        raise ValueError(
            "transpose: 'optax' needs True or False, whether its matrices are transposed; other formats take none"
        )
    if names is not None and isinstance(names, Mapping) != (format == "optax"):
        expected = (
            "a mapping from Optax's names to the parameters'"
            if format == "optax"
            else "a list of names in the optimizer's order"
        )
        raise TypeError(f"names: expected {expected}, found a {type(names).__name__}")
    return FORMATS[format]
