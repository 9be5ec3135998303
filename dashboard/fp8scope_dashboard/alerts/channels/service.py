"""Send a message to a chat, paging or push service, by the library Apprise.

config: {"url": URL}, the https address that Slack, Teams (Power Automate) or Discord gives for messages, or
    an Apprise URL such as pagerduty://Key@App; Apprise knows some 130 services. The URL contains the tokens
    and is never shown again; pages show the service's name.

What a URL can make Apprise do is limited: no local programs or files (templates, key files), no redirects, no
plug-ins from disk, nothing stored, only addresses that `outgoing` allows. Its log is off, because it quotes
responses; the status of a failed request is taken from it.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from fp8scope_dashboard.alerts.channels import wording
from fp8scope_dashboard.alerts.channels.base import ChannelMessage, DeliveryError
from fp8scope_dashboard.alerts.channels.outgoing import restricted

if TYPE_CHECKING:
    from apprise import AppriseAttachment, NotifyBase

URL_LENGTH = 2_000
# Services on the server itself: its desktop, its devices, its logs.
LOCAL = frozenset(
    ["blink1", "dbus", "gio", "glib", "gnome", "growl", "kde", "macosx", "qt", "rsyslog", "syslog", "windows"]
)
# E-mail has a kind of channel with a Message-ID.
ELSEWHERE = {"mailto": "E-mail", "mailtos": "E-mail"}
# Apprise's names of its plug-ins for Slack, with the only mode that takes files, and for Microsoft Teams.
SLACK, SLACK_BOT = "Slack", "bot"
TEAMS = "Power Automate / Workflows (for MSTeams)"
# What Apprise may put between a title and a body: a line break, a mark of Markdown, a number of parts.
TITLE_SPACE = 14
CONNECT_SECONDS, READ_SECONDS = 3.0, 8.0
_STATUS = re.compile(r"\berror=(\d{3})\b")


def send(config: Mapping[str, Any], message: ChannelMessage) -> None:
    """Deliver a message.

    Raises:
        DeliveryError: if the config is invalid, or the service did not accept the message.
    """
    with restricted(files=False), _failures() as failures:
        plugin = _plugin(config.get("url"))
        join_notices(plugin, message)
        attachment = _attachment(plugin, message)
        chart = message.chart_url if attachment is None else ""
        if chart:
            show_picture(plugin, chart)
        title, body = fitting(plugin, message, chart)
        if not plugin.notify(body=body, title=title, notify_type=_type(message), attach=attachment):
            status = next(iter(failures), "")
            reason = f"answered {status}" if status else "did not accept the message, or could not be reached"
            raise DeliveryError(f"{plugin.service_name} {reason}.", permanent=status in ("404", "410"))


def fitting(plugin: NotifyBase, message: ChannelMessage, chart_url: str = "") -> tuple[str, str]:
    """The title and the body, as long as the service accepts.

    Services refuse longer messages, or cut them off before the link. A user who prefers several messages puts
    `overflow=split` into the URL.
    """
    if plugin.overflow_mode == "split":
        return wording.title(message), wording.text(message)
    longest, of_title = plugin.body_maxlen - plugin.overflow_buffer, plugin.title_maxlen
    if of_title <= 0:
        # Apprise puts the title above the body. Of a short message it takes half.
        of_title = max(longest // 2, min(longest, wording.MIN_TITLE))
    title = wording.title(message, min(of_title, wording.TITLE_LENGTH))
    if plugin.title_maxlen <= 0 or plugin.overflow_amalgamate_title:
        longest -= len(title) + TITLE_SPACE
    body = wording.text(message, max(longest, 0))
    chart = f"Chart: {chart_url}\n" if chart_url else ""
    return title, f"{body}{chart}" if len(body) + len(chart) <= longest else body


def check_config(config: Mapping[str, Any]) -> None:
    """Check that Apprise understands the URL, without sending anything.

    Raises:
        DeliveryError: it does not, or the service cannot be used; the message says what to do.
    """
    with restricted(files=False):
        _plugin(config.get("url"))


def masked(config: Mapping[str, Any]) -> str:
    """The name of the service, or the host of its address."""
    url = config.get("url")
    host = urlsplit(url).hostname if isinstance(url, str) and url.lower().startswith("https://") else None
    if host:
        return f"https://{host}/****"
    scheme = url.partition("://")[0].lower() if isinstance(url, str) and "://" in url else ""
    return f"{scheme}://****" if scheme.isalnum() else "****"


def _plugin(url: object) -> NotifyBase:
    if not isinstance(url, str) or not 1 <= len(url) <= URL_LENGTH or "://" not in url:
        raise DeliveryError(
            "Enter the address that the service gives, such as https://hooks.slack.com/services/..., or an "
            "Apprise URL, such as pagerduty://Key@App.",
            permanent=True,
        )
    # Only processes that send need its modules, some 200.
    from apprise import Apprise, AppriseAsset

    scheme = url.partition("://")[0].strip().lower()
    if scheme in LOCAL:
        raise DeliveryError(
            f"{scheme}:// would act on the server itself; it cannot be a channel.", permanent=True
        )
    if scheme in ELSEWHERE:
        raise DeliveryError(f"Add a channel of the kind {ELSEWHERE[scheme]} instead.", permanent=True)
    asset = AppriseAsset(
        app_id="fp8scope",
        app_desc="fp8scope alerts",
        app_url="https://github.com/fp8scope/fp8scope",
        async_mode=False,
        secure_logging=True,
        http_redirects=False,
        allow_templates=False,
        interpret_escapes=False,
        pgp_autogen=False,
        pem_autogen=False,
        storage_mode="memory",
    )
    # From the first white space on, Apprise would read a second URL.
    plugin = Apprise.instantiate(url, asset=asset) if not re.search(r"\s", url) else None
    if plugin is None and scheme in ("http", "https"):
        raise DeliveryError(
            "This is not the address of a service that is known. For a server of your own, add a webhook.",
            permanent=True,
        )
    if plugin is None:
        raise DeliveryError(
            "Apprise does not understand this URL. The form of each service's URL is on "
            "https://github.com/caronc/apprise/wiki.",
            permanent=True,
        )
    if not plugin.verify_certificate:
        raise DeliveryError(
            "Certificates are always verified: remove `verify=` from the URL.", permanent=True
        )
    # The service's own limits may be longer than an attempt is allowed to take.
    plugin.socket_connect_timeout, plugin.socket_read_timeout = CONNECT_SECONDS, READ_SECONDS
    plugin.redirects = False
    return plugin


def join_notices(plugin: NotifyBase, message: ChannelMessage) -> None:
    """Give all notices of an alert one key, where the service joins incidents by a key."""
    if getattr(plugin, "action", "") == "map":
        _act_by_alias(plugin, message)
    if len(message.notices) != 1:
        return
    # PagerDuty's and Opsgenie's names for it. A key that the user set in the URL stays.
    for name in ("dedup", "alias"):
        if hasattr(plugin, name) and not getattr(plugin, name):
            setattr(plugin, name, message.notices[0].alert)
    if hasattr(plugin, "dedup") and message.notices[0].reason == "resolved":
        setattr(plugin, "action", "resolve")  # noqa: B010 - PagerDuty's, unknown to the base class


def _act_by_alias(plugin: NotifyBase, message: ChannelMessage) -> None:
    """Let Opsgenie, or Jira with the same interface, open an alert, or close those that have ended.

    Apprise closes alerts by request ids, which only the process knows that opened them, and closes for every
    message that is no warning: a test, or an end, would be accepted without a request.
    """
    ended = [quote(notice.alert, safe="") for notice in message.notices if notice.reason == "resolved"]
    if not ended or len(ended) < len(message.notices):
        setattr(plugin, "action", "new")  # noqa: B010 - unknown to the base class
        return
    setattr(plugin, "action", "close")  # noqa: B010
    fetch = plugin._fetch  # type: ignore[attr-defined]

    def fetch_by_alias(method: Any, url: str, payload: Any, params: Any = None) -> Any:
        return fetch(method, url, payload, {**(params or {}), "identifierType": "alias"})

    plugin._fetch = fetch_by_alias  # type: ignore[attr-defined]
    plugin.store.get = lambda *_: ended


def _is_slack_webhook(plugin: NotifyBase) -> bool:
    return plugin.service_name == SLACK and getattr(plugin, "mode", "") != SLACK_BOT


def show_picture(plugin: NotifyBase, address: str) -> None:
    """Let a message of Slack's webhooks or of Teams show the picture at an address.

    Apprise has no argument for it, so that this adds it to what the plug-in sends. Other services show the
    address as a link.
    """
    if _is_slack_webhook(plugin):
        send = plugin._send  # type: ignore[attr-defined]

        def send_with_picture(url: str, payload: dict[str, Any], **more: Any) -> Any:
            for part in payload.get("attachments", [])[:1]:
                if "blocks" in part:
                    part["blocks"].append({"type": "image", "image_url": address, "alt_text": "Chart"})
                else:
                    part["image_url"] = address
            return send(url, payload, **more)

        plugin._send = send_with_picture  # type: ignore[attr-defined]
    elif plugin.service_name == TEAMS:
        compose = plugin.gen_payload

        def compose_with_picture(*arguments: Any, **more: Any) -> Any:
            payload = compose(*arguments, **more)
            picture = {"type": "Image", "url": address, "altText": "Chart", "size": "Stretch"}
            payload["attachments"][0]["content"]["body"].append(picture)
            return payload

        plugin.gen_payload = compose_with_picture


def _type(message: ChannelMessage) -> str:
    """Apprise's name of the severity."""
    if not message.notices:
        return "info"
    if all(notice.reason == "resolved" for notice in message.notices):
        return "success"
    return "failure" if any(notice.severity == "critical" for notice in message.notices) else "warning"


