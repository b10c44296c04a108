"""deepc.ddp_hooks: the public name of deepc.comm.c10d.ddp."""

import sys

from .comm.c10d import ddp as _itself
from .comm.c10d.ddp import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
