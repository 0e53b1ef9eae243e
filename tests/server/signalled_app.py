"""An application whose import is interrupted: a signal before the server's event loop runs."""

import os
import signal

from .stub_app import create_app as create_app

os.kill(os.getpid(), signal.SIGTERM)
