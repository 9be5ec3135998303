"""The error of `fp8scope admin`."""


class AdminError(Exception):
    """The command cannot be carried out; the message says what to do."""
