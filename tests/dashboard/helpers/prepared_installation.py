"""What the first start of an installation makes, made once per test session and copied.

The first start makes a database cluster, migrates it, and compresses the static files: most of its work.
"""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

from dashboard.helpers.installation import Up

COPIED = ("postgres/cluster", "static")


def fill(data_dir: Path, shared: Path) -> Path:
    """Give a new data directory of `fp8scope up` what the first start makes. Returns the data directory.

    Args:
        shared: a folder of all test processes of the session. The first process that comes makes it there.
    """
    made = shared / "prepared-installation"
    made.mkdir(exist_ok=True)
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "is-complete").exists():
            with Up(made / "data"):
                pass
            (made / "is-complete").touch()
    for name in COPIED:
        target = data_dir / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # With the database's owner, who is not root.
        subprocess.run(["cp", "-a", made / "data" / name, target], check=True)
    return data_dir
