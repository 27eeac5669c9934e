"""The laws catch what they are for: each deliberate bug is reported under the right name, with a small example."""

import io
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import testing as kit
from muonfx.internal import progress
from muonfx.testing import check
from tests.testing import broken

CAUGHT_BY = {
    "update_leaves_its_inputs_unchanged": (
        "writes_to_its_gradients writes_to_its_state writes_to_tall_matrices_only "
        "writes_to_the_data_of_bfloat16_parameters writes_to_its_gradients_at_the_second_step"
    ),
    "update_remembers_nothing": "keeps_hidden_python_state draws_hidden_randomness changes_after_many_calls",
    "updates_look_like_the_gradients": (
        "narrows_float64 takes_the_dtype_of_the_first_leaf promotes_updates_of_bfloat16 flattens_empty_leaves "
        "gives_updates_the_dtype_of_parameters"
    ),
    "state_keeps_its_structure_and_dtypes": "narrows_its_float64_state lets_its_state_drift counts_in_python",
    "outputs_share_no_storage_with_inputs": (
        "returns_its_state_as_updates keeps_the_parameters_themselves breaks_its_donation_promise"
    ),
    "init_returns_a_state_that_needs_no_grad": (
        "keeps_the_parameters_themselves keeps_the_graph_of_parameters keeps_a_parameter_in_its_state"
    ),
    "absent_leaves_are_left_alone": (
        "forgets_absent_gradients decays_the_state_of_absent_gradients treats_absent_gradients_as_zeros "
        "decays_the_state_of_absent_gradients_beside_a_count"
    ),
    "vmap_over_gradients_equals_a_loop": "branches_on_values",
    "vmap_over_the_transform_equals_a_loop": "passes_its_number_to_lerp",
    "compiled_update_equals_eager": "branches_on_values",
    "element_transforms_see_one_element": (
        "is_not_elementwise is_elementwise_for_three_steps is_not_elementwise_in_bfloat16 "
        "looks_at_the_number_of_dims resolves_to_something_else resolves_by_values"
    ),
    "matrix_transforms_see_one_matrix": "is_not_matrixwise is_not_matrixwise_unless_square",
    "leaf_transforms_see_one_leaf": (
        "is_not_leafwise knows_how_many_leaves_there_are is_not_leafwise_for_scalars"
    ),
    "tree_transforms_see_sums_over_leaves": "takes_sums_only_where_it_has_leaves sums_norms_instead_of_squares",
    "next_in_chain_may_write_to_updates": "breaks_its_donation_promise",
    "donation_changes_no_value": "computes_differently_when_donated donates_more_than_it_was_given",
    "derivatives_by_gradients_are_right": "cuts_the_graph keeps_the_graph_of_its_first_gradients",
    "derivatives_by_hyperparameters_are_right": "cuts_the_graph_of_its_number",
    "init_on_meta_gives_the_same_spec": "allocates_state_in_memory",
    "updates_do_not_overlap": "shares_one_buffer_between_updates",
    "pickle_gives_an_equal_transform": "a_closure",
    # false declarations
    "params_are_not_read_where_declared_so": "reads_parameters_that_it_disowns reads_parameters_at_init",
    "large_leaves_are_as_small_ones": (
        "is_not_elementwise_where_leaves_are_large is_not_leafwise_where_leaves_are_large"
    ),
    "order_of_dicts_means_nothing": (
        "depends_on_the_order_of_a_dict pairs_parameters_by_position pairs_its_state_by_position"
    ),
    "rounding_first_changes_nothing": "says_that_it_rounds rounds_its_input_only",
    "stacks_are_as_their_matrices": "calls_its_rows_matrices",
    "resolving_changes_nothing": "resolves_to_something_else resolves_by_values",
    "own_work_is_of_its_own_locality": "normalizes_around hands_on_leaves_of_its_own",
    # ambient modes
    "modes_of_torch_change_nothing": (
        "starts_in_the_default_dtype counts_on_the_default_device scales_only_where_grad_is_enabled "
        "looks_at_inference_mode computes_constants_in_the_default_dtype reads_memory_that_it_never_wrote"
    ),
    "seeds_clocks_and_hashes_change_nothing": (
        "reads_the_clock starts_from_the_seed_of_the_process differs_between_threads scales_by_the_hash_of_a_name"
    ),
    "settings_stay_as_they_were": "seeds_the_generator_of_torch silences_warnings",
    "another_process_gives_the_same_bits": (
        "keeps_the_first_norm_of_each_shape keeps_the_first_power_of_each_shape takes_names_in_the_order_of_a_set"
    ),
    # representation
    "strides_change_nothing": (
        "reads_in_the_order_of_memory branches_on_contiguity looks_at_the_storage_offset "
        "pairs_gradient_and_state_by_memory"
    ),
    "requires_grad_changes_no_value": (
        "looks_whether_parameters_require_grad treats_parameters_of_a_module_in_another_way "
        "reads_the_gradients_of_parameters"
    ),
    "one_tensor_may_be_two_leaves": "drops_a_tensor_that_it_has_seen",
    "leaves_of_the_state_share_no_storage": "has_two_moments_in_one_tensor shares_one_count_between_leaves",
    # numbers
    "a_nonfinite_gradient_changes_no_other_leaf": (
        "spreads_nan_over_the_leaf spreads_nan_over_a_stack spreads_nan_over_the_tree"
    ),
    "a_nonfinite_gradient_stays_visible": (
        "hides_nan hides_infinity hides_nan_in_a_comparison gives_zeros_after_nan"
    ),
    "zero_gradients_give_finite_updates": "divides_zero_by_zero",
    "large_and_small_gradients_give_finite_updates": "loses_small_gradients overflows_in_fourth_powers",
    "narrow_gradients_are_computed_in_wider_dtypes": "squares_in_half_precision rounds_single_precision_to_half",
    "counts_hold_ten_million_steps": "counts_in_half_precision counts_in_bfloat16 counts_in_eight_bits",
    "a_leaf_has_the_same_bits_in_any_company": "depends_on_the_number_of_equal_shapes scales_by_the_place_of_a_leaf",
    "derivatives_by_parameters_are_right": "cuts_the_graph_of_parameters",
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
    ("bug", "law"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] == COMPILED else [])
        for pair in PAIRS
    ],
)
def test_a_bug_is_caught_by_each_law_that_forbids_it(
    bug: str, law: str, monkeypatch: pytest.MonkeyPatch
):
    # To shrink the example takes much longer than to find it, and has its own test.
    monkeypatch.setattr(check, "_shrunk", lambda *arguments: None)
    tx = made(bug)
    violation = first_broken_law(tx, laws=[law], max_examples=25)
    for part in (law, repr(tx), violation.found, "on the example", "params"):
        assert part in str(violation)


