"""`python -m locallip` is the command `locallip`."""

import sys

from locallip_command import main

sys.exit(main())
