"""The five papers: a folder each, with one file per subject that holds its checks and its figures.

`reproduce` runs artifacts and writes records, `expectations` judges what was measured.
"""
