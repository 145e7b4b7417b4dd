"""The recurrent space of the paper: language models whose cell belongs to DARTS's space."""

from __future__ import annotations

from search_spaces.recurrent.space import RecurrentSpace

__all__ = ["RecurrentSpace"]
