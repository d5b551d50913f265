"""Errors that name the thing and the fix, for the user to read."""

import re


class EagleError(ValueError):
    """Report bad input in one line: what is wrong, with which value, and what to do."""


class HeadError(EagleError):
    """Report a head checkpoint that cannot be read or does not fit its target."""


class TreeError(EagleError):
    """Report a draft tree outside its limits or with a broken structure."""


def last_error(report: str) -> str:
    """Return the error that a report ends with, where tracebacks of several processes stand in one text."""
    errors = re.findall(r"^(?:\x1b\[\d+m)?((?:\w+\.)*\w*(?:Error|Exception)\b: .*)", report, re.M)
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    return str(errors[-1] if errors else lines[-1] if lines else "no reason given")
