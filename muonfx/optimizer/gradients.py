"""Check before a step that the gradients belong to the parameters of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from muonfx.core.checks import all_usable, is_usable, warn_caller
from muonfx.optimizer import errors
from muonfx.optimizer.following import FollowedParameters, check_real


class GradientCheck:
    """Raises or warns if gradients are missing, but parameters of a model that are not in the optimizer have some.

    Args:
        parameters: the parameters of the optimizer, and the models that contain them.
        is_alone: True in one process, where no other rank has the gradients that are missing here.
    """

    def __init__(self, parameters: FollowedParameters, *, is_alone: bool) -> None:
        _count_registrations()  # from now on, `_registrations.count` changes if a model gets a new parameter
        self._parameters = parameters
        self._is_alone = is_alone
        self._outside: dict[str, Tensor] = {}
        """The models' parameters that are not in the optimizer, by name, as the last search has found them."""
        self._searched: object = None
        """What the last search depended on; if it is the same in a step, `_outside` is still right."""
        self._reported: dict[str, Tensor] = {}
        """Those of `_outside` that had gradients, and that a warning has reported."""
        self._has_warned_of_none = False
        """True after the warning that no parameter has a gradient."""

    def check(self, named: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> None:
        """Raise or warn if gradients are missing. ``named`` are the parameters, and ``gradients`` theirs."""
        check_real(named)
        self._parameters.check_frozen()
        absent = tuple([name for name, gradient in gradients.items() if gradient is None])
        self._search_outside(named, absent)
        elsewhere = {name: param for name, param in self._outside.items() if param.grad is not None}
        has_none = len(absent) == len(gradients)
        if has_none and elsewhere:
            name, param = next(iter(elsewhere.items()))
            raise errors.gradients_elsewhere(name, param, len(named))
        self._warn_of_others(elsewhere)
        if has_none:
            self._warn_of_none(named)

    def _search_outside(self, named: Mapping[str, Tensor], absent: tuple[str, ...]) -> None:
        """Find the models' parameters that are not in the optimizer. ``absent`` are names without a gradient."""
        depends_on = (absent, self._parameters.version, _registrations.count)
        if depends_on != self._searched:  # a search walks through the models, which takes time
            self._searched = depends_on
            self._outside = self._parameters.outside(named)

    def _warn_of_others(self, elsewhere: dict[str, Tensor]) -> None:
        """Warn once of each of the parameters that have a gradient and are not in the optimizer."""
        unreported = [name for name, param in elsewhere.items() if self._reported.get(name) is not param]
        self._reported.update(elsewhere)
        if unreported:
            warn_caller(
                f"{len(elsewhere)} parameters of the model have gradients and are not in the optimizer, such as "
                f"{unreported[0]!r}; they are not updated: {errors.CAUSES}, or use add_param_group"
            )

    def _warn_of_none(self, named: Mapping[str, Tensor]) -> None:
        """Warn once, in one process, that no parameter has a gradient."""
        is_trained = any(param.requires_grad for param in named.values())
        if self._has_warned_of_none or not self._is_alone or not is_trained:
            return
        self._has_warned_of_none = True
        warn_caller(
            f"step() found no gradient on any of {len(named)} parameters and changes nothing: is backward() called "
            f"before it, on these parameters? If so: {errors.CAUSES}"
        )


def require_dense_and_real(gradients: Mapping[str, Tensor | None]) -> None:
    """Raise TypeError if a gradient is sparse or complex."""
    if all_usable(gradients.values()):
        return
    for name, grad in gradients.items():
        if grad is not None and not is_usable(grad):
            raise _not_dense_and_real(name, grad)


def _not_dense_and_real(name: str, grad: Tensor) -> TypeError:
    """Return the error for a gradient that is sparse or complex."""
    advice = ""
    if grad.layout is not torch.strided:
        advice = ": use Embedding(sparse=False), or give the parameter the label None and torch.optim.SparseAdam"
    return TypeError(f"the gradient of {name!r} must be dense and real, found {grad.layout}, {grad.dtype}{advice}")


class _Registrations:
    """Counts how often a parameter or a module was assigned to a module, of any model."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


_registrations = _Registrations()


@cache
def _count_registrations() -> None:
    register_module_parameter_registration_hook(_registrations)
    register_module_module_registration_hook(_registrations)
