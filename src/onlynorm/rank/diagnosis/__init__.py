"""Diagnosis of a network: whether it can be trained, and why not.

Reading order: signals, probes, gradients, separability, passes, verdict, result, diagnose.
"""
