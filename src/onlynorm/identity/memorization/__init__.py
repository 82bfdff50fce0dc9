"""Networks that memorize a sample.

The files read in the order: points, thresholds, readout, memorizer, memorize, generalization, by_norms.
"""
