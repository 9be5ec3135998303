"""The processes of an installation: web, worker and beat under one supervisor."""
