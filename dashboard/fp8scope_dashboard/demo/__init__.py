"""`fp8scope demo`: bring everything up, train five small models, and say what was found."""
