"""The provider of OpenID Connect: begin a sign-in, and check what comes back.

Authlib speaks the protocol: discovery, state, nonce, PKCE, and the signature and the claims of the ID token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import requests
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.django_client import OAuth
from django.conf import settings
from django.db import connection
from django.http import HttpRequest, HttpResponse
from joserfc.errors import JoseError

from fp8scope_dashboard.settings.sign_in import OidcSettings

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 5.0
LEEWAY_SECONDS: Final = 60
# Signatures of a key that the provider alone has. The client secret, which others hold, must not sign.
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
MAX_TEXT: Final = 255
MAX_GROUPS: Final = 10_000


class OidcError(Exception):
    """The sign-in failed; the message says what to do and contains no secret."""


@dataclass(frozen=True)
class Claims:
    """Claims of a provider about a person. `groups` is None if it does not name any."""

    subject: str
    username: str
    email: str
    groups: frozenset[str] | None


def begin(request: HttpRequest, callback: str) -> HttpResponse:
    """Redirect to the provider, and note state, nonce and PKCE's verifier in the session.

    Raises:
        OidcError: the provider does not answer.
    """
    _release_connection()
    try:
        answer: HttpResponse = _client().authorize_redirect(request, callback)
    except (requests.RequestException, ValueError, KeyError, AuthlibBaseError, RuntimeError) as error:
        raise _unreachable(error) from error
    return answer


def finish(request: HttpRequest) -> Claims:
    """Check the answer of the provider, and return its claims.

    Raises:
        OidcError: the person cancelled, or state, nonce, issuer, audience, time or signature is wrong, or the
            provider does not answer.
    """
    provider = _provider()
    client = _client()
    options: dict[str, dict[str, Any]] = {
        "iss": {"essential": True, "value": provider.issuer},
        "aud": {"essential": True, "value": provider.client_id},
        "exp": {"essential": True},
    }
    _release_connection()
    try:
        metadata = client.load_server_metadata()
        if str(metadata.get("issuer", "")).rstrip("/") != provider.issuer:
            raise OidcError("The provider calls itself by another address than FP8SCOPE_OIDC_ISSUER.")
        options["iss"]["value"] = metadata["issuer"]
        offered = metadata.get("id_token_signing_alg_values_supported") or ["RS256"]
        allowed = [name for name in offered if name in ALGORITHMS]
        client.server_metadata["id_token_signing_alg_values_supported"] = allowed
        token = client.authorize_access_token(request, claims_options=options, leeway=LEEWAY_SECONDS)
        claims = token.get("userinfo")
        if not claims:
            raise OidcError("The provider sent no ID token. Is `openid` among FP8SCOPE_OIDC_SCOPES?")
        claims = dict(claims)
        asks_for_groups = provider.roles is not None and provider.groups_claim not in claims
        if asks_for_groups and metadata.get("userinfo_endpoint"):
            # Without its time: Authlib takes one that ends within a minute for expired.
            bearer = {"access_token": token["access_token"], "token_type": "Bearer"}
            more = client.userinfo(token=bearer)
            # Of somebody else they would be worthless, see section 5.3.2 of the standard.
            if more.get("sub") == claims["sub"]:
                claims = {**more, **claims}
    except requests.RequestException as error:
        raise _unreachable(error) from error
    except (AuthlibBaseError, JoseError, ValueError, KeyError, TypeError, RuntimeError) as error:
        logger.warning("A sign-in with OpenID Connect was refused: %s.", type(error).__name__)
        raise OidcError(f"The answer of the provider was refused ({_reason(error)}). Try again.") from error
    return _claims(claims, provider)


def _release_connection() -> None:
    """Hold no database connection while the provider is asked."""
    if not connection.in_atomic_block:
        connection.close()


def _claims(claims: Mapping[str, Any], provider: OidcSettings) -> Claims:
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= MAX_TEXT:
        raise OidcError("The provider sent no usable subject.")
    groups = claims.get(provider.groups_claim)
    if isinstance(groups, str):
        groups = [groups]
    if groups is not None and not isinstance(groups, list):
        raise OidcError(f"The claim {provider.groups_claim} is no list of groups.")
    if groups is not None and len(groups) > MAX_GROUPS:
        raise OidcError(f"The claim {provider.groups_claim} has more than {MAX_GROUPS:,} groups.")
    return Claims(
        subject,
        str(claims.get(provider.username_claim) or ""),
        str(claims.get("email") or "")[:254],
        None if groups is None else frozenset(str(group) for group in groups),
    )


def _reason(error: Exception) -> str:
    """A word for the reason, which is safe to show: a wrong state, nonce, audience or time."""
    name = type(error).__name__.removesuffix("Error")
    claim = getattr(error, "claim_name", None) or getattr(error, "claim", None)
    return f"{name}: {claim}" if claim else name


def _unreachable(error: Exception) -> OidcError:
    logger.warning("The provider of OpenID Connect does not answer: %s.", type(error).__name__)
    return OidcError(
        "The provider of single sign-on does not answer. Try again later, or sign in another way."
    )


def provider_or_none() -> OidcSettings | None:
    """The provider that this server has, if any."""
    provider: OidcSettings | None = settings.OIDC
    return provider


def _provider() -> OidcSettings:
    provider = provider_or_none()
    if provider is None:
        raise OidcError("This server has no single sign-on.")
    return provider


def _client() -> Any:
    return _registered(_provider())


@lru_cache(maxsize=4)
def _registered(provider: OidcSettings) -> Any:
    """The client, which keeps the provider's metadata and keys; it asks for new keys when one is unknown."""
    registry = OAuth()
    return registry.register(
        name="oidc",
        client_id=provider.client_id,
        client_secret=provider.client_secret,
        server_metadata_url=f"{provider.issuer}/.well-known/openid-configuration",
        client_kwargs={
            "scope": provider.scopes,
            "code_challenge_method": "S256",
            "default_timeout": TIMEOUT_SECONDS,
        },
    )
