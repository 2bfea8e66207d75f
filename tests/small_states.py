"""One training step of any small model, for tests."""

from phalanx.engine.step import StepOptions, build_forward_backward, build_pass, train_step


def take_step(state, passes, lr=1.0, *, loss_scale=1.0, **values):
    """A step with these options; [loss, gradient norm, top-1]."""
    given = {"label_smoothing": 0.0, "device_type": "cpu", "half": None, **values}
    options = StepOptions(**given)
    images = sum(len(batch.labels) for batch in passes)
    run_pass = build_pass(state.model, options, global_batch=images)
    forward_backward = build_forward_backward(run_pass, global_batch=images)
    return train_step(
        state,
        passes,
        lr,
        options=options,
        forward_backward=forward_backward,
        loss_scale=loss_scale,
    )
