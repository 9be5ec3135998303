"""Signals of the accounts app."""

from django.dispatch import Signal

project_created = Signal()
"""Sent by `create_project`, within its transaction. Argument: `project`, the new Project."""

access_ended = Signal()
"""Sent when a person leaves a project or may only read it from now on, within the transaction. Arguments:
`project`, `user`, and `keep_for`: the person who takes over what they made, None if it ends. A receiver
returns lists of ids by name, which undoing the change needs."""

access_restored = Signal()
"""Sent when that is undone, within the transaction. Arguments: `project`, `user`, `ended`: the
ids by name, and `works_again`: the fields to set, so that what was revoked works again."""
