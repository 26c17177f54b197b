"""The pages for readers: their links lead somewhere, and the table of options in README.md is the code's.

``pytest tests/test_docs.py --update-golden`` writes the table anew. The tour's own test is test_tour.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hotloop.config import Config, options

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/tour.md", "docs/numerics.md"]


def configuration_table() -> list[str]:
    """The table of options in Markdown."""
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for name, option in options().items():
        default = "the user's cache folder" if name == "cache_dir" else f"`{Config().get(name)!r}`"
        later = "; **no effect yet**" if not option.used else ""
        doc = option.doc.rstrip(".").replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
        lines.append(f"| `{name}` | {default} | {doc}{later} |")
    return lines


def test_readme_lists_the_options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "README.md"
    page = path.read_text(encoding="utf-8").split("\n")
    start = page.index("| option | default | what it does |")
    end = page.index("", start)
    if request.config.getoption("--update-golden"):
        path.write_text("\n".join(page[:start] + configuration_table() + page[end:]), encoding="utf-8")
        return
    assert page[start:end] == configuration_table()


def test_options_without_effect_are_named_as_such() -> None:
    """Every option is either read somewhere in the compiler, or declared as one that has no effect yet."""
    folder = ROOT / "src" / "hotloop"
    text = "\n".join(p.read_text(encoding="utf-8") for p in folder.rglob("*.py") if p.name != "config.py")
    unread = {name for name in options() if not re.search(rf"config\.{re.escape(name)}\b", text)}
    assert unread == {name for name, option in options().items() if not option.used}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


def test_numerics_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", text)
    assert len(named) > 30
    file = ""
    for path, test in named:
        file = path or file
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_the_map_of_the_project_names_what_is_there() -> None:
    """Each module of the package appears in CONTRIBUTING.md or in docs/architecture.md."""
    pages = ("CONTRIBUTING.md", "docs/architecture.md")
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    modules = [p for kind in ("*.py", "*.h") for p in (ROOT / "src" / "hotloop").rglob(kind)]
    assert modules
    assert not [str(p) for p in modules if p.name != "__init__.py" and p.name not in text]
