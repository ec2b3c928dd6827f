"""Nodes that do not exist: a busy one, one with hostile texts, and one with 256 jobs."""

from __future__ import annotations

from canned_reports import (
    GIB,
    device_use,
    disk_state,
    event,
    histogram,
    job,
    node_report,
    timestamp,
    training_job,
)

__all__ = [
    "HOSTILE",
    "busy_node",
    "crowded_node",
    "hostile_node",
    "job",
    "node_report",
    "timestamp",
]

HOSTILE = "<img src='x' onerror=\"window.ran=1\"><script>window.ran=1</script>"


def busy_node(tick: int) -> dict:
    """Returns a node with jobs of every phase: in memory, on disks, with devices."""
    llama = training_job(
        "llama-70b-pretrain",
        tick,
        7.4,
        (410, 930, 6, 2900, 41),
        16,
        parameter_count="723",
        element_count="70553706496",
        state_bytes=str(1116 * GIB),
        storage={
            "placement": "PLACEMENT_NVME",
            "host_budget_bytes": str(160 * GIB),
            "sub_group_elements": "16777216",
            "durability": "DURABILITY_KIND_EVERY",
            "every_steps": 10,
            "interval_ms": 0,
        },
        engine_restarts=1,
        recovered_steps="1",
    )
    step = int(llama["committed_step"])
    llama["disk"] = disk_state(tick, step)
    llama["step_phases"].append(histogram("disk wait", step, 1900))
    llama["open_step"] = f"step {step + 1}: ranks 3, 7 have not committed"
    for rank, one in enumerate(llama["sessions"]):
        one["staged_parameters"] = str((tick * 13 + rank * 7) % 46)
        one["wire"] = "shm" if rank < 8 else "grpc"
    mistral = training_job("mistral-7b-sft", tick, 0.231, (3.1, 5.2, 0.3, 31, 0.9), 8)
    cpu = 700 * 10**9 + tick * 10**9
    mistral["device_updates"] = {
        "devices": ["NVIDIA H100 80GB HBM3"] * 2,
        "offload_fraction": 0.3,
        "device_elements": str(int(cpu * 7 / 3)),
        "cpu_elements": str(cpu),
        "problem": "",
        "uses": [device_use(0, int(cpu * 4 / 3)), device_use(1, cpu)],
        "log_bytes": str(3 * GIB),
    }
    vit = training_job(
        "vit-22b", tick, 1.9, (24, 160, 1.1, 420, 3), 8, uid=1011, optimizer="OPTIMIZER_KIND_LION"
    )
    vit["session_count"] = 7
    vit["sessions"] = [one for one in vit["sessions"] if one["rank"] != 5]
    rl = training_job("rl-policy-a", tick, 0.052, (0.8, 1.4, 0.1, 4.2, 0.3), 2, uid=1020)
    failed = job(
        "whisper-ft",
        10400,
        uid=1011,
        world_size=4,
        phase="JOB_PHASE_FAILED",
        reason=(
            "DATA_LOSS: record 211 of /mnt/nvme1/optstate/whisper-ft/records.1 does not have its "
            "checksum (tile 3); optctl recover whisper-ft --to-durable goes back to step 10390"
        ),
        engine_pid="0",
        committed_at=timestamp(-4100),
        state_bytes=str(22 * GIB),
    )
    loading = job(
        "qwen-32b-resume",
        0,
        8,
        phase="JOB_PHASE_LOADING",
        open_load="5 of 8 ranks have finished, 81604378624 bytes staged",
        state_bytes=str(230 * GIB),
        element_count="32763876352",
    )
    recovering = job(
        "t5-ablation-3",
        77120,
        2,
        uid=1020,
        phase="JOB_PHASE_RECOVERING",
        optimizer="OPTIMIZER_KIND_ADAFACTOR",
        open_step="step 77121: the engine died in it; waiting for ranks that have its gradients",
        state_bytes=str(11 * GIB),
        engine_restarts=2,
    )
    silent = job("bert-probe", 311, 1, ranks_unknown=True, state_bytes=str(2 * GIB), uid=1020)
    jobs = [llama, mistral, vit, rl, failed, loading, recovering, silent]
    report = node_report(
        tick,
        jobs,
        busy_events(),
        unanswered=[
            {"name": "bert-probe", "reason": "no answer within 2 s (the engine is stopped)"}
        ],
        memory_lock={
            "locked_bytes": str(1210 * GIB),
            "pending_bytes": str(9 * GIB),
            "unlocked_bytes": "0",
            "reason": "",
        },
    )
    report["devices"] = _devices(mistral)
    return report


