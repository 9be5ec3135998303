"""The process that trains: its open runs, exit paths, signals, threads and launcher ranks."""
