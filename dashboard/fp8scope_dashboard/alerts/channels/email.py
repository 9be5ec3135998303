"""Send a message by e-mail, over the channel's own SMTP server or the installation's.

config: {"to": "a@example.org, b@example.org"} and, for a server of its own, {"server": URL, "sender":
    ADDRESS}. Servers are URLs: smtps://USER:PASSWORD@HOST:465 (TLS), smtp://USER:PASSWORD@HOST:587 (STARTTLS
    is required), or smtp+plain://HOST:25 (no TLS). FP8SCOPE_SMTP_URL and FP8SCOPE_MAIL_FROM set the
    installation's.

The Message-ID contains the idempotency key and is the same in every attempt.
"""

from __future__ import annotations

import re
import smtplib
import ssl
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from email.message import EmailMessage
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote, urlsplit

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import validate_email

from fp8scope_dashboard.alerts.channels import mail_page, wording
from fp8scope_dashboard.alerts.channels.base import ChannelMessage, DeliveryError
from fp8scope_dashboard.alerts.channels.outgoing import restricted, unrestricted

SECONDS = 10.0
MAX_RECIPIENTS = 50
TEXT_LENGTH = 2_000
PORTS = {"smtps": 465, "smtp": 587, "smtp+plain": 25}


@dataclass(frozen=True)
class Server:
    """An SMTP server, with its login if it needs one."""

    scheme: str
    host: str
    port: int
    user: str
    password: str


def send(config: Mapping[str, Any], message: ChannelMessage) -> None:
    """Deliver a message to all recipients.

    Raises:
        DeliveryError: if the config is invalid, or the server did not accept the message for every recipient.
    """
    recipients, server, sender = check_config(config)
    mail = compose(message, sender, recipients)
    with restricted(), nullcontext() if config.get("server") else unrestricted():
        try:
            refused = _transmit(server, mail, sender, recipients)
        except smtplib.SMTPAuthenticationError as error:
            raise DeliveryError(
                f"The mail server refused the login ({error.smtp_code}).", permanent=True
            ) from None
        except smtplib.SMTPRecipientsRefused as error:
            codes = [code for code, _ in error.recipients.values()]
            raise _refusal("no recipient", max(codes)) from None
        except smtplib.SMTPResponseException as error:
            raise _refusal("the message", error.smtp_code) from None
        except smtplib.SMTPNotSupportedError:
            raise DeliveryError(
                "The mail server does not offer STARTTLS: use smtps:// or, in a trusted network, smtp+plain://.",
                permanent=True,
            ) from None
        except ssl.SSLError:
            raise DeliveryError("The mail server's certificate or its TLS was not accepted.") from None
        except (OSError, smtplib.SMTPException) as error:
            # Without the error's text, which may contain the address.
            raise DeliveryError(f"The mail server could not be used ({type(error).__name__}).") from None
    if refused:
        # The others have the message. Another attempt would send it to them again.
        raise DeliveryError(
            f"The mail server refused {len(refused)} of {len(recipients)} recipients; the others have the "
            "message.",
            permanent=True,
        )


def check_config(config: Mapping[str, Any]) -> tuple[list[str], Server, str]:
    """The recipients, the server and the sender.

    Raises:
        DeliveryError: if they are invalid or missing; the message says what to do.
    """
    texts = [config.get(name, "") for name in ("to", "server", "sender")]
    if not all(isinstance(text, str) and len(text) <= TEXT_LENGTH for text in texts):
        raise DeliveryError("An e-mail channel needs recipients, as text.", permanent=True)
    to, url, sender = (text.strip() for text in texts)
    recipients = [_address(part) for part in re.split(r"[,;\n]", to) if part.strip()]
    if not 1 <= len(recipients) <= MAX_RECIPIENTS:
        raise DeliveryError(f"Enter 1 to {MAX_RECIPIENTS} recipients, separated by commas.", permanent=True)
    if not url and not settings.SMTP_URL:
        raise DeliveryError(
            "This installation has no mail server: enter one, or ask the administrator to set "
            "FP8SCOPE_SMTP_URL.",
            permanent=True,
        )
    sender = _address(sender or settings.MAIL_FROM or recipients[0])
    return list(dict.fromkeys(recipients)), parse_server(url or settings.SMTP_URL), sender


def parse_server(url: str) -> Server:
    """A server from its URL.

    Raises:
        DeliveryError: the URL is invalid.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        valid = bool(host) and parts.path in ("", "/") and bool(user) == bool(password)
    except (ValueError, KeyError):
        valid = False
    if not valid:
        raise DeliveryError(
            "The mail server must look like smtp://user:password@host:587, smtps://... or smtp+plain://...; "
            "percent-encode special characters of the user and the password.",
            permanent=True,
        )
    return Server(parts.scheme, host, port, user, password)


def masked(config: Mapping[str, Any]) -> str:
    """The domains of the recipients: who gets alerts is not everybody's business."""
    try:
        recipients, _, _ = check_config(config)
    except DeliveryError:
        return "****"
    return ", ".join(dict.fromkeys(f"****@{recipient.rpartition('@')[2]}" for recipient in recipients))


def compose(message: ChannelMessage, sender: str, recipients: list[str]) -> EmailMessage:
    """The mail: plain text, and HTML with the chart inside."""
    mail = EmailMessage()
    mail["Subject"] = wording.title(message)
    mail["From"], mail["To"] = sender, ", ".join(recipients)
    mail["Date"] = formatdate(usegmt=True)
    mail["Message-ID"] = f"<{message.key}@fp8scope.invalid>"
    # No out-of-office replies.
    mail["Auto-Submitted"] = "auto-generated"
    if len(message.notices) == 1 and message.notices[0].alert != message.key:
        # Mail programs show later notices of an alert below the first one.
        mail["References"] = f"<{message.notices[0].alert}@fp8scope.invalid>"
    text, chart = wording.text(message), message.draw_chart()
    mail.set_content(text)
    mail.add_alternative(mail_page.render(message, message.key if chart else ""), subtype="html")
    if chart:
        page = list(mail.iter_parts())[1]
        page.add_related(chart, "image", "png", cid=f"<{message.key}>", filename="alert.png")
    return mail


def _transmit(
    server: Server, mail: EmailMessage, sender: str, recipients: list[str]
) -> dict[str, tuple[int, bytes]]:
    """Send; returns the recipients that were refused, unless all were, which is an error."""
    context = ssl.create_default_context()
    client: smtplib.SMTP
    if server.scheme == "smtps":
        client = smtplib.SMTP_SSL(server.host, server.port, timeout=SECONDS, context=context)
    else:
        client = smtplib.SMTP(server.host, server.port, timeout=SECONDS)
    with client:
        if server.scheme == "smtp":
            client.starttls(context=context)
        if server.user:
            client.login(server.user, server.password)
        return client.send_message(mail, sender, recipients)


def _refusal(what: str, code: int) -> DeliveryError:
    # SMTP: 4yz is temporary, 5yz is final.
    verb = "accepted" if what.startswith("no ") else "refused"
    return DeliveryError(f"The mail server {verb} {what} ({code}).", permanent=500 <= code < 600)


def _address(text: str) -> str:
    address = text.strip()
    try:
        validate_email(address)
    except ValidationError:
        raise DeliveryError("One of the e-mail addresses is not valid.", permanent=True) from None
    return address
