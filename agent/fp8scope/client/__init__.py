"""Reading from a dashboard in Python: `fp8scope.Client`. See docs/client.md.

It needs NumPy and urllib3 only, and neither torch nor the dashboard's packages.
"""

from fp8scope.client.alerts import AlertDetails, AlertPage, RunAlert
from fp8scope.client.client import Client, RunList, RunListPage
from fp8scope.client.connection import ClientError, RunNotFoundError, UnreachableError
from fp8scope.client.history import RunHistory, StatisticMap, TensorHistograms
from fp8scope.client.media import StoredMedia
from fp8scope.client.steering import GivenCommand, StoredStepNote
from fp8scope.client.stored_run import StoredRun
from fp8scope.client.verdicts import EvaluatedScore, JudgedScore, RunPair, RunVerdict, SeedDifference

__all__ = [
    "AlertDetails",
    "AlertPage",
    "Client",
    "ClientError",
    "EvaluatedScore",
    "GivenCommand",
    "TensorHistograms",
    "RunHistory",
    "JudgedScore",
    "RunAlert",
    "RunList",
    "RunListPage",
    "RunPair",
    "RunVerdict",
    "SeedDifference",
    "StoredMedia",
    "StoredStepNote",
    "StoredRun",
    "StatisticMap",
    "RunNotFoundError",
    "UnreachableError",
]