SEEN_EARLIER = [
    # These break a second law, which is checked before their own.
    ("shares_one_count_between_leaves", "modes_of_torch_change_nothing"),
    ("rounds_single_precision_to_half", "large_and_small_gradients_give_finite_updates"),
    ("pairs_gradient_and_state_by_memory", "absent_leaves_are_left_alone"),
    ("changes_after_many_calls", "pickle_gives_an_equal_transform"),
    ("is_not_elementwise", "strides_change_nothing"),
    ("is_elementwise_for_three_steps", "modes_of_torch_change_nothing"),
    ("computes_differently_when_donated", "one_tensor_may_be_two_leaves"),
    ("cuts_the_graph", "narrow_gradients_are_computed_in_wider_dtypes"),
    ("pairs_parameters_by_position", "element_transforms_see_one_element"),
    ("pairs_its_state_by_position", "init_on_meta_gives_the_same_spec"),
    ("starts_from_the_seed_of_the_process", "modes_of_torch_change_nothing"),
    ("seeds_the_generator_of_torch", "modes_of_torch_change_nothing"),
    ("keeps_the_graph_of_its_first_gradients", "requires_grad_changes_no_value"),
]


SEEN_BY_CHANCE = {"reads_memory_that_it_never_wrote"}
"""Such memory holds anything, so any law that compares two runs may be the first to find it."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in dict(PAIRS) if bug not in SEEN_BY_CHANCE])
def test_a_bug_is_caught_by_its_own_law_first(bug: str):
    assert (bug, first_broken_law(made(bug), max_examples=25).law) in [*PAIRS, *SEEN_EARLIER]


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug", ["narrows_float64", "takes_the_dtype_of_the_first_leaf", "narrows_its_float64_state"]
)
def test_a_narrow_dtype_is_found_in_every_run(bug: str):
    for seed in range(3):
        violation = first_broken_law(made(bug), laws=[dict(PAIRS)[bug]], max_examples=5, seed=seed)
        assert re.search(
            r"found torch\.b?float(16|32) .*, expected as .* torch\.float64 ", violation.found
        )


def test_the_example_is_shrunk_to_plain_scalars():
    violation = first_broken_law(
        broken.writes_to_its_gradients(), laws=["update_leaves_its_inputs_unchanged"]
    )
    params, steps = violation.example
    assert len(steps) == 1
    leaves = list(mfx.tree.tensors(params))
    assert len(leaves) <= 2
    assert all((leaf.shape, leaf.dtype) == ((), torch.float32) for leaf in leaves)
    assert violation.leaf.startswith("gradients.")
    assert "float32 ()" in str(violation)
    assert not hasattr(violation, "__notes__")  # hypothesis would show the same example again


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_violation_that_a_law_raises_itself_reaches_the_caller(share: float):
    @kit.law(share=share)
    def no_transform_is_named_identity(tx, params, steps):
        if tx.name == "identity":
            raise kit.LawViolation(
                "no_transform_is_named_identity", tx, None, "another name is expected"
            )

    try:
        violation = first_broken_law(
            mfx.identity(), laws=[no_transform_is_named_identity], max_examples=3
        )
    finally:
        del kit.LAWS["no_transform_is_named_identity"]
    assert "another name is expected" in str(violation)


def test_a_violation_can_be_pickled_also_if_its_transform_cannot():
    example = kit.Example.of({"w": (2,)})
    violation = kit.LawViolation(
        "a_law", mfx.stateless(lambda u, params: u), "w", "an error", example
    )
    assert str(pickle.loads(pickle.dumps(violation))) == str(violation)


def test_laws_can_be_chosen_and_skipped_by_name_or_function():
    law = kit.laws.update_remembers_nothing
    report = kit.check_transform(
        mfx.identity(),
        laws=[law, "identity_is_neutral"],
        skip=["identity_is_neutral"],
        max_examples=3,
    )
    assert list(report.held) == ["update_remembers_nothing"]
    assert report.left_out == {"identity_is_neutral": "skipped"}
    assert "update_remembers_nothing (" in str(report)


def test_one_error_has_every_law_that_does_not_hold():
    laws = [
        "updates_look_like_the_gradients",
        "identity_is_neutral",
        "element_transforms_see_one_element",
    ]
    tx = made("is_not_elementwise_in_bfloat16")
    with pytest.raises(kit.LawViolation):  # the first one alone
        kit.check_transform(tx, laws=laws, max_examples=25)

    promoting = mfx.chain(tx, made("promotes_updates_of_bfloat16"))
    with pytest.raises(kit.LawViolations) as caught:
        kit.check_transform(promoting, laws=laws, max_examples=25, stop_at_first=False)
    violations = caught.value.violations
    assert [violation.law for violation in violations] == [laws[0], laws[2]]
    assert str(caught.value).startswith(
        "2 laws do not hold:\nupdates_look_like_the_gradients does not hold for chain("
    )
    for violation in violations:
        assert str(violation) in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_report_is_returned_if_all_laws_hold():
    report = kit.check_transform(
        mfx.identity(), laws=["identity_is_neutral"], max_examples=3, stop_at_first=False
    )
    assert list(report.held) == ["identity_is_neutral"]


@pytest.mark.parametrize(
    "laws", [None, ["element_transforms_see_one_element"]], ids=["all", "none that applies"]
)
def test_a_check_on_no_example_is_an_error(laws: list[str] | None):
    with pytest.raises(ValueError, match="max_examples must be"):
        kit.check_transform(mfx.clip_by_global_norm(1.0), laws=laws, max_examples=0)


def test_an_unknown_law_is_an_error_that_lists_those_known():
    with pytest.raises(ValueError, match=r"found 'purity', expected names of laws: absent_leaves"):
        kit.check_transform(mfx.identity(), laws=["purity"])
    with pytest.raises(
        TypeError, match=r"skip: found 'purity', expected a list of laws: \['purity'\]"
    ):
        kit.check_transform(mfx.identity(), skip="purity")
    with pytest.raises(
        ValueError, match=r"found .*Law\(name='identity_is_neutral'.*expected names of laws"
    ):
        kit.check_transform(mfx.identity(), laws=[kit.LAWS["identity_is_neutral"]])  # pyright: ignore


def test_each_planted_mistake_has_a_law_that_must_find_it():
    planted = {name for name, value in vars(broken).items() if hasattr(value, "definition")}
    assert planted | {"a_closure"} == {bug for bug, _ in PAIRS}
    assert len(planted) >= 80


def test_the_law_that_is_checked_is_reported_while_it_runs():
    lines: list[str] = []
    laws = ["identity_is_neutral", "update_remembers_nothing"]
    kit.check_transform(mfx.identity(), laws=laws, max_examples=2, progress=lines.append)
    expected = [
        "identity: law 1 of 2, update_remembers_nothing",
        "identity: law 2 of 2, identity_is_neutral",
    ]
    assert lines == expected


def test_a_check_in_a_file_prints_a_line_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    seconds = iter(range(100))
    monkeypatch.setattr(
        progress.time, "monotonic", lambda: next(seconds) * progress.SECONDS_BETWEEN_LINES
    )
    kit.check_transform(mfx.identity(), laws=["identity_is_neutral"], max_examples=2)
    assert capsys.readouterr().err == "identity: law 1 of 1, identity_is_neutral\n"
    kit.check_transform(
        mfx.identity(), laws=["identity_is_neutral"], max_examples=2, progress=False
    )
    assert capsys.readouterr().err == ""


def test_a_check_on_a_terminal_replaces_one_line(monkeypatch: pytest.MonkeyPatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    kit.check_transform(mfx.identity(), laws=["identity_is_neutral"], max_examples=2)
    assert terminal.getvalue() == "\ridentity: law 1 of 1, identity_is_neutral\x1b[K\r\x1b[K"


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
        return kit.Example(
            {"weight": example.params}, [{"weight": grads} for grads in example.steps]
        )

    of_one_leaf = kit.params_and_grads(nones=False).map(
        lambda example: named(kit.Example(torch.ones(2), [torch.ones(2) for _ in example.steps]))
    )
    assert kit.check_transform(
        tx, laws=["update_remembers_nothing"], params=of_one_leaf, max_examples=2
    ).held


def test_a_transform_for_certain_names_is_given_an_example():
    tx = mfx.chain(
        mfx.clip_by_global_norm(1.0),
        mfx.partition({"a": mfx.scale_by_adam()}, {"layer.weight": "a"}),
    )
    with pytest.raises(TypeError, match=r"params=st\.just\(testing\.Example\.of\(\{'layer.weight'"):
        kit.check_transform(tx)
    example = kit.Example.of({"layer.weight": (4, 3)})
    report = kit.check_transform(
        tx, laws=["update_remembers_nothing"], params=st.just(example), max_examples=2
    )
    assert report.held


EACH_MATRIX = mfx.MatrixView()


def test_the_error_of_a_step_comes_first():
    @mfx.matrixwise
    def faulty(*, view: mfx.MatrixView = EACH_MATRIX):
        def step(u, s):
            return u @ u, s

        return mfx.core.EmptyState(), step

    with pytest.raises(TypeError, match=r"^faulty raised RuntimeError: Expected size") as caught:
        kit.check_transform(faulty())
    assert "give check_transform a strategy of examples" in str(caught.value)
    # Its traceback shows the line of the step.
    assert isinstance(caught.value.__cause__, RuntimeError)


OVERFLOWING = {
    "scale_by_rms": mfx.scale_by_rms(eps=1e-3, eps_in_sqrt=False),
    "scale_by_factored_rms": mfx.contrib.scale_by_factored_rms(),
    "normalize_neurons": mfx.normalize_neurons(),
}
"""Transforms with a mean square that is infinite, or the largest number, after a gradient of infinity."""


@pytest.mark.parametrize("grad_dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("param_dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("name", OVERFLOWING)
def test_infinity_may_act_as_a_number_whose_square_overflows(
    name: str, param_dtype: torch.dtype, grad_dtype: torch.dtype
):
    params, steps = kit.Example.of({"w": (3, 1)}, dtype=param_dtype)
    grads = [mfx.tree.map(lambda grad: grad.to(grad_dtype), steps[0]), *steps]
    kit.laws.a_nonfinite_gradient_stays_visible(OVERFLOWING[name], params, grads)


WHOLE = {
    "matrices": mfx.orthogonalize(dtype=torch.float32),
    "leaves": mfx.masked(mfx.contrib.normalize_leaves(), mfx.routing.ndim(min=2)),
}
"""Transforms that need whole matrices or leaves, which ranks never divide into halves."""


@pytest.mark.parametrize("name", WHOLE)
def test_sums_are_checked_beside_transforms_of_whole_matrices(name: str):
    example = kit.Example.of({"w": (4, 3), "k": (2, 3, 2)})
    law = kit.laws.tree_transforms_see_sums_over_leaves
    law(mfx.chain(mfx.clip_by_global_norm(0.1), WHOLE[name]), *example)
    wrong = broken.sums_norms_instead_of_squares()
    for tx in (mfx.chain(wrong, WHOLE[name]), mfx.chain(WHOLE[name], wrong)):
        with pytest.raises(kit.LawViolation, match="that hold a half of each leaf"):
            law(tx, *example)


def test_auto_is_narrow_only_for_products_of_matrices():
    law = "narrow_gradients_are_computed_in_wider_dtypes"
    for tx in (
        mfx.normalize_neurons(),
        mfx.accumulate(mfx.clip_by_global_norm(1.0), 2),
        WHOLE["matrices"],
    ):
        assert kit.laws_for(tx)[law] is None
    for tx in (mfx.orthogonalize(), mfx.contrib.scale_by_dion2(2)):
        assert kit.laws_for(tx)[law] == f'the dtype "auto" of {tx.name} may be narrow'


@mfx.matrixwise
def divides_by_the_norm_of_its_stack(*, view: mfx.MatrixView = EACH_MATRIX):
    def step(u, s):
        return u / u.norm(), s

    return mfx.core.EmptyState(), step


def test_a_step_that_mixes_matrices_is_named_with_the_difference():
    example = kit.Example.of({"v": (3, 4), "w": (3, 4)})
    with pytest.raises(
        kit.LawViolation, match=r"reduce over the last two dims only.*differ by up to \d"
    ):
        kit.laws.large_leaves_are_as_small_ones(divides_by_the_norm_of_its_stack(), *example)


def drawn(strategy, number: int = 25):
    found = []

    @hypothesis.settings(max_examples=number)
    @hypothesis.given(strategy)
    def draw(example):
        found.append(example)

    draw()
    return found


def test_a_local_function_that_cannot_be_pickled_is_reported_with_advice():
    violation = first_broken_law(
        broken.a_closure(), laws=["pickle_gives_an_equal_transform"], max_examples=2
    )
    assert "at the top level of a module" in violation.found


def test_a_transform_of_the_user_may_have_a_name_of_muonfx():
    @mfx.leafwise
    def momentum(decay: float = 0.9):
        def step(u, s):
            return decay * u, s

        return mfx.core.EmptyState(), step

    kit.laws.repr_evaluates_to_an_equal_transform(momentum(0.5), {}, [])


@pytest.mark.slow
def test_a_state_whose_strides_change_is_named_where_it_is_compiled_twice():
    @broken.of_traces()
    def transposes_its_trace(u, trace):
        return u, trace.mT.contiguous().mT if trace.ndim == 2 else trace

    params, steps = kit.Example.of({"w": (2, 3)}, steps=3)
    with pytest.raises(kit.LawViolation) as caught:
        kit.laws.compiled_update_equals_eager(transposes_its_trace(), params, steps)
    assert "'trace.w' has the strides (1, 2), expected (3, 1)" in caught.value.found


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
    assert {type(example.params) for example in examples} == {
        dict,
        list,
        tuple,
        kit.Pair,
        OrderedDict,
        deque,
    }
    # Whether the float32 gradients of bfloat16 parameters have values of bfloat16 only.
    widened = set()
    for example in examples:
        for grads in example.steps:
            for param, grad in zip(
                mfx.tree.leaves(example.params), mfx.tree.leaves(grads), strict=True
            ):
                if (
                    param is None
                    or grad is None
                    or param.dtype != torch.bfloat16
                    or grad.dtype != torch.float32
                ):
                    continue
                if grad.any():
                    widened.add(torch.equal(grad.bfloat16().float(), grad))
    assert widened == {False}
    gradients = [
        leaf for example in examples for grads in example.steps for leaf in mfx.tree.leaves(grads)
    ]
    assert gradients.count(None) > leaves.count(None)
    for example in examples:
        for grads in example.steps:
            assert mfx.tree.flatten(grads)[1] == mfx.tree.flatten(example.params)[1]


def test_a_factory_that_was_not_called_is_reported():
    with pytest.raises(
        TypeError, match=r"expected a Transform: call a factory to get one, as in scale_by_sign\(\)"
    ):
        kit.check_transform(mfx.scale_by_sign)  # pyright: ignore[reportArgumentType]


# ------------------------------------------------------------------------------------------------------- the page


@mfx.transform(locality=mfx.Locality.LEAF)
def divide_by_norm():
    """A right transform, whose last bit depends on the strides of a leaf, as the order of a sum does."""

    def update(updates, state, params=None):
        return mfx.tree.map(lambda leaf: leaf / leaf.norm(), updates), state

    return lambda params: mfx.core.EmptyState(), update


def test_a_leaf_keeps_its_strides_in_company():
    for seed in range(9):
        generator = torch.Generator().manual_seed(seed)
        transposed = {"w": torch.randn(4, 4, generator=generator).T}
        kit.laws.a_leaf_has_the_same_bits_in_any_company(divide_by_norm(), transposed, [transposed])


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nan": torch.isnan,
    "zero": lambda leaf: leaf == 0,
    "large": lambda leaf: leaf.abs() > 1e15,
}


@mfx.transform(locality=mfx.Locality.LEAF)
def raises_on(fault: str):
    """Raise an error for a fault in a gradient, as ``torch.linalg.eigh`` does for NaN."""

    def update(updates: Any, state: Any, params: Any = None):
        if any(FAULTS[fault](leaf).any() for leaf in mfx.tree.tensors(updates)):
            raise ArithmeticError("no such decomposition")
        return updates, state

    return lambda params: mfx.core.EmptyState(), update


@pytest.mark.parametrize(
    ("fault", "law", "change"),
    [
        (
            "nan",
            "a_nonfinite_gradient_changes_no_other_leaf",
            r"after nan in the gradients of \['w'\] at step 0",
        ),
        (
            "nan",
            "a_nonfinite_gradient_stays_visible",
            r"after nan in the gradients of \['w'\] at step 0",
        ),
        ("zero", "zero_gradients_give_finite_updates", "for zero gradients"),
        ("large", "large_and_small_gradients_give_finite_updates", r"for gradients of 1e\+18"),
    ],
)
def test_an_error_on_gradients_that_a_law_has_changed_names_the_change(
    fault: str, law: str, change: str
):
    example = kit.Example.of({"w": (3, 2)}, steps=2)
    with pytest.raises(
        kit.LawViolation, match=rf"raised ArithmeticError: no such decomposition \({change}.*\)"
    ):
        kit.LAWS[law].check(raises_on(fault), *example)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "check-your-own.md"
FAMILIES = {
    "structure": "the state and the updates keep their form",
    "purity": "results depend on inputs only, and inputs stay as they are",
    "values": "a transform is defined by its factory and arguments",
    "ambient": "modes of torch, seeds, clocks and other processes change nothing",
    "representation": "equal values give equal results, however they are stored",
    "algebra": "chains",
    "donation": "`donate=True` changes no value and writes only to donated tensors",
    "locality": "the declared `Locality` is true",
    "declarations": "other declarations are true",
    "batching": "leaves that are computed together have the results that they have alone",
    "numbers": "NaN, infinities, zeros, magnitudes, narrow dtypes and counts",
    "calculus": "derivatives, in float64",
    "compiling": "one graph with the eager values",
}
"""The subject of the laws of each family, in the order in which they are checked."""


def table_of_laws() -> str:
    rows = ["| family | laws |", "| --- | --- |"]
    for family, meaning in FAMILIES.items():
        names = [f"`{law.name}`" for law in kit.LAWS.values() if law.family == family]
        rows.append(f"| {family}: {meaning} | {', '.join(names)} |")
    return "\n".join(rows)


def test_the_page_lists_every_law():
    assert FAMILIES.keys() == {law.family for law in kit.LAWS.values()}
    assert table_of_laws() in PAGE.read_text(), (
        f"docs/check-your-own.md should have this table:\n{table_of_laws()}"
    )


def test_the_page_shows_the_number_of_examples_of_a_law():
    shown = dict(re.findall(r"^  ([a-z_]+) \((\d+) examples\)$", PAGE.read_text(), re.MULTILINE))
    assert len(shown) == 2
    report = kit.check_transform(
        mfx.momentum(0.9), laws=list(shown), max_examples=25, progress=False
    )
    assert report.held == {name: int(number) for name, number in shown.items()}


def test_a_law_runs_on_a_hundredth_to_a_half_of_the_examples():
    shares = [law.share for law in kit.LAWS.values()]
    assert (min(shares), max(shares)) == (0.01, 0.5)
