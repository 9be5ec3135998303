"""The state of the server itself: queues, workers, ingest, storage and versions."""
