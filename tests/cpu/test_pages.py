"""The pages are true: Python runs, commands exist, quotes are verbatim, what is generated is current."""

import ast
import importlib.util
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL = {"sh", "console", "bash", "shell"}
LINK = re.compile(r"\[[^]]*\]\(([^)#\s]+)(#[^)\s]*)?\)")


def blocks(page: Path, languages: set[str]) -> Iterator[tuple[int, str]]:
    """Fenced blocks of a page: the line each begins at, and its text."""
    text = page.read_text()
    for match in FENCE.finditer(text):
        if match[2] in languages:
            yield text.count("\n", 0, match.start(3)), textwrap.dedent(match[3])


def commands(page: Path) -> Iterator[str]:
    """Commands of the page's shell blocks, and those of freight and just that its text names."""
    for _, block in blocks(page, SHELL):
        lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
        prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        yield from prompted or [line for line in lines if line and not line.startswith("#")]
    yield from re.findall(r"`((?:freight|just)(?: [^`\n]+)?)`", FENCE.sub("", page.read_text()))


def named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, {"python"}))], ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, in order, in one namespace, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, block in blocks(page, {"python"}):
        code = compile("\n" * line + block, str(page), "exec")  # so that a traceback shows the page's own line
        exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    recipes = set(re.findall(r"^([a-z]\w*)[^:=\n]*:(?!=)", (ROOT / "justfile").read_text(), re.MULTILINE))
    options = freight_options()
    for command in commands(page):
        words = shlex.split(command, comments=True)
        if words[0] == "just" and len(words) > 1:
            assert words[1] in recipes, command
        if words[0] == "freight" and len(words) > 1 and not words[1].startswith("-"):
            assert words[1] in options, command
            asked = [word.partition("=")[0].strip("[]") for word in words[2:] if word.strip("[").startswith("--")]
            assert set(asked) <= options[words[1]], command


def freight_options() -> dict[str, set[str]]:
    """The commands of `freight` and the options of each."""
    import typer.main

    from freight.cli import app

    group = typer.main.get_command(app)
    return {
        name: {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    inside = [target for target, _ in LINK.findall(text) if not target.startswith(("http://", "https://", "mailto:"))]
    assert [target for target in inside if not (page.parent / target).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES if (ROOT / "docs") in page.parents}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "tools" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_generated_is_current() -> None:
    """Where this fails, run `just generate`."""
    generate = generator()
    assert named(generate.pages()) == ["docs/configuration.md"]
    for page in generate.pages():
        assert generate.fill(page.read_text()) == page.read_text(), page.name


def test_every_setting_is_documented_once() -> None:
    from freight._config import _names, variable

    page = (ROOT / "docs" / "configuration.md").read_text()
    assert {name: page.count(f"`{variable(name)}`") for name in _names()} == dict.fromkeys(_names(), 1)


def messages() -> list[str]:
    """Every text in the source, with … for what is filled in."""
    found = []
    for path in sorted((ROOT / "src").glob("freight/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


QUOTES = [block.strip() for _, block in blocks(ROOT / "docs" / "troubleshooting.md", {"text"})]


def test_messages_are_quoted() -> None:
    assert len(QUOTES) >= 10


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: quote[:40])
def test_message_is_verbatim(quote: str) -> None:
    quote = " ".join(quote.split())
    assert any(quote in message for message in messages()), quote
