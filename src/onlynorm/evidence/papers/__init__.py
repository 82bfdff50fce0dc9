"""The five papers: one folder per paper, with one file per topic for its checks and figures.

`reproduce` runs artifacts and writes records; `expectations` compares the results with the papers.
"""
