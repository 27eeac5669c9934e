"""QK-clip: what becomes of the logits of each head, which parameters it finds, and a model that explodes without it."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import muonfx as mfx
from muonfx.transforms import attention

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
            f"h.0.attn.{name}.{what}": torch.randn(size, *inputs, generator=draw, dtype=torch.float64)
            for name, size in self.sizes.items()
            for what, inputs in (("weight", (3,)), ("bias", ()))
        }

    def logits(self, params: dict[str, Tensor], shared: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of each head, the queries' products with its key, and of the rotary ones with a key that all share."""
        # a weight and its bias are a matrix of one column more
        whole = {
            n: torch.cat([params[f"h.0.attn.{n}.weight"], params[f"h.0.attn.{n}.bias"][:, None]], 1) for n in self.sizes
        }
        group = self.heads.heads // self.heads.keys
        pairs = [
            (whole[self.query[0]][q], whole[self.key[0]][self.key[1][h // group]]) for h, q in enumerate(self.query[1])
        ]
        plain = torch.stack([q.mT @ k for q, k in pairs])
        if self.rotary is None:
            return plain, None
        return plain, torch.stack(
            [whole[self.query[0]][rows].mT @ shared[: rows.stop - rows.start] for rows in self.rotary]
        )


def blocks(count: int, size: int, first: int = 0, last: int | None = None, start: int = 0) -> list[slice]:
    return [slice(start + i * size + first, start + i * size + (size if last is None else last)) for i in range(count)]


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
    heads = mfx.AttentionHeads("*.attn", keys, query="qkv", key="qkv", query_dims=(0, d), key_dims=(d, 2 * d))
    rows = blocks(keys, 3 * d, 0, d), blocks(keys, 3 * d, d, 2 * d)
    return Shape(heads, {"qkv": 3 * keys * d}, ("qkv", rows[0]), ("qkv", rows[1]))


def latent(keys: int, group: int, d: int) -> Shape:
    """Multi-head latent attention: rotary parts that meet a shared key, and values beside the keys."""
    heads = mfx.AttentionHeads(
        "*.attn", keys, query="q_b", key="kv_b", query_dims=(0, d), rotary_dims=(d, d + 2), key_dims=(0, d)
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


def test_query_and_key_share_the_factor_by_alpha():
    shape = plain(2, 1, 2)
    params, updates = shape.params(0), shape.params(1)
    tx = mfx.qk_clip(shape.heads, TAU, alpha=0.25)
    logits = {"h.0.attn": torch.tensor([400.0, 1600.0])}
    new = mfx.apply_updates(params, tx.update(updates, tx.init(params), params, max_logits=logits)[0])
    old = mfx.apply_updates(params, updates)
    gamma = torch.tensor([0.25, 0.25, 0.0625, 0.0625], dtype=torch.float64)
    for name, share in (("q_proj", 0.25), ("k_proj", 0.75)):
        found = new[f"h.0.attn.{name}.bias"] / old[f"h.0.attn.{name}.bias"]
        torch.testing.assert_close(found, gamma**share, rtol=1e-6, atol=0)


@pytest.mark.parametrize("largest", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_logits_that_are_not_finite_clip_nothing(largest: float):
    shape = plain(1, 1, 2)
    params, updates = shape.params(0), shape.params(1)
    tx = mfx.qk_clip(shape.heads)
    found, _ = tx.update(updates, tx.init(params), params, max_logits={"h.0.attn": torch.tensor([largest])})
    assert all(torch.equal(found[name], updates[name]) for name in updates)


def test_weights_of_other_layouts_are_found():
    """Output features as columns, parameters of torch's own module, names with wrappers in them, nested logits."""
    draw = torch.Generator().manual_seed(0)
    params = {
        "module.a.attn.c_attn.weight": torch.randn(3, 12, generator=draw),
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
    assert ratio["module.b.attn.in_proj_weight"].mT.tolist() == [second] * 3
    assert ratio["module.b.attn.in_proj_bias"].tolist() == second


# ---------------------------------------------------------------------------------------------------------- bad input


def test_a_pattern_that_matches_nothing_is_an_error_that_suggests_names():
    tx = mfx.chain(mfx.momentum(), mfx.qk_clip(mfx.AttentionHeads("*.attn", 2, query="query_proj")))
    with pytest.raises(ValueError, match=r"(?s)'\*\.attn\.query_proj\.weight'.*close: 'h.0.attn.q_proj"):
        tx.init(plain(2, 1, 2).params(0))
    with pytest.raises(ValueError, match="matches none of the 4 parameters"):
        mfx.TransformOptimizer(plain(2, 1, 2).params(0).items(), tx)


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        ({}, r"\['h.0.attn'\] must be a real tensor of shape \(2,\), .*record_max_logits; found none"),
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
    with pytest.raises(TypeError, match="needs the named extra max_logits"):
        tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, tx.init(params), max_logits={"h.0.attn": torch.zeros(2)})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mfx.qk_clip(mfx.AttentionHeads("*", 5)).init(plain(2, 1, 2).params(0)), "does not divide into equal"),
        (
            lambda: mfx.qk_clip(mfx.AttentionHeads("*", 5, query="qkv", key="qkv")).init(fused(1, 1, 2).params(0)),
            "equal",
        ),
        (lambda: mfx.qk_clip(mfx.AttentionHeads("*", 2, axis=2)).init(plain(2, 1, 2).params(0)), "no dim 2"),
    ],
)
def test_heads_that_do_not_fit_are_errors_at_init(make: Any, said: str):
    with pytest.raises(ValueError, match=said):
        make()


# ------------------------------------------------------------------------------------------ a model that explodes


class Attention(nn.Module):
    """Attention that is rewarded for finding the token with the largest first number: the sharper, the better."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj))
        return F.scaled_dot_product_attention(q, k, x[:, None, :, :1].expand(-1, self.heads, -1, -1))


def largest_logits(tau: float | None, steps: int = 300) -> list[float]:
    """The largest logit of each step of a training with a large rate."""
    draw = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({"attn": Attention(16, 2).double()})
    for param in model.parameters():
        param.data = torch.randn(param.shape, generator=draw, dtype=torch.float64) / 8
    x = F.normalize(torch.randn(4, 12, 16, generator=draw, dtype=torch.float64), dim=-1)
    tx = mfx.chain(mfx.momentum(0.9), mfx.orthogonalize(dtype=torch.float64), mfx.scale_by_learning_rate(0.15))
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
