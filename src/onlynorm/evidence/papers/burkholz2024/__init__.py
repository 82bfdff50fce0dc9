"""burkholz2024: its statements, checks, figures and tables. Importing it registers its checks and artifacts."""

from onlynorm.evidence.papers.burkholz2024 import (
    activations as activations,
)
from onlynorm.evidence.papers.burkholz2024 import (
    depth as depth,
)
from onlynorm.evidence.papers.burkholz2024 import (
    sources as sources,
)
from onlynorm.evidence.papers.burkholz2024 import (
    tables as tables,
)
from onlynorm.evidence.papers.burkholz2024 import (
    widths as widths,
)
