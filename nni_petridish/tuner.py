"""The tuner under the name that NNI configurations use."""

from __future__ import annotations

from nni_petridish.nni_adapter import PetridishTuner

__all__ = ["PetridishTuner"]
