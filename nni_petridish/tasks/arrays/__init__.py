"""Training on arrays in memory: weighted examples, classes or numbers to predict."""
