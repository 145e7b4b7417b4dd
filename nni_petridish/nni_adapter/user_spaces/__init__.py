"""Growth in users' spaces, made of NNI's cells and choices."""

from __future__ import annotations

from nni_petridish.nni_adapter.user_spaces.space import UserSpace

__all__ = ["UserSpace"]
