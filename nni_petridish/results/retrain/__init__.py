"""Training of a found architecture from scratch."""
