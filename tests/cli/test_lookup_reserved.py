"""The command line treats names that begin with "@" as Holdfast's own: not to be saved or listed, but to be seen."""

from __future__ import annotations

from holdfast.objects.local.local_store import LocalStore
from tests.cli.runs import Cli
from tests.kit.saving import new_repo, save_bytes

OWN = "@own/thing"


def test_holdfasts_own_names_are_left_out_unless_they_are_asked_for(cli: Cli) -> None:
    cli.ok("put", "run/1", "data/config.json")
    save_bytes(new_repo(LocalStore(cli.store)), OWN, {"x": b"data"})

    said = "is refused: names that begin with '@' are Holdfast's own; choose another\n"
    assert cli("put", "@x", "data/config.json").err == f"holdfast: snapshot name '@x' {said}"
    assert cli("tag", "@x", "run/1").err == f"holdfast: tag name '@x' {said}"
    assert [each["name"] for each in cli("ls", "--json").json["snapshots"]] == ["run/1"]
    assert [each["name"] for each in cli("ls", "@", "--json").json["snapshots"]] == [OWN]
    assert cli("prune", "--keep-within", "9h", "--json").json["keep"] == ["run/1"]
    assert [each["name"] for each in cli("du", "--json").json["snapshots"]] == [OWN, "run/1"]
    assert cli("show", OWN, "--json").json["name"] == OWN
    assert cli("show", "@own/thin").err.endswith(f"did you mean {OWN!r}?\n")
    assert cli("show", "own/thing").err.endswith("`holdfast ls` lists the snapshots\n")
    assert cli("copy", OWN, "--to", str(cli.folder / "b")).code == 0
    assert cli("rm", OWN, "--yes").code == 0
    assert cli("check").code == 0
