"""Finds credentials where programs for AWS look for them, beyond what obstore does by itself: profiles and SSO."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

from holdfast.errors import BadName

_GIVEN: Final = ("access_key_id", "aws_access_key_id", "credential_provider", "skip_signature", "aws_skip_signature")
"""Options after which no other credentials are of use."""
_NATIVE: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables for which obstore finds the credentials by itself."""


def find_provider(options: Mapping[str, Any]) -> Any:
    """Return obstore's provider for the AWS profile of the user, or None if obstore finds the credentials by itself.

    The profile is `profile` of the options, else that of AWS_PROFILE, else the default one. Raises BadName if the
    options name a profile that cannot be used.
    """
    profile = options.get("profile")
    if profile is None and (any(name in options for name in _GIVEN) or any(map(os.environ.get, _NATIVE))):
        return None
    if find_spec("boto3") is None:
        if profile is not None:
            raise BadName(f"the AWS profile {profile!r} needs boto3: install it with `pip install boto3`")
        return None
    return _make_provider(profile)


def _make_provider(profile: str | None) -> Any:
    import boto3
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider(boto3.Session(profile_name=profile))
    except BotoCoreError as error:  # a profile that does not exist, or cannot be parsed
        raise BadName(f"the AWS profile cannot be used: {error}") from None
    except ValueError:  # boto3 found no credentials at all
        if profile is None:
            return None
        raise BadName(f"the AWS profile {profile!r} has no credentials") from None
