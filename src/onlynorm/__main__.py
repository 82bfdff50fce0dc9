"""`python -m onlynorm`: the command line, for where the `onlynorm` script is not on the path."""

from __future__ import annotations

from onlynorm.cli import main

if __name__ == "__main__":
    main()
