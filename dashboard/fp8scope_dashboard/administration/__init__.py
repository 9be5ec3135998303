"""`fp8scope admin`: user administration from the server's shell."""
