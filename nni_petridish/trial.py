"""The trial command of NNI configurations: ``python -m nni_petridish.trial``."""

from __future__ import annotations

import sys

from nni_petridish.nni_adapter.trial import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
