"""`python -m deepc.config`."""

from .explain import main

raise SystemExit(main())
