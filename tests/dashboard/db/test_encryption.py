"""Encryption of secrets in the database."""

from __future__ import annotations

import pytest
from django.conf import LazySettings
from django.core.exceptions import ImproperlyConfigured

from fp8scope_dashboard.accounts.services import create_project
from fp8scope_dashboard.alerts.delivery.rekey import rekey
from fp8scope_dashboard.alerts.models import Channel
from fp8scope_dashboard.db.encryption import UnreadableSecretError, decrypt_json, encrypt_json

SECRET = {"url": "https://hook.test/T0SECRET", "größe": 1}


def test_it_works() -> None:
    sealed = encrypt_json(SECRET)
    assert "SECRET" not in sealed and "hook" not in sealed
    assert decrypt_json(sealed) == SECRET
    assert encrypt_json(SECRET) != sealed, "equal secrets must not look equal"


def test_a_lost_key_and_a_changed_text_are_clear_errors(settings: LazySettings) -> None:
    sealed = encrypt_json(SECRET)
    with pytest.raises(UnreadableSecretError):
        decrypt_json(f"{sealed[:-5]}AAAA=")
    settings.SECRET_KEY = "another"
    with pytest.raises(UnreadableSecretError) as caught:
        decrypt_json(sealed)
    assert "SECRET" not in str(caught.value) and sealed not in str(caught.value)


def test_former_keys_decrypt_but_do_not_encrypt(settings: LazySettings) -> None:
    former, sealed = settings.SECRET_KEY, encrypt_json(SECRET)
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "another", ["oldest", former]
    assert decrypt_json(sealed) == SECRET
    new = encrypt_json(SECRET)
    settings.SECRET_KEY_FALLBACKS = []
    assert decrypt_json(new) == SECRET
    with pytest.raises(UnreadableSecretError):
        decrypt_json(sealed)


def test_a_random_key_encrypts_nothing(settings: LazySettings) -> None:
    settings.SECRET_KEY_IS_RANDOM = True
    with pytest.raises(ImproperlyConfigured, match="FP8SCOPE_SECRET_KEY"):
        encrypt_json(SECRET)


def test_rekeying_makes_former_keys_needless(db: None, settings: LazySettings) -> None:
    project, former = create_project("default", "Default"), settings.SECRET_KEY
    for name in ("a", "b"):
        Channel.objects.create(project=project, name=name, sealed=encrypt_json(SECRET))
    settings.SECRET_KEY = "a key that is lost"
    Channel.objects.create(project=project, name="lost", sealed=encrypt_json(SECRET))
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = "another", [former]
    assert rekey() == (2, ["lost"])
    settings.SECRET_KEY_FALLBACKS = []
    assert [channel.config for channel in Channel.objects.filter(name__in="ab")] == [SECRET, SECRET]
