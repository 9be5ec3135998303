"""The pages of alerts, rules and channels."""
