"""Limits of one web process on what it accepts from clients, above all from unauthenticated ones.

Every limit holds per web process: with N processes behind one address, the installation accepts up to N times
as much. Sign-in attempts are the exception: `accounts.attempts` counts them in Redis, for all processes.
"""

import os
from typing import Final

from fp8scope_dashboard.wire.limits import MIB

# Connections. A connection is unauthenticated until it has carried an authenticated request.
CONNECTIONS: Final = 8192
UNAUTHENTICATED: Final = 1024
UNAUTHENTICATED_PER_ADDRESS: Final = 256
# Open files reserved for databases, logs and temporary files.
SPARE_FILES: Final = 256

# Request line, headers, chunk sizes and trailers: all but the body.
HEADER_BYTES: Final = 64 * 1024
HEADER_SECONDS: Final = 10.0
# A client that reads nothing of its response for so long is disconnected.
STALLED_SECONDS: Final = 60.0

# Bodies. All forms that can be sent without signing in are far smaller.
UNAUTHENTICATED_BODY_BYTES: Final = 64 * 1024
# Bodies up to this size are not counted against BODIES_BYTES: the number of connections bounds them.
SMALL_BODY_BYTES: Final = 64 * 1024
# Total size of the bodies that are held at a time, in memory and in temporary files.
BODIES_BYTES: Final = int(os.environ.get("FP8SCOPE_BODY_MIB") or 512) * MIB
BODY_SECONDS: Final = 10.0
"""Time for a body, plus one second for every BODY_RATE bytes that have arrived."""
BODY_RATE: Final = 8 * 1024

# Unauthenticated requests from one address: a burst, then a rate per second.
UNAUTHENTICATED_BURST: Final = 100
UNAUTHENTICATED_RATE: Final = 20.0
ADDRESSES_KEPT: Final = 10_000
# Valid tokens and sessions that are remembered.
CALLERS_KEPT: Final = 50_000

# Refusals because of a rate or a quota, for one address or token: a burst, then a rate per second. Further
# ones are sent after a delay, for at most so many requests at a time.
REFUSAL_BURST: Final = 50
REFUSAL_RATE: Final = 20.0
REFUSAL_DELAY_SECONDS: Final = 1.0
MAX_DELAYED: Final = 2_048
# While tokens of several projects send: the requests that run at a time; those of one project, the processor
# time that these may be expected to take together, and how many of them wait.
CONTENDED_REQUESTS: Final = 8
CONTENDED_REQUESTS_OF_PROJECT: Final = 4
CONTENDED_BUSY_SECONDS: Final = 0.01
# The seconds of its requests that a project may use in a second, and at once after a pause.
CONTENDED_SHARE: Final = 0.5
CONTENDED_BURST_SECONDS: Final = 0.5
CONTENDED_WAITING: Final = 2_048
CONTENTION_SECONDS: Final = 2.0

BUSY_SECONDS: Final = 1
"""Retry-After of requests that are refused because the server is busy."""
# After an early refusal the body is read and dropped for LINGER_SECONDS, so that the client sees the
# response; for so many requests at a time.
LINGERING: Final = 8
LINGER_SECONDS: Final = 2.0

# /healthz responds within this time, and queries PostgreSQL at most once in HEALTH_FRESH_SECONDS.
HEALTH_SECONDS: Final = 2.0
HEALTH_FRESH_SECONDS: Final = 1.0
