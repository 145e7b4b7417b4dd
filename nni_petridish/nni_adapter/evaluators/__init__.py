"""NNI evaluators that train growths."""
