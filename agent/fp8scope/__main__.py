"""`python -m fp8scope`, and `torchrun -m fp8scope run train.py`: the command without its script."""

import sys

from fp8scope.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
