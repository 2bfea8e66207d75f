"""Where stages begin that nobody named: chosen once, stored with the run, and used again."""

import pytest

from phalanx.assemble.dataset_summary import plan_new_run
from phalanx.assemble.fork import prepare_fork
from phalanx.assemble.prepare import PreparedRun, prepare_new_run, prepare_resume
from phalanx.cli.main import main
from phalanx.config.read import read_settings
from phalanx.errors import ConfigError
from small_runs import small_run

CHOSEN = "--pipeline-splits layer2/0: chosen so that 2 stages cost about the same"


def prepare(path, **options: str) -> PreparedRun:
    flags = {name.replace("_", "-"): text for name, text in options.items()}
    settings = read_settings("demo", {"device": "cpu", "run-dir": str(path), **flags})
    return prepare_new_run(settings, line="phalanx train")


def test_the_choice_is_stored_and_a_resume_makes_none(tmp_path):
    fresh = prepare(tmp_path / "run", shards="2", devices="2")
    stored = (tmp_path / "run" / "config.yaml").read_text()
    assert (
        "\npipeline-splits: layer2/0\n" in stored and "\npipeline-schedule: Sequential\n" in stored
    )
    assert fresh.run.facts["origins"]["pipeline-splits"] == "chosen"
    assert fresh.plan.pipeline.starts == ("layer2/0",) and CHOSEN in fresh.plan.warnings
    again = prepare_resume(tmp_path / "run", {})
    assert again.plan.pipeline == fresh.plan.pipeline
    assert again.settings.origins["pipeline-splits"] == "chosen"
    assert again.settings.notes == (), "nothing is chosen a second time"


def test_a_pipeline_keeps_its_schedule(tmp_path):
    run = prepare(
        tmp_path / "run",
        shards="2",
        pipeline="true",
        pipeline_schedule="Interleaved",
        gradient_accumulation="2",
    )
    assert run.config.pipeline.pipeline_schedule == "Interleaved"
    assert run.settings.origins["pipeline-schedule"] == "flag"


def test_stages_may_be_asked_for_at_a_resume(tmp_path):
    assert prepare(tmp_path / "run").plan.pipeline is None
    found = prepare_resume(tmp_path / "run", {"shards": "2", "devices": "2"})
    assert found.plan.pipeline.starts == ("layer2/0",) and CHOSEN in found.plan.warnings
    assert (found.plan.layout.stages, found.plan.layout.ranks) == (2, 2)


def test_other_stages_are_chosen_where_names_are_taken_back(tmp_path):
    prepare(tmp_path / "run", shards="2")
    with pytest.raises(ConfigError, match=r"or --pipeline-splits none for stages of about the sam"):
        prepare_resume(tmp_path / "run", {"shards": "3"})
    found = prepare_resume(tmp_path / "run", {"shards": "3", "pipeline-splits": "none"})
    assert found.plan.pipeline.starts == ("layer2/0", "layer3/0")


def test_a_fork_chooses_for_itself(tmp_path, digits):
    assert main(small_run(digits, tmp_path / "run", steps=1)) == 0
    flags = {"shards": "2", "steps": "2", "run-dir": str(tmp_path / "fork")}
    forked = prepare_fork(tmp_path / "run", flags, line="phalanx train")
    assert forked.plan.pipeline.starts == ("layer2/0",)
    assert "\npipeline-splits: layer2/0\n" in (tmp_path / "fork" / "config.yaml").read_text()


def test_all_else_is_refused_before_a_model_is_counted():
    flags = {"device": "cpu", "shards": "2", "norm-type": "group", "norm-num-groups": "7"}
    with pytest.raises(ConfigError, match=r"^--norm-num-groups 7: bn1 has 16 channels, which it"):
        plan_new_run(read_settings("demo", flags))


def test_a_schedule_for_stages_that_take_turns_has_no_effect():
    flags = {"device": "cpu", "shards": "2", "pipeline-schedule": "Interleaved"}
    settings, plan, _ = plan_new_run(read_settings("demo", flags))
    assert settings.config.pipeline.pipeline_schedule == "Sequential"
    assert plan.warnings[1] == (
        "--pipeline-schedule Interleaved has no effect with --shards alone, whose stages take "
        "turns; --pipeline lets them work at once"
    )
