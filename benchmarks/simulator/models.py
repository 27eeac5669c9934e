"""The shapes of the parameters of some well-known models.

Shapes follow from public configurations, in PyTorch's order `(out, in)`, with one entry for all parameters of one kind.
`matrices` are the parameters that Muon updates: those of two dims except embeddings, heads and routers. A fused matrix
(GPT-2's QKV) counts as one matrix, and each expert of a stack as a separate matrix.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["MODELS", "Kind", "Model", "from_config", "from_shapes", "model"]

MOST = 2**40
"""Maximum side or count of a model."""


class Kind(NamedTuple):
    """Parameters of one shape and one role."""

    name: str
    shape: tuple[int, ...]
    repeats: int
    """The number of such parameters in the model."""
    muon: bool
    """True if Muon updates them, False for AdamW."""
    experts: bool = False
    """True for experts, which expert parallelism distributes."""

    @property
    def numel(self) -> int:
        """Elements of one parameter."""
        return math.prod(self.shape)


class Model(NamedTuple):
    """A model's parameters."""

    name: str
    source: str
    """The source of the shapes."""
    kinds: tuple[Kind, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(kind.numel * kind.repeats for kind in self.kinds)

    @property
    def matrices(self) -> tuple[Kind, ...]:
        """The kinds that Muon updates."""
        return tuple(kind for kind in self.kinds if kind.muon)


def model(name: str) -> Model:
    """Return the model of this name, or of a ``config.json`` of Hugging Face at this path.

    Raises:
        ValueError: no model has this name and no file has this path, or see `from_config`.

    >>> f"{model('llama-8b').numel:,}"
    '8,030,261,248'
    """
    if name in MODELS:
        source, entries = MODELS[name]
        return _from_entries(_Config(source, entries), name)
    if name.endswith(".json"):
        return from_config(name)
    raise ValueError(
        f"model: found {name!r}, expected one of {', '.join(MODELS)}, or the path of a config.json"
    )


def from_shapes(
    shapes: Mapping[str, tuple[int, ...]] | Iterable[tuple[int, ...]], name: str = "shapes"
) -> Model:
    """Return a model with parameters of these shapes. Muon updates those of two dims, AdamW all others.

    Args:
        shapes: shapes, or a mapping from names to shapes.
        name: name of the model.

    Raises:
        ValueError: a side is not a positive int, or no shape has two dims.

    >>> from_shapes([(512, 512)] * 4 + [(512,)]).numel
    1049088
    """
    named = (
        shapes.items() if isinstance(shapes, Mapping) else ((str(shape), shape) for shape in shapes)
    )
    found = Counter[tuple[int, ...]]()
    for of, shape in named:
        given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if not all(
            isinstance(side, int) and not isinstance(side, bool) and 0 < side <= MOST
            for side in given
        ):
            raise ValueError(
                f"shapes: {of} has the sides {shape!r}, expected ints from 1 to {MOST:,}"
            )
        found[given] += 1
    kinds = tuple(
        Kind(" x ".join(map(str, shape)) or "scalar", shape, repeats, muon=len(shape) == 2)
        for shape, repeats in found.items()
    )
    return _require_matrices(Model(name, "shapes as given", kinds))


def from_config(path: str | Path) -> Model:
    """Return the model that a ``config.json`` of Hugging Face describes; no other file is read.

    The supported architectures are GPT-2, Llama, Mistral, Qwen 2 and 3, Mixtral, Qwen 3 MoE and DeepSeek V3. For
    others, use `from_shapes`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a config.json, the architecture is not supported, or an entry is missing or invalid.
    """
    path = Path(path)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model: {path} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(
            f"model: {path} is {type(given).__name__}, expected an object with model_type and sizes"
        )
    entries: dict[str, Any] = {str(key): value for key, value in given.items()}  # pyright: ignore[reportUnknownVariableType]
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return _from_entries(_Config(str(path), entries), name)


class _Config:
    """The entries of a config.json, which are checked when they are read."""

    def __init__(self, source: str, entries: Mapping[str, Any]) -> None:
        self.source, self._entries = source, entries

    @property
    def model_type(self) -> str:
        found = self._entries.get("model_type")
        if found not in _ARCHITECTURES:
            raise ValueError(
                f"model: {self.source} has the model_type {found!r}, expected one of {', '.join(_ARCHITECTURES)}; "
                "for another, give the shapes of its parameters"
            )
        return found

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an int entry, or its default if it is missing."""
        found = self._entries.get(name)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= MOST:
            raise ValueError(
                f"model: {self.source}: {name} is {found!r}, expected an int from {least} to {MOST:,}"
            )
        return found

    def flag(self, name: str) -> bool:
        """Return a bool entry, or False if it is missing."""
        found = self._entries.get(name, False)
        if not isinstance(found, bool):
            raise ValueError(f"model: {self.source}: {name} is {found!r}, expected true or false")
        return found


def _from_entries(config: _Config, name: str) -> Model:
    return _require_matrices(
        Model(name, config.source, tuple(_ARCHITECTURES[config.model_type](config)))
    )


def _require_matrices(found: Model) -> Model:
    if not found.matrices:
        raise ValueError(
            f"model: found no matrix in {found.name}, expected at least one parameter of two dims for Muon"
        )
    return found


def _linear(name: str, out: int, into: int, repeats: int, *, experts: bool = False) -> Kind:
    return Kind(name, (out, into), repeats, muon=True, experts=experts)


def _other(name: str, *shape: int, repeats: int = 1) -> Kind:
    return Kind(name, shape, repeats, muon=False)


def _gpt(config: _Config) -> Iterator[Kind]:
    """Yield GPT-2's parameters: fused QKV, an MLP of four times the width, biases, a head tied to the embedding."""
    layers, width = config.size("n_layer"), config.size("n_embd")
    mlp = config.size("n_inner", 4 * width)
    if mlp != 4 * width:
        raise ValueError(
            f"model: {config.source}: n_inner is {mlp}, expected 4 n_embd = {4 * width}; give the shapes"
        )
    yield _linear("attention.qkv", 3 * width, width, layers)
    yield _linear("attention.out", width, width, layers)
    yield _linear("mlp.up", 4 * width, width, layers)
    yield _linear("mlp.down", width, 4 * width, layers)
    yield _other("embedding", config.size("vocab_size"), width)
    yield _other("positions", config.size("n_positions"), width)
    yield _other("biases", 9 * width, repeats=layers)
    yield _other("norms", 2 * width, repeats=2 * layers + 1)


def _llama(
    config: _Config,
    *,
    biases: bool = False,
    head_norms: bool = False,
    experts: str | None = None,
    mlp: str = "intermediate_size",
) -> Iterator[Kind]:
    """Yield Llama's parameters: grouped queries, and a gated MLP or experts with a router.

    Args:
        config: entries of the configuration.
        biases: True if queries, keys and values have biases regardless of the configuration.
        head_norms: True if queries and keys are normalized.
        experts: name of the entry with the number of experts per layer; None for an MLP.
        mlp: name of the entry with the inner width of the MLP or of one expert.
    """
    layers, width = config.size("num_hidden_layers"), config.size("hidden_size")
    heads = config.size("num_attention_heads")
    head = config.size("head_dim", 0 if width % heads else width // heads, least=0)
    if not head:
        raise ValueError(
            f"model: {config.source}: hidden_size is {width}, expected a multiple of num_attention_heads = {heads}, or "
            "an entry head_dim"
        )
    q, kv = head * heads, head * config.size("num_key_value_heads", heads)
    inner, number = config.size(mlp), config.size(experts) if experts else 0
    if q == width:
        yield _linear("attention.q, out", width, width, 2 * layers)
    else:
        yield _linear("attention.q", q, width, layers)
        yield _linear("attention.out", width, q, layers)
    yield _linear("attention.k, v", kv, width, 2 * layers)
    name, each = ("experts", layers * number) if number else ("mlp", layers)
    yield _linear(f"{name}.gate, up", inner, width, 2 * each, experts=number > 0)
    yield _linear(f"{name}.down", width, inner, each, experts=number > 0)
    if number:
        yield _other("router", number, width, repeats=layers)
    if biases or config.flag("attention_bias"):
        yield _other("biases of q, k and v", q + 2 * kv, repeats=layers)
    if head_norms:
        yield _other("norms of q and k", 2 * head, repeats=layers)
    tied = config.flag("tie_word_embeddings")
    yield _other(
        "embedding" if tied else "embedding, head",
        config.size("vocab_size"),
        width,
        repeats=2 - tied,
    )
    yield _other("norms", width, repeats=2 * layers + 1)


def _latent(config: _Config) -> Iterator[Kind]:
    """Yield DeepSeek V3's parameters: low-rank queries, keys and values, some dense layers, and layers of experts."""
    layers, dense = (
        config.size("num_hidden_layers"),
        config.size("first_k_dense_replace", 0, least=0),
    )
    sparse = layers - dense
    if sparse < 1:
        raise ValueError(
            f"model: {config.source}: found {dense} dense layers, expected fewer than the {layers} layers"
        )
    width, heads, mlp = (
        config.size(n) for n in ("hidden_size", "num_attention_heads", "intermediate_size")
    )
    experts, expert = config.size("n_routed_experts"), config.size("moe_intermediate_size")
    shared = config.size("n_shared_experts", 1) * expert
    q_rank, kv_rank = config.size("q_lora_rank"), config.size("kv_lora_rank")
    no_rope, rope, value = (
        config.size(n) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    yield _linear("attention.q_a", q_rank, width, layers)
    yield _linear("attention.q_b", heads * (no_rope + rope), q_rank, layers)
    yield _linear("attention.kv_a", kv_rank + rope, width, layers)
    yield _linear("attention.kv_b", heads * (no_rope + value), kv_rank, layers)
    yield _linear("attention.out", width, heads * value, layers)
    if dense:
        yield _linear("mlp.gate, up", mlp, width, 2 * dense)
        yield _linear("mlp.down", width, mlp, dense)
    yield _linear("experts.gate, up", expert, width, 2 * sparse * experts, experts=True)
    yield _linear("experts.down", width, expert, sparse * experts, experts=True)
    yield _linear("shared.gate, up", shared, width, 2 * sparse)
    yield _linear("shared.down", width, shared, sparse)
    yield _other("router", experts, width, repeats=sparse)
    yield _other("router bias", experts, repeats=sparse)
    yield _other("embedding, head", config.size("vocab_size"), width, repeats=2)
    yield _other("norms", width, repeats=2 * layers + 1)
    yield _other("latent norms", q_rank + kv_rank, repeats=layers)


_ARCHITECTURES: dict[str, Callable[[_Config], Iterator[Kind]]] = {
    "gpt2": _gpt,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": partial(_llama, biases=True),
    "qwen3": partial(_llama, head_norms=True),
    "mixtral": partial(_llama, experts="num_local_experts"),
    "qwen3_moe": partial(
        _llama, head_norms=True, experts="num_experts", mlp="moe_intermediate_size"
    ),
    "deepseek_v3": _latent,
}
"""Functions that list the parameters of a configuration, by its model_type."""


def _gpt_sizes(layers: int, width: int, vocabulary: int, context: int) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_embd": width, "vocab_size": vocabulary, "n_positions": context}
    return {"model_type": "gpt2", **sizes}


def _llama_3_sizes(layers: int, width: int, mlp: int, heads: int) -> dict[str, Any]:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
    }
    return {"model_type": "llama", **sizes, "num_key_value_heads": 8, "vocab_size": 128256}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-xl": ("config.json of openai-community/gpt2-xl", _gpt_sizes(48, 1600, 50257, 1024)),
    "llama-8b": ("config.json of Meta-Llama-3-8B", _llama_3_sizes(32, 4096, 14336, 32)),
    "llama-70b": ("config.json of Meta-Llama-3-70B", _llama_3_sizes(80, 8192, 28672, 64)),
    "deepseek-v3": (
        "config.json of deepseek-ai/DeepSeek-V3, without its extra prediction module",
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "vocab_size": 129280,
            "n_routed_experts": 256,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
    ),
    "gpt-1t": (
        "GPT-2's architecture with the sizes of the largest model of arXiv 2104.04473 (Table 1)",
        _gpt_sizes(128, 25600, 51200, 2048),
    ),
}
"""Source and configuration of each model, by name."""
