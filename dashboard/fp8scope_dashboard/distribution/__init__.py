"""The store on several PostgreSQL servers, with the extension Citus: the tables of a run by the run's id."""
