"""Names and keys: which names are refused, how the others become keys, and how they are ordered."""

from __future__ import annotations

import unicodedata
from collections import Counter

import pytest

from holdfast.digest import hash_bytes
from holdfast.errors import BadName
from holdfast.objects.protocol import verify_key, verify_prefix
from holdfast.repo.format.layout import (
    CONFIG,
    MAX_GENERATION,
    MAX_NAME_BYTES,
    PREFIXES,
    SHELVES,
    SNAPSHOTS,
    are_file_ids,
    escape_name,
    escape_prefix,
    find_shelf,
    generation_key,
    index_key,
    is_file_id,
    is_lease_id,
    lease_stem,
    manifest_key,
    may_start_with,
    natural_order,
    new_file_id,
    new_lease_id,
    pack_key,
    snapshot_stem,
    split_generation,
    split_prefix,
    split_stem,
    tag_stem,
    verify_name,
)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "empty"),
        ("\0", "control"),
        ("a\nb", "control"),
        ("a\x7f", "control"),
        ("a\x85b", "control"),
        ("a\\b", "backslash"),
        ("\ud800", "Unicode"),
        ("a\udcff", "Unicode"),
        (".", "it has '.' or '..' between slashes"),
        ("..", "it has '.' or '..' between slashes"),
        ("a/../b", "it has '.' or '..' between slashes"),
        ("a/./b", "it has '.' or '..' between slashes"),
        ("a//b", "it begins or ends with '/', or has '//' in it"),
        ("/a", "it begins or ends with '/', or has '//' in it"),
        ("a/", "it begins or ends with '/', or has '//' in it"),
        ("/", "it begins or ends with '/', or has '//' in it"),
        ("x" * (MAX_NAME_BYTES + 1), "longer"),
        ("\u00e9" * (MAX_NAME_BYTES // 2 + 1), "longer"),
    ],
)
def test_names_that_would_make_trouble_are_refused_with_a_reason(name: str, reason: str) -> None:
    with pytest.raises(BadName, match=rf"snapshot name .* is refused: .*{reason}"):
        verify_name(name)


def test_a_refused_name_is_shown_shortened_and_as_what_it_was_meant() -> None:
    with pytest.raises(BadName, match=r"^tag name 'x{80}' is refused: it is longer than 4096 bytes$"):
        verify_name("x" * 5000, what="tag")


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "a/b",
        "Run",
        "run 1",
        "100%",
        "%2f",
        "a.b",
        ".hidden",
        "...",
        "-",
        "@",
        "a@00000000",
        "\u00e9",
        "\u6a5f/\U0001f600",
    ],
)
def test_names_that_people_use_are_accepted_as_they_are(name: str) -> None:
    assert verify_name(name) == name
    verify_key(generation_key(snapshot_stem(name), 0))


def test_a_name_of_4096_bytes_is_accepted() -> None:
    name = "x" * MAX_NAME_BYTES
    assert verify_name(name) == name
    verify_key(generation_key(snapshot_stem(name), MAX_GENERATION))


def test_two_spellings_of_one_name_are_one_name() -> None:
    composed = "caf\u00e9"
    assert verify_name(unicodedata.normalize("NFD", composed)) == composed


def test_names_that_a_filesystem_might_confuse_have_keys_that_it_cannot() -> None:
    names = ["a", "a/b", "a%2fb", "Run", "run", "%52un", "%", "%25", "\u00e9", "e", "a@00000000", ".a", "%2ea", "_a"]
    escaped = [escape_name(name) for name in names]
    assert len(set(escaped)) == len(names)
    assert all(text == text.lower() for text in escaped)


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("run1/step-100", "run1%2fstep-100"),
        ("Run", "%52un"),
        ("100%", "100%25"),
        ("\u00e9", "%c3%a9"),
        (".hidden", "%2ehidden"),
        ("a..b", "a..b"),
        ("_x", "_x"),
    ],
)
def test_a_name_is_escaped_byte_by_byte(name: str, escaped: str) -> None:
    assert escape_name(name) == escaped


def test_a_name_of_up_to_200_escaped_bytes_is_kept_and_a_longer_one_becomes_a_digest() -> None:
    assert escape_name("x" * 200) == "x" * 200
    long = escape_name("x" * 201)
    assert long.startswith("%_")
    assert len(long) == 66
    assert long != escape_name("x" * 202)
    assert escape_name("\u00e9" * 34).startswith("%_")


def test_a_digest_form_cannot_be_typed_as_a_name() -> None:
    assert escape_name(escape_name("x" * 201)).startswith("%25_")


@pytest.mark.parametrize("prefix", ["", ".", "r", "run/", "Run", "\u00e9", "%"])
def test_the_escape_of_a_prefix_begins_the_escape_of_the_name(prefix: str) -> None:
    assert escape_name(prefix + "rest").startswith(escape_prefix(prefix))


def test_a_prefix_too_long_to_be_escaped_begins_every_name() -> None:
    assert escape_prefix("x" * 300) == ""


@pytest.mark.parametrize(("name", "prefix"), [("a", ""), ("a/b", "a/"), ("a/b/c", "a/b/")])
def test_neighbours_share_all_up_to_the_last_slash(name: str, prefix: str) -> None:
    assert split_prefix(name) == prefix


def test_numbers_in_names_sort_by_value() -> None:
    names = ["step-100", "step-99", "step-9", "10", "9", "a", "", "step-099", "step-99b", "step"]
    assert sorted(names, key=natural_order) == [
        "",
        "9",
        "10",
        "a",
        "step",
        "step-9",
        "step-099",
        "step-99",
        "step-99b",
        "step-100",
    ]


