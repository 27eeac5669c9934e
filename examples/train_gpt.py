"""Train a small byte-level GPT with Muon and AdamW on Python's standard library, in two minutes on two CPU cores.

Run ``python examples/train_gpt.py``; ``--help`` lists the options. The functions to read are `fit`, the training loop,
and `make_optimizer`. The rest of this file and the other files handle output, plots, checkpoints and several processes.
minimal.py is a training loop without these.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Set before torch is imported, so that waiting threads sleep instead of spinning. This is five times faster if another
# program uses one of two cores, and a few per cent slower on an idle machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor
from torch.func import functional_call

import muonfx as mfx

# isort: split
# The other files of this folder, which are not needed to understand `fit` and `make_optimizer`.
from baseline import TorchMuon
from gpt import GPT, generate
from options import DTYPES, RANK, STATE_DTYPES, Config, command_line, parse, prepare, tuned
from plots import NAMES, plot_comparison, plot_run
from processes import any_rank, processes, rank
from reference import Reference, describe
from runs import Run, ctrl_c, newest, progress_bar, write_json, write_text
from sharded import STRATEGIES, OneProcess
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
    """Train until all steps are done or ``after_step`` returns True, and return the parameters.

    Args:
        run: configuration and text; records times and losses.
        tx: the optimizer.
        params: dict of tensors by name.
        state: the result of ``tx.init(params)``.
        grads_of: function of parameters, inputs and targets that returns gradients and loss, as
            `torch.func.grad_and_value` creates it.
        after_step: function of the parameters and the state, called after each step to validate, save and print;
            True stops the training.
    """
    config = run.config
    for step in range(run.step, config.steps):
        inputs, targets = run.corpus.batch(config.seed, step, config.batch, config.context)
        with run.timing("forward and backward"):
            grads, loss = grads_of(params, inputs, targets)
        with run.timing("optimizer"):
            # donate=True: gradients and old state are not needed again, so the new tensors may reuse their memory.
            updates, state = tx.update(grads, state, params, donate=True)
            params = mfx.apply_updates(params, updates, donate=True)
        run.train_losses.append(loss)
        if after_step(params, state):
            break
    return params


def make_optimizer(config: Config, labels: mfx.Labels) -> mfx.Transform | TorchMuon:
    """Return a chain of clipping, Muon for hidden matrices and AdamW for the rest, weight decay and learning rates."""
    hidden_rate, rest_rate = schedule(config, config.lr), schedule(config, config.rest_lr)
    if config.optimizer == "torch-muon":
        return TorchMuon(labels, hidden_rate, rest_rate, weight_decay=config.weight_decay, max_norm=config.max_norm)

    average, first, second = STATE_DTYPES[config.state_dtype]
    adam = mfx.scale_by_adam(0.9, 0.95, mu_dtype=first, nu_dtype=second)
    # "auto" depends on the machine, and a resumed run must keep the dtype of its matrix products.
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
        mfx.add_decayed_weights(config.weight_decay, mask=mfx.routing.ndim(min=2)),
        mfx.partition(rates, labels),
    )
    return tx if config.dtype == "fp32" else mfx.master_params(tx)


def schedule(config: Config, peak: float) -> mfx.Schedule:
    """Return a schedule with warmup over a twentieth of the steps, then ``peak``, and decay over the second half."""
    warmup = max(1, config.steps // 20)
    return mfx.warmup_stable_decay_schedule(peak, warmup, config.steps // 2, config.steps, start=peak / warmup)


def train(
    config: Config,
    corpus: Corpus,
    checkpoints: Path,
    *,
    shard: str | None = None,
    offload: str | None = None,
    resume: bool = False,
    save_every: int = 100,
) -> dict[str, Any]:
    """Train, validate, save, and return the metrics. Ctrl-C stops between two steps and saves a checkpoint.

    If ``shard`` is given, all processes must call this; the module `sharded` has the strategies. In one process,
    ``strategy.grads`` is a call of `torch.func.grad_and_value`.
    """
    torch.set_num_threads(config.threads)
    val_batches = corpus.validation_batches(config.validation_batches, config.batch, config.context)
    model = GPT(width=config.width, depth=config.depth, context=config.context, seed=config.seed)
    labels = mfx.default_labels(model, muon="hidden", other="rest")
    announce(config, corpus, labels, model)
    reference = Reference(
        config, corpus, make_optimizer(config, labels), newest(checkpoints) if resume else None, shard
    )

    strategy = (OneProcess if shard is None else STRATEGIES[shard])(model, DTYPES[config.dtype])
    store = str(checkpoints.parent / "offload") if offload == "disk" else offload
    params, tx = strategy.params, strategy.optimizer(make_optimizer(config, labels), store)
    state = tx.init(params)
    run = Run(config, corpus, sum(p.numel() for p in params.values()))
    if resume:
        run.load(checkpoints, tx, params, state)
    describe(strategy, tx, state, checkpoints.parent / "plan.svg")

    with ctrl_c() as pressed, progress_bar(run) as show:

        def after_step(params: Params, state: Any) -> bool:
            last, stop = run.step == config.steps, any_rank(pressed())
            if last or run.step % config.validate_every == 0:
                with run.timing("validation"):
                    run.add_validation(sum(strategy.loss(params, *batch) for batch in val_batches) / len(val_batches))
            if last or stop or run.step % save_every == 0:
                run.save(checkpoints, tx, params, state)
            show(schedule(config, config.lr)(run.step - 1))
            return stop

        params = fit(run, tx, params, state, strategy.grads, after_step)
    reference.show(run.train_losses)
    return run.metrics() | reference.metrics() | {"sample": sample(config, strategy.full(params))}


def sample(config: Config, params: dict[str, Tensor]) -> str:
    """Return a text generated by the model on rank 0, and an empty text on other ranks."""
    if rank() > 0:
        return ""
    model = GPT(width=config.width, depth=config.depth, context=config.context, seed=config.seed)
    return generate(lambda text: functional_call(model, params, (text,)), config.context, config.seed)


def compare(
    names: list[str], config: Config, corpus: Corpus, out: Path, checkpoints: Path, *, resume: bool, save_every: int
) -> bool:
    """Train the model with each optimizer, from the same weights on the same batches; return False if stopped early."""
    runs: dict[str, dict[str, Any]] = {}
    for name in names:
        own = out / name
        own.mkdir(parents=True, exist_ok=True)
        again = resume and bool(mfx.checkpoint.checkpoints(checkpoints / name))
        runs[name] = train(tuned(config, name), corpus, checkpoints / name, resume=again, save_every=save_every)
        if not finish(runs[name], own, checkpoints / name):
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
    print("seconds: time spent in training steps; optimizer: its share of that time\n")
    print(f"plot:       {out / 'comparison.png'}\nmetrics:    {out / 'comparison.json'}")
    return True


def announce(config: Config, corpus: Corpus, labels: mfx.Labels, model: GPT) -> None:
    """Print the optimizer, the text and the label of each parameter."""
    if rank() > 0:
        return
    print(f"{NAMES[config.optimizer]}, seed {config.seed}, {config.threads} threads: {corpus}\n")
    rows, totals = str(mfx.describe(labels, model)).split("\n\n")
    shown = [row for row in rows.splitlines() if not row.startswith("blocks.") or row.startswith("blocks.0.")]
    print("\n".join([*shown, f"... and the same in each of {config.depth} blocks", "", totals, ""]), flush=True)


def finish(metrics: dict[str, Any], out: Path, checkpoints: Path) -> bool:
    """Write metrics, sample and plot, print their paths, and return True if all steps are done."""
    complete = metrics["steps_done"] == metrics["config"]["steps"]
    if rank() > 0:
        return complete
    files = {"plot": out / "loss.png", "metrics": out / "metrics.json", "sample": out / "sample.txt"}
    write_json(files["metrics"], metrics)
    write_text(files["sample"], metrics["sample"] + "\n")
    plot_run(metrics, files["plot"])
    files["checkpoint"] = mfx.checkpoint.checkpoints(checkpoints)[-1]
    loss = metrics["final_validation_loss"]
    if complete:
        print(f"\n{' a sample from the model ':-^80}\n{metrics['sample']}\n{'':-^80}")
    print(
        f"\n{metrics['steps_done']} of {metrics['config']['steps']} steps, "
        + (f"validation loss {loss:.4f} nats per byte, " if loss is not None else "")
        + f"{metrics['tokens_per_second'] / 1e3:.1f}k tokens/s, {metrics['seconds']['wall']:.0f} s in all, "
        f"optimizer {metrics['optimizer_share_of_step']:.1%} of a training step\n"
    )
    print("\n".join(f"{what + ':':<12}{path}" for what, path in files.items()), flush=True)
    return complete


def main(arguments: list[str] | None = None) -> int:
    config, corpus, out, checkpoints, options = parse(arguments)
    run = {"resume": options.resume, "save_every": options.save_every}
    try:
        prepare(out, checkpoints, resume=options.resume)
        with processes(options.shard):
            complete = (
                compare(options.optimizer, config, corpus, out, checkpoints, **run)
                if len(options.optimizer) > 1
                else finish(
                    train(config, corpus, checkpoints, shard=options.shard, offload=options.offload, **run),
                    out,
                    checkpoints,
                )
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
        print(f"\nstopped; to continue: {command_line([*again, '--resume'], processes=count)}")
    return 0 if complete else 130


if __name__ == "__main__":
    code = main()
    if "RANK" in os.environ:
        # Threads of torch may abort the process while the interpreter exits: seen in 1 of 20 runs of --shard tp.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
