"""Names that many programs have for what a run needs, and that are of no one system: an unknown key that is one of them
is answered with ours. Torch-free."""

from __future__ import annotations

_PLACED = (
    "; how calls are sharded and placed is said by a plan: `--devices N` finds one for N devices, and a file given by "
    "`plan` states `{}` of each call (docs/plans.md)"
)
_WHOLE = "{}; `--devices N` finds a plan, with `dp`, `tp` and `pp` of each call (docs/plans.md)"
_DEVICES = "; did you mean `devices`? `--devices N` runs on N devices, by a plan that is found for them (docs/plans.md)"
_TRACKERS = "; did you mean `trackers`? They are `tensorboard` and `wandb`; `metrics.jsonl` is always written"
_PATIENCE = "; did you mean `evaluation.patience`? With `evaluation.best_by` it ends a run that gets no better"
_MEANT = {
    _PLACED.format("dp"): "dp dp_size data_parallel",
    _PLACED.format("tp"): "tp tp_size tensor_parallel",
    _PLACED.format("pp"): "pp pp_size pipeline_parallel pipeline_parallel_size",
    _WHOLE.format("; a sample is not divided by its tokens"): "cp cp_size context_parallel context_parallel_size",
    _WHOLE.format(
        "; a mixture's experts are divided with `tp`"
    ): "ep ep_size expert_parallel expert_model_parallel_size",
    _DEVICES: "gpus n_gpus num_gpus ngpus num_devices n_devices world_size nproc nproc_per_node gpus_per_node",
    _TRACKERS: "logger loggers tensorboard mlflow comet swanlab trackio",
    _PATIENCE: "early_stopping early_stopping_patience early_stop patience",
}
"""What to say → the names that it answers."""
_SAID = {name: said for said, names in _MEANT.items() for name in names.split()}


def usual_answer(key: str) -> str:
    """What to say of an unknown key that is a usual name, to be put behind `unknown key …`; empty where it is none."""
    return _SAID.get(key.lower(), "")


def usual_value(key: str) -> str:
    """What to say of a value that a key does not take, where more are known elsewhere; empty of other keys."""
    is_tracker = key.partition(".")[0] == "trackers"
    return "; leave it out: `metrics.jsonl` in `run_dir` is always written (docs/metrics.md)" if is_tracker else ""
