"""Names of parameters without wrappers: one name for a parameter, however its model is wrapped."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muonfx.tree.wrappers import WRAPPERS, unwrapped

COMPONENTS = st.sampled_from(["up", "module", "weight", "0", "modules", "_orig_model"])
MODELS = st.lists(st.lists(COMPONENTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=5, unique=True)


@given(MODELS, st.lists(st.sampled_from(["module", *sorted(WRAPPERS)]), max_size=4))
@example(["module.a", "b"], ["module"])
@example(["module"], ["module"])
def test_no_wrapper_around_a_model_changes_its_names(names, wrappers):
    wrapped = [".".join([*wrappers, name]) for name in names]
    assert list(unwrapped(wrapped).values()) == list(unwrapped(names).values())


@given(MODELS, st.data())
def test_no_wrapper_within_a_model_changes_its_names(names, data):
    def some(name: str) -> str:
        parts = name.split(".")
        place = data.draw(st.integers(0, len(parts)))
        return ".".join([*parts[:place], data.draw(st.sampled_from(sorted(WRAPPERS))), *parts[place:]])

    wrapped = [some(name) for name in names]
    assert list(unwrapped(wrapped).values()) == list(unwrapped(names).values())


@given(MODELS)
def test_names_without_wrappers_stay_and_stay_apart(names):
    plain = unwrapped(names)
    assert len(set(plain.values())) == len(names)
    assert unwrapped(plain.values()) == {name: name for name in plain.values()}
    if not all(name.startswith("module.") for name in names):
        assert plain == {name: name for name in names}


@pytest.mark.parametrize("name", ["_orig_mod", "module", "module."])
def test_a_name_of_nothing_else_stays(name: str):
    assert unwrapped([name]) == {name: name}
