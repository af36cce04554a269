"""`import penstock` is cheap and brings nothing along."""

from __future__ import annotations

import json
import subprocess
import sys

import penstock


def fresh(code: str) -> str:
    """Run code in a fresh interpreter that sees the installed package only."""
    return subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True).stdout


def loaded_after(statement: str) -> set[str]:
    shown = fresh(f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))")
    return {name.split(".")[0] for name in json.loads(shown)}


FORBIDDEN = {
    "pyspark", "pandas", "grpc", "google", "psycopg", "pymongo", "sqlite3", "typer", "click", "rich", "starlette",
    "uvicorn", "fastapi", "django", "prometheus_client", "opentelemetry", "pytest", "hypothesis", "pydantic",
    "attrs", "cloudevents",
}  # fmt: skip


def test_importing_penstock_imports_no_dependency_at_all() -> None:
    loaded = loaded_after("import penstock")
    assert "penstock" in loaded
    assert not loaded & (FORBIDDEN | {"pyarrow", "numpy", "msgspec", "xxhash", "asyncio"})


def test_using_the_bus_imports_no_extra() -> None:
    loaded = loaded_after("from penstock import Bus, Topic, event, Batch; Bus('memory:', topics=[Topic('t', bytes)])")
    assert {"pyarrow", "msgspec"} <= loaded
    assert not loaded & FORBIDDEN


def test_importing_the_command_line_needs_no_extra() -> None:
    assert not loaded_after("import penstock.cli") & {"typer", "click", "rich"}


def test_every_public_name_is_there_and_is_the_same_whatever_was_imported_first() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    shown = fresh(
        "import penstock.events, penstock.bus.bus, penstock.batch, penstock.stores, penstock.settings, penstock\n"
        "print(callable(penstock.event), penstock.event is penstock.events.event, penstock.Bus.__name__)"
    )
    assert shown.split() == ["True", "True", "Bus"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(penstock, "Buss")


def test_dir_lists_the_public_names() -> None:
    assert set(dir(penstock)) == set(penstock.__all__)
