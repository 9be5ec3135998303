"""MLflow's tracking protocol under /mlflow: clients of MLflow record runs here without a change of code.

`views` takes the requests. An experiment has a row of its own; a run is a `runs.models.Run` with a
`models.MlflowRun` beside it, which has what MLflow asks back and the store does not have.
"""
