"""Errors that a user can act on.

Every `UserError` carries one sentence that names the thing, its value and what to do; the command line prints it without a
traceback and exits with code 2. Anything else that escapes is a defect of ECHO-2 and keeps its traceback.
"""


class UserError(Exception):
    """Something outside ECHO-2 must change: a setting, a file, a token, a machine."""


class ConfigError(UserError):
    """A configuration that cannot be read, has unknown keys, or cannot work; the message holds the numbers that clash."""


class WaitTimeout(UserError):
    """A bounded wait ended without its event; the message names who was waited for and for how long."""


class SnapshotError(UserError):
    """A snapshot that cannot be used: damaged, incomplete, forged, or of another run."""
