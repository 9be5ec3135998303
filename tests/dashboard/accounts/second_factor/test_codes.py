"""Codes of authenticator apps, and recovery codes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pyotp
import pytest
from django.db import connection

from fp8scope_dashboard.accounts.models import Authenticator, RecoveryCode, User
from fp8scope_dashboard.accounts.second_factor import codes
from fp8scope_dashboard.db.encryption import encrypt_json

NOW = 1_000_000_000.0


def clock(seconds: float = 0.0) -> Any:
    return lambda: NOW + seconds


def set_up(name: str = "ada") -> tuple[User, pyotp.TOTP, list[str]]:
    """A user with a confirmed authenticator, whose first code was of the interval before NOW."""
    user = User.objects.create_user(name)
    stored = codes.begin(user)
    app = pyotp.TOTP(codes.secret_of(stored))
    recovery = codes.confirm(stored, app.at(int(NOW) - 30), clock())
    assert recovery is not None
    return user, app, recovery


@pytest.mark.django_db
def test_it_works() -> None:
    user, app, recovery = set_up()
    assert codes.authenticator_of(user) is not None and len(set(recovery)) == codes.RECOVERY_CODES
    assert codes.use_code(user, app.at(int(NOW)), clock())
    assert codes.use_code(user, recovery[0], clock())


@pytest.mark.django_db
def test_agrees_with_the_values_of_the_standard() -> None:
    """RFC 6238, appendix B, for SHA-1: the last six of its eight digits."""
    user = User.objects.create_user("ada")
    stored = codes.begin(user)
    stored.sealed = encrypt_json({"secret": "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ"})
    stored.save()
    stored.confirmed_at = stored.created_at
    stored.save()
    for moment, code in (
        (59, "287082"),
        (1111111109, "081804"),
        (1234567890, "005924"),
        (2000000000, "279037"),
    ):
        assert codes.use_code(user, code, clock(moment - NOW)), moment


@pytest.mark.django_db
def test_no_code_works_twice() -> None:
    user, app, recovery = set_up()
    code = app.at(int(NOW))
    assert codes.use_code(user, code, clock()) and not codes.use_code(user, code, clock(5))
    # An earlier code, which somebody has seen, does not work after a later one.
    assert codes.use_code(user, app.at(int(NOW) + 30), clock(30))
    assert not codes.use_code(user, app.at(int(NOW)), clock(30))
    assert codes.use_code(user, recovery[3], clock()) and not codes.use_code(user, recovery[3], clock())
    assert codes.recovery_codes_left(user) == codes.RECOVERY_CODES - 1


@pytest.mark.django_db
def test_the_code_that_confirmed_does_not_work_again() -> None:
    user, app, _ = set_up()
    assert not codes.use_code(user, app.at(int(NOW) - 30), clock())


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("seconds", "works"), [(-60, False), (-30, True), (0, True), (30, True), (60, False)]
)
def test_clocks_may_differ_by_one_interval(seconds: int, works: bool) -> None:
    user, app, _ = set_up()
    Authenticator.objects.update(last_interval=0)
    assert codes.use_code(user, app.at(int(NOW) + seconds), clock()) is works


@pytest.mark.django_db
@pytest.mark.parametrize(
    "text", ["", "12345", "1234567", "abcdef", "１２３４５６", "x" * 100_000, "\0", "12 34"]
)
def test_refuses_what_is_no_code(text: str) -> None:
    user, _, _ = set_up()
    assert not codes.use_code(user, text, clock())


@pytest.mark.django_db
def test_codes_may_be_written_as_people_do() -> None:
    user, app, recovery = set_up()
    code = app.at(int(NOW))
    assert codes.use_code(user, f" {code[:3]} {code[3:]}\n", clock())
    assert codes.use_code(user, f" {recovery[0].upper().replace('-', ' ')} ", clock())


@pytest.mark.django_db
def test_nothing_readable_is_stored() -> None:
    user, app, recovery = set_up()
    stored = repr([*Authenticator.objects.values_list(), *RecoveryCode.objects.values_list()])
    assert app.secret not in stored and not any(code in stored for code in recovery)
    assert user.username not in stored


@pytest.mark.django_db
def test_an_unconfirmed_authenticator_counts_for_nothing() -> None:
    user = User.objects.create_user("ada")
    first = codes.secret_of(codes.begin(user))
    stored = codes.begin(user)
    assert codes.secret_of(stored) != first, "a page that is opened again shows a new secret"
    app = pyotp.TOTP(codes.secret_of(stored))
    assert codes.authenticator_of(user) is None and not codes.use_code(user, app.at(int(NOW)), clock())
    assert codes.confirm(stored, "000000", clock()) is None or app.at(int(NOW)) == "000000"


@pytest.mark.django_db
def test_a_confirmed_authenticator_is_not_replaced() -> None:
    user, _, _ = set_up()
    with pytest.raises(ValueError, match="has an authenticator"):
        codes.begin(user)


@pytest.mark.django_db
def test_new_recovery_codes_end_the_old_ones() -> None:
    user, _, old = set_up()
    new = codes.renew_recovery_codes(user)
    assert not codes.use_code(user, old[0], clock()) and codes.use_code(user, new[0], clock())


@pytest.mark.django_db
def test_codes_of_another_user_do_not_work() -> None:
    ada, app, recovery = set_up()
    eve, _, _ = set_up("eve")
    assert not codes.use_code(eve, app.at(int(NOW)), clock()) and not codes.use_code(
        eve, recovery[0], clock()
    )
    assert codes.use_code(ada, recovery[0], clock())


@pytest.mark.django_db
def test_apps_read_the_address() -> None:
    user, app, _ = set_up("ada@example")
    authenticator = codes.authenticator_of(user)
    assert authenticator is not None
    address = urlsplit(codes.address_of(authenticator))
    assert (address.scheme, address.netloc, address.path) == ("otpauth", "totp", "/fp8scope:ada%40example")
    assert parse_qs(address.query) == {"secret": [app.secret], "issuer": ["fp8scope"]}


@pytest.mark.django_db
def test_secrets_follow_the_installations_key(settings: Any) -> None:
    user, app, _ = set_up()
    settings.SECRET_KEY_FALLBACKS, settings.SECRET_KEY = [settings.SECRET_KEY], "another key " * 4
    assert codes.use_code(user, app.at(int(NOW)), clock())
    assert codes.rekey() == (1, [])
    settings.SECRET_KEY_FALLBACKS = []
    assert codes.use_code(user, app.at(int(NOW) + 30), clock(30))
    settings.SECRET_KEY = "a lost key " * 4
    assert not codes.use_code(user, app.at(int(NOW) + 60), clock(60))
    assert codes.rekey() == (0, ["ada"])


@pytest.mark.django_db(transaction=True)
def test_of_simultaneous_requests_with_one_code_one_succeeds() -> None:
    user, app, recovery = set_up()

    def use(code: str) -> bool:
        try:
            return codes.use_code(user, code, clock())
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as threads:
        for code in (app.at(int(NOW)), recovery[0]):
            assert sum(threads.map(use, [code] * 8)) == 1
