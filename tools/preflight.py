"""Says whether this machine has what a step needs, and if not, how to get it. It installs nothing.

    python3 tools/preflight.py               before anything is installed: Python for the set-up
    .venv/bin/python tools/preflight.py java    after the set-up: Java for Spark

The first runs on whatever `python3` is, so this keeps to syntax that old versions can parse.
"""

import importlib.util
import os
import sys

WANTED = (3, 11)


def python():  # type: ignore[no-untyped-def] # annotations would not parse where this must still speak
    if sys.version_info < WANTED:
        return (
            "Penstock needs Python 3.11 or newer; this is {}.{} ({}).\n"
            "Install one (Debian and Ubuntu: apt-get install python3 python3-venv; macOS: brew install python)\n"
            "and name it: make setup PYTHON=python3.12".format(sys.version_info[0], sys.version_info[1], sys.executable)
        )
    if os.name == "nt":
        return "Penstock's development set-up runs on Linux and macOS. On Windows use WSL."
    if importlib.util.find_spec("ensurepip") is None:
        return (
            "This Python cannot create virtual environments: its module 'ensurepip' is missing.\n"
            "Debian and Ubuntu: apt-get install python3-venv"
        )
    return None


def java():  # type: ignore[no-untyped-def] # see above
    try:
        from penstock.errors import SparkUnavailable
        from penstock.spark.java import find_java
    except ImportError:
        return "Penstock is not installed for {}: run make setup first.".format(sys.executable)
    try:
        find_java()
    except SparkUnavailable as error:
        return str(error)
    return None


def main(arguments):  # type: ignore[no-untyped-def] # see above
    steps = {(): python, ("java",): java}
    step = steps.get(tuple(arguments))
    return step() if step else "usage: preflight.py [java]"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
