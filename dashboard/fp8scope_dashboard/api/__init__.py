"""The HTTP API: authentication, routes and responses."""
