"""A provider of OpenID Connect that answers as the standard says, or with one thing wrong."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

CLIENT_ID, CLIENT_SECRET = "fp8scope", "a-client-secret-of-32-characters"


@cache
def signing_key(_: str) -> RSAKey:
    """A key of the tests; making one takes a while."""
    return RSAKey.generate_key(2048, {"kid": "one"})


class Provider:
    """Issues codes for people, and ID tokens for codes. Tests change what it says by its attributes."""

    def __init__(self) -> None:
        self.issuer = ""
        self.claims: dict[str, Any] = {"sub": "1", "preferred_username": "ada", "email": "ada@example.org"}
        self.userinfo: dict[str, Any] = {}
        # These replace claims of the ID token after everything else.
        self.wrong: dict[str, Any] = {}
        self.algorithm = "RS256"
        self.signs_with_published_key = True
        self.sends_id_token = True
        self.token_status = 200
        self.requests: list[str] = []
        self._key, self._other_key = signing_key("published"), signing_key("another")
        self._codes: dict[str, dict[str, str]] = {}

    def code_for(self, location: str) -> dict[str, str]:
        """The query of the way back, after a person has agreed at the address `location`."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(location).query).items()}
        assert query["client_id"] == CLIENT_ID and query["code_challenge_method"] == "S256"
        assert query["response_type"] == "code" and "openid" in query["scope"].split()
        code = secrets.token_urlsafe()
        self._codes[code] = query
        return {"code": code, "state": query["state"]}

    def metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "jwks_uri": f"{self.issuer}/keys",
            "userinfo_endpoint": f"{self.issuer}/userinfo",
            "id_token_signing_alg_values_supported": ["RS256", "HS256", "none"],
        }

    def keys(self) -> dict[str, Any]:
        return {"keys": [{**self._key.as_dict(private=False), "kid": "one", "use": "sig"}]}

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        """The answer to a code. It works once, for the client and the verifier that it was made for."""
        asked = self._codes.pop(form.get("code", ""), None)
        client = base64.b64decode(authorization.removeprefix("Basic ")).decode()
        challenge = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        proven = base64.urlsafe_b64encode(challenge).decode().rstrip("=")
        if asked is None or client != f"{CLIENT_ID}:{CLIENT_SECRET}" or proven != asked["code_challenge"]:
            return 400, {"error": "invalid_grant"}
        answer = {"access_token": "an-access-token", "token_type": "Bearer", "expires_in": 60}
        if self.sends_id_token:
            answer["id_token"] = self._id_token(asked["nonce"])
        return self.token_status, answer

    def _id_token(self, nonce: str) -> str:
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": CLIENT_ID, "iat": now, "exp": now + 60, "nonce": nonce}
        claims |= self.claims | self.wrong
        key: Any = self._key if self.signs_with_published_key else self._other_key
        if self.algorithm == "HS256":
            key = OctKey.import_key(CLIENT_SECRET)
        header = {"alg": self.algorithm, "kid": "one"}
        if self.algorithm == "none":
            parts = (json.dumps(part).encode() for part in (header, claims))
            return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts) + "."
        return jwt.encode(header, {name: value for name, value in claims.items() if value is not None}, key)


@contextmanager
def running_provider() -> Iterator[Provider]:
    """A provider that listens on a loopback address."""
    provider = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            provider.requests.append(path)
            answers = {"/.well-known/openid-configuration": provider.metadata(), "/keys": provider.keys()}
            answers["/userinfo"] = provider.userinfo
            self._answer(200 if path in answers else 404, answers.get(path, {}))

        def do_POST(self) -> None:
            provider.requests.append(self.path)
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self._answer(*provider.token(form, self.headers.get("Authorization", "")))

        def _answer(self, status: int, document: dict[str, Any]) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider.issuer = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()
