"""Views: which matrices a parameter holds, also in stacks of models; Muon treats these and no others."""

import copy
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import stack_module_state, vmap

import muonfx as mfx
from muonfx.core.patterns import NamePatterns, warn_of_unmatched
from muonfx.internal.tracing import matches
from muonfx.routing import Labels, Route, default_labels, default_labels_by_name, labels, path
from muonfx.routing.globs import patterns
from muonfx.transforms.matrices import STACK
from tests import variants
from tests.routing.test_routing import Conv1D, Holder

TRANSPOSED_STACK = "... in out -> ... out in"
THREE = "(part=3 out) in -> part out in"


class Experts(Holder):
    """Four experts as transformers stores them: (out, in), or (in, out) as in gpt-oss."""

    def __init__(self, transposed: bool = False) -> None:
        up, down = ((4, 8, 12), (4, 6, 8)) if transposed else ((4, 12, 8), (4, 8, 6))
        super().__init__(gate_up_proj=up, down_proj=down)


def held(**children: nn.Module) -> nn.Module:
    return nn.ModuleDict(children)


def stepped(model: nn.Module, view=mfx.MatrixView(), **settings) -> dict[str, torch.Tensor]:  # noqa: B008
    """The parameters after a step of Muon on gradients that are the parameters' own squares."""
    model = copy.deepcopy(model)
    orthogonalize = mfx.orthogonalize(dtype=torch.float32, view=view)
    optimizer = mfx.Muon(model, lr=0.1, weight_decay=0.0, orthogonalize=orthogonalize, **settings)
    for param in model.parameters():
        param.grad = param.detach().square()
    optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def near(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def as_matrices(
    model: nn.Module, parts: dict[str, list[torch.Tensor]], **settings
) -> dict[str, list[torch.Tensor]]:
    """The matrices of each parameter after the same step, each a parameter of its own."""
    flat = {
        f"{name}/{at}": nn.Parameter(m.detach().clone())
        for name, held in parts.items()
        for at, m in enumerate(held)
    }
    optimizer = mfx.Muon(
        flat,
        lr=0.1,
        weight_decay=0.0,
        orthogonalize=mfx.orthogonalize(dtype=torch.float32),
        labels=dict.fromkeys(flat, "muon"),
        **settings,
    )
    for param in flat.values():
        param.grad = param.detach().square()
    optimizer.step()
    return {
        name: [flat[f"{name}/{at}"].detach() for at in range(len(held))]
        for name, held in parts.items()
    }


@pytest.mark.filterwarnings("ignore:labels. these parameters may hold")
@pytest.mark.parametrize("transposed", [False, True])
def test_each_expert_of_a_stack_is_a_matrix_of_its_own(transposed):
    model = held(experts=Experts(transposed))
    labels = default_labels(model)
    assert set(labels.values()) == {"muon"}
    stored = TRANSPOSED_STACK if transposed else STACK
    assert labels.view() == mfx.MatrixView(
        {"*experts.gate_up_proj": stored, "*experts.down_proj": stored}
    )
    wanted = as_matrices(model, {name: list(param) for name, param in model.named_parameters()})
    near(stepped(model), {name: torch.stack(experts) for name, experts in wanted.items()})


def mixture(router: nn.Module, **shapes: tuple[int, ...]) -> nn.Module:
    """Experts, and a router next to them."""
    return held(moe=held(router=router, experts=Holder(**shapes)))


ROUTER = nn.Linear(8, 4)
STACKS_IN_OUT = {
    "with a gate": mixture(ROUTER, w1=(4, 8, 6), w2=(4, 6, 8), w3=(4, 8, 6)),
    "down first": mixture(ROUTER, down=(4, 6, 8), gate=(4, 8, 6), up=(4, 8, 6)),
    "up and down": mixture(ROUTER, w_in=(4, 8, 6), w_out=(4, 6, 8)),
    "fused": mixture(ROUTER, w_in=(4, 8, 12), w_out=(4, 6, 8)),
    "layers": held(
        moe=held(
            router=ROUTER, experts=held(up=Holder(weight=(4, 8, 6)), down=Holder(weight=(4, 6, 8)))
        )
    ),
    "a router in a router": mixture(held(gate=ROUTER), w_in=(4, 8, 6), w_out=(4, 6, 8)),
    "wrapped": held(
        moe=held(router=ROUTER, experts=held(_orig_mod=Holder(w_in=(4, 8, 6), w_out=(4, 6, 8))))
    ),
}
STACKS_OUT_IN = {
    "with a gate": mixture(ROUTER, w1=(4, 6, 8), w2=(4, 8, 6), w3=(4, 6, 8)),
    "up and down": mixture(ROUTER, w_in=(4, 6, 8), w_out=(4, 8, 6)),
    "square": mixture(ROUTER, w_in=(4, 8, 8), w_out=(4, 8, 8)),
    "no router": held(moe=held(experts=Holder(w_in=(4, 8, 6), w_out=(4, 6, 8)))),
    "other routers": held(
        moe=held(a=ROUTER, b=nn.Linear(6, 4), experts=Holder(w_in=(4, 8, 6), w_out=(4, 6, 8)))
    ),
    "one stack": mixture(ROUTER, w_in=(4, 8, 6)),
    "other widths": mixture(ROUTER, w_in=(4, 8, 6), middle=(4, 6, 6), w_out=(4, 6, 8)),
}


@pytest.mark.parametrize("case", STACKS_IN_OUT)
def test_the_router_next_to_stacks_shows_that_they_are_stored_as_in_out(case: str):
    views = default_labels(STACKS_IN_OUT[case]).views
    assert {view.pattern for view in views.values()} == {TRANSPOSED_STACK}


@pytest.mark.parametrize("case", STACKS_OUT_IN)
def test_stacks_are_stored_as_out_in_unless_the_router_shows_otherwise(case: str):
    views = default_labels(STACKS_OUT_IN[case]).views
    assert {view.pattern for view in views.values()} == {STACK}


@pytest.mark.parametrize("lr_scaling", ["match_rms_adamw", "original", "spectral"])
def test_a_transposed_matrix_is_scaled_and_cut_as_the_linear_layer_that_it_is(lr_scaling):
    model = held(c_fc=Conv1D(24, 8))
    for view, rows in (
        (mfx.MatrixView(), 24),
        (mfx.MatrixView({"c_fc.weight": "in (part=3 out) -> part out in"}), 8),
    ):
        parts = [part.T for part in model.c_fc.weight.split(rows, dim=1)]
        wanted = as_matrices(model, {"c_fc.weight": parts}, lr_scaling=lr_scaling)["c_fc.weight"]
        found = stepped(model, view, lr_scaling=lr_scaling)
        near({"c_fc.weight": found["c_fc.weight"]}, {"c_fc.weight": torch.cat(wanted).T})


def test_layers_of_torch_that_hold_several_matrices_are_split():
    model = held(
        attn=nn.MultiheadAttention(8, 2),
        lstm=nn.LSTM(4, 8),
        gru=nn.GRUCell(4, 8),
        grouped=nn.Conv2d(16, 16, 3, groups=4),
        up=nn.ConvTranspose1d(8, 6, 3),
        plain=nn.Conv1d(8, 8, 3),
    )
    four = "(part=4 out) in -> part out in"
    assert {name: view.pattern for name, view in default_labels(model).views.items()} == {
        "attn.in_proj_weight": THREE,
        "lstm.weight_ih_l0": four,
        "lstm.weight_hh_l0": four,
        "gru.weight_ih": THREE,
        "gru.weight_hh": THREE,
        "grouped.weight": "(part=4 out) ... -> part out (...)",
        "up.weight": "in out ... -> out (in ...)",
    }


class Wi(nn.Module):
    """A layer that is known by its class's name and package only."""

    def __init__(self) -> None:
        super().__init__()
        self.Wi = nn.Linear(6, 8)


def _of_package(package: str, name: str) -> nn.Module:
    return type(name, (Wi,), {"__module__": f"{package}.models.some"})()


def test_a_fused_layer_of_a_known_class_is_split_under_fsdp2_as_before_it():
    class FSDPModule:
        """fully_shard makes each module a subclass of this and of its own class, in another package."""

    layer = _of_package("transformers", "ModernBertMLP")
    model = held(mlp=layer)
    before = default_labels(model)
    assert before.views["mlp.Wi.weight"].pattern == "(part=2 out) in -> part out in"
    layer.__class__ = type("FSDPModernBertMLP", (FSDPModule, type(layer)), {})
    after = default_labels(model)
    assert after.views["mlp.Wi.weight"] == before.views["mlp.Wi.weight"]
    assert not default_labels(held(mlp=_of_package("another", "ModernBertMLP"))).views


def test_attributes_of_known_fused_layers_are_looked_up_in_their_own_classes_only():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn = nn.Linear(4, 12)

        @property
        def multi_query(self) -> bool:
            raise RuntimeError("not known before the first batch")

    assert (
        labels(Attention(), [(path("*.weight"), "muon")], default=None)["c_attn.weight"] == "muon"
    )


def test_a_given_pattern_wins_over_a_found_one():
    model = held(experts=Experts(), attn=nn.MultiheadAttention(8, 2))
    found, view = default_labels(model).view, mfx.MatrixView
    stacks = {"*experts.gate_up_proj": STACK, "*experts.down_proj": STACK}
    assert found() == view({**stacks, "*attn.in_proj_weight": THREE})
    assert found(view(STACK)) == view(STACK)
    mine = {"*.gate_up_proj": TRANSPOSED_STACK}
    assert found(view(mine)).pattern == {
        **mine,
        "*experts.down_proj": STACK,
        "*attn.in_proj_weight": THREE,
    }
    heads = {"*in_proj*": "(heads=6 dim) in -> heads dim in"}
    assert found(view(heads)).pattern == {**heads, **stacks}
    orthogonalize = mfx.orthogonalize(view=view(mine))
    tx = mfx.muon_with_adamw(labels=default_labels(model), orthogonalize=orthogonalize).arguments[
        "transforms"
    ]["muon"]
    assert f"'*.gate_up_proj': {TRANSPOSED_STACK!r}, '*experts.down_proj': {STACK!r}" in " ".join(
        repr(tx).split()
    )


def test_labels_without_views_see_each_parameter_as_before():
    model = held(attn=nn.MultiheadAttention(8, 2))
    labels = default_labels(model)
    assert labels.views
    plain = mfx.muon_with_adamw(labels=Labels(labels))
    assert plain.arguments["transforms"]["muon"] == mfx.muon(weight_decay=0.1)
    # The labels themselves are the same value, with views and without.
    transforms = {"muon": mfx.muon(), "adamw": mfx.adamw()}
    assert (
        mfx.partition(transforms, labels).fingerprint
        == mfx.partition(transforms, Labels(labels)).fingerprint
    )


def test_a_parameter_of_three_dims_that_nothing_explains_is_warned_of():
    model = held(odd=Holder(kernels=(4, 40, 64)))
    assert (
        default_labels(model).reason("odd.kernels").endswith(f"; maybe a stack, not split: {STACK}")
    )
    message = (
        r"(?s)'odd.kernels'.*'\*odd.kernels': '\.\.\. out in -> \.\.\. out in'.*More than two dims"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        mfx.Muon(model)
    assert [warning.filename for warning in caught] == [__file__]
    # A convolution is explained, and so is a parameter with a rule of its own.
    mfx.Muon(held(conv=nn.Conv1d(8, 8, 3)))
    assert (
        default_labels(model, [(path("odd.*"), "adamw")])
        .reason("odd.kernels")
        .startswith("user rule")
    )


def test_the_view_for_a_parameter_of_three_dims_changes_no_other_parameter_and_ends_the_warning():
    model = held(
        odd=Holder(weight=(4, 8, 8)), conv=nn.Conv2d(8, 8, 3), attn=nn.MultiheadAttention(8, 2)
    )
    before = default_labels(model)
    with pytest.warns(UserWarning, match="several matrices each") as caught:
        mfx.Muon(model)
    for view in views_of(caught):  # the suggested one, and the one that keeps the parameter whole
        optimizer = mfx.Muon(model, orthogonalize=mfx.orthogonalize(view=view))  # no warning
        after = mfx.describe(optimizer).labels
        assert after.reason("odd.weight") == "hidden matrix (3-D); view of the transform"
        views = after.views
        assert views.pop("odd.weight") == mfx.MatrixView(view.text("odd.weight"))
        assert views == before.views


@pytest.mark.parametrize("experts", [4, 5, 8])
@pytest.mark.parametrize(
    ("first", "first_shape", "second_shape", "suggested"),
    [
        ("w13", (96, 32), (32, 48), "... (part=2 out) in -> ... part out in"),
        ("w13", (32, 96), (48, 32), "... in (part=2 out) -> ... part out in"),
        ("gate_up_proj", (32, 96), (48, 32), "... in (part=2 out) -> ... part out in"),
        ("fc1", (96, 32), (32, 48), "... (part=2 out) in -> ... part out in"),  # by its width
        ("fc1", (32, 96), (48, 32), "... in (part=2 out) -> ... part out in"),
        ("fc1", (48, 32), (32, 48), STACK),  # without a gate
    ],
)
def test_a_stack_in_unknown_code_is_suggested_to_be_split_in_its_rows(
    experts, first, first_shape, second_shape, suggested
):
    second = "down_proj" if first == "gate_up_proj" else "w2"
    block = Holder(**{first: (experts, *first_shape), second: (experts, *second_shape)})
    block.router = nn.Linear(32, experts, bias=False)
    model = held(mlp=block)
    with pytest.warns(UserWarning, match="several matrices each") as caught:
        mfx.Muon(model)
    assert len(caught) == 1
    split, _ = views_of(caught)
    assert split.text(f"mlp.{first}") == suggested
    optimizer = mfx.Muon(model, orthogonalize=mfx.orthogonalize(view=split))  # no warning
    parts = suggested.count("part=2") + 1
    assert f"{parts * experts} of {48} x 32" in str(mfx.describe(optimizer))
    assert f"{experts} of 32 x 48" in str(mfx.describe(optimizer))


@pytest.mark.parametrize(
    ("path", "class_name", "is_stack"),
    [
        ("moe", "Layer", True),
        ("shared_experts", "Layer", True),
        ("mlp", "GroupedExperts", True),
        ("mlp", "Layer", False),
    ],
)
def test_a_stack_is_of_experts_by_its_name_or_its_class(path, class_name, is_stack):
    layer = type(class_name, (Holder,), {})(w1=(4, 8, 16))
    reason = default_labels(held(**{path: layer})).reason(f"{path}.w1")
    assert ("stack of 4 matrices" in reason) is is_stack


def test_matrices_in_the_first_dim_of_a_fused_parameter_are_not_split_again():
    with pytest.warns(UserWarning, match="several matrices each") as caught:
        mfx.Muon(held(attn=Holder(qkv=(3, 24, 8))))
    assert views_of(caught)[0].text("attn.qkv") == STACK


@pytest.mark.filterwarnings("ignore:labels. these parameters may hold")
def test_a_partition_that_does_not_use_the_views_of_its_labels_is_warned_of():
    model = held(experts=Experts(), fc=nn.Linear(8, 8))
    params = {name: param.detach() for name, param in model.named_parameters()}
    labels = default_labels(model)
    with pytest.warns(
        UserWarning,
        match=r"'experts.gate_up_proj' \(hidden .* stack of 4 matrices.*Give the transform view=labels.view",
    ):
        mfx.partition({"muon": mfx.muon(), "adamw": mfx.adamw()}, labels).init(params)
    with pytest.warns(UserWarning, match="the labels have a view"):
        mfx.muon_with_adamw(labels=default_labels_by_name).init(params)
    for muon, chosen in (
        (mfx.muon(orthogonalize=mfx.orthogonalize(view=labels.view())), labels),
        (mfx.muon(), Labels(labels)),
        (mfx.lion(), labels),
    ):
        mfx.partition({"muon": muon, "adamw": mfx.adamw()}, chosen).init(params)


@pytest.mark.filterwarnings("error", "ignore:default_labels. found no output head")
def test_an_optimizer_of_one_parameter_does_not_warn_of_the_views_of_the_others():
    model = held(experts=Experts(), attn=nn.MultiheadAttention(8, 2), fc=nn.Linear(8, 8))
    labels = default_labels(model)
    for view in (
        labels.view(),
        labels.view(labels.view()),
        pickle.loads(pickle.dumps(labels.view())),
    ):
        tx = mfx.muon(0.1, orthogonalize=mfx.orthogonalize(view=view))
        for name in labels.views:
            mfx.TransformOptimizer([(name, model.get_parameter(name))], tx)
    # A glob that the user has written is still compared with the parameters.
    view = labels.view(mfx.MatrixView({"*.qvk": THREE}))
    tx = mfx.muon(0.1, orthogonalize=mfx.orthogonalize(view=view))
    with pytest.warns(UserWarning, match=r"'\*\.qvk' matches none of the 1 parameters"):
        mfx.TransformOptimizer([("fc.weight", model.get_parameter("fc.weight"))], tx)


@pytest.mark.skipif(
    torch.__version__ < "2.11",
    reason="the compiler of torch 2.10 cannot trace the default of a field",
)
@pytest.mark.filterwarnings("ignore:labels. these parameters may hold")
def test_labels_that_a_function_of_names_makes_are_the_same_while_compiling():
    params = {
        "h.up.weight": torch.ones(4, 4),
        "h.attn.c_attn.weight": torch.ones(12, 4),
        "encoder.conv1.w": torch.ones(4, 4, 3),
    }
    tx = mfx.muon_with_adamw(
        0.1, orthogonalize=mfx.orthogonalize(dtype=torch.float32), labels=default_labels_by_name
    )
    state = tx.init(params)
    step = torch.compile(
        lambda tx: tx.update(params, state, params)[0], fullgraph=True, backend="eager"
    )
    wanted = tx.update(params, state, params)[0]
    for name, update in step(tx.replace()).items():  # one that has met no parameters
        torch.testing.assert_close(update, wanted[name])


def test_the_report_says_which_matrices_there_are_and_how_they_are_stored():
    model = held(experts=Experts(True), up=nn.Linear(8, 8))
    lines = str(mfx.describe(model)).splitlines()
    assert lines[0].split() == ["parameter", "shape", "label", "matrices", "stored", "rule"]
    assert (
        "4 x 8 x 12  muon   4 of 12 x 8  in, out  hidden matrix (3-D); stack of 4 matrices; maybe fused, not split"
        in lines[1]
    )
    assert "4 of 8 x 6   in, out  hidden matrix (3-D); stack of 4 matrices" in lines[2]
    assert "8 x 8       muon   8 x 8        out, in  hidden matrix (2-D)" in lines[3]


@pytest.mark.filterwarnings(
    "ignore:partition. the labels have a view", "ignore:labels. these parameters may hold"
)
def test_the_report_of_an_optimizer_shows_the_matrices_of_its_transform():
    model = held(experts=Experts(True), up=nn.Linear(8, 8))
    labels = default_labels(model)
    chains = {
        "4 of 12 x 8": mfx.muon(orthogonalize=mfx.orthogonalize(view=labels.view())),
        "4 x 96": mfx.muon(),  # flattened
        None: mfx.lion(),  # which has no matrices
    }
    for matrices, tx in chains.items():
        tx = mfx.partition({"muon": tx, "adamw": mfx.adamw()}, labels)
        header, gate_up = str(mfx.describe(mfx.TransformOptimizer(model, tx))).splitlines()[:2]
        assert ("matrices" in header) == (matrices is not None)
        assert ("the transform has no view for it" in gate_up) == (matrices == "4 x 96")
        if matrices is not None:
            assert f"4 x 8 x 12  muon   {matrices} " in gate_up


names = st.lists(
    st.sampled_from(["h", "0", "1", "2", "attn", "fc", "weight", "[x]"]), min_size=1, max_size=5
).map(".".join)


@given(st.dictionaries(names, st.sampled_from([1, 2, None]), max_size=12))
def test_patterns_give_each_name_its_value_and_nothing_to_the_others(wanted):
    valued = {name: value for name, value in wanted.items() if value is not None}
    found = patterns(valued, wanted)
    for name, value in wanted.items():
        assert next((v for pattern, v in found.items() if matches(name, pattern)), None) == value
    # Every pattern does something, so that none is warned of.
    taken = set()
    for pattern in found:
        mine = {name for name in wanted if matches(name, pattern)}
        assert not mine <= taken
        taken |= mine


def test_patterns_are_few_and_hold_under_a_wrapper():
    layers = {f"h.{at}.attn.c_attn.weight": 3 for at in range(40)}
    assert patterns(layers, [f"h.{at}.mlp.c_fc.weight" for at in range(40)]) == {
        "*.c_attn.weight": 3
    }
    stages = {f"stages.{at}.layers.{n}.conv.weight": at for at in (1, 2) for n in range(3)}
    assert patterns(stages, []) == {f"*stages.{at}.layers.*.conv.weight": at for at in (1, 2)}


class Block(nn.Module):
    """Layers of unknown code, with names that are fused nearly everywhere."""

    def __init__(self, **rows: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, count in rows.items():
            setattr(self, name, nn.Linear(4, count, bias=False))
        self.proj = nn.Linear(4, 4, bias=False)


def views_of(caught) -> tuple[mfx.MatrixView, mfx.MatrixView]:
    """The views in a warning of fused matrices: the one that splits them, and the one that keeps them whole."""
    (said,) = [str(one.message) for one in caught if "several matrices each" in str(one.message)]
    _, split, *_, whole = said.splitlines()
    view = eval(f"dict({split})", {"muonfx": mfx})["orthogonalize"].arguments["view"]
    return view, mfx.MatrixView(eval(whole))


@pytest.mark.parametrize(
    ("name", "parts"), [("c_attn", 3), ("Wqkv", 3), ("gate_up_proj", 2), ("kv_proj", 2)]
)
def test_a_fused_matrix_of_unknown_code_is_warned_of_once_with_the_line_that_splits_it(name, parts):
    model = nn.ModuleList([Block(**{name: 12}), Block(**{name: 12})])
    with pytest.warns(
        UserWarning, match=rf"'0\.{name}\.weight', '1\.{name}\.weight'\. If their parts"
    ) as caught:
        mfx.Muon(model)
    split, whole = views_of(caught)
    pieces = {n: [*p.chunk(parts)] if name in n else [p] for n, p in model.named_parameters()}
    wanted = as_matrices(model, pieces)
    # No warning.
    near(stepped(model, split), {key: torch.cat(rows) for key, rows in wanted.items()})
    plain = as_matrices(model, {n: [p] for n, p in model.named_parameters()})
    near(stepped(model, whole), {key: matrix for key, (matrix,) in plain.items()})


def stacks(**shapes: tuple[int, ...]) -> nn.Module:
    return held(embed=nn.Embedding(9, 8), experts=Holder(**shapes), head=nn.Linear(8, 9))


IN_OUT = {"up": (4, 8, 12), "down": (4, 6, 8)}
FUSED_STACKS: dict[str, tuple[nn.Module, str, str]] = {
    "fc1, as in Megatron": (
        stacks(fc1=(4, 12, 8), fc2=(4, 8, 6)),
        "experts.fc1",
        "... (part=2 out) in",
    ),
    "fewer inner features": (
        stacks(wi=(4, 8, 10), wo=(4, 10, 4)),
        "experts.wi",
        "... (part=2 out) in",
    ),
    "three parts": (stacks(mix=(4, 24, 8), out=(4, 8, 8)), "experts.mix", "... (part=3 out) in"),
    "with biases between": (
        stacks(fc1=(4, 12, 8), bias1=(4, 12), fc2=(4, 8, 6), bias2=(4, 8)),
        "experts.fc1",
        "... (part=2 out) in",
    ),
    "stored (in, out)": (stacks(**IN_OUT), "experts.up", "... in (part=2 out)"),
    "layers": (
        held(experts=held(fc1=Holder(weight=(4, 12, 8)), fc2=Holder(weight=(4, 8, 6)))),
        "experts.fc1.weight",
        "... (part=2 out) in",
    ),
}


@pytest.mark.parametrize("case", FUSED_STACKS)
def test_a_fused_stack_is_warned_of_by_the_widths_of_the_stack_beside_it(case: str):
    model, name, stored = FUSED_STACKS[case]
    labels = default_labels(model)
    suspected = [name for name in labels if labels.routes[name].suggested is not None]
    assert suspected == [name]
    assert f"{stored} -> ... part out in" in labels.reason(name)
    with pytest.warns(UserWarning, match="several matrices each") as caught:
        mfx.Muon(model)
    split, whole = views_of(caught)
    assert split.text(name) == f"{stored} -> ... part out in"
    # Each view fits, is the only one needed, and makes the matrices that it names.
    param = dict(model.named_parameters())[name].detach()
    dim = -2 if stored.endswith("in") else -1
    count = int(stored[stored.index("=") + 1])
    parts = [part.mT if dim == -1 else part for part in param.chunk(count, dim)]
    wanted = as_matrices(model, {name: [matrix for part in parts for matrix in part]})[name]
    found = [
        part.mT if dim == -1 else part for part in stepped(model, split)[name].chunk(count, dim)
    ]
    near(
        {"all": torch.stack([matrix for part in found for matrix in part])},
        {"all": torch.stack(wanted)},
    )
    near(
        {"all": stepped(model, whole)[name]},
        {"all": torch.stack(as_matrices(model, {name: [*param]})[name])},
    )


WHOLE_STACKS = {
    "gate, up and down": {"w1": (4, 12, 8), "w2": (4, 8, 12), "w3": (4, 12, 8)},
    "up and down": {"up": (4, 32, 8), "down": (4, 8, 32)},
    "stored (in, out)": {"up": (4, 8, 32), "down": (4, 32, 8)},
    "a layer between": {"first": (4, 12, 8), "middle": (4, 6, 12), "last": (4, 8, 6)},
    "another number of experts": {"fc1": (4, 12, 8), "fc2": (5, 8, 6)},
    "low rank": {"a": (4, 2, 8), "b": (4, 8, 2)},
    "square": {"first": (4, 8, 8), "second": (4, 8, 8)},
}


@pytest.mark.parametrize("case", WHOLE_STACKS)
def test_stacks_that_are_read_as_a_whole_are_not_warned_of(case: str):
    mfx.Muon(stacks(**WHOLE_STACKS[case]))  # a warning is an error here


@pytest.mark.parametrize(
    ("name", "rows", "pattern"),
    [
        ("qkv", 16, "(q=<rows> + k=<rows> + v=<rows>) in -> q in, k in, v in"),
        ("kv_proj", 7, "(k=<rows> + v=<rows>) in -> k in, v in"),
        ("gate_up_proj", 7, "(a=<rows> + b=<rows>) in -> a in, b in"),
    ],
)
def test_rows_that_do_not_divide_are_split_by_sizes_of_the_user(name: str, rows: int, pattern: str):
    """With fewer keys than queries, the number of rows need not be a multiple of three."""
    model = nn.ModuleList([Block(**{name: rows})])
    reason = default_labels(model).reason(f"0.{name}.weight")
    with pytest.warns(UserWarning, match="several matrices each") as caught:
        mfx.Muon(model)
    (warning,) = [str(one.message) for one in caught]
    assert "Replace each <rows> by the number of rows of that part" in warning
    assert reason.endswith(f"maybe fused, not split: {pattern}")
    sizes = [rows - pattern.count("<") + 1] + [1] * (pattern.count("<") - 1)
    (line,) = [line.strip() for line in warning.splitlines() if pattern in line]
    with pytest.raises(ValueError, match="<rows>"):  # unedited, the line raises at once
        eval(f"dict({line})", {"muonfx": mfx})
    for size in sizes:
        line = line.replace("<rows>", str(size), 1)
    view = eval(f"dict({line})", {"muonfx": mfx})["orthogonalize"].arguments["view"]
    found = stepped(model, view)  # no warning
    wanted = as_matrices(
        model, {f"0.{name}.weight": [*model.get_parameter(f"0.{name}.weight").split(sizes)]}
    )
    near({"rows": found[f"0.{name}.weight"]}, {"rows": torch.cat(wanted[f"0.{name}.weight"])})
    whole = mfx.MatrixView(eval(warning.splitlines()[-1]))
    mfx.Muon(model, orthogonalize=mfx.orthogonalize(view=whole))  # no warning


def test_a_transposed_matrix_of_unknown_code_is_kept_whole_as_it_is_stored():
    model = held(attn=held(c_attn=Conv1D(12, 4), c_proj=Conv1D(4, 4)))
    with pytest.warns(UserWarning, match="several matrices each") as caught:
        before = mfx.describe(mfx.Muon(model))
    split, whole = views_of(caught)
    assert split.text("attn.c_attn.weight") == "in (part=3 out) -> part out in"
    assert whole.text("attn.c_attn.weight") == "in whole -> whole in"
    after = mfx.describe(mfx.Muon(model, orthogonalize=mfx.orthogonalize(view=whole)))  # no warning
    assert "attn.c_attn.weight  4 x 12  muon   12 x 4" in str(before)
    assert "attn.c_attn.weight  4 x 12  muon   12 x 4" in str(after)


def test_the_line_that_splits_a_parameter_of_three_dims_fits_it():
    model = held(odd=Holder(qkv=(4, 12, 5)))
    with pytest.warns(UserWarning, match="several matrices each") as caught:
        mfx.Muon(model)
    split, whole = views_of(caught)
    found, together = stepped(model, split), stepped(model, whole)
    parts = [part for matrix in model.odd.qkv for part in matrix.chunk(3)]
    wanted = as_matrices(model, {"odd.qkv": parts})["odd.qkv"]
    near({"odd.qkv": found["odd.qkv"]}, {"odd.qkv": torch.cat(wanted).reshape(4, 12, 5)})
    wanted = as_matrices(model, {"odd.qkv": [model.odd.qkv.flatten(1)]})["odd.qkv"][0]
    near({"odd.qkv": together["odd.qkv"]}, {"odd.qkv": wanted.reshape(4, 12, 5)})


def test_the_line_that_splits_keeps_what_was_given_and_what_was_found():
    model = nn.ModuleList(
        [Block(qkv=12, other=8), held(experts=Experts(True), attn=nn.MultiheadAttention(8, 2))]
    )
    given = {"*.other.weight": "(part=2 out) in -> part out in"}
    with pytest.warns(UserWarning, match="several matrices each") as caught:
        mfx.Muon(model, orthogonalize=mfx.orthogonalize(view=mfx.MatrixView(given)))
    split, _ = views_of(caught)
    labels = default_labels(model)
    before = labels.view(mfx.MatrixView(given))
    mfx.Muon(model, orthogonalize=mfx.orthogonalize(view=split))
    suspected = {
        "0.qkv.weight": THREE,
        "1.experts.gate_up_proj": "... in (part=2 out) -> ... part out in",
    }
    for name in labels:
        assert split.text(name) == suspected.get(name, before.text(name))


def test_every_way_to_a_fused_matrix_warns_and_every_view_silences_it():
    model = nn.ModuleList([Block(qkv=12)])
    params = {name: param.detach() for name, param in model.named_parameters()}
    labels = default_labels(model)
    ways = [
        lambda **given: mfx.Muon(model, **given),
        lambda **given: mfx.Muon(model.named_parameters(), labels=default_labels_by_name, **given),
        lambda **given: mfx.muon_with_adamw(labels=labels, **given).init(params),
        lambda **given: mfx.partition({"muon": mfx.muon(**given)}, labels).init(params),
        lambda **given: mfx.TransformOptimizer(
            model, mfx.partition({"muon": mfx.normuon(**given)}, labels)
        ),
    ]
    for way in ways:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="partition: no parameter")
            with pytest.warns(UserWarning, match="may hold several matrices each"):
                way()
            for pattern in (
                {"*.qkv.*": THREE},
                "out in -> out in",
                "(part=4 out) in -> part out in",
            ):
                way(orthogonalize=mfx.orthogonalize(view=mfx.MatrixView(pattern)))


def test_transforms_of_several_views_have_a_warning_each_with_their_own_patterns():
    model = nn.ModuleList([Block(qkv=12, other=8), Block(qkv=12, other=8)])
    labels = default_labels(model, [(mfx.routing.path("1.*"), "second")])
    patterns = ["(part=2 out) in -> part out in", "(part=4 out) in -> part out in"]
    first, second = (
        mfx.orthogonalize(view=mfx.MatrixView({"*.other.weight": pattern})) for pattern in patterns
    )
    params = {name: param.detach() for name, param in model.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mfx.partition({"muon": first, "second": second}, labels).init(params)
    for name, pattern, warning in zip(
        ("0.qkv.weight", "1.qkv.weight"), patterns, caught, strict=True
    ):
        split, _ = views_of([warning])
        assert split.text(name) == THREE
        assert split.text(name.replace("qkv", "other")) == pattern


def test_a_name_that_means_one_matrix_is_not_warned_of():
    one_matrix = ("q_proj", "kv_b_proj", "rwkv", "gate_proj", "qkvo_norm", "up_proj", "w1", "w2")
    mfx.Muon(nn.ModuleList([Block(**dict.fromkeys(one_matrix, 12))]))


def test_parts_that_are_interleaved_by_head_are_split_if_the_module_gives_the_number_of_heads():
    known = _of_package("transformers", "BloomAttention")
    known.query_key_value = nn.Linear(6, 12, bias=False)
    known.num_heads = 2
    model = held(attn=known)
    labels = default_labels(model)
    assert (
        labels.views["attn.query_key_value.weight"].pattern
        == "(heads=2 part=3 dim) in -> part (heads dim) in"
    )
    weight = known.query_key_value.weight.detach().unflatten(0, (2, 3, 2))
    parts = {n: [p] for n, p in model.named_parameters() if not n.endswith("bias")}
    parts["attn.query_key_value.weight"] = [weight[:, at].flatten(0, 1) for at in range(3)]
    wanted = as_matrices(model, parts)["attn.query_key_value.weight"]
    found = stepped(model)["attn.query_key_value.weight"].detach().unflatten(0, (2, 3, 2))
    for at in range(3):
        torch.testing.assert_close(found[:, at].flatten(0, 1), wanted[at], rtol=1e-4, atol=1e-5)
    del known.num_heads
    assert "of sizes that do not fit 12 rows: not split" in default_labels(model).reason(
        "attn.query_key_value.weight"
    )


def test_a_fused_layer_of_torchtitan_is_split_by_groups_of_heads():
    layer = _of_package("torchtitan", "FusedQKVLinear")
    layer.wqkv = nn.Linear(6, 24, bias=False)
    layer.heads_per_kv, layer.head_dim = 2, 3
    split = default_labels(held(qkv=layer)).views["qkv.wqkv.weight"].pattern
    results = [f"(groups {part} dim) in" for part in ("query", "key", "value")]
    assert split == f"(groups (query=2 + key=1 + value=1) dim=3) in -> {', '.join(results)}"
    mfx.Muon(held(qkv=layer))  # without a warning
    assert "12 x 6 + 6 x 6 + 6 x 6" in str(mfx.describe(held(qkv=layer)))


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))


def params_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in module.named_parameters()}


