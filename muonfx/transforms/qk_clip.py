"""QK-clip: scale down the query and key weights of each head whose largest attention logit exceeds a bound."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonfx import tree
from muonfx.core import Donation, EmptyState, Locality, Transform, checks, transform
from muonfx.core.donation import NOTHING
from muonfx.core.extras import unchanged
from muonfx.core.patterns import NamePatterns
from muonfx.core.schedules import ScalarOrSchedule
from muonfx.internal.arguments import code_of, did_you_mean, plain_fields
from muonfx.internal.tracing import matches
from muonfx.internal.wrappers import unwrapped
from muonfx.transforms.formulas import divide_unless
from muonfx.transforms.leafwise import params_for
from muonfx.tree import PyTree
from muonfx.tree import elementwise as ew

Span = tuple[int, int]
"""A range of rows within the block of a head: the first row and the end (exclusive)."""

_ENDINGS = ("", ".weight", ".bias", "_weight", "_bias")


def _is_span(rows: object) -> bool:
    """Return True for a range of rows: a tuple (first, end) of ints with 0 <= first < end, such as (0, 64)."""
    if not isinstance(rows, tuple) or len(rows) != 2:
        return False
    first, end = rows
    if not isinstance(first, int) or not isinstance(end, int):
        return False
    return 0 <= first < end


@plain_fields
@dataclass(frozen=True, repr=False)
class AttentionHeads:
    """The query and key weights of attention modules for `qk_clip`, and the rows that belong to each head.

    The weights and biases of a module are found by name. With ``query="q_proj"``, the queries of ``layers.0.attn`` are
    ``layers.0.attn.q_proj.weight`` and ``.bias``, or a parameter ``layers.0.attn.q_proj``. The rows of a weight (its
    output features) are equal blocks of consecutive rows, one block for each head.

    Args:
        module: a glob over the dotted names of attention modules. These names are the keys of ``max_logits``.
        heads: the number of query heads.
        key_heads: the number of key heads, which divides ``heads``. Consecutive query heads share a key head. Default:
            as many as query heads.
        query: the name of the query weights within the module.
        key: the name of the key weights. For fused weights, give the same name as for ``query``. If neither
            ``query_dims`` nor ``key_dims`` is given, their rows are all queries, then all keys, then all values, with
            as many values as keys.
        query_dims: the range (first, end) of rows of the query within the block of its head. Default: all rows of the
            block except ``rotary_dims``.
        key_dims: the range of rows of the key within the block of its head, if the block contains other rows too, such
            as a value.
        rotary_dims: the range of rows within the block of a query head that are multiplied by a rotary key which all
            heads share, as in multi-head latent attention.
        axis: the dim of output features in a weight: 0 for ``nn.Linear``, 1 for ``Conv1D``.

    Raises:
        TypeError: an argument has another type.
        ValueError: heads are not a multiple of key heads, or a range is not a pair of ints, empty or negative.

    Example:
        >>> import muonfx as mfx
        >>> mfx.AttentionHeads("*.self_attn", heads=32, key_heads=8)
        AttentionHeads(module='*.self_attn', heads=32, key_heads=8)
        >>> fused = mfx.AttentionHeads("*.attn", heads=12, query="qkv", key="qkv")
    """

    module: str
    heads: int
    key_heads: int | None = None
    query: str = "q_proj"
    key: str = "k_proj"
    query_dims: Span | None = None
    key_dims: Span | None = None
    rotary_dims: Span | None = None
    axis: int = 0

    def __post_init__(self) -> None:
        """Check the numbers of heads and the ranges of rows.

        8 query heads and 2 key heads are valid: 4 query heads share a key. A range is a pair such as (0, 64), whose end
        is exclusive.
        """
        checks.positive_int("AttentionHeads: heads", self.heads)
        checks.positive_int("AttentionHeads: key_heads", self.keys)
        if self.heads % self.keys:  # each key head must be shared by equally many query heads
            raise ValueError(
                f"AttentionHeads: heads must be a multiple of key_heads, found {self.heads} and {self.keys}"
            )
        for name in ("query_dims", "key_dims", "rotary_dims"):
            rows = getattr(self, name)
            if rows is not None and not _is_span(rows):
                raise ValueError(
                    f"AttentionHeads: {name} must be a tuple (first, end) of ints with 0 <= first < end, found {rows!r}"
                )

    def __repr__(self) -> str:
        return code_of(self)

    @property
    def keys(self) -> int:
        """The number of key heads. It equals ``heads`` if ``key_heads`` is None."""
        return self.heads if self.key_heads is None else self.key_heads

    def patterns(self) -> tuple[tuple[str, ...], ...]:
        """Return the globs that find the query weights and the key weights by name: a tuple for each of the two.

        Fused weights have both queries and keys, so there is a single tuple.

        >>> queries, keys = AttentionHeads("*.attn", heads=2).patterns()
        >>> queries
        ('*.attn.q_proj', '*.attn.q_proj.weight', '*.attn.q_proj.bias', '*.attn.q_proj_weight', '*.attn.q_proj_bias')
        """
        # The beginning of a parameter's name: the glob of its module and a dot.
        prefixes: list[str] = []
        if self.module:
            prefixes.append(f"{self.module}.")
        if matches("", self.module):  # the model itself, whose name is "", is an attention module
            prefixes.append("")
        groups: list[tuple[str, ...]] = []
        for projection in dict.fromkeys((self.query, self.key)):  # one name if they are fused
            globs: list[str] = []
            for prefix in prefixes:
                globs += [f"{prefix}{projection}{ending}" for ending in _ENDINGS]
            groups.append(tuple(globs))
        return tuple(groups)

    def module_of(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Return the attention module of a parameter, and a tuple of its contents: "query", "key", both or none.

        >>> heads = AttentionHeads("*.attn", heads=2, query="q_proj", key="k_proj")
        >>> (
        ...     heads.module_of("layers.0.attn.q_proj.weight"),
        ...     heads.module_of("layers.0.attn.o_proj.weight"),
        ... )
        (('layers.0.attn', ('query',)), ('', ()))
        """
        module = ""
        roles: list[str] = []
        # A fused weight has one name for both, such as "qkv", so it is found twice and has both roles.
        for projection, role in ((self.query, "query"), (self.key, "key")):
            for ending in _ENDINGS:  # such as ".weight" and ".bias"
                candidate = _module_before(name, projection + ending)
                if candidate is not None and matches(candidate, self.module):
                    module = candidate
                    roles.append(role)
        return module, tuple(roles)

    def places(
        self, name: str, size: int, roles: tuple[str, ...], device: torch.device | str
    ) -> Tensor:
        """Return for each row of a query or key weight the position of its factor in a vector of all factors.

        `qk_clip` multiplies the rows of a head by a factor; `_factors` computes the vector. With 2 heads, the positions
        in that vector are: 0 and 1 for the queries, 2 and 3 for the keys, 4 and 5 for the rotary queries, and 6 for all
        other rows, whose factor is 1. A key weight of 6 rows gives [2, 2, 2, 3, 3, 3].

        Args:
            name: the name of the weight, for errors.
            size: its number of rows.
            roles: what it contains: "query", "key", or both.
            device: the device of the result.
        """
        # Each group of factors has a place in the vector: those of the queries begin at 0, then come the groups below.
        first_key = self.heads
        first_rotary = first_key + self.keys
        unclipped = first_rotary + self.heads
        # A fused weight has one block of rows for each query, key and value head: q0, q1, k0 and v0 for 2 query heads
        # and 1 key head. With dims, it has one block for each query or key head, which contains these dims.
        is_fused = self.query == self.key
        number_if_fused = self.heads + 2 * self.keys

        positions = torch.full((size,), unclipped, device=device)  # first of all, no row changes
        if "query" in roles:
            spans = [self.query_dims, self.rotary_dims]
            if is_fused and self.query_dims is None:
                query_blocks = self._blocks(name, positions, number_if_fused, spans)[: self.heads]
            else:
                query_blocks = self._blocks(name, positions, self.heads, spans)
            # Writes into `positions`, of which it is a view.
            _fill_rows(query_blocks, self.query_dims, first_factor=0)
            # Afterwards, because the rotary rows are a part of the rows above if ``query_dims`` is None.
            if self.rotary_dims is not None:
                _fill_rows(query_blocks, self.rotary_dims, first_factor=first_rotary)
        if "key" in roles:
            if is_fused and self.key_dims is None:
                key_blocks = self._blocks(name, positions, number_if_fused, [])[
                    self.heads : self.heads + self.keys
                ]
            else:
                key_blocks = self._blocks(name, positions, self.keys, [self.key_dims])
            _fill_rows(key_blocks, self.key_dims, first_factor=first_key)
        return positions

    def _blocks(self, name: str, rows: Tensor, number: int, spans: list[Span | None]) -> Tensor:
        """Return a vector as a view of shape (number of blocks, rows of a block).

        The vector ``rows`` has an item for each row of the weight ``name``. Raise ValueError unless its rows are equal
        blocks that contain the ranges ``spans``, such as (0, 64).
        """
        # divmod is not used, because a tracer cannot apply it to a symbolic size.
        block_size = len(rows) // number
        if len(rows) % number:
            raise self._unequal_blocks(name, len(rows))
        for span in spans:
            if span is not None and span[1] > block_size:  # it does not end within a block
                raise self._unequal_blocks(name, len(rows))
        return rows.view(number, block_size)

    def _unequal_blocks(self, name: str, size: int) -> ValueError:
        """Return an error for a weight whose rows are not equal blocks for the heads, or whose blocks are too small."""
        return ValueError(
            f"qk_clip: {name!r} has {size} rows, expected equal blocks, one for each head of {self!r}, that "
            "contain its dims: correct the heads or the dims"
        )


