"""Everything that is promised, measured beside its competitors: `races` of time and `sweeps` of accuracy.

`table` lists them. They measure on `systems`, `networks` and `tasks`, and compare `competitors`, `papers_method` and
`tuners`; `duels` says how solvers are compared.
"""
