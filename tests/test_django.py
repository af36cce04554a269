"""The promises of `penstock.contrib.django`, in a real project: both or neither, whatever becomes of the process.

Settings can be configured once per process, so that everything of Django runs in processes of its own.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import psycopg
import pytest
from tests.running import Running, clean_environment, told, wait_for

from penstock import Bus, Topic
from penstock.outbox import SqliteOutbox

SETTINGS = """
from pathlib import Path

BASE_DIR = Path(__file__).parent.parent
SECRET_KEY = "of a test"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["shop", "penstock.contrib.django"]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "app.sqlite3"},
    "other": {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / "other.sqlite3"},
}
PENSTOCK = {"bus": "shop.events.bus", "url": f"file:{BASE_DIR / 'events'}"}
"""

EVENTS = """
from penstock import Bus, Topic

orders = Topic("orders", bytes)
bus = Bus("memory:", topics=[orders])
"""

MODELS = """
from django.db import models


class Order(models.Model):
    name = models.CharField(max_length=100, unique=True)
"""

MANAGE = """
import os
import sys

os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"

from django.core.management import execute_from_command_line

execute_from_command_line(sys.argv)
"""

PRELUDE = """
import json
import os
import signal

os.environ["DJANGO_SETTINGS_MODULE"] = "project.settings"

import django

django.setup()

from django.db import connection, connections, transaction
from shop.events import bus, orders
from shop.models import Order

from penstock.contrib.django import get_bus, stage


def place(name, **options):
    Order.objects.create(name=name)
    stage(orders, name.encode(), **options)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def staged():
    with connection.cursor() as cursor:
        return cursor.execute("SELECT COUNT(*) FROM penstock_outbox").fetchone()[0]


"""

SUBSCRIBERS = """
import json
import os

from django.db import connection
from shop.events import bus, orders
from shop.models import Order


def tell(what, **more):
    descriptor = os.open("told", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, (json.dumps({"what": what, **more}) + "\\n").encode())
    os.close(descriptor)


@bus.subscriber(orders, "billing", concurrency=1)
def bill(order: bytes) -> None:
    was_open = connection.connection is not None
    tell("billed", order=order.decode(), known=Order.objects.filter(name=order.decode()).exists(), was_open=was_open)


@bus.subscriber(orders, "mailing", concurrency=1)
async def mail(order: bytes) -> None:
    from asgiref.sync import sync_to_async

    was_open = await sync_to_async(lambda: connection.connection is not None)()
    tell("mailed", order=order.decode(), known=await Order.objects.filter(name=order.decode()).aexists(),
         was_open=was_open)
