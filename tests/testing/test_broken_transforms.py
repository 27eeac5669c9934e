"""The laws catch what they are for: each deliberate bug is reported under the right name, with a small example."""

import importlib.util
import sys
from collections import OrderedDict, deque
from pathlib import Path

import hypothesis
import pytest
import torch

import muonfx as mfx
from muonfx import testing as kit


def _load(name: str):
    """A neighbour of this file: tests are collected without being a package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


broken = _load("broken")

CAUGHT_BY = [
    (broken.writes_to_its_gradients(), {"update_leaves_its_inputs_unchanged"}),
    (broken.writes_to_its_state(), {"update_leaves_its_inputs_unchanged"}),
    (broken.keeps_hidden_python_state(), {"update_remembers_nothing"}),
    (broken.draws_hidden_randomness(), {"update_remembers_nothing"}),
    (broken.returns_another_dtype(), {"updates_look_like_the_gradients"}),
    (broken.narrows_float64(), {"updates_look_like_the_gradients"}),
    (broken.takes_the_dtype_of_the_first_leaf(), {"updates_look_like_the_gradients"}),
    (broken.narrows_its_float64_state(), {"state_keeps_its_structure_and_dtypes"}),
    (broken.lets_its_state_drift(), {"state_keeps_its_structure_and_dtypes"}),
    (broken.returns_its_state_as_updates(), {"outputs_share_no_storage_with_inputs"}),
    (
        broken.keeps_the_parameters_themselves(),
        {"init_returns_a_state_that_needs_no_grad", "outputs_share_no_storage_with_inputs"},
    ),
    (broken.forgets_absent_gradients(), {"absent_leaves_are_left_alone"}),
    (broken.decays_the_state_of_absent_gradients(), {"absent_leaves_are_left_alone"}),
    (broken.branches_on_values(), {"vmap_over_gradients_equals_a_loop", "compiled_update_equals_eager"}),
    (broken.is_not_elementwise(), {"element_transforms_see_one_element"}),
    (broken.is_not_matrixwise(), {"matrix_transforms_see_one_matrix"}),
    (broken.is_not_leafwise(), {"leaf_transforms_see_one_leaf"}),
    (broken.takes_sums_only_where_it_has_leaves(), {"tree_transforms_see_sums_over_leaves"}),
    (
        broken.breaks_its_donation_promise(),
        {"outputs_share_no_storage_with_inputs", "next_in_chain_may_write_to_updates"},
    ),
    (broken.donates_more_than_it_was_given(), {"donation_keeps_to_what_is_donated"}),
    (broken.computes_differently_when_donated(), {"donation_changes_no_value"}),
    (broken.cuts_the_graph(), {"derivatives_by_gradients_are_right"}),
    (broken.cuts_the_graph_of_its_number(), {"derivatives_by_hyperparameters_are_right"}),
    (broken.allocates_state_in_memory(), {"init_on_meta_gives_the_same_spec"}),
    (broken.keeps_the_graph_of_parameters(), {"init_returns_a_state_that_needs_no_grad"}),
    (broken.counts_in_python(), {"state_keeps_its_structure_and_dtypes"}),
    (broken.shares_one_buffer_between_updates(), {"updates_do_not_overlap"}),
    (broken.a_closure(), {"pickle_gives_an_equal_transform"}),
    # false declarations
    (broken.reads_parameters_that_it_disowns(), {"params_are_not_read_where_declared_so"}),
    (broken.reads_parameters_at_init(), {"params_are_not_read_where_declared_so"}),
    (broken.looks_at_the_number_of_dims(), {"element_transforms_see_no_shape"}),
    (broken.is_not_elementwise_where_leaves_are_large(), {"large_leaves_are_as_small_ones"}),
    (broken.is_not_leafwise_where_leaves_are_large(), {"large_leaves_are_as_small_ones"}),
    (broken.depends_on_the_order_of_a_dict(), {"order_of_dicts_means_nothing"}),
    (broken.knows_how_many_leaves_there_are(), {"leaf_transforms_see_one_leaf"}),
    (broken.says_that_it_rounds(), {"rounding_first_changes_nothing"}),
    (broken.rounds_its_input_only(), {"rounding_first_changes_nothing"}),
    (broken.calls_its_rows_matrices(), {"stacks_are_as_their_matrices"}),
    (broken.resolves_to_something_else(), {"resolving_changes_nothing", "element_transforms_see_no_shape"}),
    (broken.resolves_by_values(), {"resolving_changes_nothing", "element_transforms_see_no_shape"}),
    (broken.normalizes_around(mfx.scale(0.5)), {"own_work_is_of_its_own_locality"}),
    (broken.hands_on_leaves_of_its_own(mfx.scale(0.5)), {"own_work_is_of_its_own_locality"}),
    (broken.sums_norms_instead_of_squares(), {"tree_transforms_see_sums_over_leaves"}),
]


def first_broken_law(tx: mfx.Transform, **settings) -> kit.LawViolation:
    with pytest.raises(kit.LawViolation) as caught:
        kit.check_transform(tx, **settings)
    return caught.value


BUGS = pytest.mark.parametrize(("tx", "laws"), [pytest.param(*row, id=row[0].name) for row in CAUGHT_BY])


@BUGS
def test_a_bug_is_caught_by_each_law_that_forbids_it(tx: mfx.Transform, laws: set[str]):
    for law in laws:
        violation = first_broken_law(tx, laws=[law], max_examples=25)
        for part in (law, repr(tx), violation.found, "on the example", "params"):
            assert part in str(violation)


@pytest.mark.slow
@BUGS
def test_a_bug_is_caught_by_its_own_law_first(tx: mfx.Transform, laws: set[str]):
    assert first_broken_law(tx, max_examples=25).law in laws


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "law"),
    [
        pytest.param(broken.narrows_float64(), "updates_look_like_the_gradients", id="update"),
        pytest.param(broken.takes_the_dtype_of_the_first_leaf(), "updates_look_like_the_gradients", id="first leaf"),
        pytest.param(broken.narrows_its_float64_state(), "state_keeps_its_structure_and_dtypes", id="state"),
    ],
)
def test_a_narrow_dtype_is_found_in_every_run(tx: mfx.Transform, law: str):
    for seed in range(3):
        violation = first_broken_law(tx, laws=[law], max_examples=5, seed=seed)
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


def test_a_seed_fixes_the_examples():
    found = [first_broken_law(broken.is_not_elementwise(), seed=7) for _ in range(2)]
    assert str(found[0]) == str(found[1])


def test_what_does_not_apply_is_said():
    found = kit.laws_for(mfx.clip_by_global_norm(1.0))
    assert list(found) == list(kit.LAWS)
    assert found["element_transforms_see_one_element"] == "its locality is TREE"
    assert found["tree_transforms_see_sums_over_leaves"] is None
    assert kit.laws_for(mfx.identity())["vmap_over_the_transform_equals_a_loop"] == "it has no numeric arguments"


def test_laws_can_be_chosen_and_skipped_by_name_or_function():
    law = kit.laws.update_remembers_nothing
    report = kit.check_transform(
        mfx.identity(), laws=[law, "identity_is_neutral"], skip=["identity_is_neutral"], max_examples=3
    )
    assert list(report.held) == ["update_remembers_nothing"]
    assert report.left_out == {"identity_is_neutral": "skipped"}
    assert "update_remembers_nothing (" in str(report)


def test_an_unknown_law_is_an_error_that_lists_those_known():
    with pytest.raises(ValueError, match=r"no law is called 'purity'; there are absent_leaves"):
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
    assert kit.check_transform(tx, params=of_one_leaf, max_examples=2).held


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
