"""The list of a project's runs."""
