"""Attention logits are those of the whole matrix; QK-clip scales each head by its own factor, and finds its weights."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import muonfx as mfx
from muonfx.internal.tracing import is_wrapped
from muonfx.transforms import attention
from tests.processes import Here, on_ranks


def whole_matrix(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The same by the matrix of all logits."""
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    takes_part = torch.ones(logits.shape[-2:], dtype=torch.bool)
    if is_causal:
        takes_part = takes_part.tril()
    if mask is not None:
        takes_part = takes_part & (mask if mask.dtype == torch.bool else mask > -9000)
    return logits.masked_fill(~takes_part, -math.inf).movedim(-3, 0).flatten(1).amax(1)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    batch = draw(st.sampled_from(((), (2,), (1,))))
    keys, group, queries, length, features = (draw(st.integers(1, 4)) for _ in range(5))
    q = torch.randn(*batch, keys * group, queries, features, generator=random, dtype=torch.float64)
    k = torch.randn(*batch, keys, length, features, generator=random, dtype=torch.float64)
    kind = draw(st.sampled_from(("none", "bool", "added", "least", "one row")))
    shape = (1, length) if kind == "one row" else (queries, length)
    keeps = torch.rand(shape, generator=random) > 0.4
    numbers = torch.randn(shape, generator=random, dtype=torch.float64)
    least = draw(st.sampled_from((-1e4, -9984.0, -65504.0, -1e9, torch.finfo(torch.float64).min)))
    least = least if kind == "least" else -math.inf
    mask = (
        None
        if kind == "none"
        else keeps
        if kind in ("bool", "one row")
        else numbers.masked_fill(~keeps, least)
    )
    return {
        "query": q,
        "key": k,
        "attn_mask": mask,
        "is_causal": draw(st.booleans()),
        "scale": draw(st.sampled_from((None, 0.5, 2.0))),
        "enable_gqa": group > 1,
        "chunk": draw(st.sampled_from((1, 7, 1 << 20))),
    }


@given(calls())
def test_the_largest_logits_are_those_of_the_whole_matrix(call: dict[str, Any]):
    found = attention.max_logits(**call)
    q, k, mask, _ = (call.pop(name) for name in ("query", "key", "attn_mask", "chunk"))
    torch.testing.assert_close(found, whole_matrix(q, k, mask, **call), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 4)])
def test_the_largest_of_no_logits_is_minus_infinity(shape: tuple[int, ...]):
    assert attention.max_logits(torch.ones(shape), torch.ones(shape)).tolist() == [-math.inf] * 2


def test_a_mask_of_minus_9000_excludes_a_pair():
    query, key = torch.ones(1, 1, 1), torch.tensor([[[5.0], [1.0]]])
    for number, largest in ((-9000.0, 1.0), (-8999.0, 5.0)):
        assert attention.max_logits(query, key, torch.tensor([[number, 0.0]])).item() == largest


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_logits_beyond_the_range_of_fp16_are_finite(dtype: torch.dtype):
    x = torch.full((1, 1, 2, 4), 300.0)
    with torch.autocast("cpu", torch.float16, enabled=dtype == torch.float32):
        assert attention.max_logits(x.to(dtype), x.to(dtype)).item() == 180_000.0


class Attention(nn.Module):
    def __init__(self, how: str = "torch") -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner, self.how = nn.Identity(), how

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.inner(x)
        return self.q_proj(x).unflatten(-1, (2, 2)).transpose(1, 2), self.k_proj(x).unflatten(
            -1, (2, 2)
        ).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.heads(x)
        if self.how == "torch":
            return (
                F.scaled_dot_product_attention(q, k, q, is_causal=True).transpose(1, 2).flatten(-2)
            )
        attention.record_max_logits(attention.max_logits(q, k))
        return ((q @ k.mT).softmax(-1) @ q).transpose(1, 2).flatten(-2)


class Block(nn.Module):
    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.attn, self.other, self.recomputes = Attention(), Attention("own"), recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = x + (checkpoint(self.attn, x, use_reentrant=False) if self.recomputes else self.attn(x))
        return x + self.other(x)


