"""daneshmand2020: its statements, checks, figures and tables. Importing it registers its checks and artifacts."""

from onlynorm.evidence.papers.daneshmand2020 import (
    chain as chain,
)
from onlynorm.evidence.papers.daneshmand2020 import (
    chains as chains,
)
from onlynorm.evidence.papers.daneshmand2020 import (
    eigenvalues as eigenvalues,
)
from onlynorm.evidence.papers.daneshmand2020 import (
    invariant_law as invariant_law,
)
from onlynorm.evidence.papers.daneshmand2020 import (
    rank_training as rank_training,
)
