"""`python -m deepc`: the command line."""

import sys

from .cli import main

sys.exit(main())
