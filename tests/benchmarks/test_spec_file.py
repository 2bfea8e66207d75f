"""A file of benchmarks: what it says, its variants, and its mistakes by their lines."""

import pytest

from phalanx.benchmarks.file import builtin_spec, find_spec, read_specs
from phalanx.benchmarks.schema import Benchmark, Selection, build_variants
from phalanx.config.schema import OPTIONS
from phalanx.errors import ConfigError

SPEC = """\
train_options: &train_options
  env: {SPEED: fast}
  data:
    throughput:
      regexp: 'throughput: *(.*?) samples\\/sec'
      skip: 2
    loss: {regexp: 'loss: *(\\d*\\.\\d*)', reduction_type: final}

one_train:
  <<: *train_options
  description: one
  cmd: >-
    python3 train.py --batch {batchsize}
    --replicas {replicas}
  parameters:
    batchsize: 1,4
    replicas: [2, 8]
  pre_run_commands: [echo hello]
  timeout: 60
  location: ..
  output: [[samples/sec, throughput]]
  requirements_path: requirements.txt

rows:
  cmd: phalanx bench train demo --batch-size {b} --gradient-accumulation {a} --wandb --wandb-name x
  parameters:
    - [b, a]
    - [3, 150]
    - [4, 120]

whole_conv:
  cmd: phalanx train demo --epochs 5
"""


@pytest.fixture
def spec(tmp_path):
    """Writes a file of benchmarks."""

    def write(text):
        path = tmp_path / "mine.yml"
        path.write_text(text)
        return path

    return write


def all_options(words):
    return frozenset(OPTIONS) if words[0] == "phalanx" else frozenset()


def list_commands(benchmark, **selection):
    variants = build_variants(benchmark, Selection(**selection), known=all_options)
    return {variant.name: variant.command for variant in variants}


def test_a_file_is_read_with_what_its_entries_share(spec):
    path = spec(SPEC)
    found = read_specs([path])
    assert list(found) == ["one_train", "rows", "whole_conv"]  # shared lines are no benchmark
    one = found["one_train"]
    assert one.place == f"{path}:9" and one.folder == path.parent / ".."
    assert one.cmd == "python3 train.py --batch {batchsize} --replicas {replicas}"
    assert dict(one.env) == {"SPEED": "fast"} and one.timeout == 60
    assert one.pre_run_commands == ("echo hello",)
    throughput, loss = one.data
    assert (throughput.skip, throughput.reduction_type) == (2, "mean")
    assert (loss.skip, loss.reduction_type) == (0, "final")


def test_parameters_are_combined_and_tables_are_taken_row_by_row(spec):
    found = read_specs([spec(SPEC)])
    assert list_commands(found["one_train"]) == {
        f"one_train_batchsize_{b}_replicas_{r}": f"python3 train.py --batch {b} --replicas {r}"
        for b in (1, 4)
        for r in (2, 8)
    }
    lines = list_commands(found["rows"])
    begin = "phalanx bench train demo"
    assert lines == {
        "rows_a_150_b_3": f"{begin} --batch-size 3 --gradient-accumulation 150",
        "rows_a_120_b_4": f"{begin} --batch-size 4 --gradient-accumulation 120",
    }  # a measurement reports to nobody
    kept = list_commands(found["rows"], allow_wandb=True)
    assert all(line.endswith("--wandb --wandb-name x") for line in kept.values())


def test_settings_replace_options_their_rivals_and_parameters(spec):
    found = read_specs([spec(SPEC)])
    shrunk = list_commands(found["whole_conv"], settings=(("steps", "20"), ("image-size", "32")))
    assert shrunk == {"whole_conv": "phalanx train demo --steps=20 --image-size=32"}
    rows = list_commands(found["rows"], settings=(("b", "7"), ("accumulation", "1")))
    assert len(rows) == 2 and all("--batch-size 7 " in line for line in rows.values())
    one = list_commands(found["one_train"], settings=(("batchsize", "16"), ("image-size", "32")))
    assert one == {
        f"one_train_batchsize_16_replicas_{r}": f"python3 train.py --batch 16 --replicas {r}"
        for r in (2, 8)
    }  # nothing is known of the options of other programs


def test_an_option_that_a_parameter_gives_is_set_by_it_so_that_names_stay_true(spec):
    found = read_specs(
        [spec("a: {cmd: 'phalanx validate x --batch-size {b}', parameters: {b: 9}}")]
    )
    assert list_commands(found["a"], settings=(("batch-size", "1,4"),)) == {
        "a_b_1": "phalanx validate x --batch-size 1",
        "a_b_4": "phalanx validate x --batch-size 4",
    }


def test_a_share_is_replaced_with_its_option(spec):
    found = read_specs([spec("a:\n  cmd: phalanx train --gpu-decode 0.4 --epochs 1\n")])
    lines = list_commands(found["a"], settings=(("gpu-decode", "0.3"),))
    assert lines == {"a": "phalanx train --epochs 1 --gpu-decode=0.3"}


def test_wandb_is_left_out_without_the_word_after_it(spec):
    text = "a: {cmd: phalanx train --wandb demo --wandb-project p --wandb-tags=x --epochs 1}"
    found = read_specs([spec(text)])
    assert list_commands(found["a"]) == {"a": "phalanx train demo --epochs 1"}


