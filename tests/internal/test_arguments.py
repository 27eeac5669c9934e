"""An argument of the wrong plain type is an error wherever one can be given: "no" is not true, and True is not 1."""

import inspect
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import muonfx as mfx
from muonfx import compact, routing, sharding
from muonfx._other_libraries import ADVICE_ON_NAMES, NAMES_HERE
from muonfx.core import schedules
from muonfx.internal.arguments import accepted_types_of

WRONG = {
    "bool": ("no", "", 1, 0, None, torch.tensor(True)),
    "int": ("3", True, 2.0, None),
    "float": ("0.5", True, None),
    "str": (3, True, b"x", None),
}

MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
PARAMS = {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
TASK = mfx.studies.Task(
    lambda seed: PARAMS, lambda seed, step: torch.ones(4), lambda params, batch: params["b"].sum()
)
TX = mfx.momentum()

REQUIRED: dict[Callable[..., Any], tuple[Any, ...]] = {
    mfx.accumulate: (TX, 2),
    mfx.AttentionHeads: ("*.attn", 2),
    mfx.apply_updates: (PARAMS, PARAMS),
    mfx.cautious: (TX,),
    mfx.clip_by_block_rms: (1.0,),
    mfx.clip_by_global_norm: (1.0,),
    mfx.contrib.sam_gradient: (lambda params: params, PARAMS),
    mfx.contrib.schedule_free: (mfx.scale(-0.1), 0.1),
    mfx.clip_by_value: (1.0,),
    mfx.master_params: (TX,),
    mfx.muonclip: ((),),
    mfx.qk_clip: ((),),
    mfx.scale: (1.0,),
    mfx.contrib.scale_by_dual_norm: (TX,),
    mfx.contrib.scale_by_namo: (TX,),
    mfx.scale_by_learning_rate: (0.1,),
    mfx.Muon: (MODEL,),
    mfx.diagnose: ((TX, TX.init(PARAMS), PARAMS, PARAMS),),
    mfx.TransformOptimizer: (MODEL, mfx.scale(-0.1)),
    schedules.constant_schedule: (1.0,),
    schedules.cosine_decay_schedule: (1.0, 4),
    schedules.exponential_decay: (1.0, 4, 0.5),
    schedules.linear_schedule: (1.0, 0.1, 4),
    schedules.warmup_cosine_decay_schedule: (1.0, 1, 4),
    schedules.warmup_stable_decay_schedule: (1.0, 1, 1, 4),
    routing.labels: (MODEL, []),
    routing.where: (bool,),
    sharding.broadcast: (PARAMS, sharding.zero(PARAMS, 1)),
    sharding.zero: (PARAMS, 1),
    sharding.flat: (PARAMS, 1),
    sharding.sharded: (TX, sharding.zero(PARAMS, 1)),
    sharding.offload: (TX,),
    mfx.study: (TASK, {"sgd": mfx.scale_by_learning_rate}),
}
"""Valid values of required arguments; names without an entry require none."""
MORE = {
    sharding.flat: {"cuts": [0, 20], "order": ["b", "w"]},
    routing.labels: {"default": "muon"},
    mfx.study: {"rates": [0.1], "seeds": [0], "steps": 1},
}

NOT_ASKED = {
    mfx.transform,  # tests/test_wrong_arguments.py
    mfx.leafwise,  # passes its name on to transform
    mfx.matrixwise,  # the same
    mfx.Leaf,  # created by the package, not from user input
    mfx.Summary,  # the same
    mfx.Diagnosis,  # the same
    routing.Predicate,  # the same
    schedules.schedule,  # a decorator, which looks at its name where it is used
    mfx.as_tensors,  # a device, which torch reads: an int is one too
    sharding.plan_for,
    mfx.MatrixView,  # it checks its patterns itself
    mfx.default_labels,  # labels are looked up by who has transforms for them
    routing.default_labels_by_name,
    routing.ParamInfo,  # created by the package, not from user input
    sharding.replicated,  # a process group is not plain
    sharding.Layout,
    sharding.Plan,
}


def public() -> Iterator[Callable[..., Any]]:
    seen: set[int] = set()
    for module in (mfx, mfx.contrib, compact, schedules, routing, sharding):
        for name in module.__all__:
            value = getattr(module, name)
            records = inspect.isclass(value) and issubclass(value, tuple)
            if callable(value) and not records and id(value) not in seen and value not in NOT_ASKED:
                seen.add(id(value))
                yield value


def kinds_of_one(function: Callable[..., Any], parameter: inspect.Parameter) -> frozenset[str]:
    return accepted_types_of({parameter.name: parameter}, function)[parameter.name]


def choices_of(kinds: frozenset[str]) -> list[str]:
    return sorted(kind[1:-1] for kind in kinds if kind.startswith("'"))


def plain_parameters() -> list[Any]:
    found = []
    for function in public():
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # a class of torch's
            continue
        for parameter in parameters:
            kinds = kinds_of_one(function, parameter)
            if (kinds & WRONG.keys() or choices_of(kinds)) and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                found.append(
                    pytest.param(function, parameter, id=f"{function.__name__}-{parameter.name}")
                )
    return found


def call(function: Callable[..., Any], name: str, value: Any) -> Any:
    bound = inspect.signature(function).bind(*REQUIRED.get(function, ()), **MORE.get(function, {}))
    bound.arguments[name] = value
    given = dict(bound.arguments)
    return function(**given)


def test_there_are_many_such_parameters_and_each_function_can_be_called():
    assert len(plain_parameters()) > 90
    for function in {parameter.values[0] for parameter in plain_parameters()} - {routing.ndim}:
        function(*REQUIRED.get(function, ()), **MORE.get(function, {}))


@pytest.mark.parametrize(("function", "parameter"), plain_parameters())
def test_an_argument_of_another_plain_type_is_a_type_error_that_names_it(
    function: Any, parameter: inspect.Parameter
):
    kinds = kinds_of_one(function, parameter)
    wrong = [value for kind in sorted(kinds & WRONG.keys()) for value in WRONG[kind]]
    for value in wrong:
        fits = {
            type(value).__name__,
            "None" if value is None else "",
            "Tensor" if torch.is_tensor(value) else "",
        } & kinds
        if fits or (isinstance(value, int) and not isinstance(value, bool) and "float" in kinds):
            continue
        is_choice = isinstance(value, str) and choices_of(kinds)
        with pytest.raises(ValueError if is_choice else TypeError, match=parameter.name):
            call(function, parameter.name, value)


def takers_of_arguments() -> list[Callable[..., Any]]:
    """The public functions that say themselves which argument does not fit, each once."""
    ours = [function for function in public() if hasattr(function, "definition")]
    return [*ours, mfx.muon, mfx.muon_with_adamw, mfx.adamw, mfx.Muon]


@pytest.mark.parametrize("function", takers_of_arguments(), ids=lambda function: function.__name__)
def test_a_misspelt_argument_and_one_too_many_are_told_of_with_the_functions_name(function: Any):
    parameters = inspect.signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    for name in [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]:
        if len(name) < 5 or inspect.Parameter.VAR_KEYWORD in kinds:
            continue
        misspelt = name[:2] + name[3:]
        with pytest.raises(
            TypeError, match=rf"^{function.__name__}: there is no argument '{misspelt}' .*'{name}'"
        ):
            function(**{misspelt: 1.0})
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        with pytest.raises(TypeError, match=f"^{function.__name__}: too many positional arguments"):
            function(*[1.0] * 40)


@pytest.mark.parametrize(("function", "parameter"), plain_parameters())
def test_a_number_that_is_not_finite_is_an_error(function: Any, parameter: inspect.Parameter):
    if "float" not in kinds_of_one(function, parameter) or function is mfx.Number:
        return
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match=r"must be (finite|above)"):
            call(function, parameter.name, value)


