"""Command line of axialtune: parse, call, print."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from codegen.spec import DEFAULT_BATCH, DEFAULT_EPS, DTYPES, BlockSpec, SpecError, parse_axes, parse_dtype
from codegen.target import Target, target

app = typer.Typer(
    help="Tunes and generates CUDA kernels for axial attention blocks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_WIDTH = None if sys.stdout.isatty() else 160  # a pipe has no width of its own, and tables should not be folded for it
console = Console(width=_WIDTH)
errors = Console(stderr=True)

Arch = Annotated[str | None, typer.Option(help="Target, e.g. sm_90; the GPU's own by default, sm_90 without one.")]
Gpu = Annotated[int | None, typer.Option(help="Which of the visible GPUs, from 0.")]
Out = Annotated[Path, typer.Option(help="Folder of the modules.")]
Fix = Annotated[list[str] | None, typer.Option("--fix", metavar="NAME=VALUE", help="Hold a tunable at a value; may be repeated.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a tunable; may be repeated.")]
Module = Annotated[Path, typer.Argument(metavar="FILE", help="An emitted module.")]


def _block(
    dim: Annotated[int, typer.Option(help="Channels; a multiple of the heads unless --head-dim is given.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    height: Annotated[int, typer.Option(help="Rows of the grid: the length of a column.")] = 32,
    width: Annotated[int, typer.Option(help="Columns of the grid: the length of a row.")] = 32,
    batch: Annotated[int, typer.Option(help="Batch to tune for; the module accepts any.")] = DEFAULT_BATCH,
    dtype: Annotated[str, typer.Option(help=f"Element type: {', '.join(DTYPES)}.")] = "float32",
    axis: Annotated[str, typer.Option(help="row, col or both.")] = "both",
    head_dim: Annotated[int | None, typer.Option(help="Channels of a head; dim / heads by default.")] = None,
    norm: Annotated[str, typer.Option(help="layer (LayerNorm), rms (RMSNorm) or none.")] = "layer",
    no_norm_affine: Annotated[bool, typer.Option("--no-norm-affine", help="The norm has no parameters.")] = False,
    post_norm: Annotated[bool, typer.Option("--post-norm", help="Normalise behind the residual, not before the branch.")] = False,
    qkv_bias: Annotated[bool, typer.Option("--qkv-bias", help="The QKV product has a bias.")] = False,
    no_out_bias: Annotated[bool, typer.Option("--no-out-bias", help="The output product has none.")] = False,
    no_residual: Annotated[bool, typer.Option("--no-residual", help="The input is not added to the branch.")] = False,
    eps: Annotated[float, typer.Option(help="The norm's epsilon.")] = DEFAULT_EPS,
    key_mask: Annotated[bool, typer.Option("--key-mask", help="Which tokens may be attended to is an input.")] = False,
    logit_bias: Annotated[bool, typer.Option("--logit-bias", help="A bias for each head is added to the scores.")] = False,
) -> BlockSpec:
    return BlockSpec(
        dim,
        heads,
        height,
        width,
        batch,
        parse_dtype(dtype),
        parse_axes(axis),
        eps,
        head_dim,  # type: ignore[arg-type]
        norm=norm,
        norm_affine=not no_norm_affine,
        post_norm=post_norm,
        qkv_bias=qkv_bias,
        out_bias=not no_out_bias,
        residual=not no_residual,
        key_mask=key_mask,
        logit_bias=logit_bias,
    )


def _of_a_block(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `_block` in the place of its first argument, the block that these state."""
    block = inspect.signature(_block, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def called(**given: Any) -> None:
        spec = _block(**{name: given.pop(name) for name in block})
        command(spec, **given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__signature__ = inspect.Signature([*block.values(), *own])  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*block.values(), *own)}
    return called


