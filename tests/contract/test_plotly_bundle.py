"""The build brings plotly's script from its npm package, or says why not and goes on."""

from __future__ import annotations

import importlib.util
import io
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build's module, which writes into a folder of the test."""
    path = ROOT / "build_backend" / "plotly_bundle.py"
    spec = importlib.util.spec_from_file_location("plotly_bundle", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "bundle")
    return module


def packed(**files: str) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return target.getvalue()


NPM = packed(**{"plotly-cartesian.min.js": "script", "LICENSE": "MIT", "index.js": "more"})


def test_it_works(bundle: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "npm.tgz").write_bytes(NPM)
    monkeypatch.setenv("FP8SCOPE_PLOTLY_BUNDLE", str(tmp_path / "npm.tgz"))
    monkeypatch.setattr(bundle, "SHA512", bundle.hashlib.sha512(NPM).hexdigest())
    bundle.bring()
    contents = {path.name: path.read_text() for path in bundle.FOLDER.iterdir()}
    assert contents == {"plotly.min.js": "script", "LICENSE": "MIT", "VERSION": bundle.VERSION}
    # What is there is not read again.
    monkeypatch.setenv("FP8SCOPE_PLOTLY_BUNDLE", str(tmp_path / "missing"))
    bundle.bring()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(NPM, "its hash is"), (b"", "its hash is"), (None, "No such file")],
    ids=["another package", "an empty file", "no file"],
)
def test_a_build_goes_on_without_it(
    bundle: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    reason: str,
) -> None:
    if content is not None:
        (tmp_path / "npm.tgz").write_bytes(content)
    monkeypatch.setenv("FP8SCOPE_PLOTLY_BUNDLE", str(tmp_path / "npm.tgz"))
    bundle.bring()
    said = capsys.readouterr().err
    assert "Pages use plotly's whole script" in said and reason in said
    assert not bundle.FOLDER.exists()


def test_without_a_network_it_says_so(
    bundle: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FP8SCOPE_PLOTLY_BUNDLE", raising=False)
    monkeypatch.setattr(bundle, "ADDRESS", "http://127.0.0.1:9/plotly.tgz")
    bundle.bring()
    assert "refused" in capsys.readouterr().err and not bundle.FOLDER.exists()


def test_it_can_be_left_out(bundle: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8SCOPE_PLOTLY_BUNDLE", "0")
    bundle.bring()
    assert not bundle.FOLDER.exists()
