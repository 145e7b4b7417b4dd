"""Growth on the submodules of any module."""
