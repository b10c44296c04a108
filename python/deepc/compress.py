"""deepc.compress: the public name of deepc.comm.c10d.compressed."""

import sys

from .comm.c10d import compressed as _itself
from .comm.c10d.compressed import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
