"""The training process: open runs, exit hooks, signals, threads and launcher ranks."""
