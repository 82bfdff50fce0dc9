"""A matrix as a product of layers near the identity.

The files read in the order: matrices, rotations, bounds, factors, decompositions, padding, factorize.
"""
