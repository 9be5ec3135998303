"""Steps and losses found by themselves in an ordinary training loop."""
