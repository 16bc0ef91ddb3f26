"""Reads a table in a text file: `--dataset=FILE.csv`, or `--dataset=TRAIN.csv,TEST.csv`.

    area,rooms,price
    80,3,250.5

The first line names the columns. The last one, or those of `--target=price,...`, are the target;
all others are features, one float32 `[F]`. A column of `--categories` becomes a 0 or 1 for each of
its texts in the training examples. A target is classes if it is one column of texts, or of whole
numbers from 0 to 999; else it is numbers, float32 `[T]`.
"""

import csv
import dataclasses
import itertools
from collections.abc import Sequence, Set

import numpy as np

from towers import files
from towers.data import user_data
from towers.data.pipeline import Data
from towers.errors import InputError
from towers.formatting import first_of, is_number

_MAX_CLASSES = 1000
_MAX_LINE = 2**24  # characters
_FIRST_LINE = "the first line names the columns, with commas between them"
_MISSING = {"", "NA", "N/A", "NaN", "nan", "n/a", "NULL", "null", "None", "?", "-"}  # numbers
_COMMAS = "write commas between them"
_OWN_CODE = "read the file in a function of your own, --dataset=my_data:load"


def load(dataset: str, paths: Sequence[str], target: str, categories: str) -> Data:
    """Read the table of one file, or those of the training and the test set.

    Args:
        dataset: the value of --dataset.
        paths: of one or two files.
        target: the names of the target columns, with commas; "": the last one.
        categories: the names of feature columns that are categories, with commas.

    Raises:
        InputError: a file cannot be read, or is no such table; the cell is named.
    """
    tables = [CsvTable(path) for path in paths]
    train, names = tables[0], tables[0].names
    for table in tables:
        table.check_names()
        if different := sorted(set(table.names) ^ set(names)):
            raise InputError(
                f"{table.path} and {paths[0]} do not have the same columns: {different[0]!r} is in "
                "one of them alone; make them alike"
            )
    targets = list(dict.fromkeys(map(str.strip, target.split(",")) if target else names[-1:]))
    for name in targets:
        if name not in train.places:
            raise InputError(
                f"--target={target}: {paths[0]} has no column {name!r}; it has {first_of(names)}"
            )
    features = [name for name in names if name not in targets]
    if not features:
        raise InputError(f"{paths[0]} has no column but the target: 2 or more are needed")
    of_categories = {}
    for name in filter(None, map(str.strip, categories.split(","))):
        clash = [other for other in features if other.startswith(f"{name}=")]
        if name in targets:
            raise InputError(
                f"--categories={categories}: {name} is the target, whose texts are classes without "
                "it: leave it out, or name another target by --target"
            )
        if name not in features or clash:
            has = f"a column {clash[0]!r}" if clash else f"no feature {name!r}"
            raise InputError(
                f"--categories={categories}: {paths[0]} has {has}; it has {first_of(features)}"
            )
        of_categories[name] = [f"{name}={text}" for text in train._texts(name, "category")]
    others = [name for name in features if name not in of_categories]
    if texts := [name for name in others if not any(map(is_number, train.column(name)))]:
        cell = train.column(texts[0])[0]
        raise InputError(
            f"{train.path}, line {train.lines[0]}, column {texts[0]}: {cell!r} is text, and "
            f"features are numbers; type --categories={','.join([*of_categories, *texts])}, leave "
            f"the column out, write numbers in it, or {_OWN_CODE}"
        )
    columns = [column for name in features for column in of_categories.get(name, [name])]
    y, class_names, no_classes = _targets(tables, targets)
    notes = [
        f"categories  {name}: {first_of([repr(text[len(name) + 1 :]) for text in texts])}"
        for name, texts in of_categories.items()
    ]
    if absent := np.setdiff1d(range(len(class_names)), np.concatenate(y)).tolist():
        notes.append(
            f"note        {targets[0]} has the classes 0..{len(class_names) - 1}, and no example "
            f"of {first_of(list(map(str, absent)))}"
        )
    x = [table.features(columns, of_categories) for table in tables]
    splits = dict(zip(("train", "test"), zip(x, y, strict=True), strict=False))
    data = user_data.data_set(dataset, splits, len(class_names) or None, class_names)
    held_out = [f"{note}; --dataset={paths[0]},TEST.csv gives one" for note in data.notes]
    notes = (*held_out, *notes)
    return dataclasses.replace(data, columns=tuple(columns), no_classes=no_classes, notes=notes)


