"""`python -m forethought` is the command `forethought`."""

import sys

from forethought.cli import main

sys.exit(main())
