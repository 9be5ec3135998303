"""Executed by `nano.py` among its own names: `--name=value` on the command line changes a setting."""

import sys
from ast import literal_eval

for argument in sys.argv[1:]:
    name, _, text = argument.removeprefix("--").partition("=")
    if name not in globals():
        raise ValueError(f"there is no setting {name!r}")
    try:
        value = literal_eval(text)
    except (SyntaxError, ValueError):
        value = text
    print(f"override: {name} = {value}")
    globals()[name] = value
