"""Evidence about the library: statements of the papers with their checks, figures and tables, benchmarks, the report.

Built on the library and never imported by it; the command line imports it when one of its commands runs. `registry`
holds statements and checks, `artifacts` figures and tables, `records` what was measured, `cache` finished pieces of
work, `harness` what benchmarks share, `race` and `sweep` the two kinds of them; `timing`, `validation` and `training`
serve all experiments. It uses what the rooms of the library export and nothing from inside them. It needs packages that
the library does not.
"""

import importlib.util

from onlynorm.errors import MissingDataError

_needed = ("jinja2", "pandas", "pydantic")
_missing = [name for name in _needed if importlib.util.find_spec(name) is None]
if _missing:
    raise MissingDataError(
        f"theorems, reproduce, report and bench need {', '.join(_missing)}; not installed. Run `pip install "
        "onlynorm[evidence]`."
    )
