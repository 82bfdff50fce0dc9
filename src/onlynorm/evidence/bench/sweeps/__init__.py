"""Benchmarks of accuracy: networks trained over a grid of settings and seeds."""