def expected(model: Block, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        first = attention.max_logits(*model.attn.heads(x), is_causal=True)
        return {"attn": first, "other": attention.max_logits(*model.other.heads(x + model.attn(x)))}


@pytest.mark.parametrize("way", ["plain", "no_grad", "recomputed", "functional", "grad"])
def test_logits_are_collected_by_module_over_micro_batches(way: str):
    model = Block(recomputes=way == "recomputed")
    params = dict(model.named_parameters())
    batches = [torch.randn(3, 5, 4) for _ in range(2)]

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    grads: Any = None
    with attention.collect_max_logits(model) as logits:
        for x in batches:
            if way == "grad":
                grads = torch.func.grad(loss)(
                    {name: leaf.detach() for name, leaf in params.items()}, x
                )
            elif way == "functional":
                loss(params, x).backward()
            elif way == "no_grad":
                with torch.no_grad():
                    model(x)
            else:
                model(x).square().sum().backward()
    assert set(logits) == {"attn", "other"}
    for name, found in logits.items():
        wanted = torch.maximum(*(expected(model, x)[name] for x in batches))
        torch.testing.assert_close(found, wanted)
        assert not found.requires_grad
        assert not is_wrapped(found)
    if way == "grad":
        plain = torch.func.grad(loss)(
            {name: leaf.detach() for name, leaf in params.items()}, batches[-1]
        )
        assert all(torch.equal(plain[name], grads[name]) for name in plain)
    # Nothing is left behind: no hook, and no number of a pass outside.
    before = {name: own.clone() for name, own in logits.items()}
    model(10 * batches[0])
    assert all(torch.equal(before[name], logits[name]) for name in before)
    assert not any(own._forward_hooks or own._forward_pre_hooks for own in model.modules())


def test_modules_are_chosen_by_name():
    model = nn.ModuleDict({"layer": Block()})
    with attention.collect_max_logits(model, "*.attn") as logits:
        model["layer"](torch.randn(1, 3, 4))
    assert set(logits) == {"layer.attn"}
    with attention.collect_max_logits(model, "layer") as logits:
        model["layer"](torch.randn(1, 3, 4))
    assert set(logits) == {"layer"}
    with pytest.raises(ValueError, match=r"'\*\.atn' matches none of the modules '', 'layer'"):
        attention.collect_max_logits(model, "*.atn").__enter__()


def test_names_have_no_wrappers():
    model = Block()
    for wrapped in (nn.DataParallel(model), nn.ModuleDict({"_checkpoint_wrapped_module": model})):
        with attention.collect_max_logits(wrapped) as logits:
            model(torch.randn(1, 3, 4))
        assert set(logits) == {"attn", "other"}


def test_an_error_in_a_forward_pass_closes_its_modules():
    model = Block()
    with attention.collect_max_logits(model) as logits:
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 3, 5))
        F.scaled_dot_product_attention(*[torch.ones(1, 2, 3, 4)] * 3)
    assert logits == {}


def test_attention_of_another_number_of_heads_in_one_module_is_an_error():
    class Pooled(Attention):
        def forward(self, x: Tensor) -> Tensor:
            attention.record_max_logits(torch.ones(1))
            return super().forward(x)

    model = Pooled()
    with (
        attention.collect_max_logits(model),
        pytest.raises(ValueError, match=r"'' computes .* with 1 heads and with 2"),
    ):
        model(torch.ones(1, 3, 4))


def test_ranks_of_tensor_parallelism_leave_room_for_the_others_heads():
    model = Attention()
    with attention.collect_max_logits(model, tensor_parallel=(1, 3)) as logits:
        model(torch.randn(1, 3, 4))
    assert logits[""].isfinite().tolist() == [False, False, True, True, False, False]
    with pytest.raises(ValueError, match=r"tensor_parallel must be \(rank, size\)"):
        attention.collect_max_logits(model, tensor_parallel=(3, 3)).__enter__()


