"""The vision space of the paper: cells of DARTS-style ops on a ResNet-like skeleton."""

from __future__ import annotations

from search_spaces.vision.space import VisionSpace

__all__ = ["VisionSpace"]
