"""Ways to rebuild a layer. Each registers itself in `base` when it is imported."""

from onlynorm.reconstruction.constructions import deep as deep
from onlynorm.reconstruction.constructions import low_rank as low_rank
from onlynorm.reconstruction.constructions import multilayer as multilayer
from onlynorm.reconstruction.constructions import residual as residual
from onlynorm.reconstruction.constructions import wide as wide
