"""Self-contained HTML pages from Jinja2 templates.

A template extends `display/page.html` and imports `display/macros.html`; its name is its path in the package. Texts may
come from untrusted files: autoescape is on, and the content security policy of a page forbids requests and all scripts
except its own, given by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from onlynorm.errors import visible


def render(template: str, *, scripts: Sequence[str] = (), **values: Any) -> str:
    """The HTML of a template with these values; `scripts` are added at its end.

    Examples:
        >>> from onlynorm.display import render
        >>> page = render("display/results.html", title="Empty", text="", sections=[], signs={})
        >>> "Empty" in page
        True
    """
    return str(_environment().get_template(template).render(policy=_policy(scripts), scripts=scripts, **values))


@cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("onlynorm", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=_printable,
    )  # fmt: skip
    environment.filters.update(number=number, seconds=seconds, anchor=anchor, value=value)
    for name in ("page", "notebook"):
        css = resources.files(__package__).joinpath(f"{name}.css").read_text(encoding="utf-8")
        environment.globals["css" if name == "page" else "notebook_css"] = css
    return environment


def _printable(value: Any) -> Any:
    """The value with control characters escaped if it is a text; names of modules may contain any."""
    return visible(value) if type(value) is str else value


def _policy(scripts: Sequence[str]) -> str:
    """A content security policy that forbids requests and all other scripts."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    allowed = f"script-src {hashes}; " if scripts else ""
    return f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def anchor(*parts: str) -> str:
    """A fragment identifier of lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-") or "item"


def number(value: float | int | str | None) -> str:
    """A number formatted with four significant digits; strings are returned unchanged."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": "∞", "-inf": "−∞"}.get(str(value), "NaN")
    return (f"{value:,}" if isinstance(value, int) else f"{value:.4g}").replace("-", "−", 1 if value < 0 else 0)


def seconds(value: float) -> str:
    """A duration formatted in milliseconds, seconds, minutes or hours.

    Examples:
        >>> from onlynorm.display import seconds
        >>> seconds(0.0123), seconds(75.0)
        ('12 ms', '75.0 s')
    """
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def value(given: Any) -> str:
    """A setting as text; lists are joined by commas."""
    if isinstance(given, list | tuple):
        return ", ".join(value(item) for item in given)
    if isinstance(given, bool):
        return "yes" if given else "no"
    return number(given) if isinstance(given, float | int) else str(given)
