"""deepc.fsdp: the public name of deepc.comm.c10d.fsdp."""

import sys

from .comm.c10d import fsdp as _itself
from .comm.c10d.fsdp import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
