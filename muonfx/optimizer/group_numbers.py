"""Read and write the hyperparameters in a param group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx.core import Transform
from muonfx.core.checks import warn_caller
from muonfx.core.hyperparams import with_hyperparams
from muonfx.core.value import prepared
from muonfx.internal.arguments import advice_for_text, float_of, is_real_number

Number = float | Tensor
"""The value of one hyperparameter."""

Numbers = Mapping[str, Number]
"""Hyperparameters by dotted name, such as ``{"momentum.decay": 0.95}``."""

Group = dict[str, Any]
"""A param group of a torch optimizer: a dict with "params", hyperparameters, and entries that schedulers add."""


class Hyperparam(NamedTuple):
    """A key of a param group, such as "lr" or "betas", and the numbers of one transform that its value sets."""

    key: str
    """The key in the group, such as "betas"."""
    names: tuple[str, ...]
    """The dotted names of the numbers, as in `muonfx.hyperparams`: ("scale_by_adam.b1", "scale_by_adam.b2")."""
    is_tuple: bool = False
    """True if the value in the group is a tuple."""
    is_mirror: bool = False
    """True if other keys have the same numbers, as "momentum" repeats the first of "betas" for schedulers."""

    def numbers_in(self, value: Number | Sequence[Number]) -> Sequence[Number]:
        """Return the numbers in a value of this key, one for each of ``names``. Raise if the value has another form.

        >>> Hyperparam("lr", ("scale_by_learning_rate.learning_rate",)).numbers_in(0.1)
        (0.1,)
        >>> Hyperparam("betas", ("scale_by_adam.b1", "scale_by_adam.b2"), is_tuple=True).numbers_in(
        ...     (0.9, 0.95)
        ... )
        (0.9, 0.95)
        """
        is_sequence = isinstance(value, Sequence)
        values = value if is_sequence else (value,)
        # "betas" must be a pair, and "lr" a single number, not a tuple of one.
        if is_sequence != self.is_tuple or len(values) != len(self.names):
            expected = f"{len(self.names)} numbers" if self.is_tuple else "a number"
            raise ValueError(
                f"{self.key!r} in a group must be {expected}, found {value!r}{advice_for_text(value)}"
            )
        for number in values:
            if not is_real_number(number):
                raise TypeError(
                    f"{self.key!r} in a group must be a number or a tensor of one element, found {number!r}"
                    f"{advice_for_text(number)}"
                )
        return values

    def value_of(self, numbers: Numbers) -> Any:
        """Return the value for a param group, such as ``(0.9, 0.95)``, from numbers by dotted name."""
        values = tuple([numbers[name] for name in self.names])
        return values if self.is_tuple else values[0]


class GroupNumbers:
    """Reads and writes the hyperparameters of one param group.

    Two keys may set the same number: schedulers write "momentum", which repeats the first of "betas". The key that was
    changed last counts, and `read` writes its number into the other one.

    Args:
        hyperparams: the keys of the group, and the numbers that they set. A key that sets numbers of several
            transforms, such as a common "lr", is there once for each transform.
        former: the reader of the group so far, or None. Its last numbers count if the group has the same keys now.
    """

    def __init__(
        self, hyperparams: Sequence[Hyperparam], former: GroupNumbers | None = None
    ) -> None:
        """Create the reader of a group with these keys. Without a former reader, it has read nothing yet.

        >>> betas = Hyperparam("betas", ("adam.b1", "adam.b2"), is_tuple=True)
        >>> momentum = Hyperparam("momentum", ("adam.b1",), is_mirror=True)
        >>> numbers = GroupNumbers([betas, momentum])
        >>> numbers.keys, numbers.names
        (('betas', 'momentum'), ['adam.b1', 'adam.b2'])
        """
        self.hyperparams = tuple(hyperparams)
        self.keys = tuple(dict.fromkeys([hyperparam.key for hyperparam in hyperparams]))
        """The keys of the group that hold hyperparameters, such as ("lr", "betas", "momentum")."""
        self.mirrors = frozenset(
            [hyperparam.key for hyperparam in hyperparams if hyperparam.is_mirror]
        )
        """The keys that repeat numbers of other keys, such as "momentum"."""
        names_of_keys = [name for hyperparam in hyperparams for name in hyperparam.names]
        self._has_common_numbers = len(set(names_of_keys)) < len(names_of_keys)
        """True if two keys set one number, such as "betas" and "momentum"."""
        self.last_numbers: dict[str, Number] = {}
        """The numbers that the last `read` returned, by dotted name: ``{"scale_by_adam.b1": 0.9, ...}``."""
        self._last_entries: Group = {}
        """The group's hyperparameters after the last `read`, by key: ``{"lr": 0.1, "betas": (0.9, 0.95)}``."""
        self.requested_entries: Group = {}
        """Copies of the hyperparameters with which the user's code created the group, by key.

        The former reader has most of them. All other keys have their values at the first `read`.
        """
        if former is None:
            return
        for key in self.keys:
            if key in former.requested_entries:
                self.requested_entries[key] = former.requested_entries[key]
        if former.hyperparams == self.hyperparams:
            self.last_numbers = former.last_numbers
            self._last_entries = dict(former._last_entries)

    @property
    def names(self) -> list[str]:
        """The dotted names of the hyperparameters in the transform, such as "momentum.decay"."""
        names: list[str] = []
        for hyperparam in self.hyperparams:
            if not hyperparam.is_mirror:
                names += hyperparam.names
        return names

    def parse(self, values: Group) -> dict[str, Number]:
        """Return the hyperparameters in the entries of a group by dotted name.

        Two keys may set one number, as "momentum" and the first of "betas" do. If their values differ, use the value
        that has changed since the last `read`. Raise ValueError if both have changed.

        >>> betas = Hyperparam("betas", ("adam.b1", "adam.b2"), is_tuple=True)
        >>> momentum = Hyperparam("momentum", ("adam.b1",), is_mirror=True)
        >>> numbers, group = (
        ...     GroupNumbers([betas, momentum]),
        ...     {"betas": (0.9, 0.95), "momentum": 0.9},
        ... )
        >>> numbers.read(group)
        {'adam.b1': 0.9, 'adam.b2': 0.95}
        >>> numbers.parse({**group, "momentum": 0.8})  # a scheduler has written 0.8
        {'adam.b1': 0.8, 'adam.b2': 0.95}
        """
        numbers: dict[str, Number] = {}
        for hyperparam in self.hyperparams:  # a key, and the names of the numbers that it sets
            if hyperparam.key not in values:
                continue
            # For "betas": (0.9, 0.95), the pairs are ("scale_by_adam.b1", 0.9) and ("scale_by_adam.b2", 0.95).
            values_of_key = hyperparam.numbers_in(values[hyperparam.key])
            for name, number in zip(hyperparam.names, values_of_key, strict=True):
                if name not in numbers:
                    numbers[name] = number
                    continue
                # An earlier key sets the number, too, as "betas" before "momentum".
                first_number = numbers[name]
                if self._was_read(name, first_number):  # only this key may have changed
                    numbers[name] = number
                elif not self._was_read(name, number):  # both have changed
                    self._require_equal(name, first_number, number)
        return numbers

    def _require_equal(self, name: str, first: Number, second: Number) -> None:
        """Raise ValueError if two keys of a group set the number ``name`` to the different values given."""
        if equal(first, second):
            return
        # A checkpoint that stores each entry separately returns two copies of one tensor.
        if (
            isinstance(first, Tensor)
            and isinstance(second, Tensor)
            and first.tolist() == second.tolist()
        ):
            return
        keys = [repr(hyperparam.key) for hyperparam in self.hyperparams if name in hyperparam.names]
        raise ValueError(
            f"{' and '.join(keys)} in a group both set {name}, to {first!r} and {second!r}: set one of them"
        )

    def _was_read(self, name: str, number: Number) -> bool:
        """Return True if a hyperparameter had this value at the last `read`; False for all if nothing was read yet."""
        return name in self.last_numbers and equal(self.last_numbers[name], number)

    def complete(self, entries: Group, defaults: Numbers) -> dict[str, Number]:
        """Return a new group's hyperparameters by dotted name, from ``defaults`` if ``entries`` lacks them."""
        numbers = {name: defaults[name] for name in self.names}
        without_mirrors = {key: value for key, value in entries.items() if key not in self.mirrors}
        return numbers | self.parse(without_mirrors)

    def entries(self, numbers: Numbers) -> Group:
        """Return the entries of a param group, such as ``lr`` and ``betas``, for numbers given by dotted name."""
        entries: Group = {}
        for hyperparam in self.hyperparams:
            entries.setdefault(hyperparam.key, hyperparam.value_of(numbers))
        return entries

    def read(self, group: Group) -> dict[str, Number]:
        """Return a group's current hyperparameters by dotted name, and synchronize keys that hold the same number.

        For example, if a scheduler has set "momentum" to 0.8, ``"betas": (0.9, 0.95)`` becomes ``(0.8, 0.95)``. Raise
        ValueError, before any change, if the group lacks a hyperparameter.

        If no number has changed since the last call, return the same dict object, so that callers see it at once:

        >>> numbers, group = GroupNumbers([Hyperparam("lr", ("rate",))]), {"lr": 0.1}
        >>> last = numbers.read(group)
        >>> last, numbers.read(group) is last
        ({'rate': 0.1}, True)
        """
        if self._is_unchanged(group):  # in most steps
            return self.last_numbers
        # 1. Read and check the numbers.
        numbers = self.parse(group)
        self._require_complete(group, numbers)
        # 2. Write a number that was changed under one key under its other keys, too.
        if self._has_common_numbers:
            self._write_into_all_keys(group, numbers)
        # 3. Record the current entries, with which the next call compares, and the entries of the first call.
        for key in self.keys:
            self._last_entries[key] = group[key]
            if key not in self.requested_entries:
                self.requested_entries[key] = own_copies(group[key])
        # 4. Keep the former dict if all values are equal, as after ``group["lr"] = float("0.1")`` if it was 0.1.
        if not all(map(self._was_read, numbers.keys(), numbers.values())):
            self.last_numbers = numbers
        return self.last_numbers

    def _require_complete(self, group: Group, numbers: Numbers) -> None:
        """Raise ValueError if a group lacks a hyperparameter. ``numbers`` are those that it has, by dotted name."""
        for hyperparam in self.hyperparams:
            # This is no comparison of sets, because torch.compile with dynamic=True cannot trace one.
            missing = [name for name in hyperparam.names if name not in numbers]
            if missing:
                raise _missing(hyperparam.key, group, self._last_entries.get(hyperparam.key))

    def _write_into_all_keys(self, group: Group, numbers: Numbers) -> None:
        """Write the current ``numbers`` of a group into all of its keys that still have other values.

        >>> betas = Hyperparam("betas", ("adam.b1", "adam.b2"), is_tuple=True)
        >>> momentum = Hyperparam("momentum", ("adam.b1",), is_mirror=True)
        >>> group = {"betas": (0.9, 0.95), "momentum": 0.8}  # a scheduler has written 0.8
        >>> GroupNumbers([betas, momentum])._write_into_all_keys(
        ...     group, {"adam.b1": 0.8, "adam.b2": 0.95}
        ... )
        >>> group
        {'betas': (0.8, 0.95), 'momentum': 0.8}
        """
        for hyperparam in self.hyperparams:
            key = hyperparam.key
            current = [numbers[name] for name in hyperparam.names]
            # Entries that are right stay the same objects, which `_is_unchanged` compares at the next step.
            is_current = key in group and all(
                map(equal, hyperparam.numbers_in(group[key]), current)
            )
            if not is_current:
                group[key] = hyperparam.value_of(numbers)

    def _is_unchanged(self, group: Group) -> bool:
        """Return True if each hyperparameter in a group is the same object as after the last `read`, as in most steps.

        Then nothing needs to be read. ``group["lr"] = 0.2`` puts another object there, so that the result is False.
        """
        # torch.compile with dynamic=True cannot trace identities of tuples such as betas.
        if torch.compiler.is_compiling() or not self._last_entries:
            return False
        for key, value in self._last_entries.items():
            if group.get(key) is not value:
                return False
            if isinstance(value, list):  # the same list may have other numbers now
                return False
        return True


