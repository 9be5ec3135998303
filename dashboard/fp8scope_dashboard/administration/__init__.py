"""`fp8scope admin`: letting people in, from the shell of the server."""
