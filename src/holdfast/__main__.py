"""Make `python -m holdfast` the same as `holdfast`, for launchers such as torchrun that start modules."""

import sys

from holdfast_command import main

if __name__ == "__main__":
    sys.exit(main())
