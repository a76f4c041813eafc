"""From what a user types into the search box to SQL: every word must occur, as typed, in any case and any place.

Words may hold any character: nothing in them is read as query syntax. The trigram index answers words of three
characters and more; shorter ones are compared row by row.
"""

from dataclasses import dataclass

from storage.rows import clean_text

_MAX_WORDS = 16
_MAX_WORD_LENGTH = 200
_INDEXED_LENGTH = 3

_BY_INDEX = """(
    comparisons.number IN (SELECT rowid FROM comparisons_fts WHERE comparisons_fts MATCH :{name})
    OR comparisons.id IN (SELECT comparison_id FROM runs
        WHERE number IN (SELECT rowid FROM runs_fts WHERE runs_fts MATCH :{name})))"""
_BY_ROW = """(
    comparisons.title LIKE :{name} ESCAPE '\\' OR comparisons.prompt LIKE :{name} ESCAPE '\\'
    OR comparisons.id IN (SELECT comparison_id FROM runs WHERE answer LIKE :{name} ESCAPE '\\'))"""


@dataclass(frozen=True, slots=True)
class Condition:
    """A piece of SQL for a WHERE clause over `comparisons`, with its named parameters."""

    sql: str
    parameters: dict[str, str]


def search_conditions(text: str) -> list[Condition]:
    """One condition per word of the text; the first words count if there are very many."""
    words = clean_text(text).replace("\0", " ").split()[:_MAX_WORDS]
    return [_word_condition(f"word_{place}", word[:_MAX_WORD_LENGTH]) for place, word in enumerate(words)]


def _word_condition(name: str, word: str) -> Condition:
    if len(word) >= _INDEXED_LENGTH:
        quoted = '"' + word.replace('"', '""') + '"'
        return Condition(_BY_INDEX.format(name=name), {name: quoted})
    escaped = word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return Condition(_BY_ROW.format(name=name), {name: f"%{escaped}%"})
