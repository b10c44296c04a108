"""deepc.profile: the public name of deepc.observe.profile."""

import sys

from .observe import profile as _itself
from .observe.profile import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
