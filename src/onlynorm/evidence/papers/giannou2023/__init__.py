"""giannou2023: its statements, checks, figures and tables. Importing it registers its checks and artifacts."""

from onlynorm.evidence.papers.giannou2023 import (
    deep as deep,
)
from onlynorm.evidence.papers.giannou2023 import (
    depth as depth,
)
from onlynorm.evidence.papers.giannou2023 import (
    linear_systems as linear_systems,
)
from onlynorm.evidence.papers.giannou2023 import (
    low_rank as low_rank,
)
from onlynorm.evidence.papers.giannou2023 import (
    products as products,
)
from onlynorm.evidence.papers.giannou2023 import (
    sgd as sgd,
)
from onlynorm.evidence.papers.giannou2023 import (
    sparse as sparse,
)
from onlynorm.evidence.papers.giannou2023 import (
    sparse_threshold as sparse_threshold,
)
from onlynorm.evidence.papers.giannou2023 import (
    wide_networks as wide_networks,
)
