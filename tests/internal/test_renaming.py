"""Renamings of the leaves of checkpoints that only add or remove a prefix."""

import pytest

from muonfx.internal.renaming import prefix_renaming

SHORT = ["mu/0.weight", "mu/slow/1.weight"]  # sorted as text, the prefix would reverse the order
LONG = ["mu/zoo.0.weight", "mu/slow/zoo.1.weight"]


@pytest.mark.parametrize(
    ("extra", "missing", "renaming"),
    [
        (SHORT, LONG, {"mu/*": "mu/zoo.*", "mu/slow/*": "mu/slow/zoo.*"}),
        (LONG, SHORT, {"mu/zoo.*": "mu/*", "mu/slow/zoo.*": "mu/slow/*"}),
        (["mu/w", "mu/v"], ["mu/a.w", "mu/b.v"], {}),
        (["mu/w"], ["nu/a.w"], {}),
        (["mu/w"], ["mu/a.w", "mu/a.v"], {}),
    ],
)
def test_one_prefix_is_found_for_leaves_of_any_path(
    extra: list[str], missing: list[str], renaming: dict[str, str]
):
    assert prefix_renaming(extra, missing) == renaming
