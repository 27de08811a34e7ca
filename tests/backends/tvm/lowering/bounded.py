"""A program that runs a compiled model on feeds, one after the other: whatever that does to a process, the tests live.

It reads the library's path and the feeds from standard input, pickled, and writes an answer for each: the outputs, or
what the error says.
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
