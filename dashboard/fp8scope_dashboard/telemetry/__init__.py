"""The telemetry store: chunks, blocks, roll-ups, and range queries over them."""
