"""Benchmarks: `races` compare running times with competitors, `sweeps` compare accuracies.

`table` lists them. The inputs are in `systems`, `networks` and `tasks`, the compared methods in `competitors`,
`papers_method` and `tuners`; `duels` compares solvers.
"""
