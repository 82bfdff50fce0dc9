"""Data sets and weights that can be downloaded, or copied from a folder, into the data folder.

Reading order: sources, download, get.
"""