def test_a_number_of_the_state_may_start_at_infinity_and_not_at_nan():
    assert mfx.Number(float("inf")).start == float("inf")
    with pytest.raises(ValueError, match=r"start.*nan"):
        mfx.Number(float("nan"))


@pytest.mark.parametrize(
    "donate", ["yes", "", 1, None, torch.tensor(True), (True, False), mfx.Donation("yes", True)]
)
def test_donate_is_a_bool_or_a_donation(donate: Any):
    tx = mfx.chain(mfx.momentum())
    state = tx.init(PARAMS)
    layout = sharding.zero(PARAMS, 1)
    over = sharding.sharded(tx, layout)
    away = sharding.offload(tx)
    for face in (tx, over, away):
        held = face.init(PARAMS if face is not over else layout.shard(PARAMS))
        with pytest.raises(TypeError, match=r"donate must be True, False or a muonfx.Donation"):
            face.update(PARAMS if face is not over else layout.shard(PARAMS), held, donate=donate)
    assert tx.update(PARAMS, state, donate=mfx.Donation(False, True))
    with pytest.raises(TypeError, match="donate must be True or False"):
        mfx.apply_updates(PARAMS, PARAMS, donate=donate)


NUMBERS = {"np.float32": np.float32(0.25), "np.int64": np.int64(1), "fraction": Fraction(1, 4)}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_number_of_another_library_is_pythons(number: Any):
    assert mfx.scale(number) == mfx.scale(float(number))
    assert mfx.adamw(number, weight_decay=number) == mfx.adamw(
        float(number), weight_decay=float(number)
    )
    assert repr(mfx.cosine_decay_schedule(number, 10)) == repr(
        mfx.cosine_decay_schedule(float(number), 10)
    )
    assert {g["lr"] for g in mfx.Muon(MODEL, lr=number).param_groups} == {float(number)}
    betas = (np.float32(0.5), Fraction(1, 2))
    assert mfx.Muon(MODEL, betas=betas).tx == mfx.Muon(MODEL, betas=(0.5, 0.5)).tx


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_recipe_takes_a_tensor_of_one_element_for_a_number_and_sees_it_change(
    shape: tuple[int, ...],
):
    rate = torch.full(shape, 0.5)
    tx = mfx.adamw(rate)
    assert tx == mfx.adamw(torch.tensor(0.5))
    state = tx.init(PARAMS)
    rate.mul_(2.0)  # as with a tensor learning rate of torch.optim
    wanted = mfx.adamw(torch.tensor(1.0)).update(PARAMS, state, PARAMS)[0]
    assert torch.equal(tx.update(PARAMS, state, PARAMS)[0]["w"], wanted["w"])
    assert {float(g["lr"]) for g in mfx.Muon(MODEL, lr=torch.full(shape, 0.5)).param_groups} == {
        0.5
    }


