"""Tables of features in files: reading, training, prediction."""