def _with_compiled(name: str) -> nn.Module:
    """Return a model with the modules "block.attn.inner" and "block.mlp", of which the named one is compiled."""
    attn = Attention()
    attn.inner = nn.Linear(4, 4)
    model = nn.Sequential(
        OrderedDict(block=nn.Sequential(OrderedDict(attn=attn, mlp=nn.Linear(4, 4))))
    )
    model.get_submodule(name).compile(backend="eager")
    return model


@pytest.mark.parametrize("name", ["", "block", "block.attn", "block.attn.inner"])
def test_compiled_attention_is_an_error(name: str):
    with pytest.raises(
        ValueError,
        match=rf"'{name or 'the model'}' is compiled.*return muonfx.attention.max_logits",
    ):
        attention.collect_max_logits(_with_compiled(name), "*.attn").__enter__()


# Torch hides this warning of its compiler, unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_modules_apart_from_the_observed_ones_are_allowed():
    x = torch.randn(1, 3, 4)
    model = _with_compiled("block.mlp")
    with attention.collect_max_logits(model, "*.attn") as logits:
        model(x)
    with attention.collect_max_logits(model.get_submodule("block.attn")) as expected:
        model.get_submodule("block.attn")(x)
    assert torch.equal(logits["block.attn"], expected[""])
    with pytest.raises(ValueError, match=r"'block.mlp' is compiled"):  # every module is observed
        attention.collect_max_logits(model).__enter__()


def test_max_logits_compile_in_one_graph():
    q = torch.randn(2, 3, 5, 4)
    compiled = torch.compile(attention.max_logits, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, q, is_causal=True), attention.max_logits(q, q, is_causal=True))


def test_what_cannot_be_seen_is_said():
    model = nn.ModuleDict({"attn": torch.compile(Attention(), backend="eager")})
    with pytest.raises(
        ValueError, match=r"'attn' is compiled.*return muonfx\.attention\.max_logits"
    ):
        attention.collect_max_logits(model).__enter__()
    with pytest.raises(
        ValueError, match=r"key has 2 heads, expected 4 as in query.*enable_gqa=True"
    ):
        attention.max_logits(torch.ones(4, 3, 4), torch.ones(2, 3, 4))
    with pytest.raises(NotImplementedError, match=r"batched by torch.func.vmap"):
        torch.func.vmap(lambda x: attention.max_logits(x, x))(torch.ones(2, 2, 3, 4))
    with pytest.raises(
        ValueError, match=r"found a tensor of shape \(2, 3\), expected shape \(heads,\)"
    ):
        attention.record_max_logits(torch.ones(2, 3))


# ------------------------------------------------------------------------------------------------------- QK-clip

TAU = 100.0


