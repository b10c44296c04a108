"""deepc.compress: the public name of deepc.core.codecs."""

import sys

from .core import codecs as _itself
from .core.codecs import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
