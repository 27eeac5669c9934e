"""The largest attention logits, which `muonfx.qk_clip` needs: collected in a forward pass, and reduced over ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from muonfx.internal.tracing import is_wrapped, matches
from muonfx.internal.wrappers import unwrapped
from muonfx.tree.elementwise import wide_dtype

__all__ = ["collect_max_logits", "max_logits", "record_max_logits", "reduce_max_logits"]


def __dir__() -> list[str]:
    return sorted(__all__)


_C = cast("Any", torch._C)

_EXCLUDED = -9000.0
"""Numbers up to this one in an attention mask exclude a pair of query and key. Common are -1e4, -1e9 and -inf."""


@torch.no_grad()
def max_logits(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    chunk: int = 1 << 24,
) -> Tensor:
    """Return the largest attention logit of each head without storing the whole matrix of logits.

    A logit is ``scale * q @ k`` for a query q and a key k that are not masked. Numbers that a mask adds to the logits
    are ignored, because scaling the queries and keys does not change them. A number of -9,000 or less counts as masked.

    Args:
        query: a tensor of shape (..., heads, queries, features).
        key: a tensor of shape (..., heads, keys, features). With ``enable_gqa``, its number of heads may be a divisor
            of the number of query heads.
        attn_mask: as for ``torch.nn.functional.scaled_dot_product_attention``: bools, False for a masked pair, or
            numbers to be added to the logits.
        is_causal: as for ``scaled_dot_product_attention``.
        scale: as for ``scaled_dot_product_attention``; default: one over the root of the number of features.
        enable_gqa: as for ``scaled_dot_product_attention``.
        chunk: the maximum number of logits in memory at once.

    Returns:
        A 1-D tensor with one number for each query head, in at least float32; -inf if all pairs are masked.

    Example:
        >>> import muonfx as mfx
        >>> query, key = (
        ...     torch.tensor([[[3.0], [1.0]]]),
        ...     torch.tensor([[[1.0], [5.0]]]),
        ... )  # one head, two positions
        >>> (
        ...     mfx.attention.max_logits(query, key),
        ...     mfx.attention.max_logits(query, key, is_causal=True),
        ... )
        (tensor([15.]), tensor([5.]))
    """
    dtype = torch.promote_types(query.dtype, key.dtype)
    # fp16 overflows at 65504, and large logits are the ones to clip; torch's kernels use higher precision too.
    product_dtype = torch.float32 if dtype == torch.float16 else dtype
    query = _plain(query).to(product_dtype)
    key = _plain(key).to(product_dtype)
    heads, queries, features = query.shape[-3:]
    key_heads, keys, _ = key.shape[-3:]
    if not enable_gqa and key_heads not in (1, heads) and heads != 1:
        raise ValueError(
            f"max_logits: key has {key_heads} heads, expected {heads} as in query; if query heads share a key, "
            "pass enable_gqa=True"
        )
    if scale is None:
        scale = 1.0 / math.sqrt(features)
    if enable_gqa and key_heads != heads:
        key = key.repeat_interleave(heads // key_heads, dim=-3)
    mask = None
    if attn_mask is not None:
        mask = _unmasked(_plain(attn_mask), queries, keys)

    wide = torch.promote_types(dtype, torch.float32)
    largest = query.new_full((heads,), -math.inf, dtype=wide)
    batch_shape = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    batch = math.prod(batch_shape)
    if batch * keys == 0:
        return largest
    queries_at_once = max(1, chunk // (batch * keys))
    for start in range(0, queries, queries_at_once):
        chunk_of_queries = query[..., start : start + queries_at_once, :] * scale
        logits = _masked_logits(chunk_of_queries, key, mask, start, is_causal)
        logits_of_heads = logits.movedim(-3, 0).flatten(1)
        largest_of_chunk = logits_of_heads.amax(dim=1).to(wide)
        largest = torch.maximum(largest, largest_of_chunk)
    return largest


def _masked_logits(
    query: Tensor, key: Tensor, mask: Tensor | None, start: int, is_causal: bool
) -> Tensor:
    """Return the logits (..., queries, keys) of some queries, with -inf for masked pairs.

    The queries are those from position ``start`` of the sequence on. ``mask`` is True for all pairs of the sequence
    that are not masked. With ``is_causal``, the keys after the last of these queries are left out.
    """
    queries = query.shape[-2]
    keys = key.shape[-2]
    if is_causal:
        keys = min(start + queries, keys)
    with torch.autocast(query.device.type, enabled=False):
        logits = query @ key[..., :keys, :].mT
    if is_causal:
        logits = _without_later_keys(logits, start)
    if mask is not None:
        is_visible = mask[..., start : start + queries, :keys]
        logits = torch.where(is_visible, logits, -math.inf)
    return logits


def _without_later_keys(logits: Tensor, first_query: int) -> Tensor:
    """Return logits (..., queries, keys) with -inf for each key that comes after its query, as causal attention masks.

    The queries are a part of a sequence that begins at position ``first_query``, and the keys begin at position 0.
    """
    queries_and_keys = logits.shape[-2:]
    all_pairs = torch.ones(queries_and_keys, dtype=torch.bool, device=logits.device)
    is_later = all_pairs.triu(first_query + 1)
    return logits.masked_fill(is_later, -math.inf)


def _unmasked(mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return bools (..., queries, keys), True for pairs that are not masked, from bools or from numbers to be added."""
    if mask.dtype != torch.bool:
        mask = mask > _EXCLUDED
    shape = torch.broadcast_shapes(mask.shape, (queries, keys))
    return mask.expand(shape)


