"""The table of all checks and artifacts; only these are run."""

from onlynorm.evidence.papers import burkholz2024, daneshmand2020, giannou2023, hardt_ma2017, random_features

PAPERS = (giannou2023, burkholz2024, random_features, hardt_ma2017, daneshmand2020)
CHECKS = {key: check for paper in PAPERS for key, check in paper.CHECKS.items()}
"""Checks by the key of their statement."""
ARTIFACTS = {id: function for paper in PAPERS for id, function in paper.ARTIFACTS.items()}
"""Functions by the id of their artifact."""
