"""`python -m caudex` is `caudex`."""

from caudex.cli import main

main()
