"""`fp8scope demo`: start an installation, train five small models, and report the results."""
