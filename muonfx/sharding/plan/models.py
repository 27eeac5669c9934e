"""The parameters of some well-known models, as shapes: enough to plan for models that fit on no machine here.

Shapes are data from public configurations: PyTorch's `(out, in)`, one entry for all parameters of one kind. What Muon
takes is `matrices`: two dims, and neither an embedding nor a head nor a router. Fused matrices (GPT-2's QKV) count as
they are, each expert of a stack as a matrix of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["MODELS", "Kind", "Model", "model"]


class Kind(NamedTuple):
    """Parameters of one shape and one role."""

    name: str
    shape: tuple[int, ...]
    repeats: int
    """How many of them the model has."""
    muon: bool
    """Whether Muon takes it; else AdamW."""
    experts: bool = False
    """Whether they are experts, which expert parallelism deals out."""

    @property
    def numel(self) -> int:
        """Elements of one of them."""
        return math.prod(self.shape)


class Model(NamedTuple):
    """A model's parameters."""

    name: str
    source: str
    """Where the shapes are from."""
    kinds: tuple[Kind, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(kind.numel * kind.repeats for kind in self.kinds)

    @property
    def matrices(self) -> tuple[Kind, ...]:
        """What Muon takes."""
        return tuple(kind for kind in self.kinds if kind.muon)


def model(name: str) -> Model:
    """The model of this name.

    Raises:
        ValueError: there is none.

    >>> f"{model('llama-8b').numel:,}"
    '8,030,261,248'
    """
    if name not in MODELS:
        raise ValueError(f"model: found {name!r}, expected one of {', '.join(MODELS)}")
    return MODELS[name]()


def _linear(name: str, out: int, into: int, repeats: int, *, experts: bool = False) -> Kind:
    return Kind(name, (out, into), repeats, muon=True, experts=experts)


def _other(name: str, *shape: int, repeats: int = 1) -> Kind:
    return Kind(name, shape, repeats, muon=False)


def _gpt(name: str, source: str, *, layers: int, width: int, vocabulary: int, context: int) -> Model:
    """GPT-2's architecture: fused QKV, an MLP of four times the width, biases, the head tied to the embedding."""
    kinds = (
        _linear("attention.qkv", 3 * width, width, layers),
        _linear("attention.out", width, width, layers),
        _linear("mlp.up", 4 * width, width, layers),
        _linear("mlp.down", width, 4 * width, layers),
        _other("embedding", vocabulary, width),
        _other("positions", context, width),
        _other("biases", 9 * width, repeats=layers),
        _other("norms", 2 * width, repeats=2 * layers + 1),
    )
    return Model(name, source, kinds)


def _llama(name: str, source: str, *, layers: int, width: int, mlp: int, heads: int, kv_heads: int) -> Model:
    """Llama 3's architecture: grouped queries, a gated MLP, no biases, an untied head."""
    kv, vocabulary = width // heads * kv_heads, 128256
    kinds = (
        _linear("attention.q, out", width, width, 2 * layers),
        _linear("attention.k, v", kv, width, 2 * layers),
        _linear("mlp.gate, up", mlp, width, 2 * layers),
        _linear("mlp.down", width, mlp, layers),
        _other("embedding, head", vocabulary, width, repeats=2),
        _other("norms", width, repeats=2 * layers + 1),
    )
    return Model(name, source, kinds)


def _deepseek_v3() -> Model:
    """Latent attention with low-rank queries, keys and values; 256 experts and a shared one in all layers but three."""
    layers, dense, width, vocabulary, experts, expert = 61, 3, 7168, 129280, 256, 2048
    heads, q_rank, kv_rank, no_rope, rope, value = 128, 1536, 512, 128, 64, 128
    sparse = layers - dense
    kinds = (
        _linear("attention.q_a", q_rank, width, layers),
        _linear("attention.q_b", heads * (no_rope + rope), q_rank, layers),
        _linear("attention.kv_a", kv_rank + rope, width, layers),
        _linear("attention.kv_b", heads * (no_rope + value), kv_rank, layers),
        _linear("attention.out", width, heads * value, layers),
        _linear("mlp.gate, up", 18432, width, 2 * dense),
        _linear("mlp.down", width, 18432, dense),
        _linear("experts.gate, up", expert, width, 2 * sparse * experts, experts=True),
        _linear("experts.down", width, expert, sparse * experts, experts=True),
        _linear("shared.gate, up", expert, width, 2 * sparse),
        _linear("shared.down", width, expert, sparse),
        _other("router", experts, width, repeats=sparse),
        _other("router bias", experts, repeats=sparse),
        _other("embedding, head", vocabulary, width, repeats=2),
        _other("norms", width, repeats=2 * layers + 1),
        _other("latent norms", q_rank + kv_rank, repeats=layers),
    )
    return Model("deepseek-v3", "config.json of deepseek-ai/DeepSeek-V3, without its extra prediction module", kinds)


MODELS: dict[str, Callable[[], Model]] = {
    "gpt2-xl": lambda: _gpt(
        "gpt2-xl", "config.json of openai-community/gpt2-xl", layers=48, width=1600, vocabulary=50257, context=1024
    ),
    "llama-8b": lambda: _llama(
        "llama-8b", "config.json of Meta-Llama-3-8B", layers=32, width=4096, mlp=14336, heads=32, kv_heads=8
    ),
    "llama-70b": lambda: _llama(
        "llama-70b", "config.json of Meta-Llama-3-70B", layers=80, width=8192, mlp=28672, heads=64, kv_heads=8
    ),
    "deepseek-v3": _deepseek_v3,
    "gpt-1t": lambda: _gpt(
        "gpt-1t",
        "made up: GPT-2's architecture, as large as the largest of arXiv 2104.04473 (Table 1)",
        layers=128,
        width=25600,
        vocabulary=51200,
        context=2048,
    ),
}
"""By name, a function that lists the parameters."""
