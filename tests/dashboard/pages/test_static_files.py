"""Browsers get the collected files: style sheets in one piece, and a small plotly, compressed in two ways."""

from __future__ import annotations

import gzip
import re
from io import StringIO
from pathlib import Path

import brotli
import pytest
from django.contrib.staticfiles import finders
from django.contrib.staticfiles.storage import staticfiles_storage
from django.core.files.base import ContentFile, File
from django.core.files.storage import FileSystemStorage
from django.core.management import call_command
from django.test import override_settings

from fp8scope_dashboard.pages.finders import folder_of_script

STYLES = "pages/css"
STORAGES = {"staticfiles": {"BACKEND": "fp8scope_dashboard.settings.storage.StaticFiles"}}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("static")
    with override_settings(STATIC_ROOT=folder, STORAGES=STORAGES, WHITENOISE_KEEP_ONLY_HASHED_FILES=True):
        call_command("collectstatic", interactive=False, verbosity=0, stdout=StringIO())
        assert staticfiles_storage.url(f"{STYLES}/common.css") != f"/static/{STYLES}/common.css"
    return folder


def source(name: str) -> str:
    path = finders.find(name)
    assert isinstance(path, str)
    return Path(path).read_text()


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


@pytest.mark.parametrize("name", ["common", "run"])
def test_a_style_sheet_has_what_it_imports_in_its_order(collected: Path, name: str) -> None:
    imported = re.findall(r'@import "[^"]*/([^"/]+)"', source(f"{STYLES}/{name}.css"))
    assert imported
    style = only(collected, f"{STYLES}/{name}.*.css").read_text()
    assert "@import" not in style
    places = [style.index(source(f"{STYLES}/{each}")) for each in imported]
    assert places == sorted(places)
    packed = only(collected, f"{STYLES}/{name}.*.css.gz").read_bytes()
    assert gzip.decompress(packed).decode() == style


def test_a_style_sheet_changes_its_name_with_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collected: Path
) -> None:
    changed = tmp_path / "changed"
    read = FileSystemStorage.open

    def open_changed(self: FileSystemStorage, name: str, mode: str = "rb") -> File:  # type: ignore[type-arg]
        file = read(self, name, mode)
        return ContentFile(file.read() + b"/* more */") if name.endswith("tokens.css") else file

    monkeypatch.setattr(FileSystemStorage, "open", open_changed)
    with override_settings(STATIC_ROOT=changed, STORAGES=STORAGES, WHITENOISE_KEEP_ONLY_HASHED_FILES=True):
        call_command("collectstatic", interactive=False, verbosity=0, stdout=StringIO())
    names = [only(folder, f"{STYLES}/common.*.css").name for folder in (collected, changed)]
    assert names[0] != names[1]


def test_plotly_is_collected_as_it_is(collected: Path) -> None:
    script = only(collected, "plotly/plotly.min.*.js").read_text()
    assert script == source("plotly/plotly.min.js")
    packed, smaller = (only(collected, f"plotly/plotly.min.*.js.{end}").read_bytes() for end in ("gz", "br"))
    assert gzip.decompress(packed).decode() == brotli.decompress(smaller).decode() == script
    assert len(smaller) < 0.95 * len(packed)


@pytest.mark.parametrize(
    ("bundled", "installed", "expected"),
    [
        ("plotly.js (cartesian - minified) v4.1.1", "plotly.js v4.0.0", "bundle"),
        ("plotly.js (cartesian - minified) v4.1.1", "plotly.js v3.5.0", "package"),
        ("plotly.js (cartesian - minified) v4.1.1", "plotly.js v41.0.0", "package"),
        ("another script", "another script", "package"),
        (None, "plotly.js v4.0.0", "package"),
    ],
)
def test_the_bundle_is_served_if_it_fits_the_installed_plotly(
    tmp_path: Path, bundled: str | None, installed: str, expected: str
) -> None:
    for name, header in (("bundle", bundled), ("package", installed)):
        (tmp_path / name).mkdir()
        if header is not None:
            (tmp_path / name / "plotly.min.js").write_text(f"/**\n* {header}\n*/")
    assert folder_of_script(tmp_path / "bundle", tmp_path / "package") == tmp_path / expected
