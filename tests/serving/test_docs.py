"""docs/serving.md: what its programs print."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_programs_print_what_the_page_says(capsys):
    programs = re.findall(r"```python\n([^`]*)```\n\n```text\n([^`]*)```", PAGE)
    assert programs
    for program, printed in programs:
        exec(compile(program, "docs/serving.md", "exec"), {})
        assert capsys.readouterr().out == printed
