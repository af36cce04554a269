"""Says, before anything is installed, whether this machine has what the set-up needs.

Runs on whatever `python3` is, so it keeps to syntax that old versions can parse.
"""

import importlib.util
import os
import sys

WANTED = (3, 11)


def main():  # type: ignore[no-untyped-def] # annotations would not parse where this must still speak
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


if __name__ == "__main__":
    sys.exit(main())
