"""deepc.ops: the public name of deepc.core.ops."""

import sys

from .core import ops as _itself
from .core.ops import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
