"""`python -m caudex.cli`: the command line, of this very interpreter."""

from caudex.cli import main

main(prog_name="caudex")
