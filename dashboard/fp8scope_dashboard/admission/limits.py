"""How much a web process takes from clients, above all from those that have not shown who they are."""

import os
from typing import Final

from fp8scope_dashboard.wire.limits import MIB

# Connections. A stranger is a connection that has not carried an authenticated request yet.
CONNECTIONS: Final = 8192
STRANGERS: Final = 1024
STRANGERS_PER_ADDRESS: Final = 256
# Open files that are left for databases, logs and temporary files.
SPARE_FILES: Final = 256

# Everything before a body, or around it: chunk sizes, trailers.
HEADER_BYTES: Final = 64 * 1024
HEADER_SECONDS: Final = 10.0
# A client that reads nothing of its answer for so long is cut off.
STALLED_SECONDS: Final = 60.0

# Bodies. Every form that a stranger can send is far smaller.
STRANGER_BODY_BYTES: Final = 64 * 1024
# Bodies up to this size are not counted against BODIES_BYTES: the number of connections bounds them.
SMALL_BODY_BYTES: Final = 64 * 1024
# Bodies that a web process holds at a time, in memory and in temporary files.
BODIES_BYTES: Final = int(os.environ.get("FP8SCOPE_BODY_MIB") or 512) * MIB
BODY_SECONDS: Final = 10.0
"""A body may take this long, and a second more for every BODY_RATE bytes that have come."""
BODY_RATE: Final = 8 * 1024

# Requests of strangers that one address may send: so many at once, then so many a second.
STRANGER_BURST: Final = 100
STRANGER_RATE: Final = 20.0
ADDRESSES_KEPT: Final = 10_000
# Tokens and sessions that a process remembers as good.
CALLERS_KEPT: Final = 50_000

BUSY_SECONDS: Final = 1
"""Retry-After of requests that were refused for lack of room."""
# After an early refusal so much of a body is read and dropped, so that the client sees the answer.
LINGERING: Final = 8
LINGER_SECONDS: Final = 2.0

# /healthz answers within this time, and asks PostgreSQL at most once in HEALTH_FRESH_SECONDS.
HEALTH_SECONDS: Final = 2.0
HEALTH_FRESH_SECONDS: Final = 1.0
