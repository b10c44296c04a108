"""deepc.compat.zero_to_fp32: the public name of deepc.compat.runtime.zero_to_fp32. The scripts beside saved checkpoints
import it."""

import sys

from .runtime import zero_to_fp32 as _itself
from .runtime.zero_to_fp32 import *  # noqa: F403  for type checkers and editors

if __name__ == "__main__":
    sys.exit(_itself.main())
sys.modules[__name__] = _itself