def test_what_trains_to_the_end_runs_only_if_it_is_asked_for(spec):
    found = read_specs([spec(SPEC)])
    assert [b.name for b in Selection().choose(found)] == ["one_train", "rows"]
    everything = Selection(include_convergence=True).choose(found)
    assert [b.name for b in everything] == ["one_train", "rows", "whole_conv"]
    assert [b.name for b in Selection(names=("whole_conv",)).choose(found)] == ["whole_conv"]
    with pytest.raises(ConfigError, match="give --include-convergence"):
        Selection().choose({"whole_conv": found["whole_conv"]})


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("one_trian", "did you mean 'one_train'?"),
        ("conv", "there are whole_conv"),
        ("zzz", "choose from one_train, rows, whole_conv"),
    ],
)
def test_an_unknown_benchmark_gets_near_ones(spec, asked, told):
    with pytest.raises(ConfigError) as caught:
        Selection(names=(asked,)).choose(read_specs([spec(SPEC)]))
    text = str(caught.value)
    assert text.startswith(f"--benchmark {asked}: no benchmark is called that; ") and told in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "a:\n  cmd: x\n  paramters: {b: 1}",
            ":3: paramters: a has no such key; did you mean 'par",
        ),
        ("a:\n  cmds: x", ":2: cmds: a has no such key; did you mean 'cmd'?"),
        ("a:\n  description: x", ":1: a: has no cmd; give one, or end its name in options"),
        ("a: [1]", ":1: a: expected lines of the form `key: value` under it"),
        ("a:\n  cmd: 'x \"'", ":2: cmd: no command line: No closing quotation"),
        ("a:\n  cmd: x\n  parameters: {b: '1,2'}", ":1: a: its cmd does not say where the parame"),
        (
            "a:\n  cmd: x {c}\n  parameters: {b: 1}",
            ":1: a: {c} is none of its parameters; there is",
        ),
        ("a:\n  cmd: x {c}", ":1: a: {c} has no values; list them under parameters:"),
        ("a:\n  cmd: x {b}\n  parameters: [[b]]", ":3: parameters: expected a row of names, then"),
        (
            "a:\n  cmd: x {b}\n  parameters: [[b], [1, 2]]",
            ":3: parameters: expected 1 values in ea",
        ),
        ("a:\n  cmd: x\n  timeout: soon", ":3: timeout: expected a number of seconds above 0"),
        ("a:\n  cmd: x\n  data: {t: {regexp: '('}}", ":3: regexp: no regular expression: missing"),
        ("a:\n  cmd: x\n  data: {t: {regexp: [x]}}", ":3: regexp: expected a text"),
        ("a:\n  cmd: x\n  data: {t: {regexp: '(a)(b)'}}", ":3: regexp: expected at most one group"),
        ("a:\n  cmd: x\n  data: {t: {skip: 1}}", ":3: t: give either regexp, for text, or key"),
        (
            "a:\n  cmd: x\n  data: {t: {key: n, skip: -1}}",
            ":3: skip: expected a whole number of at",
        ),
        (
            "a:\n  cmd: x\n  data: {t: {key: n, redution_type: min}}",
            "did you mean 'reduction_type'?",
        ),
        (
            "a:\n  cmd: x\n  data: {t: {key: n, reduction_type: max}}",
            "no reduction is called 'max'",
        ),
        ("b: {cmd: x}\nb: {cmd: y}", ": b is given twice"),
        ("some_options: {env: {A: b}}", ": holds no benchmark: an entry with a cmd: line"),
        ("a:\n\tcmd: x", ":2: not valid YAML"),
    ],
)
def test_a_mistake_is_told_by_its_line(spec, text, told):
    path = spec(text)
    with pytest.raises(ConfigError) as caught:
        read_specs([path])
    assert f"{path}{told}" in str(caught.value) or told in str(caught.value)


def test_all_mistakes_are_told_together(spec):
    with pytest.raises(ConfigError, match="2 problems:"):
        read_specs([spec("a: {cmds: x}\nb: {cmd: x, date: y}")])


def test_variables_of_the_environment_are_no_parameters(spec):
    text = """a: {cmd: 'echo ${HOME}/{b} --at=$HOME "x y"', parameters: {b: 1}}"""
    found = read_specs([spec(text)])
    assert list_commands(found["a"]) == {"a_b_1": "echo ${HOME}/1 --at=$HOME 'x y'"}


def test_a_name_in_two_files_is_refused(spec, tmp_path):
    path = spec("a: {cmd: x}")
    (tmp_path / "other.yml").write_text("\na: {cmd: y}")
    with pytest.raises(
        ConfigError, match=r"other.yml:2: a is also in .*mine.yml:1; rename one of them"
    ):
        read_specs([path, tmp_path / "other.yml"])


def test_without_a_file_here_our_own_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_spec(None) == find_spec("benchmarks.yml") == builtin_spec()
    assert str(find_spec("mine.yml")) == "mine.yml"
    with pytest.raises(ConfigError, match=r"--spec mine\.yml: no such file; without --spec"):
        read_specs([find_spec("mine.yml")])
    (tmp_path / "benchmarks.yml").write_text("a: {cmd: x}")
    assert list(read_specs([find_spec(None)])) == ["a"]
    one = next(iter(read_specs([builtin_spec()]).values()))
    assert isinstance(one, Benchmark) and str(one.folder) == "."  # runs where it is called