def stacked() -> dict[str, torch.Tensor]:
    return {
        name: param.detach()
        for name, param in stack_module_state([model(0), model(1), model(2)])[0].items()
    }


def recipe(**options) -> mfx.Transform:
    orthogonalize = mfx.orthogonalize(dtype=torch.float32, **options)
    return mfx.muon_with_adamw(0.1, orthogonalize=orthogonalize, labels=default_labels(model()))


RULES = [(path("*.weight"), "muon")]
MATRIXWISE = {
    "recipe": lambda chosen: mfx.muon_with_adamw(0.1, labels=chosen),
    "orthogonalize": lambda chosen: mfx.partition(
        {"muon": mfx.orthogonalize(), "adamw": mfx.identity()}, chosen
    ),
    "in a chain": lambda chosen: mfx.chain(
        mfx.clip_by_global_norm(1.0), mfx.muon_with_adamw(labels=chosen)
    ),
    "a view of others": lambda chosen: mfx.muon_with_adamw(
        labels=chosen, orthogonalize=mfx.orthogonalize(view=mfx.MatrixView({"another.*": STACK}))
    ),
    "by leaf": lambda chosen: mfx.partition(
        {"muon": mfx.contrib.normalize_leaves(), "adamw": mfx.identity()}, chosen
    ),
    "dion": lambda chosen: mfx.partition(
        {"muon": variants.dion(0.1), "adamw": mfx.adamw()}, chosen
    ),
}


