"""The largest attention logits are those of the whole matrix, and belong to the module that computes them."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from muonfx.transforms import attention


def whole_matrix(
    q: Tensor, k: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float | None, enable_gqa: bool
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
    mask = None if kind == "none" else keeps if kind in ("bool", "one row") else numbers.masked_fill(~keeps, least)
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
        return self.q_proj(x).unflatten(-1, (2, 2)).transpose(1, 2), self.k_proj(x).unflatten(-1, (2, 2)).transpose(
            1, 2
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.heads(x)
        if self.how == "torch":
            return F.scaled_dot_product_attention(q, k, q, is_causal=True).transpose(1, 2).flatten(-2)
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
                grads = torch.func.grad(loss)({name: leaf.detach() for name, leaf in params.items()}, x)
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
    if way == "grad":
        plain = torch.func.grad(loss)({name: leaf.detach() for name, leaf in params.items()}, batches[-1])
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
    with attention.collect_max_logits(model), pytest.raises(ValueError, match=r"'' computes .* of 1 heads and of 2"):
        model(torch.ones(1, 3, 4))


def test_ranks_of_tensor_parallelism_leave_room_for_the_others_heads():
    model = Attention()
    with attention.collect_max_logits(model, tensor_parallel=(1, 3)) as logits:
        model(torch.randn(1, 3, 4))
    assert logits[""].isfinite().tolist() == [False, False, True, True, False, False]
    with pytest.raises(ValueError, match=r"tensor_parallel must be \(rank, size\)"):
        attention.collect_max_logits(model, tensor_parallel=(3, 3)).__enter__()


def test_what_cannot_be_seen_is_said():
    model = nn.ModuleDict({"attn": torch.compile(Attention(), backend="eager")})
    with pytest.raises(ValueError, match=r"'attn' is compiled.*before torch\.compile"):
        attention.collect_max_logits(model).__enter__()
    with pytest.raises(NotImplementedError, match=r"torch.func.vmap would merge"):
        torch.func.vmap(lambda x: attention.max_logits(x, x))(torch.ones(2, 2, 3, 4))
    with pytest.raises(ValueError, match=r"one number a head, found a tensor of shape \(2, 3\)"):
        attention.record_max_logits(torch.ones(2, 3))
