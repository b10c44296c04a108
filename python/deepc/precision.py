"""deepc.precision: the public name of deepc.engine.precision."""

import sys

from .engine import precision as _itself
from .engine.precision import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
