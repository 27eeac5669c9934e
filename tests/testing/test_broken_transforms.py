"""The laws catch what they are for: each deliberate bug is reported under the right name, with a small example."""

from collections import OrderedDict, deque

import hypothesis
import pytest
import torch

import muonfx as mfx
from muonfx import testing as kit
from tests.testing import broken

CAUGHT_BY = {
    "update_leaves_its_inputs_unchanged": "writes_to_its_gradients writes_to_its_state",
    "update_remembers_nothing": "keeps_hidden_python_state draws_hidden_randomness",
    "updates_look_like_the_gradients": "narrows_float64 takes_the_dtype_of_the_first_leaf",
    "state_keeps_its_structure_and_dtypes": "narrows_its_float64_state lets_its_state_drift counts_in_python",
    "outputs_share_no_storage_with_inputs": (
        "returns_its_state_as_updates keeps_the_parameters_themselves breaks_its_donation_promise"
    ),
    "init_returns_a_state_that_needs_no_grad": "keeps_the_parameters_themselves keeps_the_graph_of_parameters",
    "absent_leaves_are_left_alone": "forgets_absent_gradients decays_the_state_of_absent_gradients",
    "vmap_over_gradients_equals_a_loop": "branches_on_values",
    "compiled_update_equals_eager": "branches_on_values",
    "element_transforms_see_one_element": "is_not_elementwise",
    "matrix_transforms_see_one_matrix": "is_not_matrixwise",
    "leaf_transforms_see_one_leaf": "is_not_leafwise knows_how_many_leaves_there_are",
    "tree_transforms_see_sums_over_leaves": "takes_sums_only_where_it_has_leaves sums_norms_instead_of_squares",
    "next_in_chain_may_write_to_updates": "breaks_its_donation_promise",
    "donation_keeps_to_what_is_donated": "donates_more_than_it_was_given",
    "donation_changes_no_value": "computes_differently_when_donated",
    "derivatives_by_gradients_are_right": "cuts_the_graph",
    "derivatives_by_hyperparameters_are_right": "cuts_the_graph_of_its_number",
    "init_on_meta_gives_the_same_spec": "allocates_state_in_memory",
    "updates_do_not_overlap": "shares_one_buffer_between_updates",
    "pickle_gives_an_equal_transform": "a_closure",
    # false declarations
    "params_are_not_read_where_declared_so": "reads_parameters_that_it_disowns reads_parameters_at_init",
    "element_transforms_see_no_shape": "looks_at_the_number_of_dims resolves_to_something_else resolves_by_values",
    "large_leaves_are_as_small_ones": (
        "is_not_elementwise_where_leaves_are_large is_not_leafwise_where_leaves_are_large"
    ),
    "order_of_dicts_means_nothing": "depends_on_the_order_of_a_dict",
    "rounding_first_changes_nothing": "says_that_it_rounds rounds_its_input_only",
    "stacks_are_as_their_matrices": "calls_its_rows_matrices",
    "resolving_changes_nothing": "resolves_to_something_else resolves_by_values",
    "own_work_is_of_its_own_locality": "normalizes_around hands_on_leaves_of_its_own",
}
"""The broken transforms that each law finds."""

WRAPPERS = {"normalizes_around", "hands_on_leaves_of_its_own"}
PAIRS = [(bug, law) for law, bugs in CAUGHT_BY.items() for bug in bugs.split()]


def made(bug: str) -> mfx.Transform:
    return getattr(broken, bug)(*[mfx.scale(0.5)] * (bug in WRAPPERS))


def first_broken_law(tx: mfx.Transform, **settings) -> kit.LawViolation:
    with pytest.raises(kit.LawViolation) as caught:
        kit.check_transform(tx, **settings)
    return caught.value


# Compiling what breaks the graph takes seconds.
COMPILED = "compiled_update_equals_eager"


@pytest.mark.parametrize(
    ("bug", "law"), [pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] == COMPILED else []) for pair in PAIRS]
)
def test_a_bug_is_caught_by_each_law_that_forbids_it(bug: str, law: str):
    tx = made(bug)
    violation = first_broken_law(tx, laws=[law], max_examples=25)
    for part in (law, repr(tx), violation.found, "on the example", "params"):
        assert part in str(violation)


