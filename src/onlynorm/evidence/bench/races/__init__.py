"""Benchmarks of time and memory: competitors run alternately in one process, after a warm-up."""
