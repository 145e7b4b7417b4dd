"""The wheel. With ``NNI_PETRIDISH_KERNELS`` it carries compiled kernels, see `make wheel`.

The variable lists the levels of x86-64 to compile for, such as ``x86-64-v2 x86-64-v3``. Without it,
the wheel is pure Python and the kernels are compiled on first use.
"""

import importlib.util
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LEVELS = os.environ.get("NNI_PETRIDISH_KERNELS", "").split()
NATIVE = Path("nni_petridish", "kernels", "native")


class BuildWithKernels(build_py):
    """The packages, with the kernels for each level."""

    def run(self) -> None:
        """Copy the packages and compile."""
        super().run()
        if not LEVELS:
            return
        spec = importlib.util.spec_from_file_location("compiler", NATIVE / "compiler.py")
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
        gcc = shutil.which("gcc")
        if gcc is None:
            raise SystemExit("a wheel with compiled kernels needs gcc, which was not found.")
        folder = Path(self.build_lib, NATIVE, "built")
        folder.mkdir(parents=True, exist_ok=True)

        def compile_one(real: str, level: str) -> None:
            target = folder / compiler.built_name(real, level)
            compiler.compile_library(gcc, NATIVE / "c", real, level, target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(lambda pair: compile_one(*pair), product(compiler.REALS, LEVELS)):
                pass


class WithKernels(Distribution):
    """The distribution, which is one of this platform if it carries kernels."""

    def has_ext_modules(self) -> bool:
        """Return whether there is compiled code."""
        return bool(LEVELS)


class WheelOfAnyPython(bdist_wheel):
    """A wheel of any Python 3, for this platform if it carries kernels."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag: no code of the kernels depends on the version of Python."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if LEVELS else (python, abi, platform)


setup(
    distclass=WithKernels,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfAnyPython},
)
