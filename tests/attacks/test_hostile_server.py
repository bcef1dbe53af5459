"""Servers that lie: every act ends with a result or one sentence, takes little memory, and loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import pytest

from attacks.hostile_server import LIES
from holdfast.errors import HoldfastError
from holdfast.objects.protocol import ObjectStore
from holdfast.repo.names.snapshots import read_snapshot
from holdfast.repo.upkeep.collect import Rules, collect
from tests.faults.scenario import SECOND, THIRD, check_store, holds, read_content, read_state, save_content
from tests.kit.memory import measure_rise_kib
from tests.kit.patience import measure_cpu_s
from tests.kit.s3_server import S3Server, serve_s3
from tests.kit.thinning import thin
from tests.unit.objects.cloud.servers import open_cloud

MAX_EXTRA_KIB: Final = 400 << 10
"""For all acts together: 4 MiB in each answer to many requests at once take 200 MiB on a busy machine."""
MAX_CPU_S: Final = 20.0
"""Ten times what it takes on cores that do nothing else: processor time counts what neighbours take away as well."""
MAX_TEXT: Final = 1500
ACTS: Final[dict[str, Callable[[ObjectStore], object]]] = {
    "read": lambda store: read_content(store, read_snapshot(store, "good")),
    "read all": read_state,
    "check": check_store,
    "save": lambda store: save_content(store, "new", THIRD),
    "collect": lambda store: collect(store, Rules(min_age_s=0.0)),
}


@pytest.fixture
def server() -> Iterator[S3Server]:
    with serve_s3() as running:
        save_content(open_cloud(running), "good", SECOND)
        yield running


def find_wrong(acts: Mapping[str, Callable[[], object]]) -> Iterator[str]:
    """Yield what is wrong with how some acts ended, and with the memory that they took, which is measured once."""
    texts: dict[str, str] = {}

    def run_all() -> None:
        for name, act in acts.items():
            texts[name] = _catch(act)

    extra = measure_rise_kib(run_all)
    if extra > MAX_EXTRA_KIB:
        yield f"took {extra >> 10} MiB"
    for name, text in texts.items():
        if len(text) > MAX_TEXT or not text.isprintable():
            yield f"{name}: an error that is no sentence: {text[:2000]!r}"


def _act_on(act: Callable[[ObjectStore], object], server: S3Server) -> object:
    return act(open_cloud(server))


def _catch(act: Callable[[], object]) -> str:
    """Return the text of the error that an act raises; empty if it raises none."""
    try:
        act()
    except HoldfastError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("lie", thin(LIES, 5))
def test_a_server_that_lies_is_survived(server: S3Server, lie: str) -> None:
    wrong: list[str] = []
    server.change_answer = LIES[lie]
    acts = {name: partial(_act_on, act, server) for name, act in ACTS.items()}

    cpu_s = measure_cpu_s(lambda: wrong.extend(find_wrong(acts)))

    assert wrong == []
    assert cpu_s < MAX_CPU_S
    server.change_answer = lambda request, answer: answer
    assert holds(read_state(open_cloud(server)), "good", SECOND)
    assert [str(found) for found in check_store(open_cloud(server)) if found.severity == "error"] == []


def test_what_is_read_from_a_lying_server_is_never_wrong(server: S3Server) -> None:
    for lie in LIES.values():
        server.change_answer = lie
        try:
            found = read_content(open_cloud(server), read_snapshot(open_cloud(server), "good"))
        except HoldfastError:
            continue
        assert found == SECOND


@pytest.mark.parametrize(
    ("lie", "sentence"),
    [
        ("a listing in plain text", "the answer is not that of an object store: check the endpoint"),
        ("a listing that never ends", "the server lists objects without an end"),
        ("keys with two dots", "another program has put an object there whose name no store can have"),
        ("a body that is too short", "the server did not answer"),
        ("no headers", "the answer is not that of an object store"),
        ("a length of 2^60", "more than the limit of"),
        ("a body of zeros", "damaged"),
    ],
)
def test_the_sentence_says_what_is_wrong(server: S3Server, lie: str, sentence: str) -> None:
    server.change_answer = LIES[lie]

    with pytest.raises(HoldfastError, match=sentence):
        read_content(open_cloud(server), read_snapshot(open_cloud(server), "good"))


def test_the_measure_notices_what_it_should() -> None:
    def fail() -> None:
        raise HoldfastError("\x1b[2J")

    assert len(list(find_wrong({"take": lambda: bytearray(MAX_EXTRA_KIB << 11)}))) == 1
    assert len(list(find_wrong({"fail": fail}))) == 1
