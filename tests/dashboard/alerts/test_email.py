"""The e-mail channel against a real SMTP server: its mails, and how it handles each response."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from dashboard.helpers import certificates
from dashboard.helpers.messages import MESSAGE, NOTICE, Mailbox, free_port, smtp_receiver
from django.conf import LazySettings

from fp8scope_dashboard.alerts.channels import DeliveryError, email

PNG = b"\x89PNG\r\n\x1a\n only the beginning of one"


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with smtp_receiver() as mailbox:
        yield mailbox


def config(mailbox: Mailbox, **fields: str) -> dict[str, str]:
    return {"to": "ada@x.test, ben@y.test", "server": f"smtp+plain://127.0.0.1:{mailbox.port}", **fields}


def test_it_works(mailbox: Mailbox) -> None:
    email.send(config(mailbox, sender="alerts@x.test"), replace(MESSAGE, draw_chart=lambda: PNG))
    ((recipients, mail),) = mailbox.mails
    assert recipients == ["ada@x.test", "ben@y.test"]
    assert mail["Subject"] == "Loss not finite in gpt [critical]" and mail["From"] == "alerts@x.test"
    assert mail["Message-ID"] == f"<{MESSAGE.key}@fp8scope.invalid>"
    plain, html = mail.get_body(["plain"]), mail.get_body(["related"])
    assert plain is not None and html is not None
    assert NOTICE.message in plain.get_content() and NOTICE.url in plain.get_content()
    page, picture = html.iter_parts()
    assert f'src="cid:{MESSAGE.key}"' in page.get_content()
    content = page.get_content()
    assert f'href="{NOTICE.url}"' in content and NOTICE.message in content and ">Critical</span>" in content
    assert 'font-weight: 600; background:#fde8eb;color:#c0213a"' in content
    assert "20px; line-height: 26px" in content.partition("<h1")[2].partition("</h1>")[0]
    assert set(re.findall(r'(?:src|href)="([^"]*)"', content)) == {f"cid:{MESSAGE.key}", NOTICE.url}
    assert picture["Content-ID"] == f"<{MESSAGE.key}>" and picture.get_content() == PNG


def test_every_attempt_has_the_same_id(mailbox: Mailbox) -> None:
    for _ in range(2):
        email.send(config(mailbox), MESSAGE)
    assert len({mail["Message-ID"] for _, mail in mailbox.mails}) == 1 and len(mailbox.mails) == 2


def test_later_notices_refer_to_the_first(mailbox: Mailbox) -> None:
    resolved = replace(NOTICE, key="another", reason="resolved", note="Resolved by mia. <b>Done</b>")
    email.send(config(mailbox), replace(MESSAGE, key="another", notices=(resolved,)))
    ((_, mail),) = mailbox.mails
    assert mail["References"] == f"<{NOTICE.alert}@fp8scope.invalid>"
    assert mail["Subject"].startswith("Resolved: ")
    html = mail.get_body(["html"])
    assert html is not None and ">Resolved</span>" in html.get_content()
    assert "Resolved by mia. &lt;b&gt;Done" in html.get_content() and "Critical" not in html.get_content()


def test_a_digest_and_a_test_can_be_read(mailbox: Mailbox) -> None:
    notices = tuple(replace(NOTICE, run=f"r{i}", run_name=f"gpt {i}") for i in range(60))
    email.send(config(mailbox), replace(MESSAGE, notices=notices))
    email.send(config(mailbox), replace(MESSAGE, notices=()))
    (_, digest), (_, test) = mailbox.mails
    assert digest["Subject"] == "60 alerts in 60 runs of default"
    plain = digest.get_body(["plain"])
    assert plain is not None
    assert "gpt 39 [critical]" in plain.get_content() and "... and 20 more" in plain.get_content()
    html = digest.get_body(["html"])
    assert html is not None
    assert "17px; line-height: 23px" in html.get_content().rpartition("<h2")[2].partition("</h2>")[0]
    assert "in gpt 39</h2>" in html.get_content() and "20 more alerts are on the page." in html.get_content()
    assert html.get_content().count(f'href="{NOTICE.url}"') == 40
    html = test.get_body(["html"])
    assert html is not None and "The test arrived" in html.get_content()
    assert "Test" in test["Subject"]


def test_hostile_names_stay_text(mailbox: Mailbox) -> None:
    notice = replace(
        NOTICE, run_name="x\r\nBcc: eve@x.test\r\n\r\n<script>", message='<img src=x> http://e.test/"x'
    )
    email.send(config(mailbox), replace(MESSAGE, notices=(notice,)))
    ((recipients, mail),) = mailbox.mails
    html = mail.get_body(["html"])
    assert mail["Bcc"] is None and recipients == ["ada@x.test", "ben@y.test"] and html is not None
    assert "<script>" not in html.get_content() and "<img" not in html.get_content()
    assert 'href="http://e.test' not in html.get_content()


def test_logs_in_with_the_password_of_the_url(mailbox: Mailbox) -> None:
    server = f"smtp+plain://me:{quote('p@ss')}@127.0.0.1:{mailbox.port}"
    email.send(config(mailbox, server=server), MESSAGE)
    assert mailbox.logins == [("me", "p@ss")] and mailbox.mails
    with pytest.raises(DeliveryError, match="refused the login") as caught:
        email.send(config(mailbox, server=server.replace("p%40ss", "wrong")), MESSAGE)
    assert caught.value.permanent and "wrong" not in str(caught.value)


def test_uses_the_servers_mail_server_even_at_a_private_address(
    mailbox: Mailbox, settings: LazySettings
) -> None:
    settings.CHANNEL_NETWORKS = []
    settings.SMTP_URL, settings.MAIL_FROM = f"smtp+plain://127.0.0.1:{mailbox.port}", "fp8@x.test"
    email.send({"to": "ada@x.test"}, MESSAGE)
    assert mailbox.mails[0][1]["From"] == "fp8@x.test"
    # A server that a project chose is not trusted.
    with pytest.raises(DeliveryError, match="private address"):
        email.send(config(mailbox), MESSAGE)


@pytest.mark.parametrize(("answer", "permanent"), [("452 full", False), ("554 spam", True)])
def test_a_refusal_is_an_error(mailbox: Mailbox, answer: str, permanent: bool) -> None:
    mailbox.answer = answer
    with pytest.raises(DeliveryError, match=answer[:3]) as caught:
        email.send(config(mailbox), MESSAGE)
    assert caught.value.permanent is permanent


def test_refused_recipients_are_errors_without_their_addresses(mailbox: Mailbox) -> None:
    mailbox.refused = {"ben@y.test"}
    with pytest.raises(DeliveryError, match="1 of 2 recipients") as caught:
        email.send(config(mailbox), MESSAGE)
    assert caught.value.permanent and mailbox.mails[0][0] == ["ada@x.test"]
    mailbox.refused = {"ben@y.test", "ada@x.test"}
    with pytest.raises(DeliveryError, match="no recipient") as caught:
        email.send(config(mailbox), MESSAGE)
    assert caught.value.permanent and "@" not in str(caught.value)


def test_a_server_that_is_down_is_tried_again() -> None:
    with pytest.raises(DeliveryError, match="could not be used") as caught:
        email.send({"to": "a@x.test", "server": f"smtp://127.0.0.1:{free_port()}"}, MESSAGE)
    assert not caught.value.permanent


def test_smtp_needs_tls(mailbox: Mailbox) -> None:
    with pytest.raises(DeliveryError, match="STARTTLS") as caught:
        email.send(config(mailbox, server=f"smtp://127.0.0.1:{mailbox.port}"), MESSAGE)
    assert caught.value.permanent and not mailbox.mails


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    return certificates.unsigned(tmp_path)


def test_certificates_are_verified(
    certificate: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with smtp_receiver(tls_context=certificate) as mailbox:
        server = f"smtp://127.0.0.1:{mailbox.port}"
        with pytest.raises(DeliveryError, match="certificate"):
            email.send(config(mailbox, server=server), MESSAGE)
        assert not mailbox.mails
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        email.send(config(mailbox, server=server), MESSAGE)
        assert mailbox.mails
