"""Plotly's script with the chart types that pages use alone: a third of the size of the whole one.

The build takes it from plotly's npm package into the source tree. Version and hash of the package stand here,
next to the version of the Python package in constraints.txt. A build without a network goes on without it:
pages then use the whole script, which the Python package brings.

FP8SCOPE_PLOTLY_BUNDLE=0 leaves it out; another value is the path of the npm package's file.
"""

import hashlib
import io
import os
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "4.1.1"
NAME = "plotly.js-cartesian-dist-min"
SHA512 = (
    "a3c1ab15ebac9dcc012316c1ca7449a58e29920541e9c68cf892e9c2b2d86dbb"
    "0eedd67c149f9254dd85afe2fb9221bf67ac383f93b426eb3f42be4479f1d57a"
)
ADDRESS = f"https://registry.npmjs.org/{NAME}/-/{NAME}-{VERSION}.tgz"
MAX_BYTES = 4 << 20
SECONDS = 60
FILES = {"package/plotly-cartesian.min.js": "plotly.min.js", "package/LICENSE": "LICENSE"}
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "dashboard" / "fp8scope_dashboard" / "pages" / "plotly_bundle"


def bring() -> None:
    """Write the script, its licence and its version into the source tree; say why if that fails."""
    source = os.environ.get("FP8SCOPE_PLOTLY_BUNDLE", "")
    version = FOLDER / "VERSION"
    if source == "0" or not FOLDER.parent.is_dir() or (version.exists() and version.read_text() == VERSION):
        return
    try:
        unpack(read(source), FOLDER)
    except (OSError, ValueError, KeyError, tarfile.TarError) as error:
        reason = f"{NAME} {VERSION} is missing: {error}"
        print(f"Pages use plotly's whole script, because {reason}", file=sys.stderr)
        return
    version.write_text(VERSION)


def read(source: str) -> bytes:
    """Return the npm package: the file `source`, or else the registry's. Raises OSError if there is none."""
    if source:
        return Path(source).read_bytes()
    with urllib.request.urlopen(ADDRESS, timeout=SECONDS) as answer:
        content: bytes = answer.read(MAX_BYTES)
    return content


def unpack(package: bytes, folder: Path) -> None:
    """Write FILES of the npm package into the folder.

    Raises ValueError if it is another file than the one with the hash SHA512.
    """
    if (digest := hashlib.sha512(package).hexdigest()) != SHA512:
        raise ValueError(f"its hash is {digest[:16]}..., not {SHA512[:16]}...")
    with tarfile.open(fileobj=io.BytesIO(package)) as packed:
        contents = {name: packed.extractfile(member) for member, name in FILES.items()}
        folder.mkdir(exist_ok=True)
        for name, file in contents.items():
            if file is None:
                raise ValueError(f"{name} is no file")
            (folder / name).write_bytes(file.read())


if __name__ == "__main__":
    bring()
