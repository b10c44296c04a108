"""deepc.precision: the public name of deepc.engine.policy.precision."""

import sys

from .engine.policy import precision as _itself
from .engine.policy.precision import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
