"""Largest attention logits for `muonfx.qk_clip`: collected in a forward pass, and reduced over ranks."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from muonfx.tree.display import format_list
from muonfx.tree.tracing import is_wrapped, matches
from muonfx.tree.wrappers import unwrapped

__all__ = ["collect_max_logits", "max_logits", "record_max_logits", "reduce_max_logits"]


def __dir__() -> list[str]:
    return sorted(__all__)


_C = cast("Any", torch._C)

CHUNK = 1 << 24
"""The maximum number of logits in memory at once."""

_EXCLUDED = -9000.0
"""A mask that adds this or less excludes a pair; common values are -1e4, -1e9 and -inf."""

Maxima: TypeAlias = dict[str, Tensor]


@torch.no_grad()
def max_logits(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    chunk: int = CHUNK,
) -> Tensor:
    """The largest attention logit of each head, without the matrix of all of them.

    It is the largest ``scale * q @ k`` of those pairs that take part. What a mask adds to a logit does not count, since
    no scaling of queries and keys changes it; a pair to which it adds -9,000 or less takes no part: its weight is zero.

    Args:
        query: (..., heads, queries, features).
        key: (..., heads, keys, features), or with ``enable_gqa`` a number of heads that divides those of the queries.
        attn_mask: as for ``torch.nn.functional.scaled_dot_product_attention``: bools, True where a pair takes part, or
            numbers to be added.
        is_causal: as there.
        scale: as there; None is one over the root of the features.
        enable_gqa: as there.
        chunk: the most logits that are held at once.

    Returns:
        One number for each query head, in float32 at least; -inf where no pair takes part.

    Example:
        >>> import muonfx as mfx
        >>> query, key = torch.tensor([[[3.0], [1.0]]]), torch.tensor([[[1.0], [5.0]]])  # one head, two positions
        >>> mfx.attention.max_logits(query, key), mfx.attention.max_logits(query, key, is_causal=True)
        (tensor([15.]), tensor([5.]))
    """
    query, key = _plain(query), _plain(key)
    mask = None if attn_mask is None else _plain(attn_mask)
    if torch.float16 in (query.dtype, key.dtype, _autocast_dtype(query)):
        # fp16 overflows at 65504, and large logits are the ones to clip; torch's kernels use higher precision too.
        with torch.autocast(query.device.type, enabled=False):
            return max_logits(
                query.float(), key.float(), mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, chunk=chunk
            )
    if query.ndim < 3:
        query, key = query.unsqueeze(-3), key.unsqueeze(-3)
    heads, queries, features = query.shape[-3:]
    keys = key.shape[-2]
    scale = 1.0 / math.sqrt(features) if scale is None else scale
    if enable_gqa and key.shape[-3] != heads:
        key = key.repeat_interleave(heads // key.shape[-3], dim=-3)
    dtype = query.dtype if query.dtype == torch.float64 else torch.float32
    most = torch.full((heads,), -math.inf, dtype=dtype, device=query.device)
    batch = math.prod(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))
    rows = max(1, chunk // max(1, batch * keys))
    for start in range(0, queries if keys else 0, rows):
        end = min(start + rows, queries)
        seen = min(end, keys) if is_causal else keys  # all later keys are masked for these queries
        logits = (query[..., start:end, :] * scale) @ key[..., :seen, :].mT
        if is_causal:
            later = torch.ones(end - start, seen, dtype=torch.bool, device=query.device).triu(start + 1)
            logits = logits.masked_fill(later, -math.inf)
        if mask is not None:
            logits = torch.where(_takes_part(mask, start, end, seen), logits, -math.inf)
        logits = logits.movedim(-3, 0).flatten(1)
        if logits.shape[1]:
            most = torch.maximum(most, logits.amax(dim=1).to(dtype))
    return most


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast would round a factor of a product, or None if it would not."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _takes_part(mask: Tensor, start: int, end: int, seen: int) -> Tensor:
    """Return the bool mask of some queries and keys; a mask dim of size 1 broadcasts."""
    part = mask if mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., start:end, :]
    part = part if part.shape[-1] == 1 else part[..., :seen]
    return part if part.dtype == torch.bool else part > _EXCLUDED


def _plain(x: Tensor) -> Tensor:
    """Return the detached tensor inside a ``torch.func`` wrapper, because recorded values outlive its scope."""
    while is_wrapped(x):
        if _C._functorch.is_batchedtensor(x):
            raise NotImplementedError(
                "max_logits: not under torch.func.vmap, where heads of several runs are one; call it outside"
            )
        x = _C._functorch.get_unwrapped(x)
    if x.is_nested:
        raise NotImplementedError(
            "max_logits: not of nested tensors; record the largest logits with muonfx.attention.record_max_logits"
        )
    return x.detach()


class _Collector(NamedTuple):
    """The stack of modules whose forward is running, and the collected logits."""

    found: Maxima
    open_modules: list[str]
    rank: int
    size: int
    ran: dict[str, bool]
    """For each outermost module that ran, whether attention was seen in it."""

    def add(self, most: Tensor) -> None:
        if not self.open_modules:
            return
        self.ran[self.open_modules[0]] = True
        module = self.open_modules[-1]
        if self.size > 1:
            before = most.new_full((len(most) * self.rank,), -math.inf)
            after = most.new_full((len(most) * (self.size - 1 - self.rank),), -math.inf)
            most = torch.cat([before, most, after])
        known = self.found.get(module)
        if known is not None and len(known) != len(most):
            raise ValueError(
                f"collect_max_logits: {module!r} computes attention of {len(known)} heads and of {len(most)}: give "
                "each a module of its own, or choose modules by name (module=) so that this one is left out"
            )
        self.found[module] = most if known is None else torch.maximum(known, most)


_COLLECTOR: ContextVar[_Collector | None] = ContextVar("collector", default=None)


_OPAQUE = frozenset(
    {F.multi_head_attention_forward, torch._native_multi_head_attention, torch._transformer_encoder_layer_fwd}
)
"""Functions that compute attention without calling the torch function mode."""


class _Watch(TorchFunctionMode):
    """Records the logits of every call of torch's attention."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        collector = _COLLECTOR.get()
        if collector is not None and collector.open_modules:
            if func is F.scaled_dot_product_attention:
                collector.add(_logits_of_call(*args, **kwargs))
            elif func in _OPAQUE:
                raise NotImplementedError(
                    f"collect_max_logits: {collector.open_modules[-1]!r} computes attention in {func.__name__}, "
                    "beneath which nothing can be seen (nn.MultiheadAttention, nn.TransformerEncoderLayer): call "
                    "scaled_dot_product_attention, or muonfx.attention.record_max_logits in its place"
                )
        return func(*args, **kwargs)


