"""Charts: figures as pure functions of arrays, the series behind them, and their answers."""
