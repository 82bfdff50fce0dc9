"""Records become one self-contained HTML file; nothing is computed here."""
