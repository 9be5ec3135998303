"""Sign in with a provider of OpenID Connect, whose groups give roles."""
