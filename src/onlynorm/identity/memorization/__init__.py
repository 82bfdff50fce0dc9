"""Networks that memorize a sample.

Reading order: points, thresholds, readout, memorizer, memorize, generalization, by_norms.
"""
