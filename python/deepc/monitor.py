"""deepc.monitor: the public name of deepc.observe.monitor."""

import sys

from .observe import monitor as _itself
from .observe.monitor import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
