"""The texts in docs/troubleshooting.md are those of the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
NOT_OURS = {"invalid choice: 'mok'", "MoKTimeoutError"}


def python_texts(path):
    """String literals of a module, "..." for what is put into them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(p.value if isinstance(p, ast.Constant) else "..." for p in node.values)


def native_texts(path):
    """String literals of a C++ source, each expression that adds some to others in one."""
    literal = r'"((?:[^"\\\n]|\\.)*)"'
    joined = re.compile(rf"{literal}(?:[^;\"]*?\+?\s*{literal})*")
    for match in joined.finditer(path.read_text()):
        yield "...".join(re.findall(literal, match[0]))


def quoted_texts():
    """The texts in the first column of each table."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `") or line.startswith("| text"):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[0])


@pytest.fixture(scope="module")
def texts_of_the_code():
    texts = [t for p in (ROOT / "megatron_mok").rglob("*.py") for t in python_texts(p)]
    for pattern in ("*.cpp", "*.cu", "*.h", "*.cuh"):
        texts += [t for p in (ROOT / "csrc").rglob(pattern) for t in native_texts(p)]
    return "\n".join(texts)


def test_documented_texts_exist(texts_of_the_code):
    texts = set(quoted_texts()) - NOT_OURS
    assert len(texts) > 30
    missing = [
        text
        for text in sorted(texts)
        if not all(part.strip() in texts_of_the_code for part in text.split("..."))
    ]
    assert missing == []


def test_links_lead_somewhere():
    for path in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]*)(?:#[^)]*)?\)", path.read_text()):
            assert not target or (path.parent / target).exists(), f"{path.name}: {target}"


def test_anchors_are_headings():
    for path in (ROOT / "docs").glob("*.md"):
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", path.read_text()):
            page = (path.parent / target if target else path).read_text()
            headings = re.findall(r"^#+ (.*)$", page, re.M)
            names = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in names, f"{path.name}: {target}#{anchor}"
