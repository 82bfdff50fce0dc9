"""Repairs of a network that does not learn.

The files read in the order: visits, depth_evidence, rescale, redraw, ascent, insert_norms, repair.
"""
