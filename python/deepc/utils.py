"""deepc.utils: the public name of deepc.compat.helpers.safe."""

import sys

from .compat.helpers import safe as _itself
from .compat.helpers.safe import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
