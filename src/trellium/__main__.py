"""`python -m trellium`: the `trellium` command."""

import sys

from trellium.cli import main

if __name__ == "__main__":
    sys.exit(main())
