"""Links to what belongs to a run and is kept elsewhere."""

from pathlib import Path
from urllib.parse import urlsplit

SCHEMES = ("http", "https", "s3", "gs", "file")
NAME_LENGTH = 128
ADDRESS_LENGTH = 1000


def artefact_document(name: str, address: str) -> dict[str, str]:
    """Return the checked name and address of an artefact; a path becomes a `file://` address.

    Raises ValueError if one of them is invalid.
    """
    name, address = str(name).strip(), str(address).strip()
    if not 1 <= len(name) <= NAME_LENGTH or not name.isprintable():
        raise ValueError(f"name must be a text of 1 to {NAME_LENGTH} printable characters, got {name!r:.200}")
    if "://" not in address:
        scheme = address.partition(":")[0]
        if scheme.lower() in ("javascript", "data", "vbscript"):
            raise ValueError(f"address must not begin with {scheme}:")
        if not address:
            raise ValueError("address must not be empty")
        address = Path(address).expanduser().absolute().as_uri()
    parts = urlsplit(address)
    has_place = bool(parts.netloc) or (parts.scheme == "file" and len(parts.path) > 1)
    if parts.scheme.lower() not in SCHEMES or not has_place:
        schemes = ", ".join(SCHEMES)
        raise ValueError(f"address must begin with one of {schemes}, or be a path, got {address!r:.200}")
    if parts.password:
        raise ValueError("address must not contain a password")
    if len(address) > ADDRESS_LENGTH or not address.isprintable() or " " in address:
        raise ValueError(f"address must have at most {ADDRESS_LENGTH} characters and no spaces")
    return {"name": name, "address": address}


def address_in(text: str) -> str:
    """The address that a text consists of, such as the path that a callback returns; empty if it is none."""
    text = text.strip()
    is_address = "://" in text or text.startswith(("/", "~/", "./"))
    if not is_address or any(character.isspace() for character in text):
        return ""
    try:
        return artefact_document("x", text)["address"]
    except ValueError:
        return ""
