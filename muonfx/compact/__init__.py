"""Optimizer state in eight bits: its dtypes, their codebooks, and the encoding and decoding of leaves."""

from muonfx.compact.dtypes import Compact, fp8, int8
from muonfx.compact.state import CompactState, KeyedCompactState

__all__ = ["Compact", "CompactState", "KeyedCompactState", "fp8", "int8"]
