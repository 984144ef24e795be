"""``python -m zfunc`` is ``zfunc``."""

from __future__ import annotations

import sys

from zfunc.commands.cli import main

sys.exit(main())
