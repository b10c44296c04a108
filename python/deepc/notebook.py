"""deepc.notebook: the public name of deepc.launch.notebook."""

import sys

from .launch import notebook as _itself
from .launch.notebook import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
