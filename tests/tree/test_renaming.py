"""New names for old: what an entry means, which of several counts, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muonfx.tree.renaming import new_names

NAMES = ["mu/a.w", "mu/a.b", "mu/b.w", "nu/a.w", "count"]


def renamed(rename, names=NAMES, **more):
    found, wrong = new_names({name: name for name in names}, rename, **more)
    return list(found.values()), wrong


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"count": "steps"}, ["mu/a.w", "mu/a.b", "mu/b.w", "nu/a.w", "steps"]),
        ({"mu": "first"}, ["first/a.w", "first/a.b", "first/b.w", "nu/a.w", "count"]),
        ({"mu/": "x/mu/"}, ["x/mu/a.w", "x/mu/a.b", "x/mu/b.w", "nu/a.w", "count"]),
        ({"*/a.*": "*/c.*"}, ["mu/c.w", "mu/c.b", "mu/b.w", "nu/c.w", "count"]),
        ({"mu/a*": "a*"}, ["a.w", "a.b", "mu/b.w", "nu/a.w", "count"]),
        ({"mu": "first", "mu/a.w": "here"}, ["here", "first/a.b", "first/b.w", "nu/a.w", "count"]),
        ({"*": "x*", "mu/*": "y/*"}, ["y/a.w", "y/a.b", "y/b.w", "xnu/a.w", "xcount"]),
        ({}, NAMES),
    ],
)
def test_entries_mean_names_levels_and_patterns_and_the_most_exact_counts(rename, expected):
    assert renamed(rename) == (expected, [])


def test_levels_of_parameters_end_with_a_dot():
    assert renamed({"enc": "model.enc"}, ["enc.w", "encoder.w"], level=".") == (["model.enc.w", "encoder.w"], [])


@pytest.mark.parametrize(
    ("rename", "problem"),
    [
        ({"mi": "first"}, "there is no leaf 'mi'"),
        ({"m": "first"}, "there is no leaf 'm'"),
        ({"*/c.*": "*/d.*"}, "there is no leaf '*/c.*'"),
        ({"*/a.*": "*/d"}, "must have the same number"),
        ({"mu": "*"}, "must have the same number"),
        ({"count": "steps", "coun*": "x*"}, "'coun*', or more exact entries rename it"),
    ],
)
def test_an_entry_that_does_nothing_or_makes_no_sense_is_told(rename, problem):
    _, wrong = renamed(rename)
    assert len(wrong) == 1
    assert problem in wrong[0]


@pytest.mark.parametrize("rename", [{"mu": 1}, {1: "mu"}, lambda name: None])
def test_what_is_no_name_is_refused(rename):
    with pytest.raises(TypeError, match="rename"):
        renamed(rename)


@given(st.lists(st.text("ab./", min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
def test_a_star_for_a_star_changes_nothing(names):
    assert renamed({"*": "*"}, names) == (names, [])
    assert renamed({"*": "x/*"}, names) == ([f"x/{name}" for name in names], [])
