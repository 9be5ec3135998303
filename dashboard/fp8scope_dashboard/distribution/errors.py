"""The error of the distributed store."""


class DistributionError(Exception):
    """The store cannot be changed so; the message says what to do."""
