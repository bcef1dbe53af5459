"""Every python, console and bash block in the documentation runs, and prints what the page shows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
from _pytest.mark import ParameterSet

from tests.docs.blocks import BlockFailed, iter_blocks, matches, run_page
from tests.kit.leftovers import read_handlers, restore_handlers
from tests.kit.quick_command import provide_command
from tests.kit.s3_server import serve_s3

ROOT: Final = Path(__file__).resolve().parents[2]
SLOW: Final = (
    "docs/tutorial/many-ranks.md",
    "docs/how-to/compare-compiled-and-eager.md",
    "docs/how-to/export.md",
    "docs/how-to/share-a-compile-cache.md",
    "docs/how-to/use-with-deepspeed.md",
    "docs/how-to/use-with-ray-train.md",
)
"""Pages that start several processes with torch, compile, or export to every format."""
NEEDS: Final = {
    "docs/how-to/use-with-accelerate.md": ("accelerate",),
    "docs/how-to/use-with-lightning.md": ("lightning",),
    "docs/how-to/use-with-the-hugging-face-trainer.md": ("transformers", "accelerate", "peft"),
    "docs/how-to/use-with-deepspeed.md": ("deepspeed",),
    "docs/how-to/use-with-ray-train.md": ("ray",),
    "docs/how-to/use-with-torchtitan.md": ("torchtitan",),
    "docs/how-to/use-with-torchft-and-vllm.md": ("torchft",),
}
"""Pages that need a training framework: skipped without it. Warnings of the framework are its own matter."""
IN_BUCKETS: Final = ("docs/how-to/use-object-stores.md",)
"""Pages that use a bucket: a small S3 server on loopback, which the environment names."""
INSTALLED: Final = ("README.md",)
"""Pages whose shell runs the installed `holdfast`; the others run one that is forked with torch loaded."""
PAGES: Final = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def quick_command() -> Iterator[Path]:
    with provide_command() as commands:
        yield commands


def _mark(page: str) -> ParameterSet:
    marks = []
    if page in SLOW:
        # Torch's compiler uses parts of torch that are deprecated, and looks for gradients of inputs that have none.
        marks += [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
        marks += [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")]
    if page in NEEDS:
        absent = [name for name in NEEDS[page] if find_spec(name) is None]
        reason = f"needs {', '.join(absent)}, which `make test` installs"
        marks += [pytest.mark.filterwarnings("default"), pytest.mark.skipif(bool(absent), reason=reason)]
    return pytest.param(page, marks=marks)


@pytest.mark.parametrize("page", [_mark(page) for page in PAGES if (ROOT / page).is_file()])
def test_page_does_what_it_shows(page: str, folder: Path, quick_command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = None if page in INSTALLED else quick_command
    handlers = read_handlers()
    with _serve_bucket(monkeypatch) if page in IN_BUCKETS else nullcontext():
        run_page(page, (ROOT / page).read_text(encoding="utf-8"), folder, commands)
    if page in NEEDS:
        restore_handlers(handlers)  # Ray installs its own, and keeps them


@contextmanager
def _serve_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with serve_s3() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield


def _fence(language: str, code: str, above: str = "") -> str:
    return f"{above}\n```{language}\n{code}\n```\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (_fence("python", "1 / 0"), "page.md:3: ZeroDivisionError"),
        (_fence("python", "assert 1 == 2"), "AssertionError"),
        (_fence("python", "x = 1") + _fence("python", "y = z"), "name 'z' is not defined"),
        (_fence("python", ">>> 1"), "SyntaxError"),
        (_fence("bash", "false"), "ended with status 1"),
        (_fence("bash", "false\ntrue"), "ended with status 1"),
        (_fence("bash", "echo before\nfalse | cat\n"), "page.md:3: echo before\nfalse | cat"),
        (_fence("bash", "echo before\nfalse | cat\n"), "ended with status 1:\nbefore"),
        (_fence("bash", "echo $no_such_variable"), "no_such_variable: unbound variable"),
        (_fence("bash", "true") + _fence("console", "$ echo 'open"), "status 2"),
        (_fence("bash", "exit 0"), "ended the shell"),
        (_fence("console", "$ exit 0"), "ended the shell"),
        (_fence("console", "$ no-such-command-anywhere"), "status 127"),
        (_fence("console", "$ echo one\ntwo"), "but printed:\none"),
        (_fence("console", "$ true\nsomething"), "shows:\nsomething"),
        (_fence("console", "$ echo one\none\n$ echo two\none"), "page.md:5: echo two"),
        (_fence("console", "no prompt"), "starts with a command"),
        (_fence("sh", "true"), "'sh' blocks are not run"),
        (_fence("python", "1 / 0", above="<!-- not run: -->"), "ZeroDivisionError"),
    ],
)
def test_a_planted_wrong_block_is_reported(text: str, reason: str, folder: Path) -> None:
    with pytest.raises(BlockFailed) as caught:
        run_page("page.md", text, folder)

    assert reason in str(caught.value)


def test_blocks_of_a_page_share_names_and_folder(folder: Path) -> None:
    run_page(
        "page.md",
        _fence("python", "text = 'kept'")
        + _fence("python", "from pathlib import Path\nPath('note').write_text(text)")
        + _fence("console", "$ cat note\nkept\n$ echo \\\n> 'one ... two'\none...")
        + _fence("bash", "mv note moved\ncp moved copied")
        + _fence("text", "not code")
        + _fence("python", "1 / 0", above="<!-- not run: it cannot end well -->"),
        folder,
    )

    assert (folder / "copied").read_text(encoding="utf-8") == "kept"


def test_blocks_of_a_page_share_one_shell(folder: Path) -> None:
    run_page(
        "page.md",
        _fence("console", "$ mkdir below && cd below\n$ export WORD=kept")
        + _fence("bash", "text=$WORD-too\ncd ..")
        + _fence("console", "$ cd below\n$ bash -c 'echo \"$WORD\"'\nkept\n$ echo $text > note")
        + _fence("bash", "false || true")
        + _fence("console", "$ false | true\n$ echo $unset\n$ pwd\n.../below"),
        folder,
    )

    assert (folder / "below" / "note").read_text(encoding="utf-8") == "kept-too\n"


def test_a_command_cannot_read_the_commands_that_follow(folder: Path) -> None:
    run_page("page.md", _fence("console", "$ cat\n$ echo next > note"), folder)

    assert (folder / "note").read_text(encoding="utf-8") == "next\n"


def test_commands_find_the_interpreter_of_the_tests(folder: Path) -> None:
    run_page("page.md", _fence("console", f"$ command -v python\n{Path(sys.executable).parent}/python"), folder)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb\n", "a\nb\n\n", True),
        ("a ... c", "a b c", True),
        ("a\n...\nz", "a\nb\nc\nz", True),
        ("a.b", "acb", False),
        ("a", "a\nb", False),
        ("  a", "a", False),
    ],
)
def test_three_dots_match_anything_and_nothing_else_does(shown: str, printed: str, *, same: bool) -> None:
    assert matches(shown, printed) is same


def test_blocks_are_found_in_lists_and_longer_fences() -> None:
    text = "- item\n\n  ```python\n  x = 1\n  ```\n\n````text\n```python\n1 / 0\n```\n````\n"

    assert [(block.language, block.code) for block in iter_blocks(text)] == [
        ("python", "x = 1\n"),
        ("text", "```python\n1 / 0\n```\n"),
    ]