def _missing(key: str, group: Group, last: object) -> ValueError:
    """Return an error for a hyperparameter that a group lacks. ``last`` is its value in the last step, or None."""
    name = next(iter(group.get("param_names", ())), "no parameter")
    last_value = "" if last is None else f" (it was {last!r})"
    return ValueError(
        f"param_groups: the group of {name!r} (label {group.get('label')!r}) has no {key!r}, which its transforms "
        f"read: set it{last_value}"
    )


class TrackedGroup(NamedTuple):
    """A param group as it was when its state was created or last moved."""

    group: Group
    """The dict in ``optimizer.param_groups``."""
    names: list[str]
    """The names of its parameters."""
    numbers: GroupNumbers
    """The object that reads the hyperparameters of the group."""


def read_numbers(groups: Iterable[TrackedGroup]) -> list[dict[str, Number]]:
    """Return the current hyperparameters of each param group by dotted name, as `GroupNumbers.read` returns them."""
    return [tracked.numbers.read(tracked.group) for tracked in groups]


def own_copy(value: Any) -> Any:
    """Return a copy of a tensor, so that a scheduler that writes into it changes one group; return others unchanged."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def own_copies(value: Any) -> Any:
    """Return a hyperparameter, such as ``(0.9, 0.95)``, with a copy of each tensor."""
    if isinstance(value, tuple | list):
        return tuple([own_copy(number) for number in value])
    return own_copy(value)


def separate_tensors(groups: Sequence[TrackedGroup], callers_tensors: CallersTensors) -> None:
    """Give each param group its own copy of a tensor that several groups or hyperparameters have in common.

    For example, if "lr" is one tensor in two groups, a scheduler that writes into it for one group would change both.

    Args:
        groups: the param groups, whose numbers were just read. Their entries are replaced by the copies.
        callers_tensors: records the tensors that are replaced, because the caller may write into them later.
    """
    uses_of_tensor = _uses_of_tensors(groups)
    for tracked in groups:
        numbers = tracked.numbers.last_numbers
        # The tensors with another use, in this group or another one.
        common_tensors: dict[str, Tensor] = {}
        for name, number in numbers.items():
            if isinstance(number, Tensor) and uses_of_tensor[id(number)] > 1:
                common_tensors[name] = number
        if not common_tensors:
            continue
        # The first group gets copies, too, so that writing into a common tensor changes no group.
        callers_tensors.note(common_tensors)
        copies = {name: own_copy(tensor) for name, tensor in common_tensors.items()}
        tracked.group.update(tracked.numbers.entries({**numbers, **copies}))
        tracked.numbers.read(tracked.group)


def _uses_of_tensors(groups: Sequence[TrackedGroup]) -> Counter[int]:
    """Return how many hyperparameters of all groups have each tensor, by the id of the tensor.

    For example, the count is 2 for a tensor that is "lr" in two groups.
    """
    uses_of_tensor = Counter[int]()
    for tracked in groups:
        for key in tracked.numbers.keys:
            if key in tracked.numbers.mirrors:  # "momentum" of Adam repeats the first of "betas"
                continue
            for tensor in tensors_in(tracked.group[key]):
                uses_of_tensor[id(tensor)] += 1
    return uses_of_tensor


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in the value of a hyperparameter, which is a number or a tuple of numbers."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, tuple | list):  # a float
        return []
    return [number for number in value if isinstance(number, Tensor)]


def scalar(name: str, value: Any) -> Any:
    """Return a hyperparameter. A tensor of one element becomes a 0-d view, and a larger one raises ValueError.

    >>> scalar("lr", torch.tensor([0.5]))
    tensor(0.5000)
    """
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(
            f"{name} must be a number or a tensor of one element, found shape {tuple(value.shape)}"
        )
    return value.reshape(()) if value.ndim else value


def fitted(defaults: Numbers, numbers: Numbers) -> dict[str, Number]:
    """Convert numbers that a user has put into a param group to the types that a transform accepts.

    For example, ``numpy.float32(0.5)`` becomes the float 0.5, and a tensor of shape (1,) becomes a view without dims.
    A view, because a scheduler may write into the tensor in the group. Raise ValueError if a shape does not fit.

    Args:
        defaults: the transform's own numbers by dotted name, such as ``{"momentum.decay": 0.95}``.
        numbers: the numbers in the group, by the same names.
    """
    fitted_numbers: dict[str, Number] = {}
    for name, number in numbers.items():
        default = defaults[name]
        if isinstance(number, Tensor):
            fitted_numbers[name] = _fitted_tensor(name, number, default)
        elif type(number) is float:
            fitted_numbers[name] = number
        else:  # an int, or a number of NumPy, such as numpy.float32
            fitted_numbers[name] = float_of(name, number)
    return fitted_numbers


def _fitted_tensor(name: str, tensor: Tensor, default: Number) -> Tensor:
    """Return a tensor of a param group, as a view with the shape that the transform's number ``default`` has.

    For example, a tensor of shape (1,) becomes a view without dims if ``default`` is a float.
    """
    if not isinstance(default, Tensor) or not default.ndim:
        return scalar(name, tensor)  # the group may have a tensor of shape (1,)
    # The transform has a tensor with dims for this number, such as the table of rates of a schedule.
    if tensor.shape != default.shape:
        raise ValueError(
            f"{name} must be a number or a tensor of shape {tuple(default.shape)}, found {tuple(tensor.shape)}"
        )
    return tensor


def with_python_numbers(value: Any) -> Any:
    """Return an entry of a group with numbers of Python in place of numpy's, which most files cannot hold.

    For example, a script sets ``group["lr"] = schedule[step]``, where ``schedule`` is an array of numpy.

    >>> import numpy
    >>> with_python_numbers((numpy.float64(0.5), 0.75, "name"))
    (0.5, 0.75, 'name')
    """
    if type(value) in (tuple, list):
        return type(value)(map(with_python_numbers, value))
    # numpy's float64 is a subclass of float, and must be converted
    is_plain = type(value) in (bool, int, float)
    if is_plain or not isinstance(value, Real):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value)


def require_in_range(
    tx: Transform, hyperparams: Iterable[Hyperparam], numbers: Numbers, defaults: Numbers
) -> None:
    """Raise ValueError with the key of a number in a param group that is out of range, such as a negative "lr".

    A transform rejects such a number with the name of its own argument. To find the key, each number is put into it
    alone if it rejects the numbers together.

    >>> lr = Hyperparam("lr", ("learning_rate",))
    >>> tx = mfx.scale_by_learning_rate(0.1)
    >>> require_in_range(tx, [lr], {"learning_rate": -1.0}, {"learning_rate": 0.1})
    Traceback (most recent call last):
    ValueError: 'lr' in a group must be at least 0, found -1.0

    Args:
        tx: the transform that reads the numbers.
        hyperparams: the keys of the group, each with the dotted names of its numbers.
        numbers: the numbers of the group by dotted name. It may lack some.
        defaults: the numbers with which ``tx`` was constructed.
    """
    message_of_all = _message_of_transform(tx, numbers, defaults)
    if message_of_all is None:  # the usual case
        return
    for hyperparam in hyperparams:
        for index, name in enumerate(hyperparam.names):
            if name not in numbers:
                continue
            message = _message_of_transform(tx, {name: numbers[name]}, defaults)
            if message is not None:
                # The key of a number in a tuple is "betas[1]", for example.
                key = f"{hyperparam.key}[{index}]" if hyperparam.is_tuple else hyperparam.key
                raise ValueError(_refusal(key, name, message)) from None  # also within a handler
    # Each number alone is right, so that none is the cause.
    raise ValueError(f"numbers in a group: {message_of_all}") from None


def _message_of_transform(tx: Transform, numbers: Numbers, defaults: Numbers) -> str | None:
    """Return the message with which a transform rejects numbers, such as a negative rate; None if it accepts them."""
    try:
        prepared(with_hyperparams(tx, fitted(defaults, numbers)))
    except ValueError as error:
        return str(error)
    return None


def _refusal(key: str, name: str, message: str) -> str:
    """Return the message of a transform about the number ``name``, with the key of the group instead of the argument.

    >>> _refusal(
    ...     "lr",
    ...     "scale_by_learning_rate.learning_rate",
    ...     "learning_rate must be at least 0, found -1.0",
    ... )
    "'lr' in a group must be at least 0, found -1.0"
    """
    argument = name.rpartition(".")[2]  # "learning_rate", with which messages of transforms begin
    for subject in (argument, name):
        if message.startswith(f"{subject} "):
            return f"{key!r} in a group{message.removeprefix(subject)}"
    return f"{key!r} in a group: {message}"


def equal(a: object, b: object) -> bool:
    """Return True if two numbers are equal, or if both are one tensor object. Tensor values are not compared."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


class _CallersTensor(NamedTuple):
    name: str
    tensor: Tensor
    version: int
    """The version of the tensor when the groups copied it: writing into it increases the version."""


class CallersTensors:
    """Warns if the caller writes into a tensor that was given as a hyperparameter, which has no effect."""

    def __init__(self) -> None:
        self._tensors: list[_CallersTensor] = []

    def note(self, numbers: Mapping[str, Any]) -> None:
        """Record the tensors among hyperparameters, which are numbers or tuples of numbers."""
        for name, value in numbers.items():
            for tensor in tensors_in(value):
                if not tensor.is_inference():  # inference tensors have no version
                    self._tensors.append(_CallersTensor(name, tensor, tensor._version))

    def warn_of_written(self) -> None:
        """Warn once if the caller has written into one of the tensors, as in ``rate.fill_(0.1)``.

        This has no effect, because each param group has a copy of the tensor.
        """
        for name, tensor, version in self._tensors:
            if tensor._version != version:  # torch increases it with every write
                self._tensors = []  # so that no later step warns again
                warn_caller(
                    f"the tensor that was given for {name!r} was changed in place, which has no effect: each param "
                    "group has a copy of it; write into the tensors in param_groups"
                )
                return
