"""Everything that is promised, measured beside its competitors: `races` of time and `sweeps` of accuracy.

`table` lists them, `competitors`, `papers_method` and `tuners` are what they are measured against, `networks` what they
share.
"""
