"""Small pieces of HTML; every text goes through `escape`, because records are not ours to trust."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TONES = {
    "reproduced": ("good", "✓"),
    "with a caveat": ("warn", "~"),
    "not reproduced": ("bad", "✕"),
}


def escape(text: object) -> str:
    """Text as HTML text or attribute value."""
    return html.escape(str(text), quote=True)


def anchor(*parts: str) -> str:
    """A fragment identifier made of letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-") or "item"


def number(value: float | int | str | None) -> str:
    """A number with four digits, as a reader wants it; text stays text."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": "∞", "-inf": "−∞"}.get(str(value), "NaN")
    return escape(f"{value:,}" if isinstance(value, int) else f"{value:.4g}").replace("-", "−", 1 if value < 0 else 0)


def seconds(value: float) -> str:
    """A duration a reader can compare at a glance."""
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def chip(verdict: str, tones: Mapping[str, tuple[str, str]] = TONES) -> str:
    """A verdict in its colour and with its sign, so that it does not depend on the colour."""
    tone, sign = tones.get(verdict, ("", "·"))
    return f'<span class="chip {tone}">{sign} {escape(verdict)}</span>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Iterable[int] = ()) -> str:
    """A table of cells that are HTML already; `numeric` columns are set to the right."""
    right = set(numeric)
    mark = [' class="number"' if place in right else "" for place in range(len(columns))]
    head = "".join(f"<th{mark[place]}>{escape(name)}</th>" for place, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{mark[place]}>{cell}</td>" for place, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def definitions(pairs: Mapping[str, Any]) -> str:
    """Names and what they are, in two columns."""
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{_value(v)}</dd>" for k, v in pairs.items()) + "</dl>"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_value(item) for item in value)
    if isinstance(value, bool) or value is None or not isinstance(value, int | float | str):
        return escape(value)
    return escape(value if isinstance(value, str | int) else f"{value:g}")


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
