"""`python -m bigtrain` is the `bigtrain` command."""

import sys

from bigtrain.cli import main

sys.exit(main())
