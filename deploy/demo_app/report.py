"""The report that the demo prints at the end, and its plot."""

from __future__ import annotations

import dataclasses
import pathlib
import statistics


@dataclasses.dataclass
class Run:
    """One training run: loss and optimizer time by step."""

    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    optimizer_s: dict[int, float] = dataclasses.field(default_factory=dict)
    starts: list[dict] = dataclasses.field(default_factory=list)
    sample: str = ""
    memory: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, event: dict) -> None:
        if event["event"] == "start":
            self.starts.append(event)
        elif event["event"] == "memory":
            self.memory = event
        elif event["event"] == "sample":
            self.sample = event["text"]
        else:
            self.losses[event["step"]] = event["loss"]
            self.optimizer_s[event["step"]] = event["optimizer_s"]


def table(
    optstate: Run, torch: Run, steps: int, names: tuple[str, str] = ("optstate", "torch")
) -> str:
    """About a dozen steps: loss and time in the optimizer, of both."""
    first, second = names
    lines = [
        f"  step   {'loss ' + first:>13s}   {'loss ' + second:>10s}   difference"
        f"   {'optimizer ' + first:>18s}   {second}"
    ]
    shown = sorted({*range(0, steps, max(1, steps // 12)), steps - 1})
    for step in shown:
        difference = optstate.losses[step] - torch.losses[step]
        lines.append(
            f"{step + 1:6d}   {optstate.losses[step]:13.6f}   {torch.losses[step]:10.6f}"
            f"   {difference:+10.1e}   {1e3 * optstate.optimizer_s[step]:15.1f} ms"
            f"   {1e3 * torch.optimizer_s[step]:5.1f} ms"
        )
    return "\n".join(lines)


def summary(optstate: Run, torch: Run) -> str:
    """The largest loss difference and the optimizers' times, without first steps."""
    differences = {step: abs(loss - torch.losses[step]) for step, loss in optstate.losses.items()}
    worst = max(differences, key=differences.get)
    started = {start["step"] for start in (*optstate.starts, *torch.starts)}
    medians = [
        1e3 * statistics.median(s for step, s in run.optimizer_s.items() if step not in started)
        for run in (optstate, torch)
    ]
    return (
        f"largest difference of the losses: {differences[worst]:.1e} (step {worst + 1})\n"
        f"time in the optimizer, clipping included, median: optstate {medians[0]:.1f} ms,"
        f" torch.optim (fused) {medians[1]:.1f} ms"
    )


def memory_table(optstate: Run, torch: Run) -> str:
    """Returns a table of the memory of both runs after their last step."""
    rows = (
        ("optimizer state, in each trainer", "state"),
        ("parameters, in each trainer", "parameters"),
        ("all that is a trainer's own", "own"),
        ("state and parameters in the daemon, once for both ranks", "daemon"),
    )
    lines = [f"  {'MiB':58s}{'optstate':>10s}{'torch':>10s}"]
    for label, key in rows:
        values = "".join(f"{run.memory[key] / 2**20:10.1f}" for run in (optstate, torch))
        lines.append(f"  {label:58s}{values}")
    return "\n".join(lines)


def plot(optstate: Run, torch: Run, restart: int, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for run, label, style in (
        (torch, "torch.optim.AdamW", "-"),
        (optstate, "optstate.AdamW", "--"),
    ):
        steps = sorted(run.losses)
        axes.plot(
            [step + 1 for step in steps], [run.losses[step] for step in steps], style, label=label
        )
    axes.axvline(restart, color="gray", linewidth=0.8)
    axes.annotate(
        "trainers killed,\nre-attached",
        (restart, max(torch.losses.values())),
        textcoords="offset points",
        xytext=(4, -24),
        color="gray",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (mean of the ranks)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
