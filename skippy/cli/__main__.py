"""``python -m skippy.cli``: the same as the ``skippy`` command."""

from .entry import main

main()
