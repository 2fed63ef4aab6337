"""The formats of strings that schemas may ask for, as regular expressions.

The engine has its own for strings of JSON; these are for strings that are written without quotes.
"""

from __future__ import annotations

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    r"(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|" + _LEAP + "-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_WORD = "[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    [rf"(?:{_WORD}:){{7}}{_WORD}", rf"(?:{_WORD}:){{1,7}}:", rf":(?::{_WORD}){{1,7}}", "::"]
    + [rf"(?:{_WORD}:){{1,{n}}}(?::{_WORD}){{1,{7 - n}}}" for n in range(1, 7)]
)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?\^_`{|}~\-]+"
_PLAIN = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"

FORMATS: dict[str, str] = {
    "date-time": f"{_DATE}T{_TIME}",
    "time": _TIME,
    "date": _DATE,
    "duration": (
        r"P(?:(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
        r"(?:T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S))?"
        r"|T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)|[0-9]+W)"
    ),
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": f"(?:{_IPV6})",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": rf"[A-Za-z][A-Za-z0-9+\-.]*:(?://(?:{_PLAIN})*)?(?:{_PLAIN}|/)*(?:\?(?:{_PLAIN}|[/?])*)?(?:#(?:{_PLAIN}|[/?])*)?",
}
"""By name: RFC 3339 (dates, times; years from 1 and no leap seconds; durations), RFC 5321 and 1123
(addresses and names of hosts), RFC 2673 and 4291 (IP), RFC 4122, RFC 3986 (without hosts in
brackets, and without telling the parts of an authority apart). How long names may be as a whole is not
counted. Each matches from end to end."""