def _plain(x: Tensor) -> Tensor:
    """Return a detached tensor without wrappers, which can be stored after the forward pass.

    Within ``torch.func.grad``, tensors are wrappers that are valid only until its function returns. Raise
    NotImplementedError for a tensor with a batch of models (``vmap``) or of sequences of several lengths (nested).
    """
    x = x.detach()  # first, because `torch.func` wraps the result
    # A compiler cannot trace the queries below, and traces `torch.func` itself.
    if torch.compiler.is_compiling():
        return x
    while is_wrapped(x):  # once for each `torch.func.grad` around the call
        if _C._functorch.is_batchedtensor(x):
            raise NotImplementedError(
                "max_logits: found a tensor batched by torch.func.vmap, expected one without: heads of several models "
                "would be merged. Call it outside of vmap"
            )
        x = _C._functorch.get_unwrapped(x)
    if x.is_nested:
        raise NotImplementedError(
            "max_logits: found a nested tensor, expected one without: take the logits of each sequence, and store "
            "their largest with muonfx.attention.record_max_logits"
        )
    return x


class _Collector(TorchFunctionMode):
    """Stores the largest logits of each ``scaled_dot_product_attention``, by name of the module.

    ``rank`` is this rank in the tensor-parallel group, and ``size`` the number of its ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.largest_logits: dict[str, Tensor] = {}
        """The largest logits of each module, (heads,), over all calls so far."""
        self._rank = rank
        self._size = size
        self._running: list[str] = []
        """The names of the modules whose forward methods run, innermost last."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, and store the logits if it is ``scaled_dot_product_attention`` in a module.

        Torch calls this method for each function while the mode is active. The result of the function does not change.
        """
        kwargs = kwargs or {}
        # Only calls within an observed module have a name under which the logits can be stored.
        if self._running and func is F.scaled_dot_product_attention:
            self.add(_logits_of_call(*args, **kwargs))
        return func(*args, **kwargs)

    def enter_module(self, name: str, *_: object) -> None:
        self._running.append(name)

    def leave_module(self, *_: object) -> None:
        if self._running:
            self._running.pop()

    def add(self, logits: Tensor) -> None:
        """Store the largest logit of each head, of one attention call, under the name of the module that runs.

        If an earlier call has stored [7, 9] for the module, as for another micro-batch, and this one has [8, 2], keep
        the larger logits [8, 9].
        """
        if not self._running:
            return
        module = self._running[-1]  # the innermost one
        all_logits = self._of_all_heads(logits)
        # At the first call, the largest logits are those of this call.
        earlier_logits = self.largest_logits.get(module, all_logits)
        if len(earlier_logits) != len(all_logits):
            raise _other_number_of_heads(module, len(earlier_logits), len(all_logits))
        # Under `torch.func.grad`, results of plain tensors are wrapped too, and the dict outlives the call.
        self.largest_logits[module] = _plain(torch.maximum(earlier_logits, all_logits))

    def _of_all_heads(self, logits: Tensor) -> Tensor:
        """Return the logits of this tensor-parallel rank, with -inf, which changes no maximum, for all other heads.

        For the logits [7, 9], rank 1 of 2 returns [-inf, -inf, 7, 9].
        """
        logits_of_ranks = [torch.full_like(logits, -math.inf)] * self._size
        logits_of_ranks[self._rank] = logits
        return torch.cat(logits_of_ranks)


def _other_number_of_heads(module: str, earlier: int, heads: int) -> ValueError:
    """Return an error for a module that computes attention with two different numbers of heads."""
    return ValueError(
        f"collect_max_logits: {module!r} computes attention with {earlier} heads and with {heads}, expected one number "
        "of heads in a module: use a separate module for each, or exclude it with module="
    )


_COLLECTOR: ContextVar[_Collector | None] = ContextVar("collector", default=None)


def _logits_of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Return the largest logit of each head in one call of torch's ``scaled_dot_product_attention``.

    A logit is the scaled product of a query and a key. The arguments come from the call. Values and dropout have no
    effect on logits, so they are not used.
    """
    return max_logits(query, key, attn_mask, is_causal=is_causal, **options)


