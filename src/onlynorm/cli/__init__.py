"""The command line. Every command prints a table for people, or one JSON document with --json for machines.

Exit codes: 0 done, 1 a check failed, 2 wrong use. Progress and messages go to standard error, results to standard
output, so that both can be piped.
"""

# The order of the imports is the order of the commands in the help.
# isort: off
from onlynorm.cli.entry import app, main
from onlynorm.cli import demo as demo
from onlynorm.cli import plan as plan
from onlynorm.cli import spectrum as spectrum
from onlynorm.cli import rebuild as rebuild
from onlynorm.cli import tune as tune
from onlynorm.cli import diagnose as diagnose
from onlynorm.cli import repair as repair
from onlynorm.cli import identity as identity
from onlynorm.cli import memorize as memorize
from onlynorm.cli import evidence as evidence
from onlynorm.cli import measure as measure
from onlynorm.cli import measure_text as measure_text
from onlynorm.cli import measure_layers as measure_layers
from onlynorm.cli import measure_diagnose as measure_diagnose
from onlynorm.cli import measure_predict as measure_predict
from onlynorm.cli import measure_repair as measure_repair
from onlynorm.cli import measure_align as measure_align
from onlynorm.cli import measure_scaled as measure_scaled
from onlynorm.cli import measure_scratch as measure_scratch
# isort: on

__all__ = ["app", "main"]
