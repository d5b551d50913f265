"""Errors that name the thing and the fix, for the user to read."""


class EagleError(ValueError):
    """Report bad input in one line: what is wrong, with which value, and what to do."""


class HeadError(EagleError):
    """Report a head checkpoint that cannot be read or does not fit its target."""


class TreeError(EagleError):
    """Report a draft tree outside its limits or with a broken structure."""
