"""Keeping secrets out of the logs, whoever writes the line."""

import logging
import re

# A sign-in link's secret is a part of its address, which Django logs with every 404 and 500; an API token
# may stand in an error that somebody else's library words.
SECRET = re.compile(r"(/signin/|\bBearer |\bfp8s_)[\w.~+/-]{16,}=*/?")
# The password in an address such as DATABASE_URL's or REDIS_URL's; it may hold the characters of an address.
PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@'\"]*:)[^\s'\"]+(?=@)", re.IGNORECASE)


class RedactSecrets(logging.Filter):
    """Replace what looks like one of our secrets in a record's message and in its traceback."""

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
    """The text without secrets."""
    return PASSWORD.sub(r"\1[redacted]", SECRET.sub(r"\1[redacted]", text))


_formatter = logging.Formatter()
