"""The command line: one command a file. Data goes to stdout, progress and trouble to stderr.

Exit codes: 0, 1 for "no" (nothing can serve the call, something is broken), 2 for a malformed command or call.
"""

from attnzoo.cli.app import main

__all__ = ["main"]
