"""`python -m stepscope.cli`: the console command where the package is not installed."""

import sys

from stepscope.cli import main

sys.exit(main())
