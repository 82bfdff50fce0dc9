"""The diagnosis of a network: where and why it cannot learn.

The files read in the order: signals, probes, gradients, separability, passes, verdict, result, diagnose, page.
"""
