"""PostgreSQL beyond the ORM: raw SQL helpers and the read replica."""
