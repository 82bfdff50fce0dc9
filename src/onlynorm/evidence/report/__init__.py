"""Writes records to a self-contained HTML file; nothing is computed here."""
