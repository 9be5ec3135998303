"""A call right after a program has imported a module."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8scope.process.import_hook import _WrappingFinder, when_imported

NAME = "a_module_to_wait_for"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / f"{NAME}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield NAME
    sys.modules.pop(NAME, None)
    assert not [finder for finder in sys.meta_path if isinstance(finder, _WrappingFinder)]


def test_it_works(module: str) -> None:
    calls: list[int] = []
    when_imported(module, lambda: calls.append(sys.modules[module].value))
    assert calls == []
    importlib.import_module(module)
    assert calls == [1]
    # A module that is there already.
    when_imported(module, lambda: calls.append(2))
    importlib.reload(sys.modules[module])
    assert calls == [1, 2]


def test_asking_for_a_module_does_not_use_up_the_call(module: str) -> None:
    """As Transformers asks for torch, before it or the script imports that."""
    calls: list[str] = []
    for name in ("first", "second"):
        when_imported(module, lambda name=name: calls.append(name))  # type: ignore[misc]
    for _ in range(2):
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.loader is not None and calls == []
    importlib.import_module(module)
    assert sorted(calls) == ["first", "second"]


def test_a_module_that_cannot_be_found_or_fails(module: str, tmp_path: Path) -> None:
    calls: list[str] = []
    cancel = when_imported(f"{module}_that_is_not_there", lambda: calls.append("not there"))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{module}_that_is_not_there")
    cancel()
    (tmp_path / f"{NAME}.py").write_text("raise ValueError('as planned')\n")
    cancel = when_imported(module, lambda: calls.append("failed"))
    with pytest.raises(ValueError, match="as planned"):
        importlib.import_module(module)
    assert calls == []
    (tmp_path / f"{NAME}.py").write_text("value = 22222\n")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert calls == ["failed"]
    cancel()


def test_cancelled(module: str) -> None:
    calls: list[str] = []
    when_imported(module, lambda: calls.append("cancelled"))()
    importlib.import_module(module)
    assert calls == []
