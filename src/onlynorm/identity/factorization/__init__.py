"""A matrix as a product of layers near the identity.

Reading order: matrices, rotations, bounds, factors, decompositions, padding, factorize.
"""
