"""The laws, one family per file: each is a function ``law(tx, params, steps)`` that raises `LawViolation`.

`check_transform` checks them in the order of the imports below. A transform that does not accept an absent leaf
therefore breaks that law, and not a later law whose example has an absent leaf.
"""

from muonfx.testing.laws.structure import (
    absent_leaves_are_left_alone,
    empty_trees_are_taken,
    init_on_meta_gives_the_same_spec,
    init_returns_a_state_that_needs_no_grad,
    state_keeps_its_structure_and_dtypes,
    updates_look_like_the_gradients,
)

# ruff: isort: split
from muonfx.testing.laws.purity import (
    interleaved_states_are_independent,
    outputs_share_no_storage_with_inputs,
    unknown_extras_are_ignored,
    update_leaves_its_inputs_unchanged,
    update_remembers_nothing,
    updates_do_not_overlap,
)

# ruff: isort: split
from muonfx.testing.laws.values import (
    fingerprint_ignores_numbers,
    pickle_gives_an_equal_transform,
    pytree_views_round_trip,
    replacing_nothing_changes_nothing,
    repr_evaluates_to_an_equal_transform,
)

# ruff: isort: split
from muonfx.testing.laws.algebra import (
    chain_of_one_is_its_member,
    identity_is_neutral,
    nested_chains_equal_flat_ones,
)

# ruff: isort: split
from muonfx.testing.laws.donation import (
    donation_changes_no_value,
    donation_keeps_to_what_is_donated,
    next_in_chain_may_write_to_updates,
)

# ruff: isort: split
from muonfx.testing.laws.locality import (
    element_transforms_see_one_element,
    leaf_transforms_see_one_leaf,
    matrix_transforms_see_one_matrix,
    tree_transforms_see_sums_over_leaves,
)

# ruff: isort: split
from muonfx.testing.laws.declarations import (
    element_transforms_see_no_shape,
    large_leaves_are_as_small_ones,
    order_of_dicts_means_nothing,
    own_work_is_of_its_own_locality,
    params_are_not_read_where_declared_so,
    resolving_changes_nothing,
    rounding_first_changes_nothing,
    stacks_are_as_their_matrices,
)

# ruff: isort: split
from muonfx.testing.laws.batching import (
    vmap_over_gradients_equals_a_loop,
    vmap_over_the_transform_equals_a_loop,
)

# ruff: isort: split
from muonfx.testing.laws.calculus import (
    derivatives_by_gradients_are_right,
    derivatives_by_hyperparameters_are_right,
    forward_mode_agrees_with_reverse_mode,
    second_derivatives_are_right,
)

# ruff: isort: split
from muonfx.testing.laws.compiling import (
    changing_an_injected_number_does_not_recompile,
    compiled_update_equals_eager,
    compiled_update_takes_other_shapes,
    traced_update_equals_eager,
)

__all__ = [
    # structure
    "absent_leaves_are_left_alone",
    "state_keeps_its_structure_and_dtypes",
    "updates_look_like_the_gradients",
    "empty_trees_are_taken",
    "init_on_meta_gives_the_same_spec",
    "init_returns_a_state_that_needs_no_grad",
    # purity
    "update_leaves_its_inputs_unchanged",
    "outputs_share_no_storage_with_inputs",
    "updates_do_not_overlap",
    "update_remembers_nothing",
    "interleaved_states_are_independent",
    "unknown_extras_are_ignored",
    # values
    "repr_evaluates_to_an_equal_transform",
    "pickle_gives_an_equal_transform",
    "replacing_nothing_changes_nothing",
    "fingerprint_ignores_numbers",
    "pytree_views_round_trip",
    # chains
    "chain_of_one_is_its_member",
    "identity_is_neutral",
    "nested_chains_equal_flat_ones",
    # donation
    "donation_changes_no_value",
    "donation_keeps_to_what_is_donated",
    "next_in_chain_may_write_to_updates",
    # locality
    "element_transforms_see_one_element",
    "matrix_transforms_see_one_matrix",
    "leaf_transforms_see_one_leaf",
    "tree_transforms_see_sums_over_leaves",
    # declarations
    "element_transforms_see_no_shape",
    "large_leaves_are_as_small_ones",
    "order_of_dicts_means_nothing",
    "own_work_is_of_its_own_locality",
    "params_are_not_read_where_declared_so",
    "resolving_changes_nothing",
    "rounding_first_changes_nothing",
    "stacks_are_as_their_matrices",
    # batching
    "vmap_over_gradients_equals_a_loop",
    "vmap_over_the_transform_equals_a_loop",
    # calculus
    "derivatives_by_gradients_are_right",
    "derivatives_by_hyperparameters_are_right",
    "forward_mode_agrees_with_reverse_mode",
    "second_derivatives_are_right",
    # compilation
    "compiled_update_equals_eager",
    "changing_an_injected_number_does_not_recompile",
    "compiled_update_takes_other_shapes",
    "traced_update_equals_eager",
]
