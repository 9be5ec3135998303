"""Django settings: from environment variables, and those of the tests."""
