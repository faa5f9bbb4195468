"""AWS profiles: keys, region and endpoint from the shared credentials and config files, read anew when keys change.

Profiles that name something to do (single sign-on, a role to assume, a program to run) are left to boto3, where it is
installed.
"""

from __future__ import annotations

import configparser
import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shardkeep.errors import UsageError

# Where these say how to get credentials, obstore does it; a default profile comes after them.
_OWN_WAYS: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_ACTIVE: Final = ("role_arn", "sso_session", "sso_account_id", "credential_process", "login_session")
_REREAD: Final = datetime.timedelta(minutes=15)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """What a profile adds: options for obstore, region, endpoint. Shows nothing of itself."""

    options: dict[str, Any]
    region: str | None
    endpoint: str | None


def find_profile(cloud: Mapping[str, str]) -> Profile | None:
    """Return the profile in force: AWS_PROFILE, else `default` where there is one and nothing else gives credentials.

    Raises:
        UsageError: AWS_PROFILE names none, or one that needs boto3, which is not installed.
    """
    name = cloud.get("AWS_PROFILE") or cloud.get("AWS_DEFAULT_PROFILE")
    if name is None and any(way in cloud for way in _OWN_WAYS):
        return None
    found = _read_profile(cloud, name or "default")
    if found is None:
        if name is None:
            return None
        raise UsageError(
            f"AWS profile {name!r} is in neither {_paths(cloud)[0]} nor {_paths(cloud)[1]}",
            advice="set AWS_PROFILE to one that is there, or unset it",
        )
    options: dict[str, Any] = {}
    if "AWS_ACCESS_KEY_ID" not in cloud and "AWS_SKIP_SIGNATURE" not in cloud:
        options = _find_credentials(cloud, name, found)
    return Profile(options=options, region=found.get("region"), endpoint=found.get("endpoint_url"))


def _find_credentials(cloud: Mapping[str, str], name: str | None, found: Mapping[str, str]) -> dict[str, Any]:
    if "aws_access_key_id" in found and "aws_secret_access_key" in found:
        return {"credential_provider": _Keys(dict(cloud), name or "default")}
    if not any(way in found for way in _ACTIVE):
        return {}
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise UsageError(
            f"AWS profile {name or 'default'!r} needs boto3 (it uses {next(way for way in _ACTIVE if way in found)})",
            advice="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from None
    return {"credential_provider": Boto3CredentialProvider(boto3.Session(profile_name=name))}


class _Keys:
    """Hands a profile's keys to obstore, and looks again later: other programs keep the file fresh."""

    def __init__(self, cloud: dict[str, str], name: str) -> None:
        self._places = {key: value for key, value in cloud.items() if key in _FILES}
        self._name = name

    def __call__(self) -> dict[str, Any]:
        found = _read_profile(self._places, self._name) or {}
        if "aws_access_key_id" not in found or "aws_secret_access_key" not in found:
            raise ValueError("the AWS profile has no keys any more")
        return {
            "access_key_id": found["aws_access_key_id"],
            "secret_access_key": found["aws_secret_access_key"],
            "token": found.get("aws_session_token"),
            "expires_at": datetime.datetime.now(datetime.UTC) + _REREAD,
        }


_FILES: Final = ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE")


def _paths(places: Mapping[str, str]) -> tuple[str, str]:
    return (
        os.path.expanduser(places.get(_FILES[0]) or "~/.aws/credentials"),
        os.path.expanduser(places.get(_FILES[1]) or "~/.aws/config"),
    )


def _read_profile(places: Mapping[str, str], name: str) -> dict[str, str] | None:
    """Return a profile's settings; those of the credentials file win."""
    credentials, config = (_read_ini(path) for path in _paths(places))
    section = "default" if name == "default" else f"profile {name}"
    if name not in credentials and section not in config:
        return None
    return {**config.get(section, {}), **credentials.get(name, {})}


def _read_ini(path: str) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(default_section="\0", strict=False)
    try:
        with open(path, encoding="utf-8") as file:
            parser.read_file(file)
    except FileNotFoundError:
        return {}
    except (OSError, configparser.Error, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {path} ({type(error).__name__})", advice="check the file of AWS settings"
        ) from None
    return {section: dict(parser.items(section)) for section in parser.sections()}
