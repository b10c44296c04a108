"""deepc.report: the public name of deepc.observe.report."""

import sys

from .observe import report as _itself
from .observe.report import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