def _module_before(name: str, ending: str) -> str | None:
    """Return the module of a parameter name that ends with the name ``ending``; None if it does not.

    "layers.0.q_proj.weight" and "q_proj.weight" give "layers.0", and "my_q_proj.weight" gives None.
    """
    if name == ending:
        return ""
    if name.endswith(f".{ending}"):
        return name.removesuffix(f".{ending}")
    return None


def _fill_rows(blocks: Tensor, span: Span | None, first_factor: int) -> None:
    """Write the position of its factor into a range of rows of each head: ``first_factor + h`` for the head h.

    For 2 heads of 3 rows, ``first_factor=2`` and the range (0, 2), the items ``[[6, 6, 6], [6, 6, 6]]`` of ``blocks``
    become ``[[2, 2, 6], [3, 3, 6]]``. The range None selects all rows.
    """
    heads, rows = blocks.shape
    if span is None:
        span = (0, rows)
    first, end = span
    # [2, 3]
    position_of_head = torch.arange(first_factor, first_factor + heads, device=blocks.device)
    # [[2], [3]], repeated for the rows of each head
    blocks[:, first:end] = position_of_head.unsqueeze(1)


class _Member(NamedTuple):
    """A parameter that holds query or key weights (or both) of an attention module."""

    name: str
    module: str
    heads: AttentionHeads
    roles: tuple[str, ...]
    shape: tuple[int, ...]
    """The full shape of the parameter, not of a shard."""

    def factor_indices(self, device: torch.device | str) -> Tensor:
        """Return for each row of the parameter the index of its factor, in a shape that broadcasts to the parameter.

        The shape is (rows, 1) for a weight and (rows,) for a bias. See `AttentionHeads.places`.
        """
        shape = self.shape
        # The dim whose items are the output features: the rows.
        axis = 0 if len(shape) == 1 else self.heads.axis
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"qk_clip: {self.name!r} has shape {shape}, expected a dim {axis}, the axis of {self.heads!r}: "
                "correct axis="
            )
        indices = self.heads.places(self.name, shape[axis], self.roles, device)
        # The shape is [6, 1] after the next line, for a weight of shape (6, 4).
        broadcast_shape = [1] * len(shape)
        broadcast_shape[axis] = shape[axis]
        return indices.reshape(broadcast_shape)


