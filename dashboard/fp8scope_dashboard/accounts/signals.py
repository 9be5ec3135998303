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

roles_synchronised = Signal()
"""Sent when a sign-in with OpenID Connect changed roles, within the transaction. Arguments: `user`, and
`changes`: a RoleChanges of oidc.identities."""

factor_changed = Signal()
"""Sent when a user set up, renewed or removed their second factor. Arguments: `user`, `text`, and `request`,
None on the command line."""

code_refused = Signal()
"""Sent when a code of a second factor was wrong. Arguments: `user`, `request`."""
