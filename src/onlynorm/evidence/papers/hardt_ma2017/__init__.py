"""hardt_ma2017: its statements, checks, figures and tables. Importing it registers its checks and artifacts."""

from onlynorm.evidence.papers.hardt_ma2017 import (
    allconv as allconv,
)
from onlynorm.evidence.papers.hardt_ma2017 import (
    factor_norms as factor_norms,
)
from onlynorm.evidence.papers.hardt_ma2017 import (
    factorization as factorization,
)
from onlynorm.evidence.papers.hardt_ma2017 import (
    landscape as landscape,
)
from onlynorm.evidence.papers.hardt_ma2017 import (
    memorization as memorization,
)
