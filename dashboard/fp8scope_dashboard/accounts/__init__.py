"""Users, projects, memberships, API tokens and sign-in."""
