"""Train a small byte-level GPT with Muon and AdamW on Python's standard library: two minutes on two CPU cores.

``python examples/train_gpt.py`` starts it and ``--help`` lists the options. The two functions to read are `fit`, the
training loop, and `make_optimizer`; what comes after them, and the other files, put a program around these: files,
pictures, checkpoints, several processes. A loop with nothing around it is minimal.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before torch is imported: threads that wait for each other sleep and do not spin. On two cores of which another
# program takes one, that is five times faster; on idle ones it costs a few per cent.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor
from torch.func import functional_call

import muonfx as mfx

# isort: split
# From the other files: nothing that is needed to read `fit` and `make_optimizer`.
from baseline import TorchMuon
from beside import Beside, describe
from gpt import GPT, generate
from options import DTYPES, RANK, STATE_DTYPES, Config, command_line, parse, prepare, tuned
from plots import NAMES, plot_comparison, plot_run
from processes import anywhere, processes, rank
from runs import Run, ctrl_c, newest, progress_bar, write_json, write_text
from sharded import WAYS, OneProcess
from text import Corpus

Params = dict[str, Tensor]


def fit(
    run: Run,
    tx: mfx.Transform | TorchMuon,
    params: Params,
    state: Any,
    grads_of: Callable[[Params, Tensor, Tensor], tuple[Params, float]],
    after_step: Callable[[Params, Any], bool],
) -> Params:
    """Train until all steps are done or ``after_step`` says to stop, and return the parameters.

    Args:
        run: the config and the text; it takes the time and keeps the losses.
        tx: the optimizer.
        params: name to tensor.
        state: what ``tx.init(params)`` returned.
        grads_of: gradients and loss of parameters, inputs and targets, as `torch.func.grad_and_value` makes it.
        after_step: validates, saves and shows; called with the parameters and the state behind each step.
    """
    config = run.config
    for step in range(run.step, config.steps):
        inputs, targets = run.corpus.batch(config.seed, step, config.batch, config.context)
        with run.timing("forward and backward"):
            grads, loss = grads_of(params, inputs, targets)
        with run.timing("optimizer"):
            # Donated: nobody needs these gradients or the old state again, so their storage becomes the new ones'.
            updates, state = tx.update(grads, state, params, donate=True)
            params = mfx.apply_updates(params, updates, donate=True)
        run.train_losses.append(loss)
        if after_step(params, state):
            break
    return params


def make_optimizer(config: Config, labels: mfx.Labels) -> mfx.Transform | TorchMuon:
    """Clip; a direction for the hidden matrices and one for the rest; decay; a learning rate for each of the two."""
    hidden_rate, rest_rate = schedule(config, config.lr), schedule(config, config.rest_lr)
    if config.optimizer == "torch-muon":
        return TorchMuon(labels, hidden_rate, rest_rate, weight_decay=config.weight_decay, max_norm=config.max_norm)

    average, first, second = STATE_DTYPES[config.state_dtype]
    adam = mfx.scale_by_adam(0.9, 0.95, mu_dtype=first, nu_dtype=second)
    # fp32 and not "auto", which depends on the machine: a resumed run must keep the dtype of its products.
    muon = [mfx.momentum(0.95, nesterov=True, dtype=average), mfx.orthogonalize(dtype=torch.float32)]
    hidden = {
        "muon": mfx.chain(*muon, mfx.scale_by_shape("match_rms_adamw")),
        "normuon": mfx.chain(*muon, mfx.normalize_neurons(0.95), mfx.scale_by_shape("match_rms_adamw")),
        "adamw": adam,
    }
    rates = {"hidden": mfx.scale_by_learning_rate(hidden_rate), "rest": mfx.scale_by_learning_rate(rest_rate)}
    tx = mfx.chain(
        mfx.clip_by_global_norm(config.max_norm),
        mfx.partition({"hidden": hidden[config.optimizer], "rest": adam}, labels),
        mfx.add_decayed_weights(config.weight_decay, mask=mfx.select.ndim(min=2)),
        mfx.partition(rates, labels),
    )
    return tx if config.dtype == "fp32" else mfx.master_params(tx)


def schedule(config: Config, peak: float) -> mfx.Schedule:
    """Warm up for a twentieth of the steps, hold, and fall to zero over the second half."""
    warmup = max(1, config.steps // 20)
    return mfx.warmup_stable_decay_schedule(peak, warmup, config.steps // 2, config.steps, start=peak / warmup)


def train(
    config: Config,
    corpus: Corpus,
    kept: Path,
    *,
    shard: str | None = None,
    offload: str | None = None,
    resume: bool = False,
    save_every: int = 100,
) -> dict[str, Any]:
    """Train, validate, save, and return the metrics. Ctrl-C ends it between two steps, with a checkpoint.

    With ``shard``, all processes together; `sharded` has the ways. In one process, ``way.grads`` is one call of
    `torch.func.grad_and_value`.
    """
    torch.set_num_threads(config.threads)
    judge = corpus.validation_batches(config.validation_batches, config.batch, config.context)
    model = GPT(width=config.width, depth=config.depth, context=config.context, seed=config.seed)
    labels = mfx.default_labels(model, muon="hidden", other="rest")
    announce(config, corpus, labels, model)
    beside = Beside(config, corpus, make_optimizer(config, labels), newest(kept) if resume else None, shard)

    way = (OneProcess if shard is None else WAYS[shard])(model, DTYPES[config.dtype])
    home = str(kept.parent / "offload") if offload == "disk" else offload
    params, tx = way.params, way.optimizer(make_optimizer(config, labels), home)
    state = tx.init(params)
    run = Run(config, corpus, sum(p.numel() for p in params.values()))
    if resume:
        run.load(kept, tx, params, state)
    describe(way, tx, state, kept.parent / "plan.svg")

    with ctrl_c() as pressed, progress_bar(run) as show:

        def after_step(params: Params, state: Any) -> bool:
            last, stop = run.step == config.steps, anywhere(pressed())
            if last or run.step % config.validate_every == 0:
                with run.timing("validation"):
                    run.add_validation(sum(way.loss(params, *batch) for batch in judge) / len(judge))
            if last or stop or run.step % save_every == 0:
                run.save(kept, tx, params, state)
            show(schedule(config, config.lr)(run.step - 1))
            return stop

        params = fit(run, tx, params, state, way.grads, after_step)
    beside.show(run.train_losses)
    return run.metrics() | beside.metrics() | {"sample": sample(config, way.whole(params))}


def sample(config: Config, params: dict[str, Tensor]) -> str:
    """What the model writes; the first process asks it, for all."""
    if rank() > 0:
        return ""
    model = GPT(width=config.width, depth=config.depth, context=config.context, seed=config.seed)
    return generate(lambda text: functional_call(model, params, (text,)), config.context, config.seed)


def compare(
    names: list[str], config: Config, corpus: Corpus, out: Path, kept: Path, *, resume: bool, save_every: int
) -> bool:
    """Train the same model with each optimizer, from the same weights on the same batches; False if stopped early."""
    runs: dict[str, dict[str, Any]] = {}
    for name in names:
        own = out / name
        own.mkdir(parents=True, exist_ok=True)
        again = resume and bool(mfx.checkpoint.checkpoints(kept / name))
        runs[name] = train(tuned(config, name), corpus, kept / name, resume=again, save_every=save_every)
        if not finish(runs[name], own, kept / name):
            return False
    write_json(out / "comparison.json", runs)
    plot_comparison(runs, out / "comparison.png")
    print(f"\n{'optimizer':<18}{'lr':>8}{'rest lr':>9}{'val loss':>10}{'seconds':>9}{'optimizer':>11}{'tokens/s':>10}")
    for name, run in runs.items():
        seconds = run["seconds"]["forward and backward"] + run["seconds"]["optimizer"]
        print(
            f"{NAMES[name]:<18}{run['config']['lr']:>8.4g}{run['config']['rest_lr']:>9.4g}"
            f"{run['final_validation_loss']:>10.4f}{seconds:>9.1f}{run['optimizer_share_of_step']:>11.1%}"
            f"{run['tokens_per_second']:>10.0f}"
        )
    print("seconds and optimizer: those spent in training steps, and the optimizer's share of them\n")
    print(f"plot:       {out / 'comparison.png'}\nmetrics:    {out / 'comparison.json'}")
    return True


def announce(config: Config, corpus: Corpus, labels: mfx.Labels, model: GPT) -> None:
    """Print what is about to be trained, on what, and which parameter goes where."""
    if rank() > 0:
        return
    print(f"{NAMES[config.optimizer]}, seed {config.seed}, {config.threads} threads: {corpus}\n")
    rows, totals = str(mfx.describe(labels, model)).split("\n\n")
    shown = [row for row in rows.splitlines() if not row.startswith("blocks.") or row.startswith("blocks.0.")]
    print("\n".join([*shown, f"... and so in each of {config.depth} blocks", "", totals, ""]), flush=True)


def finish(metrics: dict[str, Any], out: Path, kept: Path) -> bool:
    """Write metrics, sample and plot, print where they are, and say whether all steps are done."""
    complete = metrics["steps_done"] == metrics["config"]["steps"]
    if rank() > 0:
        return complete
    files = {"plot": out / "loss.png", "metrics": out / "metrics.json", "sample": out / "sample.txt"}
    write_json(files["metrics"], metrics)
    write_text(files["sample"], metrics["sample"] + "\n")
    plot_run(metrics, files["plot"])
    files["checkpoint"] = mfx.checkpoint.checkpoints(kept)[-1]
    loss = metrics["final_validation_loss"]
    if complete:
        print(f"\n{' a sample of what it writes ':-^80}\n{metrics['sample']}\n{'':-^80}")
    print(
        f"\n{metrics['steps_done']} of {metrics['config']['steps']} steps, "
        + (f"validation loss {loss:.4f} nats per byte, " if loss is not None else "")
        + f"{metrics['tokens_per_second'] / 1e3:.1f}k tokens/s, {metrics['seconds']['wall']:.0f} s in all, "
        f"optimizer {metrics['optimizer_share_of_step']:.1%} of a training step\n"
    )
    print("\n".join(f"{what + ':':<12}{path}" for what, path in files.items()), flush=True)
    return complete


def main(arguments: list[str] | None = None) -> int:
    config, corpus, out, kept, options = parse(arguments)
    run = {"resume": options.resume, "save_every": options.save_every}
    try:
        prepare(out, kept, resume=options.resume)
        with processes(options.shard):
            complete = (
                compare(options.optimizer, config, corpus, out, kept, **run)
                if len(options.optimizer) > 1
                else finish(train(config, corpus, kept, shard=options.shard, offload=options.offload, **run), out, kept)
            )
    except (ValueError, mfx.checkpoint.CheckpointError) as problem:
        print(f"train_gpt.py: error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    if not complete and RANK == 0:
        again = [word for word in (sys.argv[1:] if arguments is None else arguments) if word != "--resume"]
        count = int(os.environ["WORLD_SIZE"]) if options.shard else 1
        print(f"\nstopped; to go on: {command_line([*again, '--resume'], processes=count)}")
    return 0 if complete else 130


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # torch's own threads may outlive the interpreter and then abort it: seen after 1 of 20 runs of --shard tp.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
