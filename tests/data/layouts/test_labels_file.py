"""Tables of labels: what is read from them, and all that can be wrong with one."""

from pathlib import Path

import pytest

from phalanx.data.formats.folder import open_folder
from phalanx.data.layouts.labels_file import parse_labels
from phalanx.data.layouts.listing import LayoutOptions
from phalanx.errors import ConfigError, DataError
from small_layouts import write_image, write_labels

ROOT = Path("/data")


def parse(text, name="labels.csv", **options):
    return parse_labels(text, Path(name), root=ROOT, **{"valid_split": None, **options})


@pytest.mark.parametrize(
    "text",
    [
        "path,label\na.jpg,x\nb.jpg,y\n",
        "\ufeffpath,label\r\na.jpg,x\r\nb.jpg,y\r\n",
        "a.jpg,x\nb.jpg,y",
        "Filename;Class;width\na.jpg;x;3\nb.jpg;y;4\n",
        "label\tfile_name\nx\ta.jpg\ny\tb.jpg\n",
        '"path","label"\n"a.jpg"," x "\n\n/data/b.jpg,y\n',
    ],
)
def test_tables_are_read_however_they_are_written(text):
    table = parse(text)
    assert table.splits == {"train": {"a.jpg": "x", "b.jpg": "y"}}
    assert table.classes == ("x", "y") and not table.has_splits


def test_json_lines_are_read():
    table = parse('{"image": "a.jpg", "label": 10}\n\n{"path": "b.jpg", "class": 9}', "l.jsonl")
    assert table.splits == {"train": {"a.jpg": "10", "b.jpg": "9"}}
    assert table.classes == ("9", "10"), "numbers count by their value"


