"""Pages of a project and of the server: home, settings, server status."""
