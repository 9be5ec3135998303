"""The documents as a site, built strictly: every link, anchor and document in its place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.code_blocks import ROOT

import fp8scope
import fp8scope_kernels


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return folder


def test_it_works(site: Path) -> None:
    """A page for each document; the first is the README."""
    for document in (ROOT / "docs").rglob("*.md"):
        page = document.relative_to(ROOT / "docs").with_suffix("")
        assert (site / (page.parent if page.name == "README" else page) / "index.html").exists(), document
    first = (site / "index.html").read_text()
    assert "Is your FP8 training run still the run that BF16 would have been?" in first
    assert 'src="images/run.webp"' in first and (site / "images" / "run.webp").exists()


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text()
        assert not re.search(r'<(?:script|img|iframe|source)[^>]* src(?:set)?="(?:https?:)?//', text), page
        assert not re.search(r'<link[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//', text), page
        # The theme asks GitHub for numbers where it knows the repository.
        assert 'data-md-component="source"' not in text, page


@pytest.mark.parametrize("package", [fp8scope, fp8scope_kernels], ids=lambda package: package.__name__)
def test_every_public_name_is_in_the_reference(site: Path, package: object) -> None:
    name, names = package.__name__, package.__all__  # type: ignore[attr-defined]
    text = (site / "reference" / name / "index.html").read_text()
    assert [each for each in names if f'id="{name}.{each}"' not in text] == []


def test_every_endpoint_is_in_the_reference(site: Path) -> None:
    from fp8scope_dashboard.api.root import api

    text = (site / "reference" / "http" / "index.html").read_text()
    listed = re.findall(r"<h2 [^>]*><code>((?:GET|PUT|POST|PATCH|DELETE) \S+)</code>", text)
    paths = api.get_openapi_schema(path_prefix="/api/v1/")["paths"]
    served = {f"{method.upper()} {path}" for path, item in paths.items() for method in item}
    assert set(listed) == served and len(listed) == len(served)
    # What a body's name leads to has the body's fields.
    targets = set(re.findall(r'href="#([a-z0-9]+)"', text))
    assert targets and all(f'id="{target}"' in text for target in targets)
