"""Benchmarks: what onlynorm promises, measured beside its competitors and judged by code."""
