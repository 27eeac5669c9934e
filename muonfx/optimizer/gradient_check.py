"""Raise or warn of gradients with which a step would not train the model: missing, sparse or complex ones."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from muonfx.core.checks import all_usable, is_frozen, is_usable, warn_caller
from muonfx.optimizer.named_parameters import Gradients, NamedTensors
from muonfx.optimizer.tracked_parameters import CAUSES, FSDP1, TrackedParameters, check_real


class GradientCheck:
    """Raises or warns if gradients are missing, but parameters of a model that are not in the optimizer have some.

    Args:
        parameters: the parameters of the optimizer, and the models that contain them.
        is_alone: True in one process, where no other rank has the gradients that are missing here.
    """

    def __init__(self, parameters: TrackedParameters, *, is_alone: bool) -> None:
        """Prepare the check. The first call of `check` searches the models."""
        self._parameters = parameters
        self._is_alone = is_alone
        self._outside = _OutsideParameters(parameters)
        self._reported: dict[str, Tensor] = {}
        """The parameters outside of the optimizer that a warning has reported, by name."""
        self._has_warned_of_none = False
        """True after the warning that no parameter has a gradient."""

    def check(self, named: NamedTensors, gradients: Gradients) -> None:
        """Raise or warn, before a step, if gradients are missing, because the step would not train the model.

        - An error if only parameters outside of the optimizer have gradients. Usually, the model got new parameters
          after the optimizer was created.
        - A warning if such parameters have gradients, too, or if no parameter has one.

        ``named`` are the parameters of the optimizer, and ``gradients`` the gradient of each, or None.
        """
        check_real(named)
        self._parameters.check_frozen()
        without_gradient = tuple([name for name, gradient in gradients.items() if gradient is None])
        outside = self._outside.find(named, without_gradient)  # parameters of the models, not of the optimizer
        outside_with_gradient = {name: param for name, param in outside.items() if param.grad is not None}
        has_no_gradient = len(without_gradient) == len(gradients)  # no parameter of the optimizer has one
        if has_no_gradient and outside_with_gradient:
            raise _only_outside(outside_with_gradient, len(named))
        self._warn_of_outside(outside_with_gradient)
        if has_no_gradient and self._is_alone:  # over ranks, the step finds out whether another rank has one
            self.warn_of_none(named)

    def _warn_of_outside(self, with_gradient: NamedTensors) -> None:
        """Warn of parameters that have a gradient and are not in the optimizer, once for each of them."""
        # Without parameters of earlier warnings. A name is reported again if the model has another tensor for it now.
        unreported = [name for name, param in with_gradient.items() if self._reported.get(name) is not param]
        self._reported.update(with_gradient)
        if unreported:
            warn_caller(
                f"{len(with_gradient)} parameters of the model have gradients and are not in the optimizer, such as "
                f"{unreported[0]!r}; they are not updated: {CAUSES}, or use add_param_group"
            )

    def warn_of_none(self, named: NamedTensors) -> None:
        """Warn once that no parameter has a gradient, so that a step changes no parameter.

        The usual causes are a forgotten backward(), and a loss of detached tensors. Over ranks, the caller has found
        that no rank has a gradient.
        """
        are_all_frozen = all(is_frozen(param) for param in named.values())
        if self._has_warned_of_none or are_all_frozen:  # frozen parameters need no gradient
            return
        self._has_warned_of_none = True
        parameters = f"{len(named)} parameters"
        cause_over_ranks = ""
        if not self._is_alone:  # there are several ranks
            parameters += " on any rank"
            cause_over_ranks = "Was model.set_requires_gradient_sync(False) left on? "
        warn_caller(
            f"step() found no gradient on any of {parameters} and changes none of them: is backward() called before "
            f"it, on these parameters? {cause_over_ranks}Tensors of state_dict() and detach() get no gradient. Else: "
            f"{CAUSES}"
        )


class _OutsideParameters:
    """Finds the parameters of the models that are not in the optimizer.

    A search walks through all modules, which takes time at every step. So it is repeated only if the models may have
    got a new parameter since the last search.

    Args:
        parameters: the parameters of the optimizer, and the models that contain them.
    """

    def __init__(self, parameters: TrackedParameters) -> None:
        """Begin without a result: the first call of `find` searches the models."""
        _count_registrations()  # lets torch count, from now on, each parameter that a model gets
        self._parameters = parameters
        self._result: NamedTensors = {}
        """The parameters that the last search has found, by name."""
        self._lengths: list[tuple[weakref.ref[nn.Module], int]] = []
        """The lists of modules that the last search has found in the models, with their lengths."""
        self._last_changes: object = None
        """The signs of a change, as `find` compares them, at this search; None before the first one."""

    def find(self, named: NamedTensors, without_gradient: tuple[str, ...]) -> NamedTensors:
        """Return, by name, the parameters of the models that are not in the optimizer.

        Args:
            named: the parameters of the optimizer.
            without_gradient: the names of those that have no gradient. A parameter that was replaced in a model has
                none, so other names are a reason for a new search.
        """
        assignments = _registrations["assigned"]  # how many parameters and modules were assigned to any module
        changes = (without_gradient, self._parameters.version, assignments)
        if changes != self._last_changes or self._has_other_length():
            self._result = self._parameters.outside(named)
            self._lengths = _lengths_of_lists(self._parameters.models)
            self._last_changes = changes
        return self._result

    def _has_other_length(self) -> bool:
        """Return True if a list was deleted or has another length: `ModuleList.insert` makes no assignment to count."""
        for ref, length in self._lengths:
            module = ref()
            if module is None or len(module._modules) != length:
                return True
        return False


def _lengths_of_lists(models: Iterable[nn.Module]) -> list[tuple[weakref.ref[nn.Module], int]]:
    """Return a weak reference to each ``ModuleList`` and ``Sequential`` of the models, with its number of modules."""
    lengths: list[tuple[weakref.ref[nn.Module], int]] = []
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                lengths.append((weakref.ref(module), len(module._modules)))
    return lengths


def _only_outside(outside_with_gradient: NamedTensors, number: int) -> ValueError:
    """Return an error for a step in which only parameters outside of the optimizer have gradients.

    ``number`` is how many parameters the optimizer has.
    """
    name, param = next(iter(outside_with_gradient.items()))
    cause = FSDP1 if getattr(param, "_is_flat_param", False) else CAUSES
    return ValueError(
        f"none of the {number} parameters has a gradient, but {name!r} of the model has one and is not "
        f"among them: {cause}"
    )


def require_dense_and_real(gradients: Gradients) -> None:
    """Raise TypeError if a gradient is sparse or complex: transforms accept neither.

    For example, ``Embedding(sparse=True)`` has sparse gradients.
    """
    if all_usable(gradients.values()):  # one pass without names, as at almost every step
        return
    # At least one is not usable: find its name for the message.
    for name, grad in gradients.items():
        if grad is not None and not is_usable(grad):
            raise TypeError(
                f"the gradient of {name!r} must be dense and real, found {grad.layout}, {grad.dtype}: use "
                "Embedding(sparse=False), or give the parameter the label None and another optimizer, such as "
                "torch.optim.SparseAdam"
            )


_registrations = Counter[str]()
"""How often a parameter or a module was assigned to a module, of any model, under the key "assigned"."""


def _count_registration(*_: object) -> None:
    if torch.compiler.is_compiling():  # a graph that reads the count would be compiled again whenever it changes
        return
    _registrations["assigned"] += 1


@cache
def _count_registrations() -> None:
    """Let `_registrations` count from now on, in all models of this process."""
    register_module_parameter_registration_hook(_count_registration)
    register_module_module_registration_hook(_count_registration)
