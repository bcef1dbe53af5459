"""get and cat of a tree: entries become raw bytes, and what has no entry is named."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.repo.format.entry import Entry
from holdfast.repo.format.source import BytesSource
from holdfast.repo.write.transaction import ManifestPart
from holdfast.repo.write.writer import Placement, Request, save
from tests.cli.runs import Cli
from tests.kit.saving import noise
from tests.kit.thread_ranks import ThreadRanks, run_threads

RAW = (
    "holdfast: tensors were written as raw bytes without a header; `holdfast show {name}` prints dtype and shape,"
    " `holdfast export {name} DST` writes files that other libraries load\n"
)


@pytest.fixture
def saved(cli: Cli) -> Cli:
    """A store with a tree of tensors and plain values."""
    model = {"w": torch.arange(300.0), "b": torch.ones(3)}
    plain = {"lr": 0.1, "betas": (0.9, 0.99), "name": "AdamW", "empty": {}}
    holdfast.open(cli.store).save("run/1", {"model": model, "opt": plain, "text": "x" * 5000})
    return cli


def test_what_is_left_out_is_counted_and_named(saved: Cli) -> None:
    ran = saved("get", "run/1", "out")

    assert ran.code == 0
    assert ran.out.startswith("wrote 3 files, 6.1 KiB to out in ")
    assert ran.err == RAW.format(name="run/1") + (
        "holdfast: 5 plain values were not written: opt.lr, opt.betas.0, opt.betas.1 and 2 more;"
        " `holdfast show run/1` prints them, store.load('run/1') loads them\n"
    )
    assert (saved.folder / "out/model.w").read_bytes() == torch.arange(300.0).numpy().tobytes()


def test_only_what_the_pattern_asks_for_is_missed(saved: Cli) -> None:
    ran = saved("get", "run/1", "out", "--only", "model.*")
    assert (ran.code, ran.err) == (0, RAW.format(name="run/1"))

    ran = saved("get", "run/1", "out", "--only", "*t*")
    assert ran.code == 0
    assert "5 plain values were not written: opt.lr" in ran.err
    assert "raw bytes" not in ran.err  # nothing but a text was written

    ran = saved("get", "run/1", "out2", "--only", "opt.*")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "holdfast: 'opt.*' matches only plain values in 'run/1', which are not written as files: opt.lr, opt.betas.0,"
        " opt.betas.1 and 2 more; `holdfast show run/1` prints them, store.load('run/1') loads them\n"
    )
    assert not (saved.folder / "out2").exists()


def test_a_tree_of_plain_values_alone_makes_no_files_and_says_so(cli: Cli) -> None:
    holdfast.open(cli.store).save("plain", {"lr": 0.1})

    ran = cli("get", "plain", "out")

    assert (ran.code, ran.out[:12]) == (0, "wrote 0 file")
    assert (
        "1 plain value was not written: lr; `holdfast show plain` prints it, store.load('plain') loads it\n" in ran.err
    )


def test_files_are_written_without_remark(cli: Cli) -> None:
    cli.ok("put", "files", "data/")

    assert cli.ok("get", "files", "out").startswith("wrote 3 files")


def test_cat_of_a_plain_value_says_where_it_is(saved: Cli) -> None:
    ran = saved("cat", "run/1", "opt.lr")

    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "holdfast: 'opt.lr' in 'run/1' is a plain value and not an entry; `holdfast show run/1 opt.lr` prints it\n"
    )


def test_cat_writes_a_short_text_as_it_writes_a_long_one(saved: Cli) -> None:
    assert saved.ok("cat", "run/1", "opt.name") == "AdamW"
    assert saved.ok("cat", "run/1", "opt.name", "--range=1:-1") == "dam"
    assert saved.ok("cat", "run/1", "text", "--range=:3") == "xxx"


def save_share(ranks: ThreadRanks, cli: Cli) -> object:
    sources = [BytesSource("own", noise(600, ranks.rank))]
    root = ManifestPart({"tree": ["dict", "own", ["@bytes", 0]]}, [Entry("own", 600, (), {"type": "bytes"}, dims=1)])
    request = Request("ranks", sources, places={0: Placement(600, 0, (), ranks.rank)}, root=root)
    return save(holdfast.open(cli.store).repository, request, ranks=ranks)


def test_of_what_ranks_have_for_themselves_the_first_is_written_and_the_rest_named(cli: Cli) -> None:
    run_threads(3, lambda ranks: save_share(ranks, cli))

    ran = cli("get", "ranks", "out")

    assert (ran.code, (cli.folder / "out/own").read_bytes()) == (0, noise(600, 0))
    assert ran.err == (
        "holdfast: 1 entry differs between ranks, and the lowest rank's was written: own;"
        " store.load_into on that many ranks loads each rank's own\n"
    )
