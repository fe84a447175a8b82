"""`python -m holdfast` is `holdfast`; launchers that start modules need it."""

import sys

from holdfast_command import main

if __name__ == "__main__":
    sys.exit(main())