def _logits_of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    return max_logits(query, key, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


@contextmanager
def collect_max_logits(
    model: nn.Module, module: str | None = None, *, tensor_parallel: tuple[int, int] = (0, 1)
) -> Generator[Maxima]:
    """Collect the largest attention logits of a model's forward passes, by module and head.

    Each call of ``torch.nn.functional.scaled_dot_product_attention`` is looked at, chunk by chunk, which costs the
    product of queries and keys a second time and no graph. It works under ``torch.func.functional_call`` and ``grad``,
    autocast and activation checkpointing. It does not see attention that is computed otherwise (flex attention, a
    kernel of another package, plain products): there the module's forward calls `record_max_logits` itself.

    Args:
        model: whose modules count.
        module: a glob over names: logits belong to the innermost of the modules with such a name in whose forward they
            are computed, and others are left out. None: to the innermost module.
        tensor_parallel: this rank and how many ranks share the heads of each module, where each computes as many,
            one rank's behind the other's. The numbers of the others' heads are -inf here.

    Yields:
        A dict by module name, of one tensor each, filled in while the context is open: the largest of all passes, so
        that one context around several micro-batches serves `accumulate`, which hands its inner transform what the
        last of them was given. Nothing waits for the device. Empty it (``clear()``) after each step
        where the context stays open.

    Raises:
        ValueError: a module of the model is compiled, where nothing can be collected; or no module has such a name.
        NotImplementedError: in the forward pass, a module that counts is an ``nn.MultiheadAttention``.

    Warns:
        UserWarning: modules ran, and no attention was seen: in one that ``module`` names, or without it in none.

    Example:
        >>> import muonfx as mfx
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=1.0)
        >>> with mfx.attention.collect_max_logits(torch.nn.Sequential(Attention())) as logits:
        ...     for x in (torch.full((1, 2, 3, 4), 1.0), torch.full((1, 2, 3, 4), -2.0)):
        ...         _ = torch.nn.Sequential(Attention())(x)  # another model
        >>> logits
        {}
        >>> model = torch.nn.Sequential(Attention())
        >>> with mfx.attention.collect_max_logits(model) as logits:
        ...     for x in (torch.full((1, 2, 3, 4), 1.0), torch.full((1, 2, 3, 4), -2.0)):
        ...         _ = model(x)
        >>> logits
        {'0': tensor([16., 16.])}
    """
    rank, size = tensor_parallel
    if not 0 <= rank < size:
        raise ValueError(f"collect_max_logits: tensor_parallel must be (rank, size), found {tensor_parallel!r}")
    modules = _modules_of(model, module)
    collector = _Collector({}, [], rank, size, {})
    handles: list[Any] = []
    try:
        for name, own in modules.items():
            handles.append(own.register_forward_pre_hook(functools.partial(_open, collector, name)))
            handles.append(own.register_forward_hook(functools.partial(_close, collector), always_call=True))
        before = _COLLECTOR.set(collector)
        try:
            with _Watch():
                yield collector.found
        finally:
            _COLLECTOR.reset(before)
    finally:
        for handle in handles:
            handle.remove()
    blind = [name for name, saw in collector.ran.items() if not saw]
    if blind and (module is not None or len(blind) == len(collector.ran)):
        shown = format_list(blind, lambda name: repr(name) if name else "the model")
        warnings.warn(
            f"collect_max_logits: no attention was seen in {shown}, though it ran. Only "
            "calls of torch.nn.functional.scaled_dot_product_attention are seen. If attention is computed otherwise "
            "(flex attention, a kernel of another package, plain products), call muonfx.attention.record_max_logits "
            "in the module's forward. If the module computes none, choose others with module=",
            UserWarning,
            stacklevel=3,
        )


def _open(collector: _Collector, name: str, *_: object) -> None:
    collector.open_modules.append(name)


def _close(collector: _Collector, module: nn.Module, args: object, output: object) -> None:
    if collector.open_modules:
        name = collector.open_modules.pop()
        if not collector.open_modules and output is not None:  # output is None after an error
            collector.ran.setdefault(name, False)


def _modules_of(model: nn.Module, pattern: str | None) -> dict[str, nn.Module]:
    every = dict(model.named_modules())
    compiled = [n for n, own in every.items() if own._compiled_call_impl is not None or hasattr(own, "_orig_mod")]
    if compiled:
        raise ValueError(
            f"collect_max_logits: {compiled[0] or 'the model'!r} is compiled, and what a compiled pass computes cannot "
            "be seen: collect in a pass of the model before torch.compile, or return the largest logits from it"
        )
    plain = unwrapped(f"{name}.parameter" for name in every if name)  # names without wrappers, as optimizers use
    found = {plain.get(f"{name}.parameter", "").rpartition(".")[0]: own for name, own in every.items()}
    chosen = {name: own for name, own in found.items() if pattern is None or matches(name, pattern)}
    if not chosen:
        raise ValueError(f"collect_max_logits: {pattern!r} matches none of the modules {', '.join(map(repr, found))}")
    return chosen


def record_max_logits(most: Tensor) -> None:
    """Record the largest logits of attention that is computed by other means than torch's own function.

    Called in the forward pass of a module. It does nothing unless `collect_max_logits` is open.

    Args:
        most: one number for each query head, as `max_logits` returns.

    Raises:
        ValueError: it has not one dim.

    Example:
        >>> import muonfx as mfx
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, query, key, value):
        ...         mfx.attention.record_max_logits(mfx.attention.max_logits(query, key, scale=1.0))
        ...         return (query @ key.mT).softmax(-1) @ value
        >>> model, x = Attention(), torch.ones(2, 3, 4)
        >>> with mfx.attention.collect_max_logits(model) as logits:
        ...     _ = model(x, x, x)
        >>> logits
        {'': tensor([4., 4.])}
    """
    if most.ndim != 1:
        raise ValueError(f"record_max_logits: give one number a head, found a tensor of shape {tuple(most.shape)}")
    collector = _COLLECTOR.get()
    if collector is not None:
        with torch.no_grad():
            collector.add(_plain(most))


@torch.no_grad()
def reduce_max_logits(logits: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> Maxima:
    """The largest logits of all ranks, by one all-reduce; for loops in which no layout knows the ranks.

    Under `muonfx.sharding.sharded`, and with an optimizer over a layout, `muonfx.qk_clip` does this itself. Where each
    rank updates a whole copy of its own, as under plain DistributedDataParallel, ranks must call this before the
    update, or their copies drift apart.

    Args:
        logits: as `collect_max_logits` gives them; the same names and sizes on all ranks.
        group: the ranks; None: all.

    Returns:
        The same names with the largest numbers; the given tensors where no process group is initialized.

    Example:
        >>> import muonfx as mfx
        >>> mfx.attention.reduce_max_logits({"attn": torch.tensor([3.0])})
        {'attn': tensor([3.])}
    """
    if not logits or not dist.is_available() or not dist.is_initialized():
        return dict(logits)
    names = sorted(logits)
    most = torch.cat([logits[name].float() for name in names])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(names, most.split([len(logits[name]) for name in names]), strict=True))
