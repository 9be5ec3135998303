"""The types of images and their sizes, from the first bytes."""

from __future__ import annotations

import io

import pytest
from dashboard.helpers.logged_media import picture
from PIL import Image

from fp8scope_dashboard.media import contents
from fp8scope_dashboard.media.sniffing import IMAGE_TYPES, sniff
from fp8scope_dashboard.wire.errors import InvalidError

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_it_works(kind: str) -> None:
    image = sniff(picture(300, 17, kind=kind))
    assert image is not None and image.type in IMAGE_TYPES and image.type.endswith(kind.lower())
    assert (image.width, image.height) == (300, 17)


def test_a_lossless_webp_has_its_size_too() -> None:
    for how in ({"lossless": True}, {"lossless": True, "exif": b"Exif\0\0" + bytes(8)}):
        file = io.BytesIO()
        Image.new("RGB", (301, 18)).save(file, "WEBP", **how)
        image = sniff(file.getvalue())
        assert image is not None and (image.width, image.height) == (301, 18)


@pytest.mark.parametrize("body", [b"", SVG, b"<html>", b"\xff\xd8\xff", b"RIFF0000WEBPVP8X", picture()[:18]])
def test_what_is_no_image_has_no_type(body: bytes) -> None:
    assert sniff(body) is None
    with pytest.raises(InvalidError, match="no PNG"):
        contents.check("image", body)
    assert contents.check("file", body) is None


def test_each_prefix_of_an_image_is_read_without_an_exception() -> None:
    for kind in ("PNG", "JPEG", "GIF", "WEBP"):
        body = picture(5, 5, kind=kind)
        sizes = {(image.width, image.height) for end in range(len(body)) if (image := sniff(body[:end]))}
        assert sizes <= {(5, 5)}


def test_a_small_file_that_would_become_a_large_picture_is_refused() -> None:
    bomb = bytearray(picture())
    bomb[16:24] = (50_000).to_bytes(4, "big") * 2
    # Whatever its kind: a file that is an image is shown, too.
    for kind in ("image", "file"):
        with pytest.raises(InvalidError, match="50000 x 50000 pixels"):
            contents.check(kind, bytes(bomb))
