"""`python -m sparkjax`: the `sparkjax` command."""

from .cli import main

main()
