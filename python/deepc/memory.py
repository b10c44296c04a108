"""deepc.memory: the public name of deepc.core.memory."""

import sys

from .core import memory as _itself
from .core.memory import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
