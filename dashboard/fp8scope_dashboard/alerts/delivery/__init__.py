"""From an alert to its receivers: routing, the outbox, digests and pictures."""
