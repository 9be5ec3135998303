"""Where alerts go. One module a channel; each is a function of its config and a notice."""

from collections.abc import Mapping

from fp8scope_dashboard.alerts.channels import webhook
from fp8scope_dashboard.alerts.channels.base import DeliveryError, Notice, Send

CHANNELS: Mapping[str, Send] = {"webhook": webhook.send}

__all__ = ["CHANNELS", "DeliveryError", "Notice", "Send"]
