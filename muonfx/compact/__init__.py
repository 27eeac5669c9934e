"""State in eight bits: compact dtypes, their codebooks, and the encoding of leaves."""

from muonfx.compact.dtypes import Compact, fp8, int8
from muonfx.compact.state import CompactState, KeyedCompactState

__all__ = ["Compact", "CompactState", "KeyedCompactState", "fp8", "int8"]
