"""The migration 0001_schema creates the tables of this app.

The migrations that it replaces are in replaced/. Django loads them for a database in which only some of them have
been applied, such as one of version 0.1.
"""

__path__.append(f"{__path__[0]}/replaced")
