"""Checks of arguments and trees. Each error names the leaf or argument, the value found, and the value expected.

Checks of numeric arguments test Python numbers only. A tensor (a batch of hyperparameters, or a traced value) always
passes, because Python control flow must not depend on its value.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils import _pytree as torch_pytree

from muonfx import tree
from muonfx.internal.arguments import is_symbolic
from muonfx.internal.display import shown_name
from muonfx.internal.tracing import functorch_is_active
from muonfx.tree import PyTree
from muonfx.tree.difference import difference

__all__ = [
    "ExpectedState",
    "LeafSpec",
    "at_least",
    "check_floating",
    "check_params",
    "check_state_like",
    "check_structure",
    "check_tree",
    "check_update",
    "check_updates_fit",
    "finite",
    "fraction",
    "in_unit_interval",
    "is_usable",
    "positive",
    "positive_int",
    "state_dtype",
    "whole_number",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def finite(name: str, value: object) -> float:
    """Check that an argument is a finite number, and return it. A tensor is returned unchecked.

    Reading the value of a tensor may wait for a GPU. An object that replaces a number while a compiler traces has none.

    >>> finite("factor", float("nan"))
    Traceback (most recent call last):
    ValueError: factor must be finite, found nan
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(value, Tensor) or is_symbolic(value):
            return cast("float", value)
        raise TypeError(f"{name} must be a number or a 0-d tensor, found {value!r}")
    # Compiled code may compare a float that changes between calls, but cannot call `math.isfinite` with it.
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name} must be finite, found {value!r}")
    return value


def _number(name: str, value: object, expected: str, fits: Callable[[float], bool]) -> Any:
    """Check that an argument is a finite number for which ``fits`` is True, and return it. Else raise.

    ``expected`` describes the condition in the error. A tensor is returned unchecked.

    >>> _number("decay", 1.5, "below 1", lambda number: number < 1)
    Traceback (most recent call last):
    ValueError: decay must be below 1, found 1.5
    """
    number: Any = finite(name, value)
    if isinstance(number, int | float) and not fits(number):
        raise ValueError(f"{name} must be {expected}, found {number!r}")
    return number


def at_least(name: str, value: object, low: float) -> float:
    """Check that an argument is a finite number of at least ``low``, and return it. A tensor is returned unchecked.

    >>> at_least("steps", 0, low=1)
    Traceback (most recent call last):
    ValueError: steps must be at least 1, found 0
    """
    return _number(name, value, f"at least {low:g}", lambda number: number >= low)


def fraction(name: str, value: object) -> float:
    """Check that an argument, such as a share, is from 0 to 1, and return it. A tensor is returned unchecked.

    >>> fraction("outward", 3.0)
    Traceback (most recent call last):
    ValueError: outward must be from 0 to 1, found 3.0
    """
    return _number(name, value, "from 0 to 1", lambda number: 0.0 <= number <= 1.0)


def in_unit_interval(name: str, value: object) -> float:
    """Check that an argument, such as a decay, is in [0, 1), and return it. A tensor is returned unchecked.

    >>> in_unit_interval("decay", 1.0)
    Traceback (most recent call last):
    ValueError: decay must be in [0, 1), found 1.0
    """
    return _number(name, value, "in [0, 1)", lambda number: 0.0 <= number < 1.0)


def positive(name: str, value: object) -> float:
    """Check that an argument is a finite number above 0, and return it. A tensor is returned unchecked.

    >>> positive("max_norm", 0.0)
    Traceback (most recent call last):
    ValueError: max_norm must be above 0, found 0.0
    """
    return _number(name, value, "above 0", lambda number: number > 0.0)


def positive_int(name: str, value: object) -> None:
    """Raise unless an argument is an int of 1 or more.

    >>> positive_int("every", 0)
    Traceback (most recent call last):
    ValueError: every must be an int of 1 or more, found 0
    """
    whole_number(name, value, least=1)