def _devices(with_devices: dict) -> dict:
    uses = with_devices["device_updates"]["uses"]
    return {
        "setting": "cuda",
        "devices": [
            {
                "index": use["index"],
                "name": use["name"],
                "memory_bytes": use["memory_bytes"],
                "jobs": [{"job": with_devices["name"], "offload_fraction": 0.3, "use": use}],
            }
            for use in uses
        ],
        "note": "",
        "unanswered": [],
    }


def busy_events() -> list[dict]:
    # At a second, with a severity and a kind, of a job and by somebody.
    rows = [
        (-9000, "INFO", "job_created", "mistral-7b-sft", "uid 1004", "8 ranks, host memory."),
        (-4100, "ERROR", "job_failed", "whisper-ft", "", "DATA_LOSS: record 211 is damaged."),
        (-2400, "WARNING", "engine_died", "llama-70b-pretrain", "", "Signal 9; started again."),
        (-1300, "INFO", "job_set", "llama-70b-pretrain", "uid 0", "durability=every 10 steps"),
        (-700, "WARNING", "rank_lost", "vit-22b", "", "Rank 5 closed its session."),
        (-320, "INFO", "upgrade", "", "uid 0", "0.9.1 is in use; 7 engines were replaced."),
        (-95, "WARNING", "engine_died", "t5-ablation-3", "", "Signal 11 in step 77121."),
        (-20, "INFO", "rank_attached", "qwen-32b-resume", "", "Rank 4 attached over shm."),
    ]  # fmt: skip
    return [
        event(sequence, tick, severity, kind, text, job=name, actor=actor)
        for sequence, (tick, severity, kind, name, actor, text) in enumerate(rows, 101)
    ]


def hostile_node(tick: int) -> dict:
    """Returns a node of which every text is markup that would run a script, were it parsed."""
    bad = training_job(
        HOSTILE,
        tick,
        0.5,
        (1, 1, 1, 5, 1),
        2,
        phase="JOB_PHASE_FAILED",
        reason=HOSTILE,
        open_step=HOSTILE,
        open_load=HOSTILE,
    )
    for one in bad["sessions"]:
        one["wire"] = one["client_version"] = HOSTILE
    for one in bad["step_phases"]:
        one["phase"] = HOSTILE
    bad["disk"] = {**disk_state(tick, 9), "directories": [HOSTILE, HOSTILE], "io_engine": HOSTILE}
    bad["device_updates"] = {
        "devices": [HOSTILE],
        "offload_fraction": 0.5,
        "device_elements": "5",
        "cpu_elements": "5",
        "problem": HOSTILE,
        "uses": [device_use(0, 5, name=HOSTILE, problem=HOSTILE, is_lost=True)],
        "log_bytes": "0",
    }
    bad["memory_lock"] = {
        "locked_bytes": "1",
        "pending_bytes": "0",
        "unlocked_bytes": "2",
        "reason": HOSTILE,
    }
    report = node_report(
        tick,
        [bad],
        [event(1, tick, "ERROR", HOSTILE, HOSTILE, job=HOSTILE, actor=HOSTILE)],
        version=HOSTILE,
        host=HOSTILE,
        state_dir=HOSTILE,
        instruction_set=HOSTILE,
        state_bytes_problem=HOSTILE,
        upgrade={"id": HOSTILE, "done": True, "engines_replaced": 0, "problems": [HOSTILE]},
        unanswered=[{"name": HOSTILE, "reason": HOSTILE}],
        memory_lock=bad["memory_lock"],
    )
    report["devices"] = _devices(bad)
    report["devices"]["note"] = HOSTILE
    report["tiers"]["memory"]["problem"] = HOSTILE
    for directory in report["tiers"]["directories"]:
        directory["directory"] = directory["problem"] = HOSTILE
    return report


def crowded_node(tick: int, count: int = 256) -> dict:
    jobs = [
        training_job(f"sweep-{index:03}", tick, 0.3 + index / 100, (1, 2, 0.1, 9, 0.4), 2)
        for index in range(count)
    ]
    jobs[200]["phase"] = "JOB_PHASE_FAILED"
    jobs[200]["reason"] = "RESOURCE_EXHAUSTED: no room"
    events = [
        event(
            i + 1,
            tick - 3000 + i,
            "INFO",
            "job_created",
            "One of many.",
            job=f"sweep-{i % count:03}",
        )
        for i in range(1000)
    ]
    return node_report(tick, jobs, events)
