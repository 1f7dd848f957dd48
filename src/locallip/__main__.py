"""`python -m locallip` is the command `locallip`."""

import sys

from locallip.cli import main

sys.exit(main())
