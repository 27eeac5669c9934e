"""Values that are no tensors, such as the entries of a param group, as JSON: exact, and without pickle.

JSON has no tuples, no infinite numbers and only strings as keys. Such a value is written as an object with one member,
whose key begins with ``~``: the tuple ``(0.9, 0.95)`` is ``{"~tuple": [0.9, 0.95]}``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from muonfx.tree.dtypes import DTYPES, NAMES


def to_json(value: Any, name: str) -> Any:
    """Return a value as JSON, from which `from_json` returns an equal value of the same type.

    Args:
        value: None, a bool, int, float, str or bytes, a 0-d tensor that is not complex, or a list, tuple, dict or
            Counter of such values.
        name: the name of the value, for an error. Names of inner values are below it: "scheduler/base_lrs/0".

    Raises:
        TypeError: the value, or one in it, is of another type; the message has its name.

    >>> to_json({"lr": 0.1, "betas": (0.9, 0.95), "best": math.inf}, "group")
    {'lr': 0.1, 'betas': {'~tuple': [0.9, 0.95]}, 'best': {'~float': 'inf'}}
    """
    value_type = type(value)  # exactly: an instance of a subclass would be loaded as one of its base class
    # JSON has these types itself. All others get a tag, the key of an object with one member.
    if value is None or value_type in (bool, int, str):
        return value
    if value_type is float:  # JSON has no infinity and no NaN
        return value if math.isfinite(value) else {"~float": repr(value)}
    if value_type is bytes:
        return {"~bytes": base64.b64encode(value).decode()}
    if value_type in (list, tuple):
        items = [to_json(item, f"{name}/{index}") for index, item in enumerate(value)]
        return items if value_type is list else {"~tuple": items}
    if value_type in (dict, OrderedDict, Counter):
        return _dict_to_json(value, name)
    if isinstance(value, Tensor) and value.ndim == 0 and value.dtype in NAMES and not value.dtype.is_complex:
        return {"~tensor": [NAMES[value.dtype], to_json(value.item(), name)]}
    raise TypeError(
        f"{name!r} is a {value_type.__module__}.{value_type.__qualname__}, expected a tensor, or a value that JSON can "
        "hold (None, bool, int, float, str, bytes, a 0-d tensor, or a list, tuple or dict of these): a checkpoint has "
        "no pickle. Convert it, for example by float() or tolist(), or leave it out"
    )


def _dict_to_json(values: dict[Any, Any], name: str) -> dict[str, Any]:
    """Return a dict as JSON: as an object, or as a list of its items if some keys are no strings or begin with ``~``.

    >>> _dict_to_json({"gamma": 0.5}, "state"), _dict_to_json({30: 0.5}, "state")
    ({'gamma': 0.5}, {'~dict': [[30, 0.5]]})
    """
    json_of_key = {key: to_json(value, f"{name}/{key}") for key, value in values.items()}
    # JSON would turn the key 30 into "30". A list of pairs keeps the type of each key.
    if type(values) is not Counter and all(map(_is_plain_key, values)):
        return json_of_key
    tag = "~counter" if type(values) is Counter else "~dict"
    return {tag: [[to_json(key, f"{name}/{key}"), value] for key, value in json_of_key.items()]}


def _is_plain_key(key: object) -> bool:
    """Return whether a key can be the key of an object in JSON: a string that is not taken for a tag."""
    return type(key) is str and not key.startswith("~")


def from_json(written: Any) -> Any:
    """Return the value that `to_json` has written; raise ValueError for JSON that it does not write.

    >>> from_json({"~tuple": [1, {"~float": "-inf"}]})
    (1, -inf)
    """
    if isinstance(written, list):
        return [from_json(item) for item in written]
    if not isinstance(written, dict):
        return written
    if not any(key.startswith("~") for key in written):  # an ordinary dict, without a tag
        return {key: from_json(value) for key, value in written.items()}
    ((tag, content),) = written.items()  # one member, such as {"~tuple": [1, 2]}; ValueError for more
    if tag not in _DECODERS:
        raise ValueError(f"{tag!r} is not a kind of value in a checkpoint")
    return _DECODERS[tag](from_json(content))


def _counter(items: list[Any]) -> Counter[Any]:
    """Return a Counter with the counts of a list of pairs, such as ``[[30, 2]]``."""
    return Counter(dict(items))


def _tensor(content: list[Any]) -> Tensor:
    """Return a 0-d tensor from the name of its dtype and its value; raise ValueError if the dtype cannot hold it."""
    dtype_name, number = content
    try:
        return torch.tensor(number, dtype=DTYPES[dtype_name])
    except RuntimeError as error:
        raise ValueError(f"{number!r:.80} is no {dtype_name}: {error}") from error


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "~float": float,
    "~bytes": partial(base64.b64decode, validate=True),
    "~tuple": tuple,
    "~dict": dict,
    "~counter": _counter,
    "~tensor": _tensor,
}
"""By tag: the function that makes a value of the content, in which inner values are restored already."""
