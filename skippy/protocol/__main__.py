"""Tools for people who write a peer.

``python -m skippy.protocol check FILE.json``   run golden vectors; exit 0 agree, 1 mismatch, 2 unusable file
``python -m skippy.protocol diagrams``          print the state diagrams of ``docs/protocol.md``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .check import check_file
from .diagrams import all_diagrams
from .vectors import FormError


def _check(path: Path) -> int:
    try:
        report = check_file(path)
    except FormError as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 2
    width = max(len(section.name) for section in report.sections)
    for section in report.sections:
        bad = len({label for label, _ in section.mismatches})
        print(f"{section.name:<{width}}  {section.count:>5} vectors  {f'{bad} MISMATCH' if bad else 'ok'}")
    for name in report.unchecked:
        print(f"{name}: unknown section, not checked")
    for section in report.sections:
        for label, problem in section.mismatches:
            print(f"{section.name}: {label}: {problem}", file=sys.stderr)
    return 0 if report.ok else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m skippy.protocol", description="Stage protocol tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="run a file of golden vectors against this implementation")
    check.add_argument("file", type=Path, metavar="FILE.json")
    commands.add_parser("diagrams", help="print the state diagrams, in mermaid")
    options = parser.parse_args(arguments)
    if options.command == "diagrams":
        print(all_diagrams())
        return 0
    return _check(options.file)


if __name__ == "__main__":
    sys.exit(main())
