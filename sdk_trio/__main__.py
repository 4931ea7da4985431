"""``python -m sdk_trio``: the command line."""

import sys

from .cli import main

sys.exit(main())