def _attachment(plugin: NotifyBase, message: ChannelMessage) -> AppriseAttachment | None:
    takes_pictures = plugin.attachment_support and not _is_slack_webhook(plugin)
    picture = message.draw_chart() if takes_pictures else None
    if picture is None:
        return None
    from apprise import AppriseAttachment
    from apprise.attachment.memory import AttachMemory

    attachment = AppriseAttachment(asset=plugin.asset)
    attachment.add(AttachMemory(content=picture, name="alert.png", mimetype="image/png"))  # type: ignore[no-untyped-call]
    return attachment


@contextmanager
def _failures() -> Iterator[list[str]]:
    """The HTTP statuses of failed requests, from Apprise's warnings of this thread; nothing is logged."""
    statuses: list[str] = []
    thread = threading.get_ident()

    def take(record: logging.LogRecord) -> bool:
        if record.thread == thread and (match := _STATUS.search(record.getMessage())):
            statuses.append(match[1])
        return False

    apprise_logger = logging.getLogger("apprise")
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(take)
    level, propagate = apprise_logger.level, apprise_logger.propagate
    apprise_logger.setLevel(logging.WARNING)
    apprise_logger.propagate = False
    apprise_logger.addHandler(handler)
    try:
        yield statuses
    finally:
        apprise_logger.removeHandler(handler)
        apprise_logger.propagate = propagate
        apprise_logger.setLevel(level)
