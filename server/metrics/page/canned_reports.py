"""Parts of reports of nodes that do not exist, as the daemon prints them.

That is protobuf's JSON mapping of NodeReport with the names of the .proto, all defaults printed,
and integers of 64 bits as strings. sources_test.py compares them with the .proto.
"""

from __future__ import annotations

import datetime
import math

START = datetime.datetime(2026, 3, 14, 9, 20, tzinfo=datetime.timezone.utc)
GIB = 1 << 30

_BOUNDS_S = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100]
_PHASES = ("staging", "waiting", "decide", "update", "publish")


def timestamp(tick: float) -> str:
    """Returns the time `tick` seconds after START."""
    time = START + datetime.timedelta(seconds=tick)
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _wave(tick: float, period_s: float, share: float = 0.1) -> float:
    """Returns a factor around 1 that changes with time, the same in each run."""
    slow = math.sin(2 * math.pi * tick / period_s)
    quick = math.sin(tick * 12.9898) * 0.35
    return 1 + share * (slow + quick)


def _step_times(tick: float, mean_ms: tuple[float, ...], steps: int) -> dict:
    ms = [one * _wave(tick + index * 7, 97 + 31 * index) for index, one in enumerate(mean_ms)]
    times = {f"{phase}_ns": str(int(one * 1e6)) for phase, one in zip(_PHASES, ms)}
    return {"steps": steps, **times, "update_bytes": str(24 * GIB), "memory_share": 0.71}


def histogram(phase: str, step: int, ms: float) -> dict:
    place = next((i for i, bound in enumerate(_BOUNDS_S) if ms / 1e3 <= bound), 11)
    steps = [0] * 12
    for distance, share in ((-1, 0.12), (1, 0.05), (2, 0.002)):
        if 0 <= place + distance < 12:
            steps[place + distance] = int(step * share)
    steps[place] = step - sum(steps)
    return {
        "phase": phase,
        "bounds_s": _BOUNDS_S,
        "steps": [str(count) for count in steps],
        "sum_s": step * ms / 1e3,
    }


def session(job: str, rank: int, step: int, **fields) -> dict:
    return {
        "job": job,
        "rank": rank,
        "pid": str(40211 + rank),
        "uid": 1004,
        "wire": "shm",
        "client_version": "0.9.1",
        "attached_at": timestamp(-86400),
        "committed_step": str(step),
        "staged_parameters": "0",
        "gradient_bytes": str(4 * GIB),
        "attached": True,
        **fields,
    }


def job(name: str, step: int = 0, ranks: int = 0, at: str | None = None, **fields) -> dict:
    """Returns a job that is READY, with this many of its ranks attached."""
    return {
        "name": name,
        "uid": 1004,
        "phase": "JOB_PHASE_READY",
        "reason": "",
        "optimizer": "OPTIMIZER_KIND_ADAMW",
        "layout_hash": "q83vEjRWeJA=",
        "parameter_count": "291",
        "element_count": "8030261248",
        "group_count": 2,
        "world_size": ranks,
        "session_count": ranks,
        "partition": "PARTITION_MODE_GREEDY",
        "accumulate": False,
        "ephemeral": False,
        "committed_step": str(step),
        "skipped_steps": "0",
        "created_at": timestamp(-200000),
        "committed_at": at or timestamp(-3),
        "state_bytes": str(96 * GIB),
        "arrays": [],
        "engine_pid": "31877",
        "engine_restarts": 0,
        "state_dir": f"/dev/shm/optstate/{name}",
        "sessions": [session(name, rank, step) for rank in range(ranks)],
        "open_step": "",
        "open_load": "",
        "recovered_steps": "0",
        "rolled_back_runs": "0",
        "ranks_unknown": False,
        "state_unknown": False,
        "memory_bytes_per_s": 3.1e11,
        "step_phases": [],
        **fields,
    }


def training_job(
    name: str, tick: int, period_s: float, mean_ms: tuple, ranks: int, **fields
) -> dict:
    """Returns a job that takes a step each `period_s` seconds, more or less."""
    steps = (tick + 90000) / period_s + 4 * math.sin(tick / 40) / period_s
    step = int(steps)
    committed_s = tick - (steps - step) * period_s
    return job(
        name,
        step,
        ranks,
        at=timestamp(committed_s),
        last_outcome={
            "step": str(step),
            "applied": True,
            "found_inf": False,
            "gradient_norm": 0.84 * _wave(step, 60, 0.2),
            "clip_coefficient": 1.0,
            "update_ns": str(int(mean_ms[3] * 1e6)),
            "loss_scale": 0.0,
            "durable_step": "0",
        },
        last_step_times=_step_times(tick, mean_ms, 1),
        mean_step_times=_step_times(tick, mean_ms, 16),
        step_phases=[histogram(phase, step, ms) for phase, ms in zip(_PHASES, mean_ms)],
        **fields,
    )