@pytest.mark.parametrize("made", MATRIXWISE.values(), ids=MATRIXWISE)
@pytest.mark.filterwarnings("ignore:view. 'another")
def test_a_stack_of_models_is_refused_where_labels_of_one_model_would_flatten_it(made):
    params, tx = stacked(), made(default_labels(model()))
    said = r"'0.weight' has shape \(3, 6, 4\), expected \(6, 4\), .* label 'muon' was chosen.*vmap.*MatrixView"
    with pytest.raises(ValueError, match=said):
        tx.init(params)
    with pytest.raises(ValueError, match=said):
        tx.update(params, vmap(tx.init)(params), params)
    with pytest.raises(ValueError, match=said):
        mfx.placement.placed(tx, params)
    with pytest.raises(ValueError, match=said):
        mfx.TransformOptimizer({name: nn.Parameter(param) for name, param in params.items()}, tx)


@pytest.mark.parametrize("wrapped", [False, True])
def test_each_model_of_a_stack_is_updated_as_alone_by_both_ways_that_the_error_shows(wrapped):
    params, name = stacked(), "module._orig_mod." if wrapped else ""
    params = {name + key: param for key, param in params.items()}
    tx = recipe()
    with pytest.raises(ValueError, match="vmap"):
        tx.init(params)
    got = vmap(tx.update)(params, vmap(tx.init)(params), params)[0]
    together = recipe(view=mfx.MatrixView({"*": STACK}))
    whole = together.update(params, together.init(params), params)[0]
    for at in range(3):
        one = {key: param[at] for key, param in params.items()}
        alone = tx.update(one, tx.init(one), one)[0]
        for found in (got, whole):
            near({key: updates[at] for key, updates in found.items()}, alone)