@dataclass(frozen=True)
class Shape:
    """Attention weights of one kind: which parameters there are, and the rows of each head's query and key."""

    heads: mfx.AttentionHeads
    sizes: dict[str, int]
    query: tuple[str, list[slice]]
    key: tuple[str, list[slice]]
    rotary: list[slice] | None = None

    def params(self, turn: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(turn)
        return {
            f"h.0.attn.{name}.{what}": torch.randn(
                size, *inputs, generator=draw, dtype=torch.float64
            )
            for name, size in self.sizes.items()
            for what, inputs in (("weight", (3,)), ("bias", ()))
        }

    def logits(self, params: dict[str, Tensor], shared: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of each head, the queries' products with its key, and of the rotary ones with a key that all share."""
        # a weight and its bias are a matrix of one column more
        whole = {
            n: torch.cat([params[f"h.0.attn.{n}.weight"], params[f"h.0.attn.{n}.bias"][:, None]], 1)
            for n in self.sizes
        }
        group = self.heads.heads // self.heads.keys
        pairs = [
            (whole[self.query[0]][q], whole[self.key[0]][self.key[1][h // group]])
            for h, q in enumerate(self.query[1])
        ]
        plain = torch.stack([q.mT @ k for q, k in pairs])
        if self.rotary is None:
            return plain, None
        return plain, torch.stack(
            [
                whole[self.query[0]][rows].mT @ shared[: rows.stop - rows.start]
                for rows in self.rotary
            ]
        )


def blocks(
    count: int, size: int, first: int = 0, last: int | None = None, start: int = 0
) -> list[slice]:
    return [
        slice(start + i * size + first, start + i * size + (size if last is None else last))
        for i in range(count)
    ]


def plain(keys: int, group: int, d: int) -> Shape:
    heads = mfx.AttentionHeads("*.attn", keys * group, keys if group > 1 else None)
    sizes = {"q_proj": keys * group * d, "k_proj": keys * d}
    return Shape(heads, sizes, ("q_proj", blocks(keys * group, d)), ("k_proj", blocks(keys, d)))


def fused(keys: int, group: int, d: int) -> Shape:
    q, rows = keys * group, (keys * group + 2 * keys) * d
    heads = mfx.AttentionHeads("*.attn", q, keys, query="qkv", key="qkv")
    return Shape(heads, {"qkv": rows}, ("qkv", blocks(q, d)), ("qkv", blocks(keys, d, start=q * d)))


def by_head(keys: int, group: int, d: int) -> Shape:
    """Each head's query, key and value one behind the other."""
    heads = mfx.AttentionHeads(
        "*.attn", keys, query="qkv", key="qkv", query_dims=(0, d), key_dims=(d, 2 * d)
    )
    rows = blocks(keys, 3 * d, 0, d), blocks(keys, 3 * d, d, 2 * d)
    return Shape(heads, {"qkv": 3 * keys * d}, ("qkv", rows[0]), ("qkv", rows[1]))


def latent(keys: int, group: int, d: int) -> Shape:
    """Multi-head latent attention: rotary parts with a shared key, and values in the same weight as the keys."""
    heads = mfx.AttentionHeads(
        "*.attn",
        keys,
        query="q_b",
        key="kv_b",
        query_dims=(0, d),
        rotary_dims=(d, d + 2),
        key_dims=(0, d),
    )
    sizes = {"q_b": keys * (d + 2), "kv_b": keys * (d + 3)}
    query, key = blocks(keys, d + 2, 0, d), blocks(keys, d + 3, 0, d)
    return Shape(heads, sizes, ("q_b", query), ("kv_b", key), blocks(keys, d + 2, d, d + 2))


KINDS = (plain, fused, by_head, latent)


@given(
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from((0.0, 0.3, 0.5, 1.0)),
    st.lists(st.sampled_from((-3.0, 0.0, 50.0, 100.0, 101.0, 400.0, 1e6)), min_size=9, max_size=9),
)
def test_each_heads_logits_are_scaled_by_its_own_factor(
    kind: Any, keys: int, group: int, d: int, alpha: float, largest: list[float]
):
    shape = kind(keys, group, d)
    heads = shape.heads
    params, updates = shape.params(0), shape.params(1)
    most = torch.tensor(largest[: heads.heads], dtype=torch.float64)
    tx = mfx.qk_clip(heads, TAU, alpha)
    found, _ = tx.update(updates, tx.init(params), params, max_logits={"h.0.attn": most})
    before, after = mfx.apply_updates(params, updates), mfx.apply_updates(params, found)
    gamma = (TAU / most.clamp(min=TAU))[:, None, None]
    shared = torch.ones(4, 4, dtype=torch.float64)
    for new, old in zip(shape.logits(after, shared), shape.logits(before, shared), strict=True):
        if old is not None:
            torch.testing.assert_close(new, gamma * old, rtol=1e-12, atol=1e-12)
    # No factor is above 1, heads below the bound are as they were, and so is all that is neither query nor key.
    clipped = {name: torch.zeros(size, dtype=torch.bool) for name, size in shape.sizes.items()}
    exceeds = most > TAU
    for h, rows in enumerate(shape.query[1]):
        clipped[shape.query[0]][rows] = exceeds[h]
        if shape.rotary is not None:
            clipped[shape.query[0]][shape.rotary[h]] = exceeds[h]
    for h, rows in enumerate(shape.key[1]):
        clipped[shape.key[0]][rows] = exceeds.view(heads.keys, -1)[h].all()
    for name, may_change in clipped.items():
        for what in ("weight", "bias"):
            full = f"h.0.attn.{name}.{what}"
            assert torch.equal(found[full][~may_change], updates[full][~may_change])
            assert (after[full].abs() <= before[full].abs() * (1 + 1e-12) + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_query_and_key_share_the_factor_by_alpha(dtype: torch.dtype):
    shape = plain(2, 1, 2)
    params, updates = shape.params(0), shape.params(1)
    tx = mfx.qk_clip(shape.heads, TAU, alpha=0.25)
    logits = {"h.0.attn": torch.tensor([400.0, 1600.0]).to(dtype)}
    new = mfx.apply_updates(
        params, tx.update(updates, tx.init(params), params, max_logits=logits)[0]
    )
    old = mfx.apply_updates(params, updates)
    gamma = torch.tensor([0.25, 0.25, 0.0625, 0.0625], dtype=torch.float64)
    for name, share in (("q_proj", 0.25), ("k_proj", 0.75)):
        found = new[f"h.0.attn.{name}.bias"] / old[f"h.0.attn.{name}.bias"]
        torch.testing.assert_close(found, gamma**share, rtol=1e-6, atol=0)


def test_narrow_weights_are_scaled_by_an_exact_factor():
    params = {
        f"attn.{name}.weight": torch.tensor([[1.0, 5.0]], dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj")
    }
    updates = mfx.tree.map(torch.zeros_like, params)
    tx = mfx.qk_clip(mfx.AttentionHeads("attn", heads=1), TAU)
    found, _ = tx.update(
        updates, tx.init(params), params, max_logits={"attn": torch.tensor([1.1 * TAU])}
    )
    change = (1.1**-0.5 - 1) * torch.tensor([[1.0, 5.0]])
    assert all(torch.equal(update, change.bfloat16()) for update in found.values())


@pytest.mark.parametrize("largest", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_logits_that_are_not_finite_clip_nothing(largest: float):
    shape = plain(1, 1, 2)
    params, updates = shape.params(0), shape.params(1)
    infinite = {name: torch.full_like(param, torch.inf) for name, param in params.items()}
    tx = mfx.qk_clip(shape.heads)
    for weights in (params, infinite):
        found, _ = tx.update(
            updates, tx.init(weights), weights, max_logits={"h.0.attn": torch.tensor([largest])}
        )
        assert all(torch.equal(found[name], updates[name]) for name in updates)


def test_weights_of_other_layouts_are_found():
    """Output features as columns, parameters of torch's own module, names with wrappers in them, nested logits."""
    draw = torch.Generator().manual_seed(0)
    params = {
        "module.a.attn.c_attn.weight": torch.randn(3, 12, generator=draw),
        "module.a.attn.c_attn.bias": torch.randn(12, generator=draw),
        "module.b.attn.in_proj_weight": torch.randn(12, 3, generator=draw),
        "module.b.attn.in_proj_bias": torch.randn(12, generator=draw),
    }
    heads = (
        mfx.AttentionHeads("a.attn", 2, query="c_attn", key="c_attn", axis=1),
        mfx.AttentionHeads("*.attn", 2, query="in_proj", key="in_proj"),
    )
    tx = mfx.qk_clip(heads)
    logits = {"a": {"attn": torch.tensor([400.0, 1.0])}, "b.attn": torch.tensor([1.0, 400.0])}
    zeros = mfx.tree.map(torch.zeros_like, params)
    new = mfx.apply_updates(params, tx.update(zeros, tx.init(params), params, max_logits=logits)[0])
    ratio = {name: (new[name] / params[name]).round(decimals=3) for name in params}
    first, second = [0.5, 0.5, 1, 1] * 2 + [1] * 4, [1, 1, 0.5, 0.5] * 2 + [1] * 4
    assert ratio["module.a.attn.c_attn.weight"].tolist() == [first] * 3
    assert ratio["module.a.attn.c_attn.bias"].tolist() == first
    assert ratio["module.b.attn.in_proj_weight"].mT.tolist() == [second] * 3
    assert ratio["module.b.attn.in_proj_bias"].tolist() == second


@pytest.mark.parametrize("module", ["", "*"])
def test_a_model_may_be_an_attention_module_itself(module: str):
    params = {"q_proj.weight": torch.ones(2, 1), "k_proj.weight": torch.ones(2, 1)}
    zeros = mfx.tree.map(torch.zeros_like, params)
    tx = mfx.qk_clip(mfx.AttentionHeads(module, heads=2), TAU)
    found, _ = tx.update(
        zeros, tx.init(params), params, max_logits={"": torch.tensor([4 * TAU, 0.0])}
    )
    assert all(update.tolist() == [[-0.5], [0.0]] for update in found.values())


def test_queries_and_keys_that_are_none_need_no_logits():
    params = {"q_proj.weight": None, "k_proj.weight": None, "w": torch.ones(2)}
    tx = mfx.qk_clip(mfx.AttentionHeads("*", heads=2), TAU)
    found, _ = tx.update(params, tx.init(params), params, max_logits={})
    assert found == params


# ---------------------------------------------------------------------------------------------------------- bad input


def test_a_pattern_that_matches_nothing_is_an_error_that_suggests_names():
    tx = mfx.chain(mfx.momentum(), mfx.qk_clip(mfx.AttentionHeads("*.attn", 2, query="query_proj")))
    with pytest.raises(
        ValueError, match=r"(?s)'\*\.attn\.query_proj\.weight'.*close: 'h.0.attn.q_proj"
    ):
        tx.init(plain(2, 1, 2).params(0))
    with pytest.raises(ValueError, match="matches none of the 4 parameters"):
        mfx.TransformOptimizer(plain(2, 1, 2).params(0).items(), tx)


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        (
            {},
            r"\['h.0.attn'\] must be a real tensor of shape \(2,\), .*record_max_logits; found none",
        ),
        ({"h.0.atn": torch.zeros(2)}, "did you mean 'h.0.atn'"),
        ({"h.0.attn": torch.zeros(3)}, r"shape \(2,\), .* found one of \(3,\)"),
        ({"h.0.attn": 3.0}, r"found 3\.0"),
    ],
)
def test_logits_that_do_not_fit_are_errors(logits: dict[str, Any], said: str):
    shape = plain(2, 1, 2)
    tx, params = mfx.qk_clip(shape.heads), shape.params(0)
    with pytest.raises(ValueError, match=said):
        tx.update(params, tx.init(params), params, max_logits=logits)
    with pytest.raises(TypeError, match="the extra argument max_logits= is missing"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params), max_logits={"h.0.attn": torch.zeros(2)})


@pytest.mark.parametrize("seen", ["q_proj", "k_proj"])
@pytest.mark.parametrize("around", ["masked", "partition"])
def test_qk_clip_refuses_half_of_a_pair(seen: str, around: str):
    clip = mfx.qk_clip(mfx.AttentionHeads("h.*.attn", heads=2))
    names = [f"h.{layer}.attn.{part}.weight" for layer in (0, 1) for part in ("q_proj", "k_proj")]
    params = {name: torch.ones(4, 2) for name in names}
    is_seen = {name: name.startswith("h.0") or seen in name for name in names}
    tx = mfx.masked(clip, is_seen)
    if around == "partition":
        tx = mfx.partition(
            {"clip": clip, "rest": mfx.scale(1.0)},
            {n: "clip" if own else "rest" for n, own in is_seen.items()},
        )
    hidden = "k_proj" if seen == "q_proj" else "q_proj"
    message = rf"'h\.1\.attn\.{seen}\.weight' without the \w+ weights 'h\.1\.attn\.{hidden}'"
    with pytest.raises(ValueError, match=message):
        tx.init(params)
    optimized = mfx.chain(mfx.scale_by_learning_rate(0.1), tx)
    with pytest.raises(ValueError, match=message):
        mfx.TransformOptimizer(params.items(), optimized)


# ------------------------------------------------------------------------------------------ a model that explodes


class Sharpened(nn.Module):
    """Attention that is rewarded for finding the token with the largest first number: the sharper, the better."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj)
        )
        return F.scaled_dot_product_attention(
            q, k, x[:, None, :, :1].expand(-1, self.heads, -1, -1)
        )


def largest_logits(tau: float | None, steps: int = 300) -> list[float]:
    """The largest logit of each step of a training with a large rate."""
    draw = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({"attn": Sharpened(16, 2).double()})
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=draw, dtype=torch.float64) / 8
    x = F.normalize(torch.randn(4, 12, 16, generator=draw, dtype=torch.float64), dim=-1)
    tx = mfx.chain(
        mfx.momentum(0.9), mfx.orthogonalize(dtype=torch.float64), mfx.scale_by_learning_rate(0.15)
    )
    if tau is not None:
        tx = mfx.chain(tx, mfx.qk_clip(mfx.AttentionHeads("attn", 2), tau))
    optimizer = mfx.TransformOptimizer(model, tx)
    found: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        with attention.collect_max_logits(model) as logits:
            (-model["attn"](x).mean()).backward()
        found.append(logits["attn"].amax())
        optimizer.step(**({} if tau is None else {"max_logits": logits}))
    return torch.stack(found).tolist()


def test_logits_stay_bounded_that_explode_without():
    tau = 10.0
    assert max(largest_logits(None)) > 10 * tau
    clipped = largest_logits(tau)
    assert max(clipped) <= 1.05 * tau
    assert clipped[-1] > 0.9 * tau


@pytest.mark.dist
@on_ranks(2)
def test_the_largest_logits_of_all_ranks_have_one_value_in_full_precision(here: Here):
    fine = 1.0 + 2.0**-40
    logits = {
        "late": torch.tensor([fine, 0.0] if here.rank == 0 else [0.0, 3.0], dtype=torch.float64),
        "early": torch.tensor([-math.inf] if here.rank == 0 else [-5.0]),
    }
    found = attention.reduce_max_logits(logits, here.group)
    assert {name: most.tolist() for name, most in found.items()} == {
        "early": [-5.0],
        "late": [fine, 3.0],
    }


def clipped_params(model: nn.Module, heads: Any, logits: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of a model after an update of zero and `qk_clip` with tau = 1."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    zeros = {name: torch.zeros_like(param) for name, param in params.items()}
    tx = mfx.qk_clip(heads, tau=1.0)
    updates, _ = tx.update(zeros, tx.init(params), params, max_logits=logits)
    return mfx.apply_updates(params, updates)


def test_fused_biases_of_separate_weights_are_scaled_or_missed_with_an_error():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, kdim=6, vdim=6).double()})
    nn.init.normal_(model["attn"].in_proj_bias)
    logits = {"attn": torch.tensor([4.0, 0.5])}
    weights = mfx.AttentionHeads("attn", 2)
    with pytest.raises(
        ValueError, match=r"no AttentionHeads matches 'attn\.in_proj_bias'.*query=\"in_proj\""
    ):
        clipped_params(model, weights, logits)
    both = (weights, mfx.AttentionHeads("attn", 2, query="in_proj", key="in_proj"))
    new, old = clipped_params(model, both, logits), dict(model.named_parameters())
    factors = torch.tensor([0.5] * 4 + [1.0] * 4, dtype=torch.float64)
    for name in ("attn.q_proj_weight", "attn.k_proj_weight"):
        torch.testing.assert_close(new[name], old[name] * factors[:, None])
    expected = old["attn.in_proj_bias"] * torch.cat([factors, factors, torch.ones(8)])
    torch.testing.assert_close(new["attn.in_proj_bias"], expected)


def test_a_key_that_no_weight_projects_is_refused():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, add_bias_kv=True)})
    heads = mfx.AttentionHeads("attn", 2, query="in_proj", key="in_proj")
    with pytest.raises(ValueError, match=r"found 'attn\.bias_k'.*add_bias_kv=False"):
        clipped_params(model, heads, {"attn": torch.tensor([4.0, 0.5])})


def test_nested_sequences_are_refused_by_name():
    sequences = torch.nested.nested_tensor(
        [torch.ones(3, 2, 4), torch.ones(5, 2, 4)], layout=torch.jagged
    )
    heads = sequences.transpose(1, 2)
    with pytest.raises(NotImplementedError, match=r"found a nested tensor.*record_max_logits"):
        attention.max_logits(heads, heads)