BATCHES = {
    "recipe": lambda x: mfx.adamw(x),
    "optimizer": lambda x: mfx.Muon(MODEL, lr=x),
    "transform": lambda x: mfx.scale(x).update(PARAMS, mfx.core.EmptyState(), PARAMS),
    "chain": lambda x: (tx := mfx.chain(mfx.scale_by_adam(x))).update(
        PARAMS, tx.init(PARAMS), PARAMS
    ),
}


@pytest.mark.parametrize("use", BATCHES.values(), ids=BATCHES)
def test_a_tensor_of_several_numbers_is_refused_outside_vmap(use: Callable[[Any], Any]):
    # It would be broadcast along the columns of a matrix.
    with pytest.raises(
        ValueError, match=r"must be a number or a 0-d tensor, found a tensor of shape \(4,\).*stack"
    ):
        use(torch.full((4,), 0.5))


@pytest.mark.parametrize("betas", [0.9, None, "0.9", np.float32(0.9), torch.tensor([0.9, 0.95])])
def test_betas_that_are_no_pair_are_refused(betas: Any):
    with pytest.raises(
        TypeError, match=r"Muon: betas must be a tuple .* such as \(0.9, 0.95\), found"
    ):
        mfx.Muon(MODEL, betas=betas)
    with pytest.raises(ValueError, match="Muon: betas must be a tuple of AdamW's two decays"):
        mfx.Muon(MODEL, betas=(0.9,))


