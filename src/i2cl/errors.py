"""The one exception a user is meant to read."""


class I2CLError(ValueError):
    """Bad input or an impossible request, in one line that names the cure.

    The command line prints the message without a traceback and exits with code 2.
    """
