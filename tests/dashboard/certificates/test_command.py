"""`fp8scope verify` and `fp8scope certify-file`, which need no server; and what they write."""

from __future__ import annotations

import gzip
import re
import stat
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet
import pytest
from dashboard.helpers.certified_arms import arms, certificate

from fp8scope_dashboard.certificates.document import as_text
from fp8scope_dashboard.certificates.gate import junit, markdown
from fp8scope_dashboard.certification import certify_file, verify
from fp8scope_dashboard.pages.certificate.sheet import sheet


@pytest.fixture
def curves(tmp_path: Path) -> Path:
    ours, theirs = arms()
    lines = ["run,group,step,loss"]
    for group, arm in (("fp8", ours), ("bf16", theirs)):
        for member in arm:
            rows = zip(member.curve.steps, member.curve.losses, strict=True)
            lines += [f"{member.curve.name},{group},{step},{loss!r}" for step, loss in rows]
    lines[1:] = [line.replace("np.float64(", "").replace(")", "") for line in lines[1:]]
    path = tmp_path / "curves.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_it_works(curves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, output = tmp_path / "keys" / "key.pem", tmp_path / "certificate.json"
    arguments = [str(curves), "fp8", "bf16", "--key", str(key), "-o", str(output)]
    assert certify_file(arguments) == 0
    told = capsys.readouterr()
    assert told.out.startswith("FP8 is equivalent to BF16 within 0.25 %.")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    signer = re.findall(r"signed by ([0-9a-f]{64})", told.err)[0]
    forms = [f"--{form}={tmp_path / form}" for form in ("html", "junit", "markdown")]
    assert verify([str(output), "--signer", signer, *forms]) == 0
    assert capsys.readouterr().out.startswith("valid: FP8 is equivalent")
    assert (tmp_path / "html").read_text() == output.with_suffix(".html").read_text()
    assert ElementTree.parse(tmp_path / "junit").getroot().get("failures") == "0"
    assert (tmp_path / "markdown").read_text().startswith("### ✅ FP8 is equivalent")
    # The same key again, for runs that are named one by one.
    assert certify_file([str(curves), "run 0,run 1", "run 10", "--key", str(key), "-o", str(output)]) == 0
    assert signer in capsys.readouterr().err


def test_a_changed_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "certificate.json"
    path.write_text(as_text(certificate(0.01)).replace('"worse"', '"equivalent"'))
    assert verify([str(path)]) == 1
    assert "refused: the file was changed after it was signed" in capsys.readouterr().err
    assert verify([str(tmp_path / "missing.json")]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run,step\na,1\n", "no column for a loss"),
        ("run,step,loss\na,1,x\n", "no number"),
        ("run,step,loss\na,1,2\na,1,3\n", "two losses for a step"),
        ("run,step,loss\na,1.5,2\n", "no whole number"),
        ("run,step,loss\nb,1,2\n", "no run or group of the file is named 'a'; its first runs: b"),
        ("run,group,step,loss\nb,c,1,2\n", "its first groups: c"),
        ('run,step,loss\n"a,1,2\n', "cannot be read|no run or group|no column"),
        ("", "cannot be read"),
    ],
)
def test_tables_that_are_none_say_so(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "curves.csv"
    path.write_text(text)
    assert certify_file([str(path), "a", "b", "--key", str(tmp_path / "key.pem")]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_parquet_with_columns_of_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = arms(0.01, seeds=1)
    tables = [
        pa.table(
            {
                "Name": [member.curve.name] * len(member.curve),
                "iteration": member.curve.steps[::-1],
                "eval nll": member.curve.losses[::-1],
                "tokens": member.curve.steps[::-1] * 1024.0,
            }
        )
        for member in (*ours, *theirs)
    ]
    path = tmp_path / "curves.parquet"
    pa.parquet.write_table(pa.concat_tables(tables), path)
    arguments = [str(path), "run 0", "run 10", "--key", str(tmp_path / "key"), "-o", str(tmp_path / "c.json")]
    assert certify_file([*arguments, "--loss", "eval nll", "--margin-nats", "0.001"]) == 0
    assert "FP8 is worse" in capsys.readouterr().out
    assert certify_file([*arguments, "--margin", "a lot"]) == 1
    assert "is no number" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\nx\n-----END PRIVATE KEY-----\n"])
def test_a_key_that_is_none_is_not_replaced(
    content: bytes, curves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(content)
    assert certify_file([str(curves), "fp8", "bf16", "--key", str(key)]) == 1
    assert "cannot be used as a key" in capsys.readouterr().err and key.read_bytes() == content


def test_the_page_is_one_file_without_scripts_and_addresses() -> None:
    page = sheet(certificate(0.01))
    assert "FP8 is worse than BF16" in page and 'class="danger"' in page and "<svg" in page
    assert "<script" not in page and "@import" not in page
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"https://fp8scope.example.", "http://www.w3.org/2000/svg"}


def test_names_are_data() -> None:
    from dataclasses import replace

    from dashboard.helpers.certified_arms import KEY

    from fp8scope_dashboard.certificates.claim import Terms
    from fp8scope_dashboard.certificates.document import make

    name = "<img src=x onerror=alert(1)>|`[x](y)`\x1b[2J"
    ours, theirs = arms(seeds=1)
    ours[0] = replace(ours[0], curve=replace(ours[0].curve, name=name))
    document = make(ours, theirs, Terms(), KEY, names=(name, "bf16"))
    page = sheet(document)
    assert "<img" not in page and "&lt;img src=x" in page
    text = markdown(document)
    assert "<img" not in text.replace("\\<", "") and "\x1b" not in text and "\\`\\[x\\](y)\\`" in text
    case = ElementTree.fromstring(junit(document)).find("testcase")
    assert case is not None and "<img src=x" in str(case.get("name")) and "\x1b" not in str(case.get("name"))
