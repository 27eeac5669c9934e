"""The parameters of some well-known models, as shapes: enough to plan for models that fit on no machine here.

Shapes are data from public configurations: PyTorch's `(out, in)`, one entry for all parameters of one kind. What Muon
takes is `matrices`: two dims, and neither an embedding nor a head nor a router. Fused matrices (GPT-2's QKV) count as
they are, each expert of a stack as a matrix of its own.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["MODELS", "Kind", "Model", "from_config", "from_shapes", "model"]

MOST = 2**40
"""The largest side or count of a model; a larger one is a slip."""


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
    """The model of this name, or of a ``config.json`` of Hugging Face at this path.

    Raises:
        ValueError: there is none; or as `from_config`.

    >>> f"{model('llama-8b').numel:,}"
    '8,030,261,248'
    """
    if name in MODELS:
        return MODELS[name]()
    if name.endswith(".json"):
        return from_config(name)
    raise ValueError(f"model: found {name!r}, expected one of {', '.join(MODELS)}, or the path of a config.json")


def from_shapes(shapes: Mapping[str, tuple[int, ...]] | Iterable[tuple[int, ...]], name: str = "shapes") -> Model:
    """A model of one's own, as the shapes of its parameters: those of two dims go to Muon, all others to AdamW.

    Args:
        shapes: by name, or one after another.
        name: of the model.

    Raises:
        ValueError: a side is no int of 1 or more, or there is no matrix.

    >>> from_shapes([(512, 512)] * 4 + [(512,)]).numel
    1049088
    """
    named = shapes.items() if isinstance(shapes, Mapping) else ((str(shape), shape) for shape in shapes)
    found = Counter[tuple[int, ...]]()
    for of, shape in named:
        given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        if not all(isinstance(side, int) and not isinstance(side, bool) and 0 < side <= MOST for side in given):
            raise ValueError(f"shapes: {of} has the sides {shape!r}, expected ints from 1 to {MOST:,}")
        found[given] += 1
    kinds = tuple(
        Kind(" x ".join(map(str, shape)) or "scalar", shape, repeats, muon=len(shape) == 2)
        for shape, repeats in found.items()
    )
    return _with_matrices(Model(name, "shapes as given", kinds))


def from_config(path: str | Path) -> Model:
    """The model that a ``config.json`` of Hugging Face describes; only the file is read.

    The architectures of GPT-2, Llama, Mistral, Qwen 2 and 3, Mixtral, Qwen 3 MoE and DeepSeek V3. Of others say the
    shapes: `from_shapes`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, of another architecture, or an entry is missing or no number that can be.
    """
    path = Path(path)
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model: {path} is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"model: {path} is {type(given).__name__}, expected an object with model_type and sizes")
    entries: dict[str, Any] = {str(key): value for key, value in given.items()}  # pyright: ignore[reportUnknownVariableType]
    kind = entries.get("model_type")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"model: {path} has the model_type {kind!r}, expected one of {', '.join(_ARCHITECTURES)}; "
            "for another, give the shapes of its parameters"
        )
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return _with_matrices(_ARCHITECTURES[kind](_Config(path, entries), name))


class _Config:
    """The entries of a config.json, looked at when they are asked for."""

    def __init__(self, path: Path, entries: Mapping[str, Any]) -> None:
        self.path, self._entries = path, entries

    @property
    def source(self) -> str:
        return str(self.path)

    def size(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An int that is there, or by default."""
        found = self._entries.get(name)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= MOST:
            raise ValueError(f"model: {self.path}: {name} is {found!r}, expected an int from {least} to {MOST:,}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self._entries.get(name, default)
        if not isinstance(found, bool):
            raise ValueError(f"model: {self.path}: {name} is {found!r}, expected true or false")
        return found

    def has(self, name: str) -> bool:
        return self._entries.get(name) is not None


def _with_matrices(found: Model) -> Model:
    if not found.matrices:
        raise ValueError(f"model: {found.name} has no matrix of two dims that Muon takes")
    return found


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


def _llama(
    name: str,
    source: str,
    *,
    layers: int,
    width: int,
    mlp: int,
    heads: int,
    kv_heads: int,
    head: int | None = None,
    vocabulary: int = 128256,
    tied: bool = False,
    biases: bool = False,
    head_norms: bool = False,
    experts: int = 0,
) -> Model:
    """Llama's architecture: grouped queries, a gated MLP; or as many experts in its place, and a router.

    Args:
        name: of the model.
        source: of the shapes.
        layers: blocks.
        width: of the residual stream.
        mlp: the inner width, of the MLP or of one expert.
        heads: of queries.
        kv_heads: of keys and of values.
        head: the width of a head; None: `width / heads`.
        vocabulary: tokens.
        tied: whether the head is the embedding.
        biases: whether queries, keys and values have them.
        head_norms: whether queries and keys are normalized.
        experts: how many a layer has; 0: an MLP.
    """
    head = width // heads if head is None else head
    q, kv = head * heads, head * kv_heads
    attention = (
        (_linear("attention.q, out", width, width, 2 * layers),)
        if q == width
        else (_linear("attention.q", q, width, layers), _linear("attention.out", width, q, layers))
    )
    each, experted = layers * (experts or 1), experts > 0
    kinds = (
        *attention,
        _linear("attention.k, v", kv, width, 2 * layers),
        _linear("experts.gate, up" if experted else "mlp.gate, up", mlp, width, 2 * each, experts=experted),
        _linear("experts.down" if experted else "mlp.down", width, mlp, each, experts=experted),
        *((_other("router", experts, width, repeats=layers),) if experted else ()),
        *((_other("biases of q, k and v", q + 2 * kv, repeats=layers),) if biases else ()),
        *((_other("norms of q and k", 2 * head, repeats=layers),) if head_norms else ()),
        _other("embedding" if tied else "embedding, head", vocabulary, width, repeats=1 if tied else 2),
        _other("norms", width, repeats=2 * layers + 1),
    )
    return Model(name, source, kinds)


def _gpt_of(config: _Config, name: str) -> Model:
    width = config.size("n_embd")
    mlp = config.size("n_inner", 4 * width)
    if mlp != 4 * width:
        raise ValueError(f"model: {config.path}: n_inner is {mlp}, expected 4 n_embd = {4 * width}; give the shapes")
    return _gpt(
        name,
        config.source,
        layers=config.size("n_layer"),
        width=width,
        vocabulary=config.size("vocab_size"),
        context=config.size("n_positions"),
    )


def _llama_of(
    *, biases: bool = False, head_norms: bool = False, experts: str | None = None, mlp: str = "intermediate_size"
) -> Callable[[_Config, str], Model]:
    """Reads Llama's sizes; a model type says which biases, norms and experts there are."""

    def read(config: _Config, name: str) -> Model:
        heads, width = config.size("num_attention_heads"), config.size("hidden_size")
        head = config.size("head_dim") if config.has("head_dim") else None
        if head is None and width % heads:
            raise ValueError(
                f"model: {config.path}: hidden_size {width} is no multiple of num_attention_heads {heads}, and there "
                "is no head_dim"
            )
        return _llama(
            name,
            config.source,
            layers=config.size("num_hidden_layers"),
            width=width,
            mlp=config.size(mlp),
            heads=heads,
            kv_heads=config.size("num_key_value_heads", heads),
            head=head,
            vocabulary=config.size("vocab_size"),
            tied=config.flag("tie_word_embeddings", False),
            biases=biases or config.flag("attention_bias", False),
            head_norms=head_norms,
            experts=config.size(experts) if experts else 0,
        )

    return read


def _deepseek_v3() -> Model:
    return _latent(
        "deepseek-v3",
        "config.json of deepseek-ai/DeepSeek-V3, without its extra prediction module",
        layers=61,
        dense=3,
        width=7168,
        mlp=18432,
        vocabulary=129280,
        experts=256,
        expert=2048,
        shared=1,
        heads=128,
        q_rank=1536,
        kv_rank=512,
        no_rope=128,
        rope=64,
        value=128,
    )


def _latent_of(config: _Config, name: str) -> Model:
    return _latent(
        name,
        config.source,
        layers=config.size("num_hidden_layers"),
        dense=config.size("first_k_dense_replace", 0, least=0),
        width=config.size("hidden_size"),
        mlp=config.size("intermediate_size"),
        vocabulary=config.size("vocab_size"),
        experts=config.size("n_routed_experts"),
        expert=config.size("moe_intermediate_size"),
        shared=config.size("n_shared_experts", 1),
        heads=config.size("num_attention_heads"),
        q_rank=config.size("q_lora_rank"),
        kv_rank=config.size("kv_lora_rank"),
        no_rope=config.size("qk_nope_head_dim"),
        rope=config.size("qk_rope_head_dim"),
        value=config.size("v_head_dim"),
    )


def _latent(
    name: str,
    source: str,
    *,
    layers: int,
    dense: int,
    width: int,
    mlp: int,
    vocabulary: int,
    experts: int,
    expert: int,
    shared: int,
    heads: int,
    q_rank: int,
    kv_rank: int,
    no_rope: int,
    rope: int,
    value: int,
) -> Model:
    """DeepSeek V3's: low-rank queries, keys and values; experts and shared ones in all layers but the first `dense`."""
    sparse = layers - dense
    if sparse < 1:
        raise ValueError(f"model: {source}: {dense} of {layers} layers are dense, expected fewer")
    kinds = (
        _linear("attention.q_a", q_rank, width, layers),
        _linear("attention.q_b", heads * (no_rope + rope), q_rank, layers),
        _linear("attention.kv_a", kv_rank + rope, width, layers),
        _linear("attention.kv_b", heads * (no_rope + value), kv_rank, layers),
        _linear("attention.out", width, heads * value, layers),
        *((_linear("mlp.gate, up", mlp, width, 2 * dense), _linear("mlp.down", width, mlp, dense)) if dense else ()),
        _linear("experts.gate, up", expert, width, 2 * sparse * experts, experts=True),
        _linear("experts.down", width, expert, sparse * experts, experts=True),
        _linear("shared.gate, up", shared * expert, width, 2 * sparse),
        _linear("shared.down", width, shared * expert, sparse),
        _other("router", experts, width, repeats=sparse),
        _other("router bias", experts, repeats=sparse),
        _other("embedding, head", vocabulary, width, repeats=2),
        _other("norms", width, repeats=2 * layers + 1),
        _other("latent norms", q_rank + kv_rank, repeats=layers),
    )
    return Model(name, source, kinds)


_ARCHITECTURES: dict[str, Callable[[_Config, str], Model]] = {
    "gpt2": _gpt_of,
    "llama": _llama_of(),
    "mistral": _llama_of(),
    "qwen2": _llama_of(biases=True),
    "qwen3": _llama_of(head_norms=True),
    "mixtral": _llama_of(experts="num_local_experts"),
    "qwen3_moe": _llama_of(head_norms=True, experts="num_experts", mlp="moe_intermediate_size"),
    "deepseek_v3": _latent_of,
}
"""By the model_type of a config.json, a function that reads its sizes."""


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
