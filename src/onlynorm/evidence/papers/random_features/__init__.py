"""random_features: its statements, checks, figures and tables. Importing it registers its checks and artifacts."""

from onlynorm.evidence.papers.random_features import (
    alignment as alignment,
)
from onlynorm.evidence.papers.random_features import (
    conditioning as conditioning,
)
from onlynorm.evidence.papers.random_features import (
    scaled as scaled,
)
from onlynorm.evidence.papers.random_features import (
    scratch as scratch,
)
from onlynorm.evidence.papers.random_features import (
    spectra as spectra,
)
from onlynorm.evidence.papers.random_features import (
    spectrum as spectrum,
)
from onlynorm.evidence.papers.random_features import (
    training as training,
)
from onlynorm.evidence.papers.random_features import (
    widths as widths,
)
