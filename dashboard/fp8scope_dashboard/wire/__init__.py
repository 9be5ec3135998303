"""The wire protocol: schemas, limits and error answers."""