def _directory_io(tick: int, bytes_per_s: float, queue: int, errors: int = 0) -> dict:
    seconds = tick + 90000 + 5 * math.sin(tick / 23) + 0.08 * math.sin(tick * 1.7)
    total = int(bytes_per_s * seconds)
    return {
        "bytes_read": str(total),
        "bytes_written": str(int(total * 0.9)),
        "reads": str(total // 4194304),
        "writes": str(total // 4194304),
        "syncs": "1200",
        "errors": str(errors),
        "queue_depth": str(int(queue * _wave(tick, 31, 0.5))),
        "busy_ns": str(int(0.61e9 * seconds)),
        "step_bytes_read": "0",
        "step_bytes_written": "0",
        "step_busy_ns": "0",
    }


def disk_state(tick: int, step: int) -> dict:
    return {
        "io_engine": "io_uring",
        "directories": ["/mnt/nvme0/optstate", "/mnt/nvme1/optstate"],
        "records": "4096",
        "frames": "610",
        "frame_bytes": "268435456",
        "durable_step": str(step // 10 * 10),
        "commits": str(step),
        "directory_io": [_directory_io(tick, 3.1e9, 24), _directory_io(tick, 2.9e9, 19, errors=2)],
        "cpu_ns": "812000000000",
        "cpu_ms_per_gb": 41.5,
        "last_verified_at": timestamp(-7400),
        "damaged_records": "0",
        "scrubs": "3",
        "step_ns": "6100000000",
        "step_waited_ns": "1900000000",
    }


def device_use(index: int, elements: int, **fields) -> dict:
    return {
        "index": index,
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bytes": str(80 * GIB),
        "buffers": 4,
        "buffer_bytes": str(2 * GIB),
        "elements": str(elements),
        "bytes_to_device": str(900 * GIB),
        "bytes_to_host": str(700 * GIB),
        "elements_per_s": 2.4e9,
        "copied_bytes_per_s": 4.4e10,
        "problem": "",
        "is_lost": False,
        "resident_elements": "0",
        "resident_bytes": str(24 * GIB),
        **fields,
    }


def status(tick: float, jobs: list[dict], **fields) -> dict:
    return {
        "version": "0.9.1",
        "protocol_version": 12,
        "pid": "2114",
        "started_at": timestamp(-1047600),
        "state_dir": "/dev/shm/optstate",
        "socket": "/run/optstate/optstated.sock",
        "listen": [],
        "draining": False,
        "job_count": len(jobs),
        "session_count": sum(one["session_count"] for one in jobs),
        "state_bytes": str(sum(int(one["state_bytes"]) for one in jobs)),
        "state_bytes_available": str(412 * GIB),
        "huge_pages": "2 MiB, by madvise",
        "instruction_set": "AVX3_ZEN4",
        "workers": 48,
        "host": "train-17.example",
        "unanswered": [],
        "state_bytes_problem": "",
        "memory_lock": {
            "locked_bytes": str(1102 * GIB),
            "pending_bytes": "0",
            "unlocked_bytes": "0",
            "reason": "",
        },
        **fields,
    }


def node_report(tick: float, jobs: list[dict], events: list[dict] | None = None, **fields) -> dict:
    return {
        "status": status(tick, jobs, **fields),
        "jobs": jobs,
        "tiers": _tiers(jobs),
        "devices": {
            "setting": "none",
            "devices": [],
            "note": "The daemon has no devices: set devices in its configuration.",
            "unanswered": [],
        },
        "events": events or [],
        "at": timestamp(tick),
    }


def _tier_job(one: dict, share: float = 1.0) -> dict:
    bytes_there = int(int(one["state_bytes"]) * share)
    return {"job": one["name"], "bytes": str(bytes_there), "frames_bytes": "0", "weight": 0}


def _tiers(jobs: list[dict]) -> dict:
    in_memory = [_tier_job(one) for one in jobs if "disk" not in one]
    used = sum(int(one["bytes"]) for one in in_memory)
    memory = {
        "capacity_bytes": str(max(1536 * GIB, used)),
        "used_bytes": str(used),
        "free_bytes": str(max(0, 1400 * GIB - used)),
        "problem": "",
        "budget_bytes": "0",
        "frames_bytes": "0",
        "bytes_per_s": 3.1e11,
        "jobs": in_memory,
        "directory": "/dev/shm/optstate",
    }
    directories = []
    on_disk = [_tier_job(one, 0.5) for one in jobs if "disk" in one]
    if on_disk:
        memory["budget_bytes"] = str(256 * GIB)
        memory["frames_bytes"] = str(152 * GIB)
        memory["jobs"].append(
            {**on_disk[0], "bytes": str(152 * GIB), "frames_bytes": str(152 * GIB)}
        )
        directories = [_directory_tier(f"/mnt/nvme{i}/optstate", on_disk) for i in (0, 1)]
    return {"memory": memory, "directories": directories}


def _directory_tier(directory: str, jobs: list[dict]) -> dict:
    used = sum(int(one["bytes"]) for one in jobs)
    return {
        "directory": directory,
        "capacity_bytes": str(3576 * GIB),
        "used_bytes": str(used),
        "free_bytes": str(3576 * GIB - used - 210 * GIB),
        "limit_bytes": "0",
        "read_bytes_per_s": 6.6e9,
        "write_bytes_per_s": 4.2e9,
        "mixed_bytes_per_s": 5.0e9,
        "measured_at": timestamp(-1047000),
        "io_engine": "io_uring",
        "problem": "",
        "weight": 1,
        "jobs": jobs,
    }


def event(sequence: int, tick: float, severity: str, kind: str, text: str, **fields) -> dict:
    return {
        "sequence": str(sequence),
        "at": timestamp(tick),
        "severity": f"EVENT_SEVERITY_{severity}",
        "kind": kind,
        "job": "",
        "actor": "",
        "text": text,
        **fields,
    }
