"""`python -m attnzoo`: the command line."""

from attnzoo.cli import main

main()
