"""The tables of a run as they grow."""

from phalanx.report.records import Records, ScoreRow
from phalanx.trackers.new_rows import NewRows


def add_score(records, step, top1):
    row = ScoreRow(
        step=step, epoch=1.0, scored=4, top1=top1, top5=None, loss=1.0, interval95=(0.0, 1.0)
    )
    records.add_score(row)


def test_rows_come_once_whole_and_with_the_best_score_so_far(tmp_path):
    records, rows = Records(tmp_path), NewRows(tmp_path)
    assert rows.read() == []
    add_score(records, 1, 0.5)
    add_score(records, 2, 0.25)
    first = rows.read()
    assert [(row.table, row.step) for row in first] == [("valid", 1), ("valid", 2)]
    assert [row.values["valid/best_top1"] for row in first] == [0.5, 0.5]
    assert "valid/top5" not in first[0].values  # empty: it was not measured
    with (tmp_path / "validation.csv").open("a") as file:
        file.write("3,1.0,4,0.7")  # as a reader may see it
        file.flush()
        assert rows.read() == []
        file.write("5,0.0,1.0,,1.0\n")
    (third,) = rows.read()
    assert (third.step, third.values["valid/top1"], third.values["valid/best_top1"]) == (
        3,
        0.75,
        0.75,
    )
