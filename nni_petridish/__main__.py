"""``python -m nni_petridish``: the command ``nni-petridish``."""

from __future__ import annotations

import sys

from nni_petridish.cli import main

sys.exit(main())