def _targets(
    tables: Sequence["CsvTable"], names: Sequence[str]
) -> tuple[list[np.ndarray], list[str], str]:
    # Each table's targets, the names of the classes, and why numbers are no classes, or "".
    name = names[0]
    if len(names) == 1 and not is_number(tables[0].column(name)[0]):
        texts = tables[0]._texts(name, "target")
        return [table._index(name, texts) for table in tables], texts, ""
    y = [np.stack([table.numbers(name) for name in names], axis=1) for table in tables]
    cells = [(table, i, cell) for table in tables for i, cell in enumerate(table.column(name))]
    if len(names) > 1:
        return y, [], ""
    if broken := next((cell for cell in cells if not float(cell[2]).is_integer()), None):
        table, i, cell = broken
        where = f"{table.path}, line {table.lines[i]}, column {name} is {cell}"
        classes = f"where classes are texts or whole numbers from 0 to {_MAX_CLASSES - 1}"
        return y, [], f"{where}, {classes}: name another column by --target"
    if not all(cell.isdecimal() for *_, cell in cells):
        return y, [], ""
    largest, table, row = max((int(each.max()), i, int(each.argmax())) for i, each in enumerate(y))
    if largest < _MAX_CLASSES:
        return [each[:, 0].astype(np.int32) for each in y], list(map(str, range(largest + 1))), ""
    where = f"{tables[table].path}, line {tables[table].lines[row]}, column {name}"
    allowed = f"where classes are 0..{_MAX_CLASSES - 1}: name another column by --target, mend it"
    allowed += f", or {_OWN_CODE}"
    return y, [], f"{where} is {largest}, {allowed}"


