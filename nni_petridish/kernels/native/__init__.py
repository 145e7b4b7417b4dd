"""Inner loops of training in C."""
