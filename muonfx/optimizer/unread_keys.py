"""Warnings of keys in param groups that no transform reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from muonfx.core.checks import warn_caller
from muonfx.optimizer.group_numbers import Group
from muonfx.optimizer.update_rules import UpdateRule, group_hyperparams

NOT_HYPERPARAMS = {"params", "label", "param_names", "lr", "initial_lr"}
"""The keys that a group may have even if they are not hyperparameters of its transforms."""


_SYNONYMS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "beta": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "b1": "betas",
    "b2": "betas",
    "epsilon": "eps",
}
"""The names of torch's keys in other libraries."""


_SIMILAR = 0.85
"""From this ratio of `difflib` on, a key is a misspelling: "weight_dacay" has 0.92, "max_momentum" 0.8."""


def meant(key: str, known: Iterable[str]) -> str | None:
    """Return the hyperparameter that a key of a group is probably meant to be, or None if it is a key of the user's.

    >>> meant("weight_dacay", ["lr", "weight_decay"]), meant("lr_scale", ["lr", "weight_decay"])
    ('weight_decay', None)
    """
    # The last component, because "eps_root" is written for "scale_by_adam.eps_root".
    full_names = {name.rpartition(".")[2]: name for name in known}
    plain = key.lower().replace("-", "_")
    plain = _SYNONYMS.get(plain, plain)
    if plain in full_names:
        return full_names[plain]
    close = difflib.get_close_matches(plain, full_names, n=1, cutoff=_SIMILAR)
    return full_names[close[0]] if close else None


_OF_OTHERS = frozenset({"use_muon", "ns_steps", "nesterov", "maximize", "amsgrad", "dampening", "adjust_lr_fn"})
"""Keys of other optimizers that change their updates, and not ours."""


def unread_key_warning(key: str, value: Any, name: str, group_keys: Set[str], all_keys: Set[str]) -> str | None:
    """Return a warning if a key of a group looks like a hyperparameter and sets none, else None.

    ``name`` is a parameter of the group. ``group_keys`` are the hyperparameters of the group, and ``all_keys`` those
    of all groups.
    """
    if key in group_keys or key in NOT_HYPERPARAMS:
        return None
    start = f"param_groups: {key!r} in the group of {name!r} is kept, but"
    intended_key = meant(key, group_keys) or meant(key, all_keys)
    if intended_key is None:
        if key not in _OF_OTHERS or not value:
            return None
        return (
            f"{start} has no effect: the labels choose the transform of a parameter, and the arguments of the "
            "transform choose its update"
        )
    advice = f"did you mean {intended_key!r}?"
    if intended_key not in group_keys:
        advice = f"the group has {', '.join(sorted(group_keys)) or 'none'}"
    return f"{start} it is no hyperparameter of the group: {advice}"


def warn_of_unread_keys(entries: Group, name: str, distinct: Sequence[UpdateRule], rules: Mapping[str, UpdateRule]) -> None:
    """Warn of keys of a new group that look like hyperparameters and set none.

    ``name`` is a parameter of the group, and ``distinct`` are the rules of all of its parameters.
    """
    if not entries:
        return
    group_keys = {hyperparam.key for hyperparam in group_hyperparams(distinct, entries)}
    group_keys = group_keys.union(*map(read_keys, distinct))
    all_keys = set[str]().union(*map(read_keys, set(rules.values())))
    for key, value in entries.items():
        message = unread_key_warning(key, value, name, group_keys, all_keys)
        if message is not None:
            warn_caller(message)


def read_keys(rule: UpdateRule) -> set[str]:
    """Return the keys of a new group from which a rule takes its numbers."""
    return {hyperparam.key for hyperparam in rule.hyperparams if not hyperparam.is_mirror}
