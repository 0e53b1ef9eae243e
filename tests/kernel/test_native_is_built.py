"""Where there is a C++ compiler, the native kernels must have been built: no silent fallback."""

from __future__ import annotations

import shutil

from minisgl.kernel import native


def test_with_a_compiler_the_native_kernels_are_there() -> None:
    has_compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    assert native.available() or not has_compiler, "the build of csrc/ failed: see `make test`"
