"""`phalanx data show`: draw the augmented batch of a step."""

from pathlib import Path

from phalanx.cli.command import ALL_OPTIONS, Argument, ParsedArgs, command
from phalanx.config.read import Settings
from phalanx.errors import ConfigError


@command(
    "data show",
    "Draw the augmented batch of a step, exactly as training saw or will see it.",
    Argument("preset", "A preset, a YAML file, or a run folder.", metavar="PRESET|FILE|RUN"),
    Argument("--step", "Which step, counted from 1.", default="1"),
    Argument("--out", "Image file to write.", default="batch.png"),
    usage="[PRESET|FILE|RUN] --step K --out FILE",
    options=ALL_OPTIONS,
    examples={
        "phalanx data show --step 1 --out batch.png": "the first batch of the demo",
        "phalanx data show runs/demo --step 731": "what a past step of a run saw",
    },
)
def _show_batch(args: ParsedArgs) -> None:
    """Draw what the model sees in one step, before normalisation."""
    settings = _find_settings(args)
    from phalanx.assemble.dataset_summary import build_input_spec, plan_run
    from phalanx.data.loading.loader import Loader
    from phalanx.report.contact_sheet import write_contact_sheet

    plan, dataset = plan_run(settings)
    step = args.read_int("--step", 1, plan.total_steps, noun="a step")
    if settings.config.data.data == "synthetic":
        raise ConfigError("--data synthetic: its noise is made on the device, nothing to draw")
    with Loader(build_input_spec(settings.config, plan), workers=0, max_bad=plan.max_bad) as loader:
        (batch,) = next(loader.steps_from(step - 1, step, micro_batch=plan.global_batch))
    captions = [
        f"{dataset.classes[label]} #{index}"
        for label, index in zip(batch.labels, batch.indices, strict=True)
    ]
    title = f"{settings.name}: step {step:,} of {plan.total_steps:,}, {len(captions)} images"
    out = Path(args["--out"])
    write_contact_sheet(out, batch.pixels, captions, title=title)
    print(f"{out}: step {step:,}, {len(captions)} images")


def _find_settings(args: ParsedArgs) -> Settings:
    """The config of a run folder, or of a preset with flags."""
    name = args["preset"]
    if name and (Path(name) / "run.json").is_file():
        from phalanx.assemble.prepare import stored_options
        from phalanx.config.read import read_stored_settings
        from phalanx.report.folder import open_run

        args.refuse_problems()
        run = open_run(Path(name))
        return read_stored_settings(
            stored_options(run),
            flags=args.flags,
            where=str(run.config),
            name=run.facts["name"],
        )
    from phalanx.assemble.find_data import read_with_data

    return read_with_data(name, args.flags, problems=args.problems)
