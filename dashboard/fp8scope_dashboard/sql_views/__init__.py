"""The schema `fp8scope_views` of the database: read-only views with stable names, for SQL tools."""
