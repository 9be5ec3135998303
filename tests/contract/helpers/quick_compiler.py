"""This machine's C++ compiler without its optimisation: a sixth of the time.

The libraries that the tests run with are built with every optimisation; test_kernel_build.py checks them.
"""

import os
import shutil
from pathlib import Path


def quick_compiler(folder: Path) -> str | None:
    """Write a command into `folder` that compiles without optimisation: a value of CXX.

    Returns None where this machine has no compiler of its own. A CXX that is set is left as it is.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    if compiler is None or compiler == "zig":
        return compiler
    command = folder / "quick-c++"
    # The last of several -O counts.
    command.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    command.chmod(0o700)
    return str(command)
