"""A certificate that no client trusts by itself."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def unsigned(folder: Path) -> ssl.SSLContext:
    """The context of a server at 127.0.0.1, whose certificate is written to `cert.pem` in the folder."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
