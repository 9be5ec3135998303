"""Links to artefacts are checked before they are sent."""

from pathlib import Path

import pytest

from fp8scope.recording.artefacts import address_in, artefact_document


def test_it_works(tmp_path: Path) -> None:
    address = "s3://bucket/run/step-10"
    assert artefact_document(" Checkpoint ", address) == {"name": "Checkpoint", "address": address}
    assert artefact_document("x", str(tmp_path / "a b.pt"))["address"] == f"file://{tmp_path}/a%20b.pt"


@pytest.mark.parametrize(
    "address",
    ["", "javascript:alert(1)", "data:text/html,x", "JavaScript://x/%0aalert(1)", "ftp://x/y", "https://",
     "https://u:p@x/y", "s3://" + "x" * 2000],
)  # fmt: skip
def test_refuses_other_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        artefact_document("x", address)


def test_finds_the_address_that_a_callback_returns() -> None:
    assert address_in(" gs://b/step-3 ") == "gs://b/step-3"
    assert address_in("/data/step-3.pt") == "file:///data/step-3.pt"
    for text in ("", "written to step-31.pt", "step-31.pt", "javascript://x", "saved /data/x and /data/y"):
        assert address_in(text) == ""
