"""`python -m xrlflow.cli`."""

from xrlflow.cli.program import main

main()
