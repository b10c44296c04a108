"""deepc.lr_schedules: the public name of deepc.optim.schedules."""

import sys

from .optim import schedules as _itself
from .optim.schedules import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
