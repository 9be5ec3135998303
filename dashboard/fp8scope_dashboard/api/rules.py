"""Rules as code: read and change the alert rules of a token's project as a YAML file."""

from __future__ import annotations

from typing import Annotated, Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema

from fp8scope_dashboard.alerts.custom_rules import files as rule_files
from fp8scope_dashboard.alerts.custom_rules import store as rule_store
from fp8scope_dashboard.alerts.custom_rules.audit import record_rules
from fp8scope_dashboard.alerts.custom_rules.documents import RuleDocumentError
from fp8scope_dashboard.api.auth import ADMINISTRATOR, READER, project_of
from fp8scope_dashboard.api.responses import ERRORS
from fp8scope_dashboard.audit.log import actor_of
from fp8scope_dashboard.wire import schemas
from fp8scope_dashboard.wire.errors import InvalidError

HINT = "Correct the file, then apply it again. docs/alerts.md has the fields."
YAML = "application/yaml"

FILE_BODY = {
    "required": True,
    "description": "The rules as YAML; docs/alerts.md has the fields.",
    "content": {YAML: {"schema": {"type": "string"}}},
}

router = Router(tags=["rules"], auth=ADMINISTRATOR)


class ChangeOut(Schema):
    """The effect of a file on one rule; `fields` has the present and the new value of each field."""

    what: str
    title: str
    fields: dict[str, tuple[Any, Any]]


class ChangesOut(Schema):
    checked: bool
    changes: list[ChangeOut]


@router.get("/rules", response={200: None, ERRORS: schemas.ErrorOut}, auth=READER)
def get_rules(request: HttpRequest) -> HttpResponse:
    """The rules of the project as a YAML file."""
    return HttpResponse(rule_files.export(rule_store.rules_in(project_of(request))), content_type=YAML)


@router.put(
    "/rules",
    response={200: ChangesOut, ERRORS: schemas.ErrorOut},
    openapi_extra={"requestBody": FILE_BODY},
)
def put_rules(
    request: HttpRequest,
    check: Annotated[bool, Query(description="Change nothing; return what would change.")] = False,
    prune: Annotated[bool, Query(description="Also remove rules that the file does not have.")] = False,
) -> dict[str, Any]:
    """Create and change rules so that the project has those of a YAML file, which is the body."""
    project = project_of(request)
    try:
        text = request.body.decode()
        drafts = rule_files.read(project, text)
        with transaction.atomic():
            changes = rule_store.apply(project, drafts, prune=prune, check=check)
            if not check:
                record_rules(actor_of(request), project, changes)
    except UnicodeDecodeError:
        raise InvalidError("The file is not UTF-8.", HINT) from None
    except (rule_files.RuleFileError, RuleDocumentError) as error:
        raise InvalidError(str(error)[:1000], HINT) from None
    return {
        "checked": check,
        "changes": [
            {"what": change.what, "title": change.title, "fields": change.fields} for change in changes
        ],
    }
