"""Browsers get the collected files: style sheets in one piece, plotly in the form that compiles faster."""

from __future__ import annotations

import gzip
import re
from io import StringIO
from pathlib import Path

import pytest
from django.contrib.staticfiles import finders
from django.contrib.staticfiles.storage import staticfiles_storage
from django.core.files.base import ContentFile, File
from django.core.files.storage import FileSystemStorage
from django.core.management import call_command
from django.test import override_settings
from plotly.offline import get_plotlyjs

from fp8scope_dashboard.settings.storage import compiled_at_once

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


def test_plotly_is_the_installed_one_but_for_two_parentheses(collected: Path) -> None:
    script = only(collected, "plotly/plotly.min.*.js").read_text()
    assert script.count("(() => {\n") == script.count("\n})));\n") == 1
    assert script.replace("(() => {\n", "() => {\n").replace("\n})));\n", "\n}));") == get_plotlyjs().rstrip()
    packed = only(collected, "plotly/plotly.min.*.js.gz").read_bytes()
    assert gzip.decompress(packed).decode() == script


@pytest.mark.parametrize(
    "script",
    [
        b"",
        b"var Plotly = {};",
        b'(typeof self !== "undefined" ? self : this, () => {\n"use strict"; return Plotly;\n}.call());\n',
        b'(self : this, () => {\n"use strict"; 1 : this, () => {\n"use strict";\nreturn Plotly;\n}));\n',
    ],
)
def test_a_script_of_another_form_stays_as_it_is(script: bytes) -> None:
    assert compiled_at_once(script) == script