def _as_tuple(heads: object) -> tuple[AttentionHeads | _Member, ...]:
    """Return the argument ``heads`` of `qk_clip` as a tuple: ``(heads,)`` for a single item. Raise for other types.

    Users pass `AttentionHeads`, such as ``AttentionHeads("*.attn", heads=8)``. When the parameters are known,
    `_resolve` replaces these by the query and key weights that they match, as `_Member`.
    """
    items: Any = heads
    if type(heads) is not tuple:  # a single item
        items = (heads,)
    for item in items:
        if not isinstance(item, AttentionHeads | _Member):
            raise TypeError(
                f"qk_clip: heads must be an AttentionHeads or a tuple of these, found {heads!r}"
            )
    return items


def _members(heads: tuple[AttentionHeads | _Member, ...], params: PyTree) -> list[_Member]:
    """Return the parameters that hold queries or keys, such as "attn.q_proj.weight" and "attn.k_proj.weight".

    They are found by name, and the first `AttentionHeads` that matches a name is used. If `_resolve` has found them
    before, they are the items of ``heads``.
    """
    members = [item for item in heads if isinstance(item, _Member)]
    if members:
        return members
    attentions = [item for item in heads if isinstance(item, AttentionHeads)]
    leaves = dict(tree.named_leaves(params))
    plain_names = unwrapped(leaves)  # module names have no wrapper prefixes
    for name, plain_name in plain_names.items():
        if leaves[name] is None:  # it is not updated, as a frozen quantized weight
            continue
        shape = tuple(leaves[name].shape)
        for attention in attentions:
            # "attn" and ("query",) for "attn.q_proj.weight"
            module, roles = attention.module_of(plain_name)
            if roles:  # the parameter holds queries, keys or both
                members.append(_Member(name, module, attention, roles, shape))
                break
    _require_biases(members, plain_names)
    return members


