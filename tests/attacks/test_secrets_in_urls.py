"""A secret that was pasted into a URL is in no error, chain of errors, log, repr, pickle or output of a command."""

from __future__ import annotations

import logging
import pickle
import shlex
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

import holdfast
from holdfast.cli.main import main
from holdfast.content_store import ContentStoreWriter
from holdfast.errors import HoldfastError
from holdfast.objects.cloud.client import make_client
from holdfast.objects.cloud.place import CloudPlace
from holdfast.objects.storage_options import StorageOptions
from holdfast.texts import mask_url, mask_urls
from tests.cli.every_verb import make_files
from tests.kit.thinning import thin

SECRET: Final = "wJalrXUtnFEMI7MDENGbPxRfiCYzz"
URLS: Final = (
    f"s3://AKIAEXAMPLE:{SECRET}@bucket/ckpts",
    f"s3://AKIAEXAMPLE:ab/{SECRET}/+@bucket/ckpts",
    f"s3://AKIAEXAMPLE:a?{SECRET}@bucket/ckpts",
    f"s3://AKIAEXAMPLE:a#{SECRET}@bucket/ckpts",
    f"s3://AKIAEXAMPLE:{SECRET}/bucket/ckpts",
    f"s3://AKIAEXAMPLE%3A{SECRET}%40bucket/ckpts",
    f"s3://{SECRET}@bucket",
    f"S3://AKIAEXAMPLE:{SECRET}@bucket",
    f"s3:/AKIAEXAMPLE:{SECRET}@bucket/ckpts",  # as pathlib writes it
    f"simplecache::s3://AKIAEXAMPLE:{SECRET}@bucket",
    f"gs://bucket/ckpts?X-Goog-Signature={SECRET}",
    f"az://container/ckpts?sv=2024&sig={SECRET}",
    f"az://container/ckpts&sig={SECRET}",
    f"az://container/ckpts#{SECRET}",
    f"az://container/ckpts;sig={SECRET}",
    f"az://container/ckpts%3Fsig={SECRET}",
    f"https://bucket.s3.amazonaws.com/ckpts?X-Amz-Signature={SECRET}",
    f"https://user:{SECRET}@example.org/ckpts",
    f"https://example.org/?mail=a@b.org&token={SECRET}",
    f"memory://user:{SECRET}@x",
    f"file://user:{SECRET}@host/ckpts",
    f"file://host/ckpts?sig={SECRET}",
    f"{'s3://' + 'b' * 300}?sig={SECRET}",
)
DOORS: Final[dict[str, Callable[[str, holdfast.Store, Path], Any]]] = {
    "open": lambda url, store, folder: holdfast.open(url),
    "open, to read": lambda url, store, folder: holdfast.open(url, read_only=True, create=False),
    "storage_options=": lambda url, store, folder: holdfast.open(url, storage_options={"region": "x"}),
    "mirror=": lambda url, store, folder: holdfast.open(folder / "second", mirror=url).save("a", {"x": 1}),
    "mirror of one save": lambda url, store, folder: store.save("m", {"x": 1}, mirror=url),
    "cache_dir=": lambda url, store, folder: holdfast.open(folder / "second", cache_dir=url),
    "copy": lambda url, store, folder: store.copy("a", url),
    "get": lambda url, store, folder: store.get("files", url),
    "put": lambda url, store, folder: store.put("p", url),
    "put, one of several": lambda url, store, folder: store.put("p", [folder / "model.pt", url]),
    "import_": lambda url, store, folder: store.import_(url, "i"),
    "import_, unpickled": lambda url, store, folder: store.import_(url, "i", unpickle=True),
    "verify_import": lambda url, store, folder: store.verify_import(url, "i"),
    "export": lambda url, store, folder: store.export("a", url),
    "export, a folder": lambda url, store, folder: store.export("a", url, format="dcp"),
    "export, the receipt": lambda url, store, folder: store.export("a", folder / "out", receipt=url),
    "export_async": lambda url, store, folder: store.export_async("a", url).wait(),
    "verify_export": lambda url, store, folder: store.verify_export(url, "a"),
    "compile": lambda url, store, folder: holdfast.compile(lambda x: x, store=url),
    "content_store": lambda url, store, folder: ContentStoreWriter(url),
}
COMMANDS: Final = (
    "-s URL ls", "-s URL save", "-s URL gc --yes", "-s URL check", "-s URL doctor", "doctor URL", "doctor URL --write",
    "init URL", "-s URL init", "copy a --to URL", "mirror URL --yes", "mirror URL --forget", "repair --from URL",
    "get files URL", "put p URL", "import URL i", "import model.safetensors i --receipt URL",
    "verify-import URL --against i", "verify-import model.safetensors --receipt URL", "export a URL",
    "export a out --format dcp --receipt URL", "verify-export URL --against a", "run report good bad URL",
    "ls --mirror URL", "ls a extra URL", "URL", "--store=URL ls",
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> holdfast.Store:
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    store = holdfast.open(tmp_path / "store")
    store.save("a", {"x": 1})
    store.put("files", tmp_path / "model.pt")
    store.import_(tmp_path / "model.safetensors", "i")
    return store


def _list_texts(error: BaseException | None) -> list[str]:
    """Return all that an error and the errors behind it can show."""
    if error is None:
        return []
    facts = [str(error), repr(error), repr(error.args), repr(vars(error)), "".join(traceback.format_exception(error))]
    return facts + _list_texts(error.__cause__) + _list_texts(error.__context__)


@pytest.mark.parametrize("door", thin(DOORS))
def test_no_error_of_python_shows_a_secret(
    door: str, store: holdfast.Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for url in URLS:
        try:
            shown = [repr(DOORS[door](url, store, tmp_path))]
            assert url.startswith("memory:"), url
        except (HoldfastError, ValueError) as error:
            # The source line of a traceback does not have the URL, which is a variable.
            shown = _list_texts(error)

        assert [text for text in shown if SECRET in text] == [], url
        assert SECRET not in caplog.text, url
    assert [path for path in tmp_path.rglob("*") if SECRET in str(path)] == []


@pytest.mark.parametrize("command", thin(COMMANDS))
def test_no_command_prints_a_secret(
    command: str, store: holdfast.Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", store.url)
    for url in URLS:
        words = [word.replace("URL", url) for word in shlex.split(command)]
        for debug in ([], ["--debug"]):
            with suppress(SystemExit):  # of argparse
                main([*debug, *words])
            printed = capsys.readouterr()
            assert SECRET not in printed.out + printed.err, (words, printed)


@pytest.mark.parametrize("variable", ["HOLDFAST_STORE", "HOLDFAST_CACHE_DIR"])
def test_no_command_prints_a_secret_of_the_environment(
    variable: str, store: holdfast.Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_STORE", store.url)
    for url in URLS:
        monkeypatch.setenv(variable, url)
        for words in (["ls"], ["doctor"], ["--debug", "check"], ["put", "p", "model.pt"]):
            assert main(words) == 2
            printed = capsys.readouterr()
            assert SECRET not in printed.out + printed.err, (url, words)


def test_what_remains_of_a_url_names_the_place() -> None:
    assert mask_url(f"s3://KEY:{SECRET}@bucket/ckpts") == "s3://***@bucket/ckpts"
    assert mask_url(f"az://container/ckpts?sig={SECRET}") == "az://container/ckpts?***"
    assert mask_url("s3://my bucket/ckpts") == "s3://my bucket/ckpts"
    assert mask_url("data/a@b?c") == "data/a@b?c"
    text = "the page is http://127.0.0.1:8000/#token, and s3://bucket/run@2/a=3 is read"
    assert mask_urls(text) == text
    shown = f"cannot read (s3://{SECRET}@bucket), az://c/x&sig={SECRET}; see https://a.org/?t={SECRET}."
    assert mask_urls(shown) == "cannot read (s3://***@bucket), az://c/x&***; see https://a.org/?***."
    assert mask_urls(mask_urls(shown)) == mask_urls(shown)


def test_masking_a_long_text_takes_time_in_proportion_to_its_length() -> None:
    for piece in ("a", "a:", "s3:/", "s3://a@", "@", "'s3"):
        started = time.process_time()
        mask_urls(piece * 50_000)
        mask_url("s3://" + piece * 50_000)
        assert time.process_time() - started < 5.0, piece


def test_an_endpoint_with_a_secret_is_masked_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for endpoint in (f"http://user:{SECRET}@127.0.0.1:9", f"http://127.0.0.1:9/?sig={SECRET}"):
        options: dict[str, Any] = {
            "endpoint": endpoint,
            "access_key_id": "x",
            "secret_access_key": SECRET,
            "region": "r",
        }
        options |= {"retry_config": {"max_retries": 0}}
        with pytest.raises(HoldfastError) as caught:
            holdfast.open("s3://bucket/ckpts", storage_options=options)

        shown = [repr(StorageOptions(options)), *_list_texts(caught.value)]
        assert [text for text in shown if SECRET in text] == []
        assert SECRET.encode() not in pickle.dumps(StorageOptions(options))
    assert SECRET not in caplog.text


def test_an_option_that_obstore_refuses_is_not_quoted() -> None:
    with pytest.raises(HoldfastError) as caught:
        make_client(CloudPlace("s3", "bucket", ""), StorageOptions({SECRET: SECRET, "region": "x"}), timeout_s=1.0)

    # The name of an option that does not exist is quoted, its value is not.
    assert [text for text in _list_texts(caught.value.__context__) if SECRET in text] == []
