"""Pages: self-contained HTML files that fetch nothing, from Jinja2 templates that escape every text.

A template extends `display/page.html` and imports `display/macros.html`; its name is its path in the package. Texts
come from files that are not ours to trust: autoescape is on, and the content security policy of a page allows its own
scripts, by their hashes, and no request.
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


def render(template: str, *, scripts: Sequence[str] = (), **values: Any) -> str:
    """The page that the template makes of these values; `scripts` are put at its end."""
    return str(_environment().get_template(template).render(policy=_policy(scripts), scripts=scripts, **values))


@cache
def _environment() -> Any:
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("onlynorm", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters.update(number=number, seconds=seconds, anchor=anchor, value=value)
    made.globals["css"] = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return made


def _policy(scripts: Sequence[str]) -> str:
    """No request may leave the page, and only the scripts we put there may run, whatever its texts say."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    allowed = f"script-src {hashes}; " if scripts else ""
    return f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def anchor(*parts: str) -> str:
    """A fragment identifier made of letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-") or "item"


def number(value: float | int | str | None) -> str:
    """A number with four digits, as a reader wants it; text stays text."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": "∞", "-inf": "−∞"}.get(str(value), "NaN")
    return (f"{value:,}" if isinstance(value, int) else f"{value:.4g}").replace("-", "−", 1 if value < 0 else 0)


def seconds(value: float) -> str:
    """A duration a reader can compare at a glance."""
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def value(given: Any) -> str:
    """A setting as text; several are separated by commas."""
    if isinstance(given, list | tuple):
        return ", ".join(value(item) for item in given)
    return f"{given:g}" if isinstance(given, float) else str(given)
