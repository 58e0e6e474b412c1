"""The Python examples in the documentation run as they stand, in their order."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page.relative_to(ROOT)
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    if "\n```python\n" in page.read_text(encoding="utf-8")
)


def test_examples_are_found() -> None:
    assert {Path("README.md"), Path("docs/api.md")} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), names)  # line numbers are the page's
