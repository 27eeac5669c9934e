"""What goes wrong between ranks."""

__all__ = ["ShardingError"]


class ShardingError(RuntimeError):
    """Ranks disagree, or one of them is gone; raised on all that are left, with what each has found.

    >>> raise ShardingError("rank 2 has another tree")
    Traceback (most recent call last):
    muonfx.sharding.errors.ShardingError: rank 2 has another tree
    """