def whole_number(name: str, value: object, *, least: int = 0) -> None:
    """Raise unless an argument is an int of at least ``least``.

    >>> whole_number("warmup_steps", -1)
    Traceback (most recent call last):
    ValueError: warmup_steps must be an int of 0 or more, found -1
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int of {least} or more, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be an int of {least} or more, found {value!r}")


def state_dtype(name: str, value: object) -> None:
    """Check the argument for the dtype of a state: raise unless it is "auto", a floating-point torch dtype or None.

    >>> state_dtype("dtype", torch.int64)
    Traceback (most recent call last):
    TypeError: dtype must be "auto", a floating-point torch.dtype or None, found torch.int64
    """
    if value is None or value == "auto":
        return
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return
    # For a string, the type is right.
    error_class = ValueError if isinstance(value, str) else TypeError
    raise error_class(
        f'{name} must be "auto", a floating-point torch.dtype or None, found {value!r}'
    )


_LIBRARIES = tuple(
    os.path.join(os.path.dirname(file), "") for file in (os.path.dirname(__file__), torch.__file__)
)


def warn_caller(message: str) -> None:
    """Issue a UserWarning that points to the user's own line, the innermost caller outside muonfx and torch.

    Python shows the line of a warning that is ``stacklevel`` calls up: 1 is the line below, 2 that of the caller.
    """
    frame = sys._getframe(1)  # the call that has called this function
    level = 2
    # Go from each call to its caller, until one is in a file of neither library: that is the user's.
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level)


# torch.nn.parameter.is_lazy would break a compiled graph
_LAZY = UninitializedParameter, UninitializedBuffer
PLAIN = frozenset({Tensor, nn.Parameter})
"""The classes of plain tensors, as opposed to subclasses that wrap other tensors, such as DTensor."""
_PLAIN_OR_NONE = PLAIN | {type(None)}
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_USABLE_FORMATS = frozenset({(dtype, torch.strided, False) for dtype in _DTYPES})


def is_usable(leaf: object) -> bool:
    """Return True if a leaf is None, or a dense tensor of dtype float64, float32, bfloat16 or float16.

    >>> (
    ...     is_usable(torch.zeros(2)),
    ...     is_usable(torch.zeros(2).to_sparse()),
    ...     is_usable(torch.zeros(2, dtype=torch.int8)),
    ... )
    (True, False, False)
    """
    if leaf is None:
        return True
    # A parameter of a lazy module has no shape yet. `isinstance` is slow for its class, so plain tensors skip it.
    if type(leaf) not in PLAIN and isinstance(leaf, _LAZY):
        return False
    return (
        isinstance(leaf, Tensor)
        and leaf.dtype in _DTYPES
        and leaf.layout is torch.strided
        and not leaf.is_nested
    )


def all_usable(leaves: Collection[Any]) -> bool:
    """Return True if every leaf is None or a dense floating-point tensor, as `is_usable` tests for one leaf."""
    # A leaf of another type, such as a DTensor or a number, needs the slower test of each leaf.
    if not _PLAIN_OR_NONE.issuperset(map(type, leaves)):
        return all(map(is_usable, leaves))
    # Hundreds of plain tensors usually have one format, such as (float32, strided, not nested).
    formats = {(leaf.dtype, leaf.layout, leaf.is_nested) for leaf in leaves if leaf is not None}
    return formats <= _USABLE_FORMATS


def is_frozen(leaf: object) -> bool:
    """Return True if a leaf is a parameter of a model that is not trained, as after ``requires_grad_(False)``.

    A plain tensor is never frozen, because its gradient may be assigned.

    >>> is_frozen(nn.Parameter(torch.zeros(2), requires_grad=False)), is_frozen(torch.zeros(2))
    (True, False)
    """
    return isinstance(leaf, nn.Parameter) and not leaf.requires_grad


def _check_leaves(tree_name: str, values: PyTree, leaves: Sequence[object]) -> None:
    if all_usable(leaves):
        return
    for name, leaf in zip(tree.names(values), leaves, strict=True):
        if not is_usable(leaf):
            raise _unusable(tree_name, name, leaf)


def _unusable(tree_name: str, name: str, leaf: object) -> TypeError:
    """Return the error for a leaf that is no dense floating-point tensor, such as a tensor of integers.

    For the leaf "table" of "params", it is "params: 'table' must be dense and real floating point of 16 bits or more,
    found torch.int64, torch.strided: convert it, or leave it out".
    """
    if not isinstance(leaf, Tensor):  # a number or a model, with advice of its own
        return _no_tensor(tree_name, name, leaf)
    if isinstance(leaf, _LAZY):
        problem = "has no shape yet, since it belongs to a lazy module: run one forward pass first"
    else:
        layout = "a nested tensor" if leaf.is_nested else leaf.layout
        problem = (
            f"must be dense and real floating point of 16 bits or more, found {leaf.dtype}, {layout}: convert it, or "
            "leave it out"
        )
    return TypeError(f"{tree_name}: {shown_name(name)} {problem}")


def _no_tensor(tree_name: str, name: str, leaf: object) -> TypeError:
    """Return the error for a leaf that is no tensor, such as a number or a whole model.

    For the leaf "w" of "updates", it is "updates: 'w' must be a tensor or None, found float". Some types have advice.
    """
    advice = ""
    if isinstance(leaf, nn.Module | Iterator):  # the model, or the generator model.parameters()
        code = "dict(model.named_parameters())"
        if tree_name == "updates":  # gradients are expected, not parameters
            code = "{name: p.grad for name, p in model.named_parameters()}"
        advice = f"; expected a tree of tensors by name, such as {code}"
    elif isinstance(leaf, Mapping):  # not a dict, whose items would be leaves
        advice = (
            "; trees are made of dicts, tuples, lists and NamedTuples: convert it with dict(...)"
        )
    elif dataclasses.is_dataclass(leaf) or type(leaf) in torch_pytree.SUPPORTED_NODES:
        # It is a container of the user.
        advice = (
            "; trees are made of dicts, tuples, lists and NamedTuples: register its class with "
            "optree.register_pytree_node(..., namespace=muonfx.tree.NAMESPACE)"
        )
    subject = f"{tree_name}: {shown_name(name)}" if name else tree_name
    return TypeError(f"{subject} must be a tensor or None, found {type(leaf).__name__}{advice}")


def mixed_devices(error: Exception, **trees: PyTree) -> str | None:
    """Explain an error of torch about devices by two leaves on different ones; return None for any other error.

    Another error may come from a tree on two devices too: the state of `offload` is in host memory.

    >>> error = RuntimeError("Expected all tensors to be on the same device")
    >>> mixed_devices(
    ...     error, updates={"w": torch.zeros(2)}, state={"mu": torch.zeros(2, device="meta")}
    ... )
    "updates: 'w' is on cpu and state: 'mu' on meta, expected one device: move one of them with .to(device)"
    """
    # "Meta tensors", "register_meta", "on the same device"; not "device-side assertions", in other errors of CUDA
    if not re.search(r"\b(devices?(?!-side)|[Mm]eta|register_meta)\b", str(error)):
        return None
    name_on: dict[torch.device, str] = {}  # the name of the first leaf on each device
    for tree_name, values in trees.items():
        for name, leaf in tree.named_leaves(values):
            if isinstance(leaf, Tensor):
                name_on.setdefault(leaf.device, f"{tree_name}: {shown_name(name)}")
    if len(name_on) < 2:  # the error has another cause
        return None
    (device, name), (other_device, other_name), *_ = name_on.items()
    leaves = f"{name} is on {device} and {other_name} on {other_device}"
    return f"{leaves}, expected one device: move one of them with .to(device)"


INIT_RUNS_ON_META = "init also runs on meta parameters"
"""A text in the errors that `kept_at_init` explains."""


def kept_at_init(error: Exception, **trees: PyTree) -> str | None:
    """Explain an error of torch by a meta tensor that is no leaf of the trees; return None for any other error.

    To find the form of a state, `init` also runs on meta parameters. A tensor that it keeps outside of the state, for
    example in a variable of the constructor, is then one of these.

    >>> kept_at_init(
    ...     RuntimeError("Expected all tensors on one device, found cpu and meta"),
    ...     updates={"w": None},
    ... )
    'found a tensor on the device meta that is in no argument: init also runs on meta parameters, ...
    """
    if not re.search(r"\bmeta\b", str(error)):  # "metadata" is another word
        return None
    for leaf in tree.tensors(trees):
        if leaf.device.type == "meta":
            return None
    return (
        f"found a tensor on the device meta that is in no argument: {INIT_RUNS_ON_META}, so a tensor that it keeps "
        "outside of its result, as in a variable of the constructor, is one: return it in the state"
    )


def check_tree(tree_name: str, values: PyTree) -> None:
    """Raise TypeError unless each leaf of a tree is None or has a shape and a dtype, as all tensors have.

    >>> check_tree("params", nn.Linear(2, 2))
    Traceback (most recent call last):
    TypeError: params must be a tensor or None, found Linear; expected a tree of ... dict(model.named_parameters())
    """
    for name, leaf in tree.named_leaves(values):
        if leaf is not None and not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise _no_tensor(tree_name, name, leaf)


def check_floating(tree_name: str, values: PyTree) -> None:
    """Raise TypeError unless each leaf of a tree is None or a dense real floating-point tensor.

    >>> check_floating("updates", {"w": 1.0})
    Traceback (most recent call last):
    TypeError: updates: 'w' must be a tensor or None, found float
    """
    _check_leaves(tree_name, values, tree.leaves(values))


def check_params(params: PyTree) -> None:
    """Raise unless parameters are dense real floating-point tensors (or None) with different dotted names.

    >>> check_params({"table": torch.zeros(2, dtype=torch.int64)})
    Traceback (most recent call last):
    TypeError: params: 'table' must be dense and real floating point of 16 bits or more, found torch.int64, ...
    """
    check_floating("params", params)
    names = tree.names(params)
    if len(set(names)) == len(names):  # all names differ
        return
    # The name "a.b", for example, is repeated in {"a.b": ..., "a": {"b": ...}}.
    repeated = min(name for name in names if names.count(name) > 1)
    raise ValueError(
        f"params: found two leaves named {repeated!r}, expected different dotted names: rename one"
    )


def check_structure(tree_name: str, values: PyTree, expected_name: str, expected: PyTree) -> None:
    """Raise ValueError unless two trees have the same containers with the same keys.

    ``tree_name`` and ``expected_name`` name the two trees in the message.

    >>> check_structure("updates", {"w": 1}, "params", {"v": 1})
    Traceback (most recent call last):
    ValueError: updates must have the structure of params: missing 'v'; unexpected 'w'
    """
    if not tree.same_structure(values, expected):
        raise ValueError(
            f"{tree_name} must have the structure of {expected_name}: {difference(values, expected)}"
        )


LeafSpec = tuple[torch.Size, torch.dtype] | None
"""Shape and dtype of a leaf, or None for a leaf that is not a tensor."""

_shape_and_dtype: Callable[[Any], LeafSpec] = operator.attrgetter("shape", "dtype")


def specs_of(leaves: Sequence[Any]) -> list[LeafSpec]:
    """Return the shape and dtype of each leaf that is a tensor, else None.

    >>> specs_of([torch.zeros(2, 3), None])
    [(torch.Size([2, 3]), torch.float32), None]
    """
    # Fast, but it cannot be traced.
    if not torch.compiler.is_compiling() and PLAIN.issuperset(map(type, leaves)):
        return list(map(_shape_and_dtype, leaves))
    specs: list[LeafSpec] = []
    for leaf in leaves:
        spec = None
        if isinstance(leaf, Tensor):
            spec = (leaf.shape, leaf.dtype)
        specs.append(spec)
    return specs


def check_update(
    updates: PyTree, params: PyTree
) -> tuple[list[Any], tree.Structure, list[LeafSpec]]:
    """Check the updates of a step: raise unless they are floating point and fit the parameters by name and shape.

    Return the leaves, the tree structure, and the shape and dtype of each leaf of the parameters, which the caller
    needs to check the state. The check has read them anyway. If ``params`` is None, the updates are described instead.

    >>> check_update({"w": torch.zeros(2)}, {"w": torch.zeros(3)})
    Traceback (most recent call last):
    ValueError: updates: 'w' has shape (2,), its parameter has (3,)
    """
    update_leaves, update_treedef = tree.flatten(updates)
    _check_leaves("updates", updates, update_leaves)
    update_specs = specs_of(update_leaves)
    if params is None:
        return update_leaves, update_treedef, update_specs
    leaves, treedef = tree.flatten(params)
    specs = specs_of(leaves)
    # The usual case passes these two fast comparisons. If one fails, a slow check names the leaf in its error, or
    # accepts the difference, such as another dtype.
    if update_treedef != treedef:
        check_structure("updates", updates, "params", params)
    if update_specs != specs:
        _check_shapes(updates, update_leaves, leaves)
    return leaves, treedef, specs


def check_updates_fit(params: PyTree, updates: PyTree) -> None:
    """Raise ValueError unless updates have the structure and the shapes of the parameters.

    >>> check_updates_fit({"w": torch.zeros(3)}, {"w": torch.zeros(2)})
    Traceback (most recent call last):
    ValueError: updates: 'w' has shape (2,), its parameter has (3,)
    """
    check_structure("updates", updates, "params", params)
    _check_shapes(updates, tree.leaves(updates), tree.leaves(params))


def _check_shapes(
    updates: PyTree, update_leaves: Sequence[Any], param_leaves: Sequence[Any]
) -> None:
    """Raise unless each update has the shape of its parameter. An update of None fits any parameter.

    An update of shape (2,) for a parameter of shape (3,) raises, and so does an update for a parameter of None.
    """
    for index, (update, param) in enumerate(zip(update_leaves, param_leaves, strict=True)):
        # The usual cases. A leaf that does not fit is named in the error.
        if update is None or (param is not None and update.shape == param.shape):
            continue
        name = shown_name(tree.names(updates)[index])
        if param is None:
            raise ValueError(f"updates: {name} has an update but its parameter is None")
        raise ValueError(
            f"updates: {name} has shape {tuple(update.shape)}, its parameter has {tuple(param.shape)}"
        )


class ExpectedState(NamedTuple):
    """The structure that a state must have, and the shape and dtype of each leaf, for `check_state_like`."""

    whole: PyTree
    structure: tree.Structure
    specs: list[LeafSpec]

    @classmethod
    def of(cls, state: PyTree) -> ExpectedState:
        """Return the structure, shapes and dtypes of an example of a valid state, which may be on the meta device."""
        leaves, treedef = tree.flatten(state)
        return cls(state, treedef, specs_of(leaves))


def check_state_like(
    name: str, state: PyTree, expected: ExpectedState, *, with_dtypes: bool
) -> None:
    """Raise unless a transform's state has the expected structure, shapes and (``with_dtypes=True``) dtypes.

    >>> expected = ExpectedState.of({"trace": torch.zeros(2)})
    >>> check_state_like("momentum", {"trace": torch.zeros(3)}, expected, with_dtypes=True)
    Traceback (most recent call last):
    ValueError: state: 'trace' has shape (3,) and dtype torch.float32, expected (2,) and torch.float32; pass a ...
    """
    leaves, treedef = tree.flatten(state)
    if treedef != expected.structure:
        raise _wrong_structure(name, state, expected)
    specs = specs_of(leaves)
    if specs == expected.specs:  # the usual case, in one comparison
        return
    for index, (spec, expected_spec) in enumerate(zip(specs, expected.specs, strict=True)):
        # A spec is a pair (shape, dtype); None for a leaf that is no tensor, in place of which anything is accepted.
        if expected_spec is None or spec == expected_spec:
            continue
        leaf_name = shown_name(tree.names(state)[index])
        if spec is None:
            raise TypeError(
                f"state: {leaf_name} must be a tensor, found {type(leaves[index]).__name__}"
            )
        if with_dtypes or spec[0] != expected_spec[0]:  # [0] is the shape
            raise _wrong_leaf(leaf_name, spec, expected_spec)


def _wrong_leaf(
    leaf_name: str,
    spec: tuple[torch.Size, torch.dtype],
    expected_spec: tuple[torch.Size, torch.dtype],
) -> ValueError:
    """Return the error of a leaf of a state with another shape or dtype than expected.

    For example: "state: 'trace' has shape (3,) and dtype torch.float32, expected (2,) and torch.float32; pass ...".
    """
    shape, dtype = spec
    expected_shape, expected_dtype = expected_spec
    return ValueError(
        f"state: {leaf_name} has shape {tuple(shape)} and dtype {dtype}, expected {tuple(expected_shape)} and "
        f"{expected_dtype}; pass a state that was made by init(params) for these parameters and with these options"
    )


def _wrong_structure(name: str, state: PyTree, expected: ExpectedState) -> ValueError:
    """Return the error of a state with another structure than the transform ``name`` has for these parameters."""
    advice = "create it with init(params)"
    if type(state) is tuple and len(state) == 2:  # probably the whole result of `update`
        advice = "update returns a pair (updates, state): pass the second"
    return ValueError(
        f"state: it does not fit {name} for these parameters: {difference(state, expected.whole)}; expected the "
        f"state that init(params) or the last update returned for these parameters: {advice}"
    )


MANY_UPDATES = 10
"""The number of updates in one autograd graph from which the graph is taken for a mistake; inner loops are shorter."""

# Key in the metadata of an autograd node: the number of updates in the node's graph.
_UPDATES = "muonfx: updates"


def updates_in_graph(leaf: object) -> int:
    """Return how many calls of `apply_updates` the autograd graph of a tensor has recorded.

    It is 0 for a detached parameter. For parameters that are never detached, it is 1 after one step, then 2, 3, ...
    """
    if not isinstance(leaf, Tensor) or leaf.grad_fn is None:
        return 0
    grad_fn: Any = leaf.grad_fn  # torch's stubs call `metadata` a method
    return grad_fn.metadata.get(_UPDATES, 0)


def count_update_in_graph(params: Sequence[object], new_params: Sequence[object]) -> None:
    """Record in the autograd graph of new parameters that it has one update more than the old parameters' graph.

    So `warn_of_growing_graphs` can find that a graph grows from step to step, because parameters are never detached.
    Each step makes new tensors, and only their graph lasts. The count is therefore stored in it: in the metadata of the
    autograd node that computed the new parameter.

    >>> old = torch.ones(1, requires_grad=True)
    >>> new = 2 * old
    >>> count_update_in_graph([old], [new])
    >>> updates_in_graph(new)
    1
    """
    # There is no graph, or torch.func has its own.
    if not torch.is_grad_enabled() or functorch_is_active():
        return
    for param, new_param in zip(params, new_params, strict=True):
        if isinstance(new_param, Tensor) and new_param.grad_fn is not None:
            grad_fn: Any = new_param.grad_fn
            grad_fn.metadata[_UPDATES] = updates_in_graph(param) + 1


def warn_of_growing_graphs(
    caller: str,
    params: PyTree,
    leaves: Sequence[object],
    updates: PyTree,
    numbers: Sequence[Tensor] = (),
) -> None:
    """Warn if parameters were not detached, so that their autograd graph grows with every step.

    A graph is intended only if the user differentiates through the steps. So there is a warning in two cases: the
    updates have no graph, or the graph records its tenth update, which is more than such code needs.

    Args:
        caller: the name of the calling function in the warning: "update" or "apply_updates".
        params: the parameters.
        leaves: the leaves of ``params``, which the caller has already.
        updates: the updates of this step.
        numbers: the tensors among the transform's arguments. If one requires gradients, the user differentiates
            through the steps by it, and there is no warning.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     warn_of_growing_graphs("update", {"w": weight}, [weight], {})
    ...     warn_of_growing_graphs("update", {"w": 2 * weight}, [2 * weight], {})
    >>> [str(warning.message) for warning in caught]
    ["update: found parameters with an autograd graph of earlier steps, such as 'w', expected detached ..."]
    """
    if not torch.is_grad_enabled() or functorch_is_active():
        return
    index = _index_of_graph(leaves)
    if index is None or any(number.requires_grad for number in numbers):
        return
    # Updates have a graph if gradients were computed with `create_graph=True`.
    if not any(update.requires_grad for update in tree.tensors(updates)):
        reason = "because the gradients have no graph"
    # Reported once: not at the eleventh update, and not in "apply_updates", which follows in the same step.
    elif caller == "update" and updates_in_graph(leaves[index]) == MANY_UPDATES:
        reason = f"because one graph records the last {MANY_UPDATES} updates"
    else:  # the graph may be intended
        return
    name = tree.names(params)[index]
    warn_caller(
        f"{caller}: found parameters with an autograd graph of earlier steps, such as {name!r}, expected detached "
        f"parameters, {reason}. The graph grows with every step. Unless you differentiate through the optimizer, "
        "detach the parameters, {n: p.detach() for n, p in model.named_parameters()}, or step under torch.no_grad()"
    )


def _index_of_graph(leaves: Sequence[object]) -> int | None:
    """Return the index of the first leaf that autograd computed from other tensors."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            return index
    return None
