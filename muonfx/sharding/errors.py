"""`ShardingError`, which all ranks raise together."""

from __future__ import annotations


class ShardingError(RuntimeError):
    """Raised if ranks disagree, if a rank has ended, or if a tree of tensors does not fit the layout.

    If ranks disagree, all of them raise it. The message names the difference and the ranks.

    >>> raise ShardingError("rank 2 has another tree")
    Traceback (most recent call last):
    muonfx.sharding.errors.ShardingError: rank 2 has another tree
    """
