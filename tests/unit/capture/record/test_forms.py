"""The form of a call's arguments: recorded as JSON, rebuilt for a replay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.capture.record.points import build_arguments, describe_form
from holdfast.errors import Corrupt, NotFound


def test_arguments_of_all_kinds_are_rebuilt() -> None:
    x, y = torch.ones(2), torch.zeros(3)
    form = describe_form((x, [y, 1], None), {"mask": {"a": (x, "text")}, "flag": True})

    args, kwargs = build_arguments(form, {"[0]": x, "[1][0]": y, "['mask']['a'][0]": x})

    assert args[0] is x
    assert args[1][0] is y
    assert args[1][1:] == [1]
    assert args[2] is None
    assert kwargs["mask"]["a"][0] is x
    assert kwargs["mask"]["a"][1] == "text"
    assert kwargs["flag"] is True


def test_an_argument_that_could_not_be_kept_is_named() -> None:
    form = describe_form((nn.Identity(),), {})

    with pytest.raises(NotFound, match="an argument of class Identity cannot be recorded"):
        build_arguments(form, {})


@pytest.mark.parametrize("form", ["", "[]", '{"keys":[],"values":[{"tensor":1,"x":2}]}', '{"keys":["a"],"values":[]}'])
def test_an_invalid_form_is_refused(form: str) -> None:
    with pytest.raises(Corrupt, match="is not a valid form of arguments"):
        build_arguments(form, {})
