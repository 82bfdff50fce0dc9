"""Repairs of networks that cannot be trained.

Reading order: visits, rescale, redraw, ascent, insert_norms, repair, checkpoint.
"""