@app.command()
@_of_a_block
def tune(
    spec: BlockSpec,
    gpu: Gpu = None,
    arch: Arch = None,
    out: Out = Path("generated"),
    fix: Fix = None,
    trials: Annotated[int, typer.Option(min=1, help="Configurations to try per axis.")] = 60,
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds for searching, before the module is written.")] = 90.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the search and of the data.")] = 0,
    storage: Annotated[str | None, typer.Option(help="Optuna storage URL; 'none' keeps the search in memory.")] = None,
    study: Annotated[str | None, typer.Option(help="Base name of the studies; by default from the block.")] = None,
    tolerance: Annotated[float, typer.Option(min=1e-7, max=1e-1, help="Largest error of float32, relative to the output's scale.")] = 1e-5,
    fresh: Annotated[bool, typer.Option("--fresh", help="Take over nothing from earlier runs.")] = False,
) -> None:
    """Search, verify, and write the best configuration as a module."""
    from tuner.session import Request, run

    request = Request(spec, out, trials, budget, seed, gpu, arch, storage, study, tolerance, tuple(fix or ()), fresh, _command())
    raise typer.Exit(run(request, console))


@app.command()
@_of_a_block
def render(spec: BlockSpec, arch: Arch = None, set_: Set = None) -> None:
    """Print the CUDA source of one configuration."""
    from tuner.session import source_of

    sys.stdout.write(source_of(spec, _target(arch), set_ or ()).text)


@app.command()
def verify(
    file: Module,
    on: Annotated[str, typer.Option(help="cpu (the emulator) or gpu.")] = "cpu",
    gpu: Gpu = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data.")] = 0,
    tolerance: Annotated[float, typer.Option(min=1e-7, max=1e-1, help="Largest error of float32, relative to the output's scale.")] = 1e-5,
) -> None:
    """Check a module's kernels against the float64 reference; names the stage that disagrees first."""
    from tuner.session import verify_module

    verdict = verify_module(file, on, gpu, seed, tolerance)
    (console if verdict.ok else errors).print(f"{file}: {verdict.text}", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if verdict.ok else 1)


@app.command()
def bench(file: Module, gpu: Gpu = None) -> None:
    """Compare a module with PyTorch's forms of the block, in one run on a GPU."""
    from tuner.report import bench_table
    from tuner.session import bench_module

    rows, notes = bench_module(file, gpu)
    console.print(bench_table(rows))
    for note in notes:
        console.print(note, markup=False, highlight=False)


@app.command("list")
def list_(out: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the modules.")] = Path("generated")) -> None:
    """Show the modules in a folder: for which GPU, how fast."""
    import warnings

    from codegen.module import list_modules
    from tuner.report import modules_table

    if not out.is_dir():
        raise SpecError(f"{out} is not a folder")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        modules = list_modules(out)
    console.print(modules_table(modules) if modules else f"no modules in {out}")
    for warning in caught:
        errors.print(str(warning.message), markup=False, highlight=False)


@app.command()
def doctor() -> None:
    """Say what this machine can do, and what to install for the rest."""
    from tuner.doctor import can
    from tuner.doctor import doctor as examine
    from tuner.report import abilities_table, findings_table

    findings = examine()
    console.print(findings_table(findings))
    console.print(abilities_table(can(findings)))


@app.command()
def calibrate(
    records: Annotated[list[Path], typer.Argument(metavar="RECORDS", help="JSON lines of measured trials.")],
    write: Annotated[bool, typer.Option("--write", help="Replace the committed calibration.")] = False,
) -> None:
    """Fit the model that predicts without a GPU to recorded measurements."""
    from tuner.session import calibrate as fit_model

    console.print(fit_model(records, write), markup=False, highlight=False)


def _target(arch: str | None) -> Target:
    return target(arch or "sm_90")


def _command() -> str:
    return " ".join(["python", "cli.py", *sys.argv[1:]])


def main() -> None:
    """Runs the command line; what a user can get wrong ends in one line and exit code 2."""
    try:
        app(standalone_mode=True)
    except SpecError as error:
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
