"""Chains of random layers: what happens to the rank of a signal, averaged.

The files read in the order: weights, quantities, averages, chain, simulate.
"""
