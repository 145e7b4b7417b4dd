"""From the hull of a search to a model in hand."""