@contextmanager
def collect_max_logits(
    model: nn.Module, module: str | None = None, *, tensor_parallel: tuple[int, int] = (0, 1)
) -> Generator[dict[str, Tensor]]:
    """Collect the largest attention logits of a model's forward passes, by module and head.

    Every call of ``torch.nn.functional.scaled_dot_product_attention`` is observed. Its product of queries and keys is
    computed a second time, in chunks and without a graph. This works under ``torch.func.functional_call`` and ``grad``,
    autocast and activation checkpointing. Other attention (``nn.MultiheadAttention``, flex attention, plain products, a
    kernel of another package) is not observed: the forward method of its module must call `record_max_logits`.

    Args:
        model: the model whose modules are observed.
        module: a glob over module names. A logit is stored under the innermost running module whose name matches;
            logits computed outside of such modules are ignored. Default: every module matches.
        tensor_parallel: ``(rank, number of ranks)`` of the tensor-parallel group, if each rank computes an equal share
            of the heads of each module, in the order of the ranks. The logits of other ranks' heads are -inf.

    Yields:
        A dict from module name to a tensor with the largest logit of each head. While the context is open, it is
        updated to the largest logits of all forward passes, without a sync. For `accumulate`, open one context around
        all micro-batches of a step, because its inner transform receives the arguments of the last micro-batch. If the
        context stays open over several steps, call ``clear()`` on the dict after each step.

    Raises:
        ValueError: no module name matches; or a compiled module is, contains or is within one whose name matches.

    Example:
        >>> import muonfx as mfx
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=1.0)
        >>> model = torch.nn.Sequential(Attention())
        >>> with mfx.attention.collect_max_logits(model) as logits:
        ...     for x in (torch.full((1, 2, 3, 4), 1.0), torch.full((1, 2, 3, 4), -2.0)):
        ...         _ = model(x)
        >>> logits
        {'0': tensor([16., 16.])}
    """
    rank, size = tensor_parallel
    if not 0 <= rank < size:
        raise ValueError(
            f"collect_max_logits: tensor_parallel must be (rank, size), found {tensor_parallel!r}"
        )
    collector = _Collector(rank, size)
    with ExitStack() as stack:
        for name, observed in _modules_of(model, module).items():
            enter_module = functools.partial(collector.enter_module, name)
            stack.enter_context(observed.register_forward_pre_hook(enter_module))
            stack.enter_context(
                observed.register_forward_hook(collector.leave_module, always_call=True)
            )
        token = _COLLECTOR.set(collector)  # for `record_max_logits`
        stack.callback(_COLLECTOR.reset, token)
        stack.enter_context(collector)
        yield collector.largest_logits


def _modules_of(model: nn.Module, pattern: str | None) -> dict[str, nn.Module]:
    """Return the modules of a model whose names match a glob such as "*.attn", by name. None: all modules.

    For "*.attn", the result is a dict such as ``{"layers.0.attn": module, "layers.1.attn": module}``. Raise ValueError
    if no name matches, or if a compiled module is, contains or is within one of them.
    """
    modules = _modules_by_plain_name(model)
    matching = modules
    if pattern is not None:
        matching = {name: module for name, module in modules.items() if matches(name, pattern)}
    if not matching:  # probably a spelling mistake
        known = ", ".join(map(repr, modules))
        raise ValueError(f"collect_max_logits: {pattern!r} matches none of the modules {known}")
    _require_uncompiled(model, list(matching.values()))
    return matching


