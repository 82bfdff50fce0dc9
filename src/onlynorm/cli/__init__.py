"""The command line interface. Every command prints tables, or one JSON document with --json.

Exit codes: 0 success, 1 a check failed, 2 invalid arguments. Progress and messages are written to standard error,
results to standard output.
"""

# Commands are listed in the help in the order of the imports.
# isort: off
from onlynorm.cli.app import main
from onlynorm.cli.commands import demo as demo
from onlynorm.cli.commands import plan as plan
from onlynorm.cli.commands import spectrum as spectrum
from onlynorm.cli.commands import reconstruct as reconstruct
from onlynorm.cli.commands import verify as verify
from onlynorm.cli.commands import tune as tune
from onlynorm.cli.commands import diagnose as diagnose
from onlynorm.cli.commands import repair as repair
from onlynorm.cli.commands import factorize as factorize
from onlynorm.cli.commands import memorize as memorize
from onlynorm.cli.commands import data as data
from onlynorm.cli.evidence import theorems as theorems
from onlynorm.cli.evidence import reproduce as reproduce
from onlynorm.cli.evidence import report as report
from onlynorm.cli.evidence import bench as bench
# isort: on

__all__ = ["main"]
