"""Benchmarks of time and memory: competitors in one run, warmed up, in turns."""