@pytest.mark.parametrize("name", ["\u00b2", "1\u00b22", "\u0663", "\u2460", "1" * 4096])
def test_digits_of_any_script_can_be_sorted(name: str) -> None:
    assert sorted(["b", name, "a", "7"], key=natural_order)


def test_the_shelf_of_a_name_depends_only_on_the_name() -> None:
    assert snapshot_stem("a") == "snapshots/17/a"
    assert snapshot_stem("run1/step-100") == "snapshots/1c/run1%2fstep-100"
    for name in ("a", "Run/\u00e9", "x" * 300):
        shelf, _, escaped = snapshot_stem(name).rpartition("/")
        assert (shelf + "/", escaped) == (find_shelf(name), escape_name(name))
        assert shelf + "/" in SHELVES
        assert split_stem(snapshot_stem(name)) == escape_name(name)
        # What a record's own key says is enough to know where it belongs.
        assert SHELVES[hash_bytes(escaped.encode())[0] % 32] == find_shelf(name)


def test_shelves_are_directories_of_the_format() -> None:
    assert len(set(SHELVES)) == 32
    assert all(verify_prefix(shelf).startswith(SNAPSHOTS) and shelf.endswith("/") for shelf in SHELVES)
    assert (SHELVES[0], SHELVES[31]) == ("snapshots/00/", "snapshots/1f/")


def test_names_spread_over_all_shelves() -> None:
    held = Counter(find_shelf(f"run/step-{number}") for number in range(3200))
    assert len(held) == 32
    assert max(held.values()) < 2 * 100


@pytest.mark.parametrize(("name", "prefix", "expected"), [
    ("run/1", "run/", True), ("run/1", "", True), ("run/1", "run/1", True), ("run/1", "run/12", False),
    ("other/1", "run/", False), (".run", ".", True), ("Run", "r", False), ("x" * 300, "x", True),
    ("x" * 300, "y", True), ("run/1", "x" * 300, True),
])  # fmt: skip
def test_a_stem_shows_which_prefixes_its_name_may_have(name: str, prefix: str, expected: bool) -> None:
    assert may_start_with(snapshot_stem(name), prefix) == expected
    assert may_start_with(generation_key(snapshot_stem(name), 7), prefix) == expected


def test_a_generation_is_a_file_of_its_stem_and_sorts_by_number() -> None:
    assert generation_key("snapshots/17/a", 7) == "snapshots/17/a@00000007"
    assert generation_key(CONFIG, 7) == "config/00000007"
    assert generation_key("tags/x", 99) < generation_key("tags/x", 100)


@pytest.mark.parametrize("generation", [-1, MAX_GENERATION + 1])
def test_a_name_without_generations_left_is_refused(generation: int) -> None:
    with pytest.raises(BadName, match="use another name"):
        generation_key("tags/x", generation)


@pytest.mark.parametrize("stem", [CONFIG, snapshot_stem("a/b"), tag_stem("a/b"), lease_stem("0" * 24)])
def test_a_key_splits_into_stem_and_generation(stem: str) -> None:
    assert split_generation(generation_key(stem, 12345678)) == (stem, 12345678)


@pytest.mark.parametrize(
    "key",
    [
        "snapshots/a",
        "snapshots/a@1",
        "snapshots/a@000000001",
        "snapshots/a@0000000x",
        "snapshots/00000000",
        "snapshots/00/00000000",
        "snapshots/00/@00000000",
        "snapshots/@00000000",
        "config/a@00000000",
        "config/@00000000",
        "config/0",
        "",
        "snapshots/a@\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660",
    ],
)
def test_other_keys_do_not_split(key: str) -> None:
    assert split_generation(key) is None


def test_ids_are_random_and_a_file_id_contains_its_lease() -> None:
    lease_id = new_lease_id()
    file_id = new_file_id(lease_id)
    assert is_lease_id(lease_id)
    assert is_file_id(file_id)
    assert file_id.startswith(lease_id + "-")
    assert new_file_id(lease_id) != file_id
    assert new_lease_id() != lease_id


@pytest.mark.parametrize(
    "text",
    [
        *["", "x", "0" * 24, f"{'0' * 24}-{'0' * 15}", f"{'0' * 24}-{'g' * 16}", "0" * 41, f"{'0' * 24}-{'0' * 16}\n"],
        *[f"{'0' * 24}-{'0' * 15}-", f"{'0' * 23}--{'0' * 16}", f"-{'0' * 40}", f"{'0' * 24}-{'0' * 15}\u0660"],
        *[f"{'0' * 24}-{'0' * 15}\ud800", f"{'0' * 24}-{'0' * 15}A", f"{'0' * 24}/{'0' * 16}"],
    ],
)
def test_other_texts_are_no_file_ids(text: str) -> None:
    file_id = new_file_id(new_lease_id())
    assert not is_file_id(text)
    assert not any(map(are_file_ids, ([text], [file_id, text], [text, file_id])))


def test_many_file_ids_are_checked_at_once() -> None:
    assert are_file_ids([])
    assert are_file_ids([new_file_id(new_lease_id()) for _ in range(100)])


def test_ids_that_are_cut_in_the_wrong_place_are_none() -> None:
    joined = new_file_id(new_lease_id()) + new_file_id(new_lease_id())
    assert not are_file_ids([joined[:40], joined[40:]])
    assert not are_file_ids([joined, ""])


def test_every_key_that_is_built_is_valid_and_below_a_known_prefix() -> None:
    file_id = new_file_id(new_lease_id())
    built = [
        pack_key(file_id),
        manifest_key(file_id),
        index_key("0" * 64),
        generation_key(lease_stem(new_lease_id()), 3),
        generation_key(snapshot_stem("a/b"), 3),
        generation_key(tag_stem("a/b"), 3),
    ]
    for key in built:
        assert verify_key(key).startswith(PREFIXES)
