"""`penstock version`: what is installed here, as a report of a problem should say it.

Versions are read from the metadata of what is installed, so that nothing large is imported to be asked.
"""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, distribution
from importlib.metadata import version as version_of

from penstock.cli.output import Json, print_json, print_table

_LIBRARIES = ("pyarrow", "numpy", "msgspec")
_EXTRA_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*;.*extra\s*==\s*['\"](?P<extra>[\w.-]+)['\"]")


def version(as_json: Json = False) -> None:
    """Print what is installed: versions and extras."""
    found = {**versions(), "platform": platform.platform()}
    extras = installed_extras()
    if as_json:
        print_json({**found, "extras": extras})
    else:
        names = ", ".join(name for name, installed in extras.items() if installed)
        print_table(("what", "version"), [*found.items(), ("extras", names or "none")])


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    return {
        "penstock": version_of("penstock"),
        "python": platform.python_version(),
        **{name: version_of(name) for name in _LIBRARIES},
    }


def installed_extras() -> dict[str, bool]:
    """Return each extra of Penstock, and whether everything that it asks for is installed."""
    found = map(_EXTRA_REQUIREMENT.match, distribution("penstock").requires or ())
    extras: dict[str, bool] = {}
    for requirement in filter(None, found):
        extra = requirement["extra"]
        extras[extra] = extras.get(extra, True) and _is_installed(requirement["name"])
    return extras


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
