"""Settings of the cold store: what is read, and what a mistake says."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from fp8scope_dashboard.settings.cold_store import ColdStoreSettings, cold_store_from_environment

URL = "s3://key:very-secret@bucket/folder?region=eu-west-1"


def test_it_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cold_store_from_environment(tmp_path) is None
    monkeypatch.setenv("FP8SCOPE_COLD_STORE", URL)
    chosen = cold_store_from_environment(tmp_path)
    assert chosen == ColdStoreSettings(
        url=URL, after=timedelta(days=30), folder=tmp_path / "cold_store", cache_bytes=1 << 30
    )
    assert "secret" not in repr(chosen)
    monkeypatch.setenv("FP8SCOPE_COLD_AFTER_DAYS", "7")
    monkeypatch.setenv("FP8SCOPE_COLD_CACHE_MIB", "0")
    chosen = cold_store_from_environment(tmp_path)
    assert chosen is not None and (chosen.after.days, chosen.cache_bytes) == (7, 0)


def test_the_address_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{URL}\n")
    monkeypatch.setenv("FP8SCOPE_COLD_STORE_FILE", str(tmp_path / "secret"))
    chosen = cold_store_from_environment(tmp_path)
    assert chosen is not None and chosen.url == URL


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FP8SCOPE_COLD_STORE", "bucket/very-secret"),
        ("FP8SCOPE_COLD_STORE", "/very-secret"),
        ("FP8SCOPE_COLD_AFTER_DAYS", "a month"),
        ("FP8SCOPE_COLD_AFTER_DAYS", "-1"),
        ("FP8SCOPE_COLD_CACHE_MIB", "1 GiB"),
        ("FP8SCOPE_COLD_CACHE_MIB", "99999999"),
    ],
)
def test_mistakes_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str
) -> None:
    monkeypatch.setenv("FP8SCOPE_COLD_STORE", URL)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ImproperlyConfigured, match=variable) as raised:
        cold_store_from_environment(tmp_path)
    assert "secret" not in str(raised.value)