def _require_biases(members: list[_Member], plain_names: Mapping[str, str]) -> None:
    """Raise if `nn.MultiheadAttention` adds a bias to queries or keys, and no `AttentionHeads` matches this bias.

    A query is ``W x + b``. If only the weight W were scaled, the logits would not be multiplied by the factor.

    Args:
        members: the parameters that are scaled.
        plain_names: the names of all parameters without the prefixes of wrappers, by name.
    """
    all_names = set(plain_names.values())
    member_names = {plain_names[member.name] for member in members}
    for member in members:
        prefix = f"{member.module}." if member.module else ""  # "layers.0.self_attn."
        # One bias for queries, keys and values, also if these have separate weights, because of kdim or vdim.
        bias = f"{prefix}in_proj_bias"
        if bias in all_names and bias not in member_names:
            raise ValueError(
                f"qk_clip: no AttentionHeads matches {bias!r}, which has the biases of queries and keys: give a "
                f'tuple of {member.heads!r} and the same with query="in_proj", key="in_proj"'
            )
        key_bias = f"{prefix}bias_k"  # appended to the keys by add_bias_kv=True
        if key_bias in all_names:
            raise ValueError(
                f"qk_clip: found {key_bias!r}, a further key that no weight projects, expected attention without it: "
                "create the module with add_bias_kv=False"
            )


def _resolve(tx: Transform, params: PyTree) -> Transform:
    """Return the transform with the names and full shapes of its parameters, so that it also works on shards."""
    members = _members(_as_tuple(tx.arguments["heads"]), params)
    return tx.replace(heads=tuple(members))


def _patterns(tx: Transform) -> list[NamePatterns]:
    """Return the globs of all `AttentionHeads`, for the check that each of them matches a parameter.

    A group has alternative globs, for the weight and the bias of a projection, of which one must match:
    ``("*.attn.q_proj", "*.attn.q_proj.weight", "*.attn.q_proj.bias", ...)``.
    """
    groups: list[tuple[str, ...]] = []
    for item in _as_tuple(tx.arguments["heads"]):
        if isinstance(item, AttentionHeads):
            groups += item.patterns()
    # There are no heads, or `_resolve` has replaced all globs by parameters.
    if not groups:
        return []
    return [NamePatterns("qk_clip: heads", tuple(groups), required=True)]


def _check_extras(tx: Transform, extras: Mapping[str, PyTree]) -> None:
    heads = _as_tuple(tx.arguments["heads"])
    if heads and "max_logits" in extras:
        members = [item for item in heads if isinstance(item, _Member)]
        _logits(members, extras["max_logits"])


