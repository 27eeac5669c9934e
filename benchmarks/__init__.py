"""Benchmarks with interleaved candidates, which report medians and ratios with percentiles and save them as JSON."""
