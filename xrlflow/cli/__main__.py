"""`python -m xrlflow.cli`."""

from xrlflow.cli.program import main

if __name__ == "__main__":
    main()
