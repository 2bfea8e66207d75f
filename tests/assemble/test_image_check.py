"""A run's images are checked by the cores before a GPU decodes them, across resumes and forks."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from checked_feed import CPU, open_checked_feed
from phalanx.assemble import build, feed
from phalanx.assemble.blackbox import prepare_replay
from phalanx.assemble.fork import prepare_fork
from phalanx.assemble.prepare import prepare_resume
from phalanx.cli.main import main
from phalanx.data.loading.decoder_choice import DecoderChoice
from phalanx.data.loading.gpu_decode import GpuDecoder
from phalanx.data.loading.gpu_share import ImageCheck
from small_jpegs import end_in_scan, lose_rows, stand_in, write_files
from small_runs import read_result, rewind

BAD, DAMAGED = (1, 14), (0, 6, 15)
FIRST, STEPS = 3, 12  # the GPU's first step, and all
WAITED_LONG = ImageCheck(since=0, is_decided=True, waited=0.5)


@pytest.fixture
def damaged(tmp_path):
    """A folder with images that the cores cannot decode, and some that only they should."""
    root = tmp_path / "data"
    return write_files(root, dict.fromkeys(BAD, end_in_scan) | dict.fromkeys(DAMAGED, lose_rows))


def read(root, check, *, start=0, stop=STEPS, percent=100):
    """The images of these steps, the files that the decoder got, what is known then, and notes."""
    seen = []
    with open_checked_feed(root, seen, check=check, percent=percent, ranks=None) as feed:
        batches = feed.batches_from(start)
        steps = [torch.cat([batch.images for batch in next(batches)]) for _ in range(start, stop)]
        return steps, seen, feed.image_check(stop), feed.new_notes


@pytest.mark.parametrize("step", [1, 2, FIRST, 5])
def test_a_resume_decodes_as_the_run_has_done(damaged, step):
    whole, by_gpu, end, notes = read(damaged, WAITED_LONG)
    assert set(end.cores_only) == {*BAD, *DAMAGED} and len(by_gpu) > 40
    assert [line.split(":")[0] for line in notes] == ["the GPU decodes JPEGs from step 4 on"]
    begun, _, known, _ = read(damaged, WAITED_LONG, stop=step)
    resumed, again, after, _ = read(damaged, known, start=step)
    assert all(torch.equal(one, other) for one, other in zip(whole, begun + resumed, strict=True))
    assert set(again) == set(by_gpu) and after == end


def test_without_a_measurement_the_cores_go_on(damaged):
    steps, seen, known, notes = read(damaged, ImageCheck(since=0))
    by_cores = read(damaged, ImageCheck(since=0), percent=0)
    assert not seen and known.waited is None and set(known.cores_only) == {*BAD, *DAMAGED}
    assert notes[0].startswith("the cores go on decoding from step 4 on: too few steps to tell")
    assert all(torch.equal(one, other) for one, other in zip(steps, by_cores[0], strict=True))
    assert by_cores[2] is None, "cores that check nothing must not say that they have"


def test_cores_that_take_over_from_a_gpu_say_so(damaged):
    *_, notes = read(damaged, WAITED_LONG, percent=0)
    assert notes == [
        "this run was to decode JPEGs on the GPU; here the cores decode them, and pixels differ by "
        "rounding"
    ]


# --- what a run knows where it starts ---


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of twelve steps on the CPU, with a checkpoint after each epoch of three."""
    root = tmp_path_factory.mktemp("run")
    flags = {"data": "folder", "data-dir": write_files(root / "data", {}), "model": "resnet8"}
    flags |= {"image-size": 32, "batch-size": 8, "epochs": 4, "validation-mode": "none"}
    flags |= {"run-dir": root / "run", "workers": 0, "device": "cpu", "keep": 9}
    assert main(["train", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    return root / "run"


def as_checked(prepared, *, since=0, cores_only=()):
    """The prepared run, as if its checkpoint had been saved by a process that checks images."""
    facts = prepared.start.facts
    known = {"since": since, "is_decided": True, "waited": 0.4, "cores_only": [*cores_only]}
    facts = {**facts, "state": {**facts["state"], "image_check": known}}
    return replace(prepared, start=replace(prepared.start, facts=facts))


def test_images_are_checked_since_the_first_step_that_checks_them(run):
    resumed = prepare_resume(run, {})
    assert resumed.image_check == ImageCheck(since=STEPS), "a run on the CPU checks nothing"
    known = as_checked(resumed, since=2, cores_only=(5, 7)).image_check
    assert known == ImageCheck(2, is_decided=True, waited=0.4, cores_only=(5, 7))


def test_images_that_may_have_changed_are_checked_again(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "run")
    checked_again = ImageCheck(since=STEPS)
    accepting = as_checked(prepare_resume(run, {}, accept_changed_data=True))
    assert accepting.image_check == checked_again
    resumed = as_checked(prepare_resume(run, {}))
    resumed.run.update_facts(accepted_changed_data=[3])
    assert resumed.image_check.is_decided
    resumed.run.update_facts(accepted_changed_data=[3, STEPS])  # when no step had followed yet
    assert resumed.image_check == checked_again


def test_a_fork_checks_the_images_itself(run, tmp_path):
    fork = tmp_path / "fork"
    forked = as_checked(prepare_fork(run, {"run-dir": str(fork), "epochs": "9"}, line=""))
    assert forked.image_check == prepare_resume(fork, {}).image_check == ImageCheck(since=STEPS)


def test_a_replay_knows_what_the_run_found_out_later(run):
    checked = as_checked(prepare_resume(run, {}), cores_only=(5,))
    assert prepare_replay(checked, 2)[0].image_check == checked.image_check
    checked_later = as_checked(prepare_resume(run, {}), since=6)
    assert prepare_replay(checked_later, 2)[0].image_check == ImageCheck(since=0)


# --- whole runs ---


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that has waited long for images, played by the CPU; the files that it has decoded."""
    seen = []

    def decode(files):
        seen.extend(file.numpy().tobytes() for file in files)
        return [255 - pixels for pixels in stand_in(files)]  # unlike what the cores decode

    def choose_decoder(spec, plan, device, config, *rest):
        there = config.replace_options({"device": "cuda"})
        return build.choose_decoder(spec, plan, torch.device("cuda"), there, *rest)

    def choose_backend(spec, device, config):
        def build_decoder(reader, open_rows):
            takes_any = reader.gpu_share.percent > 0
            return (
                GpuDecoder(reader, CPU, open_rows=open_rows, decode=decode) if takes_any else None
            )

        return build_decoder if spec.gpu_percent else None

    def conclude(choice, gather, *, is_over):
        choice.is_decided, choice.waited = is_over, 0.5 if is_over else None

    monkeypatch.setattr(build, "find_gpu_decode_problem", lambda device: "")
    monkeypatch.setattr(build, "has_decoding_engines", lambda device: True)
    monkeypatch.setattr(build, "holds_large_jpegs", lambda source: True)
    monkeypatch.setattr(feed, "choose_decoder", choose_decoder)
    monkeypatch.setattr(feed, "choose_backend", choose_backend)
    monkeypatch.setattr(DecoderChoice, "conclude", conclude)
    return seen


def train(run, *words):
    """The digest of the weights at the end."""
    assert main(["train", *map(str, words)]) == 0
    return read_result(run)["weights_sha256"]


def words_of(data, run, **flags):
    """Four epochs of three steps, and a checkpoint after each step."""
    flags = {"data": "folder", "data-dir": data, "run-dir": run, "model": "resnet8", **flags}
    flags |= {"image-size": 32, "batch-size": 8, "epochs": 4, "ckpts-per-epoch": 3, "keep": 99}
    flags |= {"workers": 0, "device": "cpu", "lr": 0.05, "warmup-epoch": 0}
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


def replays(run, step, capsys):
    """Whether the step is repeated bit for bit."""
    capsys.readouterr()
    assert main(["replay", str(run), "--step", str(step), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["as_recorded"]


def test_a_run_resumed_anywhere_is_the_same_as_one_that_was_not(damaged, tmp_path, gpu, capsys):
    run = tmp_path / "run"
    weights = train(run, *words_of(damaged, run))
    assert gpu and "note: the GPU decodes JPEGs from step 4 on" in capsys.readouterr().out
    for step in (8, 5, 4, 3, 2):
        rewind(run, step=step)
        assert train(run, "--resume", run) == weights, step
        said = capsys.readouterr().out
        assert "from step 4 on" in said
        assert ("note: the cores decode every image once" in said) == (step < FIRST)
        assert replays(run, 9, capsys)
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if checkpoint.name != f"step-{STEPS:08}":
            shutil.rmtree(checkpoint)
    assert replays(run, 6, capsys), "what only the last checkpoint knows"
    by_cores = tmp_path / "by-cores"
    assert train(by_cores, *words_of(damaged, by_cores, gpu_decode="false")) != weights
    whole = {path.read_bytes(): int(path.stem) for path in damaged.glob("train/*/*.jpg")}
    assert not {whole[file] for file in gpu} & {*BAD, *DAMAGED}


def test_images_of_steps_without_a_gpu_are_checked_later(damaged, tmp_path, gpu, monkeypatch):
    run = tmp_path / "run"
    monkeypatch.setattr(build, "has_decoding_engines", lambda device: False)
    train(run, *words_of(damaged, run))
    assert not gpu
    monkeypatch.setattr(build, "has_decoding_engines", lambda device: True)
    rewind(run, step=4)
    train(run, "--resume", run)
    whole = {path.read_bytes(): int(path.stem) for path in damaged.glob("train/*/*.jpg")}
    assert gpu and not {whole[file] for file in gpu} & {*BAD, *DAMAGED}
    log = (run / "log.txt").read_text()
    assert "up to step 9; then the GPU" in log and "the GPU decodes JPEGs from step 10 on" in log
