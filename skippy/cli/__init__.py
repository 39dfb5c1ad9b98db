"""The command line: parses, builds options, calls :mod:`skippy.embed`. Never logic of its own."""
