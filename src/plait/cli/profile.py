"""`plait profile`: measure this machine for predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from plait.cli.app import Place, Whole
from plait.cli.output_files import files_of
from plait.errors import ConfigError
from plait.observe.screen import say

if TYPE_CHECKING:
    from plait.cost.profile import Profile

MOST_THREADS = 4096


def profile(
    *,
    model: str = "smollm2-135m",
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16",
    device: Literal["cpu", "cuda"] = "cpu",
    threads: Whole = 1,
    quick: Annotated[bool, Parameter(negative="")] = False,
    out: Place | None = None,
    overwrite: bool = False,
) -> int:
    """Measure what this machine does with a model's layers, for predictions.

    Parameters
    ----------
    model
        A model whose shape is measured, with random weights: a name, a folder, a hub id or a config.json.
    dtype
        bfloat16, float32 or float64, of the weights in compute.
    device
        cpu or cuda.
    threads
        CPU threads of one process.
    quick
        Measure few sizes, in half a minute.
    out
        File for the profile; by default it is kept in plait's cache, by machine, model and its shape, dtype
        and threads.
    overwrite
        Replace a file that `--out` names.
    """
    if not 1 <= threads <= MOST_THREADS:
        raise ConfigError(f"--threads: expected 1 to {MOST_THREADS}, found {threads}")
    files_of(overwrite, out=out)
    from plait.cost.estimate import model_shape
    from plait.models.files.hub import read_config

    config = read_config(model)
    model_shape(model)
    _check_device(device, dtype)
    from plait.cost.kept_profiles import check_kept, keep_profile, save_profile
    from plait.cost.measured.measuring import measure

    if out is None:
        check_kept()

    measured = measure(model, config, dtype, device, threads, quick=quick)
    if out is None:
        path = keep_profile(measured)
    else:
        path = out
        save_profile(measured, path)
    _describe(measured, model)
    say(f"written to {path}")
    return 0


def _describe(measured: Profile, model: str) -> None:
    from plait.cost.gpu_links import links_of

    say(f"{measured.machine}: {model} in {measured.dtype}, {measured.threads} thread{'s' * (measured.threads > 1)}")
    tokens, seconds = measured.forward[-1]
    samples, context, step = measured.decode[-1]
    back_tokens, back = measured.backward[-1]
    say(f"  a layer forward over {tokens} tokens   {1e3 * seconds:.2f} ms")
    say(f"  a layer backward over {back_tokens} tokens   {1e3 * back:.2f} ms")
    say(f"  a layer for {samples} samples of {context} tokens   {1e3 * step:.2f} ms")
    say(f"  all beside layers in a step of {samples} samples   {1e3 * measured.drawing_s(samples):.2f} ms")
    say(f"  copies {measured.copy_bytes_per_s / 1e9:.1f} GB/s{_between(measured)}")
    if measured.device == "cuda":
        say(f"  {links_of(measured).label}")
    say(f"  steps of other sizes are predicted with a mean error of {measured.error:.0%}")


def _between(measured: Profile) -> str:
    return "" if measured.send is None else f", between processes {measured.send.bytes_per_s / 1e9:.1f} GB/s"


def _check_device(device: str, dtype: str) -> None:
    from plait.launch.process import check_processes
    from plait.models.devices import check_cuda

    if device == "cuda":
        check_cuda(dtype, "--device")
    else:
        check_processes()  # two of them show what links take
