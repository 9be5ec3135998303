"""Reading over HTTP: the numbers of the pages, by the functions that the pages call."""