FOREIGN = [
    (
        mfx.Muon,
        "nesterov",
        r"here: Muon's momentum always looks ahead; muonfx.muon\(nesterov=False\) does not",
    ),
    (mfx.Muon, "ns_steps", r"here: orthogonalize=muonfx.orthogonalize\(steps=\.\.\.\)"),
    (
        mfx.Muon,
        "ns_coefficients",
        r"here: orthogonalize=muonfx.orthogonalize\(coefficients=\.\.\.\)",
    ),
    (
        mfx.Muon,
        "eps",
        r"here: Muon's .* takes none; .* muonfx.muon_with_adamw\(adam=muonfx.scale_by_adam\(eps=1e-8\)\)",
    ),
    (
        mfx.Muon,
        "max_grad_norm",
        r"here: .*muonfx.chain\(muonfx.clip_by_global_norm\(1.0\), muonfx.Muon.transform.*",
    ),
    (mfx.Muon, "rules", r"here: labels=lambda model: muonfx.default_labels\(model, rules\)"),
    (mfx.Muon, "adjust_lr_fn", "'lr_scaling'"),
    (mfx.Muon, "mu", "'momentum'"),
    (
        mfx.Muon,
        "distributed_mesh",
        r"here: leave it out under FSDP2 .*; under DDP, layout=muonfx.sharding.replicated",
    ),
    (
        mfx.Muon,
        "num_heads",
        r"here: orthogonalize=muonfx.orthogonalize\(view=muonfx.MatrixView\(\.\.\.\)\) .*",
    ),
    (mfx.qk_clip, "num_heads", "did you mean 'heads'"),
    (mfx.add_decayed_weights, "cautious_wd", "did you mean 'cautious'"),
    (
        mfx.Muon,
        "coefficient_type",
        r"here: orthogonalize=muonfx.orthogonalize\(coefficients=\.\.\.\)",
    ),
    (mfx.normuon, "muon_beta2", "'neuron_decay'"),
    (mfx.momentum, "bias_correction", "'debias'"),
    (mfx.Muon, "learning_rate", "'lr'"),
    (mfx.Muon, "b1", "'betas'"),
    (
        mfx.muon,
        "pattern",
        r"here: orthogonalize=muonfx.orthogonalize\(view=muonfx.MatrixView\(pattern=\.\.\.\)\)",
    ),
    (mfx.orthogonalize, "ns_steps", "'steps'"),
    (mfx.orthogonalize, "pattern", r"here: view=muonfx.MatrixView\(pattern=\.\.\.\)"),
    (mfx.muon, "momentum", "'decay'"),
    (mfx.muon, "lr", "'learning_rate'"),
    (mfx.muon, "weight_decay_mask", "'mask'"),
    (mfx.muon_with_adamw, "nesterov", "here: Muon's momentum always looks ahead; .*"),
    (mfx.muon_with_adamw, "adam_b1", r"here: adam=muonfx.scale_by_adam\(b1=\.\.\.\)"),
    (mfx.adamw, "betas", "'b1' or 'b2'"),
    (mfx.linear_schedule, "init_value", "'start'"),
    (mfx.linear_schedule, "transition_steps", "'steps'"),
    (mfx.cosine_decay_schedule, "decay_steps", "'steps'"),
    (mfx.cosine_decay_schedule, "alpha", r"here: end=alpha \* start"),
    (mfx.warmup_cosine_decay_schedule, "decay_steps", "'total_steps'"),
    (mfx.warmup_cosine_decay_schedule, "peak_value", "'peak'"),
    (mfx.warmup_cosine_decay_schedule, "end_value", "'end'"),
]


@pytest.mark.parametrize(("function", "name", "here"), FOREIGN)
def test_an_argument_of_torch_or_optax_is_answered_with_the_name_that_is_here(
    function: Any, name: str, here: str
):
    with pytest.raises(
        TypeError,
        match=rf"there is no argument '{name}' \((did you mean )?{here}\??\); {function.__name__} takes",
    ):
        function(**{name: 0.5})


@pytest.mark.parametrize("name", NAMES_HERE)
def test_a_name_of_another_library_is_answered_with_the_code_that_is_here(name: str):
    with pytest.raises(
        AttributeError, match=rf"'muonfx' has no attribute '{name}'; here it is "
    ) as caught:
        getattr(mfx, name)
    code = str(caught.value).partition("here it is ")[2]
    assert eval(code, {"muonfx": mfx, "model": MODEL}) is not None


@pytest.mark.parametrize("name", ADVICE_ON_NAMES)
def test_a_name_of_optax_without_an_equivalent_is_answered_with_the_page_that_shows_it(name: str):
    with pytest.raises(
        AttributeError, match=rf"'muonfx' has no attribute '{name}'; write it .*"
    ) as caught:
        getattr(mfx, name)
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "transforms.md").read_text(
        encoding="utf-8"
    )
    (heading,) = re.findall('"(.*)" of docs/concepts/transforms.md', str(caught.value))
    assert f"## {heading}\n" in page


@pytest.mark.parametrize("name", ["adafactor", "prodigy", "shampoo", "soap"])
def test_a_module_that_is_called_as_an_optimizer_of_optax_names_its_transform(name: str):
    with pytest.raises(
        TypeError,
        match=rf"muonfx.contrib.{name} is a module, .*here it is muonfx.contrib.scale_by_",
    ):
        getattr(mfx.contrib, name)(1.0)


def test_an_unknown_name_is_an_attribute_error_and_no_other():
    assert not hasattr(mfx, "nothing_of_the_kind")
    assert not NAMES_HERE.keys() & set(dir(mfx))
