"""An empty project, a client that nobody has signed in, and a cold store."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard.helpers.object_stores import ColdFolder, S3Server, s3_server
from dashboard.helpers.shown_html import ShownClient
from django.conf import LazySettings

from fp8scope_dashboard.accounts.models import Project
from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.cold_store import object_store
from fp8scope_dashboard.settings.cold_store import ColdStoreSettings


@pytest.fixture
def project(db: None) -> Project:
    return create_project("default", "Default")


@pytest.fixture
def client() -> ShownClient:
    return ShownClient()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server with a bucket, one for the session."""
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as running:
        yield running


def cold_folder(url: str, folder: Path, settings: LazySettings) -> ColdFolder:
    settings.COLD_STORE = ColdStoreSettings(url=url, folder=folder)
    object_store._store_at.cache_clear()
    return ColdFolder(settings.COLD_STORE)


@pytest.fixture
def cold(tmp_path: Path, settings: LazySettings) -> ColdFolder:
    """A cold store in a local folder."""
    return cold_folder(f"file://{tmp_path}/store", tmp_path / "local", settings)


@pytest.fixture
def cold_s3(s3: S3Server, tmp_path: Path, settings: LazySettings) -> ColdFolder:
    """A cold store in an S3 server, empty at first."""
    return cold_folder(s3.url(uuid.uuid4().hex), tmp_path / "local", settings)


@pytest.fixture(params=["file", "s3"])
def any_cold(request: pytest.FixtureRequest) -> ColdFolder:
    """Each kind of cold store."""
    chosen: ColdFolder = request.getfixturevalue("cold" if request.param == "file" else "cold_s3")
    return chosen
