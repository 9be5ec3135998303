"""The error of everything that a certificate can be refused for."""


class CertificateError(ValueError):
    """A certificate cannot be made, or is not valid; the message says why."""