class CsvTable:
    """The cells of a file, as text; `lines` has the line number of each row, from 1."""

    def __init__(self, path: str):
        """Read a file; an InputError names a line that is no row of the table."""
        self.path, self._rows, self.lines = path, [], []
        try:
            files.check_is_file(path)
            with open(path, newline="", encoding="utf-8-sig") as file:
                # Without a limit a line without end would use up the memory.
                lines = iter(lambda: self._check_length(file.readline(_MAX_LINE)), "")
                first, begin = next(lines, ""), 1
                for other in ";", "\t":
                    if other in first and "," not in first:
                        raise InputError(f"{path}: its cells are separated by {other!r}; {_COMMAS}")
                rows = csv.reader(itertools.chain([first], lines), strict=True)
                self.names = [name.strip() for name in next(rows, [])]
                begin = rows.line_num + 1
                if not self.names:
                    empty = ": its first line is empty" if first else " is empty"
                    raise InputError(f"{path}{empty}; {_FIRST_LINE}")
                if all(map(is_number, self.names)):
                    problem = f"the first line is numbers, {first_of(self.names)}"
                    raise InputError(f"{path}: {problem}; {_FIRST_LINE}")
                for row in filter(None, rows):  # an empty line is none
                    self._rows.append(row)
                    self.lines.append(rows.line_num)
                    begin = rows.line_num + 1
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"{path} is no text in UTF-8; write it as such") from None
        except csv.Error as error:
            line = begin if "end of data" in str(error) else rows.line_num
            raise InputError(f"{path}, line {line}: {error}; mend the quotes") from None
        self.places = {name: place for place, name in enumerate(self.names)}
        if not self._rows:
            raise InputError(f"{path} has no rows below its first line; give 1 or more")
        for line, row in zip(self.lines, self._rows, strict=True):
            if len(row) != len(self.names):
                raise InputError(
                    f"{path}, line {line} has {len(row)} cells, but the first line names "
                    f"{len(self.names)} columns; write as many"
                )

    def _check_length(self, line: str) -> str:
        if len(line) == _MAX_LINE:
            raise InputError(
                f"{self.path} has a line of {_MAX_LINE:,} characters or more: no table of that "
                "many columns is read; break it into lines"
            )
        return line

    def check_names(self) -> None:
        """Raise InputError for a column without a name, two of one name, or a single column."""
        if self.names[0] == "" and "" not in self.names[1:]:
            raise InputError(
                f"{self.path}: the first column has no name, as an index of pandas: write the file "
                "by to_csv(..., index=False), or name it"
            )
        if "" in self.names:
            raise InputError(f"{self.path}: a column has no name; {_FIRST_LINE}")
        twice = [n for place, n in enumerate(self.names) if self.places[n] != place]
        if twice:
            raise InputError(
                f"{self.path} has two columns {twice[0]!r}; give each a name of its own"
            )
        if len(self.names) == 1:
            raise InputError(f"{self.path} has one column, {self.names[0]!r}; {_FIRST_LINE}")

    def column(self, name: str) -> list[str]:
        """Return the cells of a column; raise InputError if it is missing or a cell is empty."""
        if name not in self.places:
            raise InputError(f"{self.path} has no column {name}; it has {first_of(self.names)}")
        cells = [row[self.places[name]].strip() for row in self._rows]
        if "" in cells:
            raise self._missing(name, cells.index(""), {""})
        return cells

    def _missing(self, name: str, place: int, texts: Set[str]) -> InputError:
        # The error for a cell that has no value, as one of the texts says.
        rows = sum(not texts.isdisjoint(map(str.strip, row)) for row in self._rows)
        cell = self._rows[place][self.places[name]].strip()
        return InputError(
            f"{self.path}, line {self.lines[place]}: the cell of column {name} is "
            f"{repr(cell) if cell else 'empty'}, and {rows:,} of {len(self._rows):,} rows have "
            "such cells: fill them in (a feature by the column's mean, or by a text that training "
            "has, too), or leave these rows out"
        )

    def _texts(self, name: str, role: str) -> list[str]:
        distinct = sorted(set(self.column(name)))
        if len(distinct) > _MAX_CLASSES:
            raise InputError(
                f"{self.path}: the {role} {name} has {len(distinct)} different texts, and "
                f"{_MAX_CLASSES} are allowed; name another column, as --target={self.names[0]}"
            )
        return distinct

    def _index(self, name: str, known: Sequence[str]) -> np.ndarray:
        # The index of each of a column's texts in `known`, int32 [N].
        places, cells = {text: i for i, text in enumerate(known)}, self.column(name)
        for line, cell in zip(self.lines, cells, strict=True):
            if cell not in places:
                raise InputError(
                    f"{self.path}, line {line}, column {name}: {cell!r} is in none of the training "
                    f"examples; they have {first_of([*map(repr, known)])}: write one of them, or "
                    "leave the row out"
                )
        return np.array([places[cell] for cell in cells], np.int32)

    def features(self, columns: Sequence[str], categories: Sequence[str]) -> np.ndarray:
        """Return columns of numbers, float64 `[N, F]`.

        Args:
            columns: their F names; "city=Oslo" is 1 where the category city is Oslo, else 0.
            categories: the columns that are categories.

        Raises:
            InputError: a column is missing, or a cell is empty, no finite number, or a text that
                `columns` do not name.
        """
        indicators = {}
        for name in categories:
            known = [column for column in columns if column.startswith(f"{name}=")]
            places = self._index(name, [column[len(name) + 1 :] for column in known])
            indicators |= {column: places == i for i, column in enumerate(known)}
        parts = [indicators[name] if name in indicators else self.numbers(name) for name in columns]
        return np.stack(parts, axis=1, dtype=np.float64)

    def numbers(self, name: str) -> np.ndarray:
        """Return a column of finite numbers, float64 `[N]`."""
        cells = self.column(name)
        values = np.array([float(cell) if is_number(cell) else np.nan for cell in cells])
        wrong = np.flatnonzero(~np.isfinite(values))
        if not wrong.size:
            return values
        if cells[wrong[0]] in _MISSING:
            raise self._missing(name, wrong[0], _MISSING)
        raise InputError(
            f"{self.path}, line {self.lines[wrong[0]]}, column {name}: {cells[wrong[0]]!r} is no "
            "finite number; mend it"
        )
