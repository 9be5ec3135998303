"""Sign in with two factors, set them up and remove them, and the switch that demands them."""

from __future__ import annotations

import re
import time
from typing import Any

import pyotp
import pytest
from dashboard.helpers.visitors import visitor_of
from django.test import Client
from pytest_django import Settings

from fp8scope_dashboard.accounts import services
from fp8scope_dashboard.accounts.attempts import FREE_ATTEMPTS, Attempts
from fp8scope_dashboard.accounts.models import Authenticator, Role, User
from fp8scope_dashboard.accounts.second_factor import codes
from fp8scope_dashboard.audit.models import Action, Entry

pytestmark = pytest.mark.django_db
PASSWORD = "correct horse battery"
FORM = {"username": "ada", "password": PASSWORD}


@pytest.fixture(autouse=True)
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Counts of attempts that no other test shares."""
    own = Attempts()
    for module in ("accounts.views", "accounts.second_factor.views"):
        monkeypatch.setattr(f"fp8scope_dashboard.{module}.attempts", own)
    return own


@pytest.fixture
def user() -> User:
    return User.objects.create_user("ada", password=PASSWORD)


@pytest.fixture
def app(user: User) -> pyotp.TOTP:
    """The app of `user`, who has set it up."""
    stored = codes.begin(user)
    totp = pyotp.TOTP(codes.secret_of(stored))
    assert codes.confirm(stored, totp.at(int(time.time()) - 30)) is not None
    return totp


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def code_of(app: pyotp.TOTP) -> str:
    """The next code that was not used."""
    used = Authenticator.objects.get().last_interval
    return app.generate_otp(max(used + 1, int(time.time()) // 30))


def test_it_works(client: Client, app: pyotp.TOTP) -> None:
    answer = client.post("/signin/", {**FORM, "next": "/account/"})
    assert (answer.status_code, answer["Location"]) == (302, "/signin/code/") and not is_signed_in(client)
    assert client.get("/account/").status_code == 302, "the first factor alone opens nothing"
    assert "authenticator app" in client.get("/signin/code/").content.decode()
    answer = client.post("/signin/code/", {"code": code_of(app)})
    assert (answer.status_code, answer["Location"]) == (302, "/account/") and is_signed_in(client)
    assert client.session.get_expiry_age() > 13 * 86_400
    assert Entry.objects.filter(action=Action.SIGNED_IN, user__username="ada", project=None).exists()


def test_a_wrong_code_signs_nobody_in(client: Client, app: pyotp.TOTP) -> None:
    client.post("/signin/", FORM)
    answer = client.post("/signin/code/", {"code": "000000" if code_of(app) != "000000" else "111111"})
    assert answer.status_code == 422 and "wrong or was used" in answer.content.decode()
    assert not is_signed_in(client)
    entry = Entry.objects.get(action=Action.SIGN_IN_FAILED)
    assert entry.text == "ada: wrong code of the second factor"


def test_a_code_that_was_used_is_refused(client: Client, app: pyotp.TOTP) -> None:
    code = code_of(app)
    client.post("/signin/", FORM)
    assert client.post("/signin/code/", {"code": code}).status_code == 302
    other = Client()
    other.post("/signin/", FORM)
    assert other.post("/signin/code/", {"code": code}).status_code == 422 and not is_signed_in(other)


def test_a_recovery_code_signs_in_once(client: Client, user: User, app: pyotp.TOTP) -> None:
    recovery = codes.renew_recovery_codes(user)
    for number, signs_in in enumerate((True, False)):
        client = Client()
        client.post("/signin/", FORM)
        client.post("/signin/code/", {"code": recovery[0]})
        assert is_signed_in(client) is signs_in, number


def test_attempts_with_codes_are_limited_as_those_with_passwords(client: Client, app: pyotp.TOTP) -> None:
    client.post("/signin/", FORM)
    for _ in range(FREE_ATTEMPTS):
        assert client.post("/signin/code/", {"code": "x"}).status_code == 422
    # A right password does not give more attempts, and a right code is not even checked.
    client.post("/signin/", FORM)
    answer = client.post("/signin/code/", {"code": code_of(app)})
    assert answer.status_code == 429 and int(answer["Retry-After"]) >= 1 and not is_signed_in(client)


def test_without_the_first_factor_there_is_no_second(client: Client, app: pyotp.TOTP) -> None:
    for answer in (client.get("/signin/code/"), client.post("/signin/code/", {"code": code_of(app)})):
        assert (answer.status_code, answer["Location"]) == (302, "/signin/")
    assert not is_signed_in(client)


def test_the_second_factor_must_follow_within_minutes(
    client: Client, app: pyotp.TOTP, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("/signin/", FORM)
    monkeypatch.setattr("fp8scope_dashboard.accounts.second_factor.sign_in.PENDING_SECONDS", 0.0)
    assert client.post("/signin/code/", {"code": code_of(app)})["Location"] == "/signin/"
    assert not is_signed_in(client)


def test_a_link_asks_for_the_code_too(client: Client, user: User, app: pyotp.TOTP) -> None:
    link = services.create_sign_in_link(user, "http://testserver").removeprefix("http://testserver")
    assert client.post(link)["Location"] == "/signin/code/" and not is_signed_in(client)
    page = client.post("/signin/code/", {"code": code_of(app)}, follow=True).content.decode()
    assert is_signed_in(client) and "This link works only once" in page


def test_a_session_of_somebody_else_is_not_mixed_with_it(client: Client, app: pyotp.TOTP) -> None:
    client.force_login(User.objects.create_user("eve"))
    link = services.create_sign_in_link(User.objects.get(username="ada"), "http://testserver")
    client.post(link.removeprefix("http://testserver"))
    assert not is_signed_in(client)


def test_setting_it_up(client: Client, user: User) -> None:
    client.force_login(user)
    assert "ask for no second factor" in client.get("/account/").content.decode()
    assert "Set up an authenticator app" in client.get("/account/factor/").content.decode()
    page = client.post("/account/factor/").content.decode()
    (secret,) = re.findall(r"<code[^>]*>([A-Z2-7 ]{32,})</code>", page)
    assert 'src="data:image/svg+xml' in page
    app = pyotp.TOTP(secret.replace(" ", ""))
    wrong = client.post("/account/factor/confirm", {"code": "x"})
    assert wrong.status_code == 422 and secret in wrong.content.decode()
    page = client.post("/account/factor/confirm", {"code": app.now()}).content.decode()
    recovery = re.findall(r"\b(?:[0-9a-f]{5}-){3}[0-9a-f]{5}\b", page)
    assert len(recovery) == codes.RECOVERY_CODES and "10 recovery codes left" in page
    again = client.get("/account/factor/").content.decode()
    assert not any(code in again for code in recovery) and secret not in again
    assert "set up an authenticator app" in Entry.objects.get(action=Action.FACTOR).text
    # The secret of a confirmed one is never shown or replaced.
    assert secret not in client.post("/account/factor/").content.decode()
    assert client.post("/account/factor/confirm", {"code": "x"}).status_code == 302


def test_removing_and_renewing_need_a_code(client: Client, user: User, app: pyotp.TOTP) -> None:
    client.force_login(user)
    for change in ("recovery", "remove"):
        assert client.post(f"/account/factor/{change}", {"code": "x"}).status_code == 422
    assert codes.authenticator_of(user) is not None
    page = client.post("/account/factor/recovery", {"code": code_of(app)}).content.decode()
    (recovery, *_) = re.findall(r"\b(?:[0-9a-f]{5}-){3}[0-9a-f]{5}\b", page)
    assert client.post("/account/factor/remove", {"code": recovery}).status_code == 302
    assert codes.authenticator_of(user) is None
    other = Client()
    other.post("/signin/", FORM)
    assert is_signed_in(other)


@pytest.mark.parametrize(
    ("demanded", "role", "must"),
    [
        ("administrators", Role.ADMIN, True),
        ("administrators", Role.MEMBER, False),
        ("everybody", Role.VIEWER, True),
        ("", Role.ADMIN, False),
    ],
)
def test_two_factors_can_be_demanded(settings: Settings, demanded: str, role: Role, must: bool) -> None:
    settings.TWO_FACTORS = demanded
    visitor = visitor_of(services.create_project("research", "Research"), "mia", role)
    answer = visitor.client.get(visitor.address())
    if not must:
        assert answer.status_code == 200
        return
    assert (answer.status_code, answer["Location"]) == (302, "/account/factor/")
    assert visitor.client.post(visitor.address("find/density")).status_code == 302
    page = visitor.client.post("/account/factor/").content.decode()
    (secret,) = re.findall(r"<code[^>]*>([A-Z2-7 ]{32,})</code>", page)
    app = pyotp.TOTP(secret.replace(" ", ""))
    visitor.client.post("/account/factor/confirm", {"code": app.now()})
    assert visitor.client.get(visitor.address()).status_code == 200
    refused = visitor.client.post("/account/factor/remove", {"code": code_of(app)})
    assert refused.status_code == 422 and codes.authenticator_of(visitor.user) is not None


def test_the_demand_holds_for_administrators_of_the_server_and_lets_them_leave(
    settings: Settings, client: Client
) -> None:
    settings.TWO_FACTORS = "administrators"
    client.force_login(User.objects.create_superuser("root"))
    assert client.get("/")["Location"] == client.get("/server/")["Location"] == "/account/factor/"
    assert client.post("/signout/")["Location"] == "/signin/"


def test_codes_are_not_in_reports_of_errors(client: Client, app: pyotp.TOTP) -> None:
    """Django leaves the fields of these forms out of its reports."""
    from django.test import RequestFactory

    from fp8scope_dashboard.accounts.second_factor import views

    request: Any = RequestFactory().post("/signin/code/", {"code": "123456"})
    request.session = client.session
    views.signin_code(request)
    assert request.sensitive_post_parameters == "__ALL__"
