"""scripts/prose: which sentences it finds, and that the pages and the help have none of them."""

import pytest

from tests.programs import python, script

pytestmark = pytest.mark.unit

GOOD = """# A page

The normal case comes first: a short sentence. `what is code is` not read, nor is "as such".

```text
What is in a block is left alone, and goes on and on.
```

* What else is there? Everything else, such as a list.
"""


def found_in(text):
    """Return the habits that are found in a page."""
    prose = script("prose")
    return [habit for _, habit, _ in prose.found(prose.page(text))]


def test_a_good_page_passes():
    assert found_in(GOOD) == []


@pytest.mark.parametrize(
    ("sentence", "habit"),
    [
        ("What was asked for is set before\nTensorFlow starts.", "a what-clause as a subject"),
        ("What no rule covers is reported.", "a what-clause as a subject"),
        ("A callback of others, as W&B, works.", ""),
        ("Callbacks of others, as loggers, work.", "as, for such as"),
        ("Functions are given as such.", "as such"),
        ("A killed run goes on.", "goes on, for resumes or continues"),
        ("Variables of which nothing is known.", "of which nothing"),
        ("The batch is read anew.", "anew, for again"),
        ("If not, a line says so.", "a line, for a message"),
        ("Returned is the result.", "the verb before its subject"),
        ("Data are there, else they are downloaded.", "else, for otherwise"),
        ("Images are standardised.", "British spelling"),
        ("The colour of a tower.", "British spelling"),
        ("It waits: it is full. It ends: nobody asks.", "several colons for conjunctions"),
        ("One two three four five six. " * 9, ""),
        ("one two three four five six " * 6, "36 words in a sentence"),
    ],
)
def test_a_habit_is_found(sentence, habit):
    assert found_in(f"# A page\n\n{sentence}\n") == [habit][: bool(habit)]


def test_docstrings_are_read_without_code_and_names(tmp_path):
    prose = script("prose")
    source = '''
def f(x):
    """Return x anew.

        what is code is = f(x)  # and goes on

    Args:
        x: the colour of a tower.
            It goes on.
    """
'''
    found = [
        (number, habit.partition(",")[0])
        for number, habit, _ in prose.found(prose.docstrings(source))
    ]
    assert found == [(3, "anew"), (8, "goes on"), (8, "British spelling")]


def test_help_is_read_without_flags_and_values():
    prose = script("prose")
    text = "usage: towers goes on\n  --anew=as   Read it anew.\n" + " " * 34 + "else: what it is\n"
    assert [found[:2] for found in prose.found(prose.help_text(text))] == [(2, "anew, for again")]


@pytest.mark.process
def test_everything_that_is_shown_to_users_passes():
    done = python("scripts/prose")
    assert done.returncode == 0 and done.stdout == "", done.stdout


@pytest.mark.process
def test_a_page_with_a_habit_ends_with_code_1(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nIt is\nread anew.\n")
    done = python("scripts/prose", str(page))
    assert done.returncode == 1 and done.stdout == f"{page}:3: anew, for again: anew\n"
    assert len(script("prose").ALLOWED) <= 20