@given(st.lists(st.integers(1, 3), max_size=2), st.sampled_from(["muon", "adamw"]))
def test_only_a_tensor_with_more_dims_that_would_be_flattened_is_refused(front, label):
    shape = (*front, 2, 3)
    chosen = Labels({"w": Route(label, shape=(2, 3))})
    tx = mfx.partition({label: mfx.muon() if label == "muon" else mfx.adamw()}, chosen)
    if front and label == "muon":
        with pytest.raises(ValueError, match="the shape when its label 'muon' was chosen"):
            tx.init({"w": torch.zeros(shape)})
    else:
        tx.init({"w": torch.zeros(shape)})
    # labels that remember no shape, those of these very parameters, and wider ones of the same dims
    for others in (
        Labels(chosen),
        Labels({"w": Route(label, shape=shape)}),
        Labels({"w": Route(label, shape=(9,) * len(shape))}),
    ):
        tx.replace(labels=others).init({"w": torch.zeros(shape)})


@pytest.mark.parametrize(
    "conv",
    [nn.Conv2d(16, 16, 3, groups=4), nn.ConvTranspose2d(16, 16, 3)],
    ids=["groups", "transposed"],
)
def test_a_stack_of_convolutions_is_refused_though_its_pattern_fits_more_dims(conv: nn.Module):
    labels = default_labels(held(body=conv))
    stack = {
        f"body.{name}": torch.zeros(3, *param.shape) for name, param in conv.named_parameters()
    }
    with pytest.raises(ValueError, match=r"'body.weight' has shape \(3, 16, .*one matrix"):
        mfx.muon_with_adamw(labels=labels).init(stack)


