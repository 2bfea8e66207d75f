"""A step drawn over time, in text and as a PNG."""

import pytest
from PIL import Image

from phalanx.plan.pipeline import order_passes, time_passes
from phalanx.report.step_picture import StepPicture, draw_text, write_png


def picture(schedule="Grouped", *, stages=2, passes=2, forward=1.0, **options) -> StepPicture:
    orders = [
        order_passes(schedule, stage=stage, stages=stages, passes=passes) for stage in range(stages)
    ]
    timed = time_passes(orders, forward=[forward] * stages, backward=[2 * forward] * stages)
    return StepPicture(
        passes=timed,
        group=min(2 * stages, passes),
        rows=tuple(f"stage {stage}" for stage in range(stages)),
        notes=tuple(f"memory {stage} MiB" for stage in range(stages)),
        title="two stages",
        **options,
    )


LEGEND = "0░ forward and 0▓▓ backward pass of a micro-batch, with its number"


@pytest.mark.parametrize(
    ("schedule", "width", "lines"),
    [
        (
            "Grouped",
            27,  # two columns for each of nine units of time
            [
                "stage 0  0░1░      0▓▓▓1▓▓▓",
                "stage 1    0░1░0▓▓▓1▓▓▓",
                LEGEND,
                "bubble: a stage waits 33.3% of the time for the others",
            ],
        ),
        (
            "Interleaved",
            100,  # at most four
            [
                "stage 0  0░░░1░░░        0▓▓▓▓▓▓▓    1▓▓▓▓▓▓▓",
                "stage 1      0░░░0▓▓▓▓▓▓▓1░░░1▓▓▓▓▓▓▓",
                LEGEND,
                "bubble: a stage waits 33.3% of the time for the others",
            ],
        ),
        (
            "Sequential",
            33,
            [
                "stage 0  0░      0▓▓▓1░      1▓▓▓",
                "stage 1    0░0▓▓▓      1░1▓▓▓",
                LEGEND,
                "bubble: a stage waits 50.0% of the time for the others",
            ],
        ),
    ],
)
def test_passes_are_drawn_to_scale(schedule, width, lines):
    assert draw_text(picture(schedule), width) == lines


def test_of_a_long_step_the_first_group_is_shown():
    *stages, legend, cut, bubble, others = draw_text(picture(passes=48, pipelines=3), 41)
    assert stages == [
        "stage 0  0░1░2░3░      0▓▓▓1▓▓▓2▓▓▓3▓▓▓ …",
        "stage 1    0░1░2░3░0▓▓▓1▓▓▓2▓▓▓3▓▓▓     …",
    ]
    assert legend.endswith("with the last digit of its number")
    assert cut == "… the first 4 of 48 micro-batches"
    assert bubble == "bubble: a stage waits 20.0% of the time for the others"
    assert others == "3 pipelines do the same at the same time"


def test_a_terminal_that_is_too_narrow_shows_what_it_can():
    lines = draw_text(picture(stages=8, passes=16), 10)
    assert len(lines) == 8 + 3 and all(line.endswith(" …") for line in lines[:8])
    assert lines[0].startswith("stage 0  01234567890123 …")
    assert lines[9] == "… the beginning of 16 micro-batches"


def test_one_device_has_no_bubble():
    lines = draw_text(picture("Sequential", stages=1, passes=1, pipelines=2), 60)
    assert lines == ["stage 0  0░░░0▓▓▓▓▓▓▓", LEGEND, "2 devices do the same at the same time"]


@pytest.mark.draws
def test_few_pipelines_have_rows_of_their_own(tmp_path):
    heights = []
    for pipelines in (1, 8, 9):
        path = tmp_path / f"{pipelines}.png"
        write_png(picture(pipelines=pipelines, footer="bytes"), path)
        with Image.open(path) as image:
            assert image.format == "PNG"
            heights.append(image.height)
    assert heights[0] == heights[2] < heights[1], "more than 16 rows are one pipeline"
