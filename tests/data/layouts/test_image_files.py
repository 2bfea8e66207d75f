"""Which files are images, and what is said of those that are not."""

from pathlib import Path

import pytest

from phalanx.data.layouts.image_files import describe_ignored, has_images, list_images


def write_files(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


def test_suffixes_count_in_any_case_and_at_any_depth(tmp_path):
    images = ["a.JPG", "b.jfif", "c/d.webp", "c/e/f.TIFF", "g.tif", "h.avif", "i.bmp", "j.gif"]
    write_files(tmp_path, *images, "notes.txt", "c/README", ".hidden.jpg", "__MACOSX/._a.jpg")
    found = list_images(tmp_path)
    assert found.images == sorted(images) and found.folders == ["c", "c/e"]
    assert found.ignored == {".txt": 1, "without a suffix": 1}


def test_the_first_rule_knows_three_suffixes_and_one_folder(tmp_path):
    write_files(tmp_path, "a.JPG", "b.webp", "c/d.jpg")
    found = list_images(tmp_path, rule=1)
    assert found.images == ["a.JPG"] and found.ignored == {".webp": 1}


def test_heic_counts_where_it_can_be_read(tmp_path, monkeypatch):
    write_files(tmp_path, "a.heic")
    for module, images, ignored in (
        (object(), ["a.heic"], {}),
        (None, [], {".heic (pip install 'phalanx[heic]')": 1}),
    ):
        monkeypatch.setattr(
            "phalanx.data.layouts.image_files.find_spec", lambda _name, found=module: found
        )
        found = list_images(tmp_path)
        assert (found.images, found.ignored) == (images, ignored)


def test_links_in_a_circle_are_not_followed(tmp_path):
    write_files(tmp_path / "cat", "a.jpg", "b/c.jpg")
    (tmp_path / "cat/b/up").symlink_to(tmp_path / "cat")
    (tmp_path / "cat/self.jpg").symlink_to("self.jpg")  # a bad image, found when it is read
    assert list_images(tmp_path / "cat").images == ["a.jpg", "b/c.jpg", "self.jpg"]
    (tmp_path / "cat/b/other").symlink_to(tmp_path / "cat/b/c.jpg")
    write_files(tmp_path / "far", "d.jpg")
    (tmp_path / "cat/far").symlink_to(tmp_path / "far")
    assert "far/d.jpg" in list_images(tmp_path / "cat").images


def test_the_search_for_one_image_looks_below(tmp_path):
    write_files(tmp_path, "a/b/c.txt")
    assert not has_images(tmp_path)
    write_files(tmp_path, "a/b/c.png")
    assert has_images(tmp_path)


@pytest.mark.parametrize(
    ("ignored", "line"),
    [
        ({}, ""),
        ({".txt": 0}, ""),
        ({".txt": 1200}, "ignored 1,200 files: 1,200 .txt"),
        (
            {f".{letter}": 1 for letter in "abcdefghij"},
            "ignored 10 files: 1 .a, 1 .b, 1 .c, 1 .d, 1 .e, 1 .f, 1 .g, 1 .h, 2 others",
        ),
        (
            {f".{letter}": 1 for letter in "abcdefghi"},
            "ignored 9 files: 1 .a, 1 .b, 1 .c, 1 .d, 1 .e, 1 .f, 1 .g, 1 .h, 1 other",
        ),
    ],
)
def test_what_is_ignored_is_one_line(ignored, line):
    assert describe_ignored(ignored) == line


def test_a_link_that_leads_to_a_folder_above_is_not_followed(tmp_path, monkeypatch):
    write_files(tmp_path, "cat/a.jpg", "dog/b.jpg", "more/c.jpg")
    (tmp_path / "cat/up").symlink_to("..")
    (tmp_path / "cat/other").symlink_to("../more")
    (tmp_path / "more/all").symlink_to("..")
    assert list_images(tmp_path / "cat").images == ["a.jpg", "other/c.jpg"]
    monkeypatch.chdir(tmp_path)
    assert list_images(Path("cat")).images == ["a.jpg", "other/c.jpg"]
