"""`--dataset=FILE.csv`: a table in a text file."""

import tracemalloc

import numpy as np
import pytest

from tests.data.splits import all_of, refusal
from towers import data
from towers.data import csv_file
from towers.errors import InputError

pytestmark = pytest.mark.unit

FLATS = "area,rooms,price\n" + "".join(f"{10 * i}.5,{i}, {i / 4}\n" for i in range(1, 21))


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.csv", encoding="utf-8"):
        (tmp_path / name).write_bytes(text.encode(encoding))
        return str(tmp_path / name)

    return write


def test_floats_are_regression_and_a_tenth_is_held_out(write):
    path = write("\ufeff" + FLATS.replace("\n", "\r\n"))
    loaded = data.load(path)
    assert (loaded.num_classes, loaded.train.size, loaded.test.size) == (0, 18, 2)
    assert loaded.notes[0].startswith("test set    2 of 20 examples, held out by chance")
    x, y = all_of(loaded.train)
    assert x.dtype == y.dtype == np.float32 and x.shape == (18, 2) and y.shape == (18, 1)
    np.testing.assert_array_equal(x[:, 0], x[:, 1] * 10 + 0.5)
    np.testing.assert_array_equal(y[:, 0], x[:, 1] / 4)


def test_targets_by_name_and_a_file_for_testing_whose_columns_stand_in_another_order(write):
    path, test = write(FLATS), write("price,rooms,area\n9.5,1,20\n\n1e2,2,30\n", "test.csv")
    loaded = data.load(f"{path},{test}", target="price")
    assert (loaded.train.size, loaded.notes) == (20, ())
    x, y = all_of(loaded.test)
    assert x.tolist() == [[20, 1], [30, 2]] and y.tolist() == [[9.5], [100]]
    x, y = all_of(data.load(path, target="area").train)
    np.testing.assert_array_equal(y[:, 0], x[:, 0] * 10 + 0.5)
    x, y = all_of(data.load(path, target="price,area").train)
    np.testing.assert_array_equal(y, np.concatenate([x / 4, x * 10 + 0.5], axis=1))


HOMES = 'city,kind,size,price\nOslo,1,2.5,1\nRome,10,3,2\n Oslo ,1,4,3\n"Rome, Italy",2,5,4\n'


def test_each_text_of_a_category_is_a_column(write):
    path, test = write(HOMES), write("size,price,kind,city\n1,1,2,Rome\n", "test.csv")
    loaded = data.load(f"{path},{test}", categories="kind,city")
    cities, kinds = ("Oslo", "Rome", "Rome, Italy"), (1, 10, 2)
    names = *(f"city={city}" for city in cities), *(f"kind={kind}" for kind in kinds), "size"
    assert loaded.columns == names
    x, _ = all_of(loaded.test)
    assert x.dtype == np.float32 and x.tolist() == [[0, 1, 0, 0, 0, 1, 1]]
    x, y = all_of(loaded.train)
    first = x[np.argsort(y)]
    assert first[:, :3].argmax(axis=1).tolist() == [0, 1, 0, 2]
    assert (x[:, :6].sum(axis=1) == 2).all()
    assert first[:, 6].tolist() == [2.5, 3, 4, 5]
    texts = ", ".join(map(repr, cities))
    assert loaded.notes[:2] == ("categories  kind: '1', '10', '2'", f"categories  city: {texts}")
    assert data.load(f"{path}, {test}", categories="kind, city").train.size == 4
    for test, column, text in ("Lima,1,1", "city", "'Lima'"), ("Oslo,3,1", "kind", "'3'"):
        test = write(f"city,kind,size,price\n{test},1\n", "test.csv")
        with pytest.raises(InputError, match=f"column {column}: {text} is in none of the training"):
            data.load(f"{path},{test}", categories="city,kind")


@pytest.mark.parametrize(
    "text, categories, says",
    [
        (HOMES, "town", "--categories=town: .* has no feature 'town'; it has city, kind, size"),
        (HOMES, "price", "price is the target, .*: leave it out"),
        (HOMES, "kind", "'Oslo' is text, and features are numbers; type --categories=kind,city"),
        ("a,a=1,b\n1,2,3\n4,5,6\n", "a", "has a column 'a=1'"),
        ("a,b\n" + "".join(f"t{i},{i}\n" for i in range(1001)), "a", "category a has 1001 diff"),
    ],
)
def test_what_is_no_category_is_refused(write, text, categories, says):
    with pytest.raises(InputError, match=says):
        data.load(write(text), categories=categories)
    with pytest.raises(InputError, match="--categories is for --dataset=FILE.csv, not shapes"):
        data.load("shapes", categories="city")


