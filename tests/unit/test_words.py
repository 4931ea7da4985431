"""Texts use the words of the glossary, not those that it replaces."""

import pytest
import words


def test_no_checked_file_has_a_retired_word():
    found = [each for each in words.findings(words.CHECKED) if each[::2][:2] not in words.ALLOWED]
    assert [f"{file}:{line}: {word!r}: write {use}" for file, line, word, use in found] == []


def test_each_allowance_is_used():
    files = {file for file, _ in words.ALLOWED}
    found = {(file, word) for file, _, word, _ in words.findings(sorted(files))}
    assert set(words.ALLOWED) - found == set()


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("page.md", "The sender\nis told of it.", 2),
        ("page.md", "A start that fails says\nso at once.", 1),
        ("module.py", "# The state\n# of\n# before.\n", 2),
        ("module.py", "def _nobody_waits(): ...\n", 1),
        ("module.py", "class LookNobody: ...\n", 1),
    ],
)
def test_a_retired_word_is_found_across_lines_and_in_names(tmp_path, monkeypatch, name, text, line):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / name).write_text(text)
    assert [(file, number) for file, number, _, _ in words.findings([name])] == [(name, line)]


def test_code_in_a_page_and_addresses_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("`nobody`, [a page](mend.md)\n```\nnobody\n```\n")
    assert list(words.findings(["page.md"])) == []
