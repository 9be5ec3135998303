"""OpenTelemetry metrics under /otlp: exporters of any SDK record runs here without a change of code.

`views` takes the requests, `body` decodes them, `resources` says which run and rank they are of, `points`
what a data point is stored as, and `storing` stores the points of a resource. A `models.OtlpWriter` has what
the next points need.
"""
