"""Writes the pages of the documentation into one folder and builds the site: `python -m tools.docs`."""