def test_splits_are_found_chosen_and_left_over():
    text = "path,label,split\na.jpg,x,Train\nb.jpg,y,train\nc.jpg,x,test\nd.jpg,y,dev\n"
    table = parse(text)
    assert table.splits["valid"] == {"d.jpg": "y"} and table.unused_splits == ("test",)
    assert table.unused_paths == {"c.jpg"}
    assert parse(text, valid_split="test").splits["valid"] == {"c.jpg": "x"}
    with pytest.raises(ConfigError, match=r"--valid-split odd: labels.csv has no such split"):
        parse(text, valid_split="odd")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "labels.csv: has no rows; expected path,label"),
        ("id,width\n1,2\n", "line 1: no columns called path and label among id, width"),
        ("path,label\na.jpg\n", "line 2: expected path,label or path,label,split, got 'a.jpg'"),
        ("path,label\na.jpg,\nb.jpg,y", "line 2: a.jpg has no label"),
        ("path,label\n,x\nb.jpg,y", "line 2: names no image; paths are relative to --data-dir"),
        ("path,label\na.jpg,x\n./a.jpg,y", r"line 3: ./a.jpg is already on line 2"),
        ("path,label\n/etc/a.jpg,x\nb.jpg,y", "line 2: /etc/a.jpg is outside /data"),
        ("path,label\n../a.jpg,x\nb.jpg,y", r"line 2: ../a.jpg is outside /data"),
        ("path,label,split\na.jpg,x,odd\nb.jpg,y,train", "unknown split 'odd'; write train or val"),
        ("path,label,split\na.jpg,x,\nb.jpg,y,train", "line 2: no split, though other rows"),
        ("path,label\na.jpg,x\nb.jpg,x", "has only one class, 'x'; a classifier needs two"),
        ('path,label\n"a.jpg,x', "line 2: expected path,label"),
        ('path,label\na.jpg,x\n"b.jpg,y\nc.jpg,y\nd.jpg,x\n', "line 3: expected path,label"),
        ('path,label\na.jpg,x\n"' + "b.jpg,y\n" * 20_000, "line 3: not valid CSV"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_with_its_line(text, message):
    with pytest.raises(DataError, match=message):
        parse(text)


@pytest.mark.parametrize("line", ["[1]", "{", '{"label": 1}', "[" * 100_000])
def test_json_lines_that_are_none_are_refused(line):
    with pytest.raises(DataError, match=r'l.jsonl, line 1: expected {"path": ..., "label": ...}'):
        parse(line, "l.jsonl")


def test_all_problems_are_said_at_once_up_to_ten():
    rows = "".join(f"../{number}.jpg,x\n" for number in range(12))
    with pytest.raises(DataError) as caught:
        parse(f"path,label\n{rows}")
    assert str(caught.value).count("is outside") == 10
    assert "and 2 more\nfix these lines of labels.csv" in str(caught.value)


def open_table(root, split="train", name="labels.csv", **options):
    return open_folder(root, split, LayoutOptions(labels=str(root / name), **options))


def test_a_table_in_no_utf8_and_one_that_names_a_missing_image_are_refused(tmp_path):
    write_labels(tmp_path)
    (tmp_path / "images/3.jpg").unlink()
    with pytest.raises(
        DataError, match=r"images/3.jpg: listed in labels.csv, but there is no such file"
    ):
        open_table(tmp_path)
    (tmp_path / "labels.csv").write_bytes(b"path,label\n\xff.jpg,x\n")
    with pytest.raises(DataError, match=r"labels.csv: not UTF-8 text"):
        open_table(tmp_path)


@pytest.mark.parametrize("hidden", [".0.jpg", "__MACOSX/0.jpg", ".trash/0.jpg"])
def test_a_row_that_names_a_hidden_image_is_told_so(tmp_path, hidden):
    write_labels(tmp_path)
    (tmp_path / "images" / hidden).parent.mkdir(exist_ok=True)
    (tmp_path / "images/0.jpg").rename(tmp_path / "images" / hidden)
    text = (tmp_path / "labels.csv").read_text(encoding="utf-8-sig")
    (tmp_path / "labels.csv").write_text(text.replace("images/0.jpg", f"images/{hidden}"))
    told = rf"images/{hidden}: listed in labels.csv, but hidden files are not read"
    with pytest.raises(DataError, match=told):
        open_table(tmp_path)
    (tmp_path / "images" / hidden).unlink()
    with pytest.raises(DataError, match="but there is no such file"):
        open_table(tmp_path)


def test_images_that_no_row_names_are_counted(tmp_path):
    write_labels(tmp_path, splits=("train", "test"))
    write_image(tmp_path / "images/odd.png")
    assert open_table(tmp_path).index.ignored == {"not in labels.csv": 1}
    assert open_table(tmp_path, "valid").index.ignored == {}
    text = (tmp_path / "labels.csv").read_text().replace("9.jpg,b,test", "9.jpg,b,val")
    (tmp_path / "labels.csv").write_text(text)
    ignored = open_table(tmp_path).index.ignored
    assert ignored == {"not in labels.csv": 1, "in unused rows of labels.csv": 1}
    assert open_table(tmp_path, "valid").name(0) == "images/9.jpg"


def test_a_changed_table_is_read_anew(tmp_path):
    write_labels(tmp_path)
    assert len(open_table(tmp_path)) == 8
    text = (tmp_path / "labels.csv").read_text(encoding="utf-8-sig")
    (tmp_path / "labels.csv").write_text(text.replace("images/0.jpg,a,train\n", ""))
    source = open_table(tmp_path)
    assert len(source) == 7 and source.index.ignored == {"not in labels.csv": 1}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("path,label\na\0.jpg,x\nb.jpg,y\n", "labels.csv"),
        ('{"path": "a\\u0000.jpg", "label": 1}\n{"path": "b.jpg", "label": 2}\n', "labels.jsonl"),
    ],
)
def test_a_zero_byte_in_a_path_is_named_with_its_line(text, name):
    with pytest.raises(DataError, match=r"line [12].* zero byte"):
        parse(text, name)


def test_a_class_that_is_called_like_a_heading_is_no_heading():
    assert parse("a.jpg,name\nb.jpg,y\n").splits == {"train": {"a.jpg": "name", "b.jpg": "y"}}