def test_whole_numbers_are_classes_unless_they_are_many_or_negative(write):
    def loaded(*targets):
        return data.load(write("a,b\n" + "".join(f"{i},{y}\n" for i, y in enumerate(targets))))

    classes = loaded(0, 2, 0)
    assert classes.num_classes == 3 and classes.class_names == ("0", "1", "2")
    assert all_of(classes.train)[1].dtype == np.int32
    assert not any("note" in line for line in loaded(0, 1).notes)
    assert "b has the classes 0..3, and no example of 0" in loaded(1, 2, 3).notes[-1]
    assert loaded(0, 999).num_classes == 1000
    for targets in [(0, 1000), (0, -1), (0, 1.0), (0, "1e2")]:
        assert loaded(*targets).num_classes == 0
    assert "line 3, column b is 2000000000, where classes are" in loaded(0, 2 * 10**9).no_classes


def test_texts_are_classes_in_the_order_of_their_names(write):
    train = write('size,kind\n1,dog\n2,"cat, grey"\n3,dog\n4,ant\n')
    files = f"{train},{write('size,kind' + chr(10) + '5,dog', 'test.csv')}"
    loaded = data.load(files)
    assert loaded.class_names == ("ant", "cat, grey", "dog") and loaded.num_classes == 3
    assert all_of(loaded.train)[1].tolist() == [2, 1, 2, 0]
    assert all_of(loaded.test)[1].tolist() == [2]
    write("size,kind\n5,dog\n6,bird\n", "test.csv")
    assert "test.csv, line 3, column kind: 'bird' is in none of the train" in refusal(files)


def test_one_long_cell_makes_no_others_long(write):
    tracemalloc.start()
    rows = "".join(f"{i},{i}.5\n" for i in range(2000))
    data.load(write(f"a,b\n{rows}0.{'1' * 100_000},0.5\n"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25  # an array of texts would have 800 MB


MANY_NAMES = "a,b\n" + "".join(f"{i},name {i}\n" for i in range(1001))


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("", "", "mine.csv is empty; the first line names the columns"),
        ("\n1,2\n", "", "mine.csv: its first line is empty; the first line names the columns"),
        ("a,,b\n1,2,3\n", "", "mine.csv: a column has no name; the first line names"),
        (",a,b\n0,2,3\n", "", "mine.csv: the first column has no name, as an index of pandas: "),
        ("a,b\n", "", "mine.csv has no rows below its first line"),
        ("1,2.5\n3,4\n", "", "mine.csv: the first line is numbers, 1, 2.5; the first line names"),
        ("a;b\n1;2\n", "", "mine.csv: its cells are separated by ';'; write commas"),
        ('"a"\t"b"\n"x"\t2\n', "", "mine.csv: its cells are separated by '\\t'; write commas"),
        ('a,b\n1,2\n"3\n4",5\n6,"7\n8,9\n', "", "mine.csv, line 5: unexpected end of data; mend"),
        ('a,b\n1,"2\n', "", "mine.csv, line 2: unexpected end of data; mend"),
        ("a,b,c\nx,y,1\n", "", "type --categories=a,b, leave"),
        ("a,b,a\n1,2,3\n", "", "mine.csv has two columns 'a'; give each a name of its own"),
        ("a,b\n1,2\n3\n", "", "line 3 has 1 cells, but the first line names 2 columns"),
        ("a,b\n1,2\n\n3,4,5\n", "", "line 4 has 3 cells, but the first line names 2 columns"),
        ("a,b\n1,2\n ,4\n", "", "line 3: the cell of column a is empty, and 1 of 2 rows have"),
        ("a,b\n1,2\n3,\n5,\n", "", "line 3: the cell of column b is empty, and 2 of 3 rows have"),
        ("a,b\n1,2\n3x,4\n", "", "line 3, column a: '3x' is no finite number; mend it"),
        ("a,b\nNA,2\nNaN,4\n", "", "line 2: the cell of column a is 'NA', and 2 of 2 rows have"),
        ("a,b\n1,2\n3,inf\n", "", "line 3, column b: 'inf' is no finite number; mend it"),
        ("a,b\n1,2\n3,four\n", "", "line 3, column b: 'four' is no finite number; mend it"),
        ("a,b\nRome,2\nOslo,4\n", "", "line 2, column a: 'Rome' is text, and features are numb"),
        ('a,b\n1,2\n"3,4\n', "", "mine.csv, line 3: unexpected end of data; mend the quotes"),
        (MANY_NAMES, "", "b has 1001 different texts, and 1000 are allowed"),
        ("a,b\n1,2\n", "c", "--target=c: "),
        ("a,b\n1,2\n", "b,", "has no column ''; it has a, b"),
        ("a,b\n1,2\n", "a,b", "mine.csv has no column but the target"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(write, text, target, message):
    assert message in refusal(write(text), target=target)


def test_other_columns_another_encoding_and_a_line_without_end_are_refused(write, monkeypatch):
    files = f"{write(FLATS)},{write('area,price' + chr(10) + '1,2', 'test.csv')}"
    assert "do not have the same columns: 'rooms' is in one of them" in refusal(files)
    path = write("größe,b\n1,2\n", encoding="latin-1")
    assert "mine.csv is no text in UTF-8; write it as such" in refusal(path)
    monkeypatch.setattr(csv_file, "_MAX_LINE", 50)
    line = refusal(write("a,b\n1,2\n" + "3," * 100))
    assert "has a line of 50 characters or more: no table of that" in line
