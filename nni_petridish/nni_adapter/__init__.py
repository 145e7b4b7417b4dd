"""Fronts for NNI: the only room that imports nni or Lightning."""
