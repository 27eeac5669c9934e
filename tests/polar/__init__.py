"""Tests of muonfx.polar."""