@transform(
    locality=Locality.TREE,
    resolve=_resolve,
    name_patterns=_patterns,
    check_extras=_check_extras,
    position="last",
)
def qk_clip(
    heads: AttentionHeads | tuple[AttentionHeads, ...],
    tau: ScalarOrSchedule = 100.0,
    alpha: ScalarOrSchedule = 0.5,
):
    r"""Scale down the query and key weights of each head whose largest attention logit exceeds a bound.

    Let $s_h$ be the largest logit $q_i k_j^\top / \sqrt d$ of head h in the step, and $\gamma_h = \min(1, \tau / s_h)$.
    The updates are changed so that the new query weights of the head, and their biases, are multiplied by
    $\gamma_h^\alpha$, and its key weights by $\gamma_h^{1 - \alpha}$. All logits of the head are then multiplied by
    $\gamma_h$. Heads with $s_h \le \tau$, or with an $s_h$ that is not finite, are bitwise unchanged.

    Put it last in a chain, after the learning rate, and inside `master_params`. Put it after a `partition`, not within
    the transform of a label: biases often have another label than the weights, and would not be scaled.

    Each `update` requires the named argument ``max_logits``: a dict from the name of each attention module to a tensor
    with $s_h$ of each query head, as `muonfx.attention.collect_max_logits` returns it. Under
    `muonfx.sharding.sharded` the largest logit of all ranks is used, at the cost of one all-reduce; otherwise see
    `muonfx.attention.reduce_max_logits`. A parameter whose gradient is None is not scaled.

    If query heads share a key head, the key is multiplied by $\max_h \gamma_h^{1 - \alpha}$ over these heads, and each
    query by the remaining factor of its own $\gamma_h$. Each head's logits are then multiplied by exactly its own
    $\gamma_h$, and no factor exceeds 1. (With the smallest factor for the key, other queries would have to grow.) A
    rotary key that all heads share is not changed; the queries that it multiplies are scaled by $\gamma_h$.

    Args:
        heads: the parameters that hold queries and keys, as `AttentionHeads`; a tuple if modules differ. The first
            `AttentionHeads` that matches a parameter is used.
        tau: the bound of the logits, positive.
        alpha: the exponent of $\gamma_h$ for the queries, from 0 to 1; the keys have 1 minus alpha.

    Raises:
        TypeError: ``heads`` has another type; at `update`, ``max_logits`` is missing or not a dict.
        ValueError: a number is out of range; at `init`, a pattern matches no parameter, the rows of a parameter do not
            fit the heads, or a mask selects only the queries or only the keys of a module; at `update`, ``params`` or
            an entry of ``max_logits`` is missing or has another shape.

    Follows Kimi K2 (arXiv 2507.20534), section 2.1 and algorithm 1.

    Example:
        >>> import muonfx as mfx
        >>> tx = mfx.qk_clip(mfx.AttentionHeads("attn", heads=2), tau=100.0)
        >>> params = {
        ...     "attn.q_proj.weight": torch.ones(2, 1),
        ...     "attn.k_proj.weight": torch.ones(2, 1),
        ... }
        >>> updates = {name: torch.zeros(2, 1) for name in params}
        >>> logits = {"attn": torch.tensor([400.0, 30.0])}
        >>> updates, _ = tx.update(updates, tx.init(params), params, max_logits=logits)
        >>> mfx.apply_updates(params, updates)["attn.q_proj.weight"].flatten()
        tensor([0.5000, 1.0000])
    """
    tau = checks.positive("tau", tau)
    alpha = checks.fraction("alpha", alpha)
    all_heads = _as_tuple(heads)

    def init(params: PyTree) -> EmptyState:
        members = _members(all_heads, params)
        _check_pairs(members)
        for member in members:
            member.factor_indices("meta")  # raises if the heads do not fit
        return EmptyState()

    def update(
        updates: PyTree,
        state: EmptyState,
        params: PyTree = None,
        *,
        max_logits: PyTree,
        donate: Donation = NOTHING,
        shard: Callable[[PyTree], PyTree] = unchanged,
        max_over_ranks: Callable[[Tensor], Tensor] = unchanged,
    ):
        """Scale the query and key weights of each head whose largest logit exceeds tau.

        Args:
            updates: the updates, the last ones before they are added to the weights.
            state: empty.
            params: the weights.
            max_logits: the largest logits of each attention module: ``{"layers.0.attn": tensor([400.0, 30.0])}``.
            donate: not used.
            shard: returns this rank's shards of a dict of whole tensors by parameter name.
            max_over_ranks: returns the maximum of a tensor over all ranks.
        """
        if not all_heads:
            return updates, state
        params = params_for("qk_clip", params)
        weights = dict(tree.named_leaves(params))
        members = [
            member for member in _members(all_heads, params) if weights[member.name] is not None
        ]
        if not members:
            return updates, state
        dtypes = [weights[member.name].dtype for member in members]
        wide = ew.wide_dtype(*dtypes)
        device = tree.device_of(params)
        # 1. For each head, the factor gamma of its logits: 0.25 for a logit of 400 and the bound 100.
        local_logits = [logits.to(device, wide) for logits in _logits(members, max_logits)]
        largest_logits = max_over_ranks(torch.cat(local_logits))
        gamma = _gamma(largest_logits, tau)
        # 2. For each weight, the factors of its rows. A head may lie on several ranks, so these are computed for whole
        # weights, and then sharded like the weights.
        factors = _factors_by_module(members, gamma, alpha)
        one_minus_factors: dict[str, Tensor] = {}
        for member in members:
            weight = weights[member.name]
            indices = member.factor_indices(weight.device)
            factor_of_rows = factors[member.module].to(weight.device)[indices]
            # In which no digits of a factor near 1 are lost.
            one_minus_factor = 1.0 - factor_of_rows
            one_minus_factors[member.name] = one_minus_factor.expand(member.shape)
        # 3. The updates of these weights.
        leaves, treedef = tree.flatten(updates)
        new_updates = dict(zip(weights, leaves, strict=True))  # by name
        for name, one_minus_factor in shard(one_minus_factors).items():
            if new_updates[name] is not None:
                new_updates[name] = _scaled(new_updates[name], weights[name], one_minus_factor)
        return tree.unflatten(treedef, new_updates.values()), state

    if not all_heads:
        return init, functools.partial(update, max_logits=None)  # the logits are no longer required
    return init, update


