"""`penstock pipeline redrive`: dead letters chosen with SQL, looked at, and brought back.

Without `--yes` it shows which letters are meant and marks them with a job; `--job ID --yes` brings back those of a job.
That second step needs no Spark, so it begins at once.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.cli.letters import document_of, group_document, print_groups, print_letters
from penstock.cli.output import Json, print_json, print_json_line, progress, say, shown_text
from penstock.cli.pipelines.running import DEFAULT_MASTER, Continuous, Master, running
from penstock.cli.session import Session, find_topic
from penstock.cli.subscriptions import find_subscription
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.cli.pipelines.running import Running
    from penstock.spark.pipelines.redrive import Job, Redriven
    from penstock.spark.pipelines.rounds import Ending

GROUPS_SHOWN = 20

TopicName = Annotated[str | None, typer.Argument(metavar="TOPIC", help="The topic's name.")]
Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Only of this subscription.")]
WhereSql = Annotated[
    str | None, typer.Option("--where", metavar="SQL", help="Those for which this holds: error_type = 'TimeoutError'.")
]
Fingerprint = Annotated[list[str] | None, typer.Option(metavar="HEX", help="Of this cause; may be repeated.")]
JobId = Annotated[str | None, typer.Option("--job", metavar="ID", help="Those that a preview has marked.")]
Rate = Annotated[float | None, typer.Option(metavar="N", help="Letters a second at most.")]
Yes = Annotated[bool, typer.Option("--yes", help="Bring them back; without this they are shown and marked.")]


def redrive(
    context: typer.Context,
    topic: TopicName = None,
    name: Name = None,
    *,
    where: WhereSql = None,
    fingerprint: Fingerprint = None,
    job: JobId = None,
    rate: Rate = None,
    yes: Yes = False,
    master: Master = DEFAULT_MASTER,
    continuous: Continuous = False,
    as_json: Json = False,
) -> None:
    """Bring dead letters back, chosen with SQL; show them first.

    The columns for --where are topic, subscription, partition, offset, key, type, id, time, data, headers, attempts,
    replay, error_type, error_message, fingerprint, parked_at, last_retry_at, job. A payload is read with
    get_json_object(cast(data as string), '$.total'). What is shown is marked with a job, and --job ID --yes brings back
    exactly that, also if it was stopped before. With --continuous, letters that die later come back, too, once each.
    """
    from penstock.spark.pipelines.redrive import checked_filter, checked_rate

    checked_rate(rate)
    wanted = _Wanted(topic, name, where, tuple(checked_filter(where, fingerprint or ())))
    if job is not None:
        if wanted != _Wanted(None, None, None, ()) or continuous:
            raise UsageError("give --job or a topic and a filter, not both: a job names its letters already")
        _run_job(context, job, rate=rate, yes=yes, as_json=as_json)
        return
    if topic is None:
        raise UsageError("say of which topic, or which --job")
    if continuous and not yes:
        raise UsageError(
            "--continuous brings letters back as they die: give --yes, and a filter that you have looked at"
        )
    with context.ensure_object(Session).open_store() as (store, _):
        info = find_topic(store, topic)
        if name is not None:
            find_subscription(store, info, name)
    with running(context.ensure_object(Session), master, "redrive") as run:
        if continuous:
            _run_for_ever(run, wanted, rate=rate, as_json=as_json)
        else:
            _run_once(run, wanted, rate=rate, yes=yes, as_json=as_json)


class _Wanted(NamedTuple):
    """Which letters are meant."""

    topic: str | None
    name: str | None
    where: str | None
    fingerprints: tuple[str, ...]

    def previewed(self, run: Running, *, only_new: bool = False) -> Job:
        """Choose and mark them."""
        from penstock.spark.pipelines.redrive import preview_redrive

        assert self.topic is not None
        return preview_redrive(
            run.spark,
            run.settings.url,
            self.topic,
            self.name,
            where=self.where,
            fingerprints=self.fingerprints,
            only_new=only_new,
        )


# --- once -----------------------------------------------------------------------------------------


def _run_once(run: Running, wanted: _Wanted, *, rate: float | None, yes: bool, as_json: bool) -> None:
    job = wanted.previewed(run)
    document: dict[str, Any] = _job_document(job)
    if not as_json:
        _print_job(job)
    if yes:
        done = _brought_back(run.settings.url, job.id, rate, run.ending)
        document |= _run_document(done)
        if not as_json:
            print()
            _print_run(done)
        _finish(done, document if as_json else None)
        return
    if as_json:
        print_json(document)
    if job.marked:
        say(f"nothing came back yet: penstock pipeline redrive --job {job.id} --yes")


def _run_job(context: typer.Context, job: str, *, rate: float | None, yes: bool, as_json: bool) -> None:
    from penstock.spark.pipelines.redrive import marked_with, planned_of
    from penstock.spark.pipelines.rounds import caught

    with context.ensure_object(Session).open_store() as (store, settings):
        # Also with --yes: an id that is none is told here.
        parts = marked_with(store, job)
    if not yes:
        found = {(part.topic.name, part.subscription): 0 for part in parts}
        for part in parts:
            found[part.topic.name, part.subscription] += len(part.offsets)
        document = {"job": job, "done": False, "planned": planned_of(job), "found": sum(found.values())}
        if as_json:
            print_json({**document, "subscriptions": _counted(found)})
        else:
            print(
                f"{sum(found.values()):,} dead letters are marked with {shown_text(job)}{_of_planned(planned_of(job))}"
            )
        raise UsageError("nothing came back: give --yes to do it")
    with caught() as ending:
        done = _brought_back(settings.url, job, rate, ending)
    if not as_json:
        _print_run(done)
    _finish(done, _run_document(done) if as_json else None)


def _brought_back(url: str, job: str, rate: float | None, ending: Ending) -> Redriven:
    from penstock.spark.pipelines.redrive import redrive as bring_back

    with progress("letters", counted=True) as update:
        return bring_back(url, job, rate=rate, progress=update, ending=ending)


def _finish(done: Redriven, document: dict[str, Any] | None) -> None:
    """Print the document, say what is left, and end: with 1 if that is something."""
    if document is not None:
        print_json(document)
    if done.left:
        say(f"{done.left:,} are left: penstock pipeline redrive --job {shlex.quote(done.job)} --yes goes on")
        raise typer.Exit(1)


# --- continuous -----------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """One round of a continuous redrive."""

    job: Job
    done: Redriven | None

    @property
    def idle(self) -> bool:
        return not self.job.marked


def _run_for_ever(run: Running, wanted: _Wanted, *, rate: float | None, as_json: bool) -> None:
    from msgspec import json

    from penstock.spark.pipelines.rounds import rounds

    def turn() -> _Turn:
        # Those that die again are left: it would never end.
        job = wanted.previewed(run, only_new=True)
        return _Turn(job, _brought_back(run.settings.url, job.id, rate, run.ending) if job.marked else None)

    for job, done in rounds(turn, continuous=True, ending=run.ending):
        if done is None:
            continue
        if as_json:
            print_json_line(json.encode(_job_document(job) | _run_document(done)))
        else:
            _print_run(done)
        if done.left:
            _finish(done, None)


# --- what is shown --------------------------------------------------------------------------------


def _print_job(job: Job) -> None:
    if job.groups:
        print_groups(job.groups[:GROUPS_SHOWN])
        print()
        print_letters(list(job.samples))
        print()
    many = ", ".join(f"{shown_text(name)} {count:,}" for name, count in job.subscriptions.items())
    print(f"{job.marked:,} dead letters are marked with {job.id}{f': {many}' if many else ''}")
    if len(job.groups) > GROUPS_SHOWN:
        say(f"there are more causes: these are the {GROUPS_SHOWN} most frequent, --json has more")
    if job.marked < job.planned:
        say(f"{job.planned - job.marked:,} more were found, and came back or were removed meanwhile")
    if job.taken:
        say(f"{job.taken:,} of them were marked by an earlier job, which does not have them any more")


def _print_run(done: Redriven) -> None:
    print(f"{done.replayed:,} dead letters came back{_of_planned(done.planned)}")
    if done.planned is not None and done.found < done.planned:
        gone = done.planned - done.found
        say(f"{gone:,} were not marked any more: brought back before, removed, or marked by a later job")
    if done.found > done.replayed + done.left:
        say(f"{done.found - done.replayed - done.left:,} were brought back or removed by somebody else meanwhile")


def _of_planned(planned: int | None) -> str:
    return "" if planned is None else f", of {planned:,} that were planned"


def _job_document(job: Job) -> dict[str, Any]:
    return {
        "job": job.id,
        "done": False,
        "planned": job.planned,
        "marked": job.marked,
        "taken": job.taken,
        "marked_by_subscription": dict(job.subscriptions),
        "groups": [group_document(each) for each in job.groups],
        "samples": [document_of(each) for each in job.samples],
    }


def _run_document(done: Redriven) -> dict[str, Any]:
    return {
        "job": done.job,
        "done": not done.left,
        "planned": done.planned,
        "found": done.found,
        "replayed": done.replayed,
        "left": done.left,
        "subscriptions": _counted(done.subscriptions),
    }


def _counted(found: Any) -> list[dict[str, Any]]:
    return [{"topic": topic, "name": name, "count": count} for (topic, name), count in found.items()]
