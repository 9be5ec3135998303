"""A private PostgreSQL and a private Redis that run as child processes. Nothing here needs Django."""
