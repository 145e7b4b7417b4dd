"""Every patch of NNI 3.0, which gets no more fixes; nothing else in the package patches it.

`nas` imports NNI's NAS without its warnings, `patches` changes its Python code, and `loopback` its
manager. Importing this package imports neither torch nor nni.
"""
