"""Evidence about the library: statements of the papers with their checks, figures and tables, benchmarks, the report.

Built on the library and never imported by it. `registry` holds statements and checks, `artifacts` figures and tables,
`records` what was measured; `timing`, `cache`, `goals`, `spread`, `validation` and `arguments` serve all experiments.
"""
