"""Builds the optional boundary tap: a plain shared library, loaded with ctypes.

Everything else about the package is in pyproject.toml. The tap links against nothing and includes no Python
header, so a C compiler is all it needs; without one the build goes on and the Python fallback is used.
"""

from __future__ import annotations

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildTap(build_ext):
    """Compiles ``_tap.c`` to a shared library that is no Python module."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no PyInit function; what is exported is marked in the source

    def get_libraries(self, ext: Extension) -> list[str]:
        return []  # not even libpython

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            self._skip(error)

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            self._skip(error)

    def copy_extensions_to_source(self) -> None:
        try:
            super().copy_extensions_to_source()
        except Exception as error:
            self._skip(error)

    def _skip(self, error: Exception) -> None:
        self.warn(f"boundary tap not built, the Python fallback will be used: {error}")


setup(
    ext_modules=[
        Extension(
            "skippy.engine._tap",
            sources=["skippy/engine/_tap.c"],
            extra_compile_args=[] if sys.platform == "win32" else ["-O2", "-std=c99", "-fvisibility=hidden"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildTap},
)
