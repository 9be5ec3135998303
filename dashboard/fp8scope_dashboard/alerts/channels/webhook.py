"""Send a message as a signed POST request to a URL that the user chose.

config: {"url": "https://...", "secret": "..."}. The body is JSON: the notice; or, for a digest, {"digest":
    true, "key", "alerts": [notice, ...]}; or, for a test, {"test": true, "key"}. Every request has

    Idempotency-Key: <the same in every attempt>

and, with a secret,

    Fp8scope-Signature: t=<unix seconds>,v1=<hex HMAC-SHA256 of "<t>.<body>" with the secret>

so that the receiver can verify its sender and age. Any 2xx status is success.

To limit abuse, only http(s) to addresses that `outgoing` allows is possible, redirects are not followed, only
the status of the response is used, and users do not control the body.

The URL is a secret like the signing key, because many receivers authenticate their senders by it alone. It is
never shown again once saved.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, ReadTimeoutError, SSLError

from fp8scope_dashboard.alerts.channels.base import ChannelMessage, DeliveryError
from fp8scope_dashboard.alerts.channels.outgoing import restricted

SIGNATURE_HEADER = "Fp8scope-Signature"
CONNECT_SECONDS = 3.0
READ_SECONDS = 5.0
URL_LENGTH = 2_000
BODY_BYTES = 32 * 1024
# In seconds. A receiver that asks for more gets the next attempt after that.
LONGEST_WAIT = 3_600.0
OF_SERVICES = {"hooks.slack.com": "Slack", "discord.com": "Discord", "discordapp.com": "Discord"}
"""Hosts that refuse a webhook's JSON; `service` writes to them."""
# Statuses of requests that will never succeed; after any other one, a later attempt may.
GONE = (404, 405, 410)


def send(config: Mapping[str, Any], message: ChannelMessage) -> None:
    """Deliver a message.

    Raises:
        DeliveryError: if the config is invalid, there is no response, or its status is not 2xx.
    """
    url, secret = check_config(config)
    body = _body(message)
    headers = {"Content-Type": "application/json", "User-Agent": "fp8scope", "Idempotency-Key": message.key}
    if secret:
        headers[SIGNATURE_HEADER] = sign(body, secret, int(time.time()))
    with restricted():
        status, retry_after = _post(url, body, headers)
    if 300 <= status < 400:
        raise DeliveryError(
            f"The receiver answered {status}, a redirect: enter the final address.", permanent=True
        )
    if not 200 <= status < 300:
        raise DeliveryError(
            f"The receiver answered {status}.", permanent=status in GONE, retry_after=retry_after
        )


def check_config(config: Mapping[str, Any]) -> tuple[str, str]:
    """The url and the secret ('' for none).

    Raises:
        DeliveryError: if they are invalid; the message says what to do.
    """
    url, secret = config.get("url"), config.get("secret", "")
    if not isinstance(url, str) or not isinstance(secret, str) or len(url) > URL_LENGTH:
        raise DeliveryError("A webhook needs a url and may have a secret, both text.", permanent=True)
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise DeliveryError("The webhook's url must look like https://host/path.", permanent=True)
    if (name := OF_SERVICES.get(parts.hostname or "")) is not None:
        raise DeliveryError(
            f"{name} takes messages of its own form: add a service with this address.", permanent=True
        )
    if parts.username or parts.password:
        raise DeliveryError("Leave user and password out of the webhook's url; set a secret.", permanent=True)
    return url, secret


def masked(config: Mapping[str, Any]) -> str:
    """The URL with its host only: the path of many receivers is a secret."""
    try:
        url, _ = check_config(config)
    except DeliveryError:
        return "****"
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}/****"


def sign(body: bytes, secret: str, timestamp: int) -> str:
    """The value of the signature header. Receivers compute it too and compare in constant time."""
    mac = hmac.new(secret.encode(), f"{timestamp}.".encode() + body, hashlib.sha256)
    return f"t={timestamp},v1={mac.hexdigest()}"


def _body(message: ChannelMessage) -> bytes:
    alerts = [notice.as_dict() for notice in message.notices]
    content: dict[str, Any]
    if not alerts:
        content = {"test": True, "key": message.key, "project": message.project, "url": message.url}
    elif len(alerts) == 1:
        (content,) = alerts
    else:
        digest = {"digest": True, "key": message.key, "project": message.project, "url": message.url}
        content = {**digest, "alerts": alerts}
    body = json.dumps(content, allow_nan=False).encode()
    bound = BODY_BYTES * max(1, len(alerts))
    while len(body) > bound and any(alert["tensors"] for alert in alerts):
        # Tensor names may be long: send fewer of them.
        for alert in alerts:
            alert["tensors"] = alert["tensors"][: len(alert["tensors"]) // 2]
        body = json.dumps(content, allow_nan=False).encode()
    return body


def _seconds(retry_after: str) -> float:
    """The seconds of a Retry-After header (RFC 9110, 10.2.3): a number of them, or a date; else 0."""
    if retry_after.isdecimal():
        return min(float(retry_after), LONGEST_WAIT)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return min(max(date.timestamp() - time.time(), 0.0), LONGEST_WAIT)


def _post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, float]:
    """Send. Returns the status, and the seconds that the receiver asks to wait before another attempt."""
    timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS)
    # A new pool: a connection kept from an earlier request may be dead.
    with urllib3.PoolManager(num_pools=1) as pool:
        try:
            answer = pool.request(
                "POST",
                url,
                body=body,
                headers=headers,
                timeout=timeout,
                retries=False,
                redirect=False,
                preload_content=False,
            )
        except ReadTimeoutError as error:
            raise DeliveryError(
                f"The receiver accepted the request but did not answer in {READ_SECONDS:g} s."
            ) from error
        except ConnectTimeoutError as error:
            raise DeliveryError(f"The receiver could not be reached in {CONNECT_SECONDS:g} s.") from error
        except SSLError as error:
            raise DeliveryError("The receiver's certificate was not accepted.") from error
        except HTTPError as error:
            # Without the error's text, which contains the URL and so perhaps a token.
            raise DeliveryError(f"The receiver could not be reached ({type(error).__name__}).") from error
        status, retry_after = answer.status, _seconds(answer.headers.get("Retry-After", ""))
        # Without reading the body, which may be endless.
        answer.close()
        return status, retry_after
