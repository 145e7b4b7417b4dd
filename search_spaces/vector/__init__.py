"""The vector space: growable dense cells for tables."""

from __future__ import annotations

from search_spaces.vector.space import VectorSpace

__all__ = ["VectorSpace"]
