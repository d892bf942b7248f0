"""Errors that a user can act on.

Every `UserError` carries one sentence that names the thing, its value and what to do; the command line prints it without a
traceback and exits with code 2. Anything else that escapes is a defect of ECHO-2 and keeps its traceback.
"""

REFUSED = 2
"""The exit code of a command that ended with such a sentence."""
SPEAKER = "echo2: "
"""What stands before the sentence."""


class UserError(Exception):
    """Something outside ECHO-2 must change: a setting, a file, a token, a machine."""


def reason_of(error: BaseException) -> str:
    """What to tell others of an error that ended something: the sentence where it has one."""
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


class ConfigError(UserError):
    """A configuration that cannot be read, has unknown keys, or cannot work; the message holds the numbers that clash."""


class DiskError(UserError):
    """Something that its disk does not take, most often since it is full; what was written before it is whole."""


class WaitTimeout(UserError):
    """A bounded wait ended without its event; the message names who was waited for and for how long."""


class NameTaken(UserError):
    """A worker's name that another process has registered meanwhile."""


class InUse(UserError):
    """Another process holds what only one may hold at a time."""


class SnapshotError(UserError):
    """A snapshot that cannot be used: damaged, incomplete, forged, or of another run."""
