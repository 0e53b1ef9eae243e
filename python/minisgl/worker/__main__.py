"""`python -m minisgl.worker`: started by the server, which writes to its standard input."""

import sys

from .main import main

sys.exit(main())