def _require_uncompiled(model: nn.Module, observed: Sequence[nn.Module]) -> None:
    """Raise ValueError if attention of an observed module may be compiled, because its calls cannot be observed.

    This is so for a compiled module that is, contains or is within an observed one. With only "layers.0" observed,
    "layers.0.attn" and the whole model must not be compiled, and "layers.1" may be.
    """
    observed_or_within: set[nn.Module] = set()
    for module in observed:
        observed_or_within.update(module.modules())
    for name, module in model.named_modules():
        is_compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        if not is_compiled:
            continue
        # A module within an observed one is in the set itself; of one that contains an observed one, a submodule is.
        if not observed_or_within.isdisjoint(module.modules()):
            raise ValueError(
                f"collect_max_logits: {name or 'the model'!r} is compiled, and the logits of a compiled forward pass "
                "cannot be observed: compile only modules that neither contain a module matched by module= nor are "
                "within one, or return muonfx.attention.max_logits(...) from the forward method, and pass "
                "max_logits={name of the module: logits} to the step"
            )


def _modules_by_plain_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return all modules of a model by name, without the parts of a name that wrappers such as DDP add.

    In a `DistributedDataParallel`, "module.attn" becomes "attn". The name of the model itself is "".

    >>> list(_modules_by_plain_name(nn.Sequential(nn.Linear(2, 2))))
    ['', '0']
    """
    submodules = {name: module for name, module in model.named_modules() if name}
    # `unwrapped` takes names of parameters, so it receives the name that a parameter of each module would have.
    # {"module.attn.weight": "attn.weight"}
    plain_name_of = unwrapped([f"{name}.weight" for name in submodules])
    plain_modules = {"": model}
    for name, module in submodules.items():
        plain_parameter = plain_name_of[f"{name}.weight"]
        # In two steps: the wrapped model itself has the plain name "weight", without a dot.
        plain_modules[plain_parameter.removesuffix("weight").removesuffix(".")] = module
    return plain_modules


def record_max_logits(most: Tensor) -> None:
    """Record the largest logits of attention that is not computed by ``scaled_dot_product_attention``.

    Call it in the forward method of a module. It does nothing outside `collect_max_logits`.

    Args:
        most: the largest logit of each query head, of shape (heads,), as `max_logits` returns it.

    Raises:
        ValueError: ``most`` does not have exactly one dim.

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
        raise ValueError(
            f"record_max_logits: found a tensor of shape {tuple(most.shape)}, expected shape (heads,)"
        )
    collector = _COLLECTOR.get()
    if collector is not None:
        collector.add(_plain(most))


@torch.no_grad()
def reduce_max_logits(
    logits: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Take the maximum over all ranks of each head's largest attention logit, with one all-reduce.

    `muonfx.qk_clip` does this itself under `muonfx.sharding.sharded` and in an optimizer with a layout. If each rank
    instead updates its own full copy of the parameters, as under plain DistributedDataParallel, call this function
    before the update. Otherwise the copies diverge.

    Args:
        logits: the dict of `collect_max_logits`, with the same module names and sizes on all ranks.
        group: the process group; default: all ranks.

    Returns:
        A dict from module name to the largest logits, in the widest of their dtypes, at least float32. If no process
        group is initialized, the given tensors.

    Example:
        >>> import muonfx as mfx
        >>> mfx.attention.reduce_max_logits({"attn": torch.tensor([3.0])})
        {'attn': tensor([3.])}
    """
    if not logits or not dist.is_available() or not dist.is_initialized():  # a single process
        return dict(logits)
    names = sorted(logits)  # the same order on all ranks
    # Concatenate the vectors of all modules, so that one all-reduce is enough, and split the result again.
    logits_of_modules = [logits[name] for name in names]
    dtypes = [most.dtype for most in logits_of_modules]
    sizes = list(map(len, logits_of_modules))
    largest = torch.cat(logits_of_modules).to(wide_dtype(*dtypes))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    largest_of_modules = largest.split(sizes)
    return dict(zip(names, largest_of_modules, strict=True))
