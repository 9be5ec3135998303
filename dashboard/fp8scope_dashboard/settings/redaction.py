"""Keep secrets out of all log records, including those of libraries."""

import logging
import re

# Sign-in links, whose path Django logs with every 404 and 500, and API tokens in messages of libraries.
SECRET = re.compile(r"(/signin/|\bBearer |\bfp8s_)[\w.~+/-]{16,}=*/?")
# The password in a URL such as DATABASE_URL; it may contain the special characters of a URL.
PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@'\"]*:)[^\s'\"]+(?=@)", re.IGNORECASE)
# What a provider of single sign-on sends in addresses and forms.
PARAMETER = re.compile(
    r"(?<![\w-])((?:code|state|nonce|code_verifier|client_secret|id_token|access_token|refresh_token)=)[^&\s'\"]+"
)


class RedactSecrets(logging.Filter):
    """Redacts secrets in the message and the traceback of a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        redacted = redact(message)
        if redacted != message:
            record.msg, record.args = redacted, ()
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            record.exc_text = _formatter.formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text)
        return True


def redact(text: str) -> str:
    """Replace the secrets in a text."""
    for form in (SECRET, PARAMETER, PASSWORD):
        text = form.sub(r"\1[redacted]", text)
    return text


_formatter = logging.Formatter()
