"""The token of a request: read it, and give it a new secret; and the tokens of its project."""

from __future__ import annotations

from datetime import datetime

from django.db import transaction
from django.http import HttpRequest
from ninja import Field, Router, Schema

from fp8scope_dashboard.accounts.models import ApiToken
from fp8scope_dashboard.accounts.tokens import MAX_TOKENS, TokenError, rotate_token, working_tokens
from fp8scope_dashboard.api.auth import ADMINISTRATOR, ANY_TOKEN, token_of
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.audit.log import actor_of, record
from fp8scope_dashboard.audit.models import Action
from fp8scope_dashboard.wire import schemas
from fp8scope_dashboard.wire.errors import InvalidError

router = Router(tags=["tokens"], auth=ADMINISTRATOR)


class TokenOut(Schema):
    """A token, without its secret."""

    id: int
    name: str
    prefix: str = Field(description="The beginning of its secrets, which identifies it.")
    project: str = Field(description="Slug of its project.")
    owner: str | None = Field(description="User name of the person that it belongs to.")
    scopes: list[str]
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None = Field(description="Null: when it is revoked.")
    rotated_at: datetime | None = Field(description="When it got its present secret.")
    former_until: datetime | None = Field(description="Until then the secret from before works, too.")


class TokensOut(Schema):
    tokens: list[TokenOut]


class RotatedOut(TokenOut):
    """A token with its new secret, which no other response contains."""

    secret: str


@router.get("/token", response={200: TokenOut, ERRORS: schemas.ErrorOut}, auth=ANY_TOKEN)
def get_token(request: HttpRequest) -> dict[str, object]:
    """The token of the request."""
    return _described(token_of(request))


@router.post("/token/rotate", response={200: RotatedOut, ERRORS: schemas.ErrorOut}, auth=ANY_TOKEN)
def rotate(request: HttpRequest) -> dict[str, object]:
    """Give the token of the request a new secret. The present one works for another 24 hours."""
    token = token_of(request)
    try:
        with transaction.atomic():
            secret = rotate_token(token)
            text = f"“{token.name}” ({token.prefix}…), with the API"
            record(actor_of(request), token.project, Action.TOKEN_ROTATED, text)
    except TokenError as error:
        raise InvalidError(str(error), "Create a token on the settings page of the project.") from error
    return {**_described(token), "secret": secret}


@router.get("/tokens", response={200: TokensOut, ERRORS: schemas.ErrorOut})
def get_tokens(request: HttpRequest) -> dict[str, object]:
    """The tokens of the project that work, the newest first."""
    tokens = working_tokens(token_of(request).project).select_related("project", "created_by")
    return {"tokens": [_described(token) for token in tokens.order_by("-created_at", "-id")[:MAX_TOKENS]]}


def _described(token: ApiToken) -> dict[str, object]:
    fields = ("id", "name", "prefix", "scopes", "created_at", "last_used_at", "expires_at", "rotated_at")
    owner = token.created_by
    return {
        **{name: getattr(token, name) for name in fields},
        "project": token.project.slug,
        "owner": None if owner is None else owner.username,
        "former_until": token.former_until if token.former_works else None,
    }
