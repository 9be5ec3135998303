"""Keeping secrets out of the logs, whoever writes the line."""

import logging
import re

# A sign-in link's secret is a part of its address, which Django logs with every 404 and 500; an API token
# may stand in an error that somebody else's library words.
SECRET = re.compile(r"(/signin/|\bBearer |\bfp8s_)[\w.~+/-]{16,}=*/?")


class RedactSecrets(logging.Filter):
    """Replace what looks like one of our secrets in a record's message."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        redacted = SECRET.sub(r"\1[redacted]", message)
        if redacted != message:
            record.msg, record.args = redacted, ()
        return True