def _check_pairs(members: list[_Member]) -> None:
    """Raise an error unless both the queries and the keys of each module are among the members.

    Clipping multiplies the logits of a head by one factor, and a part of this factor applies to each of the two.
    """
    roles_of_module: dict[str, set[str]] = {}  # {"layers.0.attn": {"query", "key"}}
    for member in members:
        roles_of_module.setdefault(member.module, set()).update(member.roles)
    for member in members:
        roles = roles_of_module[member.module]
        for role in ("query", "key"):
            if role not in roles:
                raise _missing_role(member, role)


def _missing_role(member: _Member, role: str) -> ValueError:
    """Return an error for queries without keys, or keys without queries, in one attention module.

    For "attn.q_proj.weight" without keys, ``role`` is "key", and the missing name is "attn.k_proj".
    """
    projection = getattr(member.heads, role)  # "k_proj"
    missing_name = f"{member.module}.{projection}" if member.module else projection
    return ValueError(
        f"qk_clip: found the {member.roles[0]} weights {member.name!r} without the {role} weights {missing_name!r}, "
        "expected both, because both are multiplied by a part of the factor: include both in the mask or the labels of "
        "this qk_clip"
    )


def _logits(members: list[_Member], max_logits: object) -> list[Tensor]:
    """Return a list with the largest logits (query heads,) of each attention module, from the argument ``max_logits``.

    A logit is the product of a query and a key. The argument is a dict such as ``{"layers.0.attn": tensor([400.0,
    30.0])}``. The list has one item for each module of the members, in their order. Raise an error if an entry is
    missing or has another type or shape.
    """
    if not isinstance(max_logits, Mapping):
        raise TypeError(
            "qk_clip: max_logits must be a dict with a tensor for each attention module, as "
            f"muonfx.attention.collect_max_logits collects it, found {max_logits!r}"
        )
    all_logits = dict(tree.named_leaves(max_logits))
    # A module has several members, such as its query and its key.
    logits_of_module: dict[str, Tensor] = {}
    for member in members:
        number_of_heads = member.heads.heads
        logits = all_logits.get(member.module)
        if (
            not isinstance(logits, Tensor)
            or logits.is_complex()
            or logits.shape != (number_of_heads,)
        ):
            raise _logits_error(member.module, number_of_heads, all_logits)
        logits_of_module[member.module] = logits
    return list(logits_of_module.values())


