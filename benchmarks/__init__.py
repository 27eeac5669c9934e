"""Benchmarks: interleaved in one process, medians and ratios with their spread, results kept as JSON."""
