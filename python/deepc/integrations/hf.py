"""deepc.integrations.hf: the public name of deepc.compat.trainer."""

import sys

from ..compat import trainer as _itself
from ..compat.trainer import *  # noqa: F403  for type checkers and editors

sys.modules[__name__] = _itself
