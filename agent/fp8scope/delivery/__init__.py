"""Sends the spool to the server and hands over what the server answers."""
