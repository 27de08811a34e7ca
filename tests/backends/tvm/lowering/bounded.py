"""A program that runs a compiled model on several feeds, so that a crash does not end the tests.

It reads the library's path and the feeds from standard input, pickled, and writes one answer for each: the outputs, or
the text of the error.
"""

import pickle
import sys

from xrlflow.backends import BackendError
from xrlflow.backends.tvm import load_compiled


def main() -> None:
    path, cases = pickle.load(sys.stdin.buffer)
    with load_compiled(path, threads=2) as model:
        for feeds in cases:
            try:
                answer = model.run(feeds)
            except BackendError as error:
                answer = str(error)
            pickle.dump(answer, sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
