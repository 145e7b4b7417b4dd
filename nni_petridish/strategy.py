"""The strategy under the name that NNI experiments import."""

from __future__ import annotations

from nni_petridish.nni_adapter import Petridish

__all__ = ["Petridish"]
