"""How dead letters are shown: as rows of a table, as documents, and one of them in full.

What comes from an event or an error is printed with its control characters escaped, as everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cli.output import print_table, shown_bytes, shown_text, shown_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.bus.letters import DeadGroup, DeadLetter

MESSAGE_SHOWN = 60
HEX_BYTES_SHOWN = 4_096
HEX_BYTES_A_LINE = 16


def document_of(letter: DeadLetter) -> dict[str, Any]:
    """Return a letter for programs, without its payload and traceback."""
    return {
        "topic": letter.topic,
        "name": letter.subscription,
        "partition": letter.position.partition,
        "offset": letter.position.offset,
        "state": letter.state,
        "error_type": letter.error_type,
        "error_message": letter.error_message,
        "fingerprint": letter.fingerprint,
        "attempts": letter.attempts,
        "replay": letter.replay,
        "parked_at": shown_time(letter.parked_at),
        "last_retry_at": None if letter.last_retry_at is None else shown_time(letter.last_retry_at),
        "job": letter.job or None,
        "key": None if letter.event.key is None else shown_bytes(letter.event.key),
        "type": letter.event.type,
        "bytes": len(letter.event.data),
    }


def group_document(group: DeadGroup) -> dict[str, Any]:
    """Return a cause for programs."""
    return {
        "fingerprint": group.fingerprint or None,
        "error_type": group.error_type,
        "count": group.count,
        "first": shown_time(group.first),
        "last": shown_time(group.last),
        "message": group.message,
        "partition": group.sample.partition,
        "offset": group.sample.offset,
    }


def print_groups(groups: Sequence[DeadGroup]) -> None:
    """Print the causes of dead letters as a table, one to a line."""
    print_table(
        ("count", "error", "cause", "first", "last", "sample", "message"),
        [
            (
                f"{each.count:,}",
                shown_text(each.error_type) or "-",
                each.fingerprint or "all others",
                shown_time(each.first),
                shown_time(each.last),
                str(each.sample),
                shortened(each.message),
            )
            for each in groups
        ],
        numbers={"count"},
    )


def print_letters(letters: list[DeadLetter]) -> None:
    """Print letters as a table, one to a line."""
    print_table(
        ("position", "failed", "error", "cause", "attempts", "replay", "key", "message"),
        [
            (
                str(letter.position),
                shown_time(letter.failed_at),
                shown_text(letter.error_type) or "-",
                letter.fingerprint,
                str(letter.attempts),
                str(letter.replay),
                "-" if letter.event.key is None else shown_bytes(letter.event.key),
                shortened(letter.error_message),
            )
            for letter in letters
        ],
        numbers={"attempts", "replay"},
    )


def shortened(message: str) -> str:
    """Return the beginning of a message, on one line."""
    shown = shown_text(message[: MESSAGE_SHOWN + 1])
    return (f"{shown[:MESSAGE_SHOWN]}…" if len(shown) > MESSAGE_SHOWN else shown) or "-"


# --- one in full ----------------------------------------------------------------------------------


def print_letter(letter: DeadLetter) -> None:
    """Print all that is known of a letter: what and why, the traceback, the payload."""
    origin, event = letter.origin, letter.event
    rows = [
        ("position", str(letter.position)),
        ("subscription", letter.subscription),
        ("state", letter.state),
        ("error", shown_text(letter.error_type) or "-"),
        ("message", shown_text(letter.error_message) or "-"),
        ("cause", letter.fingerprint),
        ("attempts", str(letter.attempts)),
        ("replay", str(letter.replay)),
        ("parked", shown_time(letter.parked_at)),
        ("last tried", "-" if letter.last_retry_at is None else shown_time(letter.last_retry_at)),
        ("job", shown_text(letter.job) or "-"),
        ("event id", shown_text(origin.id or "-")),
        ("producer", origin.producer or "-"),
        ("sequence", "-" if origin.sequence is None else str(origin.sequence)),
        ("source", shown_text(origin.source or "-")),
        ("appended", "-" if origin.appended_at is None else shown_time(origin.appended_at)),
        ("type", shown_text(event.type or "-")),
        ("key", "-" if event.key is None else shown_bytes(event.key)),
        ("content type", shown_text(event.content_type or "-")),
        *((f"header {shown_text(name)}", shown_bytes(value)) for name, value in event.headers.items()),
    ]
    print_table(("what", "value"), rows)
    if letter.error_trace:
        print(f"\n{_lines(letter.error_trace)}")
    print(f"\n{_shown_payload(event.data)}")


def cloud_event(letter: DeadLetter) -> Any:
    """Return the event of a letter as a CloudEvent, with its position, for programs."""
    from msgspec import json

    from penstock import cloudevents
    from penstock.batch import UNTYPED
    from penstock.events import Event

    position = letter.position
    said = Event(id=str(position), source=f"penstock:{position.topic}", type=UNTYPED)
    document = cloudevents.to_structured(
        letter.event, defaults=said, sequence=position.offset, recorded_at=letter.appended_at
    )
    return json.decode(document)


def _shown_payload(data: bytes) -> str:
    """Return a payload as people read it: JSON in lines of its own, text as it is, anything else as a hex dump."""
    from msgspec import DecodeError, json

    try:
        return _lines(json.format(data, indent=2).decode())
    except (DecodeError, UnicodeDecodeError):
        pass
    try:
        return _lines(data.decode())
    except UnicodeDecodeError:
        return _hex_dump(data)


def _lines(text: str) -> str:
    """Return text line by line, with everything escaped that is not printed as it stands."""
    return "\n".join(shown_text(line) for line in text.rstrip("\n").split("\n"))


def _hex_dump(data: bytes) -> str:
    lines = []
    for start in range(0, min(len(data), HEX_BYTES_SHOWN), HEX_BYTES_A_LINE):
        part = data[start : start + HEX_BYTES_A_LINE]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in part)
        lines.append(f"{start:08x}  {part.hex(' '):<{3 * HEX_BYTES_A_LINE - 1}}  {text}")
    if len(data) > HEX_BYTES_SHOWN:
        lines.append(f"… {len(data) - HEX_BYTES_SHOWN:,} bytes more: --json has all of them")
    return "\n".join(lines)
