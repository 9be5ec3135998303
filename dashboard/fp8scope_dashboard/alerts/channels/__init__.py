"""The kinds of alert channels, one module each."""

from collections.abc import Mapping

from fp8scope_dashboard.alerts.channels import email, service, webhook
from fp8scope_dashboard.alerts.channels.base import ChannelMessage, ChannelType, DeliveryError, Notice, Send

CHANNELS: Mapping[str, ChannelType] = {
    "webhook": ChannelType("Webhook", webhook.send, webhook.masked),
    "email": ChannelType("E-mail", email.send, email.masked),
    "service": ChannelType("Chat or paging service", service.send, service.masked),
}

__all__ = ["CHANNELS", "ChannelType", "DeliveryError", "ChannelMessage", "Notice", "Send"]
