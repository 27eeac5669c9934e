"""Optimizer state in eight bits: quantized dtypes, their codebooks, and the encoding and decoding of tensors."""

from muonfx.compact.dtypes import QuantizedDtype, fp8, int8
from muonfx.compact.state import KeyedQuantizedState, QuantizedState

__all__ = ["QuantizedDtype", "QuantizedState", "KeyedQuantizedState", "fp8", "int8"]
