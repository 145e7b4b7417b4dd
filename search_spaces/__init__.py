"""The search spaces of Petridish."""

from __future__ import annotations

from search_spaces.recurrent.space import RecurrentSpace
from search_spaces.vision.space import VisionSpace

__all__ = ["RecurrentSpace", "VisionSpace"]
