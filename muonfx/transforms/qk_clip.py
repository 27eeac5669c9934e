"""QK-clip: scale down the query and key weights of each head whose largest attention logit exceeds a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, EmptyState, Locality, Transform, checks, transform
from muonfx.core.checks import NamePatterns
from muonfx.core.contract import NOTHING
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.transforms._heads import AttentionHeads
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew
from muonfx.tree.arguments import did_you_mean
from muonfx.tree.wrappers import unwrapped

__all__ = ["qk_clip"]


class _Member(NamedTuple):
    """A parameter that holds queries or keys."""

    name: str
    module: str
    which: int
    """The index of its `AttentionHeads`."""
    roles: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    """The shape of the whole parameter; None if the parameter at hand is whole."""


@dataclass(frozen=True)
class _Members:
    """`AttentionHeads` together with the parameters that match them."""

    heads: tuple[AttentionHeads, ...]
    members: tuple[_Member, ...]


def _members(heads: Sequence[AttentionHeads], names: Iterable[str]) -> tuple[_Member, ...]:
    found: list[_Member] = []
    for name, plain in unwrapped(names).items():  # module names have no wrapper prefixes
        for which, own in enumerate(heads):
            place = own.module_of(plain)
            if place is not None:
                found.append(_Member(name, place[0], which, place[1]))
                break
    return tuple(found)


def _check_pairs(heads: Sequence[AttentionHeads], found: Sequence[_Member]) -> None:
    """Require both the queries and the keys of each module, because each gets a share of the factor."""
    for module, which in dict.fromkeys((own.module, own.which) for own in found):
        seen = {role: own.name for own in found if own.module == module for role in own.roles}
        for role, other in (("query", "key"), ("key", "query")):
            if role in seen and other not in seen:
                lacking = ".".join(filter(None, (module, getattr(heads[which], other))))
                raise ValueError(
                    f"qk_clip: found the {role} weights {seen[role]!r} and no {other} weights {lacking!r} among its "
                    "parameters. Each takes a share of the factor, so it must see both: give both to it in the mask or "
                    "the labels around it"
                )


def _resolve(tx: Transform, params: PyTree) -> Transform:
    given = tx.arguments["heads"]
    if isinstance(given, _Members):
        return tx
    heads = _as_tuple(given)
    shapes = {n: tuple(x.shape) for n, x in zip(tree.names(params), tree.leaves(params), strict=True) if x is not None}
    found = tuple(own._replace(shape=shapes[own.name]) for own in _members(heads, shapes))
    return tx.replace(heads=_Members(heads, found))


def _patterns(tx: Transform) -> list[NamePatterns]:
    given = tx.arguments["heads"]
    heads = () if isinstance(given, _Members) else _as_tuple(given)
    groups = tuple(group for own in heads for group in own.patterns())
    return [NamePatterns("qk_clip: heads", groups, required=True)] if groups else []


def _as_tuple(given: object) -> tuple[AttentionHeads, ...]:
    found = (given,) if isinstance(given, AttentionHeads) else tuple(given) if isinstance(given, tuple | list) else None
    if found is None or not all(isinstance(own, AttentionHeads) for own in found):
        raise TypeError(f"qk_clip: heads must be an AttentionHeads or a tuple of these, found {given!r}")
    return found


def _unchanged(values: PyTree) -> PyTree:
    return values


def _check_extras(tx: Transform, extras: Mapping[str, PyTree]) -> None:
    resolved, logits = tx.arguments["heads"], extras.get("max_logits")
    if resolved != () and "max_logits" in extras:
        _check_logits(logits)
    if isinstance(resolved, _Members) and logits is not None:
        given = _by_module(logits)
        for own in resolved.members:
            _logits_of(own.module, resolved.heads[own.which], given)


@transform(
    locality=Locality.TREE, resolve=_resolve, name_patterns=_patterns, check_extras=_check_extras, position="last"
)
def qk_clip(
    heads: AttentionHeads | tuple[AttentionHeads, ...],
    tau: ScalarOrSchedule = 100.0,
    alpha: ScalarOrSchedule = 0.5,
):
    r"""Scale query and key weights down by head where the largest attention logit of a step exceeds a bound.

    With $s_h$ the largest logit $q_i k_j^\top / \sqrt d$ of head h in the step and $\gamma_h = \min(1, \tau / s_h)$,
    the updates are changed so that the updated weights of the head's query and key, and their biases, come out times
    $\gamma_h^\alpha$ and $\gamma_h^{1 - \alpha}$: all logits of the head are multiplied by $\gamma_h$. Heads with
    $s_h \le \tau$ are left alone, bitwise, and so are those whose $s_h$ is not finite.

    It comes last in a chain, behind the learning rate, where the updates are what will be added, and inside
    `master_params`. Each `update` needs the named extra ``max_logits``: a dict with a tensor of $s_h$, one number for
    each query head, for the name of each attention module. `muonfx.attention.collect_max_logits` makes it. Over ranks
    the largest that any rank has counts, which takes one all-reduce of a number a head under
    `muonfx.sharding.sharded`; else see `muonfx.attention.reduce_max_logits`. What has no update stays as it is, and so
    lacks its share of the factor.

    Query heads that share a key head: the key is scaled by $\max_h \gamma_h^{1 - \alpha}$ over these heads, and each
    query by what its own $\gamma_h$ then lacks. So each head's logits get exactly its own factor, no factor exceeds
    1, and a key that a head below the bound looks at stays as it is. (By the smallest factor, the queries of the other
    heads would have to grow by what they did not ask for.) For the same reason a rotary key that all heads share is not
    touched: the queries that meet it are scaled by $\gamma_h$.

    Args:
        heads: which parameters hold queries and keys, or several such values where modules differ; the first that
            finds a parameter counts.
        tau: the bound, positive.
        alpha: the query's share of the exponent, from 0 to 1.

    Raises:
        TypeError: ``heads`` is something else; at `update`, ``max_logits`` is missing or not a dict.
        ValueError: a number is out of range; at `init`, a pattern matches no parameter, or one has not the rows that
            its heads need, or a mask around it hides the queries or the keys of a module; at `update`, ``params`` or an
            entry of ``max_logits`` is missing or has another shape.

    Follows Kimi K2 (arXiv 2507.20534), section 2.1 and algorithm 1.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.qk_clip(mfx.AttentionHeads("attn", heads=2), tau=100.0)
        >>> params = {"attn.q_proj.weight": torch.ones(2, 1), "attn.k_proj.weight": torch.ones(2, 1)}
        >>> updates = {name: torch.zeros(2, 1) for name in params}
        >>> logits = {"attn": torch.tensor([400.0, 30.0])}
        >>> updates, _ = tx.update(updates, tx.init(params), params, max_logits=logits)
        >>> mfx.apply_updates(params, updates)["attn.q_proj.weight"].flatten()
        tensor([0.5000, 1.0000])
    """
    tau = checks.positive("tau", tau)
    alpha = checks.at_least("alpha", alpha, 0.0)
    if isinstance(alpha, float | int) and alpha > 1:
        raise ValueError(f"alpha must be from 0 to 1, found {alpha!r}")
    given = cast("object", heads)
    resolved = given if isinstance(given, _Members) else None
    known = _as_tuple(given) if resolved is None else resolved.heads

    def found(params: PyTree) -> tuple[_Member, ...]:
        return _members(known, tree.names(params)) if resolved is None else resolved.members

    def init(params: PyTree) -> EmptyState:
        shapes = dict(zip(tree.names(params), tree.leaves(params), strict=True))
        _check_pairs(known, _members(known, shapes))
        for own in found(params) if resolved is None else ():
            if shapes[own.name] is not None:
                _check_rows(known[own.which], own, tuple(shapes[own.name].shape))
        return EmptyState()

    def update(
        updates: PyTree,
        state: EmptyState,
        params: PyTree = None,
        *,
        max_logits: PyTree,
        donate: Donation = NOTHING,
        shard: Callable[[PyTree], PyTree] = _unchanged,
        max_over_ranks: Callable[[Tensor], Tensor] = _unchanged,
    ):
        members = found(updates if params is None else params)
        if not members:
            return updates, state
        if params is None:
            raise ValueError("qk_clip needs the parameters: call update(updates, state, params)")
        names, leaves = tree.names(params), tree.leaves(params)
        weights = dict(zip(names, leaves, strict=True))
        wide = ew.wide_dtype(*(w.dtype for own in members if (w := weights[own.name]) is not None))
        at = torch.zeros((), dtype=wide, device=tree.device_of(params))
        factors = _factors(known, members, max_logits, tau, alpha, max_over_ranks, at)
        whole = {own.name: _of_rows(known[own.which], own, weights[own.name], factors) for own in members}
        local = shard({name: lacking for name, lacking in whole.items() if lacking is not None})
        changed = [
            _scaled(u, weights[name], local[name]) if u is not None and name in local else u
            for name, u in zip(names, tree.leaves(updates), strict=True)
        ]
        return tree.unflatten(tree.flatten(updates)[1], changed), state

    def update_without_heads(
        updates: PyTree,
        state: EmptyState,
        params: PyTree = None,
        *,
        max_logits: PyTree = None,
        donate: Donation = NOTHING,
        shard: Callable[[PyTree], PyTree] = _unchanged,
    ):
        return updates, state

    return init, update if known else update_without_heads


def _axis(own: AttentionHeads, shape: Sequence[int]) -> int:
    return 0 if len(shape) == 1 else own.axis % len(shape)


def _check_rows(own: AttentionHeads, member: _Member, shape: tuple[int, ...]) -> None:
    if not shape or (len(shape) > 1 and not -len(shape) <= own.axis < len(shape)):
        raise ValueError(f"qk_clip: {member.name!r} has shape {shape}, and no dim {own.axis}, which {own!r} says")
    own.parts(member.name, shape[_axis(own, shape)], member.roles)


def _factors(
    heads: Sequence[AttentionHeads],
    members: Sequence[_Member],
    max_logits: PyTree,
    tau: float | Tensor,
    alpha: float | Tensor,
    max_over_ranks: Callable[[Tensor], Tensor],
    like: Tensor,
) -> dict[str, dict[str, Tensor]]:
    """Return the factors of each module by kind, one per head; modules with the same heads are batched."""
    _check_logits(max_logits)
    given = _by_module(max_logits)
    which = {own.module: own.which for own in members}
    modules = sorted(which, key=lambda module: which[module])
    logits = [_logits_of(module, heads[which[module]], given) for module in modules]
    most = max_over_ranks(torch.cat([own.to(like) for own in logits]))
    rows = dict(zip(modules, most.split([len(own) for own in logits]), strict=True))
    found: dict[str, dict[str, Tensor]] = {}
    for place, own in enumerate(heads):
        mine = [module for module in modules if which[module] == place]
        if not mine:
            continue
        largest = torch.stack([rows[module] for module in mine])
        exceeds = largest.isfinite() & (largest > tau)
        gamma = torch.where(
            exceeds, ew.scalar_like(tau, largest) / torch.where(exceeds, largest, 1.0), torch.ones_like(largest)
        )
        groups = gamma.unflatten(1, (own.keys, own.heads // own.keys))
        key = torch.pow(groups.amax(dim=2), ew.scalar_like(1.0 - alpha, groups))
        query = (groups / key.unsqueeze(2)).flatten(1)
        kinds = {"query": query.unbind(), "key": key.unbind(), "rotary": gamma.unbind()}
        found |= {module: {kind: every[i] for kind, every in kinds.items()} for i, module in enumerate(mine)}
    return found


def _check_logits(max_logits: object) -> None:
    if not isinstance(max_logits, Mapping):
        raise TypeError(
            "qk_clip: max_logits must be a dict with a tensor for each attention module, as "
            f"muonfx.attention.collect_max_logits collects it, found {max_logits!r}"
        )


def _by_module(max_logits: PyTree) -> dict[str, PyTree]:
    return dict(zip(tree.names(max_logits), tree.leaves(max_logits), strict=True))


def _logits_of(module: str, own: AttentionHeads, given: dict[str, PyTree]) -> Tensor:
    logits = given.get(module)
    if not isinstance(logits, Tensor) or logits.dtype == torch.bool or logits.is_complex():
        found = f", found {logits!r}" if module in given else did_you_mean(module, given)
        raise ValueError(
            f"qk_clip: max_logits has no tensor for the module {module!r}{found}: give the "
            f"largest logit of each of its {own.heads} heads, update(..., max_logits={{{module!r}: ...}}), which "
            "muonfx.attention.collect_max_logits collects"
        )
    if tuple(logits.shape) != (own.heads,):
        raise ValueError(
            f"qk_clip: max_logits[{module!r}] has shape {tuple(logits.shape)}, expected ({own.heads},), one number for "
            "each query head; on a rank with some of the heads, -inf stands for the others"
        )
    return logits


def _of_rows(
    own: AttentionHeads, member: _Member, weight: Tensor | None, factors: dict[str, dict[str, Tensor]]
) -> Tensor | None:
    """Return 1 minus the factors of a whole parameter, in its shape."""
    if weight is None:
        return None
    shape = weight.shape if member.shape is None else member.shape
    axis = _axis(own, shape)
    product: Tensor | None = None
    for part in own.parts(member.name, shape[axis], member.roles):
        each = part.of(factors[member.module][part.kind], shape[axis])
        product = each if product is None else product * each  # parts do not overlap: one of the factors is 1
    assert product is not None
    along = [1] * len(shape)
    along[axis] = shape[axis]
    return (1.0 - product).to(weight.device).reshape(along).expand(shape)


def _scaled(update: Tensor, weight: Tensor, lacking: Tensor) -> Tensor:
    """Return the update that makes the new weight equal to the updated weight times a factor."""
    wide = ew.wide_dtype(update.dtype, weight.dtype)
    u, w, lack = update.to(wide), weight.to(wide), lacking.to(wide)
    # f (w + u) - w, written as u + (1 - f) (-w - u) to keep the digits of a small u.
    return torch.where(lack == 0, u, torch.lerp(u, -w, lack)).to(update.dtype)
