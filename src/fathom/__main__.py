"""`python -m fathom`: the command line."""

import sys

from fathom.cli.main import main

if __name__ == "__main__":
    sys.argv[0] = "fathom"  # the command that reports quote
    sys.exit(main())
