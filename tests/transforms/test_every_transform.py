"""Every public transform and recipe is held to every law that applies to it, and to its own declarations."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import muonfx as mfx
from muonfx import recipes, routing
from muonfx import testing as kit
from muonfx.core import schedules
from muonfx.core.donation import NOTHING
from muonfx.core.order import signs
from muonfx.core.transform import within
from muonfx.testing.transforms import by_rank, by_role, halve, with_value
from muonfx.transforms.matrices import STACK
from muonfx.tree import elementwise as ew
from tests.public import NAMES, NO_MATCH

pytestmark = NO_MATCH

STACKS = mfx.MatrixView(STACK)
A_SCHEDULE = mfx.linear_schedule(1.0, 0.1, 3)
RATES_BY_ROLE = {"embedding": 0.3, "head": A_SCHEDULE, "vector": 0.1, "other": 0.0}
MOMENTUM = mfx.momentum(0.9)
FP32 = mfx.orthogonalize(dtype=torch.float32)
TWO_STEPS = FP32.replace(steps=2)
"""For the parts of recipes: the cases of `orthogonalize` itself run the whole iteration."""
TINY = {"block": 4, "min_size": 0}  # the leaves of examples have a few elements


@mfx.transform(
    locality=lambda inner, logits: inner.locality,
    combinator=mfx.core.Combinator(mfx.Locality.ELEMENT),
)
def given_logits(inner: mfx.Transform, logits: dict[str, torch.Tensor]):
    """Pass the attention logits that a transform requires, since the laws pass none."""

    def update(updates, state, params=None, *, max_logits=None, donate=NOTHING, **extras):
        return inner.run(updates, state, params, donate=donate, max_logits=logits, **extras)

    return inner.functions.init, update


HEADS = mfx.AttentionHeads("*attn", 2, 1), mfx.AttentionHeads("*cross", 2, query="qkv", key="qkv")
LOGITS = {
    prefix + module: torch.tensor(largest)
    for module, largest in (("a.attn", [400.0, 150.0]), ("cross", [1.0, 300.0]))
    for prefix in ("", "a.", "z.")  # some laws put trees into trees
}
SHAPES = {
    "a.attn.q_proj.weight": (4, 3),
    "a.attn.k_proj.weight": (2, 3),
    "cross.qkv.weight": (6, 3),
    "w": (2, 2),
}


@st.composite
def attention_weights(draw: st.DrawFn) -> kit.Example:
    """Names that heads are found by, some without a gradient."""
    shapes = (
        SHAPES | {"a.attn.q_proj.bias": (4,), "cross.qkv.bias": (6,)}
        if draw(st.booleans())
        else SHAPES
    )
    drawn = kit.Example.of(
        shapes,
        steps=2,
        dtype=draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16))),
        seed=draw(st.integers(0, 99)),
    )
    absent = draw(st.sampled_from((None, "w", "cross.qkv.weight", "a.attn.k_proj.weight")))
    steps = [
        {name: None if name == absent else leaf for name, leaf in grads.items()}
        for grads in drawn.steps
    ]
    return kit.Example(drawn.params, steps)


CASES: dict[str, list[mfx.Transform]] = {
    "identity": [mfx.identity()],
    "set_to_zero": [mfx.set_to_zero()],
    "stateless": [mfx.stateless(halve)],
    "chain": [
        mfx.chain(),
        mfx.chain(mfx.clip_by_global_norm(1.0), mfx.scale_by_adam(), ("rate", mfx.scale(-0.1))),
        mfx.chain(mfx.scale(2.0), mfx.momentum(0.5, dtype=None), mfx.identity(), mfx.scale(3.0)),
    ],
    "partition": [mfx.partition({"matrices": MOMENTUM, "rest": mfx.scale_by_adam()}, by_rank)],
    "masked": [mfx.masked(MOMENTUM, mfx.routing.ndim(min=2))],
    "accumulate": [
        mfx.accumulate(MOMENTUM, 2),
        mfx.accumulate(mfx.scale_by_adam(), 3, mean=False, dtype=None),
    ],
    "add_decayed_weights": [
        mfx.add_decayed_weights(A_SCHEDULE, mask=mfx.routing.ndim(min=2)),
        mfx.add_decayed_weights(0.1, cautious=True),
    ],
    "subtract_decayed_weights": [
        mfx.subtract_decayed_weights(A_SCHEDULE, mfx.routing.ndim(min=2), cautious=True)
    ],
    "cautious": [mfx.cautious(MOMENTUM)],
    "add_updates": [mfx.add_updates(MOMENTUM, ("sign", mfx.scale_by_lion()), mfx.scale(0.5))],
    "ema_nesterov": [
        mfx.contrib.ema_nesterov(),
        mfx.contrib.ema_nesterov(0.5, A_SCHEDULE, dtype=None),
    ],
    "floor_by_weight_norms": [mfx.contrib.floor_by_weight_norms(1e-3, view=STACKS)],
    "radial_brake": [
        mfx.contrib.radial_brake(view=STACKS),
        mfx.contrib.radial_brake(0.0, A_SCHEDULE),
    ],
    "keep_weight_norms": [mfx.contrib.keep_weight_norms(dtype=None, view=STACKS)],
    "match_weight_norms": [mfx.contrib.match_weight_norms(view=STACKS)],
    "scale_by_dion": [
        mfx.contrib.scale_by_dion(2),
        mfx.contrib.scale_by_dion(1, 0.5, dtype=torch.bfloat16, view=STACKS),
    ],
    "scale_by_dion2": [
        mfx.contrib.scale_by_dion2(2),
        mfx.contrib.scale_by_dion2(3, 0.5, coefficients="cubic", dtype=torch.bfloat16, view=STACKS),
    ],
    "scale_by_dual_norm": [mfx.contrib.scale_by_dual_norm(TWO_STEPS)],
    "scale_by_namo": [
        mfx.contrib.scale_by_namo(TWO_STEPS),
        mfx.contrib.scale_by_namo(mfx.scale(0.5), dtype=None, view=STACKS),
    ],
    "clip_by_block_rms": [mfx.clip_by_block_rms(0.3)],
    "clip_by_global_norm": [mfx.clip_by_global_norm(A_SCHEDULE)],
    "clip_by_value": [mfx.clip_by_value(0.5)],
    "ema_params": [
        mfx.ema_params(0.9),
        mfx.ema_params(0.5, dtype=mfx.int8(**TINY, code="dynamic", stochastic=True)),
    ],
    "master_params": [mfx.master_params(mfx.chain(MOMENTUM, mfx.scale(-0.1)))],
    "momentum": [
        mfx.momentum(0.5, nesterov=False, dtype=None),
        mfx.momentum(0.9, debias=True, dtype=torch.bfloat16),
        mfx.momentum(mfx.linear_schedule(0.5, 0.9, 4)),
        mfx.momentum(0.9, heavy_ball=True, nesterov=False, dtype=torch.float64),
        mfx.momentum(0.9, dtype=mfx.int8(5, code="dynamic", min_size=3)),
        mfx.momentum(0.9, debias=True, nesterov=False, dtype=mfx.int8(**TINY, stochastic=True)),
        mfx.momentum(0.9, heavy_ball=True, dtype=mfx.fp8(**TINY, format="e5m2", stochastic=True)),
    ],
    "monitor": [
        mfx.monitor(),
        mfx.monitor("u", ("rms", "orthogonality_error")),
        mfx.monitor("u", by_leaf=True),
        mfx.monitor("u", ("norm", "orthogonality_error"), by_leaf=True),
    ],
    "normalize_columns": [mfx.contrib.normalize_columns()],
    "normalize_leaves": [mfx.contrib.normalize_leaves()],
    "normalize_matrices": [
        mfx.contrib.normalize_matrices(view=mfx.MatrixView("out ... -> (...) out"))
    ],
    "normalize_rows": [mfx.contrib.normalize_rows(view=STACKS)],
    "normalize_neurons": [
        mfx.normalize_neurons(),
        mfx.normalize_neurons(0.5, dtype=None, view=STACKS),
    ],
    "orthogonalize": [
        FP32,
        mfx.orthogonalize(coefficients="cubic", steps=3, view=STACKS),
        mfx.orthogonalize(coefficients="aol", view=mfx.MatrixView("out ... -> (...) out")),
        mfx.orthogonalize(view=mfx.MatrixView({"*.k": STACK, "*.nowhere": "out in -> out in"})),
    ],
    "qk_clip": [mfx.qk_clip(())],
    "scale": [mfx.scale(-0.5)],
    "scale_by_adam": [
        mfx.scale_by_adam(),
        mfx.scale_by_adam(0.5, 0.9, 1e-3, eps_root=1e-6, mu_dtype=torch.bfloat16, nu_dtype=None),
        mfx.scale_by_adam(mu_dtype=mfx.int8(), nu_dtype=mfx.int8(**TINY, code="dynamic")),
        mfx.scale_by_adam(mu_dtype=mfx.fp8(**TINY), nu_dtype=mfx.fp8(**TINY, stochastic=True)),
    ],
    "scale_by_factored_rms": [
        mfx.contrib.scale_by_factored_rms(min_dim_size_to_factor=2),
        mfx.contrib.scale_by_factored_rms(dtype=None),
    ],
    "scale_by_learning_rate": [mfx.scale_by_learning_rate(A_SCHEDULE)],
    "scale_by_lion": [
        mfx.scale_by_lion(0.5, 0.5, mu_dtype=None),
        mfx.scale_by_lion(mu_dtype=mfx.int8(**TINY)),
    ],
    "scale_by_rms": [
        mfx.scale_by_rms(0.5, 1e-3, eps_in_sqrt=False, debias=True, nu_dtype=torch.bfloat16),
        mfx.scale_by_rms(nu_dtype=mfx.int8(**TINY)),
    ],
    "scale_by_shape": [mfx.scale_by_shape(), mfx.scale_by_shape("spectral", view=STACKS)],
    "scale_by_shampoo": [
        mfx.contrib.scale_by_shampoo(),
        mfx.contrib.scale_by_shampoo(0.5, 1e-3, refresh=2, view=STACKS),
    ],
    "scale_by_soap": [
        mfx.contrib.scale_by_soap(),
        mfx.contrib.scale_by_soap(0.5, 0.9, refresh=2, max_precondition_size=3, view=STACKS),
        mfx.contrib.scale_by_soap(factors="kl"),
    ],
    "scale_by_sign": [mfx.scale_by_sign()],
    "skip_nonfinite": [
        mfx.skip_nonfinite(mfx.chain(mfx.clip_by_global_norm(1.0), mfx.scale_by_adam()))
    ],
    "sam": [mfx.contrib.sam(0.5, adaptive=True)],
    "scale_by_prodigy": [
        mfx.contrib.scale_by_prodigy(
            A_SCHEDULE, b2=0.5, estim_lr0=0.1, weight_decay=0.1, safeguard_warmup=True, dtype=None
        ),
    ],
    "schedule_free": [
        mfx.contrib.schedule_free(
            mfx.chain(mfx.scale_by_adam(0.0), mfx.scale_by_learning_rate(A_SCHEDULE)), A_SCHEDULE
        ),
        mfx.contrib.schedule_free(
            mfx.chain(mfx.clip_by_global_norm(1.0), mfx.scale(-0.1)), 0.1, 1.0, dtype=None
        ),
    ],
    "reduce_on_plateau": [with_value(mfx.contrib.reduce_on_plateau(0.5, 1, cooldown=1))],
    "adamw": [mfx.adamw(0.1)],
    "lion": [mfx.lion(A_SCHEDULE, weight_decay=0.1)],
    "muon": [mfx.muon(0.1, weight_decay=0.1, orthogonalize=TWO_STEPS)],
    "normuon": [mfx.normuon(A_SCHEDULE, orthogonalize=TWO_STEPS)],
    "muon_with_adamw": [
        mfx.muon_with_adamw(
            0.1, A_SCHEDULE, orthogonalize=TWO_STEPS, labels=mfx.routing.default_labels_by_name
        ),
        mfx.muon_with_adamw(0.1, RATES_BY_ROLE, orthogonalize=TWO_STEPS, labels=by_role),
    ],
}
"""Cases of every public transform and recipe. The recipes of `muonfx.contrib` are chains of these."""

# On parameters of certain names only.
WITH_HEADS = {
    name: given_logits(tx, LOGITS)
    for name, tx in {
        "qk_clip": mfx.qk_clip(HEADS, alpha=0.4),
        "muonclip": mfx.muonclip(
            HEADS,
            orthogonalize=TWO_STEPS.replace(
                view=mfx.MatrixView({"*cross.qkv.weight": "(part=3 out) in -> part out in"})
            ),
            labels=mfx.routing.default_labels_by_name,
        ),
    }.items()
}

# Recording a graph is quick, compiling one is not.
COMPILED = [
    name
    for name in kit.LAWS
    if kit.LAWS[name].family == "compiling" and name != "traced_update_equals_eager"
]
# The eigenvectors of a deficient matrix are those of its rounding.
CHAOTIC = {
    "scale_by_soap": ["narrow_gradients_are_computed_in_wider_dtypes"],
    # The Gram matrix of its metric overflows.
    "monitor": ["large_and_small_gradients_give_finite_updates"],
}
EXAMPLES = max(6, settings.default.max_examples // 10)
LONG = {"scale_by_dion", "scale_by_dion2", "scale_by_shampoo", "scale_by_soap"}
"""Transforms with decompositions, whose laws take ten seconds: checked in a whole run."""

EVERY_CASE = [
    # The first case of each always, further cases in a whole run: all laws take seconds.
    pytest.param(name, tx, id=f"{name}-{i}", marks=[pytest.mark.slow] if i or name in LONG else [])
    for name, cases in CASES.items()
    for i, tx in enumerate(cases)
]
EVERY_CASE += [pytest.param(name, tx, id=f"{name}-heads") for name, tx in WITH_HEADS.items()]


def public_factories() -> set[str]:
    """The factories of transforms that the package exports, read from the package and not from a list."""
    found = set()
    for name, value in NAMES.items():
        makes_a_transform = hasattr(value, "definition") and not _makes_another_value(value)
        is_a_recipe = name in {*recipes.__all__, "scion"}
        if makes_a_transform or is_a_recipe:
            found.add(name)
    return found


def _makes_another_value(factory: Callable[..., Any]) -> bool:
    return factory.__module__.startswith((schedules.__name__, mfx.QuantizedDtype.__module__))


def test_every_public_transform_has_a_case():
    assert public_factories() - {"scion"} == CASES.keys() | WITH_HEADS.keys()


def test_every_public_transform_can_be_drawn():
    assert public_factories() == set(kit.arguments())


def test_every_public_schedule_can_be_drawn():
    factories = {
        name for name in schedules.__all__ if hasattr(getattr(schedules, name), "definition")
    }
    seen: set[str] = set()

    @given(st.lists(kit.schedules(), min_size=25, max_size=25))
    def draw(drawn: list[mfx.Schedule]) -> None:
        seen.update(schedule.factory.__name__ for schedule in drawn)

    draw()
    assert seen == factories


def suitable(tx: mfx.Transform) -> st.SearchStrategy[kit.Example] | None:
    return attention_weights() if tx.name == "given_logits" else None


def updates_dtype(name: str) -> Callable[[torch.dtype], torch.dtype] | None:
    return ew.wide_dtype if name == "master_params" else None


@pytest.mark.parametrize(("name", "tx"), EVERY_CASE)
def test_every_transform_obeys_every_law(name: str, tx: mfx.Transform):
    skip = [*COMPILED, *CHAOTIC.get(name, [])]
    report = kit.check_transform(
        tx, skip=skip, params=suitable(tx), max_examples=EXAMPLES, updates_dtype=updates_dtype(name)
    )
    assert len(report.held) >= 20


# Compilation takes most of the time: a few transforms always, every other one in a whole run, and the further
# cases of each in a deep one.
ALWAYS_COMPILED = ("scale_by_adam", "accumulate")  # Muon itself: `test_settings_by_name_compile`


@pytest.mark.parametrize(
    ("name", "tx"),
    [
        pytest.param(
            name,
            tx,
            id=f"{name}-{i}",
            marks=[pytest.mark.deep]
            if i
            else []
            if name in ALWAYS_COMPILED
            else [pytest.mark.slow],
        )
        for name, cases in (CASES | {"qk_clip": [WITH_HEADS["qk_clip"]]}).items()
        for i, tx in enumerate(cases)
    ],
)
def test_every_transform_compiles(name: str, tx: mfx.Transform):
    kit.check_transform(tx, laws=COMPILED, params=suitable(tx), max_examples=4)


def test_settings_by_name_compile():
    view = mfx.MatrixView({"k": STACK, "*qkv": "(part=3 out) in -> part out in"})
    tx = mfx.muon(
        0.1, orthogonalize=mfx.orthogonalize(steps=1, view=view), mask=mfx.routing.path("*qkv")
    )
    example = kit.Example.of({"k": (2, 2, 3), "a.qkv": (6, 4)})
    kit.laws.compiled_update_equals_eager(tx, *example)
    kit.laws.compiled_update_takes_other_shapes(tx, *example)


ON_ANY_ARGUMENTS = [
    "absent_leaves_are_left_alone",
    "state_keeps_its_structure_and_dtypes",
    "init_on_meta_gives_the_same_spec",
    "update_leaves_its_inputs_unchanged",
    "outputs_share_no_storage_with_inputs",
    "donation_changes_no_value",
    "pytree_views_round_trip",
    "repr_evaluates_to_an_equal_transform",
]


@given(kit.transforms(matrices=True), kit.params_and_grads(ranks=(2, 4)))
def test_every_transform_obeys_the_plain_laws_for_any_arguments(
    tx: mfx.Transform, example: kit.Example
):
    for name in ON_ANY_ARGUMENTS:
        kit.LAWS[name].check(tx, *example)


@given(kit.chains(), kit.params_and_grads())
def test_every_chain_obeys_the_plain_laws(members: list[mfx.Transform], example: kit.Example):
    tx = mfx.chain(*members)
    for name in ON_ANY_ARGUMENTS:
        kit.LAWS[name].check(tx, *example)


# --------------------------------------------------------------------------------------------------- patterns

TYPO: dict[str, Any] = {
    "view": mfx.MatrixView({"typo*": STACK}),
    "orthogonalize": mfx.orthogonalize(view=mfx.MatrixView({"typo*": STACK})),
    "mask": routing.path("typo*"),
    "heads": mfx.AttentionHeads("typo*", heads=2),
}
INNER = mfx.scale(1.0)
REQUIRED: dict[str, Any] = {"inner": INNER, "heads": (), "labels": {"w": "muon"}, "limit": 1.0}
PATTERNS = [
    pytest.param(NAMES[name], argument, id=f"{name}-{argument}")
    for name in kit.arguments()
    for argument in inspect.signature(NAMES[name]).parameters
    if argument in TYPO
]


@pytest.mark.parametrize(("factory", "argument"), PATTERNS)
def test_a_pattern_that_matches_no_parameter_is_reported_at_init(
    factory: Callable[..., mfx.Transform], argument: str
):
    parameters = inspect.signature(factory).parameters.values()
    required = {
        p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    } | ({"labels"} & {p.name for p in parameters})
    given = {name: REQUIRED[name] for name in required if name in REQUIRED} | {
        argument: TYPO[argument]
    }
    given |= dict.fromkeys(required - given.keys(), 1.0)
    tx = factory(**given)
    if argument == "heads":
        with pytest.raises(ValueError, match=r"heads: 'typo\*.* matches none"):
            tx.init({"w": torch.ones(2, 2)})
    else:
        with pytest.warns(
            UserWarning, match=rf"({argument}|view): 'typo\*' matches none"
        ) as caught:
            tx.init({"w": torch.ones(2, 2)})
        assert {found.filename for found in caught} == {__file__}


# ----------------------------------------------------------------------------------------------------- extra arguments

WITH_EXTRAS = {
    (part.factory.__name__, extra): part
    for tx in [case for cases in CASES.values() for case in cases] + [*WITH_HEADS.values()]
    for part in within(tx)
    if "muonfx.testing" not in part.factory.__module__ and "tests" not in part.factory.__module__
    for extra in part.extras.named & (part.extras.accepted or frozenset())
}
HEADS_PARAMS = {name: torch.ones(shape) for name, shape in SHAPES.items()}


def test_the_extras_that_public_transforms_read_are_these():
    assert {extra for _, extra in WITH_EXTRAS} == {"boundary", "max_logits", "value"}


@pytest.mark.parametrize(("name", "extra"), WITH_EXTRAS)
@pytest.mark.parametrize("wrong", ["no", 1j, torch.ones(2, dtype=torch.complex64)], ids=str)
def test_an_extra_of_a_wrong_kind_is_named_before_anything_is_done(
    name: str, extra: str, wrong: Any
):
    tx = WITH_EXTRAS[name, extra]
    if not tx.children:
        tx = mfx.chain(mfx.scale_by_adam(), mfx.scale(-0.1), tx)
    state = tx.init(HEADS_PARAMS)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*\b{extra}\b"):
        tx.update(HEADS_PARAMS, state, HEADS_PARAMS, **{extra: wrong})
    live = {path: torch.nn.Parameter(leaf.clone()) for path, leaf in HEADS_PARAMS.items()}
    optimizer = mfx.TransformOptimizer(
        live, mfx.chain(mfx.scale(-0.1), tx) if signs(tx) == {1} else tx
    )
    for param in live.values():
        param.grad = torch.ones_like(param)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*\b{extra}\b"):
        optimizer.step(**{extra: wrong})
    assert all(torch.equal(param, HEADS_PARAMS[path]) for path, param in live.items())


# ------------------------------------------------------------------------------------------------------ order

EVERY = [
    pytest.param(tx, id=f"{name}-{place}")
    for name, cases in CASES.items()
    for place, tx in enumerate(cases)
]
GRADS = {
    "a.weight": torch.tensor(
        [[1.0, -0.5, 0.25], [0.5, 2.0, -1.0], [-1.0, 0.75, 0.5], [0.3, -0.2, 1.5]]
    )
}


def first_update(tx: mfx.Transform, size: float, params: float) -> torch.Tensor:
    """The first update for gradients of a size, at parameters of a size."""
    at = mfx.tree.map(lambda g: params * g.flip(0), GRADS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a label or a pattern of a case has no parameter here
        return tx.update(mfx.tree.map(lambda g: size * g, GRADS), tx.init(at), at)[0]["a.weight"]


@pytest.mark.parametrize("tx", [param for param in EVERY if "inner" in param.values[0].arguments])
def test_a_wrapper_declares_what_its_inner_transform_needs(tx: mfx.Transform):
    inner = mfx.chain(mfx.clip_by_global_norm(1.0), mfx.add_decayed_weights(0.1))
    wrapper = tx.replace(inner=inner)
    assert wrapper.locality is mfx.Locality.TREE
    assert wrapper.reads_params


@pytest.mark.parametrize("tx", EVERY)
def test_the_direction_of_updates_is_what_is_said_of_it(tx: mfx.Transform):
    direction = (first_update(tx, 1e3, 0.0) * GRADS["a.weight"]).sum()
    assert signs(tx) - {0} in (set(), {1}, {-1})
    assert 1 not in signs(tx) or direction >= 0
    assert -1 not in signs(tx) or direction <= 0


@pytest.mark.parametrize("tx", [param for param in EVERY if not param.values[0].children])
def test_a_transform_that_sets_the_size_of_updates_declares_it(tx: mfx.Transform):
    if tx.position in ("turns", "either_sign"):
        return
    if tx.position == "sets_size":
        torch.testing.assert_close(
            first_update(tx, 1e3, 1.0), first_update(tx, 4e3, 1.0), rtol=0.03, atol=0.03
        )
    else:
        small, larger = first_update(tx, 0.01, 1.0), first_update(tx, 0.04, 1.0)
        assert not torch.allclose(small, larger, rtol=1e-3) or not (small.any() or larger.any())
