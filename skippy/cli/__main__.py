"""``python -m skippy.cli``: the same as the ``skippy`` command."""

from .main import main

main()
