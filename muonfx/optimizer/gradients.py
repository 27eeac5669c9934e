"""Check before a step that the gradients belong to the parameters of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from muonfx.core.checks import warn_caller
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
        self._last: object = None
        """At the last step: ``(names without a gradient, version of the parameters, count of registrations)``.

        If a step has another tuple, the parameters outside the optimizer may be others, so the models are searched.
        """
        self._outside: dict[str, Tensor] = {}
        """The models' parameters that are not in the optimizer, by name."""
        self._reported: dict[str, Tensor] = {}
        """Those of them that had gradients at the last search, and that a warning has named."""
        self._has_warned_of_none = False
        """True after the warning that no parameter has a gradient."""

    def check(self, named: Mapping[str, Tensor], gradients: Mapping[str, Tensor | None]) -> None:
        """Raise or warn if gradients are missing. ``named`` are the parameters, and ``gradients`` theirs."""
        if self._parameters.on_meta:
            check_real(named)
        self._parameters.check_frozen()
        absent: tuple[str, ...] = ()
        if type(None) in set(map(type, gradients.values())):  # faster than a loop, in the usual step without None
            absent = tuple([name for name, gradient in gradients.items() if gradient is None])
        current = (absent, self._parameters.version, _registrations.count)
        has_changed = current != self._last
        if has_changed:  # walking through a model takes time
            self._last = current
            self._outside = self._parameters.outside(named)
        elif not self._outside:
            return  # as at the last step, and all parameters of the models are in the optimizer
        elsewhere = {name: param for name, param in self._outside.items() if param.grad is not None}
        unreported = [name for name, param in elsewhere.items() if self._reported.get(name) is not param]
        if not has_changed and not unreported:
            return
        has_none = len(absent) == len(gradients)
        if has_none and elsewhere:
            self._last = None  # check again at the next step
            name, param = next(iter(elsewhere.items()))
            raise errors.gradients_elsewhere(name, param, len(named))
        self._reported = elsewhere
        if unreported:
            warn_caller(
                f"{len(elsewhere)} parameters of the model have gradients and are not in the optimizer, such as "
                f"{unreported[0]!r}; they are not updated: {errors.CAUSES}, or use add_param_group"
            )
        if has_none:
            self._warn_of_none(named)

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
