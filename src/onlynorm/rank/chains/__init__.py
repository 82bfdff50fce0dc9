"""Chains of random layers: averages of the rank of the signal.

Reading order: weights, quantities, averages, chain, simulate.
"""