@pytest.mark.slow
@pytest.mark.parametrize("bug", dict(PAIRS))
def test_a_bug_is_caught_by_its_own_law_first(bug: str):
    assert (bug, first_broken_law(made(bug), max_examples=25).law) in PAIRS


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["narrows_float64", "takes_the_dtype_of_the_first_leaf", "narrows_its_float64_state"])
def test_a_narrow_dtype_is_found_in_every_run(bug: str):
    for seed in range(3):
        violation = first_broken_law(made(bug), laws=[dict(PAIRS)[bug]], max_examples=5, seed=seed)
        assert "it was narrowed" in str(violation)


def test_the_example_is_shrunk_to_plain_scalars():
    violation = first_broken_law(broken.writes_to_its_gradients(), laws=["update_leaves_its_inputs_unchanged"])
    params, steps = violation.example
    assert len(steps) == 1
    leaves = list(mfx.tree.tensors(params))
    assert len(leaves) <= 2
    assert all((leaf.shape, leaf.dtype) == ((), torch.float32) for leaf in leaves)
    assert violation.leaf.startswith("gradients ")
    assert "float32 ()" in str(violation)


def test_laws_can_be_chosen_and_skipped_by_name_or_function():
    law = kit.laws.update_remembers_nothing
    report = kit.check_transform(
        mfx.identity(), laws=[law, "identity_is_neutral"], skip=["identity_is_neutral"], max_examples=3
    )
    assert list(report.held) == ["update_remembers_nothing"]
    assert report.left_out == {"identity_is_neutral": "skipped"}
    assert "update_remembers_nothing (" in str(report)


def test_an_unknown_law_is_an_error_that_lists_those_known():
    with pytest.raises(ValueError, match=r"found 'purity', expected names of laws: absent_leaves"):
        kit.check_transform(mfx.identity(), laws=["purity"])


def test_every_law_is_public_and_documented():
    assert set(kit.laws.__all__) == set(kit.LAWS)
    assert all(getattr(kit.laws, name).__doc__ for name in kit.laws.__all__)


def test_a_transform_for_matrices_is_given_matrices():
    for example in drawn(kit.suitable_params(mfx.orthogonalize())):
        assert all(leaf is None or leaf.ndim >= 2 for leaf in mfx.tree.leaves(example.params))


def test_a_transform_for_trees_of_its_own_needs_a_strategy():
    tx = mfx.partition({"a": mfx.identity()}, {"weight": "a"})
    with pytest.raises(TypeError, match="give check_transform a strategy of examples"):
        kit.check_transform(tx)

    def named(example: kit.Example) -> kit.Example:
        return kit.Example({"weight": example.params}, [{"weight": grads} for grads in example.steps])

    of_one_leaf = kit.params_and_grads(nones=False).map(
        lambda example: named(kit.Example(torch.ones(2), [torch.ones(2) for _ in example.steps]))
    )
    assert kit.check_transform(tx, laws=["update_remembers_nothing"], params=of_one_leaf, max_examples=2).held


def drawn(strategy, number: int = 25):
    found = []

    @hypothesis.settings(max_examples=number)
    @hypothesis.given(strategy)
    def draw(example):
        found.append(example)

    draw()
    return found


def test_drawn_trees_have_every_kind_of_leaf_and_node():
    examples = drawn(kit.params_and_grads(), 300)
    leaves = [leaf for example in examples for leaf in mfx.tree.leaves(example.params)]
    tensors = [leaf for leaf in leaves if leaf is not None]
    assert None in leaves
    assert {leaf.ndim for leaf in tensors} == {0, 1, 2, 3, 4}
    assert {leaf.dtype for leaf in tensors} == set(kit.DTYPES)
    assert any(leaf.numel() == 0 for leaf in tensors)
    assert any(not leaf.is_contiguous() for leaf in tensors)
    assert any(leaf.storage_offset() for leaf in tensors)
    assert {type(example.params) for example in examples} == {dict, list, tuple, kit.Pair, OrderedDict, deque}
    gradients = [leaf for example in examples for grads in example.steps for leaf in mfx.tree.leaves(grads)]
    assert gradients.count(None) > leaves.count(None)
    for example in examples:
        for grads in example.steps:
            assert mfx.tree.flatten(grads)[1] == mfx.tree.flatten(example.params)[1]


def test_a_factory_that_was_not_called_is_reported():
    with pytest.raises(TypeError, match=r"expected a Transform: call a factory to get one, as in scale_by_sign\(\)"):
        kit.check_transform(mfx.scale_by_sign)  # pyright: ignore[reportArgumentType]
