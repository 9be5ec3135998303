"""The kinds of alert channels, one module each."""

from collections.abc import Mapping

from fp8scope_dashboard.alerts.channels import webhook
from fp8scope_dashboard.alerts.channels.base import ChannelType, DeliveryError, Notice, Send

CHANNELS: Mapping[str, ChannelType] = {"webhook": ChannelType(webhook.send, webhook.masked)}

__all__ = ["CHANNELS", "ChannelType", "DeliveryError", "Notice", "Send"]