def _logits_error(module: str, size: int, all_logits: Mapping[str, object]) -> ValueError:
    """Return an error about the logits of a module, which are missing or no real tensor of shape (size,).

    The description of the entry that was found is "one of (4,)" for a tensor of this shape.
    """
    logits = all_logits.get(module)
    if module not in all_logits:
        description = f"none{did_you_mean(module, all_logits)}"
    elif isinstance(logits, Tensor):
        description = f"one of {tuple(logits.shape)}"
    else:
        description = repr(logits)
    return ValueError(
        f"qk_clip: max_logits[{module!r}] must be a real tensor of shape ({size},), the largest logit of each query "
        "head (-inf for a head of another rank), as muonfx.attention.collect_max_logits collects it from calls of "
        f"scaled_dot_product_attention and of muonfx.attention.record_max_logits; found {description}"
    )


def _gamma(s: Tensor, tau: float | Tensor) -> Tensor:
    """Return ``min(1, tau / s)`` for the largest logit s of each head; 1 if it is not finite."""
    is_clipped = s.isfinite() & (s > tau)
    bound = ew.scalar_like(tau, s)
    return divide_unless(~is_clipped, bound, s, otherwise=1.0)


def _factors_by_module(
    members: list[_Member], gamma: Tensor, alpha: float | Tensor
) -> dict[str, Tensor]:
    """Return for each attention module the vector of the factors by which its weights are multiplied.

    `_factors` describes the vector. ``gamma`` has the factor of the logits of each query head, of one module after
    another. For two modules with 2 heads each, its first two items belong to the first module.
    """
    heads_of_module = {member.module: member.heads for member in members}
    sizes = [heads.heads for heads in heads_of_module.values()]
    factors: dict[str, Tensor] = {}
    for (module, heads), gamma_of_module in zip(
        heads_of_module.items(), gamma.split(sizes), strict=True
    ):
        factors[module] = _factors(gamma_of_module, heads.keys, alpha)
    return factors


def _factors(gamma: Tensor, keys: int, alpha: float | Tensor) -> Tensor:
    """Return a vector with the factors of a module: query heads, key heads, rotary queries, and 1 for other rows.

    The product of the factors of a query and its key is the gamma of the query head. Several query heads may share a
    key. Its factor is ``gamma^(1 - alpha)`` for the largest gamma of these.

    Args:
        gamma: the factor of the logits of each query head.
        keys: the number of key heads.
        alpha: the exponent of gamma for the queries.

    >>> _factors(
    ...     torch.tensor([0.25, 1.0]), keys=1, alpha=0.5
    ... )  # two queries, a key, two rotary queries, and the 1
    tensor([0.2500, 1.0000, 1.0000, 0.2500, 1.0000, 1.0000])
    """
    gamma_by_key = gamma.unflatten(0, (keys, -1))  # (key heads, query heads that share one)
    # The factor of the head that is scaled least, so no query grows.
    largest_gamma = gamma_by_key.amax(dim=1)
    exponent = ew.scalar_like(1.0 - alpha, gamma)
    key = torch.pow(largest_gamma, exponent)
    query = gamma_by_key / key.unsqueeze(1)  # so that query times key is gamma
    rotary_query = gamma  # its key, which all heads share, is not scaled
    other_rows = gamma.new_ones(1)
    return torch.cat([query.flatten(), key, rotary_query, other_rows])


def _scaled(update: Tensor, weight: Tensor, one_minus_factor: Tensor) -> Tensor:
    """Change an update u such that the new weight is ``f (w + u)`` instead of ``w + u``, for a factor f in (0, 1].

    Where f is 1, the update does not change by a bit.
    """
    wide = ew.wide_dtype(update.dtype, weight.dtype)
    u = update.to(wide)
    w = weight.to(wide)
    one_minus_f = one_minus_factor.to(wide)
    # The update must be f (w + u) - w. It is written as u + (1 - f) (-w - u), which keeps the digits of a small u.
    scaled = torch.lerp(u, -w, one_minus_f)
    return torch.where(one_minus_f == 0, u, scaled).to(update.dtype)
