"""State in eight bits: compact dtypes, the code books behind them, and how a leaf is stored in them."""

from muonfx.compact.dtypes import Compact, fp8, int8
from muonfx.compact.state import CompactState, KeyedCompactState

__all__ = ["Compact", "CompactState", "KeyedCompactState", "fp8", "int8"]
