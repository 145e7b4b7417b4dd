"""Spaces in which every architecture has been trained: the networks of published tables.

Their networks are exactly those that were trained. Growing is judged on them by the tabulated
accuracy of the children; see `nni_petridish.studies.judge`.
"""