class XLNetRelativeAttention(nn.Module):
    """A layer with the name of one of transformers, whose weight has the dims (in, heads, dim), and another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.randn(4, 4))


@pytest.mark.parametrize(
    "action", [mfx.Muon, lambda model: str(mfx.describe(model))], ids=["Muon", "describe"]
)
def test_a_shape_that_does_not_fit_the_storage_of_its_layer_is_reported_with_the_name(action: Any):
    with pytest.raises(ValueError, match=r"'body.q' has shape \(4, 4\).*expected 3"):
        action(held(body=XLNetRelativeAttention(), head=nn.Linear(4, 4)))


def test_labels_remember_the_shapes_that_they_were_chosen_for():
    module = model()
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
    for chosen in (
        default_labels(module),
        default_labels_by_name(params_of(module)),
        labels(module, RULES, "adamw"),
        pickle.loads(pickle.dumps(default_labels(module))),
    ):
        assert {name: route.shape for name, route in chosen.routes.items()} == shapes
    some = default_labels(module).restrict(["0.bias"])
    assert (list(some), some.routes["0.bias"].shape) == (["0.bias"], (6,))


def test_a_compiled_layer_alone_has_the_labels_of_the_layer():
    layer = nn.Linear(8, 8, bias=False)
    rules = [(path("*weight"), "muon")]
    chosen = default_labels(torch.compile(layer), rules)
    assert chosen.routes["_orig_mod.weight"] == default_labels(layer, rules).routes["weight"]


@pytest.mark.parametrize("required", [True, False])
def test_a_group_without_globs_is_reported(required: bool):
    pattern = NamePatterns("view", ((),), required=required)
    reported = (
        pytest.raises(ValueError, match="matches none")
        if required
        else pytest.warns(match="matches none")
    )
    with reported:
        warn_of_unmatched([pattern], {"w": torch.ones(2)})
