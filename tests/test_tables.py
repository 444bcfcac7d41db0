"""Labels from a table: which images are labelled, for which part, and what is wrong with a table."""
import numpy as np
import pytest
from PIL import Image

import cli
import data
import tables
import train_crae
from helpers import QUICK


@pytest.fixture
def pictures(tmp_path):
    """A folder with 40 images 0.png to 39.png, every other one in a subfolder; image i has the value i."""
    root = tmp_path / "pictures"
    (root / "more").mkdir(parents=True)
    for i in range(40):
        Image.new("L", (10, 10), i).save(root / ("more" if i % 2 else "") / f"{i}.png")
    return root


def write_table(root, rows, header="image,label", name="labels.csv"):
    path = root / name
    path.write_text("\n".join([header, *rows]) + "\n")
    return str(path)


def load(root, file):
    """{part: the values of its images}, {value: class} of the images of known class, and the classes."""
    images, labels, parts, classes = data.load(str(root), "nowhere", 16, labels_file=file)
    values = images[:, 0, 0, 0].tolist()
    by_part = {part: sorted(values[i] for i in index) for part, index in parts.items()}
    return by_part, {v: classes[y] for v, y in zip(values, labels.tolist()) if y >= 0}, classes


def test_listed_images_are_labelled_and_all_others_are_unlabelled(pictures, capsys):
    file = write_table(pictures, [f"{i}.png,{'cat' if i < 12 else 'ant'}" for i in range(24)])
    parts, known, classes = load(pictures, file)
    assert classes == ["ant", "cat"] and parts["unlabeled"] == list(range(24, 40))
    assert known == {i: "cat" if i < 12 else "ant" for i in range(24)}
    assert sorted(parts["train"] + parts["test"]) == list(range(24)) and len(parts["test"]) == 2
    assert {known[i] for i in parts["test"]} == {"ant", "cat"}
    output = capsys.readouterr().out
    assert "no test set is given: 2 of 24 labelled images (a tenth, at least one per class)" in output
    assert "not used" not in output                             # the table itself is no unused file
    assert load(pictures, file)[0] == parts                     # the same test set at every start


def test_a_split_column_decides_the_parts(pictures, capsys):
    rows = [f"{i}.png,{i % 2},{'train' if i < 20 else 'Test' if i < 26 else 'val' if i < 30 else ''}"
            for i in range(32)]
    rows += ["32.png,0,unlabeled", "33.png,7,unlabeled", "34.png,,train", "35.png,,"]
    parts, known, classes = load(pictures, write_table(pictures, rows, "image,label,split"))
    assert parts == dict(train=[*range(20), 30, 31], test=[*range(20, 26)], validation=[*range(26, 30)],
                         unlabeled=[*range(32, 40)])
    assert classes == ["0", "1"]
    assert known == {i: str(i % 2) for i in range(33)}          # 33 has a class that no training image has
    assert "held out" not in capsys.readouterr().out


def test_spellings_of_paths_headers_and_numbers(pictures):
    Image.new("L", (10, 10), 200).save(pictures / "more" / "0.png")     # 0.png is still the one above it
    rows = ["0.png;10", "./more/0.png;9", "pictures/2.png;10", f"{pictures}/4.png;9", "  6.png ; 10 ",
            "more/7.png;9"]
    file = write_table(pictures, rows, "\ufeffImage; LABEL")
    parts, known, classes = load(pictures, file)
    assert classes == ["9", "10"]                               # by number, not as text
    assert known == {0: "10", 200: "9", 2: "10", 4: "9", 6: "10", 7: "9"}
    quoted = write_table(pictures, ['"0.png","a, b"', '2.png,"a, b"', "4.png,c", "", "6.png,c"],
                         '"image","label"', "quoted.csv")
    assert load(pictures, quoted)[2] == ["a, b", "c"]


def test_the_test_set_is_a_tenth_of_each_class_and_never_its_only_image(pictures):
    names = ["a"] * 30 + ["b"] * 4 + ["c"]
    parts, known, _ = load(pictures, write_table(pictures, [f"{i}.png,{c}" for i, c in enumerate(names)]))
    assert sorted(known[i] for i in parts["test"]) == ["a", "a", "a", "b"] and 34 in parts["train"]
    with pytest.raises(cli.Refused, match="too few images to hold one out"):
        load(pictures, write_table(pictures, ["0.png,a", "1.png,b"]))


@pytest.mark.parametrize("header, rows, message", [
    ("image,label,part", ["0.png,a,train"], "header is image,label,part; it must be image,label or"),
    ("image,label", ["0.png"], "line 2 does not have the 2 values of the header"),
    ("image,label", ["0.png,a", ",b"], "line 3 does not have the 2 values"),
    ("image,label", ["x.png,a", "y.png,b", "0.png,b"],
     r"x.png \(line 2\) is not among the images of .*pictures \(1 more like it\); correct or remove"),
    ("image,label", ["same.png,a"], r"same.png \(line 2\) is the name of several images of"),
    ("image,label", ["0.png,a", "0.png,b"], "line 3 lists 0.png again, with another label or split"),
    ("image,label", [], "lists no labelled training image"),
    ("image,label", ["0.png,"], "lists no labelled training image"),
    ("image,label,split", ["0.png,a,training"], "line 2 has split training; it must be one of train, test"),
    ("image,label,split", ["0.png,a,train", "2.png,,test"], "line 3 is for test but has no label"),
    ("image,label,split", ["0.png,a,train", "2.png,b,val"], "line 3 has label b, which no training image"),
    ("image,label", [f"{i}.png,a" for i in range(20)], "only one class"),
])
def test_bad_tables(pictures, header, rows, message):
    for folder in "p", "q":
        (pictures / folder).mkdir()
        Image.new("L", (10, 10)).save(pictures / folder / "same.png")
    with pytest.raises(cli.Refused, match=message) as stop:
        load(pictures, write_table(pictures, rows, header))
    assert "\n" not in str(stop.value)


def test_a_file_that_is_no_table_is_a_list_of_names(tmp_path):
    for text, table in [("image,label\n", True), ("image;label\n", True), ("image\tlabel\tsplit\n", True),
                        ("a/image,label.png\n", False), ("label,image\n", False), ("images,labels\n", False)]:
        (tmp_path / "x").write_text(text)
        assert tables.is_table(tmp_path / "x") == table, text
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    assert not tables.is_table(tmp_path / "x") and not tables.is_table(tmp_path / "missing")
    with pytest.raises(cli.Refused, match="--labels_file .*missing: cannot be read"):
        tables.count_listed(tmp_path / "missing")


def test_a_run_with_a_table(pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_table(pictures, [f"{i}.png,{'ab'[i // 10]}" for i in range(20)])
    flags = dict(QUICK, dataset=str(pictures), labels_file=file, image_size=16, steps=1)
    train_crae.train(**flags)
    run, = (tmp_path / "runs").iterdir()
    assert run.name.startswith("pictures_20_crae_0_recipepaper_labels_filelabels.csv")
    split = np.load(run / "split.npz")
    assert [len(split[part]) for part in ("labeled", "unlabeled", "test")] == [18, 20, 2]
    train_crae.train(**flags, labels=6, out="fewer")            # draws some of the table's labels
    split = np.load("fewer/split.npz")
    assert [len(split[part]) for part in ("labeled", "unlabeled", "test")] == [6, 32, 2]
