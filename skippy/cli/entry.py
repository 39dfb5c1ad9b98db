"""Where the ``skippy`` command starts: imports next to nothing, so that an early Ctrl-C is quiet."""

import sys


def main() -> None:
    """Load the command line and run it; see :func:`skippy.cli.main.main`."""
    try:
        from .main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
