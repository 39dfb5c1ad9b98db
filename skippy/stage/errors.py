"""What can go wrong with a stage, a lane or a request inside the stage layer."""

from __future__ import annotations


class StageError(Exception):
    """Base of the errors below."""


class StageStartError(StageError):
    """The stage cannot start as configured; the text says what would be right."""


class DownstreamUnavailable(StageError):
    """The next stage did not become ready in time; the text names its endpoint and the last reason."""


class DownstreamRefused(DownstreamUnavailable):
    """The next stage does not admit this one, which trying again would not change."""


class LaneLost(StageError):
    """The lane's connection ended or its peer broke the protocol; nothing more will come on it."""


class RequestFailed(StageError):
    """One request cannot go on, for a reason of its own; the lane ends, other lanes do not notice."""


class SettingsRefused(RequestFailed):
    """The engine does not accept the request's sampling settings; the text names the setting."""
