"""Generated pages: all statements, all commands with their options, all exported names; tutorials that fail."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import onlynorm  # noqa: E402
from onlynorm.evidence import registry  # noqa: E402
from tools.docs import assemble, commands, parameters, reference, statements, tutorials  # noqa: E402

NAV = (ROOT / "properdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("paper", registry.PAPERS)
def test_the_page_of_a_paper_has_every_statement_with_verdict_and_check(paper: str) -> None:
    page = assemble.filled((ROOT / "docs" / "papers" / f"{paper}.md").read_text(encoding="utf-8"))
    ours = registry.statements(paper)
    sections = page.split("\n### ")[1:]
    assert len(sections) == len(ours)
    for statement, section in zip(ours, sections, strict=True):
        assert f"`{statement.key}`" in section
        assert f"{{#{statement.key.partition(':')[2]}}}" in section
        assert statements.recorded()[statement.key]["verdict"].capitalize() in section
        assert ("The check: " in section) == (not statement.restates)


def test_recorded_verdicts_are_those_of_all_statements() -> None:
    assert list(statements.recorded()) == [one.key for one in registry.statements()]
    assert {one["verdict"] for one in statements.recorded().values()} <= set(statements.MARKS)


def test_statements_are_linked_to_the_code_that_rests_on_them() -> None:
    assert "[`onlynorm.factorize`][onlynorm.identity.factorization.factorize.factorize]" in statements.code_of(
        "hardt_ma2017:thm-2.1"
    )
    assert sum(bool(statements.code_of(one.key)) for one in registry.statements()) > 25


def test_every_command_and_option_is_on_the_page_of_commands() -> None:
    sections = re.split(r"^#+ ", commands.commands_page(), flags=re.MULTILINE)[2:]
    everything = commands.all_commands()
    assert len(sections) == len(everything) > 20
    for (path, command, context), section in zip(everything, sections, strict=True):
        assert section.startswith(f"{path}\n")
        for parameter in command.get_params(context):
            panel = getattr(parameter, "rich_help_panel", None)
            if parameter.param_type_name == "option" and "--help" not in parameter.opts:
                assert all(f"`{option}`" in section for option in parameter.opts), (path, parameter.opts)
                assert panel is None or f"| {panel} |" in section


def test_the_reference_has_every_public_name() -> None:
    listed = {name for room in reference.ROOMS for name in reference.identifiers(room)}
    listed |= {"onlynorm.save", "onlynorm.load", "onlynorm.optim", "onlynorm.spectrum", "onlynorm.__version__"}
    assert {f"onlynorm.{name}" for name in onlynorm.__all__} <= listed
    assert all(f"reference/{room}.md" in NAV for room in reference.ROOMS)


@pytest.mark.parametrize("name", reference.callables())
def test_every_parameter_has_a_row_in_the_table_of_its_function(name: str) -> None:
    thing = reference.named(name)
    section = parameters.with_table(name, inspect.getdoc(thing)).partition("\nExamples:\n")[0].partition("\nArgs:\n")[2]
    rows = dict(re.findall(r"^    \*{0,2}(\w+): (.*)$", section, re.MULTILINE))
    assert list(rows) == [one.name for one in parameters.parameters(thing)]
    assert [key for key, meaning in rows.items() if len(meaning) < 8] == []


def test_descriptions_of_parameters_are_of_parameters() -> None:
    things = reference.callables().items()
    every = {(name, one.name) for name, thing in things for one in parameters.parameters(thing)}
    assert set(parameters.COMMON) <= {parameter for _, parameter in every}
    assert {tuple(key.split(" ")) for key in parameters.OWN} <= every


def test_descriptions_come_from_lists_and_sentences() -> None:
    text = "First.\n\n- `a`, `b`: a\n  list.\n\n`c` is the limit; it holds. Without `d`, none. `e` counts."
    sentences = parameters._SENTENCE.split(parameters._without_items(text))
    assert parameters._items(text) == {"a": "A list.", "b": "A list."}
    assert [parameters._defined(name, sentences) for name in "cde"] == ["The limit; it holds.", "", "Counts."]
    assert parameters._mentioned("d", sentences) == "Without `d`, none."


def test_every_page_is_in_the_navigation() -> None:
    docs = ROOT / "docs"
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    pages += [f"tutorials/{script.stem}.md" for script in tutorials.scripts()]
    assert [page for page in pages if f" {page}" not in NAV] == []


def test_a_script_becomes_a_page_with_its_output(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text('# %% [markdown]\n# # Title\n\n# %%\nprint("said")\n\n# %%\nx = 6\nx * 7\n', encoding="utf-8")
    tutorials.execute(script, tmp_path / "short.ipynb")
    notebook = json.loads((tmp_path / "short.ipynb").read_text(encoding="utf-8"))
    assert [cell["cell_type"] for cell in notebook["cells"]] == ["markdown", "code", "code"]
    page = tutorials.page(tutorials.nbformat.read(tmp_path / "short.ipynb", as_version=4), "short")
    assert page.startswith('# Title\n\n```python\nprint("said")\n```\n\n```text\nsaid\n```')
    assert "```text\n42\n```" in page


@pytest.mark.parametrize("line", ["raise ValueError('wrong')", "import warnings; warnings.warn('wrong')"])
def test_a_script_that_fails_or_warns_stops_the_build(line: str, tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text(f"# %%\n{line}\n", encoding="utf-8")
    with pytest.raises(tutorials.TutorialError, match=r"bad\.py failed(?s:.*)wrong"):
        tutorials.execute(script, tmp_path / "bad.ipynb")
    assert not (tmp_path / "bad.ipynb").exists()
