"""The trial command of NNI configurations: ``python -m nni_petridish.trial``."""

from __future__ import annotations

from nni_petridish.nni_adapter.trial import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    run()
