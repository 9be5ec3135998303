"""Makes an editable wheel name the folders of the packages on the search path.

setuptools maps packages of several roots by a finder behind Python's own. Python then takes any folder named
`fp8scope` in the working directory, such as a checkout, for a package without code, and asks no further.
With the roots on the search path it prefers the package that has code.
"""

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path


def use_search_path(wheel: Path, name: str, roots: Sequence[Path]) -> None:
    """Replace the finder in an editable wheel of the distribution `name` by a .pth file with these roots."""
    draft = wheel.with_suffix(".draft")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as new:
        record = next(entry for entry in old.namelist() if entry.endswith(".dist-info/RECORD"))
        files = {
            entry: old.read(entry)
            for entry in old.namelist()
            if entry != record and not entry.startswith("__editable__")
        }
        files[f"__editable__.{name}.pth"] = "".join(f"{root}\n" for root in roots).encode()
        lines = [f"{entry},{_digest(data)},{len(data)}" for entry, data in files.items()]
        for entry, data in files.items():
            new.writestr(entry, data)
        new.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    draft.replace(wheel)


def _digest(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"
