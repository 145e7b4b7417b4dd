"""Every patch of NNI 3.0, which gets no more fixes; nothing else in the package patches it.

`nas` imports NNI's NAS without its warnings, `patches` changes its Python code, `plain_json` what
it reads, `guard` its manager, and `nnictl` its command. Importing this package imports neither
torch nor nni.
"""
