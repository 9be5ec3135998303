"""One module per page; `figures` and `events` answer the page's own requests."""