"""


class Project:
    """A Django project in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: list[Running] = []
        for name, text in {
            "project/__init__.py": "",
            "project/settings.py": SETTINGS,
            "shop/__init__.py": "",
            "shop/models.py": MODELS,
            "shop/events.py": EVENTS,
            "manage.py": MANAGE,
        }.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def settings(self, text: str) -> None:
        """Add to the settings."""
        self.write("project/settings.py", SETTINGS + text)

    def manage(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `manage.py`."""
        return self._run("manage.py", *argv)

    def migrate(self) -> None:
        done = self.manage("migrate", "--run-syncdb", "-v", "0")
        assert done.returncode == 0, done.stderr

    def program(self, text: str) -> subprocess.CompletedProcess[str]:
        """Run a program with Django set up; it may `print` one JSON document."""
        self.write("program.py", PRELUDE + dedent(text))
        return self._run("program.py")

    def result(self, text: str) -> Any:
        """Run a program that must end well, and return what it printed."""
        done = self.program(text)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout) if done.stdout else None

    def _run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-W", "error", *argv],
            cwd=self.directory,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def start(self, *argv: str) -> Running:
        """Start a command of `manage.py`."""
        self.running.append(Running(self.directory, "manage.py", *argv))
        return self.running[-1]

    def placed(self) -> list[str]:
        """Return the orders that the application has."""
        with closing(sqlite3.connect(self.directory / "app.sqlite3")) as connection:
            return [name for (name,) in connection.execute("SELECT name FROM shop_order ORDER BY id")]

    def published(self) -> list[str]:
        """Open a bus as `penstock_run` does until nothing is staged any more, and return the events of the topic."""
        outbox = self.directory / "app.sqlite3"

        async def published() -> list[str]:
            orders = Topic("orders", bytes)
            look = SqliteOutbox(outbox)
            async with Bus(f"file:{self.directory / 'events'}", topics=[orders], outbox=outbox) as bus:
                await asyncio.to_thread(wait_for, lambda: not look.pending())
                assert look.failed() == []
                look.close()
                return [event.data.decode() async for event in bus.read(orders)]

        return asyncio.run(published())


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path)
    yield made
    for each in made.running:
        each.dispose()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with its tables, to be copied: making them takes long."""
    made = Project(tmp_path_factory.mktemp("template"))
    made.migrate()
    return made.directory


@pytest.fixture
def migrated(project: Project, template: Path) -> Project:
    shutil.copytree(template, project.directory, dirs_exist_ok=True)
    return project


# --- both or neither ------------------------------------------------------------------------------


def test_events_appear_with_the_block_that_they_were_staged_in(migrated: Project) -> None:
    migrated.result(
        """
        with transaction.atomic():
            place("first")
            place("second", key="ada")
            assert staged() == 2
        """
    )
    assert (migrated.placed(), migrated.published()) == (["first", "second"], ["first", "second"])


def test_a_block_that_is_rolled_back_takes_its_events_along(migrated: Project) -> None:
    migrated.result(
        """
        for ending in (ValueError, KeyboardInterrupt):
            try:
                with transaction.atomic():
                    place("never")
                    raise ending
            except ending:
                pass
        with transaction.atomic():
            place("undone")
            transaction.set_rollback(True)
        with transaction.atomic():
            place("done")
        """
    )
    assert (migrated.placed(), migrated.published()) == (["done"], ["done"])


def test_an_inner_block_that_is_rolled_back_takes_its_own_events_and_no_others(migrated: Project) -> None:
    migrated.result(
        """
        from django.db import IntegrityError

        with transaction.atomic():
            place("outer")
            try:
                with transaction.atomic():
                    place("inner")
                    with transaction.atomic():
                        place("innermost")
                    Order.objects.create(name="outer")
            except IntegrityError:
                pass
            with transaction.atomic():
                place("another")
        """
    )
    assert (migrated.placed(), migrated.published()) == (["outer", "another"], ["outer", "another"])


@pytest.mark.parametrize(
    ("program", "placed"),
    [
        ("with transaction.atomic():\n    place('lost')\n    die()", []),
        ("with transaction.atomic():\n    place('kept')\ndie()", ["kept"]),
        ("with transaction.atomic():\n    transaction.on_commit(die)\n    place('kept')", ["kept"]),
        ("stage(orders, b'x')\nplace('kept')\ndie()", ["kept"]),
    ],
    ids=["before the commit", "after the commit", "in the first callback after the commit", "in autocommit mode"],
)
def test_a_killed_process_leaves_both_or_neither(program: str, placed: list[str], migrated: Project) -> None:
    assert migrated.program(program).returncode == -signal.SIGKILL
    assert migrated.placed() == placed
    assert [name for name in migrated.published() if name != "x"] == placed


def test_outside_of_any_block_each_event_is_a_transaction_of_its_own(migrated: Project) -> None:
    migrated.result(
        """
        stage(orders, b"first")
        assert staged() == 1
        assert not connection.in_atomic_block and not connection.connection.in_transaction
        stage("orders", b"second", using="default", headers={"tenant": "acme"})
        """
    )
    assert migrated.published() == ["first", "second"]


def test_without_autocommit_events_wait_for_the_commit(migrated: Project) -> None:
    migrated.result(
        """
        transaction.set_autocommit(False)
        place("undone")
        transaction.rollback()
        place("done")
        transaction.commit()
        place("open")
        """
    )
    assert (migrated.placed(), migrated.published()) == (["done"], ["done"])


def test_nothing_is_staged_in_a_block_that_is_broken(migrated: Project) -> None:
    assert migrated.result(
        """
        from django.db import IntegrityError
        from django.db.transaction import TransactionManagementError

        Order.objects.create(name="twice")
        with transaction.atomic():
            try:
                Order.objects.create(name="twice")
            except IntegrityError:
                pass
            try:
                stage(orders, b"never")
            except TransactionManagementError:
                print("true")
        """
    )
    assert migrated.published() == []


def test_what_sqlite_refuses_is_an_error_of_django(migrated: Project) -> None:
    found = migrated.result(
        """
        import sqlite3

        from django.db import OperationalError

        connections.settings["default"]["OPTIONS"] = {"timeout": 0}
        other = sqlite3.connect("app.sqlite3", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            stage(orders, b"never")
        except OperationalError as error:
            print(json.dumps(str(error)))
        other.execute("ROLLBACK")
        """
    )
    assert "locked" in found


def test_without_a_migration_the_first_event_makes_its_tables(project: Project) -> None:
    project.result("stage(orders, b'first')")
    assert project.published() == ["first"]


# --- effects once ---------------------------------------------------------------------------------

ONCE = """
from types import SimpleNamespace

from penstock.contrib.django import once
from penstock.inbox import Once


def event(id):
    \"\"\"What a handler is given, as far as it is for this.\"\"\"
    return SimpleNamespace(once=lambda connection, scope: Once(connection, scope or "orders/billing", "shop", id))


def placed():
    return list(Order.objects.order_by("id").values_list("name", flat=True))


"""


@pytest.fixture(params=["sqlite", "postgresql"])
def effects(request: pytest.FixtureRequest, project: Project) -> Project:
    """A project whose database is of this kind."""
    if request.param == "postgresql":
        uri = request.getfixturevalue("postgres_server")
        with psycopg.connect(uri, autocommit=True) as connection:
            name = f"django_{project.directory.name}"
            connection.execute(f'CREATE DATABASE "{name}"')
            info = connection.info
            access = {"NAME": name, "HOST": info.host, "USER": info.user, "ENGINE": "django.db.backends.postgresql"}
        project.settings(f"DATABASES['default'] = {access!r}\nSILENCED_SYSTEM_CHECKS = ['penstock.W001']\n")
    project.migrate()
    return project


def test_what_the_orm_writes_and_the_mark_are_committed_together_or_not_at_all(effects: Project) -> None:
    found = effects.result(
        ONCE
        + dedent(
            """
            firsts = []

            def handle(id, fails=False):
                with once(event(id)) as first:
                    firsts.append(first)
                    if first:
                        Order.objects.create(name=id)
                    if fails:
                        raise ValueError

            handle("one")
            handle("one")
            for _ in range(2):
                try:
                    handle("two", fails=True)
                except ValueError:
                    pass
            with transaction.atomic():
                handle("three")
                transaction.set_rollback(True)
            with once(event("three")):
                Order.objects.create(name="three")
                transaction.set_rollback(True)
            assert placed() == ["one"]
            with transaction.atomic():
                handle("three")
                handle("three")
            print(json.dumps([firsts, placed(), connection.in_atomic_block]))
            """
        )
    )
    assert found == [[True, False, True, True, True, True, False], ["one", "three"], False]


@pytest.mark.parametrize(("committed", "first"), [(False, True), (True, False)], ids=["before", "after"])
def test_a_process_that_is_killed_around_the_commit_leaves_effect_and_mark_or_neither(
    committed: bool, first: bool, effects: Project
) -> None:
    killed = """
    with once(event("one")):
        Order.objects.create(name="one")
        if not COMMITTED:
            die()
    die()
    """
    done = effects.program(ONCE + dedent(killed).replace("COMMITTED", str(committed)))
    assert done.returncode == -signal.SIGKILL, done.stderr
    look = 'with once(event("one")) as first:\n    print(json.dumps([first, placed()]))\n'
    assert effects.result(ONCE + look) == [first, [] if first else ["one"]]


def test_a_handler_has_its_effect_once_though_its_event_comes_again(migrated: Project) -> None:
    migrated.write(
        "shop/subscribers.py",
        SUBSCRIBERS.split("@bus", maxsplit=1)[0]
        + dedent(
            """
            from penstock import Delivery, Retry
            from penstock.contrib.django import once


            @bus.subscriber(orders, "billing", retry=Retry(delay=0))
            def bill(order: bytes, delivery: Delivery[bytes]) -> None:
                with once(delivery) as first:
                    if first:
                        Order.objects.create(name=f"bill of {order.decode()}")
                    if delivery.attempt == 1:
                        tell("failed")
                        raise ValueError("after the effect")
                tell("done", first=first)
            """
        ),
    )
    migrated.result("with transaction.atomic():\n    place('one')")
    running = migrated.start("penstock_run")
    assert [fact["first"] for fact in running.hears("done")] == [True]
    running.signal()
    assert running.ends() == 0

    async def again() -> None:
        async with Bus(f"file:{migrated.directory / 'events'}") as bus:
            await bus.seek("orders", "billing", "earliest")

    asyncio.run(again())
    running = migrated.start("penstock_run")
    assert [fact["first"] for fact in running.hears("done", 2)] == [True, False]
    assert migrated.placed() == ["one", "bill of one"]
    assert len(told(migrated.directory, "failed")) == 2


# --- what cannot be staged ------------------------------------------------------------------------


def refused(project: Project, program: str = "stage(orders, b'x')") -> str:
    """Return the message of the `UsageError` that a program raises."""
    raised = f"""
from penstock.errors import UsageError

try:
{indent(program, "    ")}
except UsageError as error:
    print(json.dumps(str(error)))
"""
    return str(project.result(raised))


def test_another_database_than_the_outbox_is_refused(migrated: Project) -> None:
    message = refused(migrated, "stage(orders, b'x', using='other')")
    assert "other.sqlite3, but the outbox is" in message
    assert "app.sqlite3" in message


def test_the_outbox_may_be_in_another_database(project: Project) -> None:
    project.settings("PENSTOCK['database'] = 'other'\n")
    assert project.manage("migrate", "--database", "other", "-v", "0").returncode == 0
    project.result("stage(orders, b'first')\nwith transaction.atomic('other'):\n    stage(orders, b'second')")
    with closing(sqlite3.connect(project.directory / "other.sqlite3")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM penstock_outbox").fetchone() == (2,)


def test_a_database_in_memory_or_of_another_kind_is_refused_with_advice(project: Project) -> None:
    project.settings("DATABASES['default']['NAME'] = ':memory:'\n")
    assert 'DATABASES[\'default\']["TEST"] = {"NAME": "test.sqlite3"}' in refused(project)
    project.settings("DATABASES['default']['ENGINE'] = 'django.db.backends.dummy'\n")
    assert "'default' is unknown: publish after the commit instead" in refused(project)


def test_a_file_that_is_named_by_a_uri_is_the_same_file(migrated: Project) -> None:
    migrated.settings(
        "DATABASES['default']['NAME'] = f\"file:{BASE_DIR / 'app.sqlite3'}?mode=rwc\"\n"
        "DATABASES['default']['OPTIONS'] = {'uri': True}\n"
    )
    migrated.result("with transaction.atomic():\n    place('first')")
    assert migrated.published() == ["first"]


# --- the configuration ----------------------------------------------------------------------------

WRONG = {
    "nothing": ("del PENSTOCK", "penstock.E001", "the settings have no PENSTOCK: write PENSTOCK = {"),
    "a text": ("PENSTOCK = 'x'", "penstock.E001", "PENSTOCK is a str, it must be a dictionary"),
    "another name": ("PENSTOCK['BUS'] = 'x'", "penstock.E001", "PENSTOCK has no setting 'BUS'; did you mean 'bus'?"),
    "no bus": ("del PENSTOCK['bus']", "penstock.E001", "PENSTOCK does not say where the bus is"),
    "no path": ("PENSTOCK['bus'] = 'bus'", "penstock.E001", "it must be a dotted path"),
    "a colon": ("PENSTOCK['bus'] = 'shop.events:bus'", "penstock.E001", "it must be a dotted path"),
    "no text": ("PENSTOCK['url'] = 7", "penstock.E001", "PENSTOCK['url'] must be a text that is not empty, not a int"),
    "no database": ("PENSTOCK['database'] = 'none'", "penstock.E001", "is 'none'; known: 'default', 'other'"),
    "no module": ("PENSTOCK['bus'] = 'shop.evens.bus'", "penstock.E002", "cannot be imported"),
    "no attribute": ("PENSTOCK['bus'] = 'shop.events.buss'", "penstock.E002", "cannot be imported"),
    "another thing": ("PENSTOCK['bus'] = 'shop.events.orders'", "penstock.E002", "a Topic; it must be a penstock.Bus"),
}


@pytest.mark.parametrize(("change", "id_", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_in_the_settings_is_found_by_the_checks_and_by_whoever_needs_it(
    change: str, id_: str, message: str, project: Project
) -> None:
    project.settings(f"{change}\n")
    found = project.result(
        """
        from django.core.checks import run_checks

        from penstock.errors import UsageError

        try:
            get_bus()
        except UsageError as error:
            print(json.dumps([str(error), [[each.id, each.msg] for each in run_checks()]]))
        """
    )
    assert found == [found[0], [[id_, found[0]]]]
    assert message in found[0]


def test_a_database_that_nothing_can_be_staged_in_is_a_warning(project: Project) -> None:
    project.settings("DATABASES['default']['NAME'] = ':memory:'\n")
    done = project.manage("check")
    assert done.returncode == 0
    assert "penstock.W001" in done.stderr


def test_a_project_that_is_right_has_nothing_to_complain_about(project: Project) -> None:
    done = project.manage("check")
    assert (done.returncode, done.stderr) == (0, "")
    assert project.manage("makemigrations", "--check", "penstock").returncode == 0


def test_the_bus_is_one_and_the_settings_decide_on_its_store(project: Project) -> None:
    url = project.result("assert get_bus() is get_bus() is bus\nprint(json.dumps(get_bus().url))")
    assert url == f"file:{project.directory / 'events'}"


# --- the migration --------------------------------------------------------------------------------


def tables(project: Project, file: str = "app.sqlite3") -> set[str]:
    with closing(sqlite3.connect(project.directory / file)) as connection:
        found = connection.execute("SELECT name FROM sqlite_master WHERE name LIKE 'penstock_%'")
        return {name for (name,) in found}


def test_migrate_makes_the_tables_in_the_outbox_alone_and_takes_them_away_when_they_are_empty(project: Project) -> None:
    project.migrate()
    assert project.manage("migrate", "--database", "other", "-v", "0").returncode == 0
    assert tables(project) == {"penstock_outbox", "penstock_outbox_failed", "penstock_outbox_identity"}
    assert tables(project, "other.sqlite3") == set()
    assert project.manage("migrate", "penstock", "zero", "-v", "0").returncode == 0
    assert tables(project) == set()


def test_tables_with_a_staged_event_are_not_taken_away(migrated: Project) -> None:
    migrated.result("stage(orders, b'first')")
    done = migrated.manage("migrate", "penstock", "zero", "-v", "0")
    assert done.returncode != 0
    assert "1 staged events wait in database 'default'" in done.stderr
    assert migrated.published() == ["first"]


# --- penstock_run ---------------------------------------------------------------------------------


def test_penstock_run_delivers_what_was_staged_and_ends_with_0_on_sigterm(migrated: Project) -> None:
    migrated.write("shop/subscribers.py", SUBSCRIBERS)
    migrated.result("with transaction.atomic():\n    place('before')")
    running = migrated.start("penstock_run")
    running.hears("billed")
    running.hears("mailed")
    migrated.result("with transaction.atomic():\n    place('meanwhile')")
    for what in ("billed", "mailed"):
        facts = running.hears(what, 2)
        assert [(fact["order"], fact["known"]) for fact in facts] == [("before", True), ("meanwhile", True)]
    running.signal()
    assert running.ends() == 0, running.talk
    assert "runs 2 subscribers of file:" in running.talk
    assert "orders → billing, 1 at a time: bill" in running.talk


def test_a_handler_leaves_no_connection_open_in_its_thread(migrated: Project) -> None:
    migrated.write("shop/subscribers.py", SUBSCRIBERS)
    migrated.result("for number in range(4):\n    place(str(number))")
    running = migrated.start("penstock_run")
    for what in ("billed", "mailed"):
        assert [fact["was_open"] for fact in running.hears(what, 4)] == [False] * 4


def test_connections_may_live_on_for_as_long_as_the_settings_say(migrated: Project) -> None:
    migrated.write("shop/subscribers.py", SUBSCRIBERS)
    migrated.settings("DATABASES['default']['CONN_MAX_AGE'] = None\n")
    migrated.result("for number in range(4):\n    place(str(number))")
    running = migrated.start("penstock_run")
    assert [fact["was_open"] for fact in running.hears("billed", 4)] == [False, True, True, True]


def test_sigterm_lets_a_handler_end_and_a_second_one_does_not(migrated: Project) -> None:
    migrated.write(
        "shop/subscribers.py",
        SUBSCRIBERS.split("@bus", maxsplit=1)[0]
        + dedent(
            """
            import asyncio


            @bus.subscriber(orders, "billing", concurrency=1)
            async def bill(order: bytes) -> None:
                tell("begun")
                while not os.path.exists("go"):
                    await asyncio.sleep(0.01)
                tell("ended")
            """
        ),
    )
    migrated.settings("LOGGING = {'version': 1, 'handlers': {'all': {'class': 'logging.StreamHandler'}},"
                      " 'root': {'handlers': ['all'], 'level': 'INFO'}}\n")  # fmt: skip
    migrated.result("place('first')\nplace('second')")
    running = migrated.start("penstock_run")
    running.hears("begun")
    running.signal()
    running.says("SIGTERM: draining")
    running.signal()
    assert running.ends() == 1
    assert "handlers had to be cancelled; their events went back" in running.talk
    (migrated.directory / "go").touch()
    running = migrated.start("penstock_run")
    running.hears("ended", 2)
    running.signal()
    assert running.ends() == 0
    assert len(told(migrated.directory, "begun")) == 3


def test_penstock_run_says_what_it_lacks(migrated: Project) -> None:
    done = migrated.manage("penstock_run")
    assert done.returncode == 2
    assert "there is nothing to run: declare handlers with @bus.subscriber" in done.stderr
    migrated.settings("PENSTOCK['bus'] = 'shop.events.orders'\n")
    done = migrated.manage("penstock_run")
    assert done.returncode == 1
    assert "penstock.E002" in done.stderr


def test_penstock_run_says_in_one_line_that_a_store_cannot_be_opened(migrated: Project) -> None:
    migrated.write("shop/subscribers.py", SUBSCRIBERS)
    migrated.settings("PENSTOCK['url'] = 'file:/proc/nope'\n")
    done = migrated.manage("penstock_run")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "/proc/nope" in done.stderr.splitlines()[-1]
