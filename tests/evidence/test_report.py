"""Records become one HTML file that fetches nothing and trusts nobody."""

from __future__ import annotations

import dataclasses
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from toy_records import HOSTILE, make_record

from onlynorm.display import Curve, Figure, Panel, Table
from onlynorm.display.page import anchor, number, seconds
from onlynorm.errors import FormatError, MissingDataError, ValueRangeError
from onlynorm.evidence.records import (
    RECORD,
    Check,
    PieceNote,
    RecordVerdict,
    read_record,
    read_records,
    write_record,
)
from onlynorm.evidence.registry import Finding, Verdict, statements
from onlynorm.evidence.report.page import STATEMENT_TONES, TONES, render_page, write_report
from onlynorm.storage import digest, read_sealed, write_sealed


class Outline(HTMLParser):
    """What a browser would see: tags with attributes, and the text of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for tag, attrs in self.tags if tag == name]


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = make_record(checks=make_record().checks[:2], curves=make_record().curves[2:])
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json") == record


def test_non_finite_numbers_survive_a_file(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", make_record())
    again = read_record(tmp_path / "record.json")
    assert math.isnan(again.curves[1].y[-1])
    assert math.isnan(again.checks[2].ours or 0.0)
    assert again.table is not None
    assert again.table.rows[1][1] == math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("verdict", "splendid"),
        ("title", 3),
        ("reasons", "one text"),
        ("reasons", [1]),
        ("checks", [{"name": "a"}]),
        ("curves", [{"label": "a", "x": [1], "y": [1, 2], "kind": "line", "panel": "", "style": "data"}]),
        ("curves", [{"label": "a", "x": ["b"], "y": ["c"], "kind": "line", "panel": "", "style": "data"}]),
        ("curves", ["a"]),
        ("values", {"a": "b"}),
        ("values", []),
        ("sizes", None),
        ("seconds", True),
        ("table", {"columns": ["a"], "rows": [[1, 2]]}),
        ("panels", [{"name": "a", "x_log": 1}]),
        ("seeds", ["x"]),
        ("seeds", ["1"]),
        ("seeds", [1.5]),
        ("values", {"a": 10**400}),
        ("curves", [{"label": "a", "x": "123", "y": "456", "kind": "line", "panel": "", "style": "data"}]),
        ("checks", "abc"),
        ("table", {"columns": ["a", "b"], "rows": ["xy"]}),
        ("versions", {"torch": 2}),
        ("platform", {"threads": [1]}),
    ],
)
def test_a_record_with_a_wrong_field_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "record.json"
    write_record(path, make_record())
    body = read_sealed(path, kind=RECORD)
    write_sealed(path, body | {field: value}, kind=RECORD)
    with pytest.raises(FormatError, match="record"):
        read_record(path)


def test_a_record_without_a_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, make_record())
    body = read_sealed(path, kind=RECORD)
    del body["claim"]
    write_sealed(path, body, kind=RECORD)
    with pytest.raises(FormatError, match="needs all fields"):
        read_record(path)


def test_a_folder_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="onlynorm reproduce"):
        read_records(tmp_path / "nowhere")
    assert read_records(tmp_path) == ()


def test_an_empty_report_says_so(tmp_path: Path) -> None:
    assert "No records yet" in write_report(tmp_path, tmp_path / "report.html").read_text()


def test_a_curve_counts_its_points() -> None:
    with pytest.raises(ValueRangeError, match="needs 3 x for its 2 y; got 2"):
        Curve("a", [0, 1], [1, 2], kind="histogram")
    with pytest.raises(ValueRangeError, match="needs kind in"):
        Curve("a", [0], [1], kind="pie")  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match="needs 2 cells; got 1"):
        Table(["a", "b"], [[1]])


def test_the_page_shows_claim_verdict_reasons_and_both_numbers() -> None:
    page = render_page([make_record()])
    for text in (
        "Squares grow.",
        "with a caveat",
        "Quick scale.",
        "2.01",
        "2 ± 0.1",
        "missing",
        "torch 2.0",
        "k=1",
    ):
        assert text in page
    outline = Outline(page)
    anchors = {attrs.get("id") for _, attrs in outline.tags}
    links = [attrs["href"] or "" for attrs in outline.all("a")]
    assert links
    assert all(link.startswith("#") and link[1:] in anchors for link in links)


def test_the_page_asks_for_nothing_outside_itself() -> None:
    page = render_page([make_record()], statements=statements())
    outline = Outline(page)
    for tag, attrs in outline.tags:
        for name in ("src", "href", "action", "srcset", "poster", "data"):
            value = attrs.get(name) or ""
            assert not re.match(r"(?i)\s*(https?:|//|file:|ftp:)", value), (tag, name, value)
    assert not any(attrs.get("src") for attrs in outline.all("script"))
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [attrs["content"] for attrs in outline.all("meta") if "http-equiv" in attrs]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_a_plot_costs_kilobytes() -> None:
    one, two = render_page([make_record()]), render_page([make_record(), make_record(scale="paper")])
    assert len(Outline(one).all("script")) == len(Outline(two).all("script")) == 1
    assert len(two) - len(one) < 100_000


def test_text_of_a_record_cannot_become_markup() -> None:
    hostile = make_record(
        artifact=f"toy:{HOSTILE}",
        title=HOSTILE,
        claim=HOSTILE,
        kind=HOSTILE,
        scale=HOSTILE,
        reasons=(HOSTILE,),
        caveats=(HOSTILE,),
        checks=(Check(HOSTILE, 1.0, True, HOSTILE, HOSTILE, note=HOSTILE),),
        values={HOSTILE: 1.0},
        sizes={HOSTILE: HOSTILE},
        curves=(Curve(HOSTILE, [0], [1], panel=HOSTILE),),
        panels=(Panel(HOSTILE, HOSTILE, HOSTILE, HOSTILE, x_names=(HOSTILE,)),),
        table=Table([HOSTILE], [[HOSTILE]]),
        pieces=(PieceNote(HOSTILE, HOSTILE, {}, 1.0, is_reloaded=False),),
        versions={HOSTILE: HOSTILE},
        platform={HOSTILE: HOSTILE},
        code=HOSTILE,
        created=HOSTILE,
    )
    first = statements()[0]
    evil = dataclasses.replace(first, title=HOSTILE, says=HOSTILE, assumes=(HOSTILE,), slips=HOSTILE)
    finding = Finding(first.key, Verdict.HOLDS, HOSTILE, {HOSTILE: 1.0}, 0.1)
    page = render_page([hostile], statements=[evil], findings=[finding])
    assert "<script>document" not in page
    assert "<img" not in page
    outline = Outline(page)
    assert len(outline.all("script")) == 1
    assert not outline.all("img")
    assert not any(name.startswith("on") for _, attrs in outline.tags for name in attrs)


def test_the_points_of_a_curve_show_their_values_on_hover_and_gaps_none() -> None:
    root = ElementTree.fromstring(make_record().figure.inline_svg())
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "data: 0.5, 1", "data: 1.5, 4", "data: 2.5, 9", "law: 0.5, 1", "law: 1.5, 4",
        "data: 1, 1", "data: 10, 2", "data: 100, 3", "seeds: 1, 1.1", "seeds: 10, 2.1", "seeds: 100, 2.9",
    ]  # fmt: skip


def test_ink_has_the_colour_of_the_page_and_labels_are_text() -> None:
    curve = Curve("a \x00\x1b[31m\ufffe <b>&$x$", [1, 2], [1, 2], y_error=[0.1, math.nan])
    text = Figure([curve], [Panel("", "<script>", x_names=["$", "\ud800"])]).inline_svg()
    ElementTree.fromstring(text)
    assert "currentColor" in text
    assert "#222222" not in text
    assert "<script" not in text
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", text)


def test_the_same_record_gives_the_same_figure_files(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make_record(title="$x$ costs $5").figure.write(tmp_path / folder)
    for name in ("figure.png", "figure.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert make_record(curves=()).figure.write(tmp_path / "none") == ()


def test_a_figure_has_one_pair_of_axes_per_panel_that_is_used() -> None:
    record = make_record(panels=(*make_record().panels, Panel("unused")))
    assert [panel.name for panel in record.figure.used_panels] == ["left", "right"]
    figure = record.figure.draw()
    assert [axes.get_xscale() for axes in figure.axes] == ["linear", "log"]


def test_drawing_leaves_no_global_figure_behind(tmp_path: Path) -> None:
    from matplotlib import pyplot, rcParams

    before = dict(rcParams)
    make_record().figure.write(tmp_path)
    assert pyplot.get_fignums() == []
    assert dict(rcParams) == before


def test_statements_carry_their_finding_and_filters() -> None:
    one, two = statements()[:2]
    verdict = Verdict.CORRECTED
    finding = Finding(one.key, verdict, "ratio 0.97 on ten seeds", {"ratio": 0.97}, 2.0)
    page = render_page([], statements=[one, two], findings=[finding])
    outline = Outline(page)
    verdicts = [attrs["data-verdict"] for attrs in outline.all("details") if "data-verdict" in attrs]
    assert verdicts == [Verdict.CORRECTED.value, Verdict.UNCHECKED.value]
    assert [attrs["data-verdict"] for attrs in outline.all("button")] == ["", *verdicts]
    assert "ratio 0.97 on ten seeds" in page


def test_every_verdict_has_its_own_colour_and_sign() -> None:
    assert set(TONES) == {verdict.value for verdict in RecordVerdict}
    assert set(STATEMENT_TONES) == {verdict.value for verdict in Verdict}
    for tones in (TONES, STATEMENT_TONES):
        assert len(set(tones.values())) == len(tones)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (0.0123456, "0.01235"),
        (-2.5, "−2.5"),
        (1e-12, "1e-12"),
        (12000, "12,000"),
        (math.inf, "∞"),
    ],
)
def test_numbers_read_well(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_durations_and_anchors_read_well() -> None:
    assert [seconds(value) for value in (0.25, 3.14, 600, 8000)] == ["250 ms", "3.1 s", "10 min", "2.2 h"]
    assert anchor("random_features:fig-3", "quick") == "random-features-fig-3-quick"
    assert anchor("<>") == "item"


def test_equal_values_have_equal_digests_whatever_their_order() -> None:
    assert digest({"a": 1, "b": (1, 2)}) == digest({"b": [1, 2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


def test_the_legend_of_a_narrow_figure_stays_inside_it() -> None:
    curves = [Curve(f"a rather long label, number {i}", [1.0, 2.0], [1.0, 2.0]) for i in range(5)]
    figure = Figure(curves, [Panel("")]).draw()
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1


def test_names_stand_below_an_axis_of_kinds_and_come_back_from_the_file(tmp_path: Path) -> None:
    curve = Curve("error", [1.0, 2.0], [1.0, 2.0])
    record = make_record(curves=[curve], panels=[Panel("", x_names=["cost in $", "he_normal"])])
    axes = record.figure.draw().axes[0]
    assert [(t.get_position()[0], t.get_text()) for t in axes.get_xticklabels()] == [
        (1, r"cost in \$"),
        (2, "he_normal"),
    ]
    write_record(tmp_path / "record.json", record)
    assert read_record(tmp_path / "record.json").panels == tuple(record.panels)


def test_records_of_before_axes_had_names_are_read(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", make_record())
    body = read_sealed(tmp_path / "record.json", kind=RECORD)
    for panel in body["panels"]:
        del panel["x_names"]
    write_sealed(tmp_path / "record.json", body, kind=RECORD)
    assert [panel.x_names for panel in read_record(tmp_path / "record.json").panels] == [(), ()]
