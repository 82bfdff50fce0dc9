"""Repairs of a network that does not learn.

The files read in the order: visits, rescale, redraw, ascent, insert_norms, repair.
"""
