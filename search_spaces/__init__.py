"""Spaces that Petridish can grow in."""

from __future__ import annotations

from search_spaces.recurrent import RecurrentSpace
from search_spaces.vision import VisionSpace

__all__ = ["RecurrentSpace", "VisionSpace"]
