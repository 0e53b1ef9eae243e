"""`python -m minisgl` is the command `minisgl`. Imports `cli` only."""

from minisgl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
