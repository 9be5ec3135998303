"""Keep the log of refused requests to one line."""

import logging


class RefusalsInOneLine(logging.Filter):
    """Removes the traceback of a refused request (status 400 to 499): nothing is wrong with the code."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith("django.") and record.levelno < logging.ERROR:
            record.exc_info = record.exc_text = None
        return True
