"""Damaged files of other tools: valid ones with bytes changed, and what reading them does."""

from __future__ import annotations

import random
import shutil
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from agent.helpers.import_files import WRITERS
from agent.helpers.imported import read

from fp8scope.importing.model import UnreadableError
from fp8scope.importing.registry import sources_of

TOKENS = (
    *(b"", b"\0", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"nan", b"-inf", b"1e999", b"-1"),
    *(b"9" * 400, b"[" * 300, b'{"a":' * 300, b'"', b"'", b",", b"\n", b"\r\n", b": ", b"|", b"\xed\xa0\x80"),
    *(
        b"null",
        b"true",
        b"{}",
        b"[]",
        b'{"x": {"y": 1}}',
        b"2**63",
        b"9223372036854775808",
        b"../../etc/passwd",
    ),
)


@dataclass
class Fuzzed:
    """What reading damaged files of one format did."""

    inputs: int = 0
    refused: int = 0
    """Files that a reader has refused with a reason; the others had something to read."""
    failures: list[str] = field(default_factory=list)
    """Tracebacks of every other exception."""


def fuzz(name: str, inputs: int, seed: int, folder: Path) -> Fuzzed:
    """Read `inputs` damaged files of a format, by name and, now and then, by their content."""
    generator, result = random.Random(seed), Fuzzed()
    original, work = folder / f"{name}-original", folder / f"{name}-{seed}"
    if not original.exists():
        original.mkdir()
        WRITERS[name](original)
    files = {path.relative_to(original): path.read_bytes() for path in original.rglob("*") if path.is_file()}
    source = next(path for path, form in sources_of(original) if form.name == name).relative_to(original)
    shutil.copytree(original, work)
    stores = sorted(path.parent.relative_to(original) for path in original.rglob("CURRENT"))
    for _ in range(inputs):
        changed = generator.choice(list(files))
        if stores and generator.random() < 0.25:
            # Checksums keep damaged bytes of RocksDB from the reader: here it gets damaged keys and values.
            changed = generator.choice(stores)
            _damage_items(work / changed, generator)
        else:
            (work / changed).write_bytes(damaged(files[changed], generator))
        result.inputs += 1
        try:
            if generator.random() < 0.1:
                list(sources_of(work))
            for run in read(work / source, name):
                assert run.run.key and run.run.name is not None
        except UnreadableError:
            result.refused += 1
        except Exception:
            result.failures.append(traceback.format_exc())
        if changed in stores:
            shutil.rmtree(work / changed)
            shutil.copytree(original / changed, work / changed)
        else:
            (work / changed).write_bytes(files[changed])
    shutil.rmtree(work)
    return result


def _damage_items(folder: Path, generator: random.Random) -> None:
    from agent.helpers.aim_repository import change_items  # aimrocks has no wheels for Python 3.13.

    def change(item: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        key, value = item
        if generator.random() < 0.5:
            return damaged(key, generator), value
        return key, damaged(value, generator)

    change_items(folder, lambda items: [change(item) for item in generator.sample(items, 4)])


def damaged(data: bytes, generator: random.Random) -> bytes:
    """Change some bytes: replace, remove, repeat, insert tokens, or cut the end off."""
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 1, 2, 4, 16))):
        _damage(changed, generator)
    return bytes(changed)


def _damage(changed: bytearray, generator: random.Random) -> None:
    at = generator.randrange(len(changed) + 1)
    kind = generator.randrange(6)
    if kind == 0 and changed:
        changed[at % len(changed)] = generator.randrange(256)
    elif kind == 1 and changed:
        changed[at % len(changed)] ^= 1 << generator.randrange(8)
    elif kind == 2:
        del changed[at : at + generator.choice((1, 2, 8, 64))]
    elif kind == 3:
        changed[at:at] = changed[at : at + generator.choice((1, 8, 64, 1024))]
    elif kind == 4:
        token = generator.choice(TOKENS)
        changed[at : at + generator.choice((0, len(token)))] = token
    elif generator.random() < 0.2:
        del changed[at:]
