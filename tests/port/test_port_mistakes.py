"""What cannot be ported says where, what and the way out, with exit code 2."""

from dataclasses import replace

import pytest

from phalanx.cli.main import main
from phalanx.port import dialect_choice

TRAIN = "python train.py --model resnet --dataset imagenet"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{TRAIN} --batch-sise 4"], "--batch-sise: the old program has no such option; did you "
                                      "mean --batch-size"),
        ([f"{TRAIN} --zebra"], "--zebra: the old program has no such option; no option is spelt"),
        ([f"{TRAIN} --learning-rate 1"], "--learning-rate: may stand for --learning-rate-decay, "
                                         "--learning-rate-schedule; write the one you mean"),
        ([f"{TRAIN} --batch-size"], "--batch-size: expected a value after it"),
        ([f"{TRAIN} --batch-size --pipeline"], "--batch-size: expected a value after it"),
        ([f"{TRAIN} --batch-size four"], "--batch-size: expected a whole number, got 'four'"),
        ([f"{TRAIN} --batch-size 0"], "--batch-size: expected a whole number of at least 1, got 0"),
        ([f"{TRAIN} --batch-size 1e9"], "--batch-size: expected a whole number, got '1e9'"),
        ([f"{TRAIN} --abs-learning-rate 0"], "--abs-learning-rate: expected a number above 0, "
                                             "got 0"),
        ([f"{TRAIN} --base-learning-rate 1e9"], "--base-learning-rate: expected a number of at "
                                                "most 100, got 1e9"),
        ([f"{TRAIN} --weight-avg-N 2 1/0"], "--weight-avg-N: expected a whole number, got '1/0'"),
        (["--dialect", "tf2", "python train.py --optimizer rmsprop --optimizer-params "
          "'{momentum: 0.9, base_decay_exponent: 1e9, epsilon: 1}'"],
         "--optimizer-params: base_decay_exponent: expected a number of at most 100, got 1e9"),
        ([f"{TRAIN} --pipeline=yes"], "--pipeline=yes: takes no value; write --pipeline"),
        ([f"{TRAIN} --optimiser adam"], "--optimiser adam: the old program has no such choice; it "
                                        "was SGD, momentum, RMSprop or LARS"),
        ([f"{TRAIN} --epochs 4 --iterations 9"], "--epochs and --iterations: only one of them"),
        ([f"{TRAIN} stray"], "stray: is not an option and belongs to none"),
        (["python train.py --config <config name>"], "name>: is not an option and belongs to none; "
         "put it after the option it is for, or quotes around a value with spaces in it"),
        ([""], "there is no program in it; paste a whole command line"),
        ([f"{TRAIN} --model-size 51"], "--model-size 51: no resnet has that size; did you mean"),
        (["python trian.py --model resnet"], "trian.py: no such script is known; did you mean "
                                             "'train.py'?"),
        (["cargo run --release"], "cargo: expected python and a script of an older program"),
        (["poprun --num-replicas 4"], "there is no program in it; paste a whole command line"),
        (["poprun --num-replica 4 --nodes 3 python train.py"], "--nodes: the old program has no"),
        (["python train.py --model 'resnet"], "line 1, column 25: the quote that begins"),
        (["--dialect", "tf9", "--", "python", "train.py"], "--dialect tf9: no such dialect"),
        (["--file", "none.sh"], "--file none.sh: No such file or directory"),
        (["--run", "--json", "--", "python", "train.py"],
         "--json: prints the translation, and --run runs it; give one of them"),
        (["--epohcs", "3", "--", "python", "train.py"], "--epohcs: no such option"),
        (["--save", "x.yaml", "--", "python", "restore.py", "--restore-path", "R"],
         "--save x.yaml: holds the options of one training command"),
        (["TF_CONFIG=x python train.py --distributed"], "TF_CONFIG: expected JSON of the form"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered(words, message, capsys):
    code = main(["port", *words])
    printed = capsys.readouterr()
    assert code == 2
    assert f"phalanx port: {message}" in " ".join(printed.err.split())
    assert "Traceback" not in printed.err


def test_the_dashes_before_an_old_command_are_no_value_of_an_option(capsys):
    assert main(["port", "--bogus", "--", "python", "train.py"]) == 2
    assert capsys.readouterr().err.count("no such option") == 1


def test_all_mistakes_of_a_command_are_told_together(capsys):
    assert main(["port", f"{TRAIN} --zebra 1 --batch-size x"]) == 2
    assert "2 problems" in capsys.readouterr().err


def test_a_config_that_two_dialects_have_must_be_chosen(capsys):
    words = ["python3", "train.py", "--config", "resnet8_test"]
    assert main(["port", "--", *words]) == 2
    assert "--config resnet8_test: exists in tf1 and in tf2; say which one is meant" in (
        capsys.readouterr().err
    )
    for name in ("tf1", "tf2"):
        assert main(["port", "--dialect", name, "--json", "--", *words]) == 0
        assert f'"line": "phalanx train {name}/resnet8_test' in capsys.readouterr().out


def test_the_path_of_a_script_tells_which_config_is_meant(capsys):
    for name, folder in {"tf1": "tensorflow/cnns/training", "tf2": "cnns/tensorflow2"}.items():
        script = f"/home/me/examples/{folder}/train.py"
        assert main(["port", "--json", "--", "python3", script, "--config", "resnet8_test"]) == 0
        assert f'"line": "phalanx train {name}/resnet8_test' in capsys.readouterr().out


def test_options_tell_dialects_apart(capsys, monkeypatch):
    script = dialect_choice.DIALECTS["tf1"].scripts["train.py"]
    fewer = replace(script, options=script.options[:1])
    other = replace(dialect_choice.DIALECTS["tf1"], name="other", scripts={"train.py": fewer})
    monkeypatch.setattr(dialect_choice, "DIALECTS", {"other": other, **dialect_choice.DIALECTS})
    assert main(["port", "--json", "--", *TRAIN.split()]) == 0
    assert '"dialect": "tf1"' in capsys.readouterr().out


def test_a_command_of_either_dialect_is_taken_as_one_of_them(capsys, monkeypatch):
    other = replace(dialect_choice.DIALECTS["tf1"], name="other", title="Other")
    monkeypatch.setattr(dialect_choice, "DIALECTS", {**dialect_choice.DIALECTS, "other": other})
    assert main(["port", "--json", "--", *TRAIN.split()]) == 0
    warning = "taken as a command of TensorFlow 1 (tf1); --dialect other if it is not"
    assert warning in capsys.readouterr().out
