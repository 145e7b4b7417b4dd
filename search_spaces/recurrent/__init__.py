"""The recurrent space of the paper: language models whose cell is one of DARTS's."""

from __future__ import annotations

from search_spaces.recurrent.space import RecurrentSpace

__all__ = ["RecurrentSpace"]
